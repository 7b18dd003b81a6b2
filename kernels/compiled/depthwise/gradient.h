// Backward filter by the loops over columns: sums over windows of x and rows of dy.
#pragma once

#include <omp.h>

#include "depthwise/plan.h"
#include "depthwise/tile.h"

namespace depthwise {

// The plan of backward filter. Each part of the batch has its own sums, so that results do not depend on the threads.
struct WindowGradientPlan : WindowPlan {
  int parts;       // of the mini-batch
  bool copies_dy;  // if rows of dy are shorter than a vector, or in half precision
  std::vector<ptrdiff_t> column_offsets;

  WindowGradientPlan(const Geometry& g, const Axes& axes, const TensorArgument& x, const TensorArgument& dy)
      : WindowPlan(g, axes, x, dy), parts(parts_of_batch(filter)), copies_dy(width < VL || dy.element != FLOAT32) {
    for (int s = 0; s < g.s; ++s) column_offsets.push_back(window.at_column(int(s * g.dilation_w)));
  }

  int64_t taps() const { return int64_t(rows.classes.elements) * columns.classes.elements; }
  int copied_row() const { return std::max(width, VL); }
  int64_t gradient_floats() const { return copies_dy ? times(band, copied_row()) : 0; }
  int64_t lane_sums() const { return times(times(taps(), planes()), VL); }  // one vector each
  int64_t sum_floats() const { return times(lane_sums(), times(together, channels.group.out)); }
  int64_t thread_floats() const { return plus(windows_floats(), plus(gradient_floats(), sum_floats())); }
};

DepthwiseTaps taps_of(const WindowGradientPlan& plan) {
  const Phase &down = plan.rows.phases[0], &across = plan.columns.phases[0];
  return {1, down.taps, across.taps, down.step, plan.rows.stride, plan.column_offsets.data()};
}

// Copy rows of one channel of dy as floats, padded with zeros to a vector.
void copy_rows(const Images& dy, const Band& band, int channel, int row, float* to) {
  dy.data.visit([&](const auto* first) {
    const auto* from = first + dy.offset(band.image, channel, band.first, 0);
    const Lanes tail = lanes_before(dy.w);
    for (int i = 0; i < band.rows; ++i, from += dy.sh, to += row) copy_row(from, first + dy.n * dy.sn, dy.w, tail, to);
  });
}

// Add the products of one channel of dy: whole vectors, then a masked vector that ends with the last column.
void sum_channel(const WindowGradientPlan& plan, const Images& dy, const Band& band, int channel, const float* window,
                float* copy, float* sums) {
  if (plan.copies_dy) copy_rows(dy, band, channel, plan.copied_row(), copy);
  const float* from = plan.copies_dy ? copy : dy.at(band.image, channel, band.first, 0);
  const ptrdiff_t row = plan.copies_dy ? plan.copied_row() : dy.sh;
  const DepthwiseTaps taps = taps_of(plan);
  const int whole = dy.w / VL, rest = dy.w % VL;
  if (whole > 0)
    depthwise_products<false>(taps, window, plan.window.row(), VL, {from, row, VL, band.rows, whole, Lanes{}}, sums);
  if (rest == 0) return;
  const int left = std::max(0, dy.w - VL);
  const Lanes mask = whole > 0 ? ~lanes_before(VL - rest) : lanes_before(rest);
  depthwise_products<true>(taps, window + left, plan.window.row(), VL, {from + left, row, VL, band.rows, 1, mask},
                           sums);
}

// Call body(band) for the bands of a part of the mini-batch.
template <class Body>
void for_bands(const WindowGradientPlan& plan, int64_t samples, int part, Body body) {
  const int64_t end = share_before(samples, plan.parts, part + 1);
  for (int64_t image = share_before(samples, plan.parts, part); image < end; ++image)
    for (int first = 0; first < plan.height; first += plan.band)
      body(Band{image, first, std::min(plan.band, plan.height - first)});
}

struct GradientScratch {
  float *window, *copy, *sums;
};

GradientScratch gradient_scratch(const WindowGradientPlan& plan, float* scratch) {
  float* window = scratch + omp_get_thread_num() * plan.thread_floats();
  float* copy = window + plan.windows_floats();
  return {window, copy, copy + plan.gradient_floats()};
}

float sum_of_lanes(Vec vector) {
  float sum = 0;
  for (int l = 0; l < VL; ++l) sum += vector[l];
  return sum;
}

void accumulate_windows(const WindowGradientPlan& plan, const Images& x, const Images& dy, const Prologue& prologue,
                        float* sums, float* scratch, int threads) {
  const GroupedChannels& group = plan.channels.group;
  const int runs = ceil_div(plan.channels.groups, plan.together), planes = plan.planes();
  const int64_t tasks = int64_t{runs} * plan.parts, taps = plan.taps();
  const PlanarColumns columns(x, plan.columns.lowest, plan.window);
#pragma omp parallel num_threads(threads)
  {
    const GradientScratch mine = gradient_scratch(plan, scratch);
    std::memset(mine.window, 0, plan.windows_floats() * sizeof(float));
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      const int first = int(task / plan.parts) * plan.together, part = int(task % plan.parts);
      const int groups = std::min(plan.together, plan.channels.groups - first), lane = first * group.out;
      if (part >= dy.n) continue;
      std::memset(mine.sums, 0, plan.sum_floats() * sizeof(float));
      for_bands(plan, dy.n, part, [&](const Band& band) {
        const int top = band.first * plan.rows.stride + plan.rows.lowest, rows = int(plan.rows.inputs(band.rows));
        for (int i = 0; i < groups * planes; ++i) {
          const int channel = first * planes + i;
          float* to = mine.window + i * plan.window.plane();
          fill_window(x, band.image, channel, top, rows, columns, plan.window, plan.bands() == 1, to);
          if (prologue) normalize_window(prologue + channel, x, top, rows, columns, plan.window, to);
        }
        float* of_lane = mine.sums;
        for (int i = 0, k = lane; i < groups; ++i)
          for (int j = 0; j < group.out; ++j, ++k)
            for (int plane = 0; plane < planes; ++plane, of_lane += taps * VL)
              sum_channel(plan, dy, band, k, mine.window + (i * planes + plane) * plan.window.plane(), mine.copy,
                          of_lane);
      });
      float* of_part = sums + part * plan.filter.floats();
      for (int64_t i = 0; i < groups * group.out; ++i)
        for (int64_t element = 0; element < plan.filter.elements; ++element)
          of_part[plan.filter.at(int(lane + i), element)] +=
              sum_of_lanes(load(mine.sums + (i * plan.filter.elements + element) * VL));
    }
  }
}

}  // namespace depthwise
