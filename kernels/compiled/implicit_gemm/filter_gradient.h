// Backward filter of implicit GEMM.
#pragma once

#include "common/matmul.h"
#include "implicit_gemm/arithmetic.h"
#include "implicit_gemm/filter.h"

namespace implicit_gemm {

constexpr int UNIT_PIXELS = 256;           // of dy that a register tile sums before it updates the accumulator
constexpr int64_t BATCH_FLOATS = 1 << 20;  // of units packed between two barriers

// The reduction over n, p, q, in units of a few rows of one image.
//
// Blocked: a batch of units is packed, then all threads share the (channel block, tap) pairs of the accumulator.
// Planar: each thread packs and sums its own units, since the whole gradient is small; then the sums are added. If the
// channels of a pixel are contiguous, its window is *interleaved*: one plane of rows as they are in memory.
struct FilterGradient {
  Taps taps;
  WindowShape window;
  int rows, units_per_image, units_at_once, c, k;
  int stride_h, stride_w, q;
  int step;  // outputs: two if they are multiplied in pairs
  bool interleaved;

  int steps() const { return ceil_div(q, step); }  // of a row
  // Return the first pixel of a window's row that is not paired: the last of an odd number of outputs has no neighbour.
  int unpaired() const { return q % 2 ? (q - 1) * stride_w : window.width; }

