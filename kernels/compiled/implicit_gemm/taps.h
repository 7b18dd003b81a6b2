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

// Return the taps by which outputs (a + i * rows.every(), b + j * columns.every()) read.
inline Taps taps_of(const Axis& rows, const Axis& columns, int a, int b) {
  Taps taps;
  int64_t row, column;
  for (int r = 0; r < rows.taps; ++r)
    for (int s = 0; s < columns.taps; ++s)
      if (rows.meets(a, r, row) && columns.meets(b, s, column)) taps.push_back({int(row), int(column), r, s});
  return taps;
}

// Call body(product, view of y) for each phase of the outputs: one in forward, and in backward data those that any tap
// reaches. channels: over which a product sums. pairs_taps: whether taps are paired where they can be.
template <class Body>
void for_products(const Geometry& g, bool backward_data, bool pairs_taps, int channels, const Images& y, Body body) {
  const Axis rows = g.rows(backward_data), columns = g.columns(backward_data);
  const std::vector<int> phases_of_columns = columns.phases();
  ptrdiff_t offset = 0;
  for (const int a : rows.phases())
    for (const int b : phases_of_columns) {
      Taps taps = taps_of(rows, columns, a, b);
      if (pairs_taps) taps = paired(std::move(taps), int(columns.step()));
      Product product{std::move(taps), int(rows.step()), int(columns.step()), offset};
      Images view = y;
      view.data = y.data + a * y.sh + b * y.sw;
      view.h = y.h - a;
      view.w = y.w - b;
      view = every(view, rows.every(), columns.every());
      offset += ptrdiff_t(product.taps.size()) * padded(channels) * blocks_of(y.c) * VL;
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

// Return whether there are pixels of y that no tap reaches.
inline bool leaves_gaps(const Geometry& g, bool backward_data) {
  const auto has_gaps = [](const Axis& axis) { return int64_t(axis.phases().size()) < axis.every(); };
  return has_gaps(g.rows(backward_data)) || has_gaps(g.columns(backward_data));
}

}  // namespace implicit_gemm
