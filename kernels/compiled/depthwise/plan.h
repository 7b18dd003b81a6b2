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

DepthwiseWindow window_of(const Axis& rows, const Axis& columns, int height, int width) {
  const int64_t down = rows.inputs(height), across = columns.inputs(width);
  for (const int64_t size : {down, across}) require_size("a size of the window", size);
  const int residue = std::max(width, VL) + (columns.extent - 1) / columns.stride + VL;
  return {int(down), int(across), columns.stride, ceil_div(residue, VL) * VL};
}

// Return how many rows of outputs can be computed from one window that fits the cache.
int choose_band(int planes, const Axis& rows, const Axis& columns, int height, int width) {
  const int64_t row = times(window_of(rows, columns, 1, width).row(), planes);
  const int64_t band = std::clamp<int64_t>((WINDOW_FLOATS / row - rows.extent) / rows.stride + 1, 1, height);
  return int(ceil_div(int64_t{height}, ceil_div(int64_t{height}, band)));
}

// Return how many groups fill the L1 cache together: reading a single window right after writing it, at other
// addresses, would stall on the writes.
int groups_together(const DepthwiseWindow& window, const Channels& channels) {
  const int64_t floats = times(window.plane(), channels.group.in);
  return int(std::clamp<int64_t>(WINDOW_FLOATS / floats, 1, std::min(channels.groups, MOST_TOGETHER)));
}

}  // namespace depthwise
