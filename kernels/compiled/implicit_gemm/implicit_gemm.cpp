// Convolution as a matrix product whose left side, the im2col matrix, is never written down: the register tile reads it
// straight from a small packed window of the image. Any stride, padding, dilation and groups.
//
// A window holds VL channels a vector (*blocked*), or, where an image has so few channels that most of a vector would
// be padding, one plane a channel (*planar*; first layers). Backward data with stride is one such product for each
// residue of the output position: within a residue the filter elements that take part are the same, and the stride
// is 1.
#include "common/stage.h"
#include "implicit_gemm/filter.h"
#include "implicit_gemm/filter_gradient.h"
#include "implicit_gemm/forward.h"

using namespace implicit_gemm;

namespace {

int64_t prepared_bytes(const Geometry& g, int rows, int lanes) {
  return bytes_of(times(g.groups, filter_floats(g, rows, lanes)));
}

void require_filter(const Geometry& g, bool lanes_are_c, const TensorArgument& w, int64_t prepared, int threads) {
  g.require();
  w.require_filter(g.groups, g.r, g.s, FLOAT16);
  const FilterView view = w.filter(0, g.groups, lanes_are_c);
  require_bytes("prepared", prepared, prepared_bytes(g, view.rows, view.lanes));
  require_threads(threads);
}

void require_sizes(const Geometry& g, int64_t n, std::initializer_list<int64_t> channels_and_pixels, int threads) {
  g.require();
  require_between("the number of samples", n, 1, INT64_MAX);
  for (const int64_t size : channels_and_pixels) require_size("a number of channels or pixels", size);
  require_threads(threads);
}

}  // namespace

// The entries that library.py calls. All return 0, a size, or why they refused (checks.h). c, k: channels of one group.
#pragma GCC visibility push(default)
extern "C" {

// Size of the packed filter, or of its gradient's accumulator. rows: channels that are summed over.
int64_t mucudnn_implicit_gemm_prepared_bytes(const Geometry* g, int64_t rows, int64_t lanes) {
  return refusable([&] {
    require_sizes(*g, 1, {rows, lanes}, 1);
    return prepared_bytes(*g, int(rows), int(lanes));
  });
}

// Scratch for n samples; rows: channels of the tensor that is read, lanes, h, w: of the one that is written.
int64_t mucudnn_implicit_gemm_scratch_bytes(const Geometry* g, int backward_data, int64_t n, int64_t rows,
                                            int64_t lanes, int64_t h, int64_t w, int threads) {
  return refusable([&] {
    require_sizes(*g, n, {rows, lanes, h, w}, threads);
    const Images y{{}, n, int(lanes), int(h), int(w), 0, 1, 0, 0};
    const Call call = make_call(*g, backward_data, Images{}, y);
    return scratch_bytes_of(plans_of(call.geometry, backward_data, int(rows), call.y, threads), threads);
  });
}

int64_t mucudnn_implicit_gemm_gradient_scratch_bytes(const Geometry* g, int64_t n, int64_t c, int64_t k, int64_t p,
                                                     int64_t q, int threads) {
  return refusable([&] {
    require_sizes(*g, n, {c, k, p, q}, threads);
    const Geometry seen = make_call(*g, false, Images{}, Images{}).geometry;
    return filter_gradient(seen, n, int(c), int(k), int(p), int(q)).scratch_bytes(threads);
  });
}

int64_t mucudnn_implicit_gemm_pack_filter(const Geometry* g, int backward_data, const TensorArgument* w, float* packed,
                                          int64_t packed_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, backward_data, *w, packed_bytes, threads);
    for (int64_t i = 0; i < g->groups; ++i) {
      const FilterView view = w->filter(i, g->groups, backward_data);
      float* to = packed + i * filter_floats(*g, view.rows, view.lanes);
      const Images whole{{}, 1, view.lanes, int(g->stride_h), int(g->stride_w), 0, 1, 0, 0};
      const Call call = make_call(*g, backward_data, Images{}, whole);
      std::vector<PackedTaps> products;
      for_products(call.geometry, backward_data, view.rows, call.y, [&](Product product, const Images&) {
        products.push_back({std::move(product.taps), to + product.filter_offset});
      });
      pack_filter(view, products, threads);
    }
    return 0;
  });
}

