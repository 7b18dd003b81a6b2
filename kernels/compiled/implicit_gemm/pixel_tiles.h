// Forward from a planar window to a planar image: vectors hold neighbouring pixels, and nothing is transposed.
#pragma once

#include "implicit_gemm/forward.h"

namespace implicit_gemm {

constexpr int PIXEL_VECTORS = 3;  // with MR_TRANSPOSED filters they fill the registers

// Compute FILTERS filters for VECTORS vectors of pixels. bias: a float for each filter.
//   window + offsets[i]: the pixels for element i of the filters; filter + i * VL: that element of each filter
template <int FILTERS, int VECTORS, class Step>
INLINE void tile_of_pixels(const float* window, const std::vector<ptrdiff_t>& offsets, const float* filter,
                           const float* bias, float* y, ptrdiff_t channel_stride) {
  Vec sum[FILTERS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < FILTERS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = broadcast(bias[i]);
  for (const ptrdiff_t offset : offsets) {
    Vec pixels[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) pixels[j] = load(window + offset + j * VL);
#pragma GCC unroll 16
    for (int i = 0; i < FILTERS; ++i) {
      const Vec element = broadcast(filter[i]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) sum[i][j] = Step::add_product(sum[i][j], element, pixels[j]);
    }
    filter += VL;
  }
#pragma GCC unroll 16
  for (int i = 0; i < FILTERS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) store(y + i * channel_stride + j * VL, sum[i][j]);
}

// Call body(first column, vectors) over at least VL columns. The last vectors end where the row ends and recompute some
// pixels, so that no vector is partial.
template <class Body>
INLINE void for_pixel_tiles(int columns, Body body) {
  const int vectors = blocks_of(columns), tiles = ceil_div(vectors, std::min(PIXEL_VECTORS, columns / VL));
  for (int i = 0; i < tiles; ++i) {
    const int first = vectors * i / tiles, count = vectors * (i + 1) / tiles - first;
    const int column = std::min(first * VL, columns - count * VL);
    if (count == 3)
      body(column, Vectors<3>{});
    else if (count == 2)
      body(column, Vectors<2>{});
    else
      body(column, Vectors<1>{});
  }
}

// Compute one row of outputs of `filters` filters, at most FILTERS.
template <int FILTERS, class Step>
INLINE void row_of_pixels(int filters, const float* window, const std::vector<ptrdiff_t>& offsets, const float* filter,
                          const float* bias, int columns, float* y, ptrdiff_t channel_stride) {
  if constexpr (FILTERS > 1) {
    if (filters < FILTERS)
      return row_of_pixels<FILTERS - 1, Step>(filters, window, offsets, filter, bias, columns, y, channel_stride);
  }
  for_pixel_tiles(columns, [&](int first, auto vectors) {
    tile_of_pixels<FILTERS, vectors.value, Step>(window + first, offsets, filter, bias, y + first, channel_stride);
  });
}

// Write `rows` contiguous rows of `columns` floats to rows that are `stride` elements apart.
template <class T>
void write_rows(const float* from, int rows, int columns, T* to, ptrdiff_t stride) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; j += VL)
      store_first(to + i * stride + j, load_first(from + ptrdiff_t(i) * columns + j, columns - j), columns - j);
}

static_assert(MR_TRANSPOSED <= NV * VL);  // the rows of results fit the buffer

template <class Step>
void Arithmetic<Step>::multiply_pixels(const Plan& plan, const BandOfImage& band, const std::vector<ptrdiff_t>& offsets,
                                       const float* window, const float* filter, ptrdiff_t filter_stream,
                                       const Finish& finish, const Images& y, float* result) {
  const ptrdiff_t window_row = plan.product.stride_h * plan.scratch.window.row();
  const bool in_place = y.data.type == FLOAT32;
  for (int i = 0; i < band.height; ++i)
    for (int k = 0; k < y.c; k += MR_TRANSPOSED) {
      const int filters = std::min(MR_TRANSPOSED, y.c - k);
      const ptrdiff_t offset = y.offset(band.image, k, band.top + i, band.left);
      float* rows = in_place ? y.data.as<float>() + offset : result;
      const ptrdiff_t row = in_place ? y.sc : band.width;
      alignas(Vec) float of_filters[VL];
      store(of_filters, finish.bias ? load_first(finish.bias + k, filters) : Vec{});
      row_of_pixels<MR_TRANSPOSED, Step>(filters, window + i * window_row, offsets,
                                         filter + k / VL * filter_stream + k % VL, of_filters, band.width, rows, row);
      for (int channel = 0; finish.epilogue && channel < filters; ++channel)
        apply(finish.epilogue, y.data + offset + channel * y.sc, rows + channel * row, band.width);
      if (!in_place) y.data.visit([&](auto* first) { write_rows(result, filters, band.width, first + offset, y.sc); });
    }
}

}  // namespace implicit_gemm
