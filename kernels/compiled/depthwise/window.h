// Zero-padded windows of images for the loops of tile.h, and the way back from results to images.
#pragma once

#include "common/image.h"

namespace depthwise {

// Rows of one channel of an image, with padding. Columns of the same residue modulo the stride are contiguous, so that
// neighbouring outputs read neighbouring floats.
struct DepthwiseWindow {
  int rows, columns, stride;
  ptrdiff_t residue;  // floats per residue

  ptrdiff_t row() const { return residue * stride; }
  ptrdiff_t at_column(int j) const { return j % stride * residue + j / stride; }
  int64_t plane() const { return times(rows, row()); }
};

INLINE Lanes lanes_before(int count) {
  Lanes lanes;
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i) lanes[i] = i < count ? -1 : 0;
  return lanes;
}

// Copy `count` elements, padded with zeros if they do not fill a vector. Nothing is read from `end` on.
template <class T>
INLINE void copy_row(const T* from, const T* end, int count, Lanes tail, float* to) {
  if (count < VL) {
    store(to, end - from >= VL ? (Vec)((Lanes)load(from) & tail) : load_first(from, count));
    return;
  }
  int j = 0;
  for (; j + VL <= count; j += VL) store(to + j, load(from + j));
  if (j < count) store(to + count - VL, load(from + count - VL));
}

// Split a row into its even and odd elements, padded with zeros if they do not fill a vector.
template <class T>
INLINE void split_row(const T* from, const T* end, int count, Lanes even_tail, Lanes odd_tail, float* even,
                      float* odd) {
  const auto split_vectors = [&](int j, Vec low, Vec high, Lanes of_even, Lanes of_odd) {
    unzip(low, high);
    store(even + j, (Vec)((Lanes)low & of_even));
    store(odd + j, (Vec)((Lanes)high & of_odd));
  };
  const Lanes all = lanes_before(VL);
  const int pairs = count / 2;
  if (pairs < VL) {
    const bool readable = end - from >= 2 * VL;
    split_vectors(0, readable ? load(from) : load_first(from, count),
                  readable ? load(from + VL) : load_first(from + VL, count - VL), even_tail, odd_tail);
    return;
  }
  for (int j = 0; j < pairs; j += VL) {
    const int at = std::min(j, pairs - VL);
    split_vectors(at, load(from + 2 * at), load(from + 2 * at + VL), all, all);
  }
  if (count % 2) even[pairs] = value_of(from[count - 1]);
}

// Interleave two rows into one. A vector past the `count` elements of each must be readable.
template <class T>
INLINE void join_rows(const float* even, const float* odd, int count, T* to) {
  for (int j = 0; j < count; j += 2 * VL) {
    Vec low = load(even + j / 2), high = load(odd + j / 2);
    zip(low, high);
    store_first(to + j, low, count - j);
    store_first(to + j + VL, high, count - j - VL);
  }
}

// The columns of an image that a window has: the same for all rows and all images.
struct PlanarColumns {
  int first, count, shift;  // in the image; shift: place of the first column in the window

  PlanarColumns(const Images& x, int left, const DepthwiseWindow& window)
      : first(std::max(0, left)), shift(std::max(0, -left)) {
    count = std::max(0, std::min(x.w - first, window.columns - shift));
  }
};

template <class T>
INLINE void fill_window_from(const T* pixels, const Images& x, int64_t image, int channel, int top, int rows,
                             PlanarColumns columns, const DepthwiseWindow& window, bool fixed, float* to) {
  const ptrdiff_t row = window.row();
  const int first = std::clamp(-top, 0, rows), last = columns.count ? std::clamp(x.h - top, first, rows) : first;
  if (!fixed) {
    std::memset(to, 0, first * row * sizeof(float));
    std::memset(to + last * row, 0, (rows - last) * row * sizeof(float));
  }
  if (first == last) return;
  const int stride = window.stride, count = columns.count;
  const T *from = pixels + x.offset(image, channel, top + first, columns.first), *end = pixels + x.n * x.sn;
  const ptrdiff_t step = x.sh;
  to += first * row;
  if (stride == 1) {
    to += columns.shift;
    const Lanes tail = lanes_before(count);
    for (int i = first; i < last; ++i, from += step, to += row) copy_row(from, end, count, tail, to);
  } else if (stride == 2) {
    const ptrdiff_t even = window.at_column(columns.shift), odd = window.at_column(columns.shift + 1);
    const Lanes even_tail = lanes_before((count + 1) / 2), odd_tail = lanes_before(count / 2);
    for (int i = first; i < last; ++i, from += step, to += row)
      split_row(from, end, count, even_tail, odd_tail, to + even, to + odd);
  } else {
    for (int i = first; i < last; ++i, from += step, to += row)
      for (int j = 0; j < count; ++j) to[window.at_column(columns.shift + j)] = value_of(from[j]);
  }
}

// Fill `rows` rows of a window from row `top` of one channel on. Padding left and right of the image is not written,
// since it is zero from the start. If the window is `fixed`, neither is the padding above and below.
static inline void fill_window(const Images& x, int64_t image, int channel, int top, int rows, PlanarColumns columns,
                               const DepthwiseWindow& window, bool fixed, float* to) {
  x.data.visit([&](const auto* pixels) {
    fill_window_from(pixels, x, image, channel, top, rows, columns, window, fixed, to);
  });
}

// Normalize the rows of a window that `fill_window` has filled, but not its padding.
static inline void normalize_window(const Prologue& of_channel, const Images& x, int top, int rows,
                                    PlanarColumns columns, const DepthwiseWindow& window, float* to) {
  const int first = std::clamp(-top, 0, rows), last = columns.count ? std::clamp(x.h - top, first, rows) : first;
  for (int residue = 0; residue < window.stride; ++residue) {
    const int begin = ceil_div(std::max(0, columns.shift - residue), window.stride);
    const int end = ceil_div(std::max(0, columns.shift + columns.count - residue), window.stride);
    if (end > begin)
      normalize_segments(of_channel, to + first * window.row() + residue * window.residue + begin, end - begin,
                         last - first, window.row());
  }
}

// Rows of one channel, or block of channels, of an image.
struct Band {
  int64_t image;
  int first, rows;
};

// The channels that the lanes of a block read: lane l of block b is channel l + b * VL of the other images, and reads
// channel number `plane` of its group.
struct GroupedChannels {
  int in, out;  // of one group

  bool one_to_one() const { return in == 1 && out == 1; }
  int of_lane(int lane, int plane) const { return lane / out * in + plane; }
};

static inline void fill_blocked(const Images& x, const GroupedChannels& channels, int first_lane, int lanes, int plane,
                                const Region& r, float* to) {
  if (channels.one_to_one()) return ::fill(x, r, to);
  std::memset(to, 0, sizeof(float) * VL * r.rows * r.columns);
  const int first = std::max(0, -r.left), last = std::min(r.columns, x.w - r.left);
  x.data.visit([&](const auto* pixels) {
    for (int i = std::max(0, -r.top); i < std::min(r.rows, x.h - r.top); ++i)
      for (int l = 0; l < lanes; ++l) {
        const int channel = channels.of_lane(first_lane + l, plane);
        const auto* from = pixels + x.offset(r.image, channel, r.top + i, r.left + first);
        float* row = to + (ptrdiff_t(i) * r.columns + first) * VL + l;
        for (int j = first; j < last; ++j, from += x.sw, row += VL) *row = value_of(*from);
      }
  });
}

}  // namespace depthwise
