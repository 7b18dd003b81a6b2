// 1x1 convolutions as matrix products on the activations as they lie in memory (pointwise_product.h,
// pointwise_gradient.h): any stride and groups, no padding. A filter that is strided sees only every stride-th pixel.
#include "common/stage.h"
#include "pointwise/gradient.h"

using namespace pointwise;

namespace {

void require_pointwise(const Geometry& g) {
  g.require();
  for (const int64_t size : {g.r, g.s}) require_equal("the size of the filter", size, 1);
  for (const int64_t pad : {g.pad_h, g.pad_w}) require_equal("the padding", pad, 0);
}

// x and y as in forward.
void require_call(const Geometry& g, const TensorArgument& x, const TensorArgument& y) {
  require_pointwise(g);
  require_images(g, x, y);
  require_equal("the memory format of y", y.channels_last, x.channels_last);
}

// Images of one pixel lie in both formats at once.
TensorArgument as_rows_if_both(TensorArgument tensor) {
  if (tensor.h * tensor.w == 1) tensor.channels_last = 1;
  return tensor;
}

struct Operands {
  TensorArgument x, y;

  Operands(const TensorArgument& given_x, const TensorArgument& given_y)
      : x(as_rows_if_both(given_x)), y(given_y) {
    y.channels_last = x.channels_last;
  }
};

Product product_of(const Geometry& g, bool backward_data, const Operands& of, int threads) {
  const Images x = of.x.images(g.groups), y = of.y.images(g.groups);
  if (backward_data) return {y, {x, g.stride_h, g.stride_w}, threads};
  return {every(x, g.stride_h, g.stride_w), {y, 1, 1}, threads};
}

FilterGradient gradient_of(const Geometry& g, const Operands& of, int threads) {
  return {every(of.x.images(g.groups), g.stride_h, g.stride_w), of.y.images(g.groups), threads};
}

// Sizes alone: c, k of one group; h, w of x.
Operands operands_of(const Geometry& g, bool channels_last, int64_t n, int64_t c, int64_t k, int64_t h, int64_t w) {
  for (const int64_t size : {c, k, h, w}) require_size("a number of channels or pixels", size);
  require_between("the number of samples", n, 1, INT64_MAX);
  const int64_t p = (h - 1) / g.stride_h + 1, q = (w - 1) / g.stride_w + 1;
  const TensorArgument x{nullptr, 0, n, times(c, g.groups), h, w, channels_last, FLOAT32};
  const TensorArgument y{nullptr, 0, n, times(k, g.groups), p, q, channels_last, FLOAT32};
  return {x, y};
}

int64_t packed_floats(int64_t rows, int64_t lanes) { return times(rows, ceil_div(lanes, int64_t(VL)) * VL); }

int64_t packed_bytes_of(const Geometry& g, int64_t rows, int64_t lanes) {
  return bytes_of(times(g.groups, packed_floats(rows, lanes)));
}

constexpr int PACKED_TOGETHER = 8;  // blocks of lanes: whole cache lines of a filter whose lanes follow each other

// Blocks of VL lanes from `first_block` on: lane l of row r at packed[(l / VL * rows + r) * VL + l % VL].
void pack_lanes(const FilterView& view, int first_block, float* packed) {
  const int last_block = std::min(blocks_of(view.lanes), first_block + PACKED_TOGETHER);
  for (int row = 0; row < view.rows; row += VL)
    for (int block = first_block; block < last_block; ++block) {
      float* to = packed + (ptrdiff_t(block) * view.rows + row) * VL;
      const FilterBlock of_view{view, block * VL, row};
      if (of_view.rows() == VL) {
        load_filter_block(of_view, to);
      } else {
        alignas(64) float last[VL * VL];
        load_filter_block(of_view, last);
        std::memcpy(to, last, sizeof(float) * VL * of_view.rows());
      }
    }
}

int64_t copies_floats(int64_t c, int64_t k, int threads) {
  const int64_t filter = times(c, k);
  return times(FilterGradient::parts(filter, threads) - 1, filter);
}

int64_t copies_bytes(const Geometry& g, int64_t c, int64_t k, int threads) {
  return bytes_of(times(g.groups, copies_floats(c, k, threads)));
}

void require_filter(const Geometry& g, const TensorArgument& w, int threads) {
  require_pointwise(g);
  w.require_filter(g.groups, g.r, g.s);
  require_threads(threads);
}

}  // namespace

