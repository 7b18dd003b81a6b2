// Register tiles of forward and backward data, with output channels in the vectors.
#pragma once

#include "implicit_gemm/forward.h"

namespace implicit_gemm {

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
  constexpr int OF_PLANES = 1;  // as a constant: a loop over steps would pass what neighbours share through the stack
  const int steps = ROW == 1 ? OF_PLANES : inner.steps;
  for_row_tiles(columns, [&](int first, int count) {
    const float* from = window + first * layout.row();
    if (!adds)
      for (int i = 0; i < count; ++i) prefetch_to_write(to.data + (first + i) * to.column, VECTORS * VL);
    const auto block_of = [&](int block) { return from + inner.offsets[block]; };
    register_tile_of<MR, VECTORS, Step>(count, adds, layout, block_of, inner.blocks, steps, inner.filter,
                                        inner.filter_stream, to.data + first * to.column, to.stream, to.column);
  });
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
void multiply_rows(bool adds, const WindowShape& shape, const Product& product, const float* window, const Inner& inner,
                   int rows, int width, const RowTarget& to) {
  if (rows == 1 && shape.planar) return multiply_row<VECTORS, Step>(adds, Layout<1, 1>{}, window, inner, width, to);
  if (rows == 1 && product.stride_w == 1)
    return multiply_row<VECTORS, Step>(adds, Layout<VL, 1>{}, window, inner, width, to);
  if (rows == 1 && product.stride_w == 2)
    return multiply_row<VECTORS, Step>(adds, Layout<2 * VL, 1>{}, window, inner, width, to);
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

template <class Step>
void Arithmetic<Step>::multiply_band(const Plan& plan, const BandOfImage& band, const std::vector<ptrdiff_t>& offsets,
                                     const float* window, const float* filter, ptrdiff_t filter_stream,
                                     const Finish& finish, const Images& y, float* result) {
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

}  // namespace implicit_gemm
