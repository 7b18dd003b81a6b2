// How images are cut into windows for the loops over columns, and which loops a convolution gets.
#pragma once

#include "depthwise/filter.h"

namespace depthwise {

constexpr int TRANSPOSED_TAPS = 20;  // of filters from which on short rows are transposed

constexpr int WINDOW_FLOATS = 7 * 1024;  // of windows together: what a core's first cache holds
constexpr int MOST_TOGETHER = 16;        // windows of small images

// Vectors of channels, where these lie next to each other. Also where rows are too short to be vectors of columns, if
// transposes are worth it: there is much to compute, or the outputs of several phases take turns in a row.
bool is_by_pixels(const Axes& axes, const TensorArgument& image, const Channels& channels, int64_t width) {
  if (image.channels_last) return true;
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

// As many rows of outputs as a window in the cache allows.
int choose_band(int planes, const Axis& rows, const Axis& columns, int height, int width) {
  const int64_t row = times(window_of(rows, columns, 1, width).row(), planes);
  const int64_t band = std::clamp<int64_t>((WINDOW_FLOATS / row - rows.extent) / rows.stride + 1, 1, height);
  return int(ceil_div(int64_t{height}, ceil_div(int64_t{height}, band)));
}

// So many groups that they fill the first cache: reading a window at once after it was written, at other addresses,
// would wait for the writes.
int groups_together(const DepthwiseWindow& window, const Channels& channels) {
  const int64_t floats = times(window.plane(), channels.group.in);
  return int(std::clamp<int64_t>(WINDOW_FLOATS / floats, 1, std::min(channels.groups, MOST_TOGETHER)));
}

}  // namespace depthwise
