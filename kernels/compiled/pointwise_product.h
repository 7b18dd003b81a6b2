// Forward and backward data of 1x1 convolutions: out = w in at every pixel, with w or its transpose packed.
//
// Where the channels of a pixel lie next to each other, pixels are the rows of a register tile, read in their place, and
// the vectors run along the packed filter. Where pixels lie next to each other, channels of the result are the rows, the
// vectors run along the pixels, and a range of pixels is first copied to where its vectors follow each other.
#pragma once

#include <omp.h>

#include "matmul.h"
#include "pixels.h"

// Rows `row` floats apart in memory; a register tile writes those that exist.
struct MatrixPlace {
  float* data;
  ptrdiff_t row;
  int rows, columns;
};

template <int ROWS, int VECTORS>
using TileSums = const Vec (&)[ROWS][VECTORS];

// Of pixels that are rows: a bias for every column.
template <int ROWS, int VECTORS>
INLINE void store_pixels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const float* bias) {
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; ++j) {
    const int columns = to.columns - j * VL;
    const Vec added = bias ? load_first(bias + j * VL, columns) : Vec{};
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) store_first(to.data + i * to.row + j * VL, sum[i][j] + added, columns);
  }
}

// Of channels that are rows: a bias for every row.
template <int ROWS, int VECTORS>
INLINE void store_channels(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to, const float* bias) {
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
    if (i >= to.rows) return;
    const Vec added = broadcast(bias ? bias[i] : 0);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j)
      store_first(to.data + i * to.row + j * VL, sum[i][j] + added, to.columns - j * VL);
  }
}

template <int ROWS, int VECTORS>
INLINE void pixels_tile_of(int rows, int steps, const float* a, ptrdiff_t a_row, const float* b, const MatrixPlace& to,
                           const float* bias) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return pixels_tile_of<ROWS - 1, VECTORS>(rows, steps, a, a_row, b, to, bias);
  }
  register_sums<ROWS, VECTORS>(
      Layout<AT_RUN_TIME, 1>{a_row}, [&](int) { return a; }, 1, steps, b, ptrdiff_t(steps) * VL,
      [&](TileSums<ROWS, VECTORS> sum) INLINE_LAMBDA { store_pixels<ROWS, VECTORS>(sum, to, bias); });
}

// How the work of one group is cut: ranges of pixels, each in one image or counted through all of them, times ranges of
// blocks of VL result channels.
struct Cut {
  int64_t spans, pixels_of_span;
  int pixels;           // of a range
  int blocks;           // of a range
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

// One group. `in`: the pixels that are read; `out`: where the results are written.
struct Product {
  Images in;
  Spread out;
  int threads;

  bool pixels_are_rows() const { return in.sc == 1 && out.whole.sc == 1; }
  int channels() const { return out.whole.c; }
  int blocks() const { return blocks_of(channels()); }

  // Images whose last vector would be mostly empty are taken together.
  bool joins_images() const {
    const int64_t pixels = pixels_of_image(in), padded = ceil_div(pixels, int64_t(VL)) * VL;
    return pixels_are_rows() || (padded - pixels) * 16 > pixels;
  }
  bool buffers_result() const { return !out.is_dense() || (joins_images() && !pixels_are_rows()); }
  bool copies_input() const { return !pixels_are_rows() || !is_one_row(in); }

  Cut cut() const {
    constexpr int64_t RANGE_FLOATS = 48 * 1024;  // of a core's L2, for the pixels of a range
    const int64_t of_image = pixels_of_image(in);
    Cut cut{};
    cut.spans = joins_images() ? 1 : in.n;
    cut.pixels_of_span = joins_images() ? times(in.n, of_image) : of_image;
    const int unit = pixels_are_rows() ? MR : NV_TRANSPOSED * VL;
    int64_t most = std::clamp<int64_t>(RANGE_FLOATS / in.c, unit, pixels_are_rows() ? 16 * MR : 512);
    const auto ranges = [&] { return times(cut.spans, ceil_div(cut.pixels_of_span, most)); };
    while (most > 2 * unit && ranges() < int64_t{4} * threads) most /= 2;
    most = ceil_div(most, int64_t(unit)) * unit;
    cut.pixels = int(ceil_div(ceil_div(cut.pixels_of_span, ceil_div(cut.pixels_of_span, most)), int64_t(VL)) * VL);
    cut.ranges_of_span = ceil_div(cut.pixels_of_span, int64_t(cut.pixels));
    const int64_t wanted = ceil_div(int64_t{2} * threads, times(cut.spans, cut.ranges_of_span));
    cut.blocks = int(ceil_div(int64_t(blocks()), std::min<int64_t>(wanted, std::max(1, blocks() / 4))));
    cut.block_ranges = ceil_div(int64_t(blocks()), int64_t(cut.blocks));
    return cut;
  }

