// One algorithm's part of a call behind one entry point: it opens, processes its slices of the mini-batch one after
// another, and closes. Otherwise Python would have to make a call for each of these.
#pragma once

#include "common/abi.h"
#include "common/functions.h"

enum Operation : int64_t { FORWARD, BACKWARD_DATA, BACKWARD_FILTER };

enum Phase : int64_t { OPEN = 1, STEP = 2, CLOSE = 4 };  // a bit mask of what to run

// The constants of a stage, the same in every call. x, w, y: of the whole mini-batch, without data. normalizes: whether
// calls have a Prologue.
struct Stage {
  Geometry geometry;
  TensorArgument x, w, y;
  int64_t operation, phases, tile, bias_bytes, prepared_bytes, scratch_bytes, threads, normalizes, slice_count;
  const int64_t* slices;  // the first sample and the number of samples of each

  bool backward_data() const { return operation == BACKWARD_DATA; }
  bool backward_filter() const { return operation == BACKWARD_FILTER; }
  int thread_count() const { return int(threads); }

  // The tensors that are read and written; in backward filter, x and dy.
  const TensorArgument& in() const { return backward_data() ? y : x; }
  const TensorArgument& out() const { return backward_data() ? x : y; }
  Images images_in() const { return in().images(geometry.groups); }  // of the first group, and the first frame
  Images images_out() const { return out().images(geometry.groups); }
  FilterView filter(int64_t group) const { return w.filter(group, geometry.groups, backward_data()); }

  // Check that the operands belong together. last: the last element type that is allowed.
  void require_sizes(Element last) const {
    const Geometry& g = geometry;
    require_between("the operation", operation, FORWARD, BACKWARD_FILTER);
    require_threads(threads);
    g.require();
    x.require_sizes("x", last);
    y.require_sizes("y", last);
    require_equal("the type of elements of y", y.element, x.element);
    require_equal("the memory format of y", y.memory_format, x.memory_format);
    for (const int64_t channels : {x.c, y.c}) require_divides(g.groups, channels);
    require_equal("the number of samples of y", y.n, x.n);
    require_equal("the height of y", y.h, output_size(x.h, g.pad_h + g.pad_below, g.r, g.dilation_h, g.stride_h));
    require_equal("the width of y", y.w, output_size(x.w, 2 * g.pad_w, g.s, g.dilation_w, g.stride_w));

    w.require_sizes("the filter", last);
    require_equal("the type of elements of the filter", w.element, x.element);
    require_equal("the number of filters", w.n, y.c);
    require_equal("the number of channels of a filter", w.c, x.c / g.groups);
    require_equal("the height of the filter", w.h, g.r);
    require_equal("the width of the filter", w.w, g.s);
    require_between("the last tap", g.first_tap + g.taps, 1, w.d);
  }
};

// A micro-batch of a stage, with the data of its operands. Everything is checked but the size of the scratch buffer.
struct Slice : Stage {
  Elements bias;      // null, or of all channels of y
  Epilogue epilogue;  // of y
  Prologue prologue;  // of x
  float* prepared;    // prepared_bytes(stage) bytes at least

  Slice(const Stage& whole, const Elements& of_channels, const Epilogue& after, const Prologue& before, float* of_call,
        float* of_step)
      : Stage(whole), bias(of_channels), epilogue(after), prologue(before), prepared(of_call), scratch_(of_step) {}

  // Return the scratch buffer, in which a call needs so many bytes.
  float* scratch(int64_t needs) const {
    require_bytes("scratch", scratch_bytes, needs);
    return scratch_;
  }

 private:
  float* scratch_;
};

inline void set_to_zero(void* data, int64_t bytes, int threads) {
  constexpr int64_t PIECE = 1 << 18;
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < bytes; i += PIECE) std::memset(static_cast<char*>(data) + i, 0, std::min(PIECE, bytes - i));
}

// Return `count` samples of a mini-batch from `first` on.
inline TensorArgument samples(TensorArgument images, int64_t first, int64_t count) {
  const int64_t of_sample = images.stride_n();
  images.data = (images.elements() + first * of_sample).first;
  images.bytes = times(times(count, of_sample), images.elements().element_bytes());
  images.n = count;
  return images;
}

// Check an epilogue of y and return it; null is the identity.
inline Epilogue checked_epilogue(const EpilogueArgument* epilogue, const Stage& stage) {
  const Elements y = stage.y.elements();
  if (!epilogue || !(epilogue->added || epilogue->activation != IDENTITY || epilogue->moments))
    return {y, nullptr, IDENTITY, {}};
  require_equal("the operation that an epilogue follows", stage.operation, FORWARD);
  require_between("the activation", epilogue->activation, IDENTITY, SILU);
  if (epilogue->added)
    require_all_bytes("what is added to y", epilogue->bytes, stage.y.bytes / y.element_bytes(), y.element_bytes());
  const Moments moments{epilogue->moments, stage.y.c, y};
  if (moments) {
    require_equal("whether the channels of y are last, of which there are moments", stage.y.memory_format != CONTIGUOUS, 1);
    require_bytes("moments", epilogue->moments_bytes, times(moments.doubles(stage.threads), sizeof(double)));
  }
  return {y, epilogue->added, Activation(epilogue->activation), moments};
}

