// The register tile of C (+)= A B, from which all matrix products are built.
//
// All matrices are *blocked*: a matrix of R rows and Q columns is stored as [ceil(Q / VL)][R][VL], so that a vector
// holds VL neighbouring columns of one row, and the rows of a block are contiguous, one cache line each with AVX-512.
// Steps of the inner dimension are Singles (floats) or Pairs (of bfloat16 numbers, in the place of floats).
#pragma once

#include <algorithm>

#include "common/tiles.h"

// Register tile: MR rows by NV vectors; accumulators, NV vectors of B and one broadcast must fit the registers.
constexpr int NV = 2;
constexpr int MR = REGISTERS == 32 ? 14 : 6;
constexpr int MR_TRANSPOSED = REGISTERS == 32 && VL == 16 ? 8 : 4;  // divides VL
constexpr int NV_TRANSPOSED = 3;  // vectors by MR_TRANSPOSED rows, where a tile may be that wide

constexpr int AT_RUN_TIME = 0;  // for ROW and STEP

// The layout of a block of A: element (i, j) is at block[i * row() + j * step()]. Strides may be template constants.
template <int ROW, int STEP>
struct Layout {
  ptrdiff_t run_time_row = 0, run_time_step = 0;
  INLINE_MEMBER ptrdiff_t row() const { return ROW == AT_RUN_TIME ? run_time_row : ROW; }
  INLINE_MEMBER ptrdiff_t step() const { return STEP == AT_RUN_TIME ? run_time_step : STEP; }
};

// The elements of one step of A, in ROWS rows that are `row` floats apart.
template <int ROWS, int ROW>
struct RowPointers {
  const float* first;
  INLINE_MEMBER RowPointers(const float* element, ptrdiff_t) : first(element) {}
  INLINE_MEMBER float of_row(int i) const { return first[i * ROW]; }
  INLINE_MEMBER void advance(ptrdiff_t step) { first += step; }
};

// Rows that are a run-time distance apart. If they are many, there is a pointer to every fourth only: an address can
// have the other three as its index. The compiler would keep a pointer to each row, and spill sums to the stack.
template <int ROWS>
struct RowPointers<ROWS, AT_RUN_TIME> {
  static constexpr bool ARE_MANY = ROWS > 8;
  static constexpr int GROUPS = ARE_MANY ? (ROWS + 3) / 4 : 1;
  const float* first[GROUPS];
  ptrdiff_t row, three_rows;
  INLINE_MEMBER RowPointers(const float* element, ptrdiff_t distance) : row(distance), three_rows(3 * distance) {
#pragma GCC unroll 4
    for (int i = 0; i < GROUPS; ++i) {
      first[i] = element + 4 * i * distance;
      if constexpr (ARE_MANY) asm("" : "+r"(first[i]));  // hides how they are related
    }
    if constexpr (ARE_MANY) asm("" : "+r"(three_rows));
  }
  INLINE_MEMBER float of_row(int i) const {
    if constexpr (!ARE_MANY) return first[0][i * row];
    return first[i / 4][i % 4 == 3 ? three_rows : i % 4 * row];
  }
  INLINE_MEMBER void advance(ptrdiff_t step) {
#pragma GCC unroll 4
    for (int i = 0; i < GROUPS; ++i) first[i] += step;
  }
};

// Steps of a block of A as a tile: where its rows begin, and the distance between them in floats.
struct LeftTile {
  const float* data;
  ptrdiff_t distance;
};

// ROWS rows of a block of A that has a layout.
template <int ROWS, int ROW, int STEP>
struct BlockRows {
  const float* block;
  Layout<ROW, STEP> layout;
  RowPointers<ROWS, ROW> step{block, layout.row()};

  INLINE_MEMBER float of_row(int i) const { return step.of_row(i); }
  INLINE_MEMBER void advance() { step.advance(layout.step()); }
  INLINE_MEMBER LeftTile tile(int first, int count, float* copy) const {
    if constexpr (STEP == 1) return {block + first, layout.row()};
    Vec rows[VL] = {};
    for (int i = 0; i < count; ++i) rows[i] = load_first(block + (first + i) * layout.step(), ROWS);
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) store(copy + i * VL, rows[i]);
    return {copy, VL};
  }
};

