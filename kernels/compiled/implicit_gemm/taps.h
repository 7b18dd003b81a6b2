// The taps: which filter element is multiplied by which pixel, in forward and in each residue of backward data.
#pragma once

#include <utility>
#include <vector>

#include "common/abi.h"
#include "common/pairs.h"

namespace implicit_gemm {

// Filter element (r, s), multiplied by input pixel (output row * stride + row, output column * stride + column). In a
// pair of taps, element (r, second) is multiplied by the pixel `reach` columns further; s is -1 if there is no first.
struct Tap {
  int row, column, r, s;
  int second = -1, reach = 0;
};
using Taps = std::vector<Tap>;

struct Span {
  int first, last;
  int size() const { return last - first + 1; }
};

template <class Member>
Span span_of(const Taps& taps, Member member) {
  Span span{taps.empty() ? 0 : taps[0].*member, taps.empty() ? 0 : taps[0].*member};
  for (const Tap& tap : taps) span = {std::min(span.first, tap.*member), std::max(span.last, tap.*member)};
  return span;
}

// Return the span of the columns that taps read.
inline Span columns_of(const Taps& taps) {
  Span span = span_of(taps, &Tap::column);
  for (const Tap& tap : taps) span.last = std::max(span.last, tap.column + tap.reach);
  return span;
}

inline bool are_in_pairs(const Taps& taps) {
  return std::any_of(taps.begin(), taps.end(), [](const Tap& tap) { return tap.reach > 0; });
}

// Pair taps of a row that are `distance` columns apart. One that is left over shares a pixel with the pair before it: a
// zero is multiplied only by a pixel that the output reads anyway, which may be infinite.
inline Taps paired(Taps taps, int distance) {
  std::sort(taps.begin(), taps.end(),
            [](const Tap& a, const Tap& b) { return std::pair(a.row, a.column) < std::pair(b.row, b.column); });
  Taps pairs;
  std::vector<bool> is_done(taps.size());
  const auto find = [&](const Tap& tap, int columns) {
    const auto is_there = [&](const Tap& o) { return o.row == tap.row && o.column == tap.column + columns; };
    return std::find_if(taps.begin(), taps.end(), is_there);
  };
  for (size_t i = 0; i < taps.size(); ++i) {
    if (is_done[i]) continue;
    const Tap& tap = taps[i];
    const auto next = find(tap, distance), before = find(tap, -distance);
    if (next != taps.end()) {
      is_done[next - taps.begin()] = true;
      pairs.push_back({tap.row, tap.column, tap.r, tap.s, next->s, distance});
    } else if (before != taps.end()) {
      pairs.push_back({tap.row, before->column, tap.r, -1, tap.s, distance});
    } else {
      pairs.push_back(tap);
    }
  }
  return pairs;
}

constexpr bool is_planar(int channels) { return blocks_of(channels) * VL >= 2 * channels; }
constexpr int padded(int channels) { return is_planar(channels) ? channels : blocks_of(channels) * VL; }

// One convolution with `taps`, from x to y; the height and width of y are the numbers of outputs.
struct Product {
  Taps taps;
  int stride_h, stride_w;
  ptrdiff_t filter_offset;  // offset of its part in the packed filter, in floats
};

inline Taps forward_taps(const Geometry& g) {
  Taps taps;
  for (int r = 0; r < g.r; ++r)
    for (int s = 0; s < g.s; ++s)
      taps.push_back({int(r * g.dilation_h - g.pad_h), int(s * g.dilation_w - g.pad_w), r, s});
  return taps;
}

// Return the residues modulo the stride of the rows (or columns) of dx that any tap reaches.
inline std::vector<int> reached(int64_t taps, int64_t stride, int64_t pad, int64_t dilation) {
  std::vector<int> residues;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const int64_t remainder = (tap * dilation - pad) % stride;
    residues.push_back(int(remainder < 0 ? remainder + stride : remainder));
  }
  std::sort(residues.begin(), residues.end());
  residues.erase(std::unique(residues.begin(), residues.end()), residues.end());
  return residues;
}

