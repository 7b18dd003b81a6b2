// Register tiles of forward and backward data.
#pragma once

#include "common/exponential.h"
#include "pointwise/product.h"

namespace pointwise {

// A matrix whose rows are `row` elements apart; a register tile writes only rows and columns that exist. rounded: in
// place of data, if elements are to be rounded.
struct MatrixPlace {
  float* data;
  ptrdiff_t row;
  int rows, columns;
  BFloat16* rounded = nullptr;
  bool streams = false;
  LaneMoments moments = {};  // if they are added
  int before = 0;            // values that have been added, but not counted
};

template <int ROWS, int VECTORS>
using TileSums = const Vec (&)[ROWS][VECTORS];

// The last steps for the sums of a tile: they are added to the bias, which may be null, or to the sums of earlier
// channels. Then the epilogue is applied, unless it is null.
struct TileFinish {
  const float* bias;
  bool earlier;
  const Epilogue* epilogue;
};

// Store a tile whose rows are pixels, with a bias for every column, if all columns exist. `added` is laid out as the
// tile, or null. Nothing is decided per vector: with few channels, storing a tile takes as long as multiplying it.
template <int ROWS, int VECTORS, bool ADDS, bool CLAMPS>
INLINE void store_whole_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const float* of_columns,
                               const float* added, float lowest, float highest) {
  const Vec least = broadcast(lowest), most = broadcast(highest);
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const Vec bias = of_columns ? load(of_columns + j * VL) : Vec{};
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const ptrdiff_t offset = i * to.row + j * VL;
      Vec value = sum[i][j] + bias;
      if constexpr (ADDS) value += load(added + offset);
      if constexpr (CLAMPS) value = value < least ? least : value;
      if constexpr (CLAMPS) value = value > most ? most : value;
      store(to.data + offset, value);
    }
  }
}

// Store a tile whose rows are pixels, in all cases. Not inlined: one function serves every tile.
__attribute__((noinline)) static void store_pixels(const float* sums, int rows, int vectors, const MatrixPlace& to,
                                                   const TileFinish& finish) {
  for (int j = 0; j < vectors; ++j) {
    const int columns = to.columns - j * VL;
    const Vec bias = finish.bias ? load_first(finish.bias + j * VL, columns) : Vec{};
    for (int i = 0; i < rows; ++i) {
      const ptrdiff_t offset = i * to.row + j * VL;
      const Vec value = load(sums + (ptrdiff_t(i) * vectors + j) * VL);
      if (to.rounded) {
        store_rounded(to.rounded + offset, value + bias, columns);
        continue;
      }
      float* at = to.data + offset;
      const Vec whole = value + (finish.earlier ? load_first(at, columns) : bias);
      store_first(at, finish.epilogue ? finish.epilogue->of(whole, at, columns) : whole, columns);
    }
  }
}

// Store a tile whose rows are pixels, with SiLU, if all columns exist. `added` is laid out as the tile, or null.
__attribute__((noinline)) static void store_silu(const float* sums, int rows, int vectors, const MatrixPlace& to,
                                                 const float* of_columns, const float* added) {
  for (int j = 0; j < vectors; ++j) {
    const Vec bias = of_columns ? load(of_columns + j * VL) : Vec{};
    for (int i = 0; i < rows; ++i) {
      const ptrdiff_t offset = i * to.row + j * VL;
      const Vec value = load(sums + (i * vectors + j) * VL) + bias;
      store(to.data + offset, silu_inlined(added ? value + load(added + offset) : value));
    }
  }
}

// Store a tile whose rows are channels, with a bias for every row.
template <int ROWS, int VECTORS, bool HAS_EPILOGUE>
INLINE void store_channels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const TileFinish& finish) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
    if (i >= to.rows) return;
    const Vec bias = broadcast(finish.bias ? finish.bias[i] : 0);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) {
      float* at = to.data + i * to.row + j * VL;
      const int columns = to.columns - j * VL;
      Vec value = sum[i][j] + (finish.earlier ? load_first(at, columns) : bias);
      if constexpr (HAS_EPILOGUE) value = finish.epilogue->of(value, at, columns);
      store_first(at, value, columns);
    }
  }
}

