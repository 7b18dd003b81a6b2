// Forward and backward data by the loops over columns, from windows of the input.
#pragma once

#include <omp.h>

#include "common/epilogue.h"
#include "depthwise/plan.h"
#include "depthwise/tile.h"

namespace depthwise {

// The outputs of one phase of the rows and one of the columns.
struct Part {
  int row_phase, column_phase;
  int rows, columns;  // outputs
  DepthwiseTaps taps;
  std::vector<ptrdiff_t> column_offsets;  // of the taps, in the window
  ptrdiff_t input;                 // offset in the window, in floats, of the first row that output (0, 0) reads
  ptrdiff_t elements;              // offset of its part in each lane's packed filter
};

struct WindowOutputPlan : WindowPlan {
  std::vector<Part> parts;
  bool is_half;  // results are rounded to half precision

  WindowOutputPlan(const Geometry& g, const Axes& axes, const TensorArgument& in, const TensorArgument& out)
      : WindowPlan(g, axes, in, out), is_half(out.element != FLOAT32) {
    for (int a = 0; a < int(rows.phases.size()); ++a)
      for (int b = 0; b < int(columns.phases.size()); ++b) parts.push_back(part_of(a, b));
  }

  // Several phases are interleaved in a row, so each is computed in a buffer first, as are outputs in half precision.
  bool buffers_results() const { return is_half || rows.every * int64_t{columns.every} > 1; }
  int result_row() const { return columns.outputs_of(0, width) + VL; }
  int64_t result_floats() const {
    return buffers_results() ? times(times(result_row(), int64_t(columns.phases.size())), band) : 0;
  }
  int64_t thread_floats() const { return plus(windows_floats(), plus(result_floats(), VL)); }

 private:
  Part part_of(int row_phase, int column_phase) const {
    const Phase &down = rows.phases[row_phase], &across = columns.phases[column_phase];
    const DepthwiseTaps taps{planes(), down.taps, across.taps, down.step, rows.stride, nullptr};
    Part part{row_phase, column_phase, rows.outputs_of(row_phase, height), columns.outputs_of(column_phase, width),
              taps, {}, 0, 0};
    part.elements = planes() * elements_before(rows.classes, columns.classes, down.tap_class, across.tap_class);
    if (down.taps > 0 && across.taps > 0) part.input = (down.first - rows.lowest) * window.row();
    for (int s = 0; s < across.taps; ++s)
      part.column_offsets.push_back(window.at_column(across.first + s * across.step - columns.lowest));
    return part;
  }
};

void compute_part(const WindowOutputPlan& plan, const Part& part, const float* window, const float* filter, Vec bias,
                  const DepthwiseOutput& out, int rows) {
  DepthwiseTaps taps = part.taps;
  taps.columns = part.column_offsets.data();
  const DepthwiseInput in{window + part.input, plan.window.row(), 1, plan.window.plane()};
  depthwise_outputs(taps, in, filter + part.elements * VL, bias, out, rows, part.columns);
}

// Interleave the rows of the column phases into a row of the image.
template <class T>
void join_phases(const WindowOutputPlan& plan, const float* from, ptrdiff_t phase, T* to) {
  const int phases = int(plan.columns.phases.size());
  if (phases == 1) {
    copy_elements(from, plan.width, to);
  } else if (phases == 2) {
    join_rows(from, from + phase, plan.width, to);
  } else {
    for (int j = 0; j < plan.width; ++j) store_first(to + j, broadcast(from[j % phases * phase + j / phases]), 1);
  }
}

// Write a row of results to the image. Only forward has an epilogue, and its outputs have one phase.
void write_row(const WindowOutputPlan& plan, const Epilogue& epilogue, float* from, ptrdiff_t phase, const Images& out,
               ptrdiff_t there) {
  if (epilogue) apply(epilogue, out.data + there, from, out.w);
  out.data.visit([&](auto* first) { join_phases(plan, from, phase, first + there); });
}

// Compute a band of one channel. end: past the last of the consecutive elements that this task computes.
void compute_channel(const WindowOutputPlan& plan, const Epilogue& epilogue, const Images& out, const Band& band,
                     int channel, const Elements& end, const float* window, const float* filter, Vec bias,
                     float* results) {
  const ptrdiff_t row = plan.result_row(), phase = row * plan.band;
  for (const Part& part : plan.parts) {
    const int rows = std::min(band.rows, part.rows - band.first);
    if (rows <= 0) continue;
    if (!plan.buffers_results()) {  // the rows of a channel are contiguous, and so are their addends
      const ptrdiff_t there = out.offset(band.image, channel, band.first, 0);
      float* to = out.floats() + there;
      compute_part(plan, part, window, filter, bias, {to, out.sh, 1, VL, end.as<float>()}, rows);
      if (epilogue) apply(epilogue, out.data + there, to, rows * out.w);
      continue;
    }
    float* to = results + part.column_phase * phase;
    compute_part(plan, part, window, filter, bias, {to, row, 1, VL, to + phase}, rows);
    if (part.column_phase + 1 == int(plan.columns.phases.size()))
      for (int i = 0; i < rows; ++i)
        write_row(plan, epilogue, results + i * row, phase, out,
                  out.offset(band.image, channel, (band.first + i) * plan.rows.every + part.row_phase, 0));
  }
}

void run_windows(const WindowOutputPlan& plan, const Images& in, const float* filter, const float* bias,
                 const Prologue& prologue, const Epilogue& epilogue, const Images& out, float* scratch, int threads) {
  const Channels& channels = plan.channels;
  const int bands = plan.bands(), height = plan.rows.outputs_of(0, out.h);
  const int runs = ceil_div(channels.groups, plan.together);
  const int64_t tasks = out.n * runs * bands, windows = plan.windows_floats();
  const PlanarColumns columns(in, plan.columns.lowest, plan.window);
  in_parallel(threads, [&] {
    float* window = scratch + omp_get_thread_num() * plan.thread_floats();
    std::memset(window, 0, windows * sizeof(float));
    share_tasks(tasks, false, [&](int64_t task) {
      const int first = int(task % bands) * plan.band, group = int(task / bands % runs) * plan.together;
      const int groups = std::min(plan.together, channels.groups - group);
      const Band band{task / bands / runs, first, std::min(plan.band, height - first)};
      const int top = first * plan.rows.stride + plan.rows.lowest, rows = int(plan.rows.inputs(band.rows));
      for (int i = 0; i < groups * plan.planes(); ++i) {
        const int channel = group * channels.group.in + i;
        float* to = window + i * plan.window.plane();
        fill_window(in, band.image, channel, top, rows, columns, plan.window, bands == 1, to);
        if (prologue) normalize_window(prologue + channel, in, top, rows, columns, plan.window, to);
      }
      for (int i = 0, lane = group * channels.group.out; i < groups; ++i)
        for (int j = 0; j < channels.group.out; ++j, ++lane) {
          const ptrdiff_t end = bands > 1 ? out.offset(band.image, lane, first + band.rows, 0)
                                          : out.offset(band.image, (group + groups) * channels.group.out, 0, 0);
          compute_channel(plan, epilogue, out, band, lane, out.data + end, window + i * plan.window_floats(),
                          filter + plan.filter.at(lane, 0), bias ? broadcast(bias[lane]) : Vec{}, window + windows);
        }
    });
  });
}

}  // namespace depthwise
