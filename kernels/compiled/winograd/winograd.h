// What all variants of Winograd convolution have in common; each F(M x M, R x R) is compiled in a file of its own.
#pragma once

#include "common/stage.h"
#include "winograd/arithmetic.h"

namespace winograd {

// The division of an image batch into tiles. In each dimension, the first tile reads from `padding` pixels before the
// source on, and writes from `skipped` pixels before the target on.
struct Tiling {
  int64_t count;
  int rows, columns;
  int padding[2], skipped[2];
};

// How frames of the target depend on those of the source, and the division of a convolution of volumes into chunks of
// frames of the target. Images are volumes of one frame, with filters of one tap.
class Depth {
 public:
  int64_t sources, targets;  // frames
  int taps;

  explicit Depth(const Stage& stage)
      : sources(stage.in().d), targets(stage.out().d), taps(int(stage.geometry.taps)),
        axis_(stage.geometry.frames(stage.backward_data())) {}

  // Frames of the source between those that adjacent taps read for a frame of the target.
  int64_t tap_step() const { return axis_.tap_step(); }

  // Return the most frames of the source that `frames` adjacent frames of the target read.
  int64_t most_read(int64_t frames) const {
    const int64_t covered = (frames - 1) * axis_.step() + axis_.dilation * (taps - 1);
    return std::min(sources, covered / axis_.every() + 1);
  }

  // Frames [first, first + frames) of the target, which read some of the frames [begin, end) of the source. The first
  // `kept` of those are the last that the chunk before has read, from its frame `moved` on.
  struct Chunk {
    int64_t first, begin, end, kept, moved;
    int frames;
    std::vector<Run> runs;
  };

  // Return chunks of at most `frames` frames. by_tap: whether each run is of a single tap, with its frames together.
  std::vector<Chunk> chunks(int frames, bool by_tap) const;

 private:
  Axis axis_;

  // Return the tap of the filter that is transformed as number `tap`: in backward data, the last one comes first.
  int64_t turned(int64_t tap) const { return axis_.backward_data ? taps - 1 - tap : tap; }
  // Return the frame that a tap reads for a frame of the target; -1 if it reads padding, or nothing.
  int64_t source(int64_t target, int64_t tap) const {
    int64_t at;
    return axis_.meets_image(target, turned(tap), sources, at) ? at : -1;
  }
  void add_runs_of_taps(Chunk& chunk) const;
  void add_runs_of_frames(Chunk& chunk) const;
};

using Chunks = std::vector<Depth::Chunk>;

// The planes of a transformed operand, one per point, each a blocked matrix [column_blocks][rows][VL]. Planes start an
// odd number of cache lines apart, since a tile is written to all planes at once and must not fill one cache set.
struct Planes {
  float* data;
  int rows, column_blocks;
  static ptrdiff_t stride(int rows, int column_blocks) { return (ptrdiff_t(rows) * column_blocks | 1) * VL; }
  ptrdiff_t stride() const { return stride(rows, column_blocks); }
  float* at(int point, int column_block = 0, int row = 0) const {
    return data + point * stride() + (ptrdiff_t(column_block) * rows + row) * VL;
  }
  Planes from_row(ptrdiff_t row) const { return {data + row * VL, rows, column_blocks}; }
};

// The number of tiles of a block, and of frames of the target that are computed at once, and whether all threads share
// one block or each has its own.
struct Schedule {
  int tiles, frames;
  bool shared;
};

struct Plan {
  Tiling tiling;
  Depth depth;
  Schedule schedule;
  int64_t scratch_floats;
};

// One F(M x M, R x R) with one stride. Groups are processed one by one: c, k are channels of a group that are read and
// written; in backward filter, those of x and dy.
class Winograd {
 public:
  // Return the rows of one tap of the transformed filter, or of its gradient's accumulator.
  virtual int filter_rows(bool of_gradient, int c) const = 0;
  // Return the floats of all points. rows: of all taps.
  virtual int64_t filter_floats(int rows, int k) const = 0;

  virtual Plan plan_of(const Stage& stage) const = 0;

  // Transform one tap, to planes that begin with its first row.
  virtual void transform_filter(const FilterView& w, const Planes& u, int threads) const = 0;
  virtual void correlate(bool backward_data, const Images& x, const Planes& u, const Finish& finish, const Images& y,
                         const Plan& plan, const Chunks& chunks, float* scratch, int threads) const = 0;

  // Add the filter gradient to du, in the transform domain.
  virtual void accumulate(const Images& x, const Images& dy, const Planes& du, const Plan& plan, const Chunks& chunks,
                          float* scratch, int threads) const = 0;
  // Add a tap of du, transformed back, to dw.
  virtual void add_filter_gradient(const Planes& du, const FilterView& dw, int threads) const = 0;

 protected:
  ~Winograd() = default;
};

// Return F(M x M, R x R) with a stride, for float32 or for products of pairs; null if it is not compiled.
const Winograd* f2x3(int64_t stride, bool of_pairs);
const Winograd* f4x3(int64_t stride);
const Winograd* f6x3(int64_t stride);
const Winograd* f2x5(int64_t stride);
const Winograd* f4x5(int64_t stride);

}  // namespace winograd
