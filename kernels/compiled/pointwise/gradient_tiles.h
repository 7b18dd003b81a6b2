// Register tiles of the filter gradient.
#pragma once

#include "pointwise/gradient.h"
#include "pointwise/product_tiles.h"

namespace pointwise {

template <int ROWS, int VECTORS>
INLINE void add_outer_tile(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
    if (i >= to.rows) return;
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) {
      float* at = to.data + i * to.row + j * VL;
      const int columns = to.columns - j * VL;
      store_first(at, load_first(at, columns) + sum[i][j], columns);
    }
  }
}

typedef float Dots __attribute__((vector_size(DOT_COLUMNS * sizeof(float)), aligned(4), may_alias));

// Return the sums of neighbouring lanes: every four lanes have two of a, then two of b.
INLINE Vec pair_sums(Vec a, Vec b) {
  Lanes even, odd;
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i) {
    even[i] = i / 4 * 4 + i % 2 * 2 + (i % 4 < 2 ? 0 : VL);
    odd[i] = even[i] + 1;
  }
  return shuffled(a, b, even) + shuffled(a, b, odd);
}

// Return the sum of the lanes of each vector.
INLINE Dots lane_sums(const Vec (&sum)[DOT_COLUMNS]) {
  float quarters[VL];
  store(quarters, pair_sums(pair_sums(sum[0], sum[1]), pair_sums(sum[2], sum[3])));
  Dots dots = *reinterpret_cast<const Dots*>(quarters);
  for (int i = DOT_COLUMNS; i < VL; i += DOT_COLUMNS) dots += *reinterpret_cast<const Dots*>(quarters + i);
  return dots;
}

template <int ROWS>
INLINE void add_dot_tile(const Vec (&sum)[ROWS][DOT_COLUMNS], const MatrixPlace& to) {
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    const Dots dots = lane_sums(sum[i]);
    float* at = to.data + i * to.row;
    if (to.columns >= DOT_COLUMNS)
      *reinterpret_cast<Dots*>(at) += dots;
    else
      for (int j = 0; j < to.columns; ++j) at[j] += dots[j];
  }
}

// Vector `step` of row i is at a[(step * ROWS + i) * VL], that of column j at b[(step * DOT_COLUMNS + j) * VL].
template <int ROWS, class Step>
INLINE void dot_tile_of(int rows, int steps, const float* a, const float* b, const MatrixPlace& to) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return dot_tile_of<ROWS - 1, Step>(rows, steps, a, b, to);
  }
  Vec sum[ROWS][DOT_COLUMNS] = {};
  for (int step = 0; step < steps; ++step, a += ROWS * VL, b += DOT_COLUMNS * VL) {
    Vec left[ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) left[i] = load(a + i * VL);
#pragma GCC unroll 4
    for (int j = 0; j < DOT_COLUMNS; ++j) {
      const Vec right = load(b + j * VL);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) sum[i][j] = Step::add_product(sum[i][j], left[i], right);
    }
  }
  add_dot_tile<ROWS>(sum, to);
}

template <class Step>
void Arithmetic<Step>::add_outer_products(const FilterGradient& f, const GradientTask& task, const float* x, float* dy,
                                          float* dw) {
  const int rows = std::min(f.k_block, f.dy.c - task.k);
  const ptrdiff_t block_floats = ptrdiff_t(f.chunk) * VL;
  copy_pixels(f, channels_of(f.dy, task.k, rows), task.first, task.count, dy);
  for_even_column_blocks<NV_TRANSPOSED>(blocks_of(task.c_end - task.c), [&](auto vectors, int block) {
    constexpr int VECTORS = vectors.value;
    const int c = task.c + block * VL;
    for (int i = 0; i < rows; i += MR_TRANSPOSED) {
      const MatrixPlace to{dw + ptrdiff_t(task.k + i) * f.x.c + c, f.x.c, rows - i, f.x.c - c};
      register_sums<MR_TRANSPOSED, VECTORS, Step>(
          Layout<1, VL>{}, [&](int) { return dy + i / VL * block_floats + i % VL; }, 1, ceil_div(task.count, f.step),
          x + ptrdiff_t(c) * f.chunk, block_floats,
          [&](TileSums<MR_TRANSPOSED, VECTORS> sum) INLINE_LAMBDA { add_outer_tile<MR_TRANSPOSED, VECTORS>(sum, to); });
    }
  });
}

