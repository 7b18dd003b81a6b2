// The filter as the loops of depthwise_tile.h read it, and its gradient as they sum it up.
#pragma once

#include "depthwise/axis.h"
#include "depthwise/window.h"

namespace depthwise {

// Which tensors are read and written, as numbers of channels. The lanes of the filter are the channels of `out`.
struct Channels {
  GroupedChannels group;
  int groups;

  int lanes() const { return group.out * groups; }
};

Channels channels_of(const Geometry& g, const TensorArgument& in, const TensorArgument& out) {
  return {{int(in.c / g.groups), int(out.c / g.groups)}, int(g.groups)};
}

// How filter elements, or their sums, lie: [block of lanes][summed channel and tap][VL].
struct PackedFilter {
  int lanes;
  int64_t elements;  // of each lane

  int64_t floats() const { return times(times(blocks_of(lanes), VL), elements); }
  ptrdiff_t at(int lane, int64_t element) const { return (lane / VL * elements + element) * VL + lane % VL; }
};

// Within a lane, the elements of one class of rows and one of columns follow those of the classes before, as
// [summed channel][column][row].
ptrdiff_t elements_before(const TapClasses& rows, const TapClasses& columns, int row_class, int column_class) {
  return ptrdiff_t(rows.before(row_class)) * columns.elements +
         ptrdiff_t(rows.size(row_class)) * columns.before(column_class);
}

PackedFilter packed_filter(const Geometry& g, const Channels& channels) {
  return {channels.lanes(), times(g.r * g.s, channels.group.in)};
}

// The geometry of w, or dw, as packed for an operation.
struct FilterShape {
  PackedFilter packed;
  TapClasses rows, columns;
  GroupedChannels group;
  bool backward_data;

  float* at(const TensorArgument& w, int lane, int plane, int r, int s) const {
    const int other = group.of_lane(lane, plane);  // of all channels
    const int k = backward_data ? other : lane, c = backward_data ? lane % group.out : plane;
    return w.floats() + k * w.stride_n() + c * w.stride_c() + r * w.stride_h() + s * w.stride_w();
  }

  // Calls body(address in w, place in the packed filter) for every element of a lane.
  template <class Body>
  void for_elements(const TensorArgument& w, int lane, Body body) const {
    for (int a = 0; a < rows.count(); ++a)
      for (int b = 0; b < columns.count(); ++b) {
        int64_t element = group.in * elements_before(rows, columns, a, b);
        for (int plane = 0; plane < group.in; ++plane)
          for (int s = 0; s < columns.size(b); ++s)
            for (int r = 0; r < rows.size(a); ++r, ++element)
              body(at(w, lane, plane, rows.element(a, r), columns.element(b, s)), packed.at(lane, element));
      }
  }
};

FilterShape filter_shape(const Geometry& g, bool backward_data, const TensorArgument& w) {
  const int k = int(w.n / g.groups), c = int(w.c);
  const GroupedChannels group = backward_data ? GroupedChannels{k, c} : GroupedChannels{c, k};
  return {packed_filter(g, {group, int(g.groups)}),
          tap_classes(backward_data, g.r, g.stride_h, g.dilation_h),
          tap_classes(backward_data, g.s, g.stride_w, g.dilation_w), group, backward_data};
}

void pack_filter(const FilterShape& shape, const TensorArgument& w, float* to, int threads) {
  const PackedFilter& packed = shape.packed;
#pragma omp parallel for num_threads(threads)
  for (int first = 0; first < packed.lanes; first += VL) {
    const int last = std::min(packed.lanes, first + VL);
    if (last < first + VL) std::memset(to + packed.at(first, 0), 0, packed.elements * VL * sizeof(float));
    for (int lane = first; lane < last; ++lane)
      shape.for_elements(w, lane, [&](const float* element, ptrdiff_t place) { to[place] = *element; });
  }
}

}  // namespace depthwise