// Return rows of a block of A as a tile; copy: room for it. rows_of: an object of the caller.
using LeftOf = LeftTile (*)(const void* rows_of, int block, int first, int count, float* copy);

// Do the same as sums_of_rows below, in tiles, and store the sums of `rows` rows. One function serves all heights and
// layouts, since its arithmetic is done by few instructions.
template <int VECTORS>
__attribute__((noinline)) void sums_of_tiles(int rows, LeftOf left_of, const void* rows_of, int blocks, int steps,
                                             const float* b, ptrdiff_t b_stream, float* sums) {
  alignas(64) float copy[tiles::MOST_ROWS * VL];
  tiles::Sums<VECTORS> of_tiles(rows, steps);
  for (int block = 0; block < blocks; ++block)
    for (int first = 0; first < steps; first += VL) {
      const int count = std::min(VL, steps - first);
      const LeftTile left = left_of(rows_of, block, first, count, copy);
      of_tiles.add(count == VL, left.data, left.distance, b, b_stream);
      b += count * VL;
    }
  of_tiles.store_in(sums);
}

// Sum A * B over blocks and steps, and call finish(sum) with the ROWS x VECTORS sums.
//   rows_of(i): the rows of block i of A, like BlockRows
//   b: vector j of a step at b[j * b_stream], the next step b_step floats further; with Pairs only VL
template <int ROWS, int VECTORS, class Step, class RowsOf, class Finish>
INLINE void sums_of_rows(RowsOf rows_of, int blocks, int steps, const float* b, ptrdiff_t b_stream, Finish finish,
                         ptrdiff_t b_step = VL) {
  Vec sum[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = Vec{};
  if constexpr (Step::NUMBERS == 2) {
    if (steps >= VL && best_products() == OF_TILES) {
      alignas(64) float sums[ROWS * VECTORS * VL];
      const auto left_of = [](const void* of, int block, int first, int count, float* copy) {
        return (*static_cast<const RowsOf*>(of))(block).tile(first, count, copy);
      };
      sums_of_tiles<VECTORS>(ROWS, left_of, &rows_of, blocks, steps, b, b_stream, sums);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = load(sums + (i * VECTORS + j) * VL);
      blocks = 0;  // the loop below has nothing left; finish(sum) is compiled once
    }
  }
  for (int block = 0; block < blocks; ++block) {
    auto rows = rows_of(block);
#pragma GCC unroll 4
    for (int step = 0; step < steps; ++step, rows.advance(), b += b_step) {
      Vec right[VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) right[j] = load(b + j * b_stream);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const Vec left = broadcast(rows.of_row(i));
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = Step::add_product(sum[i][j], left, right[j]);
      }
    }
  }
  finish(sum);
}

// Do the same for blocks of A that have a layout. block_of(i): pointer to block i.
template <int ROWS, int VECTORS, class Step = Singles, int ROW, int STEP, class BlockOf, class Finish>
INLINE void register_sums(Layout<ROW, STEP> layout, BlockOf block_of, int blocks, int steps, const float* b,
                          ptrdiff_t b_stream, Finish finish, ptrdiff_t b_step = VL) {
  const auto rows_of = [&](int block) INLINE_LAMBDA { return BlockRows<ROWS, ROW, STEP>{block_of(block), layout}; };
  sums_of_rows<ROWS, VECTORS, Step>(rows_of, blocks, steps, b, b_stream, finish, b_step);
}

// Write the vectors of sums, vector j of row i to to(i) + j * stream, or add them to what is there.
template <int ROWS, int VECTORS, class To>
INLINE void write_tile(const Vec (&sum)[ROWS][VECTORS], bool adds, ptrdiff_t stream, To to) {
  if (adds) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      float* row = to(i);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) store(row + j * stream, load(row + j * stream) + sum[i][j]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
    float* row = to(i);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) store(row + j * stream, sum[i][j]);
  }
}

