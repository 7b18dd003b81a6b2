// A step of a program: one operator on one band of rows, with every size and address resolved.
#pragma once

#include "common/stage.h"
#include "common/tasks.h"

namespace program {

enum Kind : int64_t {
  CONVOLUTION, COPY, ELEMENTWISE, MAX_POOL, AVERAGE_POOL, RESIZE, SHUFFLE, MOMENTS, NORMALIZE, SCALE
};

enum Combination : int64_t { NONE, ADD, MULTIPLY };

// An address: `offset` bytes behind the entry `base` of the table that a call passes. Base 0 is the null pointer, so
// that an offset from it is an address.
struct Place {
  int64_t base, offset;

  template <class T = void>
  T* in(char* const* bases) const {
    return reinterpret_cast<T*>(bases[base] + offset);
  }
};

// Some rows of a tensor (N, C, H, W); strides in elements, of the type `element`. c == 0 if there is none.
struct View {
  Place place;
  int64_t element, n, c, h, w, stride_n, stride_c, stride_h, stride_w;
};

typedef int64_t (*StageEntry)(const Stage*, void*, void*, void*, void*, float*, float*, const EpilogueArgument*);

// x and other are read, out is written; all have elements of one type, which is double in copies only. What `numbers`,
// `values` and `tables` hold depends on the kind:
//   CONVOLUTION: stage and entry; other is added to the result; operation is the activation; places: the filter, the
//     bias, the prepared filter and the scratch buffer; numbers: bytes of these two buffers
//   COPY: numbers: bytes of an element
//   ELEMENTWISE: operation with other; numbers: the function; values: a factor and an addend before it
//   MAX_POOL, AVERAGE_POOL: numbers: Pooling
//   RESIZE: numbers: whether rows and columns are interpolated; tables: Resizing
//   SHUFFLE: numbers: the factor, and the rows to leave out above
//   MOMENTS: numbers: groups of channels
//   NORMALIZE: numbers: the function, groups, and elements of a group; places: moments, and weight and bias, of the
//     type of x; values: epsilon
//   SCALE: numbers: the function; places: factors and addends of the channels, of the type of x; values: the least norm
//     by which pixels are divided first, and what is added to the variance with which they are standardized first, each
//     below 0 if they are not
struct Step {
  Kind kind;
  int64_t operation;
  const Stage* stage;
  StageEntry entry;
  View out, x, other;
  Place places[4];
  int64_t numbers[12];
  const void* tables[6];
  double values[2];
};

// Call body(sample, row) for all rows of a view, in parallel.
template <class Body>
static inline void each_row(const View& out, int threads, Body body) {
  parallel_tasks(threads, out.n * out.h, true, [&](int64_t i) { body(i / out.h, i % out.h); });
}

// Elements of a view whose channels are contiguous, column after column.
template <class T>
struct Rows {
  T* first;
  int64_t stride_n, stride_h;

  Rows(const View& view, char* const* bases)
      : first(view.place.in<T>(bases)), stride_n(view.stride_n), stride_h(view.stride_h) {}
  T* at(int64_t n, int64_t h) const { return first + n * stride_n + h * stride_h; }
};

}  // namespace program
