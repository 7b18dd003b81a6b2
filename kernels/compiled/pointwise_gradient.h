// The filter gradient of 1x1 convolutions: dw += dy x^T, summed over the pixels of the mini-batch.
//
// Where the channels of a pixel lie next to each other, it is a sum of outer products. Where pixels lie next to each
// other, each element is a dot product of two planes: the vectors of a tile's sums are added up at its end, so that
// nothing has to be transposed. Either way, a *chunk* of pixels is copied to where its vectors follow each other.
#pragma once

#include <omp.h>

#include "pointwise_product.h"

// ---- tiles ---------------------------------------------------------------------------------------------------------

template <int ROWS, int VECTORS>
INLINE void add_outer_products(TileSums<ROWS, VECTORS> sum, const MatrixPlace& to) {
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

constexpr int DOT_ROWS = VL == 16 ? 4 : 3;  // of dy
constexpr int DOT_COLUMNS = 4;              // of x; accumulators, a vector of x and DOT_ROWS of dy fit the registers
typedef float Dots __attribute__((vector_size(DOT_COLUMNS * sizeof(float)), aligned(4), may_alias));

// Lane i becomes the sum of all lanes of vectors[i]: the stages of a transpose, each followed by an addition.
template <int D = 1>
INLINE Vec lane_sums(Vec (&vectors)[VL]) {
  if constexpr (D < VL) {
#pragma GCC unroll 16
    for (int i = 0; i < VL; i += 2 * D) {
      exchange<D>(vectors[i], vectors[i + D]);
      vectors[i] += vectors[i + D];
    }
    return lane_sums<2 * D>(vectors);
  }
  return vectors[0];
}

template <int ROWS>
INLINE void add_dot_products(const Vec (&sum)[ROWS][DOT_COLUMNS], const MatrixPlace& to) {
  constexpr int TOGETHER = VL / DOT_COLUMNS;
#pragma GCC unroll 4
  for (int i = 0; i < ROWS; i += TOGETHER) {
    Vec part[VL];
#pragma GCC unroll 16
    for (int j = 0; j < VL; ++j)
      part[j] = i + j / DOT_COLUMNS < ROWS ? sum[i + j / DOT_COLUMNS][j % DOT_COLUMNS] : Vec{};
    float dots[VL];
    store(dots, lane_sums(part));
    for (int r = 0; r < std::min(TOGETHER, ROWS - i); ++r) {
      float* at = to.data + (i + r) * to.row;
      const float* from = dots + r * DOT_COLUMNS;
      if (to.columns >= DOT_COLUMNS)
        *reinterpret_cast<Dots*>(at) += *reinterpret_cast<const Dots*>(from);
      else
        for (int j = 0; j < to.columns; ++j) at[j] += from[j];
    }
  }
}

// a: ROWS planes, a_row floats apart; b: DOT_COLUMNS planes, b_row apart; `steps` vectors of each.
template <int ROWS>
INLINE void dot_tile(int steps, const float* a, ptrdiff_t a_row, const float* b, ptrdiff_t b_row,
                     const MatrixPlace& to) {
  Vec sum[ROWS][DOT_COLUMNS] = {};
  for (int step = 0; step < steps; ++step, a += VL, b += VL) {
    Vec left[ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) left[i] = load(a + i * a_row);
#pragma GCC unroll 4
    for (int j = 0; j < DOT_COLUMNS; ++j) {
      const Vec right = load(b + j * b_row);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) sum[i][j] += left[i] * right;
    }
  }
  add_dot_products<ROWS>(sum, to);
}

// ---- plan ----------------------------------------------------------------------------------------------------------

// One group. Small gradients have a copy for each thread, which sums its own pixels (`parts` = threads); of a large one
// each thread computes its own elements (`parts` = 1).
struct FilterGradient {
  Images x, dy;  // pixel by pixel
  int threads;

  static int64_t parts(int64_t filter_floats, int threads) {
    constexpr int64_t LARGEST_COPY = 128 * 1024;  // floats
    return filter_floats <= LARGEST_COPY ? threads : 1;
  }
  int64_t parts() const { return parts(int64_t(x.c) * dy.c, threads); }
  bool pixels_are_rows() const { return x.sc == 1; }
  int64_t pixels() const { return times(dy.n, pixels_of_image(dy)); }

  int chunk() const {
    constexpr int64_t CHUNK_FLOATS = 256 * 1024;
    const int64_t most = std::clamp<int64_t>(CHUNK_FLOATS / x.c, 256, pixels_are_rows() ? 512 : 1024);
    const int64_t own = ceil_div(pixels(), parts());
    return int(ceil_div(ceil_div(own, ceil_div(own, most)), int64_t(VL)) * VL);
  }
  ptrdiff_t plane() const { return chunk() + 2 * VL; }  // planes a power of two apart would share lines of the cache

  int k_block() const { return pixels_are_rows() ? VL : 2 * DOT_ROWS; }
  int k_blocks() const { return ceil_div(dy.c, k_block()); }
  int c_block() const {
    constexpr int64_t BLOCK_FLOATS = 64 * 1024;  // of a core's L2
    const int team = int(threads / parts());
    int block = int(std::clamp<int64_t>(BLOCK_FLOATS / plane() / (NV_TRANSPOSED * VL), 1, 1 << 20)) * NV_TRANSPOSED * VL;
    while (block > NV_TRANSPOSED * VL && int64_t(ceil_div(x.c, block)) * k_blocks() < 2 * team) block -= NV_TRANSPOSED * VL;
    return block;
  }

