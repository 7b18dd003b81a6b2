// How a tensor is read: as lines of elements that are contiguous in memory.
//
// Each unit has statistics of its own. It consists of rows, all of whose lines have the same coefficients, a period of
// `width` elements:
//   channels last: a unit is a sample, or all samples if the statistics are those of channels, and one row; a period is
//     one pixel, or a few, so that narrow pixels fill vectors
//   contiguous: a unit is a group of channels of a sample, or a channel of all samples, or a few if planes are small; a
//     row is a plane, or the planes of a channel, and has a single coefficient
#pragma once

#include <algorithm>
#include <numeric>

#include "normalization/arguments.h"

namespace normalization {

constexpr int MASK_BYTES = VL > 8 ? VL / 8 : 1;  // of the bits of a vector

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t mask_bytes(int64_t elements) { return ceil_divide(elements, VL) * MASK_BYTES; }

struct Line {
  int64_t row;
  ptrdiff_t first, mask, count;  // the first element, the first byte of its mask, and how many elements
};

// Where the sums of a set are: in the rows of a unit from `row` on, of the channels from `begin` on.
struct Span {
  int64_t row, end_row, begin, end;
};

struct Layout {
  bool is_last;                                  // whether the channels are
  int64_t channels, sets;                        // sets: of a unit
  int64_t units, rows, lines;                    // rows, and lines: of a unit
  int64_t planes, size;                          // planes of a row; elements of a plane, or of a unit, channels last
  int64_t width;                                 // elements of a period
  int64_t set_elements;
  int64_t total_mask_bytes;

  explicit Layout(const Norm& norm) : channels(norm.c), rows(1) {
    // One pixel has the same layout with the channels last; one channel, as a plane.
    is_last = norm.sets == OF_PIXELS || norm.pixels == 1 || (norm.channels_last && norm.c > 1);
    const int64_t least_lines = 8 * norm.threads;  // so that threads get equal shares
    if (is_last) {
      units = norm.sets == OF_CHANNELS ? 1 : norm.sets == OF_PIXELS ? norm.n * norm.pixels : norm.n;
      sets = norm.sets == OF_CHANNELS ? channels : std::max<int64_t>(norm.sets, 1);
      size = norm.n * norm.pixels / units * channels;
      const int64_t repeats = channels < MOST_VECTORS * VL ? VL / std::gcd<int64_t>(channels, VL) : 1;
      width = std::min(repeats * channels, size);
      const int64_t periods = ceil_divide(size, width);
      periods_ = std::clamp<int64_t>(periods * units / least_lines, 1, std::max<int64_t>(8 * LINE / width, 16));
      planes = 1;
      lines = pieces_ = ceil_divide(periods, periods_);
      mask_ = mask_bytes(width) * periods;
      total_mask_bytes = mask_ * units;
      set_elements = size / sets;
    } else {
      const bool are_channels = norm.sets == OF_CHANNELS;
      for (rows = std::clamp<int64_t>(SMALL / norm.pixels, 1, channels); are_channels && channels % rows; --rows) {}
      if (!are_channels) rows = channels / norm.sets;
      units = are_channels ? channels / rows : norm.n * norm.sets;
      sets = are_channels ? rows : 1;
      planes = are_channels ? norm.n : 1;
      size = norm.pixels;
      width = size < SMALL ? VL : 2 * VL;  // of large planes two sums, which do not wait for each other
      const int64_t periods = ceil_divide(size, width);
      periods_ = ceil_divide(periods, ceil_divide(size, LINE));
      pieces_ = ceil_divide(periods, periods_);
      lines = rows * planes * pieces_;
      mask_ = mask_bytes(size);
      total_mask_bytes = mask_ * norm.n * channels;
      set_elements = planes * size * rows / sets;
    }
  }

  int64_t all_lines() const { return units * lines; }
  int64_t padded() const { return ceil_divide(width, LINE_FLOATS) * LINE_FLOATS; }
  int64_t channels_of_row() const { return is_last ? channels : 1; }

  Span span(int64_t set) const {  // of those of a unit
    if (is_last) return {0, 1, set * (channels / sets), (set + 1) * (channels / sets)};
    return {set * (rows / sets), (set + 1) * (rows / sets), 0, 1};
  }

  // Call body(i, channel, set) for the coefficients of a row, with the set of statistics.
  template <class Body>
  void each_entry(int64_t row, Body body) const {
    if (!is_last) return body(int64_t(0), row % channels, row / (rows / sets));
    for (int64_t i = 0; i < width;)
      for (int64_t channel = 0, set = row * sets; channel < channels; ++set)
        for (int64_t rest = channels / sets; rest > 0; --rest) body(i++, channel++, set);
  }

  // Return the index of the first element of a row's plane; with the channels last a row is one.
  ptrdiff_t plane(int64_t row, int64_t index) const { return (row + index * channels) * size; }

  // Those of a unit follow each other: of each plane of its rows, all pieces.
  Line line(int64_t index) const {
    const int64_t of_planes = rows * pieces_, unit = index / (planes * of_planes), place = index % (planes * of_planes);
    const int64_t at = place / of_planes, rest = place % of_planes;
    const int64_t of_unit = pieces_ == 1 ? rest : rest / pieces_, begin = (rest - of_unit * pieces_) * periods_;
    const int64_t row = unit * rows + of_unit, mask = (row + at * channels) * mask_ + begin * mask_bytes(width);
    return {row, plane(row, at) + begin * width, mask, std::min(periods_ * width, size - begin * width)};
  }

  // Return the line of an index that counts down; the pieces of a plane still follow each other, as processors foresee.
  Line reversed(int64_t index) const {
    return line(is_last ? index : index - index % pieces_ + pieces_ - 1 - index % pieces_);
  }

 private:
  static constexpr int64_t LINE = 2048;       // most elements of a line of a plane, which few sums in float share
  static constexpr int64_t SMALL = 1024;      // elements of planes, several of which are read in turn
  static constexpr int64_t MOST_VECTORS = 8;  // of a pixel that is repeated to fill vectors

  int64_t pieces_, periods_, mask_;  // lines of a plane, periods of a line, bytes of a plane's mask
};

}  // namespace normalization
