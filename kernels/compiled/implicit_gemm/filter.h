// The packed filter of implicit GEMM.
#pragma once

#include <omp.h>

#include "common/tasks.h"
#include "implicit_gemm/taps.h"

namespace implicit_gemm {

inline int64_t filter_floats(const Geometry& g, int rows, int lanes) {
  return times(g.r * g.s, times(padded(rows), blocks_of(lanes) * int64_t(VL)));
}

// A buffer per thread for one block of the filter, allocated before the parallel region, where a failure can be caught.
class TapBuffers {
 public:
  // blocks: of VL rows
  TapBuffers(int taps, int threads, int blocks = 1)
      : floats_(size_t(VL) * taps * VL * blocks), memory_(times(floats_, threads)) {}
  float* mine() { return memory_.data() + omp_get_thread_num() * floats_; }

 private:
  size_t floats_;
  std::vector<float> memory_;
};

// The taps of one product, and where its part of the packed filter begins.
struct PackedTaps {
  Taps taps;
  float* to;
};

// Load VL rows of one block of lanes, or VL pairs of rows, as [row or pair][tap][VL]. row: the first one or pair.
inline void load_rows(const FilterView& w, int block, int row, bool of_pairs, float* buffer) {
  if (!of_pairs) return load_filter_block({w, block * VL, row}, buffer);
  const ptrdiff_t of_row = ptrdiff_t(w.taps()) * VL;
  for (int half = 0; half < 2; ++half) {
    float* const pairs = buffer + half * (VL / 2) * of_row;
    float* const rows = buffer + VL * of_row;
    if (2 * row + half * VL < w.rows)
      load_filter_block({w, block * VL, 2 * row + half * VL}, rows);
    else
      std::memset(rows, 0, sizeof(float) * VL * of_row);
    for (int i = 0; i < VL / 2; ++i)
      for (ptrdiff_t j = 0; j < of_row; j += VL)
        store(pairs + i * of_row + j,
              paired_exactly(load(rows + 2 * i * of_row + j), load(rows + (2 * i + 1) * of_row + j)));
  }
}

// Pack each product's filter as [lane block][row or row block][tap][row in block][VL], the order in which a register
// tile reads it.
inline void pack_filter(const FilterView& w, bool of_pairs, const std::vector<PackedTaps>& products, int threads) {
  const int summed = of_pairs ? w.rows / 2 : w.rows, rows = padded(summed), in_block = is_planar(summed) ? 1 : VL;
  TapBuffers buffers(w.taps(), threads, of_pairs ? 2 : 1);
  const int64_t down = ceil_div(rows, VL);
  parallel_tasks(threads, blocks_of(w.lanes) * down, true, [&](int64_t task) {
    float* buffer = buffers.mine();
    const int block = int(task / down), first = int(task % down) * VL;
    load_rows(w, block, first, of_pairs, buffer);
    for (const PackedTaps& product : products)
      for (int row = first; row < std::min(first + VL, rows); ++row) {
        const ptrdiff_t outer = ptrdiff_t(block) * (rows / in_block) + row / in_block;
        float* to = product.to + (outer * ptrdiff_t(product.taps.size()) * in_block + row % in_block) * VL;
        for (const Tap& tap : product.taps) {
          const float* elements = buffer + (ptrdiff_t(row - first) * w.taps() + tap.r * w.s) * VL;
          const auto of = [&](int s) { return s < 0 ? Vec{} : load(elements + ptrdiff_t(s) * VL); };
          store(to, are_in_pairs(product.taps) ? paired_exactly(of(tap.s), of(tap.second)) : of(tap.s));
          to += in_block * VL;
        }
      }
  });
}

}  // namespace implicit_gemm
