// Winograd convolution, F(M x M, R x R), forward, backward data (forward with the turned filter) and backward filter.
//
// The tiles of a micro-batch are processed in blocks: a block is transformed, multiplied by the filter at each of the
// SIZE x SIZE points, and transformed back. A block is small enough to stay in a core's cache, so that the transformed
// data, which is larger than x, never goes to memory (L3 fusion: Gelashvili, Shavit, Zlateski 2019).
//
// Of volumes, a block has tiles of several frames, a chunk. The products are summed over the taps of the filter's depth:
// channels and taps are one inner dimension, and for another tap the rows begin some frames further down.
#include "winograd/winograd.h"

#include "common/pairs.h"

using namespace winograd;

Chunks Depth::chunks(int frames, bool by_tap) const {
  Chunks found;
  const int64_t every = axis_.every();
  for (int64_t first = 0; first < targets; first += frames) {
    const int64_t last_target = std::min(first + frames, targets) - 1;
    const int64_t last = axis_.scaled_input(last_target, turned(taps - 1));
    const int64_t end = std::min(last < 0 ? 0 : last / every + 1, sources);
    const int64_t first_read = std::max<int64_t>(axis_.scaled_input(first, turned(0)), 0);
    const int64_t begin = std::min(ceil_div(first_read, every), end);
    Chunk chunk{first, begin, end, 0, 0, int(last_target - first + 1), {}};
    if (!found.empty()) {
      chunk.kept = std::max<int64_t>(found.back().end - begin, 0);
      chunk.moved = begin - found.back().begin;
    }
    by_tap ? add_runs_of_taps(chunk) : add_runs_of_frames(chunk);
    found.push_back(std::move(chunk));
  }
  return found;
}

void Depth::add_runs_of_taps(Chunk& chunk) const {
  std::vector<Run>& runs = chunk.runs;
  for (int tap = 0; tap < taps; ++tap)
    for (int i = 0; i < chunk.frames; ++i) {
      const int64_t at = source(chunk.first + i, tap);
      if (at < 0) continue;
      const Run run{i, 1, tap, 1, int(at - chunk.begin), true};
      if (!runs.empty() && runs.back().is_before(run))
        ++runs.back().frames;
      else
        runs.push_back(run);
    }
}

void Depth::add_runs_of_frames(Chunk& chunk) const {
  std::vector<Run>& runs = chunk.runs;
  for (int i = 0; i < chunk.frames; ++i) {
    const size_t before = runs.size();
    for (int tap = 0; tap < taps; ++tap) {
      const int64_t at = source(chunk.first + i, tap);
      if (at < 0) continue;
      const bool adds = runs.size() > before;
      if (adds && runs.back().tap + runs.back().taps == tap)
        ++runs.back().taps;
      else
        runs.push_back({i, 1, tap, 1, int(at - chunk.begin), adds});
    }
    if (runs.size() == before) runs.push_back({i, 1, 0, 0, 0, false});
    if (before > 0 && runs.size() == before + 1 && runs[before - 1].is_before(runs[before])) {
      runs.pop_back();
      ++runs.back().frames;
    }
  }
}

namespace {

const Winograd* find(int64_t tile, int64_t taps, int64_t stride, bool of_pairs) {
  if (tile == 2 && taps == 3) return f2x3(stride, of_pairs && stride == 1);
  if (tile == 4 && taps == 3) return f4x3(stride);
  if (tile == 6 && taps == 3) return f6x3(stride);
  if (tile == 2 && taps == 5) return f2x5(stride);
  if (tile == 4 && taps == 5) return f4x5(stride);
  return nullptr;
}

// Return F(m, r) with the stage's stride.
const Winograd& winograd_of(const Stage& stage) {
  const Geometry& g = stage.geometry;
  const bool is_square = g.r == g.s && g.stride_h == g.stride_w, is_dilated = g.dilation_h != 1 || g.dilation_w != 1;
  const bool of_pairs = stage.x.element == BFLOAT16 && multiplies_pairs();
  const Winograd* found = is_square && !is_dilated ? find(stage.tile, g.r, g.stride_h, of_pairs) : nullptr;
  if (found) return *found;
  const auto by = [](int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); };
  refuse(NOT_BUILT, "F(" + by(stage.tile, stage.tile) + ", " + by(g.r, g.s) + ") with the stride " +
                        by(g.stride_h, g.stride_w) + " and the dilation " + by(g.dilation_h, g.dilation_w) +
                        " is not among the compiled ones");
}

