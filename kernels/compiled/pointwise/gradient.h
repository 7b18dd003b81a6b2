// The filter gradient of 1x1 convolutions: dw += dy x^T, summed over the pixels of the mini-batch.
//
// If the channels of a pixel are contiguous, it is a sum of outer products. If pixels are contiguous, each element is a
// dot product of two planes, and the lanes of a tile's sums are added at its end, so that nothing has to be transposed.
// Either way, a *chunk* of pixels is first copied to contiguous vectors, unless the filter is so small that the pixels
// are better read in place.
#pragma once

#include <omp.h>

#include "pointwise/product.h"

namespace pointwise {

constexpr int DOT_ROWS = VL == 16 ? 6 : 3;  // of dy
constexpr int DOT_COLUMNS = 4;              // of x; accumulators, a vector of x and DOT_ROWS of dy fit the registers

// The filter gradient of one group. If it is small, each thread has its own sums over its own pixels (`parts` =
// threads); if it is large, each thread computes its own elements (`parts` = 1). In float32 the first part adds to dw
// itself, the others to copies of it. In half precision all add to copies, so that dw is rounded only once.
struct FilterGradient {
  static constexpr int ROW_CHANNELS = 64;  // of dy at a time: whole cache lines, whose neighbours are prefetched

  Images x, dy;  // with one pixel of x for each of dy
  int threads;
  int step;  // pixels: two if they are multiplied in pairs
  int k_block, chunk, c_block;
  Prologue prologue;  // of x

  FilterGradient(const Images& of_x, const Images& of_dy, int thread_count, const Prologue& before = {})
      : x(of_x), dy(of_dy), threads(thread_count), prologue(before) {
    step = x.data.type == BFLOAT16 && multiplies_pairs() ? 2 : 1;
    k_block = pixels_are_rows() ? ROW_CHANNELS : 4 * DOT_ROWS;
    chunk = choose_chunk();
    c_block = choose_c_block();
  }

  static int64_t parts(int64_t filter_floats, int threads) {
    constexpr int64_t LARGEST_COPY = 128 * 1024;  // floats
    return filter_floats <= LARGEST_COPY ? threads : 1;
  }
  static int64_t copies(int64_t filter_floats, Element element, int threads) {
    return parts(filter_floats, threads) - (element == FLOAT32);
  }
  int64_t parts() const { return parts(int64_t(x.c) * dy.c, threads); }
  bool pixels_are_rows() const { return x.sc == 1; }
  int64_t pixels() const { return times(dy.n, pixels_of_image(dy)); }

  // Return whether pixels are read in place: if the filter is so small that copying them would take longer than it
  // saves. The vectors of a tile may then end in the next pixels.
  bool reads_in_place() const {
    constexpr int64_t LARGEST_FILTER = 32 * 1024;  // floats
    return pixels_are_rows() && x.data.type == FLOAT32 && dy.data.type == FLOAT32 && is_one_row(x) && is_one_row(dy) &&
           int64_t(x.c) * dy.c <= LARGEST_FILTER;
  }
  int64_t chunk_in_place() const {
    constexpr int64_t FLOATS = 12 * 1024;  // of L2, since the next chunk arrives there during this one
    const int64_t most = std::max<int64_t>(16, FLOATS / (x.c + dy.c));
    return prologue ? std::min(most, (x_floats() - VL) / x.c) : most;  // normalized pixels have a chunk's room
  }
  // Return how many of the last pixels are copied all the same, since their vectors would end past the images.
  int64_t pixels_after_place() const { return ceil_div(VL, std::min(x.c, dy.c)); }