// Fetch part `part` of `parts` of the floats [from, from + count).
INLINE void prefetch_part(const float* from, ptrdiff_t count, int part, int parts) {
  const ptrdiff_t begin = count * part / parts;
  prefetch_later(from + begin, count * (part + 1) / parts - begin);
}

template <class Step>
void Arithmetic<Step>::add_rows_in_place(const FilterGradient& f, int64_t first, int count, float* normalized,
                                         float* dw) {
  if constexpr (Step::NUMBERS == 1) {
    const float* x = f.x.floats() + first * f.x.sw;
    const float* right = f.prologue ? normalized : x;
    const ptrdiff_t right_row = f.prologue ? f.x.c : f.x.sw;
    if (f.prologue) normalize_rows(f.prologue, NO_PAIRS, x, f.x.sw, f.x.c, count, normalized, right_row);
    const float* dy = f.dy.floats() + first * f.dy.sw;
    const ptrdiff_t x_floats = count * ptrdiff_t(f.x.sw), dy_floats = count * ptrdiff_t(f.dy.sw);
    const int column_blocks = blocks_of(f.x.c);
    const int tiles = ceil_div(column_blocks, NV_TRANSPOSED) * ceil_div(f.dy.c, MR_TRANSPOSED);
    int tile = 0;
    for_even_column_blocks<NV_TRANSPOSED>(column_blocks, [&](auto vectors, int block) {
      constexpr int VECTORS = vectors.value;
      const int c = block * VL;
      for (int k = 0; k < f.dy.c; k += MR_TRANSPOSED, ++tile) {
        prefetch_part(x + x_floats, x_floats, tile, tiles);
        prefetch_part(dy + dy_floats, dy_floats, tile, tiles);
        const MatrixPlace to{dw + ptrdiff_t(k) * f.x.c + c, f.x.c, f.dy.c - k, f.x.c - c};
        register_sums<MR_TRANSPOSED, VECTORS, Step>(
            Layout<1, AT_RUN_TIME>{1, f.dy.sw}, [&](int) { return dy + k; }, 1, count, right + c, VL,
            [&](TileSums<MR_TRANSPOSED, VECTORS> sum)
                INLINE_LAMBDA { add_outer_tile<MR_TRANSPOSED, VECTORS>(sum, to); },
            right_row);
      }
    });
  }
}

template <class Step>
void Arithmetic<Step>::add_dot_products(const FilterGradient& f, const GradientTask& task, const float* x, float* dy,
                                        float* dw) {
  const int rows = std::min(f.k_block, f.dy.c - task.k), steps = blocks_of(ceil_div(task.count, f.step));
  const Images planes = joined_rows(f.dy);
  for (int i = 0; i < rows; i += DOT_ROWS) {
    const int tile_rows = std::min(DOT_ROWS, rows - i);
    copy_chunk_planes(f, channels_of(planes, task.k + i, tile_rows), task.first, task.count, tile_rows,
                      dy + ptrdiff_t(i) * f.chunk);
  }
  for (int c = task.c; c < task.c_end; c += DOT_COLUMNS)
    for (int i = 0; i < rows; i += DOT_ROWS) {
      const MatrixPlace to{dw + ptrdiff_t(task.k + i) * f.x.c + c, f.x.c, rows - i, f.x.c - c};
      dot_tile_of<DOT_ROWS, Step>(rows - i, steps, dy + ptrdiff_t(i) * f.chunk, x + ptrdiff_t(c) * f.chunk, to);
    }
}

}  // namespace pointwise
