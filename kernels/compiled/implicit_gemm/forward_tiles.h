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

// The last steps of outputs that are written in place: a bias for each output channel, which may be null, and bounds.
struct LastSteps {
  const float* bias;
  float least, most;
};

// Write the sums of a tile, output i to to(i), or add them to what is there. last: null before the last part.
template <int OUTPUTS, int VECTORS, class To>
INLINE void write_outputs(const Vec (&sum)[OUTPUTS][VECTORS], bool adds, ptrdiff_t stream, const LastSteps* last,
                          To to) {
  if (!last) return write_tile(sum, adds, stream, to);
  const Vec least = broadcast(last->least), most = broadcast(last->most);
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const Vec bias = last->bias ? load(last->bias + j * VL) : Vec{};
#pragma GCC unroll 16
    for (int i = 0; i < OUTPUTS; ++i) {
      float* at = to(i) + j * stream;
      Vec value = (adds ? load(at) + sum[i][j] : sum[i][j]) + bias;
      value = value < least ? least : value;
      store(at, value > most ? most : value);
    }
  }
}

constexpr int INNER_STEPS = 256;

// Call body(inner, is_first, is_last) for each part of the inner dimension.
template <class Body>
INLINE void for_inner_parts(const std::vector<ptrdiff_t>& offsets, int steps, const float* filter,
                            ptrdiff_t filter_stream, Body body) {
  const int blocks = int(offsets.size()), parts = int(ceil_div(int64_t(blocks) * steps, int64_t(INNER_STEPS)));
  for (int i = 0, first = 0; i < parts; ++i) {
    const int end = int(int64_t(blocks) * (i + 1) / parts);
    body(Inner{&offsets[first], end - first, steps, filter + ptrdiff_t(first) * steps * VL, filter_stream}, i == 0, end == blocks);
    first = end;
  }
}

// Compute `outputs` neighbouring outputs of a row, at most OUTPUTS.
template <int OUTPUTS, int VECTORS, class Step, int ROW>
INLINE void tile_of_row(int outputs, bool adds, Layout<ROW, 1> layout, const float* window, const Inner& inner,
                        int steps, const RowTarget& to, const LastSteps* last) {
  if constexpr (OUTPUTS > 1) {
    if (outputs < OUTPUTS)
      return tile_of_row<OUTPUTS - 1, VECTORS, Step>(outputs, adds, layout, window, inner, steps, to, last);
  }
  const auto block_of = [&](int block) INLINE_LAMBDA { return window + inner.offsets[block]; };
  const auto finish = [&](const Vec(&sum)[OUTPUTS][VECTORS]) INLINE_LAMBDA {
    write_outputs(sum, adds, to.stream, last, [&](int i) INLINE_LAMBDA { return to.data + i * to.column; });
  };
  register_sums<OUTPUTS, VECTORS, Step>(layout, block_of, inner.blocks, steps, inner.filter, inner.filter_stream,
                                        finish);
}