  // Return the steps of a chunk: many, so that each tile of dw is loaded and stored rarely. With 32 registers
  // its operands may come from L2; with 16, channels of four register tiles of dy and one of x fit L1 together.
  int choose_chunk() const {
    constexpr int64_t L1_FLOATS = (REGISTERS == 32 ? 14 : 7) * 1024;
    const int of_tiles =
        pixels_are_rows() ? 4 * MR_TRANSPOSED + NV_TRANSPOSED * VL : 4 * DOT_ROWS + DOT_COLUMNS;
    const int64_t most = L1_FLOATS / of_tiles;
    const int64_t own = ceil_div(ceil_div(pixels(), parts()), int64_t(step));
    return int(ceil_div(ceil_div(own, ceil_div(own, most)), int64_t(VL)) * VL);
  }

  int k_blocks() const { return ceil_div(dy.c, k_block); }

  // Return how many channels of x to take, so that their chunk stays in a core's L2 during a pass over dy, and all
  // threads get equally many.
  int choose_c_block() const {
    constexpr int64_t L2_FLOATS = 96 * 1024;
    constexpr int UNIT = NV_TRANSPOSED * VL;
    const int64_t team = threads / parts();
    int block = int(std::max<int64_t>(1, L2_FLOATS / chunk / UNIT)) * UNIT;
    while (block > UNIT && int64_t(ceil_div(x.c, block)) * k_blocks() < 2 * team) block -= UNIT;
    return ceil_div(ceil_div(x.c, ceil_div(x.c, block)), UNIT) * UNIT;
  }

  // Return how many channels of x a thread of a team copies at a time: long runs of each pixel, in whole cache lines.
  int copied_channels(int team) const {
    constexpr int MOST = 256, LEAST = 4 * VL;
    return std::min(MOST, ceil_div(ceil_div(x.c, team), LEAST) * LEAST);
  }