  int64_t dy_floats() const { return times(int64_t(blocks_of(k)) * VL, int64_t(rows) * q); }
  int64_t unit_floats() const { return plus(window.floats(), dy_floats()); }
  int64_t gradient_floats() const {
    return times(times(window.planar ? c : window.channels, int64_t(taps.size())), int64_t(blocks_of(k)) * VL);
  }
  // Return the floats from an input of an output to that of the next one, in a planar window.
  ptrdiff_t planar_stride() const { return ptrdiff_t(stride_w) * (interleaved ? c : 1); }
  // Return the place of the first input of each (channel, tap) in a planar window.
  std::vector<ptrdiff_t> planar_offsets() const {
    if (!interleaved) return inner_offsets(taps, window);
    std::vector<ptrdiff_t> offsets;
    const Span down = span_of(taps, &Tap::row), across = span_of(taps, &Tap::column);
    for (int channel = 0; channel < c; ++channel)
      for (const Tap& tap : taps)
        offsets.push_back(window.at(tap.row - down.first, (tap.column - across.first) * c + channel));
    return offsets;
  }
  int64_t scratch_bytes(int threads) const {
    return bytes_of(window.planar ? times(threads, plus(unit_floats(), gradient_floats()))
                                  : times(units_at_once, unit_floats()));
  }
};

inline FilterGradient filter_gradient(const Geometry& g, const Images& x, const Images& dy) {
  const int c = x.c, k = dy.c, p = dy.h, q = dy.w;
  const int64_t n = dy.n;
  FilterGradient f;
  f.taps = taps_of(g.rows(false), g.columns(false), 0, 0);
  f.c = c;
  f.k = k;
  f.q = q;
  f.stride_h = int(g.stride_h);
  f.stride_w = int(g.stride_w);
  f.rows = std::clamp(UNIT_PIXELS / q, 1, p);
  f.units_per_image = ceil_div(p, f.rows);
  f.window = window_shape(is_planar(c), c, f.taps, f.stride_h, f.stride_w, 1, f.rows, q);
  // No tap may need a pixel paired that another one, for the last output, needs alone.
  const bool can_pair = q % 2 == 0 || span_of(f.taps, &Tap::column).size() <= 2 * f.stride_w;
  f.step = x.data.type == BFLOAT16 && can_pair && multiplies_pairs() ? 2 : 1;
  f.interleaved = is_planar(c) && x.sc == 1 && x.sw == c && f.step == 1;
  if (f.interleaved) {
    f.window.width *= c;
    f.window.channels = 1;
  }
  f.units_at_once = int(std::clamp<int64_t>(BATCH_FLOATS / f.unit_floats(), 2, 64));
  f.units_at_once = int(std::min<int64_t>(f.units_at_once, times(n, f.units_per_image)));
  return f;
}

// Pair vectors of a row, of numbers that are bfloat16: every `every`-th with the one `distance` further on, or with
// zeros from number `unpaired` on. The results are stored next to one another.
inline void pair_vectors(const float* row, int vectors, int unpaired, int distance, int every, float* to) {
  for (int i = 0; i < vectors; i += every, to += VL) {
    const bool is_pair = i < unpaired && i + distance < vectors;
    const Vec other = is_pair ? load(row + ptrdiff_t(i + distance) * VL) : Vec{};
    store(to, paired_exactly(load(row + ptrdiff_t(i) * VL), other));
  }
}

// Do the same for single pixels of bfloat16, in place.
inline void pair_row(float* row, int pixels, int unpaired, int distance) {
  for (int i = 0; i < pixels; i += VL) {
    const Vec others = load_first(row + i + distance, std::min(unpaired, pixels - distance) - i);
    store_first(row + i, paired_exactly(load_first(row + i, pixels - i), others), pixels - i);
  }
}

// Packed rows of an image: the window of x, and dy as [K / VL][rows][q][VL]. If outputs are multiplied in pairs, each
// pixel of the window is paired with the one that the next output reads, and dy has half as many vectors. Planar units
// may read dy in place: its rows, outputs and vectors are dy_row, dy_step and dy_stream floats apart.
struct Unit {
  const float* window;
  const float* dy;
  int rows;
  ptrdiff_t dy_row, dy_step, dy_stream;
};

// Copy rows of pixels, with all their channels, and zeros outside the image.
inline void fill_interleaved(const Images& x, const Region& r, float* to) {
  const int first = std::clamp(-r.left, 0, r.columns), last = std::clamp(x.w - r.left, first, r.columns);
  for (int i = 0; i < r.rows; ++i, to += ptrdiff_t(r.columns) * x.c) {
    const int row = r.top + i, begin = row >= 0 && row < x.h ? first : 0, end = row >= 0 && row < x.h ? last : 0;
    std::fill(to, to + ptrdiff_t(begin) * x.c, 0.0f);
    if (begin < end)
      x.data.visit([&](const auto* pixels) {
        const auto* from = pixels + x.offset(r.image, 0, row, r.left + begin);
        copy_elements(from, (end - begin) * x.c, to + ptrdiff_t(begin) * x.c);
      });
    std::fill(to + ptrdiff_t(end) * x.c, to + ptrdiff_t(r.columns) * x.c, 0.0f);
  }
}

inline Unit pack_unit(const FilterGradient& f, const Images& x, const Images& dy, int64_t index, float* to) {
  const int64_t image = index / f.units_per_image;
  const int row = int(index % f.units_per_image) * f.rows, rows = std::min(f.rows, dy.h - row);
  const int top = span_of(f.taps, &Tap::row).first, left = span_of(f.taps, &Tap::column).first;
  float* gradient = to + f.window.floats();
  if (f.interleaved)
    fill_interleaved(x, {image, 0, row * f.stride_h + top, left, f.window.height, f.window.width / f.c}, to);
  else
    fill_window(x, {image, 0, row * f.stride_h + top, left, f.window.height, f.window.width}, f.window, to);
  if (f.window.planar && f.step == 1 && is_window(dy, {image, dy.c - VL, row, 0, rows, f.q}) && dy.c % VL == 0)
    return {to, dy.at(image, 0, row, 0), rows, dy.sh, dy.sw, VL};
  for (int k = 0; k < blocks_of(dy.c); ++k)
    fill(dy, {image, k * VL, row, 0, rows, f.q}, gradient + ptrdiff_t(k) * rows * f.q * VL);
  if (f.step == 2) {
    const ptrdiff_t of_steps = ptrdiff_t(f.steps()) * VL;
    for (ptrdiff_t i = 0; i < f.window.floats(); i += f.window.row())
      if (f.window.planar)
        pair_row(to + i, f.window.width, f.unpaired(), f.stride_w);
      else
        pair_vectors(to + i, f.window.width, f.unpaired(), f.stride_w, 1, to + i);
    for (int i = 0; i < blocks_of(dy.c) * rows; ++i)
      pair_vectors(gradient + ptrdiff_t(i) * f.q * VL, f.q, f.q, 1, 2, gradient + i * of_steps);
  }
  const ptrdiff_t of_row = ptrdiff_t(f.steps()) * VL;
  return {to, gradient, rows, of_row, VL, rows * of_row};
}

inline void accumulate_task(const FilterGradient& f, const Unit& unit, int64_t task, float* du) {
  const Span rows = span_of(f.taps, &Tap::row), columns = span_of(f.taps, &Tap::column);
  const int64_t block = task / int64_t(f.taps.size());
  const Tap& tap = f.taps[task % f.taps.size()];
  const ptrdiff_t offset = block * f.window.plane() + f.window.at(tap.row - rows.first, tap.column - columns.first);
  float* sum = du + task * blocks_of(f.k) * VL * VL;
  (f.step == 2 ? Arithmetic<Pairs>::add_blocked : Arithmetic<Singles>::add_blocked)(f, unit, offset, sum);
}

inline void accumulate_blocked(const FilterGradient& f, const Images& x, const Images& dy, float* du, float* scratch,
                               int threads) {
  const int64_t units = dy.n * f.units_per_image, tasks = blocks_of(x.c) * int64_t(f.taps.size());
  std::vector<Unit> packed(f.units_at_once);
#pragma omp parallel num_threads(threads)
  for (int64_t begin = 0; begin < units; begin += f.units_at_once) {
    const int count = int(std::min<int64_t>(f.units_at_once, units - begin));
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) packed[i] = pack_unit(f, x, dy, begin + i, scratch + i * f.unit_floats());
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task)
      for (int i = 0; i < count; ++i) accumulate_task(f, packed[i], task, du);
  }
}