constexpr int ALL_BLOCKS = 1 << 30;

// Compute C[i][j] (+)= sums; vector j of row i is at c[j * c_stream + i * c_row]. adds: to what C has. summed: blocks
// between writes to C.
template <int ROWS, int VECTORS, class Step = Singles, int ROW, int STEP, class BlockOf>
INLINE void register_tile(bool adds, Layout<ROW, STEP> layout, BlockOf block_of, int blocks, int steps, const float* b,
                          ptrdiff_t b_stream, float* c, ptrdiff_t c_stream, ptrdiff_t c_row = VL,
                          int summed = ALL_BLOCKS) {
  for (int first = 0; first < blocks; first += summed) {
    const auto finish = [&](const Vec(&sum)[ROWS][VECTORS]) INLINE_LAMBDA {
      write_tile(sum, adds || first > 0, c_stream, [&](int i) INLINE_LAMBDA { return c + i * c_row; });
    };
    register_sums<ROWS, VECTORS, Step>(
        layout, [&](int block) INLINE_LAMBDA { return block_of(first + block); }, std::min(summed, blocks - first),
        steps, b + ptrdiff_t(first) * steps * VL, b_stream, finish);
  }
}

// Do the same for 1 to ROWS rows, known at run time.
template <int ROWS, int VECTORS, class Step = Singles, int ROW, int STEP, class BlockOf>
INLINE void register_tile_of(int rows, bool adds, Layout<ROW, STEP> layout, BlockOf block_of, int blocks, int steps,
                             const float* b, ptrdiff_t b_stream, float* c, ptrdiff_t c_stream,
                             ptrdiff_t c_row = VL, int summed = ALL_BLOCKS) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS)
      return register_tile_of<ROWS - 1, VECTORS, Step>(rows, adds, layout, block_of, blocks, steps, b, b_stream, c,
                                                       c_stream, c_row, summed);
  }
  register_tile<ROWS, VECTORS, Step>(adds, layout, block_of, blocks, steps, b, b_stream, c, c_stream, c_row, summed);
}

// The number of vectors of a tile, as an integral constant.
template <int VECTORS>
struct Vectors {
  static constexpr int value = VECTORS;
};

// Call body(vectors, first) for 1 to MOST vectors, known at run time.
template <int MOST, class Body>
INLINE void with_vectors(int vectors, int first, Body body) {
  if constexpr (MOST > 1) {
    if (vectors < MOST) return with_vectors<MOST - 1>(vectors, first, body);
  }
  body(Vectors<MOST>{}, first);
}

// Call body(vectors, first) over column blocks: NV at a time, the rest one by one.
template <class Body>
INLINE void for_column_blocks(int column_blocks, Body body) {
  int k = 0;
  for (; k + NV <= column_blocks; k += NV) body(Vectors<NV>{}, k);
  for (; k < column_blocks; ++k) body(Vectors<1>{}, k);
}

// Do the same in groups of nearly equal width, at most MOST: no group is too narrow to keep the processor busy.
template <int MOST, class Body>
INLINE void for_even_column_blocks(int column_blocks, Body body) {
  const int tiles = (column_blocks + MOST - 1) / MOST;
  for (int i = 0, first = 0; i < tiles; ++i) {
    const int end = int(int64_t(column_blocks) * (i + 1) / tiles);
    with_vectors<MOST>(end - first, first, body);
    first = end;
  }
}

// Call body(first, count) over rows, in tiles of nearly equal height, at most MOST.
template <int MOST = MR, class Body>
INLINE void for_row_tiles(int rows, Body body) {
  const int tiles = (rows + MOST - 1) / MOST;
  for (int i = 0, first = 0; i < tiles; ++i) {
    const int end = int(int64_t(rows) * (i + 1) / tiles);
    body(first, end - first);
    first = end;
  }
}
