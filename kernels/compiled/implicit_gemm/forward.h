// Forward and backward data of implicit GEMM.
#pragma once

#include <omp.h>

#include "common/matmul.h"
#include "implicit_gemm/pixels.h"
#include "implicit_gemm/windows.h"

namespace implicit_gemm {

constexpr int WINDOW_FLOATS = 96 * 1024;  // of a core's L2, for one window; the filter streams through the rest

constexpr int NARROW = 3 * MR;  // columns; shorter rows share register tiles

struct Band {
  int rows, columns;
};

// Choose the outputs to compute from one window: few enough for the cache, and for all threads to have work.
inline Band choose_band(const Product& product, int channels, const Images& y, int threads) {
  Band band{y.h, is_planar(channels) ? y.w : std::min(y.w, 8 * MR)};
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
  Band band;
  int rows_at_once;
  int64_t floats() const { return plus(window.floats(), times(int64_t(NV) * VL * rows_at_once, band.columns)); }
};

// Return how many rows of outputs share register tiles: several if one row leaves tiles far from full.
inline int rows_at_once(const Band& band) {
  return band.columns >= NARROW ? 1 : std::min(band.rows, ceil_div(8 * MR, band.columns));
}

inline ProductScratch product_scratch(const Product& product, int channels, const Images& y, int threads) {
  const Band band = choose_band(product, channels, y, threads);
  const bool planar = is_planar(channels);
  return {window_shape(planar, channels, product.taps, product.stride_h, product.stride_w,
                       planar ? product.stride_w : 1, band.rows, band.columns),
          band, rows_at_once(band)};
}

// The destination of rows of outputs, with output channels in the vectors: vector k of output (i, j) is at
// data[i * row + j * column + k * stream].
struct RowTarget {
  float* data;
  ptrdiff_t row, column, stream;
};

// Part of the inner dimension, small enough for its filter elements to stay in L1 during a pass over all outputs.
struct Inner {
  const ptrdiff_t* offsets;
  int blocks, steps;
  const float* filter;
  ptrdiff_t filter_stream;
};

constexpr int INNER_STEPS = 256;

// Call body(inner, is_first) for each part of the inner dimension.
template <class Body>
INLINE void for_inner_parts(const std::vector<ptrdiff_t>& offsets, int steps, const float* filter,
                            ptrdiff_t filter_stream, Body body) {
  const int blocks = int(offsets.size()), parts = int(ceil_div(int64_t(blocks) * steps, int64_t(INNER_STEPS)));
  for (int i = 0, first = 0; i < parts; ++i) {
    const int end = int(int64_t(blocks) * (i + 1) / parts);
    body(Inner{&offsets[first], end - first, steps, filter + ptrdiff_t(first) * steps * VL, filter_stream}, i == 0);
    first = end;
  }
}

// Compute one row of outputs, for VECTORS vectors of output channels.
template <int VECTORS, class Step, int ROW>
void multiply_row(bool adds, Layout<ROW, 1> layout, const float* window, const Inner& inner, int columns,
                  const RowTarget& to) {
  for_row_tiles(columns, [&](int first, int count) {
    const float* from = window + first * layout.row();
    const auto block_of = [&](int block) { return from + inner.offsets[block]; };
    register_tile_of<MR, VECTORS, Step>(count, adds, layout, block_of, inner.blocks, inner.steps, inner.filter,
                                        inner.filter_stream, to.data + first * to.column, to.stream, to.column);
  });
}

template <int VECTORS, class Step>
void multiply_row(bool adds, const WindowShape& shape, int stride_w, const float* window, const Inner& inner,
                  int columns, const RowTarget& to) {
  if (shape.planar)
    multiply_row<VECTORS, Step>(adds, Layout<1, 1>{}, window, inner, columns, to);
  else if (stride_w == 1)
    multiply_row<VECTORS, Step>(adds, Layout<VL, 1>{}, window, inner, columns, to);
  else if (stride_w == 2)
    multiply_row<VECTORS, Step>(adds, Layout<2 * VL, 1>{}, window, inner, columns, to);
  else
    multiply_row<VECTORS, Step>(adds, Layout<AT_RUN_TIME, 1>{stride_w * VL, 1}, window, inner, columns, to);
}

// The inputs of consecutive outputs, each at its own place in the window.
template <int OUTPUTS>
struct PixelRows {
  const float* const* pixels;
  ptrdiff_t element;

