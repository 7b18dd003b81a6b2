// Packed windows of the image, from which the products of implicit GEMM read their left side.
#pragma once

#include "implicit_gemm/taps.h"

namespace implicit_gemm {

// The input of rows x columns outputs. Blocked: [C / VL][height][width][VL]. Planar: [C][height][stride_w][width], with
// the columns of a residue contiguous, so that neighbouring outputs read neighbouring floats.
struct WindowShape {
  bool planar;
  int channels, height, width, residues;
  ptrdiff_t row() const { return ptrdiff_t(width) * (planar ? residues : VL); }
  ptrdiff_t plane() const { return row() * height; }
  int planes() const { return planar ? channels : blocks_of(channels); }
  ptrdiff_t floats() const { return plane() * planes(); }
  ptrdiff_t at(int down, int right) const {
    return down * row() + (planar ? ptrdiff_t(right % residues) * width + right / residues : ptrdiff_t(right) * VL);
  }
};

inline WindowShape window_shape(bool planar, int channels, const Taps& taps, int stride_h, int stride_w, int residues,
                                int rows, int columns) {
  const int64_t height = int64_t(rows - 1) * stride_h + span_of(taps, &Tap::row).size();
  const int64_t width = int64_t(columns - 1) * stride_w + columns_of(taps).size();
  for (const int64_t size : {height, width}) require_size("a size of the padded input", size);
  const WindowShape shape{planar, channels, int(height), ceil_div(int(width), residues), residues};
  times(times(shape.row(), height), shape.planes());  // floats() must not overflow
  return shape;
}

// Return the offset in a window of each block of the inner dimension: (channel or channel block, tap).
inline std::vector<ptrdiff_t> inner_offsets(const Taps& taps, const WindowShape& shape) {
  std::vector<ptrdiff_t> offsets;
  const Span rows = span_of(taps, &Tap::row), columns = columns_of(taps);
  for (int c = 0; c < shape.planes(); ++c)
    for (const Tap& tap : taps)
      offsets.push_back(c * shape.plane() + shape.at(tap.row - rows.first, tap.column - columns.first));
  return offsets;
}

template <class Pixels>
void fill_planar(Pixels first_element, const Images& x, const Region& r, const WindowShape& shape, float* to) {
  std::memset(to, 0, shape.floats() * sizeof(float));
  const int top = std::max(0, -r.top), bottom = std::min(shape.height, x.h - r.top);
  for (int c = 0; c < shape.channels; ++c)
    for (int i = top; i < bottom; ++i)
      for (int residue = 0; residue < shape.residues; ++residue) {
        const int left = r.left + residue;  // columns left + j * residues, of which those in the image are copied
        const int first = left < 0 ? ceil_div(-left, shape.residues) : 0;
        const int last = std::min(shape.width, left < x.w ? ceil_div(x.w - left, shape.residues) : 0);
        const Pixels from = first_element + x.offset(r.image, c, r.top + i, left);
        const ptrdiff_t step = shape.residues * x.sw;
        float* row = to + c * shape.plane() + i * shape.row() + ptrdiff_t(residue) * shape.width;
#pragma GCC unroll 8
        for (int j = first; j < last; ++j) row[j] = value_of(from[j * step]);
      }
}

// Fill a window with a region of all channels of an image; r.channel is ignored.
inline void fill_window(const Images& x, Region r, const WindowShape& shape, float* to) {
  if (shape.planar) return x.visit_pixels([&](auto first) { fill_planar(first, x, r, shape, to); });
  for (int block = 0; block < blocks_of(x.c); ++block) {
    r.channel = block * VL;
    fill(x, r, to + block * shape.plane());
  }
}

// Pair the pixels of a planar window of bfloat16 with their neighbours, or with zeros in residues without pairs of
// taps.
inline void pair_pixels(const Taps& taps, const WindowShape& shape, float* window) {
  std::vector<bool> are_paired(shape.residues);
  const int first = columns_of(taps).first;
  for (const Tap& tap : taps)
    if (tap.reach) are_paired[(tap.column - first) % shape.residues] = true;
  for (ptrdiff_t i = 0; i < shape.floats() / shape.width; ++i) {
    float* const row = window + i * shape.width;
    for (int j = 0; j < shape.width; j += VL) {
      const int count = shape.width - j;
      const Vec next = are_paired[i % shape.residues] ? load_first(row + j + 1, count - 1) : Vec{};
      store_first(row + j, paired_exactly(load_first(row + j, count), next), count);
    }
  }
}

}  // namespace implicit_gemm