inline std::vector<int> reached_rows(const Geometry& g) { return reached(g.r, g.stride_h, g.pad_h, g.dilation_h); }
inline std::vector<int> reached_columns(const Geometry& g) { return reached(g.s, g.stride_w, g.pad_w, g.dilation_w); }

// Return the taps that reach dx pixels (a + stride_h * i, b + stride_w * j); they read dy at (i + row, j + column).
inline Taps backward_data_taps(const Geometry& g, int a, int b) {
  Taps taps;
  for (int r = 0; r < g.r; ++r)
    for (int s = 0; s < g.s; ++s) {
      const int64_t row = a + g.pad_h - r * g.dilation_h, column = b + g.pad_w - s * g.dilation_w;
      if (row % g.stride_h == 0 && column % g.stride_w == 0)
        taps.push_back({int(row / g.stride_h), int(column / g.stride_w), r, s});
    }
  return taps;
}

// Call body(product, view of y) for the one product of forward, or for each residue of backward data that any tap
// reaches. pairs_taps: whether taps are paired where they can be.
template <class Body>
void for_products(const Geometry& g, bool backward_data, bool pairs_taps, int rows, const Images& y, Body body) {
  const auto in_pairs = [&](Taps taps, int64_t stride_w) { return pairs_taps ? paired(taps, int(stride_w)) : taps; };
  if (!backward_data)
    return body(Product{in_pairs(forward_taps(g), g.stride_w), int(g.stride_h), int(g.stride_w), 0}, y);
  ptrdiff_t offset = 0;
  const std::vector<int> columns = reached_columns(g);
  for (const int a : reached_rows(g))
    for (const int b : columns) {
      Product product{in_pairs(backward_data_taps(g, a, b), 1), 1, 1, offset};
      Images view = y;
      view.data = y.data + a * y.sh + b * y.sw;
      view.h = y.h - a;
      view.w = y.w - b;
      view = every(view, g.stride_h, g.stride_w);
      offset += ptrdiff_t(product.taps.size()) * padded(rows) * blocks_of(y.c) * VL;
      if (view.h > 0 && view.w > 0) body(std::move(product), view);
    }
}

// The convolution of one group. For an unpadded 1x1 filter, the strided image is a view of every stride-th pixel.
struct Call {
  Geometry geometry;
  Images x, y;
};

// Return whether images of bfloat16 are read as pairs of channels: if the processor multiplies pairs. Few planes are
// not: they are read in pairs of taps, so that vectors can hold neighbouring pixels (pixels.h).
inline bool are_pairs(const Images& x) {
  const bool is_suitable = x.sc == 1 || !is_planar(x.c);
  return x.data.type == BFLOAT16 && x.c % 2 == 0 && is_suitable && multiplies_pairs();
}

// Return whether taps are paired. x: as it is, or already viewed as pairs of channels.
inline bool pairs_taps(const Images& x) {
  return x.data.type == BFLOAT16 && !x.plane_pair && is_planar(x.c) && !are_pairs(x) && multiplies_pairs();
}

inline Call make_call(Geometry g, bool backward_data, const Images& x, const Images& y) {
  if (g.r != 1 || g.s != 1 || g.pad_h != 0 || g.pad_w != 0) return {g, x, y};
  const int64_t stride_h = std::exchange(g.stride_h, 1), stride_w = std::exchange(g.stride_w, 1);
  return backward_data ? Call{g, x, every(y, stride_h, stride_w)} : Call{g, every(x, stride_h, stride_w), y};
}

// Return whether dx has pixels that no tap reaches.
inline bool leaves_gaps(const Geometry& g) {
  return int64_t(reached_rows(g).size()) < g.stride_h || int64_t(reached_columns(g).size()) < g.stride_w;
}

}  // namespace implicit_gemm
