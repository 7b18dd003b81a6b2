// Direct convolution for few channels per group: depthwise, with channel multipliers, and with small groups.
//
// Every output is a sum over the few channels of its group, too few for a matrix product: the aim is to move each image
// once, and to load little per multiplication. There are two kinds of loops. Over columns (tile.h): vectors hold
// neighbouring columns of a channel, read from zero-padded windows. Over pixels (pixels.h): vectors hold neighbouring
// channels of a pixel, read in place, or gathered if maps are small.
#include "common/stage.h"
#include "depthwise/gradient.h"
#include "depthwise/outputs.h"
#include "depthwise/pixel_gradient.h"
#include "depthwise/pixel_outputs.h"

using namespace depthwise;

namespace {

int64_t filter_bytes(const FilterShape& shape, bool of_gradient) {
  return bytes_of(times(shape.packed.floats(), of_gradient ? parts_of_batch(shape.packed) : 1));
}

template <class AnyPlan>
int64_t bytes_of_plan(const AnyPlan& plan, int threads) {
  return bytes_of(times(plan.thread_floats(), threads));
}

// Call body with the plan of the loops chosen for this convolution, and the function that runs them.
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

struct Depthwise {
  static int64_t prepared_bytes(const Stage& stage) { return filter_bytes(shape_of(stage, stage.w), of_filter(stage)); }

  static int64_t scratch_bytes(const Stage& stage) {
    const Geometry& g = stage.geometry;
    require_shapes(g, stage.x, stage.y);
    const int threads = stage.thread_count();
    const auto bytes = [&](const auto& plan, auto) { return bytes_of_plan(plan, threads); };
    if (of_filter(stage)) return with_gradient_plan(g, stage.x, stage.y, bytes);
    return with_output_plan(g, stage.backward_data(), stage.in(), stage.out(), bytes);
  }

  static void open(const Stage& stage, const TensorArgument& w, float* packed) {
    pack_filter(require_filter(stage, w), w, packed, stage.thread_count());
  }

  static void correlate(const Stage& stage, const Slice& slice) {
    const TensorArgument &in = slice.in(stage), &out = slice.out(stage);
    const int threads = require_call(stage, slice);
    const Epilogue epilogue = checked_epilogue(&slice.epilogue, out);
    const AsFloats of_channels(checked_bias(slice.bias, stage.bias_bytes, out), out.c);
    with_output_plan(stage.geometry, stage.backward_data(), in, out, [&](const auto& plan, auto run) {
      stage.require_prepared(bytes_of(plan.filter.floats()));
      stage.require_scratch(bytes_of_plan(plan, threads));
      run(plan, in.images(1), slice.prepared, of_channels.data(), epilogue, out.images(1), slice.scratch, threads);
    });
  }

  static void accumulate(const Stage& stage, const Slice& slice) {
    const int threads = require_call(stage, slice);
    with_gradient_plan(stage.geometry, slice.x, slice.y, [&](const auto& plan, auto accumulate) {
      stage.require_prepared(plan.sums_bytes());
      stage.require_scratch(bytes_of_plan(plan, threads));
      accumulate(plan, slice.x.images(1), slice.y.images(1), slice.prepared, slice.scratch, threads);
    });
  }

  static void close(const Stage& stage, const TensorArgument& dw, const float* sums) {
    const FilterShape shape = require_filter(stage, dw);
    add_filter_gradient(shape, parts_of_batch(shape.packed), sums, dw, stage.thread_count());
  }

 private:
  static bool of_filter(const Stage& stage) { return stage.operation == BACKWARD_FILTER; }

  static FilterShape shape_of(const Stage& stage, const TensorArgument& w) {
    stage.geometry.require();
    w.require_filter(stage.geometry.groups, stage.geometry.r, stage.geometry.s);
    return filter_shape(stage.geometry, stage.backward_data(), w);
  }

  static FilterShape require_filter(const Stage& stage, const TensorArgument& w) {
    const FilterShape shape = shape_of(stage, w);
    stage.require_prepared(filter_bytes(shape, of_filter(stage)));
    return shape;
  }

  static int require_call(const Stage& stage, const Slice& slice) {
    require_images(stage.geometry, slice.x, slice.y);
    require_equal("the memory format of y", slice.y.memory_format, slice.x.memory_format);
    return stage.thread_count();
  }
};

}  // namespace

MUCUDNN_ENTRIES(depthwise, Depthwise)
