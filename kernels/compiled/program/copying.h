// Copies between memory formats, and pixels from channels.
#pragma once

#include "program/step.h"

namespace program {

// Write pixels of CHANNELS channels, which are `distance` elements apart in x. A loop over so few channels would take
// longer than the copy.
template <int CHANNELS, class T>
void interleave(const T* read, int64_t distance, int64_t columns, T* row) {
  for (int64_t w = 0; w < columns; ++w, row += CHANNELS)
#pragma GCC unroll 4
    for (int c = 0; c < CHANNELS; ++c) row[c] = read[c * distance + w];
}

template <class T>
void copy(const View& out, const View& x, char* const* bases, int threads) {
  T* const to = out.place.in<T>(bases);
  const T* const from = x.place.in<T>(bases);
  if (out.stride_c == 1) {
    each_row(out, threads, [&](int64_t n, int64_t h) {
      T* row = to + n * out.stride_n + h * out.stride_h;
      const T* read = from + n * x.stride_n + h * x.stride_h;
      const bool is_dense = out.stride_w == out.c && x.stride_c == 1 && x.stride_w == x.c;
      if (is_dense) return void(std::memcpy(row, read, out.w * out.c * sizeof(T)));
      if (out.c == 3 && out.stride_w == 3 && x.stride_w == 1) return interleave<3>(read, x.stride_c, out.w, row);
      for (int64_t w = 0; w < out.w; ++w, row += out.stride_w, read += x.stride_w) {
        if (x.stride_c == 1) std::memcpy(row, read, out.c * sizeof(T));
        else
          for (int64_t c = 0; c < out.c; ++c) row[c] = read[c * x.stride_c];
      }
    });
    return;
  }
  constexpr int64_t PIECE = 16;  // columns, whose channels stay in the cache
  each_row(out, threads, [&](int64_t n, int64_t h) {
    T* row = to + n * out.stride_n + h * out.stride_h;
    const T* read = from + n * x.stride_n + h * x.stride_h;
    for (int64_t first = 0; first < out.w; first += PIECE)
      for (int64_t c = 0; c < out.c; ++c)
        for (int64_t w = first; w < std::min(first + PIECE, out.w); ++w)
          row[c * out.stride_c + w * out.stride_w] = read[c * x.stride_c + w * x.stride_w];
  });
}

inline void copy(const Step& step, char* const* bases, int threads) {
  switch (step.numbers[0]) {
    case 1: return copy<uint8_t>(step.out, step.x, bases, threads);
    case 2: return copy<uint16_t>(step.out, step.x, bases, threads);
    case 4: return copy<uint32_t>(step.out, step.x, bases, threads);
    case 8: return copy<uint64_t>(step.out, step.x, bases, threads);
    default: refuse(MISMATCH, "a copy of elements of a size that is not 1, 2, 4 or 8 bytes");
  }
}

// out(n, c, h r + i, w r + j) = x(n, (c r + i) r + j, h, w), as in torch.
template <class T>
void shuffle(const Step& step, char* const* bases, int threads) {
  const View &out = step.out, &x = step.x;
  const Rows<T> to(out, bases), from(x, bases);
  const int64_t r = step.numbers[0], above = step.numbers[1];
  each_row(out, threads, [&](int64_t n, int64_t h) {
    const int64_t i = (h + above) % r;
    const T* read = from.at(n, (h + above) / r) + i * r;
    T* row = to.at(n, h);
    for (int64_t w = 0; w < x.w; ++w, read += x.c)
      for (int64_t j = 0; j < r; ++j, row += out.c)
        for (int64_t c = 0; c < out.c; ++c) row[c] = read[c * r * r + j];
  });
}

}  // namespace program
