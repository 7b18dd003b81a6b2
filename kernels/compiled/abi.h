// The structures that Python hands over (library.py has the same), and what must hold of them.
#pragma once

#include "checks.h"
#include "filter.h"
#include "image.h"

// A dense float32 tensor: x or y (N, C, H, W), or w or dw (K, C // groups, R, S).
struct TensorArgument {
  float* data;
  int64_t bytes, n, c, h, w, channels_last;

  ptrdiff_t stride_n() const { return c * h * w; }
  ptrdiff_t stride_c() const { return channels_last ? 1 : h * w; }
  ptrdiff_t stride_h() const { return channels_last ? w * c : w; }
  ptrdiff_t stride_w() const { return channels_last ? c : 1; }

  void require(const char* name) const {
    for (const int64_t size : {c, h, w}) require_size(name, size);
    require_between(name, n, 1, INT64_MAX);
    require_all_bytes(name, bytes, bytes_of(times(times(n, c), times(h, w))));
  }

  void require_filter(int64_t groups, int64_t r, int64_t s) const {
    require("the filter");
    require_size("the number of filters", n);
    require_size("the number of elements of a filter", times(h, w));
    require_equal("the height of the filter", h, r);
    require_equal("the width of the filter", w, s);
    require_divides(groups, n);
  }

  Images images(int64_t groups) const {  // the first group's
    return {data, n, int(c / groups), int(h), int(w), stride_n(), stride_c(), stride_h(), stride_w()};
  }

  FilterView filter(int64_t group, int64_t groups, bool lanes_are_c, bool turned = false) const {
    float* from = data + group * (n / groups) * stride_n();
    const FilterView view{from,       int(n / groups), int(c),     int(h),     int(w),
                          stride_n(), stride_c(),      stride_h(), stride_w(), turned};
    return lanes_are_c ? view.exchanged() : view;
  }
};

inline void require_groups(int64_t groups, int64_t channels_in, int64_t channels_out) {
  require_divides(groups, channels_in);
  require_divides(groups, channels_out);
}