// Stream a tile of the same kind, without an epilogue, line by line.
template <int ROWS, int VECTORS>
INLINE void stream_whole_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const float* of_columns) {
  Vec bias[VECTORS] = {};
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j)
    if (of_columns) bias[j] = load(of_columns + j * VL);
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) stream(to.data + i * to.row + j * VL, sum[i][j] + bias[j]);
}

// Add the moments of the same tile.
template <int ROWS, int VECTORS>
INLINE void add_moments_of_whole_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const float* of_columns) {
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const Vec bias = of_columns ? load(of_columns + j * VL) : Vec{};
    const LaneMoments lanes = to.moments + j * VL;
    lanes.template add<ROWS>(*lanes.counts + to.before, VL, [&](int i) INLINE_LAMBDA { return sum[i][j] + bias; });
  }
}

// Add the moments of a tile that is stored.
__attribute__((noinline)) static void add_moments_of_stored(int rows, int vectors, const MatrixPlace& to) {
  for (int j = 0; j < vectors * VL; j += VL) {
    const int columns = std::min(VL, to.columns - j);
    const LaneMoments lanes = to.moments + j;
    lanes.add_some<PIXEL_ROWS>(rows, *lanes.counts + to.before, columns, [&](int i) INLINE_LAMBDA {
      return load_first(to.data + i * to.row + j, columns);
    });
  }
}

template <bool ADDS_MOMENTS, int ROWS, int VECTORS>
INLINE void store_tile_of_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const TileFinish& finish) {
  const Epilogue* epilogue = finish.epilogue;
  const bool is_whole = !to.rounded && !finish.earlier && to.columns >= VECTORS * VL;
  if (is_whole && !epilogue) {
    if (to.streams)
      stream_whole_pixels<ROWS, VECTORS>(sum, to, finish.bias);
    else
      store_whole_pixels<ROWS, VECTORS, false, false>(sum, to, finish.bias, nullptr, 0, 0);
    if constexpr (ADDS_MOMENTS) add_moments_of_whole_pixels<ROWS, VECTORS>(sum, to, finish.bias);
    return;
  }
  const float* added = nullptr;
  if (epilogue && epilogue->added)
    added = epilogue->added.as<const float>() + (to.data - epilogue->y.as<const float>());
  if (is_whole && epilogue->activation != SILU && !added) {
    store_whole_pixels<ROWS, VECTORS, false, true>(sum, to, finish.bias, nullptr, epilogue->least, epilogue->most);
  } else if (is_whole && epilogue->activation != SILU) {
    store_whole_pixels<ROWS, VECTORS, true, true>(sum, to, finish.bias, added, epilogue->least, epilogue->most);
  } else {
    alignas(64) float sums[ROWS * VECTORS * VL];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) store(sums + (i * VECTORS + j) * VL, sum[i][j]);
    if (is_whole)
      store_silu(sums, ROWS, VECTORS, to, finish.bias, added);
    else
      store_pixels(sums, ROWS, VECTORS, to, finish);
  }
  if constexpr (ADDS_MOMENTS) add_moments_of_stored(ROWS, VECTORS, to);
}

template <bool ADDS_MOMENTS, int ROWS, int VECTORS, class Step>
INLINE void pixels_tile_of(int rows, int steps, const float* a, ptrdiff_t a_row, const float* b, ptrdiff_t b_stream,
                           const MatrixPlace& to, const TileFinish& finish) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS)
      return pixels_tile_of<ADDS_MOMENTS, ROWS - 1, VECTORS, Step>(rows, steps, a, a_row, b, b_stream, to, finish);
  }
  register_sums<ROWS, VECTORS, Step>(
      Layout<AT_RUN_TIME, 1>{a_row}, [&](int) { return a; }, 1, steps, b, b_stream,
      [&](TileSums<ROWS, VECTORS> sum)
          INLINE_LAMBDA { store_tile_of_pixels<ADDS_MOMENTS, ROWS, VECTORS>(sum, to, finish); });
}