// Forward: x -> y, with an epilogue or null. Backward data: x = dy, y = dx.
int64_t mucudnn_implicit_gemm_forward(const Geometry* g, int backward_data, const TensorArgument* x,
                                      const float* packed, int64_t packed_bytes, void* bias, int64_t bias_bytes,
                                      const TensorArgument* y, float* scratch, int64_t scratch_bytes, int threads,
                                      const EpilogueArgument* of_y) {
  return refusable([&]() -> int64_t {
    require_images(*g, backward_data ? *y : *x, backward_data ? *x : *y, FLOAT16);
    require_threads(threads);
    const Call call = make_call(*g, backward_data, x->images(g->groups), y->images(g->groups));
    const int rows = call.x.c, lanes = call.y.c;
    const std::vector<Plan> plans = plans_of(call.geometry, backward_data, rows, call.y, threads);
    require_bytes("prepared", packed_bytes, prepared_bytes(*g, rows, lanes));
    require_bytes("scratch", scratch_bytes, scratch_bytes_of(plans, threads));
    const Elements of_bias = checked_bias(bias, bias_bytes, *y);
    const Epilogue epilogue = checked_epilogue(of_y, *y);
    if (backward_data && leaves_gaps(*g)) set_to_zero(y->data, y->bytes, threads);
    for (int64_t i = 0; i < g->groups; ++i)
      for (const Plan& plan : plans)
        run(plan, call.x.group(i), packed + i * filter_floats(*g, rows, lanes), {of_bias + i * lanes, epilogue},
            plan.y.group(i), scratch, threads);
    return 0;
  });
}

int64_t mucudnn_implicit_gemm_accumulate(const Geometry* g, const TensorArgument* x, const TensorArgument* dy,
                                         float* du, int64_t du_bytes, float* scratch, int64_t scratch_bytes,
                                         int threads) {
  return refusable([&]() -> int64_t {
    require_images(*g, *x, *dy, FLOAT16);
    require_threads(threads);
    const Call call = make_call(*g, false, x->images(g->groups), dy->images(g->groups));
    const Images& y = call.y;
    const FilterGradient f = filter_gradient(call.geometry, y.n, call.x.c, y.c, y.h, y.w);
    require_bytes("prepared", du_bytes, prepared_bytes(*g, call.x.c, y.c));
    require_bytes("scratch", scratch_bytes, f.scratch_bytes(threads));
    for (int64_t i = 0; i < g->groups; ++i)
      accumulate(f, call.x.group(i), y.group(i), du + i * filter_floats(*g, call.x.c, y.c), scratch, threads);
    return 0;
  });
}

int64_t mucudnn_implicit_gemm_add_filter_gradient(const Geometry* g, const float* du, int64_t du_bytes,
                                                  const TensorArgument* dw, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, false, *dw, du_bytes, threads);
    for (int64_t i = 0; i < g->groups; ++i) {
      const FilterView view = dw->filter(i, g->groups, false);
      add_filter_gradient(du + i * filter_floats(*g, view.rows, view.lanes), view, threads);
    }
    return 0;
  });
}

int64_t mucudnn_implicit_gemm_stage(const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared,
                                    float* scratch, const EpilogueArgument* epilogue) {
  return refusable([&] {
    return run_packed_filter_stage(*stage, {x, w, y}, bias, prepared, scratch, epilogue, mucudnn_implicit_gemm_pack_filter,
                                   mucudnn_implicit_gemm_forward, mucudnn_implicit_gemm_accumulate,
                                   mucudnn_implicit_gemm_add_filter_gradient);
  });
}

}  // extern "C"
#pragma GCC visibility pop
