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

// Call body with the plan of the loops that are chosen for a convolution, and the function that runs them.
template <class Body>
auto with_output_plan(const Stage& stage, Body body) {
  const Geometry& g = stage.geometry;
  const TensorArgument &in = stage.in(), &out = stage.out();
  const Axes axes = axes_of(g, stage.backward_data(), out);
  if (is_by_pixels(axes, in, channels_of(g, in, out), out.w))
    return body(pixel_plan<ComputeTile>(g, axes, in, out, stage.normalizes), run_pixels);
  return body(WindowOutputPlan(g, axes, in, out), run_windows);
}

template <class Body>
auto with_gradient_plan(const Stage& stage, Body body) {
  const Geometry& g = stage.geometry;
  const TensorArgument &x = stage.x, &dy = stage.y;
  const Axes axes = axes_of(g, false, dy);
  if (is_by_pixels(axes, x, channels_of(g, x, dy), dy.w))
    return body(pixel_gradient_plan(g, axes, x, dy, stage.normalizes), accumulate_pixels);
  return body(WindowGradientPlan(g, axes, x, dy), accumulate_windows);
}

struct Depthwise : TakesImages {
  static constexpr bool NORMALIZES = true;

  static void require(const Stage& stage) {
    TakesImages::require(stage);
    if (!stage.normalizes) return;
    for (const int64_t channels : {stage.x.c, stage.y.c})
      require_equal("the number of channels that are normalized", channels, stage.geometry.groups);
  }

  static int64_t prepared_bytes(const Stage& stage) {
    const PackedFilter packed = shape_of(stage).packed;
    return bytes_of(times(packed.floats(), stage.backward_filter() ? parts_of_batch(packed) : 1));
  }

  static int64_t scratch_bytes(const Stage& stage) {
    const auto bytes = [&](const auto& plan, auto) { return scratch_bytes_of(plan, stage); };
    return stage.backward_filter() ? with_gradient_plan(stage, bytes) : with_output_plan(stage, bytes);
  }

  static void open(const Stage& stage, float* packed) {
    pack_filter(shape_of(stage), stage.w, packed, stage.thread_count());
  }

  static void correlate(const Slice& slice) {
    const TensorArgument &in = slice.in(), &out = slice.out();
    const AsFloats of_channels(slice.bias, out.c);
    with_output_plan(slice, [&](const auto& plan, auto run) {
      run(plan, in.images(1), slice.prepared, of_channels.data(), slice.prologue, slice.epilogue, out.images(1),
          slice.scratch(scratch_bytes_of(plan, slice)), slice.thread_count());
    });
  }

  static void accumulate(const Slice& slice) {
    with_gradient_plan(slice, [&](const auto& plan, auto accumulate) {
      accumulate(plan, slice.x.images(1), slice.y.images(1), slice.prologue, slice.prepared,
                 slice.scratch(scratch_bytes_of(plan, slice)), slice.thread_count());
    });
  }

  static void close(const Stage& stage, const float* sums) {
    const FilterShape shape = shape_of(stage);
    add_filter_gradient(shape, parts_of_batch(shape.packed), sums, stage.w, stage.thread_count());
  }

 private:
  static FilterShape shape_of(const Stage& stage) {
    return filter_shape(stage.geometry, stage.backward_data(), stage.w);
  }

  template <class AnyPlan>
  static int64_t scratch_bytes_of(const AnyPlan& plan, const Stage& stage) {
    return bytes_of(times(plan.thread_floats(), stage.thread_count()));
  }
};

}  // namespace

MUCUDNN_ENTRIES(depthwise, Depthwise)
