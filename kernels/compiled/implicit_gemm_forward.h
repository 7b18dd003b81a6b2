// Forward and backward data of implicit GEMM.
#pragma once

#include <omp.h>

#include "implicit_gemm_windows.h"
#include "matmul.h"

constexpr int WINDOW_FLOATS = 96 * 1024;  // of a core's L2, for one window; the filter streams through the rest

struct Band {
  int rows, columns;
};

// Outputs that are computed from one window: few enough for the cache and for all threads to have work.
inline Band choose_band(const Product& product, int channels, const Images& y, int threads) {
  Band band{y.h, std::min(y.w, 8 * MR)};
  band.columns = ceil_div(y.w, ceil_div(y.w, band.columns));
  const auto floats = [&] {
    return window_shape(is_planar(channels), channels, product.taps, product.stride_h, product.stride_w,
                        is_planar(channels) ? product.stride_w : 1, band.rows, band.columns)
        .floats();
  };
  const auto bands = [&] { return times(y.n, int64_t(ceil_div(y.h, band.rows)) * ceil_div(y.w, band.columns)); };
  while (band.rows > 1 && (floats() > WINDOW_FLOATS || bands() < int64_t{4} * threads)) {
    band.rows = ceil_div(band.rows, 2);
  }
  while (band.columns > MR && (floats() > WINDOW_FLOATS || bands() < threads)) band.columns = ceil_div(band.columns, 2);
  return band;
}

// The buffers in which one thread computes a product's bands.
struct ProductScratch {
  WindowShape window;
  Band band;
  int result_rows;
  int64_t floats() const { return plus(window.floats(), times(int64_t(NV) * VL * result_rows, band.columns)); }
};

inline ProductScratch product_scratch(const Product& product, int channels, const Images& y, int threads) {
  const Band band = choose_band(product, channels, y, threads);
  const bool planar = is_planar(channels);
  return {window_shape(planar, channels, product.taps, product.stride_h, product.stride_w,
                       planar ? product.stride_w : 1, band.rows, band.columns),
          band, product.joins_rows() ? band.rows : 1};
}

// Distance of each block of the product's inner dimension from a window's start: (channel or channel block, tap).
inline std::vector<ptrdiff_t> inner_offsets(const Taps& taps, const WindowShape& shape) {
  std::vector<ptrdiff_t> offsets;
  const Span rows = span_of(taps, &Tap::row), columns = span_of(taps, &Tap::column);
  for (int c = 0; c < shape.planes(); ++c)
    for (const Tap& tap : taps)
      offsets.push_back(c * shape.plane() + shape.at(tap.row - rows.first, tap.column - columns.first));
  return offsets;
}

// One row of outputs, NV vectors of output channels: to[vector][column][VL].
template <int VECTORS, int ROW, int STEP>
void multiply_row(Layout<ROW, STEP> layout, const float* window, const std::vector<ptrdiff_t>& offsets, int steps,
                  int columns, const float* filter, ptrdiff_t filter_stream, float* to) {
  for_row_tiles(columns, [&](int first, int count) {
    const float* from = window + first * layout.row();
    const auto block_of = [&](int block) { return from + offsets[block]; };
    register_tile_of<MR, VECTORS, false>(count, layout, block_of, int(offsets.size()), steps, filter, filter_stream,
                                         to + ptrdiff_t(first) * VL, ptrdiff_t(columns) * VL);
  });
}

template <int VECTORS>
void multiply_row(const WindowShape& shape, int stride_w, const float* window, const std::vector<ptrdiff_t>& offsets,
                  int columns, const float* filter, ptrdiff_t filter_stream, float* to) {
  if (shape.planar)
    multiply_row<VECTORS>(Layout<1, 1>{}, window, offsets, 1, columns, filter, filter_stream, to);
  else if (stride_w == 1)
    multiply_row<VECTORS>(Layout<VL, 1>{}, window, offsets, VL, columns, filter, filter_stream, to);
  else if (stride_w == 2)
    multiply_row<VECTORS>(Layout<2 * VL, 1>{}, window, offsets, VL, columns, filter, filter_stream, to);
  else
    multiply_row<VECTORS>(Layout<AT_RUN_TIME, 1>{stride_w * VL, 1}, window, offsets, VL, columns, filter, filter_stream,
                          to);
}

inline void add_to_all(float* vectors, int count, Vec offset) {
  for (int i = 0; i < count; ++i) store(vectors + i * VL, load(vectors + i * VL) + offset);
}

// A product of a call, and all of it that is the same for every group; y: the view of the first group's.
struct Plan {
  Product product;
  Images y;
  ProductScratch scratch;
};

inline std::vector<Plan> plans_of(const Geometry& g, bool backward_data, int rows, const Images& y, int threads) {
  std::vector<Plan> plans;
  for_products(g, backward_data, rows, y, [&](Product product, const Images& view) {
    const ProductScratch scratch = product_scratch(product, rows, view, threads);
    plans.push_back({std::move(product), view, scratch});
  });
  return plans;
}

inline int64_t scratch_bytes_of(const std::vector<Plan>& plans, int threads) {
  int64_t most = 0;
  for (const Plan& plan : plans) most = std::max(most, plan.scratch.floats());
  return bytes_of(times(most, threads));
}

inline void run(const Plan& plan, const Images& x, const float* filter, const float* bias, const Images& y, float* scratch,
         int threads) {
  const Product& product = plan.product;
  const ProductScratch& layout = plan.scratch;
  const Band band = layout.band;
  const std::vector<ptrdiff_t> offsets = inner_offsets(product.taps, layout.window);
  const Span rows = span_of(product.taps, &Tap::row), columns = span_of(product.taps, &Tap::column);
  const ptrdiff_t stream = ptrdiff_t(product.taps.size()) * padded(x.c) * VL;
  const int64_t down = ceil_div(y.h, band.rows), across = ceil_div(y.w, band.columns), tasks = y.n * down * across;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t image = task / (down * across);
    const int top = int(task / across % down) * band.rows, left = int(task % across) * band.columns;
    const int height = std::min(band.rows, y.h - top), width = std::min(band.columns, y.w - left);
    float* window = scratch + omp_get_thread_num() * layout.floats();
    float* result = window + layout.window.floats();
    fill_window(x,
                {image, 0, top * product.stride_h + rows.first, left * product.stride_w + columns.first,
                 layout.window.height, layout.window.width},
                layout.window, window);
    const int together = product.joins_rows() && width == band.columns ? height : 1;
    for_column_blocks(blocks_of(y.c), [&](auto vectors, int k) {
      for (int i = 0; i < height; i += together) {
        const int outputs = together * width;
        multiply_row<vectors.value>(layout.window, product.stride_w,
                                    window + i * product.stride_h * layout.window.row(), offsets, outputs,
                                    filter + product.filter_offset + k * stream, stream, result);
        for (int j = 0; j < vectors.value; ++j) {
          float* lanes = result + ptrdiff_t(j) * outputs * VL;
          if (bias) add_to_all(lanes, outputs, load_first(bias + (k + j) * VL, y.c - (k + j) * VL));
          scatter(y, {image, (k + j) * VL, top + i, left, together, width}, {lanes, ptrdiff_t(width) * VL, VL}, lanes);
        }
      }
    });
  }
}
