// Register tiles of backward filter.
#pragma once

#include "implicit_gemm/filter_gradient.h"

namespace implicit_gemm {

template <class Step, int STEP>
void add_blocked_task(Layout<1, STEP> layout, const FilterGradient& f, const Unit& unit, ptrdiff_t offset, float* sum) {
  for_column_blocks(blocks_of(f.k), [&](auto vectors, int k) {
    for (int i = 0; i < VL; i += MR_TRANSPOSED) {
      const auto block_of = [&](int row) { return unit.window + offset + i + row * f.stride_h * f.window.row(); };
      register_tile<MR_TRANSPOSED, vectors.value, Step>(
          true, layout, block_of, unit.rows, f.steps(), unit.dy + ptrdiff_t(k) * unit.rows * f.steps() * VL,
          ptrdiff_t(unit.rows) * f.steps() * VL, sum + (ptrdiff_t(k) * VL + i) * VL, ptrdiff_t(VL) * VL);
    }
  });
}

template <class Step>
void Arithmetic<Step>::add_blocked(const FilterGradient& f, const Unit& unit, ptrdiff_t offset, float* sum) {
  if (Step::NUMBERS == 1 && f.stride_w == 1) return add_blocked_task<Step>(Layout<1, VL>{}, f, unit, offset, sum);
  add_blocked_task<Step>(Layout<1, AT_RUN_TIME>{1, Step::NUMBERS * f.stride_w * VL}, f, unit, offset, sum);
}

// Add dy, times the pixels that ROWS (channel, tap) pairs read, to the planar accumulator [K / VL][C * taps][VL].
template <int ROWS, int VECTORS, class Step>
INLINE void tile_of_taps(const FilterGradient& f, const Unit& unit, const ptrdiff_t* offsets, const float* dy,
                         float* sum, ptrdiff_t sum_stream) {
  const ptrdiff_t step = f.planar_stride() * Step::NUMBERS;
  Vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sums[i][j] = load(sum + j * sum_stream + i * VL);
  for (int row = 0; row < unit.rows; ++row) {
    const float* window = unit.window + row * f.stride_h * f.window.row();
    const float* pixels[ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) pixels[i] = window + offsets[i];
    const float* of_row = dy + row * unit.dy_row;
    for (ptrdiff_t column = 0; column < f.steps() * step; column += step, of_row += unit.dy_step) {
      Vec right[VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) right[j] = load(of_row + j * unit.dy_stream);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const Vec left = broadcast(pixels[i][column]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) sums[i][j] = Step::add_product(sums[i][j], left, right[j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) store(sum + j * sum_stream + i * VL, sums[i][j]);
}

template <int ROWS, int VECTORS, class Step>
INLINE void tile_of_taps(int rows, const FilterGradient& f, const Unit& unit, const ptrdiff_t* offsets, const float* dy,
                         float* sum, ptrdiff_t sum_stream) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_of_taps<ROWS - 1, VECTORS, Step>(rows, f, unit, offsets, dy, sum, sum_stream);
  }
  tile_of_taps<ROWS, VECTORS, Step>(f, unit, offsets, dy, sum, sum_stream);
}

template <class Step>
void Arithmetic<Step>::add_planar(const FilterGradient& f, const Unit& unit, const std::vector<ptrdiff_t>& offsets,
                                  float* sums) {
  const int pairs = int(offsets.size());
  for_column_blocks(blocks_of(f.k), [&](auto vectors, int k) {
    for_row_tiles(pairs, [&](int first, int count) {
      tile_of_taps<MR, vectors.value, Step>(count, f, unit, &offsets[first],
                                            unit.dy + ptrdiff_t(k) * unit.dy_stream,
                                            sums + (ptrdiff_t(k) * pairs + first) * VL, ptrdiff_t(pairs) * VL);
    });
  });
}

}  // namespace implicit_gemm