  int64_t x_floats() const { return times(blocks_of(x.c) * int64_t(VL), chunk); }
  int64_t dy_floats() const { return times(ceil_div(k_block, VL) * VL, chunk); }
  int64_t scratch_floats() const { return plus(times(parts(), x_floats()), times(threads, dy_floats())); }
};

// A chunk of pixels, and the elements of dw that one thread computes from it.
struct GradientTask {
  int64_t first;
  int count, c, c_end, k;
};

// Copy pixels of the chunk in blocks of VL channels, or of VL channels of pairs of neighbouring pixels.
inline void copy_pixels(const FilterGradient& f, const Images& x, int64_t first, int count, float* to) {
  (f.step == 2 ? copy_paired_rows : copy_blocked_rows)(x, first, count, to, ptrdiff_t(f.chunk) * VL);
}

// Copy planes of the chunk in blocks of VL pixels, or of VL pairs of neighbouring pixels.
inline void copy_chunk_planes(const FilterGradient& f, const Images& x, int64_t first, int count, int stride,
                              float* to) {
  (f.step == 2 ? copy_planes_in_pairs : copy_planes)(x, first, count, stride, to);
}

inline void copy_x(const FilterGradient& f, const Images& x, int64_t first, int count, int channel, int channels,
                   float* to) {
  const Images part = channels_of(x, channel, std::min(channels, x.c - channel));
  float* at = to + ptrdiff_t(channel) * f.chunk;
  const PairsOf pairs = f.step == 2 ? PAIRS_OF_PIXELS : NO_PAIRS;
  const int steps = ceil_div(count, f.step);
  if (f.pixels_are_rows()) {
    copy_pixels(f, part, first, count, at);
    for (int c = 0; c < (f.prologue ? part.c : 0); c += VL, at += ptrdiff_t(f.chunk) * VL)
      normalize_rows(f.prologue + (channel + c), pairs, at, VL, VL, steps, at, VL);
    return;
  }
  for (int c = 0; c < part.c; c += DOT_COLUMNS) {
    const int columns = std::min(DOT_COLUMNS, part.c - c);
    float* planes = at + ptrdiff_t(c) * f.chunk;
    copy_chunk_planes(f, channels_of(part, c, columns), first, count, DOT_COLUMNS, planes);
    if (f.prologue)
      normalize_planes(f.prologue + (channel + c), pairs, planes, columns, blocks_of(steps), DOT_COLUMNS);
  }
}

// Add the pixels [begin, end) to dw: the share of thread `rank` in a team of `size` threads, all of which call this.
inline void add_pixels(const FilterGradient& f, int64_t begin, int64_t end, int rank, int size, float* x, float* dy,
                       float* dw) {
  const Images seen = f.pixels_are_rows() ? f.x : joined_rows(f.x);
  const int chunk = f.chunk, c_block = f.c_block, k_blocks = f.k_blocks(), copied = f.copied_channels(size);
  const int64_t tasks = int64_t(ceil_div(f.x.c, c_block)) * k_blocks;
  for (int64_t first = begin; first < end; first += int64_t(chunk) * f.step) {
    const int count = int(std::min<int64_t>(int64_t(chunk) * f.step, end - first));
    for (int c = rank * copied; c < f.x.c; c += size * copied) copy_x(f, seen, first, count, c, copied, x);
    if (size > 1) {
#pragma omp barrier
    }
    for (int64_t index = tasks * rank / size; index < tasks * (rank + 1) / size; ++index) {
      const int c = int(index / k_blocks) * c_block;
      const GradientTask task{first, count, c, std::min(f.x.c, c + c_block), int(index % k_blocks) * f.k_block};
      const auto add =
          f.pixels_are_rows()
              ? (f.step == 2 ? Arithmetic<Pairs>::add_outer_products : Arithmetic<Singles>::add_outer_products)
              : (f.step == 2 ? Arithmetic<Pairs>::add_dot_products : Arithmetic<Singles>::add_dot_products);
      add(f, task, x, dy, dw);
    }
    if (size > 1) {
#pragma omp barrier
    }
  }
}

// Add the pixels [begin, end) to dw, except the last ones that cannot be read in place. Return the first of those.
// normalized: room for a chunk of x.
inline int64_t add_pixels_in_place(const FilterGradient& f, int64_t begin, int64_t end, float* normalized, float* dw) {
  const int64_t last = std::max(begin, std::min(end, f.pixels() - f.pixels_after_place()));
  for (const int64_t chunk = f.chunk_in_place(); begin < last; begin = std::min(begin + chunk, last))
    Arithmetic<Singles>::add_rows_in_place(f, begin, int(std::min(chunk, last - begin)), normalized, dw);
  return last;
}

// Add to dw and to its copies, which are stored one after another. scratch: scratch_floats() floats.
inline void add_gradient(const FilterGradient& f, const Elements& dw, float* copies, float* scratch) {
  const int64_t pixels = f.pixels(), parts = f.parts(), of_filter = int64_t(f.x.c) * f.dy.c;
  const auto sums_of = [&](int64_t part) {
    if (dw.type != FLOAT32) return copies + part * of_filter;
    return part == 0 ? dw.as<float>() : copies + (part - 1) * of_filter;
  };
#pragma omp parallel num_threads(f.threads)
  {
    const int rank = omp_get_thread_num();
    float* dy = scratch + parts * f.x_floats() + rank * f.dy_floats();
    if (parts == 1) {
      add_pixels(f, 0, pixels, rank, omp_get_num_threads(), scratch, dy, sums_of(0));
    } else {
#pragma omp for schedule(static, 1)
      for (int64_t part = 0; part < parts; ++part) {
        int64_t begin = pixels * part / parts;
        const int64_t end = pixels * (part + 1) / parts;
        float* x = scratch + part * f.x_floats();
        if (f.reads_in_place()) begin = add_pixels_in_place(f, begin, end, x, sums_of(part));
        add_pixels(f, begin, end, 0, 1, x, dy, sums_of(part));
      }
    }
  }
}

// Add `count` copies, of `of_filter` elements each, to a vector of dw, rounding once.
template <class T>
INLINE void add_copies(T* dw, int lanes, const float* copies, int64_t count, int64_t of_filter) {
  Vec sum = load_first(dw, lanes);
  for (int64_t i = 0; i < count; ++i) sum += load_first(copies + i * of_filter, lanes);
  store_first(dw, sum, lanes);
}

}  // namespace pointwise
