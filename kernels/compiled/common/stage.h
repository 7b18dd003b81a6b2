// One algorithm's part of a call behind one entry point: it opens, processes its slices of the mini-batch one after
// another, and closes. Otherwise Python would have to make a call for each of these.
#pragma once

#include "common/abi.h"

enum Operation : int64_t { FORWARD, BACKWARD_DATA, BACKWARD_FILTER };

enum Phase : int64_t { OPEN = 1, STEP = 2, CLOSE = 4 };  // a bit mask of what to run

// The constants of a stage, the same in every call. x, w, y: of the whole mini-batch, without data.
struct Stage {
  Geometry geometry;
  TensorArgument x, w, y;
  int64_t operation, phases, tile, bias_bytes, prepared_bytes, scratch_bytes, threads, slice_count;
  const int64_t* slices;  // the first sample and the number of samples of each

  bool backward_data() const { return operation == BACKWARD_DATA; }
  const TensorArgument& in() const { return backward_data() ? y : x; }
  const TensorArgument& out() const { return backward_data() ? x : y; }
  int thread_count() const {
    require_threads(threads);
    return int(threads);
  }
  void require_prepared(int64_t needs) const { require_bytes("prepared", prepared_bytes, needs); }
  void require_scratch(int64_t needs) const { require_bytes("scratch", scratch_bytes, needs); }
};

// The operands of one micro-batch, and the buffers of the whole call.
struct Slice {
  TensorArgument x, w, y;
  void* bias;
  float *prepared, *scratch;
  EpilogueArgument epilogue;  // of y

  const TensorArgument& in(const Stage& stage) const { return stage.backward_data() ? y : x; }
  const TensorArgument& out(const Stage& stage) const { return stage.backward_data() ? x : y; }
};

inline void set_to_zero(void* data, int64_t bytes, int threads) {
  constexpr int64_t PIECE = 1 << 18;
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < bytes; i += PIECE) std::memset(static_cast<char*>(data) + i, 0, std::min(PIECE, bytes - i));
}

// Return `count` samples from `first` on. images: the mini-batch, whose data is passed separately.
inline TensorArgument samples(TensorArgument images, void* data, int64_t first, int64_t count) {
  const int64_t of_sample = images.stride_n();
  images.data = (Elements{data, images.elements().type} + first * of_sample).first;
  images.bytes = times(times(count, of_sample), images.elements().element_bytes());
  images.n = count;
  return images;
}

// Return the part of y's epilogue that belongs to a slice; the identity if there is none.
inline EpilogueArgument of_slice(const EpilogueArgument* whole, const Stage& stage, const void* y,
                                 const TensorArgument& slice) {
  if (!whole || !whole->added) return {nullptr, 0, whole ? whole->activation : IDENTITY};
  const int64_t element_bytes = stage.y.elements().element_bytes();
  require_all_bytes("what is added to y", whole->bytes, stage.y.bytes / element_bytes, element_bytes);
  const ptrdiff_t offset = static_cast<const char*>(slice.data) - static_cast<const char*>(y);
  return {static_cast<char*>(whole->added) + offset, slice.bytes, whole->activation};
}

// Run the phases of a stage. Backward filter opens by zeroing an accumulator, to which its steps add; only it closes.
// The functions of an Algorithm are static, and check their arguments (checks.h) before they touch memory:
//   prepared_bytes(stage), scratch_bytes(stage): what a call needs
//   open(stage, w, prepared), correlate(stage, slice): forward, and backward data
//   accumulate(stage, slice), close(stage, dw, prepared): backward filter
template <class Algorithm>
int64_t run_stage(const Stage& stage, void* x, void* w, void* y, void* bias, float* prepared, float* scratch,
                  const EpilogueArgument* epilogue) {
  require_between("the operation", stage.operation, FORWARD, BACKWARD_FILTER);
  if (epilogue) require_equal("the operation that an epilogue follows", stage.operation, FORWARD);
  stage.x.require("x", FLOAT64);  // each algorithm checks its own types
  stage.y.require("y", FLOAT64);
  const bool of_filter = stage.operation == BACKWARD_FILTER;
  TensorArgument of_w = stage.w;
  of_w.data = w;
  if (stage.phases & OPEN && of_filter) set_to_zero(prepared, stage.prepared_bytes, stage.thread_count());
  if (stage.phases & OPEN && !of_filter) Algorithm::open(stage, of_w, prepared);
  for (int64_t i = 0; i < (stage.phases & STEP ? stage.slice_count : 0); ++i) {
    const int64_t first = stage.slices[2 * i], count = stage.slices[2 * i + 1];
    require_between("the first sample of a slice", first, 0, stage.x.n - 1);
    require_between("the number of samples of a slice", count, 1, stage.x.n - first);
    require_equal("the number of samples of y", stage.y.n, stage.x.n);
    Slice slice{samples(stage.x, x, first, count), of_w, samples(stage.y, y, first, count), bias, prepared, scratch, {}};
    slice.epilogue = of_slice(epilogue, stage, y, slice.y);
    of_filter ? Algorithm::accumulate(stage, slice) : Algorithm::correlate(stage, slice);
  }
  if (stage.phases & CLOSE && of_filter) Algorithm::close(stage, of_w, prepared);
  return 0;
}

// Define the entry points of an algorithm, for Python. They return 0, a size, or a Refusal (checks.h).
#define MUCUDNN_ENTRIES(name, Algorithm)                                                                              \
  extern "C" {                                                                                                        \
  __attribute__((visibility("default"))) int64_t mucudnn_##name##_prepared_bytes(const Stage* stage) {                \
    return refusable([&] { return Algorithm::prepared_bytes(*stage); });                                              \
  }                                                                                                                   \
  __attribute__((visibility("default"))) int64_t mucudnn_##name##_scratch_bytes(const Stage* stage) {                 \
    return refusable([&] { return Algorithm::scratch_bytes(*stage); });                                               \
  }                                                                                                                   \
  __attribute__((visibility("default"))) int64_t mucudnn_##name##_stage(                                              \
      const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared, float* scratch,                     \
      const EpilogueArgument* epilogue) {                                                                             \
    return refusable([&] { return run_stage<Algorithm>(*stage, x, w, y, bias, prepared, scratch, epilogue); });       \
  }                                                                                                                   \
  }
