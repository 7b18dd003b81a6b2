// Register tiles of the matrix products.
#pragma once

#include "common/matmul.h"
#include "winograd/arithmetic.h"

namespace winograd {

// The next columns of B, prefetched into L2 during a product: B is in L3 or in memory, and the first tile that reads a
// column would wait for each of its cache lines. Every tile prefetches a share, block by block, so that the prefetches
// are spread over the arithmetic.
struct NextColumns {
  const float* first;
  int tiles;

  static constexpr int LINE = 64 / sizeof(float);
  static constexpr int LINES_OF_BLOCK = NV * VL * VL / LINE;  // prefetched by all tiles together

  INLINE_MEMBER void fetch(int tile, int block, int blocks) const {
    const int lines = (LINES_OF_BLOCK + tiles - 1) / tiles;
    if (lines * tile >= LINES_OF_BLOCK) return;
    const float* from = first + (ptrdiff_t(tile) * blocks + block) * lines * LINE;
    for (int line = 0; line < lines; ++line) __builtin_prefetch(from + line * LINE, 0, 2);
  }
};

template <class Step>
void Arithmetic<Step>::multiply(bool adds, int rows, int inner, int column_blocks, const float* a, const float* b,
                                float* c, int summed) {
  for_column_blocks(column_blocks, [&](auto vectors, int k) {
    const NextColumns next{b + ptrdiff_t(k + vectors.value) * inner * VL, (rows + MR - 1) / MR};
    int tile = 0;
    for_row_tiles(rows, [&](int first, int count) {
      const auto block_of = [&](int block) INLINE_LAMBDA {
        next.fetch(tile, block, inner / VL);
        return a + (ptrdiff_t(block) * rows + first) * VL;
      };
      register_tile_of<MR, vectors.value, Step>(
          count, adds, Layout<VL, 1>{}, block_of, inner / VL, VL, b + ptrdiff_t(k) * inner * VL, ptrdiff_t(inner) * VL,
          c + (ptrdiff_t(k) * rows + first) * VL, ptrdiff_t(rows) * VL, VL, summed / VL);
      ++tile;
    });
  });
}

template <class Step>
void Arithmetic<Step>::add_transposed(int rows, int inner, int column_blocks, const float* a, const float* b,
                                      float* c) {
  for_column_blocks(column_blocks, [&](auto vectors, int k) {
    for (int i = 0; i < rows; i += MR_TRANSPOSED) {
      const auto block_of = [&](int) { return a + ptrdiff_t(i / VL) * inner * VL + i % VL; };
      register_tile<MR_TRANSPOSED, vectors.value, Step>(true, Layout<1, VL>{}, block_of, 1, inner,
                                                        b + ptrdiff_t(k) * inner * VL, ptrdiff_t(inner) * VL,
                                                        c + (ptrdiff_t(k) * rows + i) * VL, ptrdiff_t(rows) * VL);
    }
  });
}

}  // namespace winograd
