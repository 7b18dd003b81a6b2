// All that one algorithm computes in a call, in one entry: it prepares, takes its slices of the mini-batch one after the
// other, and closes. From Python each of these would be a call of its own.
#pragma once

#include "common/abi.h"

enum Operation : int64_t { FORWARD, BACKWARD_DATA, BACKWARD_FILTER };

// What does not change from call to call. x, w, y: of the whole mini-batch, without data.
// is_open: whether an earlier call has prepared the filter.
struct Stage {
  Geometry geometry;
  TensorArgument x, w, y;
  int64_t operation, is_open, tile, bias_bytes, prepared_bytes, scratch_bytes, threads, slice_count;
  const int64_t* slices;  // the first sample of each, and how many

  int thread_count() const {
    require_threads(threads);
    return int(threads);
  }
};

struct Addresses {
  void *x, *w, *y;
};

inline void set_to_zero(void* data, int64_t bytes, int threads) {
  constexpr int64_t PIECE = 1 << 18;
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < bytes; i += PIECE) std::memset(static_cast<char*>(data) + i, 0, std::min(PIECE, bytes - i));
}

// These samples of a mini-batch, which is what its sizes say.
inline TensorArgument samples(TensorArgument images, void* data, int64_t first, int64_t count) {
  const int64_t of_sample = images.c * images.h * images.w;
  images.data = (Elements{data, images.elements().type} + first * of_sample).first;
  images.bytes = times(times(count, of_sample), images.elements().element_bytes());
  images.n = count;
  return images;
}

// The part of an epilogue of all of y that is a slice's; of none: one that leaves y as it is.
inline EpilogueArgument of_slice(const EpilogueArgument* whole, const Stage& stage, const void* y,
                                 const TensorArgument& slice) {
  if (!whole || !whole->added) return {nullptr, 0, whole ? whole->activation : IDENTITY};
  require_equal("the number of bytes that are added to y", whole->bytes, stage.y.bytes);
  const ptrdiff_t offset = static_cast<const char*>(slice.data) - static_cast<const char*>(y);
  return {static_cast<char*>(whole->added) + offset, slice.bytes, whole->activation};
}

// open and close take w, step takes x and y of a slice. In backward filter nothing is prepared but zeros, to which all
// steps add; elsewhere nothing is closed. Returns 0, or the first refusal.
template <class Open, class Step, class Close>
int64_t run_stage(const Stage& stage, const Addresses& at, float* prepared, Open open, Step step, Close close) {
  const bool of_filter = stage.operation == BACKWARD_FILTER;
  require_between("the operation", stage.operation, FORWARD, BACKWARD_FILTER);
  stage.x.require("x", FLOAT64);  // steps know better what they take
  stage.y.require("y", FLOAT64);
  TensorArgument w = stage.w;
  w.data = at.w;
  if (of_filter) set_to_zero(prepared, stage.prepared_bytes, stage.thread_count());
  if (const int64_t result = of_filter || stage.is_open ? 0 : open(w); result < 0) return result;
  for (int64_t i = 0; i < stage.slice_count; ++i) {
    const int64_t first = stage.slices[2 * i], count = stage.slices[2 * i + 1];
    require_between("the first sample of a slice", first, 0, stage.x.n - 1);
    require_between("the number of samples of a slice", count, 1, stage.x.n - first);
    require_equal("the number of samples of y", stage.y.n, stage.x.n);
    const int64_t result = step(samples(stage.x, at.x, first, count), samples(stage.y, at.y, first, count));
    if (result < 0) return result;
  }
  return of_filter ? close(w) : 0;
}

// The same for algorithms whose entries have these parameters (packed_filter.py has the same in Python):
//   pack_filter(geometry, backward data, w, packed, bytes, threads)
//   forward(geometry, backward data, in, packed, bytes, bias, bytes, out, scratch, bytes, threads, epilogue or null)
//   accumulate(geometry, x, dy, sums, bytes, scratch, bytes, threads)
//   add_filter_gradient(geometry, sums, bytes, dw, threads)
template <class Bias, class PackFilter, class Forward, class Accumulate, class AddFilterGradient>
int64_t run_packed_filter_stage(const Stage& stage, const Addresses& at, Bias* bias, float* prepared, float* scratch,
                                const EpilogueArgument* epilogue, PackFilter pack_filter, Forward forward,
                                Accumulate accumulate, AddFilterGradient add_filter_gradient) {
  const Geometry* g = &stage.geometry;
  const bool backward = stage.operation == BACKWARD_DATA;
  const int threads = stage.thread_count();
  const auto open = [&](const TensorArgument& w) -> int64_t {
    return pack_filter(g, backward, &w, prepared, stage.prepared_bytes, threads);
  };
  const auto step = [&](const TensorArgument& x, const TensorArgument& y) -> int64_t {
    if (stage.operation == BACKWARD_FILTER)
      return accumulate(g, &x, &y, prepared, stage.prepared_bytes, scratch, stage.scratch_bytes, threads);
    const EpilogueArgument of_y = of_slice(epilogue, stage, at.y, y);
    return forward(g, backward, backward ? &y : &x, prepared, stage.prepared_bytes, bias, stage.bias_bytes,
                   backward ? &x : &y, scratch, stage.scratch_bytes, threads, backward ? nullptr : &of_y);
  };
  const auto close = [&](const TensorArgument& w) -> int64_t {
    return add_filter_gradient(g, prepared, stage.prepared_bytes, &w, threads);
  };
  return run_stage(stage, at, prepared, open, step, close);
}
