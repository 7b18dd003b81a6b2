// Forward and backward data of 1x1 convolutions: out = w in at every pixel, with w or its transpose packed.
//
// If the channels of a pixel are contiguous, the rows of a register tile are pixels, read in place, and its vectors run
// along the packed filter. If pixels are contiguous, the rows are channels of the result, the vectors run along the
// pixels, and a range of pixels is first copied to contiguous vectors.
#pragma once

#include <omp.h>

#include "common/matmul.h"
#include "pointwise/pixels.h"

namespace pointwise {

// A matrix whose rows are `row` elements apart; a register tile writes only rows and columns that exist. rounded: in
// place of data, if elements are to be rounded.
struct MatrixPlace {
  float* data;
  ptrdiff_t row;
  int rows, columns;
  BFloat16* rounded = nullptr;
};

// Rows of a tile whose rows are pixels. With MR = 14 the compiler spills sums, since a row's address takes registers.
constexpr int PIXEL_ROWS = std::min(MR, 12);

template <int ROWS, int VECTORS>
using TileSums = const Vec (&)[ROWS][VECTORS];

// The last steps for the sums of a tile: they are added to the bias, which may be null, or to the sums of earlier
// channels. Then the epilogue is applied, unless it is null.
struct TileFinish {
  const float* bias;
  bool earlier;
  const Epilogue* epilogue;
};

// Store a tile whose rows are pixels, with a bias for every column, if all columns exist and the activation is a clamp.
// Nothing is decided per vector: with few channels, storing a tile takes as long as multiplying it.
template <int ROWS, int VECTORS, bool ADDS>
INLINE void store_whole_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const TileFinish& finish) {
  const Epilogue& epilogue = *finish.epilogue;
  const float *y = epilogue.y.as<const float>(), *added = epilogue.added.as<const float>();
  const Vec least = broadcast(epilogue.least), most = broadcast(epilogue.most);
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const Vec bias = finish.bias ? load(finish.bias + j * VL) : Vec{};
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      float* at = to.data + i * to.row + j * VL;
      Vec value = sum[i][j] + bias;
      if constexpr (ADDS) value += load(added + (at - y));
      value = value < least ? least : value;
      store(at, value > most ? most : value);
    }
  }
}

// Store a tile whose rows are pixels, in all cases.
template <int ROWS, int VECTORS, bool HAS_EPILOGUE>
INLINE void store_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const TileFinish& finish) {
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const int columns = to.columns - j * VL;
    const Vec bias = finish.bias ? load_first(finish.bias + j * VL, columns) : Vec{};
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      float* at = to.data + i * to.row + j * VL;
      Vec value = sum[i][j] + (finish.earlier ? load_first(at, columns) : bias);
      if constexpr (HAS_EPILOGUE) value = finish.epilogue->of(value, at, columns);
      store_first(at, value, columns);
    }
  }
}

// Store a tile whose rows are pixels, rounded.
template <int ROWS, int VECTORS>
INLINE void store_rounded_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const float* of_columns) {
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const int columns = to.columns - j * VL;
    if (columns <= 0) return;
    const Vec bias = of_columns ? load_first(of_columns + j * VL, columns) : Vec{};
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) store_rounded(to.rounded + i * to.row + j * VL, sum[i][j] + bias, columns);
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

template <int ROWS, int VECTORS, class Step>
INLINE void pixels_tile_of(int rows, int steps, const float* a, ptrdiff_t a_row, const float* b, ptrdiff_t b_stream,
                           const MatrixPlace& to, const TileFinish& finish) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return pixels_tile_of<ROWS - 1, VECTORS, Step>(rows, steps, a, a_row, b, b_stream, to, finish);
  }
  register_sums<ROWS, VECTORS, Step>(
      Layout<AT_RUN_TIME, 1>{a_row}, [&](int) { return a; }, 1, steps, b, b_stream,
      [&](TileSums<ROWS, VECTORS> sum) INLINE_LAMBDA {
        if constexpr (Step::NUMBERS == 2) {
          if (to.rounded) return store_rounded_pixels<ROWS, VECTORS>(sum, to, finish.bias);
        }
        const bool is_simple = finish.epilogue && finish.epilogue->activation != SILU;
        if (is_simple && !finish.earlier && to.columns >= VECTORS * VL) {
          if (finish.epilogue->added)
            store_whole_pixels<ROWS, VECTORS, true>(sum, to, finish);
          else
            store_whole_pixels<ROWS, VECTORS, false>(sum, to, finish);
        } else if (finish.epilogue) {
          store_pixels<ROWS, VECTORS, true>(sum, to, finish);
        } else {
          store_pixels<ROWS, VECTORS, false>(sum, to, finish);
        }
      });
}

