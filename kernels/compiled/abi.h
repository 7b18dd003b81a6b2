// What Python hands over: tensors with sizes in elements and strides in floats (library.py has the same structures).
#pragma once

#include "filter.h"
#include "image.h"

struct ImagesArgument {  // x or y
  float* data;
  int64_t n, c, h, w, stride_n, stride_c, stride_h, stride_w;

  Images group(int64_t index, int64_t groups) const {
    const int64_t channels = c / groups;
    return {data + index * channels * stride_c,
            int(n),
            int(channels),
            int(h),
            int(w),
            ptrdiff_t(stride_n),
            ptrdiff_t(stride_c),
            ptrdiff_t(stride_h),
            ptrdiff_t(stride_w)};
  }
};

struct FilterArgument {  // w or dw: (K, C // groups, R, S)
  float* data;
  int64_t k, c, r, s, stride_k, stride_c, stride_r, stride_s;

  FilterView group(int64_t index, int64_t groups, bool lanes_are_c, bool turned = false) const {
    float* from = data + index * (k / groups) * stride_k;
    const FilterView view{from,     int(k / groups), int(c),   int(r),   int(s),
                          stride_k, stride_c,        stride_r, stride_s, turned};
    return lanes_are_c ? view.exchanged() : view;
  }
};
