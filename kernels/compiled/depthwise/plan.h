// The windows of the loops over columns, and the choice between the two kinds of loops.
#pragma once

#include "depthwise/filter.h"

namespace depthwise {

constexpr int TRANSPOSED_TAPS = 20;  // short rows are transposed for filters with at least this many taps

constexpr int WINDOW_FLOATS = 7 * 1024;  // of the windows of a task, which fit a core's L1 cache
constexpr int MOST_TOGETHER = 16;        // groups per task, for small images

// Return whether vectors hold channels: if channels are contiguous, or if rows are too short for vectors of columns and
// transposes pay, because the filter is large or several phases are interleaved in a row.
bool is_by_pixels(const Axes& axes, const TensorArgument& image, const Channels& channels, int64_t width) {
  if (image.memory_format != CONTIGUOUS) return true;
  const int64_t taps = int64_t{axes.rows.classes.elements} * axes.columns.classes.elements;
  const bool pays = axes.columns.every > 1 || taps >= TRANSPOSED_TAPS;
  return pays && axes.columns.outputs_of(0, int(width)) < 2 * VL && 2 * channels.lanes() >= VL;
}

// What the loops over columns need to know in all operations. in, out: the images that are read and written; in
// backward filter, x and dy.
struct WindowPlan {
  Channels channels;
  PhasedAxis rows, columns;
  int height, width;  // of out
  int band;           // rows of each of its row phases that are computed from one window
  DepthwiseWindow window;
  PackedFilter filter;  // or its gradient
  int together;         // groups per task

  WindowPlan(const Geometry& g, const Axes& axes, const TensorArgument& in, const TensorArgument& out)
      : channels(channels_of(g, in, out)), rows(axes.rows), columns(axes.columns), height(int(out.h)),
        width(int(out.w)), band(choose_band()), window(window_of(band)), filter(packed_filter(g, channels)),
        together(choose_together()) {}

  int planes() const { return channels.group.in; }
  int bands() const { return ceil_div(rows.outputs_of(0, height), band); }
  int64_t window_floats() const { return times(window.plane(), planes()); }
  int64_t windows_floats() const { return times(window_floats(), together); }

 private:
  DepthwiseWindow window_of(int outputs) const {
    const int most = columns.outputs_of(0, width);
    const int64_t down = rows.inputs(outputs), across = columns.inputs(most);
    for (const int64_t size : {down, across}) require_size("a size of the window", size);
    const int residue = std::max(most, VL) + (columns.extent - 1) / columns.stride + VL;
    return {int(down), int(across), columns.stride, ceil_div(residue, VL) * VL};
  }

  // Return how many rows of outputs can be computed from one window that fits the cache.
  int choose_band() const {
    const int64_t row = times(window_of(1).row(), planes()), outputs = rows.outputs_of(0, height);
    const int64_t most = std::clamp<int64_t>((WINDOW_FLOATS / row - rows.extent) / rows.stride + 1, 1, outputs);
    return int(ceil_div(outputs, ceil_div(outputs, most)));
  }

  // Return how many groups fill the L1 cache together: reading a single window right after writing it, at other
  // addresses, would stall on the writes.
  int choose_together() const {
    return int(std::clamp<int64_t>(WINDOW_FLOATS / window_floats(), 1, std::min(channels.groups, MOST_TOGETHER)));
  }
};

}  // namespace depthwise