// The entries that library.py calls. All return 0, a size, or why they refused (checks.h). c, k: channels of one group.
#pragma GCC visibility push(default)
extern "C" {

// Size of the packed filter, or of the copies of its gradient.
int64_t mucudnn_pointwise_prepared_bytes(const Geometry* g, int operation, int64_t c, int64_t k, int threads) {
  return refusable([&] {
    require_pointwise(*g);
    for (const int64_t channels : {c, k}) require_size("a number of channels", channels);
    require_threads(threads);
    if (operation == BACKWARD_FILTER) return copies_bytes(*g, c, k, threads);
    return operation == BACKWARD_DATA ? packed_bytes_of(*g, k, c) : packed_bytes_of(*g, c, k);
  });
}

// Scratch for n samples; h, w: of x.
int64_t mucudnn_pointwise_scratch_bytes(const Geometry* g, int operation, int channels_last, int64_t n, int64_t c,
                                        int64_t k, int64_t h, int64_t w, int threads) {
  return refusable([&] {
    require_pointwise(*g);
    require_threads(threads);
    const Operands of = operands_of(*g, channels_last, n, c, k, h, w);
    if (operation == BACKWARD_FILTER) return bytes_of(gradient_of(*g, of, threads).scratch_floats());
    return bytes_of(product_of(*g, operation == BACKWARD_DATA, of, threads).scratch_floats());
  });
}

int64_t mucudnn_pointwise_pack_filter(const Geometry* g, int backward_data, const TensorArgument* w, float* packed,
                                      int64_t packed_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, *w, threads);
    const FilterView first = w->filter(0, g->groups, backward_data);
    require_bytes("prepared", packed_bytes, packed_bytes_of(*g, first.rows, first.lanes));
    const int64_t of_group = packed_floats(first.rows, first.lanes), blocks = blocks_of(first.lanes);
    const int64_t parts = ceil_div(blocks, int64_t(PACKED_TOGETHER));
#pragma omp parallel for num_threads(threads) collapse(2)
    for (int64_t group = 0; group < g->groups; ++group)
      for (int64_t part = 0; part < parts; ++part)
        pack_lanes(w->filter(group, g->groups, backward_data), int(part * PACKED_TOGETHER), packed + group * of_group);
    return 0;
  });
}

// Forward: x -> y, with an epilogue or null. Backward data: in = dy, out = dx.
int64_t mucudnn_pointwise_forward(const Geometry* g, int backward_data, const TensorArgument* in, const float* packed,
                                  int64_t packed_bytes, const float* bias, int64_t bias_bytes,
                                  const TensorArgument* out, float* scratch, int64_t scratch_bytes, int threads,
                                  const EpilogueArgument* of_out) {
  return refusable([&]() -> int64_t {
    const TensorArgument &x = backward_data ? *out : *in, &y = backward_data ? *in : *out;
    require_call(*g, x, y);
    require_threads(threads);
    Product product = product_of(*g, backward_data, {x, y}, threads);
    const int64_t of_group = packed_floats(product.in.c, product.channels());
    require_bytes("prepared", packed_bytes, packed_bytes_of(*g, product.in.c, product.channels()));
    require_bytes("scratch", scratch_bytes, bytes_of(product.scratch_floats()));
    if (bias) require_bytes("the bias", bias_bytes, bytes_of(out->c));
    const Epilogue epilogue = checked_epilogue(of_out, *out);
    for (int64_t i = 0; i < g->groups; ++i) {
      Product of_i = product;
      of_i.in = product.in.group(i);
      of_i.out.whole = product.out.whole.group(i);
      multiply(of_i, packed + i * of_group, bias ? bias + i * product.channels() : nullptr, epilogue, scratch);
    }
    return 0;
  });
}

// Adds to dw, and to its copies, which begin as zeros.
int64_t mucudnn_pointwise_accumulate(const Geometry* g, const TensorArgument* x, const TensorArgument* dy,
                                     const TensorArgument* dw, float* copies, int64_t bytes_of_copies, float* scratch,
                                     int64_t scratch_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_call(*g, *x, *dy);
    require_threads(threads);
    const FilterGradient gradient = gradient_of(*g, {*x, *dy}, threads);
    const int64_t c = gradient.x.c, k = gradient.dy.c;
    require_bytes("prepared", bytes_of_copies, copies_bytes(*g, c, k, threads));
    require_bytes("scratch", scratch_bytes, bytes_of(gradient.scratch_floats()));
    require_filter(*g, *dw, threads);
    require_equal("the number of filters", dw->n, dy->c);
    require_equal("the number of channels of the filter", dw->c, c);
    for (int64_t i = 0; i < g->groups; ++i)
      add_gradient({gradient.x.group(i), gradient.dy.group(i), threads}, dw->floats() + i * c * k,
                   copies + i * copies_floats(c, k, threads), scratch);
    return 0;
  });
}

int64_t mucudnn_pointwise_add_filter_gradient(const Geometry* g, const float* copies, int64_t bytes_of_copies,
                                              const TensorArgument* dw, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, *dw, threads);
    const int64_t c = dw->c, k = dw->n / g->groups, of_group = c * k;
    require_bytes("prepared", bytes_of_copies, copies_bytes(*g, c, k, threads));
    const int64_t count = FilterGradient::parts(of_group, threads) - 1;
    if (count == 0) return 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < g->groups * of_group; ++i) {
      const float* copy = copies + i / of_group * count * of_group + i % of_group;
      for (int64_t j = 0; j < count; ++j) dw->floats()[i] += copy[j * of_group];
    }
    return 0;
  });
}

int64_t mucudnn_pointwise_stage(const Stage* stage, float* x, float* w, float* y, const float* bias, float* prepared,
                                float* scratch, const EpilogueArgument* epilogue) {
  return refusable([&] {
    TensorArgument dw = stage->w;
    dw.data = w;
    const auto accumulate = [&](const Geometry* g, const TensorArgument* of_x, const TensorArgument* dy, float* copies,
                                int64_t bytes_of_copies, float* of_threads, int64_t scratch_bytes, int threads) {
      return mucudnn_pointwise_accumulate(g, of_x, dy, &dw, copies, bytes_of_copies, of_threads, scratch_bytes,
                                          threads);
    };
    return run_packed_filter_stage(*stage, {x, w, y}, bias, prepared, scratch, epilogue, mucudnn_pointwise_pack_filter,
                                   mucudnn_pointwise_forward, accumulate, mucudnn_pointwise_add_filter_gradient);
  });
}

}  // extern "C"
#pragma GCC visibility pop
