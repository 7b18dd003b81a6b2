// Loads and stores of filters in either memory format, VL lanes at a time.
#pragma once

#include <algorithm>
#include <utility>

#include "common/elements.h"

constexpr int blocks_of(int channels) { return (channels + VL - 1) / VL; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The filter, or its gradient, viewed as lanes x rows x R x S, with lanes in the vectors. Forward: lanes K, rows C;
// backward data: lanes C, rows K, turned by 180 degrees if it is computed as a correlation. Strides in elements.
struct FilterView {
  Elements w;
  int lanes, rows, r, s;
  ptrdiff_t lane, row, tap_row, tap_column;
  bool turned;

  int taps() const { return r * s; }
  FilterView exchanged() const { return {w, rows, lanes, r, s, row, lane, tap_row, tap_column, turned}; }
  ptrdiff_t offset(int l, int row_index, int tap) const {
    const int memory_tap = turned ? taps() - 1 - tap : tap;
    return l * lane + row_index * row + memory_tap / s * tap_row + memory_tap % s * tap_column;
  }
};

// VL rows of one block of lanes: element (row, tap, lane) is at buffer[(row * taps + tap) * VL + lane].
struct FilterBlock {
  const FilterView& view;
  int first_lane, first_row;

  int lanes() const { return std::min(VL, view.lanes - first_lane); }
  int rows() const { return std::min(VL, view.rows - first_row); }
  ptrdiff_t offset(int lane, int row, int tap) const { return view.offset(first_lane + lane, first_row + row, tap); }
};

// Fill the buffer from w; lanes and rows that do not exist are zero.
void load_filter_block(const FilterBlock& block, float* buffer);

// Add the buffer to dw, rounding once.
void add_filter_block(const FilterBlock& block, float* buffer);
