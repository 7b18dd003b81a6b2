// Rows of images whose channels are planes, as vectors of VL channels: VL x VL transposes.
#pragma once

#include <algorithm>

#include "common/elements.h"

// Copy one row of a region of planar channels to [columns][VL] at `to`, by VL x VL transposes.
template <class Pixels>
INLINE void gather_planar_row(Pixels from, ptrdiff_t channel_stride, int channels, int columns, float* to) {
  for (ptrdiff_t j = 0; j < columns; j += VL) {
    const int count = int(std::min<ptrdiff_t>(VL, columns - j));
    Vec block[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) block[i] = i < channels ? load_first(from + i * channel_stride + j, count) : Vec{};
    transpose(block);
    if (count == VL) {
#pragma GCC unroll 16
      for (int i = 0; i < VL; ++i) store(to + (j + i) * VL, block[i]);
    } else {
      for (int i = 0; i < count; ++i) store(to + (j + i) * VL, block[i]);
    }
  }
}

template <class T>
INLINE void scatter_planar_row(const float* from, int columns, T* to, ptrdiff_t channel_stride, int channels) {
  for (ptrdiff_t j = 0; j < columns; j += VL) {
    const int count = int(std::min<ptrdiff_t>(VL, columns - j));
    Vec block[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) block[i] = i < count ? load(from + (j + i) * VL) : Vec{};
    transpose(block);
    if (count == VL && channels == VL) {
#pragma GCC unroll 16
      for (int i = 0; i < VL; ++i) store(to + i * channel_stride + j, block[i]);
    } else {
      for (int i = 0; i < channels; ++i) store_first(to + i * channel_stride + j, block[i], count);
    }
  }
}
