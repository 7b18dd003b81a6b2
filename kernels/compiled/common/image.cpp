#include "common/image.h"

#include "common/planar_rows.h"

namespace {

// Scatter a row whose pixels are `pixel_stride` elements apart.
template <class T>
INLINE void scatter_spread_row(const float* from, int columns, T* to, ptrdiff_t pixel_stride, ptrdiff_t channel_stride,
                               int channels) {
  for (int j = 0; j < columns; j += VL) {
    const int count = std::min(VL, columns - j);
    Vec block[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) block[i] = i < count ? load(from + (j + i) * VL) : Vec{};
    transpose(block);
    alignas(64) T pixels[VL][VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) store(pixels[i], block[i]);
    for (int i = 0; i < channels; ++i) {
      T* at = to + i * channel_stride + j * pixel_stride;
      for (int pixel = 0; pixel < count; ++pixel, at += pixel_stride) *at = pixels[i][pixel];
    }
  }
}

template <class Pixels>
void fill_from(Pixels first_element, const Images& x, const Region& r, float* buffer) {
  const int channels = std::min(VL, x.c - r.channel);
  const int first = std::clamp(-r.left, 0, r.columns), last = std::clamp(x.w - r.left, first, r.columns);
  for (int i = 0; i < r.rows; ++i) {
    float* to = buffer + ptrdiff_t(i) * r.columns * VL;
    if (r.top + i < 0 || r.top + i >= x.h) {
      std::memset(to, 0, r.columns * (VL * sizeof(float)));
      continue;
    }
    std::memset(to, 0, first * (VL * sizeof(float)));
    std::memset(to + ptrdiff_t(last) * VL, 0, (r.columns - last) * (VL * sizeof(float)));
    if (first == last) continue;
    const Pixels from = first_element + x.offset(r.image, r.channel, r.top + i, r.left + first);
    if (x.sc == 1)
      for (ptrdiff_t j = first; j < last; ++j) store(to + j * VL, load_first(from + (j - first) * x.sw, channels));
    else if (x.sw != 1)
      for (ptrdiff_t j = first; j < last; ++j)
        for (int c = 0; c < VL; ++c) to[j * VL + c] = c < channels ? value_of(from[(j - first) * x.sw + c * x.sc]) : 0;
    else
      gather_planar_row(from, x.sc, channels, last - first, to + ptrdiff_t(first) * VL);
  }
}

template <class T>
void scatter_to(T* first_element, const Images& y, const Region& r, const Window& window) {
  const int channels = std::min(VL, y.c - r.channel);
  const int first = std::max(0, -r.left), columns = std::min(r.columns, y.w - r.left) - first;
  for (int i = std::max(0, -r.top); i < std::min(r.rows, y.h - r.top); ++i) {
    const float* from = window.data + i * window.row + first * window.column;
    T* to = first_element + y.offset(r.image, r.channel, r.top + i, r.left + first);
    if (y.sc == 1)
      for (ptrdiff_t j = 0; j < columns; ++j) store_first(to + j * y.sw, load(from + j * VL), channels);
    else if (y.sw == 1)
      scatter_planar_row(from, columns, to, y.sc, channels);
    else
      scatter_spread_row(from, columns, to, y.sw, y.sc, channels);
  }
}

}  // namespace

void fill(const Images& x, const Region& r, float* buffer) {
  x.visit_pixels([&](auto first) { fill_from(first, x, r, buffer); });
}

void scatter_buffer(const Images& y, const Region& r, const Window& window) {
  y.data.visit([&](auto* first) { scatter_to(first, y, r, window); });
}
