// The plan of the loops over pixels: tiles of outputs, runs of channels, and memory layouts.
#pragma once

#include <vector>

#include "common/planar_rows.h"
#include "depthwise/filter.h"
#include "depthwise/pixels.h"

namespace depthwise {

constexpr int64_t GATHERED_FLOATS = 16 * 1024;  // of an image's rows, gathered for one block of channels
constexpr int64_t COPIED_FLOATS = 128 * 1024;   // of rows that are copied, for RUN channels: half of a core's L2

// The outputs of one phase of the rows and one of the columns.
template <class Loops>
struct PixelPhase {
  Phase down, across;
  TileLoops<Loops> loops;
  ptrdiff_t elements;  // offset of its part in each lane's packed filter
};

enum class Reading { IN_PLACE, COPIED, GATHERED };

// Neighbouring channels of a task: blocks that are read in place, blocks that are copied, widened to floats and
// normalized, or one block that is gathered.
struct Run {
  int lane, blocks;
  Reading reading;
};

template <class Loops>
struct PixelPlan {
  Channels channels;
  PhasedAxis rows, columns;
  int in_height, in_width, height, width;
  PackedFilter filter;
  std::vector<PixelPhase<Loops>> phases;
  std::vector<Run> runs;
  int band;  // output rows per gathered or copied block

  // Return how many channels are gathered or copied at a time: 0 if all are read in place.
  int copied_lanes() const {
    int most = 0;
    for (const Run& run : runs)
      if (run.reading != Reading::IN_PLACE) most = std::max(most, run.blocks * VL);
    return most;
  }
  int column_phases() const { return int(columns.phases.size()); }

  // Return a phase's part of the packed filter, or gradient, for the block of channels that starts at `of_block`.
  template <class Float>
  TileFilter<Float> filter_of(const PixelPhase<Loops>& phase, Float* of_block) const {
    return {of_block + phase.elements * VL, ptrdiff_t(filter.elements) * VL, phase.down.taps,
            phase.across.taps,              columns.stride,                  phase.across.step};
  }

  // The image rows that `count` output rows from `first` on read: [first_input(first), last_input(first, count)).
  int first_input(int first) const {
    return int(std::clamp<int64_t>(first / rows.every * int64_t{rows.stride} + rows.lowest, 0, in_height));
  }
  int last_input(int first, int count) const {
    const int64_t behind = (first + count - 1) / rows.every * int64_t{rows.stride} + rows.lowest + rows.extent;
    return int(std::clamp<int64_t>(behind, first_input(first), in_height));
  }
  int64_t gathered_inputs() const {
    const int64_t most = std::min(rows.inputs(ceil_div(band, rows.every) + 1), int64_t{in_height});
    return times(times(most, in_width), times(channels.group.in, copied_lanes()));
  }
  // Return the floats of the rows of one gathered block, or of one row of copied blocks.
  int64_t gathered_outputs() const {
    return copied_lanes() ? times(width, std::max(times(band, VL), int64_t{copied_lanes()})) : 0;
  }
  int64_t thread_floats() const { return plus(plus(gathered_inputs(), gathered_outputs()), VL); }
};

// Cut the channels into runs. A block is gathered if its channels are not contiguous or do not fill a vector.
std::vector<Run> runs_of(int lanes, Reading reading) {
  std::vector<Run> runs;
  const int whole = reading == Reading::GATHERED ? 0 : lanes / VL;
  const int most = RUN / VL, count = ceil_div(whole, most);
  for (int i = 0, block = 0; i < count; ++i) {
    const int blocks = (whole - block) / (count - i);
    runs.push_back({block * VL, blocks, reading});
    block += blocks;
  }
  for (int lane = whole * VL; lane < lanes; lane += VL) runs.push_back({lane, 1, Reading::GATHERED});
  return runs;
}

template <class Loops>
PixelPlan<Loops> pixel_plan(const Geometry& g, const Axes& axes, const TensorArgument& in, const TensorArgument& out,
                            bool normalizes) {
  const auto& [rows, columns] = axes;
  const Channels channels = channels_of(g, in, out);
  PixelPlan<Loops> plan{channels, rows, columns, int(in.h), int(in.w), int(out.h), int(out.w),
                        packed_filter(g, channels), {}, {}, 0};
  for (const Phase& down : rows.phases)
    for (const Phase& across : columns.phases)
      plan.phases.push_back({down, across, {across.taps, columns.stride, across.step},
                             channels.group.in *
                                 elements_before(rows.classes, columns.classes, down.tap_class, across.tap_class)});
  const bool neighbours = in.memory_format != CONTIGUOUS && channels.group.one_to_one();
  const bool is_copied = normalizes || in.element != FLOAT32;
  plan.runs = runs_of(channels.lanes(), !neighbours ? Reading::GATHERED
                                        : is_copied ? Reading::COPIED
                                                    : Reading::IN_PLACE);
  const int lanes = std::max(VL, plan.copied_lanes());
  const int64_t row = times(times(in.w, channels.group.in), lanes);
  const int64_t inputs = std::max<int64_t>((lanes > VL ? COPIED_FLOATS : GATHERED_FLOATS) / row - rows.extent, 0);
  plan.band = int(std::clamp<int64_t>((inputs / rows.stride + 1) * rows.every, 1, out.h));
  return plan;
}

// Shift a window that begins at `row` so that it can be indexed by the rows of the image.
INLINE Window from_row(Window window, int row) {
  window.data -= row * window.row;
  return window;
}

// Call body(offset in the image, offset in the copy) for the pixels of rows [first, last) of copied channels.
template <class Body>
INLINE void for_copied(const Images& x, int64_t image, const Run& run, int first, int last, Body body) {
  ptrdiff_t copied = 0;
  for (int row = first; row < last; ++row)
    for (int column = 0; column < x.w; ++column, copied += run.blocks * VL)
      body(x.offset(image, run.lane, row, column), copied);
}

// Copy rows [first, last) of a run, as floats, and normalize them.
inline Window copy_rows(const Images& x, int64_t image, const Run& run, int first, int last, const Prologue& prologue,
                        float* buffer) {
  const ptrdiff_t column = run.blocks * VL, row = x.w * column;
  for (int i = first; i < last; ++i) {
    float* to = buffer + (i - first) * row;
    const float* from = to;
    if (prologue && x.data.type == FLOAT32)
      from = x.at(image, run.lane, i, 0);
    else
      x.data.visit([&](const auto* pixels) {
        for_copied(x, image, run, i, i + 1,
                   [&](ptrdiff_t there, ptrdiff_t copied) { copy_elements(pixels + there, int(column), to + copied); });
      });
    if (prologue)
      normalize_rows(prologue + run.lane, NO_PAIRS, from, from == to ? column : x.sw, int(column), x.w, to, column);
  }
  return from_row({buffer, row, column}, first);
}

// The rows of a run that are copied, of which the last ones are kept for the next rows of outputs.
struct CopiedRows {
  const Images& x;
  const Prologue& prologue;
  int64_t image;
  const Run& run;
  float* buffer;
  int first = 0, last = 0;