// The division of one group's work: ranges of pixels, either within one image or numbered through all images, times
// ranges of blocks of VL result channels.
struct Cut {
  int64_t spans, pixels_of_span;
  int pixels;           // per range
  int blocks;           // per range
  int64_t ranges_of_span, block_ranges;

  int64_t tasks() const { return spans * ranges_of_span * block_ranges; }
};

struct ProductTask {
  int64_t first;
  int count, first_block, last_block;
};

inline ProductTask task_of(const Cut& cut, int blocks, int64_t index) {
  const int64_t range = index / cut.block_ranges;
  const int64_t begin = range % cut.ranges_of_span * cut.pixels;
  const int first_block = int(index % cut.block_ranges) * cut.blocks;
  return {range / cut.ranges_of_span * cut.pixels_of_span + begin,
          int(std::min<int64_t>(cut.pixels, cut.pixels_of_span - begin)), first_block,
          std::min(blocks, first_block + cut.blocks)};
}

// The product of one group. in: the pixels that are read; those of bfloat16 as pairs of channels, if the processor
// multiplies pairs. out: where the results are written.
struct Product {
  Images in;
  Spread out;
  int threads;
  bool of_pairs = false;

  Product(const Images& read, const Spread& written, int thread_count) : in(read), out(written), threads(thread_count) {
    of_pairs = in.data.type == BFLOAT16 && in.c % 2 == 0 && multiplies_pairs();
    if (of_pairs) in = pairs_of_channels(in);
  }

  bool pixels_are_rows() const { return in.sc == 1 && out.whole.sc == 1; }
  int channels() const { return out.whole.c; }
  int blocks() const { return blocks_of(channels()); }

  // Return whether images are joined: if pixels are rows, or if padding each to vectors would cost too much.
  bool joins_images() const {
    const int64_t pixels = pixels_of_image(in), padded = ceil_div(pixels, int64_t(VL)) * VL;
    return pixels_are_rows() || (padded - pixels) * 16 > pixels;
  }
  bool widens() const { return in.data.type != FLOAT32; }         // when pixels are copied
  bool rounds() const { return out.whole.data.type != FLOAT32; }  // at the end
  bool rounds_in_registers() const { return of_pairs && pixels_are_rows() && out.is_dense() && steps() == in.c; }
  bool buffers_result() const { return rounds() || !out.is_dense() || (joins_images() && !pixels_are_rows()); }
  // Pairs are multiplied faster than the lines of a tile's rows arrive unforeseen; a copy prefetches them.
  bool copies_input() const {
    return of_pairs || widens() || !pixels_are_rows() || !is_one_row(in) || rows_share_cache_sets();
  }

  // Return whether the rows of a register tile, read in place, would displace one another from L1: caches map addresses
  // 4 KiB apart to the same set, of 8 or more lines.
  bool rows_share_cache_sets() const { return PIXEL_ROWS > 8 && in.sw % (4096 / int(sizeof(float))) == 0; }

  // Return how many channels to sum before sums are written, so that a register tile's part of both operands fits L1.
  int steps() const {
    constexpr int MOST = 256;
    return ceil_div(in.c, ceil_div(in.c, MOST));
  }

  // Return how many blocks of result channels a task has, for this number of pixel ranges. If pixels are read in place,
  // narrow tasks cost no more, so the width that leaves the busiest thread the least work is chosen.
  int blocks_of_task(int64_t ranges, int64_t wanted_tasks) const {
    const int64_t wanted = ceil_div(wanted_tasks, ranges);
    if (copies_input()) return int(ceil_div(int64_t(blocks()), std::min<int64_t>(wanted, std::max(1, blocks() / 4))));
    const int64_t tiles = ceil_div(int64_t(blocks()), int64_t(NV));
    const auto busiest = [&](int64_t of_task) {
      return ceil_div(times(ranges, ceil_div(tiles, of_task)), int64_t(threads)) * of_task;
    };
    int64_t best = ceil_div(tiles, std::min(wanted, tiles));
    for (int64_t of_task = best; of_task > 0; --of_task)
      if (busiest(of_task) < busiest(best)) best = of_task;
    return int(best) * NV;
  }

