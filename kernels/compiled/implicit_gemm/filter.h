// The packed filter of implicit GEMM.
#pragma once

#include <omp.h>

#include "implicit_gemm/taps.h"

namespace implicit_gemm {

inline int64_t filter_floats(const Geometry& g, int rows, int lanes) {
  return times(g.r * g.s, times(padded(rows), blocks_of(lanes) * int64_t(VL)));
}

// A buffer per thread for one block of the filter, allocated before the parallel region, where a failure can be caught.
class TapBuffers {
 public:
  TapBuffers(int taps, int threads) : floats_(size_t(VL) * taps * VL), memory_(times(floats_, threads)) {}
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

// Pack each product's filter as [lane block][row or row block][tap][row in block][VL], the order in which a register
// tile reads it.
inline void pack_filter(const FilterView& w, const std::vector<PackedTaps>& products, int threads) {
  const int rows = padded(w.rows), in_block = is_planar(w.rows) ? 1 : VL;
  TapBuffers buffers(w.taps(), threads);
#pragma omp parallel num_threads(threads)
  {
    float* buffer = buffers.mine();
#pragma omp for collapse(2)
    for (int block = 0; block < blocks_of(w.lanes); ++block)
      for (int first = 0; first < rows; first += VL) {
        load_filter_block({w, block * VL, first}, buffer);
        for (const PackedTaps& product : products)
          for (int row = first; row < std::min(first + VL, rows); ++row) {
            const ptrdiff_t outer = ptrdiff_t(block) * (rows / in_block) + row / in_block;
            float* to = product.to + (outer * ptrdiff_t(product.taps.size()) * in_block + row % in_block) * VL;
            for (const Tap& tap : product.taps) {
              store(to, load(buffer + (ptrdiff_t(row - first) * w.taps() + tap.r * w.s + tap.s) * VL));
              to += in_block * VL;
            }
          }
      }
  }
}

}  // namespace implicit_gemm
