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
void Arithmetic<Step>::multiply(bool adds, const std::vector<Run>& runs, const Frames& frames, int taps, int inner,
                                int column_blocks, const float* a, const float* b, float* c, int summed) {
  const ptrdiff_t of_columns = ptrdiff_t(taps) * inner * VL;
  const int blocks_of_tap = inner / VL;
  int tiles = 0;
  for (const Run& run : runs) tiles += (run.frames * frames.rows + MR - 1) / MR;
  for_column_blocks(column_blocks, [&](auto vectors, int k) {
    const NextColumns next{b + (k + vectors.value) * of_columns, tiles};
    int tile = 0;
    for (const Run& run : runs) {
      const float* const from = a + ptrdiff_t(run.source) * frames.rows * VL;
      float* const to = c + (ptrdiff_t(k) * frames.of_c + run.target) * frames.rows * VL;
      if (!run.taps && !adds)
        for (int j = 0; j < vectors.value; ++j)
          std::fill_n(to + ptrdiff_t(j) * frames.of_c * frames.rows * VL, run.frames * frames.rows * VL, 0.0f);
      const ptrdiff_t between_taps = ptrdiff_t(frames.tap_step) * frames.rows, blocks = run.taps * blocks_of_tap;
      for_row_tiles(run.frames * frames.rows, [&](int first, int count) {
        const auto block_of = [&](int block) INLINE_LAMBDA {
          next.fetch(tile, block, blocks);
          const int tap = run.taps == 1 ? 0 : block / blocks_of_tap;
          const ptrdiff_t in_frames = ptrdiff_t(block - tap * blocks_of_tap) * frames.of_a * frames.rows;
          return from + (in_frames + tap * between_taps + first) * VL;
        };
        register_tile_of<MR, vectors.value, Step>(count, adds || run.adds, Layout<VL, 1>{}, block_of, blocks, VL,
                                                  b + k * of_columns + ptrdiff_t(run.tap) * inner * VL, of_columns,
                                                  to + first * VL, ptrdiff_t(frames.of_c) * frames.rows * VL, VL,
                                                  summed / VL);
        ++tile;
      });
    }
  });
}

template <class Step>
void Arithmetic<Step>::add_transposed(const std::vector<Run>& runs, const Frames& frames, int taps, int rows,
                                      int column_blocks, const float* a, const float* b, float* c) {
  const ptrdiff_t of_a = ptrdiff_t(frames.of_a) * frames.rows * VL, of_b = ptrdiff_t(frames.of_c) * frames.rows * VL;
  for (const Run& run : runs) {
    const float* const from = a + ptrdiff_t(run.source) * frames.rows * VL;
    for_column_blocks(column_blocks, [&](auto vectors, int k) {
      for (int i = 0; i < rows; i += MR_TRANSPOSED) {
        const auto block_of = [&](int) { return from + i / VL * of_a + i % VL; };
        register_tile<MR_TRANSPOSED, vectors.value, Step>(
            true, Layout<1, VL>{}, block_of, 1, run.frames * frames.rows,
            b + k * of_b + ptrdiff_t(run.target) * frames.rows * VL, of_b,
            c + ((ptrdiff_t(k) * taps + run.tap) * rows + i) * VL, ptrdiff_t(taps) * rows * VL);
      }
    });
  }
}

}  // namespace winograd
