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

struct ImplicitGemm : TakesImages {
  static int64_t prepared_bytes(const Stage& stage) {
    return bytes_of(times(stage.geometry.groups, floats_of_group(stage)));
  }

  static int64_t scratch_bytes(const Stage& stage) {
    const Call call = call_of(stage);
    if (stage.backward_filter()) return gradient_of(call).scratch_bytes(stage.thread_count());
    return scratch_bytes_of(plans(stage, call), stage.thread_count());
  }

  static void open(const Stage& stage, float* packed) {
    const Geometry& g = stage.geometry;
    const Images in = stage.images_in();
    const bool backward_data = stage.backward_data(), of_pairs = are_pairs(in);
    const int64_t of_group = floats_of_group(stage);
    for (int64_t i = 0; i < g.groups; ++i) {
      const FilterView view = stage.filter(i);
      float* to = packed + i * of_group;
      const Images whole{{}, 1, view.lanes, int(g.stride_h), int(g.stride_w), 0, 1, 0, 0};
      const Call call = make_call(g, backward_data, Images{}, whole);
      std::vector<PackedTaps> products;
      const auto add = [&](Product product, const Images&) {
        products.push_back({std::move(product.taps), to + product.filter_offset});
      };
      for_products(call.geometry, backward_data, pairs_taps(in), summed(stage), call.y, add);
      pack_filter(view, of_pairs, products, stage.thread_count());
    }
  }

  static void correlate(const Slice& slice) {
    const TensorArgument& out = slice.out();
    const int threads = slice.thread_count();
    const bool of_pairs = sums_pairs(slice);
    const int64_t of_group = floats_of_group(slice);
    const Call call = call_of(slice);
    const std::vector<Plan> planned = plans(slice, call);
    float* const scratch = slice.scratch(scratch_bytes_of(planned, threads));
    if (leaves_gaps(slice.geometry, slice.backward_data())) set_to_zero(out.data, out.bytes, threads);
    for (int64_t i = 0; i < slice.geometry.groups; ++i)
      for (const Plan& plan : planned)
        run(plan, call.x.group(i), of_pairs, slice.prepared + i * of_group, {slice.bias + i * call.y.c, slice.epilogue},
            plan.y.group(i), scratch, threads);
  }

  static void accumulate(const Slice& slice) {
    const Call call = call_of(slice);
    const FilterGradient f = gradient_of(call);
    float* const scratch = slice.scratch(f.scratch_bytes(slice.thread_count()));
    for (int64_t i = 0; i < slice.geometry.groups; ++i)
      implicit_gemm::accumulate(f, call.x.group(i), call.y.group(i), slice.prepared + i * floats_of_group(slice),
                                scratch, slice.thread_count());
  }

  static void close(const Stage& stage, const float* du) {
    for (int64_t i = 0; i < stage.geometry.groups; ++i)
      add_filter_gradient(du + i * floats_of_group(stage), stage.filter(i), stage.thread_count());
  }

 private:
  static bool sums_pairs(const Stage& stage) { return !stage.backward_filter() && are_pairs(stage.images_in()); }

  // Return the channels of a group, or pairs of them, over which a product sums; of x in backward filter.
  static int summed(const Stage& stage) { return stage.images_in().c / (sums_pairs(stage) ? 2 : 1); }

  // Return the floats of a group's packed filter, or of its gradient's accumulator.
  static int64_t floats_of_group(const Stage& stage) {
    return filter_floats(stage.geometry, summed(stage), stage.images_out().c);
  }

  static Call call_of(const Stage& stage) {
    Call call = make_call(stage.geometry, stage.backward_data(), stage.images_in(), stage.images_out());
    if (sums_pairs(stage)) call.x = pairs_of_channels(call.x);
    return call;
  }

  static std::vector<Plan> plans(const Stage& stage, const Call& call) {
    return plans_of(call.geometry, stage.backward_data(), call.x, call.y, stage.thread_count());
  }

  static FilterGradient gradient_of(const Call& call) { return filter_gradient(call.geometry, call.x, call.y); }
};

}  // namespace

MUCUDNN_ENTRIES(implicit_gemm, ImplicitGemm)
