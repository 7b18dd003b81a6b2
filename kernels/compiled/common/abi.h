// The structures that Python passes to the compiled code, and their checks. abi.cpp lists what library.py mirrors.
#pragma once

#include "common/checks.h"
#include "common/epilogue.h"
#include "common/filter.h"
#include "common/image.h"

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
  void require_sizes(const char* name, Element last = FLOAT16) const {
    require_between("the type of elements", element, FLOAT32, last);
    require_between("the memory format", memory_format, CONTIGUOUS, ROWS_OF_FRAMES);
    for (const int64_t size : {c, d, h, w}) require_size(name, size);
    require_between(name, n, 1, INT64_MAX);
  }

  void require(const char* name, Element last = FLOAT16) const {
    require_sizes(name, last);
    require_all_bytes(name, bytes, times(times(times(n, c), d), times(h, w)), elements().element_bytes());
  }

  void require_filter(int64_t groups, int64_t r, int64_t s, Element last = FLOAT16, int64_t t = 1) const {
    require("the filter", last);
    require_size("the number of filters", n);
    require_size("the number of elements of a filter", times(h, w));
    require_equal("the depth of the filter", d, t);
    require_equal("the height of the filter", h, r);
    require_equal("the width of the filter", w, s);
    require_divides(groups, n);
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

inline void require_same_elements(const TensorArgument& x, const TensorArgument& y) {
  require_equal("the type of elements of y", y.element, x.element);
}

// Check the bias of y, which has y's element type or is null, and return it.
inline Elements checked_bias(void* bias, int64_t bytes, const TensorArgument& y) {
  if (bias) require_bytes("the bias", bytes, times(y.c, y.elements().element_bytes()));
  return {bias, y.elements().type};
}

// The operands of activation(y + added). added has the element type and layout of y, or is null.
struct EpilogueArgument {
  void* added;
  int64_t bytes, activation;
};

// Check an epilogue of y and return it; null becomes the identity.
inline Epilogue checked_epilogue(const EpilogueArgument* epilogue, const TensorArgument& y) {
  if (!epilogue) return {y.elements(), nullptr, IDENTITY};
  require_between("the activation", epilogue->activation, IDENTITY, SILU);
  if (epilogue->added)
    require_all_bytes("what is added to y", epilogue->bytes, times(times(times(y.n, y.c), y.d), times(y.h, y.w)),
                      y.elements().element_bytes());
  return {y.elements(), epilogue->added, Activation(epilogue->activation)};
}

inline void require_groups(int64_t groups, int64_t channels_in, int64_t channels_out) {
  require_divides(groups, channels_in);
  require_divides(groups, channels_out);
}

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
};

// Return the size of y along one dimension. pad: on both sides together.
inline int64_t output_size(int64_t size, int64_t pad, int64_t taps, int64_t dilation, int64_t stride) {
  const int64_t padded = size + pad, extent = dilation * (taps - 1) + 1;
  require_size("a size of the padded input", padded);
  require_between("the extent of the filter", extent, 1, padded);
  return (padded - extent) / stride + 1;
}

// Check the shapes of x and y against each other, as in forward; their data may be null. Any depth is allowed.
inline void require_volumes(const Geometry& g, const TensorArgument& x, const TensorArgument& y,
                            Element last = FLOAT16) {
  g.require();
  x.require_sizes("x", last);
  y.require_sizes("y", last);
  require_same_elements(x, y);
  require_groups(g.groups, x.c, y.c);
  require_equal("the number of samples of y", y.n, x.n);
  require_equal("the height of y", y.h, output_size(x.h, g.pad_h + g.pad_below, g.r, g.dilation_h, g.stride_h));
  require_equal("the width of y", y.w, output_size(x.w, 2 * g.pad_w, g.s, g.dilation_w, g.stride_w));
}

// Do the same for images.
inline void require_shapes(const Geometry& g, const TensorArgument& x, const TensorArgument& y,
                           Element last = FLOAT16) {
  require_volumes(g, x, y, last);
  for (const int64_t depth : {x.d, y.d, g.taps}) require_equal("the depth", depth, 1);
}

inline void require_images(const Geometry& g, const TensorArgument& x, const TensorArgument& y,
                           Element last = FLOAT16) {
  x.require("x", last);
  y.require("y", last);
  require_shapes(g, x, y, last);
}
