// The packed filter that the loops read, and its packed gradient, to which they add.
#pragma once

#include "common/tasks.h"
#include "depthwise/axis.h"
#include "depthwise/window.h"

namespace depthwise {

constexpr int RUN = 256;  // channels of a task, if read in place: long runs of each pixel

// The channels of the tensors that are read and written. The lanes of the filter are the channels of `out`.
struct Channels {
  GroupedChannels group;
  int groups;

  int lanes() const { return group.out * groups; }
};

Channels channels_of(const Geometry& g, const TensorArgument& in, const TensorArgument& out) {
  return {{int(in.c / g.groups), int(out.c / g.groups)}, int(g.groups)};
}

// The layout of filter elements, or their gradients: [block of lanes][summed channel and tap][VL].
struct PackedFilter {
  int lanes;
  int64_t elements;  // per lane

  int64_t floats() const { return times(times(blocks_of(lanes), VL), elements); }
  ptrdiff_t at(int lane, int64_t element) const { return (lane / VL * elements + element) * VL + lane % VL; }
};

// Return the number of elements per summed channel in the classes before these. Within a lane, each row class and
// column class is stored as [summed channel][column][row].
ptrdiff_t elements_before(const TapClasses& rows, const TapClasses& columns, int row_class, int column_class) {
  return ptrdiff_t(rows.before(row_class)) * columns.elements +
         ptrdiff_t(rows.size(row_class)) * columns.before(column_class);
}

PackedFilter packed_filter(const Geometry& g, const Channels& channels) {
  return {channels.lanes(), times(g.r * g.s, channels.group.in)};
}

// The shape of w, or dw, as packed for an operation.
struct FilterShape {
  PackedFilter packed;
  TapClasses rows, columns;
  GroupedChannels group;
  bool backward_data;

  ptrdiff_t offset(const TensorArgument& w, int lane, int plane, int r, int s) const {
    const int other = group.of_lane(lane, plane);  // counted over all groups
    const int k = backward_data ? other : lane, c = backward_data ? lane % group.out : plane;
    return k * w.stride_n() + c * w.stride_c() + r * w.stride_h() + s * w.stride_w();
  }

  // Call body(offset in w, offset in the packed filter) for every element of a lane.
  template <class Body>
  void for_elements(const TensorArgument& w, int lane, Body body) const {
    for (int a = 0; a < rows.count(); ++a)
      for (int b = 0; b < columns.count(); ++b) {
        int64_t element = group.in * elements_before(rows, columns, a, b);
        for (int plane = 0; plane < group.in; ++plane)
          for (int s = 0; s < columns.size(b); ++s)
            for (int r = 0; r < rows.size(a); ++r, ++element)
              body(offset(w, lane, plane, rows.element(a, r), columns.element(b, s)), packed.at(lane, element));
      }
  }
};

FilterShape filter_shape(const Geometry& g, bool backward_data, const TensorArgument& w) {
  const int k = int(w.n / g.groups), c = int(w.c);
  const GroupedChannels group = backward_data ? GroupedChannels{k, c} : GroupedChannels{c, k};
  return {packed_filter(g, {group, int(g.groups)}),
          TapClasses(g.rows(backward_data)), TapClasses(g.columns(backward_data)), group, backward_data};
}

// Return the packed position of each element of w, in memory order, for filters with one channel per group.
std::vector<int> places_of(const FilterShape& shape, const TensorArgument& w) {
  std::vector<int> places(shape.packed.elements);
  shape.for_elements(w, 0, [&](ptrdiff_t offset, ptrdiff_t place) { places[offset] = int(place / VL); });
  return places;
}

template <class T>
void pack_filter_from(const T* from, const FilterShape& shape, const TensorArgument& w, float* to,
                      int threads) {
  const PackedFilter& packed = shape.packed;
  const int elements = int(packed.elements);
  const std::vector<int> places = shape.group.one_to_one() ? places_of(shape, w) : std::vector<int>{};
  parallel_tasks(threads, ceil_div(packed.lanes, VL), true, [&](int64_t task) {
    const int first = int(task) * VL, last = std::min(packed.lanes, first + VL);
    float* block = to + packed.at(first, 0);
    if (!places.empty()) {
      for (int e = 0; e < elements; e += VL) {
        Vec of_lanes[VL];
        const int count = std::min(VL, elements - e);
        for (int l = 0; l < VL; ++l)
          of_lanes[l] = first + l < last ? load_first(from + ptrdiff_t(first + l) * elements + e, count) : Vec{};
        transpose(of_lanes);
        for (int i = 0; i < count; ++i) store(block + ptrdiff_t(places[e + i]) * VL, of_lanes[i]);
      }
      return;
    }
    if (last < first + VL) std::memset(block, 0, packed.elements * VL * sizeof(float));
    for (int lane = first; lane < last; ++lane)
      shape.for_elements(w, lane, [&](ptrdiff_t offset, ptrdiff_t place) { to[place] = value_of(from[offset]); });
  });
}

void pack_filter(const FilterShape& shape, const TensorArgument& w, float* to, int threads) {
  w.elements().visit([&](const auto* first) { pack_filter_from(first, shape, w, to, threads); });
}

// ---- the gradient's sums -------------------------------------------------------------------------------------------

// Return the number of parts of a mini-batch. It depends only on the lanes: with few of them, parts give threads work.
int parts_of_batch(const PackedFilter& sums) {
  constexpr int TASKS = 8;
  return ceil_div(TASKS, std::min(TASKS, ceil_div(sums.lanes, RUN)));
}

// Return how many of `count` items are in the parts before `part`.
inline int64_t share_before(int64_t count, int64_t parts, int64_t part) {
  return count / parts * part + std::min(part, count % parts);
}

template <class T>
void add_filter_gradient_to(T* elements_of_dw, const FilterShape& shape, int parts, const float* sums,
                            const TensorArgument& dw, int threads) {
  const PackedFilter& packed = shape.packed;
  const int elements = int(packed.elements);
  const std::vector<int> places = shape.group.one_to_one() ? places_of(shape, dw) : std::vector<int>{};
#pragma omp parallel for num_threads(threads)
  for (int first = 0; first < packed.lanes; first += VL) {
    const int last = std::min(packed.lanes, first + VL);
    if (!places.empty()) {
      const float* block = sums + packed.at(first, 0);
      for (int e = 0; e < elements; e += VL) {
        Vec sum[VL] = {};
        const int count = std::min(VL, elements - e);
        for (int part = 0; part < parts; ++part) {
          const float* of_part = block + part * packed.floats();
          for (int i = 0; i < count; ++i) sum[i] += load(of_part + ptrdiff_t(places[e + i]) * VL);
        }
        transpose(sum);
        for (int l = 0; l < last - first; ++l) {
          T* to = elements_of_dw + ptrdiff_t(first + l) * elements + e;
          store_first(to, load_first(to, count) + sum[l], count);
        }
      }
      continue;
    }
    for (int lane = first; lane < last; ++lane)
      shape.for_elements(dw, lane, [&](ptrdiff_t offset, ptrdiff_t place) {
        float sum = value_of(elements_of_dw[offset]);
        for (int part = 0; part < parts; ++part) sum += sums[part * packed.floats() + place];
        store_first(elements_of_dw + offset, broadcast(sum), 1);
      });
  }
}

// Add the sums of all parts, which are stored one after another, to dw, rounding once.
void add_filter_gradient(const FilterShape& shape, int parts, const float* sums, const TensorArgument& dw,
                         int threads) {
  dw.elements().visit([&](auto* first) { add_filter_gradient_to(first, shape, parts, sums, dw, threads); });
}

}  // namespace depthwise
