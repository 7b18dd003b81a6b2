// Winograd convolution, F(M x M, R x R), forward, backward data (forward with the turned filter) and backward filter.
//
// The tiles of a micro-batch are processed in blocks: a block is transformed, multiplied by the filter at each of the
// SIZE x SIZE points, and transformed back. A block is small enough to stay in a core's cache, so that the transformed
// data, which is larger than x, never goes to memory (L3 fusion: Gelashvili, Shavit, Zlateski 2019).
#include "winograd/winograd.h"

#include "common/pairs.h"

using namespace winograd;

namespace {

const Winograd* find(int64_t tile, int64_t taps, int64_t stride, bool of_pairs) {
  if (tile == 2 && taps == 3) return f2x3(stride, of_pairs && stride == 1);
  if (tile == 4 && taps == 3) return f4x3(stride);
  if (tile == 6 && taps == 3) return f6x3(stride);
  if (tile == 2 && taps == 5) return f2x5(stride);
  if (tile == 4 && taps == 5) return f4x5(stride);
  return nullptr;
}

// Return F(m, r) with the stage's stride.
const Winograd& winograd_of(const Stage& stage) {
  const Geometry& g = stage.geometry;
  g.require();
  require_between("the number of outputs of a tile", stage.tile, 1, LARGEST_SIZE);
  const bool is_square = g.r == g.s && g.stride_h == g.stride_w, is_dilated = g.dilation_h != 1 || g.dilation_w != 1;
  const bool of_pairs = stage.x.element == BFLOAT16 && multiplies_pairs();
  const Winograd* found = is_square && !is_dilated ? find(stage.tile, g.r, g.stride_h, of_pairs) : nullptr;
  if (found) return *found;
  const auto by = [](int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); };
  refuse(NOT_BUILT, "F(" + by(stage.tile, stage.tile) + ", " + by(g.r, g.s) + ") with the stride " +
                        by(g.stride_h, g.stride_w) + " and the dilation " + by(g.dilation_h, g.dilation_w) +
                        " is not among the compiled ones");
}

bool of_gradient(const Stage& stage) { return stage.operation == BACKWARD_FILTER; }

// Return the bytes of the transformed filter, or of its gradient's accumulator. c, k: channels read, written per group.
int64_t filter_bytes(const Winograd& winograd, const Stage& stage, int64_t c, int64_t k) {
  return bytes_of(times(stage.geometry.groups, winograd.filter_floats(of_gradient(stage), int(c), int(k))));
}

// Call body with the planes and the filter of each group: turned by 180 degrees in backward data, C and K exchanged.
template <class Body>
void for_groups(const Winograd& winograd, const Stage& stage, const TensorArgument& w, float* planes, Body body) {
  const int64_t groups = stage.geometry.groups;
  const bool backward_data = stage.backward_data();
  w.require_filter(groups, stage.geometry.r, stage.geometry.s);
  const FilterView first = w.filter(0, groups, backward_data);
  stage.require_prepared(filter_bytes(winograd, stage, first.rows, first.lanes));
  for (int64_t i = 0; i < groups; ++i) {
    const FilterView view = w.filter(i, groups, backward_data, backward_data);
    float* const of_group = planes + i * winograd.filter_floats(of_gradient(stage), view.rows, view.lanes);
    body(winograd.filter_planes(of_gradient(stage), of_group, view.rows, view.lanes), view);
  }
}

// Call body with each group, the images that it reads and writes, its planes of the filter, and the plan.
template <class Body>
void for_planes(const Winograd& winograd, const Stage& stage, const Slice& slice, Body body) {
  const int64_t groups = stage.geometry.groups;
  require_images(stage.geometry, slice.x, slice.y);
  const Images from = slice.in(stage).images(groups), to = slice.out(stage).images(groups);
  const Plan plan = winograd.plan_of(stage, from, to, stage.thread_count());
  stage.require_prepared(filter_bytes(winograd, stage, from.c, to.c));
  stage.require_scratch(bytes_of(plan.scratch_floats));
  for (int64_t i = 0; i < groups; ++i) {
    float* const planes = slice.prepared + i * winograd.filter_floats(of_gradient(stage), from.c, to.c);
    body(i, from.group(i), to.group(i), winograd.filter_planes(of_gradient(stage), planes, from.c, to.c), plan);
  }
}

struct CompiledWinograd {
  static int64_t prepared_bytes(const Stage& stage) {
    require_shapes(stage.geometry, stage.x, stage.y);
    const int64_t groups = stage.geometry.groups;
    return filter_bytes(winograd_of(stage), stage, stage.in().c / groups, stage.out().c / groups);
  }

  static int64_t scratch_bytes(const Stage& stage) {
    require_shapes(stage.geometry, stage.x, stage.y);
    require_between("the operation", stage.operation, FORWARD, BACKWARD_FILTER);
    const int64_t groups = stage.geometry.groups;
    const Images from = stage.in().images(groups), to = stage.out().images(groups);
    return bytes_of(winograd_of(stage).plan_of(stage, from, to, stage.thread_count()).scratch_floats);
  }

  static void open(const Stage& stage, const TensorArgument& w, float* u) {
    const Winograd& winograd = winograd_of(stage);
    const int threads = stage.thread_count();
    for_groups(winograd, stage, w, u, [&](const Planes& planes, const FilterView& view) {
      winograd.transform_filter(view, planes, threads);
    });
  }

  static void correlate(const Stage& stage, const Slice& slice) {
    const Winograd& winograd = winograd_of(stage);
    const TensorArgument& out = slice.out(stage);
    const Elements bias = checked_bias(slice.bias, stage.bias_bytes, out);
    const Epilogue epilogue = checked_epilogue(&slice.epilogue, out);
    const int threads = stage.thread_count();
    const auto run = [&](int64_t i, const Images& from, const Images& to, const Planes& u, const Plan& plan) {
      winograd.correlate(stage.backward_data(), from, u, {bias + i * to.c, epilogue}, to, plan, slice.scratch, threads);
    };
    for_planes(winograd, stage, slice, run);
  }

  static void accumulate(const Stage& stage, const Slice& slice) {
    const Winograd& winograd = winograd_of(stage);
    const int threads = stage.thread_count();
    const auto add = [&](int64_t, const Images& x, const Images& dy, const Planes& du, const Plan& plan) {
      winograd.accumulate(x, dy, du, plan, slice.scratch, threads);
    };
    for_planes(winograd, stage, slice, add);
  }

  static void close(const Stage& stage, const TensorArgument& dw, float* du) {
    const Winograd& winograd = winograd_of(stage);
    const int threads = stage.thread_count();
    for_groups(winograd, stage, dw, du, [&](const Planes& planes, const FilterView& view) {
      winograd.add_filter_gradient(planes, view, threads);
    });
  }
};

}  // namespace

MUCUDNN_ENTRIES(winograd, CompiledWinograd)