// The part of the filter that is read after the current one. It is fetched into L2 meanwhile, since processors foresee
// no more than some lines of each vector's part: a filter that is read for few pixels would be waited for.
struct FilterAhead {
  const float* next;
  int share;  // floats, per tile

  // last_block: that follows the current blocks of the task. blocks: to fetch, during `tiles` register tiles.
  FilterAhead(const Product& p, const ProductTask& task, const float* packed, int first_step, int last_block,
              int blocks, int tiles) {
    const int steps = p.steps_from(first_step);
    int step = first_step, block = task.first_block + last_block;
    if (block >= task.last_block) {  // the task goes on with other channels, or another task begins behind it
      step += steps;
      if (step < p.in.c)
        block = task.first_block;
      else
        step = 0;
    }
    next = packed + p.filter_offset(step, block);
    share = task.count == 1 ? 0 : ceil_div(blocks * steps * VL, tiles);  // one pixel needs it as soon as it is there
  }

  INLINE_MEMBER void fetch() {
    prefetch_later(next, share);
    next += share;
  }
};

template <bool ADDS_MOMENTS, class Step>
void multiply_pixels_of(const Product& p, const ProductTask& task, int first_step, int steps, const float* packed,
                        const float* bias, float* input, const Results& results) {
  const Epilogue* epilogue = results.after(first_step + steps == p.in.c);
  const Images in = channels_of(p.in, first_step, steps);
  const bool copies = p.copies_input();
  const PairsOf pairs = p.of_pairs ? PAIRS_OF_CHANNELS : NO_PAIRS;
  const Prologue prologue = p.prologue + (p.of_pairs ? 2 : 1) * ptrdiff_t(first_step);
  const bool normalizes_tiles = p.normalizes_tiles();
  if (copies) copy_rows(in, task.first, task.count, input);
  if (copies && prologue) normalize_rows(prologue, pairs, input, in.c, in.c, task.count, input, in.c);
  const float* a = copies ? input : in.floats() + task.first * in.sw;
  const ptrdiff_t a_row = copies ? in.c : in.sw;
  // Results are written in long runs.
  constexpr bool ARE_SINGLES = Step::NUMBERS == 1;  // tiles of pairs have no room for wide ones
  const int width = ARE_SINGLES ? vectors_of_tile(task.count) : NV;
  const int blocks = task.last_block - task.first_block, together = std::max(width, p.blocks_in_cache());
  constexpr int FLOATS_AHEAD = 4 * 1024, NARROWEST = 64;  // processors foresee narrow pixels: few rows are one stream
  const ptrdiff_t ahead = copies || a_row < NARROWEST ? 0 : std::max<ptrdiff_t>(PIXEL_ROWS, FLOATS_AHEAD / a_row);
  const bool fetches = results.data && !results.streams;
  for (int begin = 0; begin < blocks; begin += together) {
    const int count = std::min(together, blocks - begin);
    FilterAhead filter_ahead(p, task, packed, first_step, begin + together, together,
                             ceil_div(task.count, PIXEL_ROWS) * ceil_div(count, NV));
    for_row_tiles<PIXEL_ROWS>(task.count, [&](int first, int rows) INLINE_LAMBDA {
      if (ahead && begin == 0)
        for (int i = 0; i < rows; ++i) prefetch_later(a + (first + ahead + i) * a_row, steps);
      const float* left = a + first * a_row;
      if (normalizes_tiles) {
        normalize_rows(prologue, NO_PAIRS, left, a_row, in.c, rows, input, in.c);
        left = input;
      }
      const ptrdiff_t left_row = normalizes_tiles ? in.c : a_row;
      const auto add_tile = [&](auto vectors, int block) INLINE_LAMBDA {
        constexpr int ROWS = vectors.value > NV ? 1 : PIXEL_ROWS;
        const int column = (begin + block) * VL, channel = task.first_block * VL + column;
        const float* b = packed + p.filter_offset(first_step, task.first_block + begin + block);
        const TileFinish finish{bias ? bias + channel : nullptr, first_step > 0, epilogue};
        const ptrdiff_t offset = first * results.row + column;
        MatrixPlace to{results.data ? results.data + offset : nullptr, results.row, rows, p.channels() - channel,
                       results.rounded ? results.rounded + offset : nullptr, results.streams};
        if constexpr (ADDS_MOMENTS) to.moments = results.moments + column, to.before = first;
        if (fetches)  // the results of the next pixels
          for (int i = 0; i < rows; ++i)
            prefetch_later(to.data + (PIXEL_ROWS + i) * results.row, vectors.value * VL);
        filter_ahead.fetch();
        pixels_tile_of<ADDS_MOMENTS, ROWS, vectors.value, Step>(rows, steps, left, left_row, b, ptrdiff_t(steps) * VL,
                                                                to, finish);
      };
      int block = 0;
      if constexpr (ARE_SINGLES) {
        if (width > NV)
          for (; block + width <= count; block += width) add_tile(Vectors<SINGLE_PIXEL_VECTORS>{}, block);
      }
      for_column_blocks(count - block, [&](auto vectors, int i) INLINE_LAMBDA { add_tile(vectors, block + i); });
    });
  }
}

