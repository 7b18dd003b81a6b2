// How a tensor is read: as lines of elements that are contiguous in memory.
//
// Each unit has statistics of its own, and entries, each with coefficients and sums:
//   channels last: a unit is a sample, or all samples if the statistics are those of channels; its entries are the
//     elements of a period, which is one pixel, or a few, so that narrow pixels fill vectors
//   contiguous: a unit is a group of channels of a sample, or a channel of all samples; its entries are its channels
#pragma once

#include <algorithm>
#include <numeric>

#include "normalization/arguments.h"

namespace normalization {

constexpr int MASK_BYTES = VL > 8 ? VL / 8 : 1;  // of the bits of a vector

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t mask_bytes(int64_t elements) { return ceil_divide(elements, VL) * MASK_BYTES; }

// Elements of a plane, or of several of them, which are `stride` elements apart.
struct Line {
  int64_t unit, entry;           // the entry, if the line has a single one
  ptrdiff_t first, mask, count;  // the first element, the first byte of its mask, and how many elements of a plane
  ptrdiff_t stride, planes;      // with the channels last, a period and 1
};

struct Layout {
  bool is_last;                   // whether the channels are
  int64_t channels, sets;         // sets: of a unit
  int64_t units, entries, lines;  // entries, and lines: of a unit
  int64_t planes, size;           // planes of an entry; elements of a plane, or of a unit, channels last
  int64_t width;                  // elements of a period: with the same place in it, they share an entry
  int64_t set_elements, plane_mask, total_mask_bytes;

  explicit Layout(const Norm& norm) : channels(norm.c) {
    // One pixel has the same layout with the channels last; one channel, as a plane.
    is_last = norm.sets == OF_PIXELS || norm.pixels == 1 || (norm.channels_last && norm.c > 1);
    if (is_last) {
      const int64_t least_lines = 8 * norm.threads;  // so that threads get equal shares
      units = norm.sets == OF_CHANNELS ? 1 : norm.sets == OF_PIXELS ? norm.n * norm.pixels : norm.n;
      sets = norm.sets == OF_CHANNELS ? channels : std::max<int64_t>(norm.sets, 1);
      size = norm.n * norm.pixels / units * channels;
      const int64_t repeats = channels < MOST_VECTORS * VL ? VL / std::gcd<int64_t>(channels, VL) : 1;
      entries = width = std::min(repeats * channels, size);
      const int64_t periods = ceil_divide(size, width);
      periods_ = std::clamp<int64_t>(periods * units / least_lines, 1, std::max<int64_t>(16384 / width, 32));
      planes = planes_of_line_ = bunches_ = 1;
      lines = pieces_ = ceil_divide(periods, periods_);
      plane_mask = mask_bytes(width) * periods;
      total_mask_bytes = plane_mask * units;
      set_elements = size / sets;
    } else {
      const bool are_channels = norm.sets == OF_CHANNELS;
      entries = are_channels ? 1 : channels / norm.sets;
      units = are_channels ? channels : norm.n * norm.sets;
      sets = 1;
      planes = are_channels ? norm.n : 1;
      size = norm.pixels;
      width = VL;
      const int64_t periods = ceil_divide(size, width);
      periods_ = ceil_divide(periods, ceil_divide(size, LINE));
      pieces_ = ceil_divide(periods, periods_);
      planes_of_line_ = std::clamp<int64_t>(LINE / size, 1, planes);
      bunches_ = ceil_divide(planes, planes_of_line_);
      lines = entries * bunches_ * pieces_;
      plane_mask = mask_bytes(size);
      total_mask_bytes = plane_mask * norm.n * channels;
      set_elements = planes * size * entries;
    }
  }

  int64_t all_lines() const { return units * lines; }
  int64_t padded() const { return ceil_divide(entries, LINE_FLOATS) * LINE_FLOATS; }
  int64_t channel(int64_t unit, int64_t entry) const {
    const int64_t place = is_last ? entry : unit * entries + entry;
    return place < channels ? place : place % channels;
  }

  // Return the number of an entry's plane; with the channels last a unit is one.
  int64_t plane(int64_t unit, int64_t entry, int64_t index) const {
    return is_last ? unit : unit * entries + entry + index * channels;
  }

  // Those of a unit follow each other: of each plane of its entries, all pieces.
  Line line(int64_t index) const {
    const int64_t unit = lines == 1 ? index : index / lines, of_unit = index - unit * lines;
    const int64_t bunch = pieces_ == 1 ? of_unit : of_unit / pieces_, begin = (of_unit - bunch * pieces_) * periods_;
    const int64_t entry = bunches_ == 1 ? bunch : bunch / bunches_, at = (bunch - entry * bunches_) * planes_of_line_;
    const int64_t first = plane(unit, entry, at);
    return {unit,
            entry,
            first * size + begin * width,
            first * plane_mask + begin * mask_bytes(width),
            std::min(periods_ * width, size - begin * width),
            is_last ? width : channels * size,
            std::min(planes_of_line_, planes - at)};
  }

  // Return the line of an index that counts down; the pieces of a plane still follow each other, as processors foresee.
  Line reversed(int64_t index) const {
    return line(pieces_ == 1 || is_last ? index : index - index % pieces_ + pieces_ - 1 - index % pieces_);
  }

 private:
  static constexpr int64_t LINE = 256 * VL;    // most elements of a line of planes: sums in float are short
  static constexpr int64_t MOST_VECTORS = 8;  // of a pixel that is repeated to fill vectors

  int64_t pieces_, periods_;          // lines of a plane, periods of a line
  int64_t bunches_, planes_of_line_;  // lines of all planes of an entry, and planes of each, if they are small
};

}  // namespace normalization
