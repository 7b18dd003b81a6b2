// How a tensor is read: as lines of elements that are contiguous in memory.
//
// Each unit has statistics of its own. It consists of rows, all of whose lines have the same coefficients, a period of
// `width` elements:
//   channels last: a unit is a sample, or all samples if the statistics are those of channels, and one row; a period is
//     one pixel, or a few, so that narrow pixels fill vectors
//   contiguous: a unit is a group of channels of a sample, or a channel of all samples; a row is a plane, or the planes
//     of a channel, and has a single coefficient
#pragma once

#include <algorithm>
#include <numeric>

#include "normalization/arguments.h"

namespace normalization {

constexpr int TILE = REGISTERS / 8;     // vectors that are summed side by side, each in a register of its own
constexpr int MASK_BYTES = VL > 8 ? VL / 8 : 1;  // bits of a vector

inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t mask_bytes(int64_t elements) { return ceil_divide(elements, VL) * MASK_BYTES; }

struct Line {
  int64_t row;
  ptrdiff_t first, mask, count;  // the first element, the first byte of its mask, and how many elements
};

struct Layout {
  bool is_last;                                  // whether the channels are
  int64_t channels, sets;                        // sets: of a unit
  int64_t units, rows, lines;                    // rows: of a unit; lines: of a row
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
      size_ = norm.n * norm.pixels / units * channels;
      const int64_t repeats = channels < MOST_VECTORS * VL ? VL / std::gcd<int64_t>(channels, VL) : 1;
      width = std::min(repeats * channels, size_);
      const int64_t periods = ceil_divide(size_, width);
      const int64_t most = std::max<int64_t>(1, LINE / width);
      periods_ = std::clamp<int64_t>(ceil_divide(periods * units, least_lines), 1, most);
      lines = ceil_divide(periods, periods_);
      mask_ = mask_bytes(width) * periods;
      total_mask_bytes = mask_ * units;
      set_elements = size_ / sets;
    } else {
      const bool are_channels = norm.sets == OF_CHANNELS;
      units = are_channels ? channels : norm.n * norm.sets;
      sets = 1;
      rows = are_channels ? 1 : channels / norm.sets;
      planes_ = are_channels ? norm.n : 1;
      size_ = norm.pixels;
      width = TILE * VL;
      const int64_t periods = ceil_divide(size_, width), planes = norm.n * channels;
      const int64_t pieces = std::min(ceil_divide(least_lines, planes), ceil_divide(size_, LINE));
      periods_ = ceil_divide(periods, pieces);
      pieces_ = ceil_divide(periods, periods_);
      lines = planes_ * pieces_;
      mask_ = mask_bytes(size_);
      total_mask_bytes = mask_ * planes;
      set_elements = planes_ * size_ * rows;
    }
  }

  int64_t all_rows() const { return units * rows; }
  int64_t all_lines() const { return all_rows() * lines; }
  int64_t coefficients() const { return ceil_divide(entries(), LINE_FLOATS) * LINE_FLOATS; }  // with room for vectors

  int64_t entries() const { return is_last ? width : 1; }  // coefficients of a row

  // Call body(i, channel, set) for the coefficients of a row, with the set of statistics.
  template <class Body>
  void each_entry(int64_t row, Body body) const {
    if (!is_last) return body(int64_t(0), row % channels, row / rows);
    for (int64_t i = 0; i < width;)
      for (int64_t channel = 0, set = row * sets; channel < channels; ++set)
        for (int64_t rest = channels / sets; rest > 0; --rest) body(i++, channel++, set);
  }

  // Return the index of a set's first element.
  ptrdiff_t first_of(int64_t set) const {
    if (is_last) return set / sets * size_ + set % sets * (channels / sets);
    return line(set * rows * lines).first;
  }

  Line line(int64_t index) const {
    const int64_t row = index / lines;
    int64_t piece = index % lines, plane = row;
    if (pieces_ == 1 && planes_ > 1) plane = row + piece * channels, piece = 0;
    else if (planes_ > 1) plane = row + piece / pieces_ * channels, piece %= pieces_;
    const int64_t begin = piece * periods_ * width;
    return {row, plane * size_ + begin, plane * mask_ + piece * periods_ * mask_bytes(width),
            std::min(periods_ * width, size_ - begin)};
  }

 private:
  static constexpr int64_t LINE = 8192;      // elements of a line that are in the first-level caches at once
  static constexpr int64_t MOST_VECTORS = 8;  // of a pixel that is repeated to fill vectors

  int64_t size_;  // elements of a plane, or of a unit with the channels last
  int64_t planes_ = 1, pieces_ = 1, periods_, mask_;
};

}  // namespace normalization