template <class Step>
void Arithmetic<Step>::multiply_pixels(const Product& p, const ProductTask& task, int first_step, int steps,
                                       const float* packed, const float* bias, float* input, const Results& results) {
  const bool adds_moments = results.moments && first_step + steps == p.in.c;
  const auto multiply = adds_moments ? multiply_pixels_of<true, Step> : multiply_pixels_of<false, Step>;
  multiply(p, task, first_step, steps, packed, bias, input, results);
}

template <class Step>
void Arithmetic<Step>::multiply_channels(const Product& p, const ProductTask& task, int first_step, int steps,
                                         const float* packed, const float* bias, float* input, const Results& results) {
  const Epilogue* epilogue = results.after(first_step + steps == p.in.c);
  copy_planes(channels_of(joined_rows(p.in), first_step, steps), task.first, task.count, steps, input);
  if (p.prologue)
    normalize_planes(p.prologue + (p.of_pairs ? 2 : 1) * ptrdiff_t(first_step),
                     p.of_pairs ? PAIRS_OF_CHANNELS : NO_PAIRS, input, steps, blocks_of(task.count), steps);
  for (int row = 0; row < (task.last_block - task.first_block) * VL; row += MR_TRANSPOSED) {
    const int channel = task.first_block * VL + row;
    if (channel >= p.channels()) return;
    const float* a = packed + p.filter_offset(first_step, channel / VL) + channel % VL;
    const TileFinish finish{bias ? bias + channel : nullptr, first_step > 0, epilogue};
    for_even_column_blocks<NV_TRANSPOSED>(blocks_of(task.count), [&](auto vectors, int first) {
      constexpr int VECTORS = vectors.value;
      const MatrixPlace to{results.data + row * results.row + first * VL, results.row, p.channels() - channel,
                           task.count - first * VL};
      register_sums<MR_TRANSPOSED, VECTORS, Step>(
          Layout<1, VL>{}, [&](int) { return a; }, 1, steps, input + ptrdiff_t(first) * steps * VL,
          ptrdiff_t(steps) * VL,
          [&](TileSums<MR_TRANSPOSED, VECTORS> sum) INLINE_LAMBDA {
            if (finish.epilogue)
              store_channels<MR_TRANSPOSED, VECTORS, true>(sum, to, finish);
            else
              store_channels<MR_TRANSPOSED, VECTORS, false>(sum, to, finish);
          });
    });
  }
}

}  // namespace pointwise