// Check a prologue and return it, with its coefficients in a table; a stage that normalizes has one.
inline Prologue checked_prologue(const EpilogueArgument* argument, const Stage& stage, std::vector<float>& table) {
  const int64_t channels = argument ? argument->channels : 0;
  require_equal("the number of channels with means", channels, stage.normalizes ? stage.x.c : 0);
  if (channels == 0) return {};
  require_between("the function of x", argument->function, IDENTITY, GELU_TANH);
  require_between("the type of weights", argument->parameter_element, FLOAT32, FLOAT16);
  const AsFloats weight({argument->weight, Element(argument->parameter_element)}, channels);
  const AsFloats bias({argument->bias, Element(argument->parameter_element)}, channels);
  const int64_t row = channels + Prologue::PADDING;
  table.resize(3 * row);
  for (int64_t i = 0; i < channels; ++i) {
    table[i] = argument->mean[i];
    table[row + i] = argument->inverse[i] * (weight.data() ? weight.data()[i] : 1);
    table[2 * row + i] = bias.data() ? bias.data()[i] : 0;
  }
  return {table.data(), row, argument->function, float(argument->slope)};
}

// What an algorithm asks of the sizes of a stage, unless it says otherwise.
struct TakesImages {
  static constexpr Element LAST_ELEMENT = FLOAT16;
  static constexpr bool NORMALIZES = false;  // whether it has prologues
  static void require(const Stage& stage) {
    for (const int64_t depth : {stage.x.d, stage.y.d, stage.w.d, stage.geometry.taps})
      require_equal("the depth", depth, 1);
  }
};

template <class Algorithm>
void require_sizes(const Stage& stage) {
  stage.require_sizes(Algorithm::LAST_ELEMENT);
  require_between("whether x is normalized", stage.normalizes, 0, Algorithm::NORMALIZES && !stage.backward_data());
  Algorithm::require(stage);
}

// Run the phases of a stage. Backward filter opens by zeroing an accumulator, to which its steps add; only it closes.
// Everything is checked here, before memory is touched, but the scratch buffer, which a slice hands out only if it is
// large enough. The functions of an Algorithm are static:
//   require(stage): checks what else it asks of the sizes
//   prepared_bytes(stage), scratch_bytes(stage): what a call needs
//   open(stage, prepared), correlate(slice): forward, and backward data
//   accumulate(slice), close(stage, prepared): backward filter, of which w is dw
template <class Algorithm>
int64_t run_stage(Stage stage, void* x, void* w, void* y, void* bias, float* prepared, float* scratch,
                  const EpilogueArgument* epilogue) {
  stage.x.data = x, stage.w.data = w, stage.y.data = y;
  require_sizes<Algorithm>(stage);
  stage.x.require_data("x");
  stage.w.require_data("the filter");
  stage.y.require_data("y");
  require_bytes("prepared", stage.prepared_bytes, Algorithm::prepared_bytes(stage));
  const Elements of_channels{bias, Element(stage.y.element)};
  if (bias) require_bytes("the bias", stage.bias_bytes, times(stage.out().c, of_channels.element_bytes()));
  const Epilogue after = checked_epilogue(epilogue, stage);
  std::vector<float> coefficients;
  const Prologue before = checked_prologue(epilogue, stage, coefficients);

  if (stage.phases & OPEN && stage.backward_filter())
    set_to_zero(prepared, stage.prepared_bytes, stage.thread_count());
  else if (stage.phases & OPEN)
    Algorithm::open(stage, prepared);
  for (int64_t i = 0; i < (stage.phases & STEP ? stage.slice_count : 0); ++i) {
    const int64_t first = stage.slices[2 * i], count = stage.slices[2 * i + 1];
    require_between("the first sample of a slice", first, 0, stage.x.n - 1);
    require_between("the number of samples of a slice", count, 1, stage.x.n - first);
    Slice slice(stage, of_channels, after, before, prepared, scratch);
    slice.x = samples(stage.x, first, count);
    slice.y = samples(stage.y, first, count);
    slice.epilogue.y = slice.y.elements();
    slice.epilogue.added = after.added + first * stage.y.stride_n();
    stage.backward_filter() ? Algorithm::accumulate(slice) : Algorithm::correlate(slice);
  }
  if (after.moments) after.moments.merge(stage.thread_count());
  if (stage.phases & CLOSE && stage.backward_filter()) Algorithm::close(stage, prepared);
  return 0;
}

// Define the entry points of an algorithm, for Python. They return 0, a size, or a Refusal (checks.h).
#define MUCUDNN_ENTRIES(name, Algorithm)                                                                              \
  extern "C" {                                                                                                        \
  __attribute__((visibility("default"))) int64_t mucudnn_##name##_prepared_bytes(const Stage* stage) {                \
    return refusable([&] { return require_sizes<Algorithm>(*stage), Algorithm::prepared_bytes(*stage); });            \
  }                                                                                                                   \
  __attribute__((visibility("default"))) int64_t mucudnn_##name##_scratch_bytes(const Stage* stage) {                 \
    return refusable([&] { return require_sizes<Algorithm>(*stage), Algorithm::scratch_bytes(*stage); });             \
  }                                                                                                                   \
  __attribute__((visibility("default"))) int64_t mucudnn_##name##_stage(                                              \
      const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared, float* scratch,                     \
      const EpilogueArgument* epilogue) {                                                                             \
    return refusable([&] { return run_stage<Algorithm>(*stage, x, w, y, bias, prepared, scratch, epilogue); });       \
  }                                                                                                                   \
  }