struct CompiledWinograd {
  static constexpr Element LAST_ELEMENT = FLOAT16;
  static constexpr bool NORMALIZES = false;

  static void require(const Stage& stage) {
    require_between("the number of outputs of a tile", stage.tile, 1, LARGEST_SIZE);
    require_size("the number of rows of the transformed filter", times(stage.geometry.taps, rows_of_tap(stage)));
  }

  static int64_t prepared_bytes(const Stage& stage) {
    return bytes_of(times(stage.geometry.groups, floats_of_group(stage)));
  }

  static int64_t scratch_bytes(const Stage& stage) {
    return bytes_of(winograd_of(stage).plan_of(stage).scratch_floats);
  }

  static void open(const Stage& stage, float* u) {
    for_filters(stage, u, [&](const Planes& planes, const FilterView& view) {
      winograd_of(stage).transform_filter(view, planes, stage.thread_count());
    });
  }

  static void correlate(const Slice& slice) {
    const Winograd& winograd = winograd_of(slice);
    const Plan plan = winograd.plan_of(slice);
    const Chunks chunks = plan.depth.chunks(plan.schedule.frames, false);
    float* const scratch = slice.scratch(bytes_of(plan.scratch_floats));
    const Images from = slice.images_in(), to = slice.images_out();
    for (int64_t i = 0; i < slice.geometry.groups; ++i) {
      const Finish finish{slice.bias + i * to.c, slice.epilogue};
      winograd.correlate(slice.backward_data(), from.group(i), planes_of(slice, slice.prepared, i), finish,
                         to.group(i), plan, chunks, scratch, slice.thread_count());
    }
  }

  static void accumulate(const Slice& slice) {
    const Winograd& winograd = winograd_of(slice);
    const Plan plan = winograd.plan_of(slice);
    const Chunks chunks = plan.depth.chunks(plan.schedule.frames, true);
    float* const scratch = slice.scratch(bytes_of(plan.scratch_floats));
    const Images x = slice.images_in(), dy = slice.images_out();
    for (int64_t i = 0; i < slice.geometry.groups; ++i)
      winograd.accumulate(x.group(i), dy.group(i), planes_of(slice, slice.prepared, i), plan, chunks, scratch,
                          slice.thread_count());
  }

  static void close(const Stage& stage, float* du) {
    for_filters(stage, du, [&](const Planes& planes, const FilterView& view) {
      winograd_of(stage).add_filter_gradient(planes, view, stage.thread_count());
    });
  }

 private:
  // Return the rows of one tap of the transformed filter, or of its gradient's accumulator.
  static int rows_of_tap(const Stage& stage) {
    return winograd_of(stage).filter_rows(stage.backward_filter(), stage.images_in().c);
  }

  static int64_t floats_of_group(const Stage& stage) {
    return winograd_of(stage).filter_floats(rows_of_tap(stage) * int(stage.geometry.taps), stage.images_out().c);
  }

  static Planes planes_of(const Stage& stage, float* data, int64_t group) {
    return {data + group * floats_of_group(stage), rows_of_tap(stage) * int(stage.geometry.taps),
            blocks_of(stage.images_out().c)};
  }

  // Call body with the planes and the filter of each group and tap: turned by 180 degrees in backward data, C and K
  // exchanged, and the last tap first. The planes begin with the rows of the tap.
  template <class Body>
  static void for_filters(const Stage& stage, float* data, Body body) {
    const Geometry& g = stage.geometry;
    const bool backward_data = stage.backward_data();
    const int rows = rows_of_tap(stage), taps = int(g.taps);
    for (int64_t i = 0; i < g.groups; ++i)
      for (int tap = 0; tap < taps; ++tap) {
        const int64_t read = g.first_tap + (backward_data ? taps - 1 - tap : tap);
        body(planes_of(stage, data, i).from_row(tap * rows),
             stage.w.filter(i, g.groups, backward_data, backward_data, read));
      }
  }
};

}  // namespace

MUCUDNN_ENTRIES(winograd, CompiledWinograd)
