// Forward and backward data of 1x1 convolutions: out = w in at every pixel, with w or its transpose packed.
//
// If the channels of a pixel are contiguous, the rows of a register tile are pixels, read in place, and its vectors run
// along the packed filter. If pixels are contiguous, the rows are channels of the result, the vectors run along the
// pixels, and a range of pixels is first copied to contiguous vectors.
#pragma once

#include <omp.h>
#include <unistd.h>

#include "common/matmul.h"
#include "common/prologue.h"
#include "common/tasks.h"
#include "pointwise/arithmetic.h"
#include "pointwise/pixels.h"

namespace pointwise {

// Rows of a tile whose rows are pixels. With MR = 14 the compiler spills sums, since a row's address takes registers.
constexpr int PIXEL_ROWS = std::min(MR, 12);

// Vectors of a tile of one pixel: with fewer, each sum would wait for the one before.
constexpr int SINGLE_PIXEL_VECTORS = 2 * NV;

constexpr int vectors_of_tile(int64_t pixels) { return pixels == 1 ? SINGLE_PIXEL_VECTORS : NV; }

// Return the bytes of the last-level cache, within reason: a process may never get all of a large one that is shared.
inline int64_t last_level_bytes() {
  constexpr int64_t LEAST = int64_t{8} << 20, MOST = int64_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const int64_t known = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (known > 0) return std::clamp(known, LEAST, MOST);
#endif
  return MOST;
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
  bool normalizes;  // what is read
  Prologue prologue = {};
  bool of_pairs = false;

  Product(const Images& read, const Spread& written, int thread_count, bool normalizes_read)
      : in(read), out(written), threads(thread_count), normalizes(normalizes_read) {
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

  // Return whether results are written past the caches: if they exceed the last-level cache, and consist of whole lines.
  bool streams() const {
    const Images& y = out.whole;
    const bool has_whole_lines = y.sw % LINE_FLOATS == 0 && channels() % LINE_FLOATS == 0 &&
                                 reinterpret_cast<uintptr_t>(y.data.first) % (LINE_FLOATS * sizeof(float)) == 0;
    return pixels_are_rows() && !buffers_result() && has_whole_lines && steps() == in.c && is_one_row(y) &&
           bytes_of(times(y.n, times(pixels_of_image(y), y.sw))) >= last_level_bytes();
  }
  // Pairs are multiplied faster than the lines of a tile's rows arrive unforeseen; a copy prefetches them.
  bool copies_input() const {
    return of_pairs || widens() || !pixels_are_rows() || !is_one_row(in) ||
           (normalizes ? blocks() > blocks_in_cache() : rows_share_cache_sets());
  }
  // Return whether the pixels of each register tile are normalized when it is computed, not all of a range before.
  bool normalizes_tiles() const { return normalizes && !copies_input(); }

  // Return as many blocks of result channels as let the filter's part for them stay in L1.
  int blocks_in_cache() const {
    constexpr int L1_FLOATS = 6 * 1024;
    return std::max(1, L1_FLOATS / (NV * VL * steps())) * NV;
  }

  // Return whether the rows of a register tile, read in place, would displace one another from L1: caches map addresses
  // 4 KiB apart to the same set, of 8 or more lines.
  bool rows_share_cache_sets() const { return PIXEL_ROWS > 8 && in.sw % (4096 / int(sizeof(float))) == 0; }

  // Return how many channels to sum before sums are written, so that a register tile's part of both operands fits L1.
  int steps() const {
    constexpr int MOST = 256;
    return in.c <= MOST ? in.c : ceil_div(ceil_div(in.c, ceil_div(in.c, MOST)), VL) * VL;
  }
  int steps_from(int channel) const { return std::min(steps(), in.c - channel); }

  // Return where the packed filter has the steps from `first_step` on for a block of result channels: [steps of all
  // channels][blocks][steps][VL], in the order in which it is read.
  ptrdiff_t filter_offset(int first_step, int block) const {
    return (ptrdiff_t(first_step) * blocks() + ptrdiff_t(block) * steps_from(first_step)) * VL;
  }

  // Return how many blocks of result channels a task has, for this number of pixel ranges. If pixels are read in place,
  // narrow tasks cost no more, so the width that leaves the busiest thread the least work is chosen.
  int blocks_of_task(int64_t ranges, int64_t wanted_tasks, int pixels) const {
    const int width = vectors_of_tile(pixels);
    const int64_t wanted = ceil_div(wanted_tasks, ranges);
    if (copies_input()) return int(ceil_div(int64_t(blocks()), std::min<int64_t>(wanted, std::max(1, blocks() / 4))));
    const int64_t tiles = ceil_div(int64_t(blocks()), int64_t(width));
    const auto busiest = [&](int64_t of_task) {
      return ceil_div(times(ranges, ceil_div(tiles, of_task)), int64_t(threads)) * of_task;
    };
    int64_t best = ceil_div(tiles, std::min(wanted, tiles));
    for (int64_t of_task = best; of_task > 0; --of_task)
      if (busiest(of_task) < busiest(best)) best = of_task;
    return int(best) * width;
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
    cut.blocks = blocks_of_task(times(cut.spans, cut.ranges_of_span), wanted_tasks, cut.pixels);
    if (rounds()) cut.blocks = int(std::clamp<int64_t>(RANGE_FLOATS / (cut.pixels * VL), 1, cut.blocks));
    cut.block_ranges = ceil_div(int64_t(blocks()), int64_t(cut.blocks));
    return cut;
  }

  // Sizes per thread: copied pixels, then results before they are written.
  int64_t input_floats(const Cut& cut) const {
    return copies_input() || normalizes ? times(copies_input() ? cut.pixels : PIXEL_ROWS, steps()) : 0;
  }
  int64_t result_floats(const Cut& cut) const {
    return buffers_result() ? times(cut.pixels, int64_t(cut.blocks) * VL) : 0;
  }
  int64_t scratch_floats() const {
    const Cut cut = this->cut();
    return times(threads, plus(input_floats(cut), result_floats(cut)));
  }
};

// The results of a task, in the images or in a buffer, with rows `row` elements apart. epilogue: null in a buffer.
// rounded: in place of data, if results are rounded in registers. streams: as in Product. moments: only of pixels in rows.
struct Results {
  float* data;
  ptrdiff_t row;
  const Epilogue* epilogue;
  BFloat16* rounded = nullptr;
  bool streams = false;
  LaneMoments moments = {};

  const Epilogue* after(bool is_last) const { return is_last ? epilogue : nullptr; }
};

// Run one task. input, result: this thread's parts of the scratch.
inline void run_task(const Product& p, const ProductTask& task, const float* packed, const float* bias,
                     const Epilogue& epilogue, bool streams, float* input, float* result) {
  const Images& y = p.out.whole;
  const int channel = task.first_block * VL, channels = std::min(p.channels(), task.last_block * VL) - channel;
  const bool rows = p.pixels_are_rows(), rounded = p.rounds_in_registers() && !epilogue;
  const bool buffered = p.buffers_result() && !rounded;
  const int64_t image = task.first / pixels_of_image(p.in), pixel = task.first % pixels_of_image(p.in);
  const ptrdiff_t place = image * y.sn + pixel * y.sw + channel * y.sc;
  const Results results =
      rounded    ? Results{nullptr, y.sw, nullptr, y.data.as<BFloat16>() + place}
      : buffered ? Results{result, (rows ? task.last_block - task.first_block : blocks_of(task.count)) * VL, nullptr}
                 : Results{y.floats() + place, rows ? y.sw : y.sc, epilogue ? &epilogue : nullptr, nullptr, streams,
                           epilogue.moments.at(y.data + place)};
  for (int step = 0; step < p.in.c; step += p.steps()) {
    const int steps = p.steps_from(step);
    const auto multiply =
        rows ? (p.of_pairs ? Arithmetic<Pairs>::multiply_pixels : Arithmetic<Singles>::multiply_pixels)
             : (p.of_pairs ? Arithmetic<Pairs>::multiply_channels : Arithmetic<Singles>::multiply_channels);
    multiply(p, task, step, steps, packed, bias, input, results);
  }
  if (buffered && rows)
    spread_rows(p.out, channel, channels, task.first, task.count, results.data, results.row, epilogue);
  else if (buffered)
    spread_planes(p.out, channel, channels, task.first, task.count, results.data, results.row, epilogue);
  if (results.moments) {
    results.moments.count(channels, task.count);
  } else if (epilogue.moments) {
    const Images pixels{y.data + place, 1, channels, 1, task.count, 0, 1, 0, y.sw};
    epilogue.moments.add(pixels, {0, 0, 0, 0, 1, task.count}, channels);
  }
}

// Compute the product of one group. bias may be null. epilogue: of y, in forward. scratch: scratch_floats() floats.
inline void multiply(const Product& p, const float* packed, const float* bias, const Epilogue& epilogue,
                     float* scratch) {
  const Cut cut = p.cut();
  const int64_t input_floats = p.input_floats(cut), result_floats = p.result_floats(cut);
  const bool streams = p.streams();
  in_parallel(p.threads, [&] {
    float* input = scratch + omp_get_thread_num() * (input_floats + result_floats);
    float* result = input + input_floats;
    const bool in_shares = epilogue.moments || may_stay_in_caches(p.in, p.out.whole, p.threads);
    share_tasks(cut.tasks(), in_shares, [&](int64_t index) {
      run_task(p, task_of(cut, p.blocks(), index), packed, bias, epilogue, streams, input, result);
    });
    if (streams) end_streams();
  });
}

}  // namespace pointwise
