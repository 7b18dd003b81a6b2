// Backward filter of implicit GEMM.
#pragma once

#include "implicit_gemm_filter.h"
#include "implicit_gemm_windows.h"
#include "matmul.h"

constexpr int UNIT_PIXELS = 256;           // of dy that one register tile sums up before it touches the accumulator
constexpr int64_t BATCH_FLOATS = 1 << 20;  // of packed units between two barriers

// The reduction over n, p, q in units of some rows of one image; some units are packed at a time, then all threads take
// (channel block, tap) pairs of the accumulator.
struct FilterGradient {
  Taps taps;
  WindowShape window;
  int rows, units_per_image, units_at_once, k;
  int stride_h, stride_w, q;

  int64_t dy_floats() const { return times(int64_t(blocks_of(k)) * VL, int64_t(rows) * q); }
  int64_t unit_floats() const { return plus(window.floats(), dy_floats()); }
  int64_t scratch_bytes() const { return bytes_of(times(units_at_once, unit_floats())); }
};

inline FilterGradient filter_gradient(const Geometry& g, int64_t n, int c, int k, int p, int q) {
  FilterGradient f;
  f.taps = forward_taps(g);
  f.k = k;
  f.q = q;
  f.stride_h = int(g.stride_h);
  f.stride_w = int(g.stride_w);
  f.rows = std::clamp(UNIT_PIXELS / q, 1, p);
  f.units_per_image = ceil_div(p, f.rows);
  f.window = window_shape(is_planar(c), c, f.taps, f.stride_h, f.stride_w, 1, f.rows, q);
  f.units_at_once = int(std::clamp<int64_t>(BATCH_FLOATS / f.unit_floats(), 2, 64));
  f.units_at_once = int(std::min<int64_t>(f.units_at_once, times(n, f.units_per_image)));
  return f;
}

struct Unit {
  const float* window;
  const float* dy;
  int rows;
};

// Blocked: accumulator [C / VL][tap][K / VL][VL][VL], task = (channel block, tap).
template <int STEP>
void accumulate_blocked(Layout<1, STEP> layout, const FilterGradient& f, const Unit& unit, ptrdiff_t offset,
                        float* sum) {
  for_column_blocks(blocks_of(f.k), [&](auto vectors, int k) {
    for (int i = 0; i < VL; i += MR_TRANSPOSED) {
      const auto block_of = [&](int row) { return unit.window + offset + i + row * f.stride_h * f.window.row(); };
      register_tile<MR_TRANSPOSED, vectors.value, true>(
          layout, block_of, unit.rows, f.q, unit.dy + ptrdiff_t(k) * unit.rows * f.q * VL,
          ptrdiff_t(unit.rows) * f.q * VL, sum + (ptrdiff_t(k) * VL + i) * VL, ptrdiff_t(VL) * VL);
    }
  });
}

// Planar: accumulator [C][R][K / VL][S][VL], task = (channel, filter row); a register tile spans the filter's columns.
inline void accumulate_planar(const FilterGradient& f, const Unit& unit, ptrdiff_t offset, int s, int dilation_w, float* sum) {
  const Layout<AT_RUN_TIME, AT_RUN_TIME> layout{dilation_w, f.stride_w};
  for_column_blocks(blocks_of(f.k), [&](auto vectors, int k) {
    for_row_tiles(s, [&](int first, int count) {
      const auto block_of = [&](int row) {
        return unit.window + offset + first * dilation_w + row * f.stride_h * f.window.row();
      };
      register_tile_of<MR, vectors.value, true>(
          count, layout, block_of, unit.rows, f.q, unit.dy + ptrdiff_t(k) * unit.rows * f.q * VL,
          ptrdiff_t(unit.rows) * f.q * VL, sum + (ptrdiff_t(k) * s + first) * VL, ptrdiff_t(s) * VL);
    });
  });
}

inline void accumulate_task(const Geometry& g, const FilterGradient& f, const Unit& unit, int64_t task, float* du) {
  const Span rows = span_of(f.taps, &Tap::row), columns = span_of(f.taps, &Tap::column);
  if (f.window.planar) {
    const int64_t c = task / g.r, r = task % g.r;
    const ptrdiff_t offset = c * f.window.plane() + r * g.dilation_h * f.window.row();
    return accumulate_planar(f, unit, offset, int(g.s), int(g.dilation_w),
                             du + task * blocks_of(f.k) * g.s * VL);
  }
  const int64_t block = task / int64_t(f.taps.size());
  const Tap& tap = f.taps[task % f.taps.size()];
  const ptrdiff_t offset = block * f.window.plane() + f.window.at(tap.row - rows.first, tap.column - columns.first);
  float* sum = du + task * blocks_of(f.k) * VL * VL;
  if (f.stride_w == 1)
    accumulate_blocked(Layout<1, VL>{}, f, unit, offset, sum);
  else
    accumulate_blocked(Layout<1, AT_RUN_TIME>{1, f.stride_w * VL}, f, unit, offset, sum);
}

inline void accumulate(const Geometry& g, const FilterGradient& f, const Images& x, const Images& dy, float* du,
                float* scratch, int threads) {
  const int top = span_of(f.taps, &Tap::row).first, left = span_of(f.taps, &Tap::column).first;
  const int64_t units = dy.n * f.units_per_image;
  const int64_t tasks = f.window.planar ? x.c * g.r : blocks_of(x.c) * int64_t(f.taps.size());
  std::vector<Unit> packed(f.units_at_once);
#pragma omp parallel num_threads(threads)
  for (int64_t begin = 0; begin < units; begin += f.units_at_once) {
    const int count = int(std::min<int64_t>(f.units_at_once, units - begin));
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) {
      const int64_t image = (begin + i) / f.units_per_image;
      const int row = int((begin + i) % f.units_per_image) * f.rows;
      const int rows = std::min(f.rows, dy.h - row);
      float* window = scratch + i * f.unit_floats();
      float* gradient = window + f.window.floats();
      fill_window(x, {image, 0, row * f.stride_h + top, left, f.window.height, f.window.width}, f.window, window);
      for (int k = 0; k < blocks_of(dy.c); ++k)
        fill(dy, {image, k * VL, row, 0, rows, f.q}, gradient + ptrdiff_t(k) * rows * f.q * VL);
      packed[i] = {window, gradient, rows};
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task)
      for (int i = 0; i < count; ++i) accumulate_task(g, f, packed[i], task, du);
  }
}

inline void add_filter_gradient(const Geometry& g, const float* du, const FilterView& dw, int threads) {
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
            const int r = t / dw.s, s = t % dw.s;
            const ptrdiff_t vector = planar ? ((ptrdiff_t(c) * g.r + r) * blocks + k) * g.s + s
                                            : ((ptrdiff_t(c / VL) * taps + t) * blocks + k) * VL + c % VL;
            store(buffer + (ptrdiff_t(c - first) * taps + t) * VL, load(du + vector * VL));
          }
        add_filter_block({dw, k * VL, first}, buffer);
      }
  }
}
