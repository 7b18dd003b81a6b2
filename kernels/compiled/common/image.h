// Activations in either memory format, and small channel-blocked windows cut out of them.
#pragma once

#include <algorithm>

#include "common/pairs.h"

// A pointer to pairs of bfloat16 pixels, one from each of two planes that are `distance` elements apart.
struct PlanePairs {
  const BFloat16* low;
  ptrdiff_t distance;

  INLINE_MEMBER PlanePairs operator+(ptrdiff_t count) const { return {low + count, distance}; }
  INLINE_MEMBER float operator[](ptrdiff_t i) const {
    const uint32_t bits = low[i].bits | uint32_t(low[i + distance].bits) << 16;
    float pair;
    std::memcpy(&pair, &bits, sizeof pair);
    return pair;
  }
};
INLINE Vec load(PlanePairs from) { return paired_exactly(load(from.low), load(from.low + from.distance)); }
INLINE Vec load_first(PlanePairs from, int count) {
  return paired_exactly(load_first(from.low, count), load_first(from.low + from.distance, count));
}

// A batch of images; strides in elements. sc == 1 (NHWC) and sw == 1 (NCHW) are the fast cases.
struct Images {
  Elements data;
  int64_t n;
  int c, h, w;
  ptrdiff_t sn, sc, sh, sw;
  ptrdiff_t plane_pair = 0;  // distance of the planes of a pair, in a view by pairs_of_channels
  ptrdiff_t sd = 0;  // distance of the frames of volumes; this is a view of one of them

  Images frame(int64_t index) const {  // the view of frame `index`, if this is that of frame 0
    Images moved = *this;
    moved.data = data + index * sd;
    return moved;
  }

  Images group(int64_t index) const {  // the view of group `index`, if this is that of group 0
    Images moved = *this;
    moved.data = data + index * c * sc;
    return moved;
  }
  ptrdiff_t offset(int64_t image, int channel, int row, int column) const {
    return image * sn + channel * sc + row * sh + column * sw;
  }
  // Call body with a pointer to the pixels to read: of the type of the elements, or PlanePairs.
  template <class Body>
  void visit_pixels(Body body) const {
    if (plane_pair) return body(PlanePairs{data.as<const BFloat16>(), plane_pair});
    data.visit(body);
  }
  // Only for float32:
  float* floats() const { return data.as<float>(); }
  float* at(int64_t image, int channel, int row, int column) const {
    return floats() + offset(image, channel, row, column);
  }
};

// Return a view of every stride-th pixel: what a strided 1x1 filter reads.
static inline Images every(Images x, int64_t stride_h, int64_t stride_w) {
  x.h = int((x.h + stride_h - 1) / stride_h);
  x.w = int((x.w + stride_w - 1) / stride_w);
  x.sh *= stride_h;
  x.sw *= stride_w;
  return x;
}

// View images of bfloat16 as floats that are pairs of neighbouring channels, of which there must be an even number.
// In channels-last images they lie so in memory; otherwise planes are paired as they are read.
static inline Images pairs_of_channels(Images x) {
  x.c /= 2;
  if (x.sc != 1) {
    x.plane_pair = x.sc;
    x.sc *= 2;
    return x;
  }
  x.data.type = FLOAT32;
  for (ptrdiff_t* stride : {&x.sn, &x.sh, &x.sw}) *stride /= 2;
  return x;
}

// Rows and columns of VL channels, as floats: vector (i, j) is at data[i * row + j * column].
struct Window {
  float* data;
  ptrdiff_t row, column;
};

struct Region {
  int64_t image;
  int channel, top, left, rows, columns;
};

// Return whether a region can be read and written in place, as vectors of floats.
INLINE bool is_window(const Images& x, const Region& r) {
  return x.data.type == FLOAT32 && x.sc == 1 && r.channel + VL <= x.c && r.top >= 0 && r.left >= 0 &&
         r.top + r.rows <= x.h && r.left + r.columns <= x.w;
}

// Copy VL channels of a region to [rows][columns][VL] as floats, with zeros outside the image.
void fill(const Images& x, const Region& r, float* buffer);

// Return VL channels of a region: in x itself if possible, otherwise copied to `buffer`.
static inline Window gather(const Images& x, const Region& r, float* buffer) {
  if (is_window(x, r)) return {x.at(r.image, r.channel, r.top, r.left), x.sh, x.sw};
  fill(x, r, buffer);
  return {buffer, ptrdiff_t(r.columns) * VL, VL};
}

// Return where to write a region: y itself if possible, otherwise `buffer`, which `scatter` then copies to y.
INLINE Window target(const Images& y, const Region& r, float* buffer) {
  if (is_window(y, r)) return {y.at(r.image, r.channel, r.top, r.left), y.sh, y.sw};
  return {buffer, ptrdiff_t(r.columns) * VL, VL};
}

// Write the part of a buffered region that lies inside the image.
void scatter_buffer(const Images& y, const Region& r, const Window& window);

static inline void scatter(const Images& y, const Region& r, const Window& window, const float* buffer) {
  if (window.data == buffer) scatter_buffer(y, r, window);
}
