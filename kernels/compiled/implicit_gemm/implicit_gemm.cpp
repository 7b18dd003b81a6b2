// Convolution as a matrix product whose left side, the im2col matrix, is never stored: register tiles read it directly
// from a small packed window of the image. Any stride, padding, dilation and groups.
//
// A window holds vectors of VL channels (*blocked*), or one plane per channel (*planar*) if there are so few channels,
// as in first layers, that most of a vector would be padding. Strided backward data is one such product for each
// residue of the output position: all outputs of a residue use the same filter elements, with stride 1.
#include "common/stage.h"
#include "implicit_gemm/filter.h"
#include "implicit_gemm/filter_gradient.h"
#include "implicit_gemm/forward.h"

using namespace implicit_gemm;

namespace {

// Return the bytes of the packed filter, or of its gradient's accumulator. rows: channels of one group to sum over.
int64_t filter_bytes(const Geometry& g, int rows, int lanes) {
  return bytes_of(times(g.groups, filter_floats(g, rows, lanes)));
}

struct ImplicitGemm {
  static int64_t prepared_bytes(const Stage& stage) {
    const Geometry& g = stage.geometry;
    require_shapes(g, stage.x, stage.y);
    return filter_bytes(g, summed(stage), int(stage.out().c / g.groups));
  }

  static int64_t scratch_bytes(const Stage& stage) {
    const Geometry& g = stage.geometry;
    require_shapes(g, stage.x, stage.y);
    Call call = make_call(g, stage.backward_data(), stage.in().images(g.groups), stage.out().images(g.groups));
    if (stage.operation == BACKWARD_FILTER) return gradient_of(call).scratch_bytes(stage.thread_count());
    if (are_pairs(call.x)) call.x = pairs_of_channels(call.x);
    return scratch_bytes_of(plans(stage, call), stage.thread_count());
  }

  static void open(const Stage& stage, const TensorArgument& w, float* packed) {
    const Geometry& g = stage.geometry;
    const Images in = stage.in().images(g.groups);
    const bool backward_data = stage.backward_data(), of_pairs = are_pairs(in);
    const int threads = require_filter(stage, w);
    for (int64_t i = 0; i < g.groups; ++i) {
      const FilterView view = w.filter(i, g.groups, backward_data);
      const int rows = of_pairs ? view.rows / 2 : view.rows;
      float* to = packed + i * filter_floats(g, rows, view.lanes);
      const Images whole{{}, 1, view.lanes, int(g.stride_h), int(g.stride_w), 0, 1, 0, 0};
      const Call call = make_call(g, backward_data, Images{}, whole);
      std::vector<PackedTaps> products;
      for_products(call.geometry, backward_data, pairs_taps(in), rows, call.y, [&](Product product, const Images&) {
        products.push_back({std::move(product.taps), to + product.filter_offset});
      });
      pack_filter(view, of_pairs, products, threads);
    }
  }

  static void correlate(const Stage& stage, const Slice& slice) {
    const Geometry& g = stage.geometry;
    const bool backward_data = stage.backward_data();
    const int threads = stage.thread_count();
    const TensorArgument& out = slice.out(stage);
    require_images(g, slice.x, slice.y);
    Call call = make_call(g, backward_data, slice.in(stage).images(g.groups), out.images(g.groups));
    const bool of_pairs = are_pairs(call.x);
    if (of_pairs) call.x = pairs_of_channels(call.x);
    const int rows = call.x.c, lanes = call.y.c;
    const std::vector<Plan> planned = plans(stage, call);
    stage.require_prepared(filter_bytes(g, rows, lanes));
    stage.require_scratch(scratch_bytes_of(planned, threads));
    const Elements bias = checked_bias(slice.bias, stage.bias_bytes, out);
    const Epilogue epilogue = checked_epilogue(&slice.epilogue, out);
    if (backward_data && leaves_gaps(g)) set_to_zero(out.data, out.bytes, threads);
    for (int64_t i = 0; i < g.groups; ++i)
      for (const Plan& plan : planned)
        run(plan, call.x.group(i), of_pairs, slice.prepared + i * filter_floats(g, rows, lanes),
            {bias + i * lanes, epilogue}, plan.y.group(i), slice.scratch, threads);
  }

  static void accumulate(const Stage& stage, const Slice& slice) {
    const Geometry& g = stage.geometry;
    const int threads = stage.thread_count();
    require_images(g, slice.x, slice.y);
    const Call call = make_call(g, false, slice.x.images(g.groups), slice.y.images(g.groups));
    const FilterGradient f = gradient_of(call);
    stage.require_prepared(filter_bytes(g, call.x.c, call.y.c));
    stage.require_scratch(f.scratch_bytes(threads));
    for (int64_t i = 0; i < g.groups; ++i)
      implicit_gemm::accumulate(f, call.x.group(i), call.y.group(i),
                                slice.prepared + i * filter_floats(g, call.x.c, call.y.c), slice.scratch, threads);
  }

  static void close(const Stage& stage, const TensorArgument& dw, const float* du) {
    const Geometry& g = stage.geometry;
    const int threads = require_filter(stage, dw);
    for (int64_t i = 0; i < g.groups; ++i) {
      const FilterView view = dw.filter(i, g.groups, false);
      add_filter_gradient(du + i * filter_floats(g, view.rows, view.lanes), view, threads);
    }
  }

 private:
  // Return the channels of a group, or pairs of them, over which a product sums; of x in backward filter.
  static int summed(const Stage& stage) {
    const Images in = stage.in().images(stage.geometry.groups);
    return stage.operation != BACKWARD_FILTER && are_pairs(in) ? in.c / 2 : in.c;
  }

  static std::vector<Plan> plans(const Stage& stage, const Call& call) {
    return plans_of(call.geometry, stage.backward_data(), call.x, call.y, stage.thread_count());
  }

  static FilterGradient gradient_of(const Call& call) {
    return filter_gradient(call.geometry, call.x, call.y);
  }

  static int require_filter(const Stage& stage, const TensorArgument& w) {
    const Geometry& g = stage.geometry;
    g.require();
    w.require_filter(g.groups, g.r, g.s);
    const FilterView view = w.filter(0, g.groups, stage.backward_data());
    const bool of_pairs = stage.operation != BACKWARD_FILTER && are_pairs(stage.in().images(g.groups));
    stage.require_prepared(filter_bytes(g, of_pairs ? view.rows / 2 : view.rows, view.lanes));
    return stage.thread_count();
  }
};

}  // namespace

MUCUDNN_ENTRIES(implicit_gemm, ImplicitGemm)
