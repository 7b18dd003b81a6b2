// Convolution of few channels a group by direct sums: depthwise, with channel multipliers, and small groups.
//
// Every output is a sum over the few channels of its group, so there is no matrix product: what is left is to move each
// image once, and to load little for each multiplication. There are two kinds of loops. Over columns (tile.h): vectors
// are neighbouring columns of a channel, read from windows with zeros around them. Over pixels (pixels.h): vectors are
// neighbouring channels of a pixel, read where they lie, or gathered where maps are small.
#include "common/stage.h"
#include "depthwise/gradient.h"
#include "depthwise/outputs.h"
#include "depthwise/pixel_gradient.h"
#include "depthwise/pixel_outputs.h"

using namespace depthwise;

namespace {

int64_t prepared_bytes(const FilterShape& shape, bool of_gradient) {
  return bytes_of(times(shape.packed.floats(), of_gradient ? parts_of_batch(shape.packed) : 1));
}

void require_filter(const Geometry& g, bool backward_data, bool of_gradient, const TensorArgument& w, int64_t prepared,
                    int threads) {
  g.require();
  w.require_filter(g.groups, g.r, g.s);
  require_bytes("prepared", prepared, prepared_bytes(filter_shape(g, backward_data, w), of_gradient));
  require_threads(threads);
}

void require_call(const Geometry& g, const TensorArgument& x, const TensorArgument& y, int threads) {
  require_images(g, x, y);
  require_equal("the memory format of y", y.channels_last, x.channels_last);
  require_threads(threads);
}

template <class AnyPlan>
int64_t scratch_bytes(const AnyPlan& plan, int threads) {
  return bytes_of(times(plan.thread_floats(), threads));
}

// Calls body with the plan of the loops that this convolution gets, and with what runs it.
template <class Body>
auto with_output_plan(const Geometry& g, bool backward, const TensorArgument& in, const TensorArgument& out,
                      Body body) {
  const Axes axes = backward ? backward_axes(g, out) : forward_axes(g);
  if (is_by_pixels(axes, in, channels_of(g, in, out), out.w)) return body(output_plan(g, axes, in, out), run_pixels);
  return body(make_plan(g, axes, in, out), run_windows);
}

template <class Body>
auto with_gradient_plan(const Geometry& g, const TensorArgument& x, const TensorArgument& y, Body body) {
  const Axes axes = forward_axes(g);
  if (is_by_pixels(axes, x, channels_of(g, x, y), y.w))
    return body(pixel_gradient_plan(g, axes, x, y), accumulate_pixels);
  return body(gradient_plan(g, axes, x, y), accumulate_windows);
}

}  // namespace

// The entries that library.py calls. All return 0, a size, or why they refused (checks.h).
#pragma GCC visibility push(default)
extern "C" {

// Size of the packed filter, or of its gradient's sums; w: without data.
int64_t mucudnn_depthwise_prepared_bytes(const Geometry* g, int64_t operation, const TensorArgument* w) {
  return refusable([&] {
    g->require();
    w->require_filter(g->groups, g->r, g->s);
    return prepared_bytes(filter_shape(*g, operation == BACKWARD_DATA, *w), operation == BACKWARD_FILTER);
  });
}

// Scratch, whatever the number of samples; x, y: without data.
int64_t mucudnn_depthwise_scratch_bytes(const Geometry* g, int64_t operation, const TensorArgument* x,
                                        const TensorArgument* y, int threads) {
  return refusable([&] {
    require_call(*g, *x, *y, threads);
    const auto bytes = [&](const auto& plan, auto) { return scratch_bytes(plan, threads); };
    if (operation == BACKWARD_FILTER) return with_gradient_plan(*g, *x, *y, bytes);
    const bool backward = operation == BACKWARD_DATA;
    return with_output_plan(*g, backward, backward ? *y : *x, backward ? *x : *y, bytes);
  });
}

int64_t mucudnn_depthwise_pack_filter(const Geometry* g, int backward_data, const TensorArgument* w, float* packed,
                                      int64_t packed_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, backward_data, false, *w, packed_bytes, threads);
    pack_filter(filter_shape(*g, backward_data, *w), *w, packed, threads);
    return 0;
  });
}

// Forward: x -> y, with an epilogue or null. Backward data: in = dy, out = dx.
int64_t mucudnn_depthwise_forward(const Geometry* g, int backward_data, const TensorArgument* in, const float* packed,
                                  int64_t packed_bytes, const float* bias, int64_t bias_bytes,
                                  const TensorArgument* out, float* scratch, int64_t given_bytes, int threads,
                                  const EpilogueArgument* of_out) {
  return refusable([&]() -> int64_t {
    require_call(*g, backward_data ? *out : *in, backward_data ? *in : *out, threads);
    if (of_out) require_equal("an epilogue of backward data", backward_data, 0);
    const Epilogue epilogue = checked_epilogue(of_out, *out);
    return with_output_plan(*g, backward_data, *in, *out, [&](const auto& plan, auto run) -> int64_t {
      require_bytes("prepared", packed_bytes, bytes_of(plan.filter.floats()));
      require_bytes("scratch", given_bytes, scratch_bytes(plan, threads));
      if (bias) require_bytes("the bias", bias_bytes, bytes_of(out->c));
      run(plan, in->images(1), packed, bias, epilogue, out->images(1), scratch, threads);
      return 0;
    });
  });
}

int64_t mucudnn_depthwise_accumulate(const Geometry* g, const TensorArgument* x, const TensorArgument* dy, float* sums,
                                     int64_t sums_bytes, float* scratch, int64_t given_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_call(*g, *x, *dy, threads);
    return with_gradient_plan(*g, *x, *dy, [&](const auto& plan, auto accumulate) -> int64_t {
      require_bytes("prepared", sums_bytes, plan.sums_bytes());
      require_bytes("scratch", given_bytes, scratch_bytes(plan, threads));
      accumulate(plan, x->images(1), dy->images(1), sums, scratch, threads);
      return 0;
    });
  });
}

int64_t mucudnn_depthwise_add_filter_gradient(const Geometry* g, const float* sums, int64_t sums_bytes,
                                              const TensorArgument* dw, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, false, true, *dw, sums_bytes, threads);
    const FilterShape shape = filter_shape(*g, false, *dw);
    add_filter_gradient(shape, parts_of_batch(shape.packed), sums, *dw, threads);
    return 0;
  });
}

int64_t mucudnn_depthwise_stage(const Stage* stage, float* x, float* w, float* y, const float* bias, float* prepared,
                                float* scratch, const EpilogueArgument* epilogue) {
  return refusable([&] {
    return run_packed_filter_stage(*stage, {x, w, y}, bias, prepared, scratch, epilogue, mucudnn_depthwise_pack_filter,
                                   mucudnn_depthwise_forward, mucudnn_depthwise_accumulate,
                                   mucudnn_depthwise_add_filter_gradient);
  });
}

}  // extern "C"
#pragma GCC visibility pop