  Window of(int next_first, int next_last) {
    const ptrdiff_t row = ptrdiff_t(x.w) * run.blocks * VL;
    const int begin = std::clamp(last, next_first, next_last);
    if (begin > next_first && next_first > first)
      std::memmove(buffer, buffer + (next_first - first) * row, (begin - next_first) * row * sizeof(float));
    copy_rows(x, image, run, begin, next_last, prologue, buffer + (begin - next_first) * row);
    first = next_first, last = next_last;
    return from_row({buffer, row, ptrdiff_t(run.blocks) * VL}, first);
  }
};

// Gather rows [first, last) of a block of channels as [plane][row][column][VL], and normalize them.
inline Window gather_rows(const Channels& channels, const Images& x, int64_t image, int lane, int first, int last,
                          float* buffer, const Prologue& prologue = {}) {
  const int lanes = std::min(VL, channels.lanes() - lane);
  const ptrdiff_t row = ptrdiff_t(x.w) * VL;
  if (channels.group.one_to_one() && x.sw == 1)  // contiguous rows are gathered as one
    x.data.visit([&](const auto* pixels) {
      gather_planar_row(pixels + x.offset(image, lane, first, 0), x.sc, lanes, (last - first) * x.w, buffer);
    });
  else
    for (int plane = 0; plane < channels.group.in; ++plane)
      fill_blocked(x, channels.group, lane, lanes, plane, {image, lane, first, 0, last - first, x.w},
                   buffer + plane * (last - first) * row);
  if (prologue)  // of a channel for each lane
    normalize_rows(prologue + lane, NO_PAIRS, buffer, VL, VL, int64_t(last - first) * x.w, buffer, VL);
  return from_row({buffer, row, VL}, first);
}

INLINE Window in_place(const Images& x, int64_t image, int lane) { return {x.at(image, lane, 0, 0), x.sh, x.sw}; }

// Call body(phase, column of the image, input, loops) for the tiles of one output row. plane: floats between planes of
// x. With OVERLAP the last tile recomputes outputs of the one before; otherwise the last outputs are computed singly.
template <bool OVERLAP, class Loops, class Body>
INLINE void for_tiles(const PixelPlan<Loops>& plan, const Window& x, ptrdiff_t plane, int row, Body body) {
  const int every = plan.columns.every, phases = plan.column_phases();
  const PixelPhase<Loops>* of_row = plan.phases.data() + row % plan.rows.every * phases;
  const Phase& down = of_row->down;
  const int top = row / plan.rows.every * plan.rows.stride + down.first;
  TileInput in{nullptr, down.step * x.row, x.column, plane, plan.channels.group.in, 0, 0, 0, 0};
  in.first_row = std::clamp(ceil_div(-top, down.step), 0, down.taps);
  in.last_row = std::clamp(ceil_div(plan.in_height - top, down.step), in.first_row, down.taps);
  const int most = plan.columns.outputs_of(0, plan.width);
  for (int tile = 0; tile < most; tile += TILE)
    for (int b = 0; b < phases; ++b) {
      const PixelPhase<Loops>& phase = of_row[b];
      const Phase& across = phase.across;
      const int outputs = plan.columns.outputs_of(b, plan.width), extent = (across.taps - 1) * across.step + 1;
      int j = OVERLAP && outputs >= TILE ? std::min(tile, outputs - TILE) : tile;
      const bool is_tile = j + TILE <= outputs;
      for (const int last = std::min(j + TILE, outputs), step = is_tile ? TILE : 1; j < last; j += step) {
        const int left = j * plan.columns.stride + across.first;
        in.data = x.data + top * x.row + left * x.column;
        in.first = -left;
        in.last = plan.in_width - left;
        const int outside = std::max(in.first, (step - 1) * plan.columns.stride + extent - in.last);
        body(phase, b + j * every, in, phase.loops.of(is_tile, outside, across.taps));
      }
    }
}

}  // namespace depthwise