  // Of one thread: copied pixels, then results that wait to be written.
  int64_t input_floats(const Cut& cut) const { return copies_input() ? times(cut.pixels, in.c) : 0; }
  int64_t result_floats(const Cut& cut) const {
    if (!buffers_result()) return 0;
    return times(cut.pixels, pixels_are_rows() ? channels() : VL);
  }
  int64_t scratch_floats() const {
    const Cut cut = this->cut();
    return times(threads, plus(input_floats(cut), result_floats(cut)));
  }
};

inline void multiply_pixels(const Product& p, const ProductTask& task, const float* packed, const float* bias,
                            float* input, float* result) {
  const Images& in = p.in;
  const float* a = in.data + task.first * in.sw;
  ptrdiff_t a_row = in.sw;
  if (p.copies_input()) {
    copy_rows(in, task.first, task.count, input);
    a = input;
    a_row = in.c;
  }
  const bool buffered = p.buffers_result();
  float* c = buffered ? result : p.out.whole.data + task.first * p.out.whole.sw;
  const ptrdiff_t c_row = buffered ? p.channels() : p.out.whole.sw;
  for_column_blocks(task.last_block - task.first_block, [&](auto vectors, int block) {
    const int channel = (task.first_block + block) * VL;
    for_row_tiles(task.count, [&](int first, int rows) {
      const MatrixPlace to{c + first * c_row + channel, c_row, rows, p.channels() - channel};
      pixels_tile_of<MR, vectors.value>(rows, in.c, a + first * a_row, a_row, packed + ptrdiff_t(channel) * in.c, to,
                                        bias ? bias + channel : nullptr);
    });
  });
  if (!buffered) return;
  const int channel = task.first_block * VL, channels = std::min(p.channels(), task.last_block * VL) - channel;
  spread_rows(p.out, channel, channels, task.first, task.count, result + channel, c_row);
}

inline void multiply_channels(const Product& p, const ProductTask& task, const float* packed, const float* bias,
                              float* input, float* result) {
  const int steps = p.in.c;
  const Images& y = p.out.whole;
  const int64_t of_image = pixels_of_image(p.in);
  const bool buffered = p.buffers_result();
  copy_blocked_planes(joined_rows(p.in), task.first, task.count, input);
  for (int block = task.first_block; block < task.last_block; ++block) {
    const int channels = std::min(VL, p.channels() - block * VL);
    float* c = buffered ? result : y.data + task.first / of_image * y.sn + block * VL * y.sc + task.first % of_image;
    const ptrdiff_t c_row = buffered ? ceil_div(task.count, VL) * VL : y.sc;
    for (int i = 0; i < channels; i += MR_TRANSPOSED)
      for_even_column_blocks<NV_TRANSPOSED>(blocks_of(task.count), [&](auto vectors, int first) {
        constexpr int VECTORS = vectors.value;
        const MatrixPlace to{c + i * c_row + first * VL, c_row, channels - i, task.count - first * VL};
        const float* of_bias = bias ? bias + block * VL + i : nullptr;
        register_sums<MR_TRANSPOSED, VECTORS>(
            Layout<1, VL>{}, [&](int) { return packed + (ptrdiff_t(block) * steps) * VL + i; }, 1, steps,
            input + ptrdiff_t(first) * steps * VL, ptrdiff_t(steps) * VL,
            [&](TileSums<MR_TRANSPOSED, VECTORS> sum)
                INLINE_LAMBDA { store_channels<MR_TRANSPOSED, VECTORS>(sum, to, of_bias); });
      });
    if (buffered) spread_planes(p.out, block * VL, channels, task.first, task.count, result, c_row);
  }
}

// bias may be null. scratch: scratch_floats().
inline void multiply(const Product& p, const float* packed, const float* bias, float* scratch) {
  const Cut cut = p.cut();
  const int64_t input_floats = p.input_floats(cut), result_floats = p.result_floats(cut);
#pragma omp parallel num_threads(p.threads)
  {
    float* input = scratch + omp_get_thread_num() * (input_floats + result_floats);
    float* result = input + input_floats;
#pragma omp for schedule(dynamic)
    for (int64_t index = 0; index < cut.tasks(); ++index) {
      const ProductTask task = task_of(cut, p.blocks(), index);
      if (p.pixels_are_rows())
        multiply_pixels(p, task, packed, bias, input, result);
      else
        multiply_channels(p, task, packed, bias, input, result);
    }
  }
}
