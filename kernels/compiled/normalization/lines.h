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

constexpr int MASK_BYTES = VL > 8 ? VL / 8 : 1;  // of the bits of a vector

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
      periods_ = std::clamp<int64_t>(periods * units / least_lines, 1, std::max<int64_t>(4 * LINE / width, 16));
      planes = 1;
      lines = pieces_ = ceil_divide(periods, periods_);
      mask_ = mask_bytes(width) * periods;
      total_mask_bytes = mask_ * units;
      set_elements = size / sets;
    } else {
      const bool are_channels = norm.sets == OF_CHANNELS;
      units = are_channels ? channels : norm.n * norm.sets;
      sets = 1;
      rows = are_channels ? 1 : channels / norm.sets;
      planes = are_channels ? norm.n : 1;
      size = norm.pixels;
      width = 2 * VL;  // two sums, which do not wait for each other
      const int64_t periods = ceil_divide(size, width), of_all = norm.n * channels;
      const int64_t pieces = std::min(ceil_divide(least_lines, of_all), ceil_divide(size, LINE));
      periods_ = ceil_divide(periods, pieces);
      pieces_ = ceil_divide(periods, periods_);
      lines = planes * pieces_;
      mask_ = mask_bytes(size);
      total_mask_bytes = mask_ * of_all;
      set_elements = planes * size * rows;
    }
  }

  int64_t all_rows() const { return units * rows; }
  int64_t all_lines() const { return all_rows() * lines; }
  int64_t padded() const { return ceil_divide(width, LINE_FLOATS) * LINE_FLOATS; }
  int64_t channels_of_row() const { return is_last ? channels : 1; }

  // Call body(i, channel, set) for the coefficients of a row, with the set of statistics.
  template <class Body>
  void each_entry(int64_t row, Body body) const {
    if (!is_last) return body(int64_t(0), row % channels, row / rows);
    for (int64_t i = 0; i < width;)
      for (int64_t channel = 0, set = row * sets; channel < channels; ++set)
        for (int64_t rest = channels / sets; rest > 0; --rest) body(i++, channel++, set);
  }

  // Return the index of the first element of a row's plane; with the channels last a row is one.
  ptrdiff_t plane(int64_t row, int64_t index) const { return (row + index * channels) * size; }

  Line line(int64_t index) const {
    const int64_t row = index / lines, place = index % lines;
    const int64_t of_row = pieces_ == 1 ? place : place / pieces_, begin = (place - of_row * pieces_) * periods_;
    const int64_t mask = (row + of_row * channels) * mask_ + begin * mask_bytes(width);
    return {row, plane(row, of_row) + begin * width, mask, std::min(periods_ * width, size - begin * width)};
  }

 private:
  static constexpr int64_t LINE = 4096;       // most elements of a line of a plane, which few sums in float share
  static constexpr int64_t MOST_VECTORS = 8;  // of a pixel that is repeated to fill vectors

  int64_t pieces_, periods_, mask_;  // lines of a plane, periods of a line, bytes of a plane's mask
};

}  // namespace normalization
