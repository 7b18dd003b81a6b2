// Activations in either memory format, and small channel-blocked windows cut out of them.
#pragma once

#include <algorithm>

#include "vector.h"

// A batch of images; strides in floats. sc == 1 (NHWC) and sw == 1 (NCHW) are the fast cases.
struct Images {
  float* data;
  int64_t n;
  int c, h, w;
  ptrdiff_t sn, sc, sh, sw;

  Images group(int64_t index) const {  // of as many channels, `index` times as many channels further
    Images moved = *this;
    moved.data += index * c * sc;
    return moved;
  }
  float* at(int64_t image, int channel, int row, int column) const {
    return data + image * sn + channel * sc + row * sh + column * sw;
  }
};

// Every stride-th pixel alone, from the first on: what a 1x1 filter sees.
static inline Images every(Images x, int64_t stride_h, int64_t stride_w) {
  x.h = int((x.h + stride_h - 1) / stride_h);
  x.w = int((x.w + stride_w - 1) / stride_w);
  x.sh *= stride_h;
  x.sw *= stride_w;
  return x;
}

// Rows and columns of VL channels: vector (i, j) at data[i * row + j * column].
struct Window {
  float* data;
  ptrdiff_t row, column;
};

struct Region {
  int64_t image;
  int channel, top, left, rows, columns;
};

INLINE bool lies_inside(const Images& x, const Region& r) {
  return r.channel + VL <= x.c && r.top >= 0 && r.left >= 0 && r.top + r.rows <= x.h && r.left + r.columns <= x.w;
}

// One row of a region, [columns][VL] from `to`, from planar channels: VL x VL transposes.
INLINE void gather_planar_row(const float* from, ptrdiff_t channel_stride, int channels, int columns, float* to) {
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

INLINE void scatter_planar_row(const float* from, int columns, float* to, ptrdiff_t channel_stride, int channels) {
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

// The same where neighbouring pixels lie `pixel_stride` floats apart.
INLINE void scatter_spread_row(const float* from, int columns, float* to, ptrdiff_t pixel_stride,
                               ptrdiff_t channel_stride, int channels) {
  for (int j = 0; j < columns; j += VL) {
    const int count = std::min(VL, columns - j);
    Vec block[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) block[i] = i < count ? load(from + (j + i) * VL) : Vec{};
    transpose(block);
    alignas(64) float pixels[VL][VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) store(pixels[i], block[i]);
    for (int i = 0; i < channels; ++i) {
      float* at = to + i * channel_stride + j * pixel_stride;
      for (int pixel = 0; pixel < count; ++pixel, at += pixel_stride) *at = pixels[i][pixel];
    }
  }
}

// Copies VL channels of a region to [rows][columns][VL]; what lies outside the image is zero.
static inline void fill(const Images& x, const Region& r, float* buffer) {
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
    const float* from = x.at(r.image, r.channel, r.top + i, r.left + first);
    if (x.sc == 1)
      for (ptrdiff_t j = first; j < last; ++j) store(to + j * VL, load_first(from + (j - first) * x.sw, channels));
    else if (x.sw != 1)
      for (ptrdiff_t j = first; j < last; ++j)
        for (int c = 0; c < VL; ++c) to[j * VL + c] = c < channels ? from[(j - first) * x.sw + c * x.sc] : 0;
    else
      gather_planar_row(from, x.sc, channels, last - first, to + ptrdiff_t(first) * VL);
  }
}

// VL channels of a region: in x itself where it can be, else copied to `buffer`.
static inline Window gather(const Images& x, const Region& r, float* buffer) {
  if (x.sc == 1 && lies_inside(x, r)) return {x.at(r.image, r.channel, r.top, r.left), x.sh, x.sw};
  fill(x, r, buffer);
  return {buffer, ptrdiff_t(r.columns) * VL, VL};
}

// Where the vectors of a region are to be written: y itself where it can, else `buffer`, to be followed by `scatter`.
INLINE Window target(const Images& y, const Region& r, float* buffer) {
  if (y.sc == 1 && lies_inside(y, r)) return {y.at(r.image, r.channel, r.top, r.left), y.sh, y.sw};
  return {buffer, ptrdiff_t(r.columns) * VL, VL};
}

// Write the part of a buffered region that lies inside the image.
static inline void scatter(const Images& y, const Region& r, const Window& window, const float* buffer) {
  if (window.data != buffer) return;
  const int channels = std::min(VL, y.c - r.channel);
  const int rows = std::min(r.rows, y.h - r.top), columns = std::min(r.columns, y.w - r.left);
  for (int i = 0; i < rows; ++i) {
    const float* from = buffer + i * window.row;
    float* to = y.at(r.image, r.channel, r.top + i, r.left);
    if (y.sc == 1)
      for (ptrdiff_t j = 0; j < columns; ++j) store_first(to + j * y.sw, load(from + j * VL), channels);
    else if (y.sw == 1)
      scatter_planar_row(from, columns, to, y.sc, channels);
    else
      scatter_spread_row(from, columns, to, y.sw, y.sc, channels);
  }
}