  Cut cut() const {
    constexpr int64_t RANGE_FLOATS = 48 * 1024;  // of a core's L2, for the pixels of a range
    constexpr int64_t SMALL_FILTER_FLOATS = 64 * 1024;  // a larger one is divided rather than read for each small range
    const int64_t of_image = pixels_of_image(in), wanted_tasks = int64_t{4} * threads;
    Cut cut{};
    cut.spans = joins_images() ? 1 : in.n;
    cut.pixels_of_span = joins_images() ? times(in.n, of_image) : of_image;
    const int unit = pixels_are_rows() ? PIXEL_ROWS : NV_TRANSPOSED * VL;
    int64_t most = std::clamp<int64_t>(RANGE_FLOATS / steps(), unit, 512);
    const auto ranges = [&] { return times(cut.spans, ceil_div(cut.pixels_of_span, most)); };
    const bool is_small = times(in.c, channels()) <= SMALL_FILTER_FLOATS;
    while (is_small && most > 2 * unit && ranges() < wanted_tasks) most /= 2;
    most = ceil_div(most, int64_t(unit)) * unit;
    int64_t count = ceil_div(cut.pixels_of_span, most);  // increased until all threads get equally many
    while (count > 1 && times(cut.spans, count) % threads != 0 && count < cut.pixels_of_span) ++count;
    const int64_t share = ceil_div(cut.pixels_of_span, count);
    cut.pixels = int(pixels_are_rows() ? share : ceil_div(share, int64_t(VL)) * VL);
    cut.ranges_of_span = ceil_div(cut.pixels_of_span, int64_t(cut.pixels));
    cut.blocks = blocks_of_task(times(cut.spans, cut.ranges_of_span), wanted_tasks);
    if (rounds()) cut.blocks = int(std::clamp<int64_t>(RANGE_FLOATS / (cut.pixels * VL), 1, cut.blocks));
    cut.block_ranges = ceil_div(int64_t(blocks()), int64_t(cut.blocks));
    return cut;
  }

  // Sizes per thread: copied pixels, then results before they are written.
  int64_t input_floats(const Cut& cut) const { return copies_input() ? times(cut.pixels, steps()) : 0; }
  int64_t result_floats(const Cut& cut) const {
    return buffers_result() ? times(cut.pixels, int64_t(cut.blocks) * VL) : 0;
  }
  int64_t scratch_floats() const {
    const Cut cut = this->cut();
    return times(threads, plus(input_floats(cut), result_floats(cut)));
  }
};

// The results of a task, in the images or in a buffer, with rows `row` elements apart. epilogue: null in a buffer.
// rounded: in place of data, if results are rounded in registers.
struct Results {
  float* data;
  ptrdiff_t row;
  const Epilogue* epilogue;
  BFloat16* rounded = nullptr;

  const Epilogue* after(bool is_last) const { return is_last ? epilogue : nullptr; }
};

// Add the products of channels [first_step, first_step + steps) of the pixels of a task to its results.
inline void multiply_pixels(const Product& p, const ProductTask& task, int first_step, int steps, const float* packed,
                            const float* bias, float* input, const Results& results) {
  const Epilogue* epilogue = results.after(first_step + steps == p.in.c);
  const Images in = channels_of(p.in, first_step, steps);
  const bool copies = p.copies_input();
  if (copies) copy_rows(in, task.first, task.count, input);
  const float* a = copies ? input : in.floats() + task.first * in.sw;
  const ptrdiff_t a_row = copies ? in.c : in.sw;
  for_column_blocks(task.last_block - task.first_block, [&](auto vectors, int block) {
    const int column = block * VL, channel = task.first_block * VL + column;
    const float* b = packed + ptrdiff_t(channel) * p.in.c + first_step * VL;
    const TileFinish finish{bias ? bias + channel : nullptr, first_step > 0, epilogue};
    for_row_tiles<PIXEL_ROWS>(task.count, [&](int first, int rows) {
      const ptrdiff_t offset = first * results.row + column;
      const MatrixPlace to{results.data ? results.data + offset : nullptr, results.row, rows, p.channels() - channel,
                           results.rounded ? results.rounded + offset : nullptr};
      const auto tile = p.of_pairs ? pixels_tile_of<PIXEL_ROWS, vectors.value, Pairs>
                                   : pixels_tile_of<PIXEL_ROWS, vectors.value, Singles>;
      tile(rows, steps, a + first * a_row, a_row, b, ptrdiff_t(p.in.c) * VL, to, finish);
    });
  });
}