  INLINE_MEMBER float of_row(int i) const { return pixels[i][element]; }
  INLINE_MEMBER void advance() { ++element; }
  INLINE_MEMBER LeftTile tile(int first, int count, float* copy) const {
    for (int i = 0; i < OUTPUTS; ++i) store(copy + i * VL, load_first(pixels[i] + element + first, count));
    return {copy, VL};
  }
};

// Compute OUTPUTS consecutive outputs from number `first` on, counted across rows of `width`. In the window, inputs of
// neighbouring outputs are `row` and `column` floats apart.
template <int OUTPUTS, int VECTORS, class Step>
INLINE void tile_across_rows(bool adds, int first, int width, const float* window, ptrdiff_t row, ptrdiff_t column,
                             const Inner& inner, const RowTarget& to) {
  const float* pixels[OUTPUTS];
#pragma GCC unroll 16
  for (int i = 0; i < OUTPUTS; ++i) pixels[i] = window + (first + i) / width * row + (first + i) % width * column;
  const auto rows_of = [&](int block) INLINE_LAMBDA { return PixelRows<OUTPUTS>{pixels, inner.offsets[block]}; };
  const auto finish = [&](const Vec(&sum)[OUTPUTS][VECTORS]) INLINE_LAMBDA {
    write_tile(sum, adds, to.stream, [&](int i) INLINE_LAMBDA {
      return to.data + (first + i) / width * to.row + (first + i) % width * to.column;
    });
  };
  sums_of_rows<OUTPUTS, VECTORS, Step>(rows_of, inner.blocks, inner.steps, inner.filter, inner.filter_stream, finish);
}

template <int OUTPUTS, int VECTORS, class Step>
INLINE void tile_across_rows(int outputs, bool adds, int first, int width, const float* window, ptrdiff_t row,
                             ptrdiff_t column, const Inner& inner, const RowTarget& to) {
  if constexpr (OUTPUTS > 1) {
    if (outputs < OUTPUTS)
      return tile_across_rows<OUTPUTS - 1, VECTORS, Step>(outputs, adds, first, width, window, row, column, inner, to);
  }
  tile_across_rows<OUTPUTS, VECTORS, Step>(adds, first, width, window, row, column, inner, to);
}

// Compute `rows` rows of `width` outputs, for VECTORS vectors of output channels.
template <int VECTORS, class Step>
void multiply_rows(bool adds, const WindowShape& shape, const Product& product, const float* window,
                   const Inner& inner, int rows, int width, const RowTarget& to) {
  if (rows == 1) return multiply_row<VECTORS, Step>(adds, shape, product.stride_w, window, inner, width, to);
  const ptrdiff_t row = product.stride_h * shape.row(), column = shape.planar ? 1 : product.stride_w * VL;
  for_row_tiles(rows * width, [&](int first, int count) {
    tile_across_rows<MR, VECTORS, Step>(count, adds, first, width, window, row, column, inner, to);
  });
}

inline void add_to_rows(const RowTarget& to, int vector, int rows, int columns, Vec offset) {
  for (ptrdiff_t i = 0; i < rows; ++i)
    for (ptrdiff_t j = 0; j < columns; ++j) {
      float* at = to.data + i * to.row + j * to.column + vector * to.stream;
      store(at, load(at) + offset);
    }
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

// Compute the outputs of one filled window. result: a buffer for vectors that cannot be computed in y itself.
template <class Step>
void multiply_band(const Plan& plan, const BandOfImage& band, const std::vector<ptrdiff_t>& offsets,
                          const float* window, const float* filter, ptrdiff_t filter_stream, const Finish& finish,
                          const Images& y, float* result) {
  const WindowShape& shape = plan.scratch.window;
  const ptrdiff_t row = plan.product.stride_h * shape.row(), width = band.width;
  for_column_blocks(blocks_of(y.c), [&](auto vectors, int k) {
    const bool in_place = y.data.type == FLOAT32 && y.sc == 1 && (k + vectors.value) * VL <= y.c;
    for (int i = 0; i < band.height; i += plan.scratch.rows_at_once) {
      const int rows = std::min(plan.scratch.rows_at_once, band.height - i);
      const RowTarget to = in_place ? RowTarget{y.at(band.image, k * VL, band.top + i, band.left), y.sh, y.sw, VL}
                                    : RowTarget{result, width * VL, VL, rows * width * VL};
      for_inner_parts(offsets, shape.planar ? 1 : VL, filter + k * filter_stream, filter_stream,
                      [&](const Inner& inner, bool is_first) {
                        multiply_rows<vectors.value, Step>(!is_first, shape, plan.product, window + i * row, inner,
                                                           rows, band.width, to);
                      });
      for (int j = 0; j < vectors.value; ++j) {
        const int channel = (k + j) * VL;
        if (finish.bias) add_to_rows(to, j, rows, band.width, load_first(finish.bias + channel, y.c - channel));
        float* lanes = to.data + j * to.stream;
        const Region region{band.image, channel, band.top + i, band.left, rows, band.width};
        const Window window_of_y{lanes, to.row, to.column};
        if (finish.epilogue) apply(finish.epilogue, y, region, window_of_y);
        if (!in_place) scatter(y, region, window_of_y, lanes);
      }
    }
  });
}

// of_pairs: whether the channels of x, and rows of the filter, are pairs.
inline void run(const Plan& plan, const Images& x, bool of_pairs, const float* packed, const Finish& finish,
                const Images& y, float* scratch, int threads) {
  const Product& product = plan.product;
  const ProductScratch& layout = plan.scratch;
  const Band band = layout.band;
  const std::vector<ptrdiff_t> offsets = inner_offsets(product.taps, layout.window);
  const Span rows = span_of(product.taps, &Tap::row), columns = columns_of(product.taps);
  const bool of_taps = are_in_pairs(product.taps);
  const float* filter = packed + product.filter_offset;
  const ptrdiff_t stream = ptrdiff_t(product.taps.size()) * padded(x.c) * VL;
  const int64_t down = ceil_div(y.h, band.rows), across = ceil_div(y.w, band.columns), tasks = y.n * down * across;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
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
    if (!of_pairs && layout.window.planar && y.sw == 1 && part.width >= VL) {
      const auto multiply = of_taps ? multiply_pixels<Pairs> : multiply_pixels<Singles>;
      multiply(layout.window, product.stride_h, part, offsets, window, filter, stream, finish, y, result);
    } else {
      const auto multiply = of_pairs || of_taps ? multiply_band<Pairs> : multiply_band<Singles>;
      multiply(plan, part, offsets, window, filter, stream, finish, y, result);
    }
  }
}

}  // namespace implicit_gemm
