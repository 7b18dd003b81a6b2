// Forward and backward data of implicit GEMM.
#pragma once

#include <omp.h>

#include "common/matmul.h"
#include "common/tasks.h"
#include "implicit_gemm/arithmetic.h"

namespace implicit_gemm {

constexpr int WINDOW_FLOATS = 96 * 1024;  // of a core's L2, for one window; the filter streams through the rest

constexpr int NARROW = 3 * MR;  // columns; shorter rows share register tiles

struct BandSize {
  int rows, columns;
};

// Choose the outputs to compute from one window: few enough for the cache, and for all threads to have work.
inline BandSize choose_band(const Product& product, int channels, const Images& y, int threads) {
  BandSize band{y.h, is_planar(channels) ? y.w : std::min(y.w, 8 * MR)};
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

// The buffers in which one thread computes the bands of a product.
struct ProductScratch {
  WindowShape window;
  BandSize band;
  int rows_at_once;
  int64_t floats() const { return plus(window.floats(), times(int64_t(NV) * VL * rows_at_once, band.columns)); }
};

// Return how many rows of outputs share register tiles: several if one row leaves tiles far from full.
inline int rows_at_once(const BandSize& band) {
  return band.columns >= NARROW ? 1 : std::min(band.rows, ceil_div(8 * MR, band.columns));
}

inline ProductScratch product_scratch(const Product& product, int channels, const Images& y, int threads) {
  const BandSize band = choose_band(product, channels, y, threads);
  const bool planar = is_planar(channels);
  return {window_shape(planar, channels, product.taps, product.stride_h, product.stride_w,
                       planar ? product.stride_w : 1, band.rows, band.columns),
          band, rows_at_once(band)};
}

// A product of a call, with all that is the same for every group. y: the view of the first group's output.
struct Plan {
  Product product;
  Images y;
  ProductScratch scratch;
};

inline std::vector<Plan> plans_of(const Geometry& g, bool backward_data, const Images& x, const Images& y,
                                  int threads) {
  const int rows = x.c;
  std::vector<Plan> plans;
  for_products(g, backward_data, pairs_taps(x), rows, y, [&](Product product, const Images& view) {
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

// of_pairs: whether the channels of x, and rows of the filter, are pairs.
inline void run(const Plan& plan, const Images& x, bool of_pairs, const float* packed, const Finish& finish,
                const Images& y, float* scratch, int threads) {
  const Product& product = plan.product;
  const ProductScratch& layout = plan.scratch;
  const BandSize band = layout.band;
  const std::vector<ptrdiff_t> offsets = inner_offsets(product.taps, layout.window);
  const Span rows = span_of(product.taps, &Tap::row), columns = columns_of(product.taps);
  const bool of_taps = are_in_pairs(product.taps);
  const float* filter = packed + product.filter_offset;
  const ptrdiff_t stream = ptrdiff_t(product.taps.size()) * padded(x.c) * VL;
  const int64_t down = ceil_div(y.h, band.rows), across = ceil_div(y.w, band.columns), tasks = y.n * down * across;
  const Moments& moments = finish.epilogue.moments;
  parallel_tasks(threads, tasks, moments || may_stay_in_caches(x, y, threads), [&](int64_t task) {
    const int top = int(task / across % down) * band.rows, left = int(task % across) * band.columns;
    const BandOfImage part{task / (down * across), top, left, std::min(band.rows, y.h - top),
                           std::min(band.columns, y.w - left)};
    float* window = scratch + omp_get_thread_num() * layout.floats();
    float* result = window + layout.window.floats();
    fill_window(x,
                {part.image, 0, top * product.stride_h + rows.first, left * product.stride_w + columns.first,
                 layout.window.height, layout.window.width},
                layout.window, window);
    if (of_taps) pair_pixels(product.taps, layout.window, window);
    const bool in_pairs = of_pairs || of_taps, of_pixels = !of_pairs && layout.window.planar && y.sw == 1;
    const auto multiply = of_pixels && part.width >= VL
                              ? (in_pairs ? Arithmetic<Pairs>::multiply_pixels : Arithmetic<Singles>::multiply_pixels)
                              : (in_pairs ? Arithmetic<Pairs>::multiply_band : Arithmetic<Singles>::multiply_band);
    multiply(plan, part, offsets, window, filter, stream, finish, y, result);
    if (moments) moments.add(y, {part.image, 0, top, left, part.height, part.width}, y.c);
  });
}

}  // namespace implicit_gemm