template <class Step>
void multiply_channels(const Product& p, const ProductTask& task, int first_step, int steps,
                       const float* packed, const float* bias, float* input, const Results& results) {
  const Epilogue* epilogue = results.after(first_step + steps == p.in.c);
  copy_planes(channels_of(joined_rows(p.in), first_step, steps), task.first, task.count, steps, input);
  for (int row = 0; row < (task.last_block - task.first_block) * VL; row += MR_TRANSPOSED) {
    const int channel = task.first_block * VL + row;
    if (channel >= p.channels()) return;
    const float* a = packed + ptrdiff_t(channel / VL * VL) * p.in.c + first_step * VL + channel % VL;
    const TileFinish finish{bias ? bias + channel : nullptr, first_step > 0, epilogue};
    for_even_column_blocks<NV_TRANSPOSED>(blocks_of(task.count), [&](auto vectors, int first) {
      constexpr int VECTORS = vectors.value;
      const MatrixPlace to{results.data + row * results.row + first * VL, results.row, p.channels() - channel,
                           task.count - first * VL};
      register_sums<MR_TRANSPOSED, VECTORS, Step>(
          Layout<1, VL>{}, [&](int) { return a; }, 1, steps, input + ptrdiff_t(first) * steps * VL,
          ptrdiff_t(steps) * VL, [&](TileSums<MR_TRANSPOSED, VECTORS> sum) INLINE_LAMBDA {
            if (finish.epilogue)
              store_channels<MR_TRANSPOSED, VECTORS, true>(sum, to, finish);
            else
              store_channels<MR_TRANSPOSED, VECTORS, false>(sum, to, finish);
          });
    });
  }
}

// Run one task. input, result: this thread's parts of the scratch.
inline void run_task(const Product& p, const ProductTask& task, const float* packed, const float* bias,
                     const Epilogue& epilogue, float* input, float* result) {
  const Images& y = p.out.whole;
  const int channel = task.first_block * VL, channels = std::min(p.channels(), task.last_block * VL) - channel;
  const bool rows = p.pixels_are_rows(), rounded = p.rounds_in_registers() && !epilogue;
  const bool buffered = p.buffers_result() && !rounded;
  const int64_t image = task.first / pixels_of_image(p.in), pixel = task.first % pixels_of_image(p.in);
  const ptrdiff_t place = image * y.sn + pixel * y.sw + channel * y.sc;
  const Results results =
      rounded    ? Results{nullptr, y.sw, nullptr, y.data.as<BFloat16>() + place}
      : buffered ? Results{result, (rows ? task.last_block - task.first_block : blocks_of(task.count)) * VL, nullptr}
                 : Results{y.floats() + place, rows ? y.sw : y.sc, epilogue ? &epilogue : nullptr};
  for (int step = 0; step < p.in.c; step += p.steps()) {
    const int steps = std::min(p.steps(), p.in.c - step);
    const auto multiply = rows ? multiply_pixels : p.of_pairs ? multiply_channels<Pairs> : multiply_channels<Singles>;
    multiply(p, task, step, steps, packed, bias, input, results);
  }
  if (buffered && rows)
    spread_rows(p.out, channel, channels, task.first, task.count, results.data, results.row, epilogue);
  else if (buffered)
    spread_planes(p.out, channel, channels, task.first, task.count, results.data, results.row, epilogue);
}

// Compute the product of one group. bias may be null. epilogue: of y, in forward. scratch: scratch_floats() floats.
inline void multiply(const Product& p, const float* packed, const float* bias, const Epilogue& epilogue,
                     float* scratch) {
  const Cut cut = p.cut();
  const int64_t input_floats = p.input_floats(cut), result_floats = p.result_floats(cut);
#pragma omp parallel num_threads(p.threads)
  {
    float* input = scratch + omp_get_thread_num() * (input_floats + result_floats);
    float* result = input + input_floats;
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < cut.tasks(); ++index)
      run_task(p, task_of(cut, p.blocks(), index), packed, bias, epilogue, input, result);
  }
}

}  // namespace pointwise