  int64_t x_floats() const { return times(blocks_of(x.c) * int64_t(VL), plane()); }
  int64_t dy_floats() const { return times(k_block(), plane()); }
  int64_t scratch_floats() const { return plus(times(parts(), x_floats()), times(threads, dy_floats())); }
};

// A chunk of pixels, and the elements of dw that one thread computes of it.
struct GradientTask {
  int64_t first;
  int count, c, c_end, k;
};

inline void copy_x(const FilterGradient& f, const Images& x, int64_t first, int count, int block, float* to) {
  if (f.pixels_are_rows()) return copy_blocked_rows(x, block * VL, first, count, to + block * VL * f.plane());
  Images planes = x;
  planes.data += block * VL * x.sc;
  copy_planes(planes, std::min(VL, x.c - block * VL), first, count, to + block * VL * f.plane(), f.plane());
}

inline void add_task(const FilterGradient& f, const GradientTask& task, const float* x, float* dy, float* dw) {
  const ptrdiff_t plane = f.plane();
  const int rows = std::min(f.k_block(), f.dy.c - task.k);
  float* to = dw + ptrdiff_t(task.k) * f.x.c;
  if (f.pixels_are_rows()) {
    copy_blocked_rows(f.dy, task.k, task.first, task.count, dy);
    for_even_column_blocks<NV_TRANSPOSED>(blocks_of(task.c_end - task.c), [&](auto vectors, int block) {
      constexpr int VECTORS = vectors.value;
      const int c = task.c + block * VL;
      for (int i = 0; i < rows; i += MR_TRANSPOSED) {
        const MatrixPlace place{to + ptrdiff_t(i) * f.x.c + c, f.x.c, rows - i, f.x.c - c};
        register_sums<MR_TRANSPOSED, VECTORS>(
            Layout<1, VL>{}, [&](int) { return dy + i; }, 1, task.count, x + c * plane, plane * VL,
            [&](TileSums<MR_TRANSPOSED, VECTORS> sum)
                INLINE_LAMBDA { add_outer_products<MR_TRANSPOSED, VECTORS>(sum, place); });
      }
    });
    return;
  }
  Images planes = joined_rows(f.dy);
  planes.data += task.k * planes.sc;
  copy_planes(planes, rows, task.first, task.count, dy, plane);
  const int steps = blocks_of(task.count);
  for (int c = task.c; c < task.c_end; c += DOT_COLUMNS)
    for (int i = 0; i < rows; i += DOT_ROWS) {
      const MatrixPlace place{to + ptrdiff_t(i) * f.x.c + c, f.x.c, rows - i, f.x.c - c};
      const float *a = dy + i * plane, *b = x + c * plane;
      if (rows - i >= DOT_ROWS) {
        dot_tile<DOT_ROWS>(steps, a, plane, b, plane, place);
      } else {
        for (int r = i; r < rows; ++r)
          dot_tile<1>(steps, dy + r * plane, plane, b, plane,
                      {place.data + (r - i) * place.row, place.row, 1, place.columns});
      }
    }
}

// Adds the pixels [begin, end) to dw: what `rank` of a team of `size` threads does of it. All of them call this.
inline void add_pixels(const FilterGradient& f, int64_t begin, int64_t end, int rank, int size, float* x, float* dy,
                       float* dw) {
  const Images seen = f.pixels_are_rows() ? f.x : joined_rows(f.x);
  const int chunk = f.chunk(), c_block = f.c_block(), k_blocks = f.k_blocks();
  const int64_t tasks = int64_t(ceil_div(f.x.c, c_block)) * k_blocks;
  for (int64_t first = begin; first < end; first += chunk) {
    const int count = int(std::min<int64_t>(chunk, end - first));
    for (int block = rank; block < blocks_of(f.x.c); block += size) copy_x(f, seen, first, count, block, x);
    if (size > 1) {
#pragma omp barrier
    }
    for (int64_t index = tasks * rank / size; index < tasks * (rank + 1) / size; ++index) {
      const int c = int(index / k_blocks) * c_block;
      add_task(f, {first, count, c, std::min(f.x.c, c + c_block), int(index % k_blocks) * f.k_block()}, x, dy, dw);
    }
    if (size > 1) {
#pragma omp barrier
    }
  }
}

// Adds to dw, and to the copies of it: parts() - 1 times as many floats. scratch: scratch_floats().
inline void add_gradient(const FilterGradient& f, float* dw, float* copies, float* scratch) {
  const int64_t pixels = f.pixels(), parts = f.parts(), of_filter = int64_t(f.x.c) * f.dy.c;
#pragma omp parallel num_threads(f.threads)
  {
    const int rank = omp_get_thread_num();
    float* dy = scratch + parts * f.x_floats() + rank * f.dy_floats();
    if (parts == 1) {
      add_pixels(f, 0, pixels, rank, omp_get_num_threads(), scratch, dy, dw);
    } else {
#pragma omp for schedule(static, 1)
      for (int64_t part = 0; part < parts; ++part)
        add_pixels(f, pixels * part / parts, pixels * (part + 1) / parts, 0, 1, scratch + part * f.x_floats(), dy,
                   part ? copies + (part - 1) * of_filter : dw);
    }
  }
}
