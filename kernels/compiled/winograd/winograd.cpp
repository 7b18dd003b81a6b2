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
  const int64_t divisor = is_backward_ ? stride_ : 1;
  for (int64_t first = 0; first < targets; first += frames) {
    const int64_t last_target = std::min(first + frames, targets) - 1, last = place(last_target, taps - 1);
    const int64_t end = std::min(last < 0 ? 0 : last / divisor + 1, sources);
    const int64_t begin = std::min(ceil_div(std::max<int64_t>(place(first, 0), 0), divisor), end);
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
  g.require();
  require_between("the number of outputs of a tile", stage.tile, 1, LARGEST_SIZE);
  const bool is_square = g.r == g.s && g.stride_h == g.stride_w, is_dilated = g.dilation_h != 1 || g.dilation_w != 1;
  const bool of_pairs = stage.x.element == BFLOAT16 && multiplies_pairs();
  const Winograd* found = is_square && !is_dilated ? find(stage.tile, g.r, g.stride_h, of_pairs) : nullptr;
  if (found) return *found;
  const auto by = [](int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); };
  refuse(NOT_BUILT, "F(" + by(stage.tile, stage.tile) + ", " + by(g.r, g.s) + ") with the stride " +
                        by(g.stride_h, g.stride_w) + " and the dilation " + by(g.dilation_h, g.dilation_w) +
                        " is not among the compiled ones");
}

// Return how frames depend on each other, with the sizes of both operands checked.
Depth depth_of(const Stage& stage, const TensorArgument& x, const TensorArgument& y) {
  const Geometry& g = stage.geometry;
  require_volumes(g, x, y);
  return Depth(g, x.d, y.d, stage.backward_data());
}

bool of_gradient(const Stage& stage) { return stage.operation == BACKWARD_FILTER; }

int filter_rows(const Winograd& winograd, const Stage& stage, int64_t c) {
  const int rows = winograd.filter_rows(of_gradient(stage), int(c));
  require_size("the number of rows of the transformed filter", times(stage.geometry.taps, rows));
  return rows;
}

// Return the bytes of the transformed filter, or of its gradient's accumulator. c, k: channels read, written per group.
int64_t filter_bytes(const Winograd& winograd, const Stage& stage, int64_t c, int64_t k) {
  const int rows = filter_rows(winograd, stage, c) * int(stage.geometry.taps);
  return bytes_of(times(stage.geometry.groups, winograd.filter_floats(rows, int(k))));
}

// Call body with the planes and the filter of each group and tap: turned by 180 degrees in backward data, C and K
// exchanged, and the last tap first. The planes begin with the rows of the tap.
template <class Body>
void for_filters(const Winograd& winograd, const Stage& stage, const TensorArgument& w, float* data, Body body) {
  const Geometry& g = stage.geometry;
  const bool backward_data = stage.backward_data();
  w.require_filter(g.groups, g.r, g.s, FLOAT16, w.d);
  require_between("the last tap", g.first_tap + g.taps, 1, w.d);
  const FilterView first = w.filter(0, g.groups, backward_data);
  stage.require_prepared(filter_bytes(winograd, stage, first.rows, first.lanes));
  const int rows = filter_rows(winograd, stage, first.rows), taps = int(g.taps);
  for (int64_t i = 0; i < g.groups; ++i) {
    const Planes planes{data + i * winograd.filter_floats(rows * taps, first.lanes), rows * taps, blocks_of(first.lanes)};
    for (int tap = 0; tap < taps; ++tap) {
      const int64_t read = g.first_tap + (backward_data ? taps - 1 - tap : tap);
      body(planes.from_row(tap * rows), w.filter(i, g.groups, backward_data, backward_data, read));
    }
  }
}

// Call body with each group, the images that it reads and writes, its planes of the filter, and the plan.
template <class Body>
void for_planes(const Winograd& winograd, const Stage& stage, const Slice& slice, Body body) {
  const int64_t groups = stage.geometry.groups;
  slice.x.require("x");
  slice.y.require("y");
  const Depth depth = depth_of(stage, slice.x, slice.y);
  const Images from = slice.in(stage).images(groups), to = slice.out(stage).images(groups);
  const Plan plan = winograd.plan_of(stage, from, to, depth, stage.thread_count());
  stage.require_prepared(filter_bytes(winograd, stage, from.c, to.c));
  stage.require_scratch(bytes_of(plan.scratch_floats));
  const Chunks chunks = depth.chunks(plan.schedule.frames, of_gradient(stage));
  const int rows = filter_rows(winograd, stage, from.c) * depth.taps;
  for (int64_t i = 0; i < groups; ++i) {
    const Planes planes{slice.prepared + i * winograd.filter_floats(rows, to.c), rows, blocks_of(to.c)};
    body(i, from.group(i), to.group(i), planes, plan, chunks);
  }
}

struct CompiledWinograd {
  static int64_t prepared_bytes(const Stage& stage) {
    depth_of(stage, stage.x, stage.y);  // checks them
    const int64_t groups = stage.geometry.groups;
    return filter_bytes(winograd_of(stage), stage, stage.in().c / groups, stage.out().c / groups);
  }

  static int64_t scratch_bytes(const Stage& stage) {
    const Depth depth = depth_of(stage, stage.x, stage.y);
    require_between("the operation", stage.operation, FORWARD, BACKWARD_FILTER);
    const int64_t groups = stage.geometry.groups;
    const Images from = stage.in().images(groups), to = stage.out().images(groups);
    return bytes_of(winograd_of(stage).plan_of(stage, from, to, depth, stage.thread_count()).scratch_floats);
  }

  static void open(const Stage& stage, const TensorArgument& w, float* u) {
    const Winograd& winograd = winograd_of(stage);
    const int threads = stage.thread_count();
    for_filters(winograd, stage, w, u, [&](const Planes& planes, const FilterView& view) {
      winograd.transform_filter(view, planes, threads);
    });
  }

  static void correlate(const Stage& stage, const Slice& slice) {
    const Winograd& winograd = winograd_of(stage);
    const TensorArgument& out = slice.out(stage);
    const Elements bias = checked_bias(slice.bias, stage.bias_bytes, out);
    const Epilogue epilogue = checked_epilogue(&slice.epilogue, out);
    const int threads = stage.thread_count();
    const auto run = [&](int64_t i, const Images& from, const Images& to, const Planes& u, const Plan& plan,
                         const Chunks& chunks) {
      const Finish finish{bias + i * to.c, epilogue};
      winograd.correlate(stage.backward_data(), from, u, finish, to, plan, chunks, slice.scratch, threads);
    };
    for_planes(winograd, stage, slice, run);
  }

  static void accumulate(const Stage& stage, const Slice& slice) {
    const Winograd& winograd = winograd_of(stage);
    const int threads = stage.thread_count();
    const auto add = [&](int64_t, const Images& x, const Images& dy, const Planes& du, const Plan& plan,
                         const Chunks& chunks) {
      winograd.accumulate(x, dy, du, plan, chunks, slice.scratch, threads);
    };
    for_planes(winograd, stage, slice, add);
  }

  static void close(const Stage& stage, const TensorArgument& dw, float* du) {
    const Winograd& winograd = winograd_of(stage);
    const int threads = stage.thread_count();
    for_filters(winograd, stage, dw, du, [&](const Planes& planes, const FilterView& view) {
      winograd.add_filter_gradient(planes, view, threads);
    });
  }
};

}  // namespace

MUCUDNN_ENTRIES(winograd, CompiledWinograd)