// Compute one row of outputs, for VECTORS vectors of output channels.
template <int VECTORS, class Step, int ROW>
void multiply_row(bool adds, Layout<ROW, 1> layout, const float* window, const Inner& inner, int columns,
                  const RowTarget& to, const LastSteps* last) {
  constexpr int OF_PLANES = 1;  // as a constant: a loop over steps would pass what neighbours share through the stack
  const int steps = ROW == 1 ? OF_PLANES : inner.steps;
  for_row_tiles(columns, [&](int first, int count) {
    const RowTarget tile{to.data + first * to.column, to.row, to.column, to.stream};
    if (!adds)
      for (int i = 0; i < count; ++i) prefetch_to_write(tile.data + i * to.column, VECTORS * VL);
    tile_of_row<MR, VECTORS, Step>(count, adds, layout, window + first * layout.row(), inner, steps, tile, last);
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
                             const Inner& inner, const RowTarget& to, const LastSteps* last) {
  const float* pixels[OUTPUTS];
#pragma GCC unroll 16
  for (int i = 0; i < OUTPUTS; ++i) pixels[i] = window + (first + i) / width * row + (first + i) % width * column;
  const auto rows_of = [&](int block) INLINE_LAMBDA { return PixelRows<OUTPUTS>{pixels, inner.offsets[block]}; };
  const auto finish = [&](const Vec(&sum)[OUTPUTS][VECTORS]) INLINE_LAMBDA {
    write_outputs(sum, adds, to.stream, last, [&](int i) INLINE_LAMBDA {
      return to.data + (first + i) / width * to.row + (first + i) % width * to.column;
    });
  };
  sums_of_rows<OUTPUTS, VECTORS, Step>(rows_of, inner.blocks, inner.steps, inner.filter, inner.filter_stream, finish);
}

template <int OUTPUTS, int VECTORS, class Step>
INLINE void tile_across_rows(int outputs, bool adds, int first, int width, const float* window, ptrdiff_t row,
                             ptrdiff_t column, const Inner& inner, const RowTarget& to, const LastSteps* last) {
  if constexpr (OUTPUTS > 1) {
    if (outputs < OUTPUTS)
      return tile_across_rows<OUTPUTS - 1, VECTORS, Step>(outputs, adds, first, width, window, row, column, inner, to,
                                                          last);
  }
  tile_across_rows<OUTPUTS, VECTORS, Step>(adds, first, width, window, row, column, inner, to, last);
}

// Compute `rows` rows of `width` outputs, for VECTORS vectors of output channels.
template <int VECTORS, class Step>
void multiply_rows(bool adds, const WindowShape& shape, const Product& product, const float* window, const Inner& inner,
                   int rows, int width, const RowTarget& to, const LastSteps* last) {
  if (rows == 1 && shape.planar) return multiply_row<VECTORS, Step>(adds, Layout<1, 1>{}, window, inner, width, to, last);
  if (rows == 1 && product.stride_w == 1)
    return multiply_row<VECTORS, Step>(adds, Layout<VL, 1>{}, window, inner, width, to, last);
  if (rows == 1 && product.stride_w == 2)
    return multiply_row<VECTORS, Step>(adds, Layout<2 * VL, 1>{}, window, inner, width, to, last);
  const ptrdiff_t row = product.stride_h * shape.row(), column = shape.planar ? 1 : product.stride_w * VL;
  for_row_tiles(rows * width, [&](int first, int count) {
    tile_across_rows<MR, VECTORS, Step>(count, adds, first, width, window, row, column, inner, to, last);
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
  const Epilogue& epilogue = finish.epilogue;
  for_column_blocks(blocks_of(y.c), [&](auto vectors, int k) {
    const bool in_place = y.data.type == FLOAT32 && y.sc == 1 && (k + vectors.value) * VL <= y.c;
    const bool has_floats = !finish.bias || finish.bias.type == FLOAT32;
    const bool in_registers = in_place && has_floats && !epilogue.added && epilogue.activation != SILU;
    const float* bias = finish.bias ? finish.bias.as<const float>() + k * VL : nullptr;
    const LastSteps last{bias, epilogue.least, epilogue.most};
    for (int i = 0; i < band.height; i += plan.scratch.rows_at_once) {
      const int rows = std::min(plan.scratch.rows_at_once, band.height - i);
      const RowTarget to = in_place ? RowTarget{y.at(band.image, k * VL, band.top + i, band.left), y.sh, y.sw, VL}
                                    : RowTarget{result, width * VL, VL, rows * width * VL};
      for_inner_parts(offsets, shape.planar ? 1 : VL, filter + k * filter_stream, filter_stream,
                      [&](const Inner& inner, bool is_first, bool is_last) {
                        multiply_rows<vectors.value, Step>(!is_first, shape, plan.product, window + i * row, inner,
                                                           rows, band.width, to,
                                                           in_registers && is_last ? &last : nullptr);
                      });
      if (in_registers) continue;
      for (int j = 0; j < vectors.value; ++j) {
        const int channel = (k + j) * VL;
        if (finish.bias) add_to_rows(to, j, rows, band.width, load_first(finish.bias + channel, y.c - channel));
        float* lanes = to.data + j * to.stream;
        const Region region{band.image, channel, band.top + i, band.left, rows, band.width};
        const Window window_of_y{lanes, to.row, to.column};
        if (epilogue) apply(epilogue, y, region, window_of_y);
        if (!in_place) scatter(y, region, window_of_y, lanes);
      }
    }
  });
}

}  // namespace implicit_gemm
