// The structures that Python passes to the compiled code, and their checks. abi.cpp lists what library.py mirrors.
#pragma once

#include "common/axis.h"
#include "common/checks.h"
#include "common/epilogue.h"
#include "common/filter.h"
#include "common/image.h"
#include "common/prologue.h"

// The order of dimensions in memory, each but the first with the channels last: NCDHW, NDHWC, NHDWC.
enum MemoryFormat : int64_t { CONTIGUOUS, CHANNELS_LAST, ROWS_OF_FRAMES };

// A dense tensor: x or y (N, C, D, H, W), or w or dw (K, C // groups, T, R, S). d is 1 for images and their filters.
struct TensorArgument {
  void* data;
  int64_t bytes, n, c, d, h, w, memory_format, element;

  Elements elements() const { return {data, Element(element)}; }

  ptrdiff_t stride_n() const { return c * d * h * w; }
  ptrdiff_t stride_c() const { return memory_format == CONTIGUOUS ? d * h * w : 1; }
  ptrdiff_t stride_d() const { return memory_format == ROWS_OF_FRAMES ? stride_w() * w : stride_w() * w * h; }
  ptrdiff_t stride_h() const { return memory_format == ROWS_OF_FRAMES ? stride_w() * w * d : stride_w() * w; }
  ptrdiff_t stride_w() const { return memory_format == CONTIGUOUS ? 1 : c; }

  // last: the last element type that is allowed.
  void require_sizes(const char* name, Element last) const {
    require_between("the type of elements", element, FLOAT32, last);
    require_between("the memory format", memory_format, CONTIGUOUS, ROWS_OF_FRAMES);
    for (const int64_t size : {c, d, h, w}) require_size(name, size);
    require_between(name, n, 1, INT64_MAX);
  }

  void require_data(const char* name) const {
    require_all_bytes(name, bytes, times(times(times(n, c), d), times(h, w)), elements().element_bytes());
  }

  Images images(int64_t groups) const {  // of the first group, and the first frame
    return {elements(), n,          int(c / groups), int(h), int(w),    stride_n(),
            stride_c(), stride_h(), stride_w(),      0,      stride_d()};
  }

  FilterView filter(int64_t group, int64_t groups, bool lanes_are_c, bool turned = false, int64_t tap = 0) const {
    const Elements from = elements() + (group * (n / groups) * stride_n() + tap * stride_d());
    const FilterView view{from,       int(n / groups), int(c),     int(h),     int(w),
                          stride_n(), stride_c(),      stride_h(), stride_w(), turned};
    return lanes_are_c ? view.exchanged() : view;
  }
};

// The operands of activation(y + added). added has the element type and layout of y, or is null. moments: where those of
// the result are added up by each thread, or null.
//
// What is computed of x as it is read (Prologue), of so many channels, or of 0: function((x - mean) * inverse * weight
// + bias). weight and bias have the type `parameter_element`, or are null.
struct EpilogueArgument {
  void* added;
  int64_t bytes, activation;
  double* moments;
  int64_t moments_bytes;
  int64_t channels, parameter_element, function;
  double slope;
  const float *mean, *inverse;
  void *weight, *bias;
};

// Filter size, stride, padding, dilation and groups of a convolution. pad_h: padding above. It differs from that below if
// x and y are rows of larger images, and both may be negative then: so many rows of x are not read. Of volumes, the
// filter's taps from first_tap on are used, and pad_d is the number of frames of padding before x that the first of them
// reads, which may be negative; frames behind x are padding, too.
struct Geometry {
  int64_t r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, pad_below;
  int64_t stride_d, pad_d, dilation_d, first_tap, taps;

  void require() const {
    for (const int64_t size : {r, s, stride_h, stride_w, dilation_h, dilation_w, stride_d, dilation_d, taps})
      require_size("a filter size, stride or dilation", size);
    for (const int64_t pad : {pad_h, pad_below, pad_d}) require_between("the padding", pad, -LARGEST_SIZE, LARGEST_SIZE);
    require_between("the padding", pad_w, 0, LARGEST_SIZE);
    require_between("the first tap", first_tap, 0, LARGEST_SIZE);
    require_size("the number of elements of a filter", r * s);
    for (const int64_t extent : {dilation_h * (r - 1) + 1, dilation_w * (s - 1) + 1, dilation_d * (taps - 1) + 1})
      require_size("the extent of the filter", extent);
    require_size("the number of groups", groups);
  }

  Axis frames(bool backward_data) const { return {taps, stride_d, pad_d, dilation_d, backward_data}; }
  Axis rows(bool backward_data) const { return {r, stride_h, pad_h, dilation_h, backward_data}; }
  Axis columns(bool backward_data) const { return {s, stride_w, pad_w, dilation_w, backward_data}; }
};

// Return the size of y along one dimension. pad: on both sides together.
inline int64_t output_size(int64_t size, int64_t pad, int64_t taps, int64_t dilation, int64_t stride) {
  const int64_t padded = size + pad, extent = dilation * (taps - 1) + 1;
  require_size("a size of the padded input", padded);
  require_between("the extent of the filter", extent, 1, padded);
  return (padded - extent) / stride + 1;
}