inline void accumulate_planar(const FilterGradient& f, const Images& x, const Images& dy, float* du, float* scratch,
                              int threads) {
  const int64_t units = dy.n * f.units_per_image, floats = f.gradient_floats(), own = f.unit_floats() + floats;
  const std::vector<ptrdiff_t> offsets = f.planar_offsets();
  const auto accumulate = f.step == 2 ? Arithmetic<Pairs>::add_planar : Arithmetic<Singles>::add_planar;
#pragma omp parallel num_threads(threads)
  {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    float* sums = scratch + thread * own;
    std::memset(sums, 0, floats * sizeof(float));
    for (int64_t unit = units * thread / team; unit < units * (thread + 1) / team; ++unit)
      accumulate(f, pack_unit(f, x, dy, unit, sums + floats), offsets, sums);
#pragma omp barrier
#pragma omp for
    for (int64_t i = 0; i < floats; i += VL)
      for (int64_t other = 0; other < team; ++other) store(du + i, load(du + i) + load(scratch + other * own + i));
  }
}

inline void accumulate(const FilterGradient& f, const Images& x, const Images& dy, float* du, float* scratch,
                       int threads) {
  if (f.window.planar)
    accumulate_planar(f, x, dy, du, scratch, threads);
  else
    accumulate_blocked(f, x, dy, du, scratch, threads);
}

inline void add_filter_gradient(const float* du, const FilterView& dw, int threads) {
  const bool planar = is_planar(dw.rows);
  const int taps = dw.taps(), blocks = blocks_of(dw.lanes);
  TapBuffers buffers(taps, threads);
#pragma omp parallel num_threads(threads)
  {
    float* buffer = buffers.mine();
#pragma omp for collapse(2)
    for (int k = 0; k < blocks; ++k)
      for (int first = 0; first < dw.rows; first += VL) {
        for (int c = first; c < std::min(first + VL, dw.rows); ++c)
          for (int t = 0; t < taps; ++t) {
            const ptrdiff_t vector = planar ? (ptrdiff_t(k) * dw.rows + c) * taps + t
                                            : ((ptrdiff_t(c / VL) * taps + t) * blocks + k) * VL + c % VL;
            store(buffer + (ptrdiff_t(c - first) * taps + t) * VL, load(du + vector * VL));
          }
        add_filter_block({dw, k * VL, first}, buffer);
      }
  }
}

}  // namespace implicit_gemm
