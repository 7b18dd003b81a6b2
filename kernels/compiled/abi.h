// What Python hands over: tensors with sizes in elements and strides in floats (library.py has the same structures).
#pragma once

#include "image.h"

struct ImagesArgument {  // x or y
  float* data;
  int64_t n, c, h, w, stride_n, stride_c, stride_h, stride_w;

  Images group(int64_t index, int64_t groups) const {
    const int64_t channels = c / groups;
    return {data + index * channels * stride_c, int(n),          int(channels),       int(h),
            int(w),                             ptrdiff_t(stride_n), ptrdiff_t(stride_c), ptrdiff_t(stride_h),
            ptrdiff_t(stride_w)};
  }
};

// The filter, or its gradient, seen as lanes x rows x R x S: lanes lie in the vectors. Forward: lanes K, rows C; backward
// data: lanes C, rows K.
struct FilterView {
  float* w;
  int lanes, rows;
  ptrdiff_t lane, row, tap_row, tap_column;
  float* at(int l, int r, int i, int j) const { return w + l * lane + r * row + i * tap_row + j * tap_column; }
};

struct FilterArgument {  // w: (K, C // groups, R, S)
  float* data;
  int64_t k, c, r, s, stride_k, stride_c, stride_r, stride_s;

  FilterView group(int64_t index, int64_t groups, bool lanes_are_c) const {
    float* from = data + index * (k / groups) * stride_k;
    if (lanes_are_c)
      return {from, int(c), int(k / groups), ptrdiff_t(stride_c), ptrdiff_t(stride_k), ptrdiff_t(stride_r), ptrdiff_t(stride_s)};
    return {from, int(k / groups), int(c), ptrdiff_t(stride_k), ptrdiff_t(stride_c), ptrdiff_t(stride_r), ptrdiff_t(stride_s)};
  }
  // By 180 degrees.
  static FilterView turned(FilterView v, int r, int s) {
    return {v.w + (r - 1) * v.tap_row + (s - 1) * v.tap_column, v.lanes, v.rows, v.lane, v.row, -v.tap_row, -v.tap_column};
  }
};

constexpr int blocks_of(int channels) { return (channels + VL - 1) / VL; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
