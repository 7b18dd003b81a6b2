// What all variants of Winograd convolution have in common; each F(M x M, R x R) is compiled in a file of its own.
#pragma once

#include "common/stage.h"

namespace winograd {

// The division of an image batch into tiles. In each dimension, the first tile reads from `padding` pixels before the
// source on, and writes from `skipped` pixels before the target on.
struct Tiling {
  int64_t count;
  int rows, columns;
  int padding[2], skipped[2];
};

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
};

// The number of tiles of a block, and whether all threads share one block or each has its own.
struct Schedule {
  int tiles;
  bool shared;
};

struct Plan {
  Tiling tiling;
  Schedule schedule;
  int64_t scratch_floats;
};

// One F(M x M, R x R) with one stride. Groups are processed one by one: c, k are channels of a group that are read and
// written; in backward filter, those of x and dy.
class Winograd {
 public:
  // Return the floats of the transformed filter, or of its gradient's accumulator.
  virtual int64_t filter_floats(bool of_gradient, int c, int k) const = 0;
  virtual Planes filter_planes(bool of_gradient, float* data, int c, int k) const = 0;

  // Return the plan of a call. from, to: the tensors that are read and written; in backward filter, x and dy.
  virtual Plan plan_of(const Stage& stage, const Images& from, const Images& to, int threads) const = 0;

  virtual void transform_filter(const FilterView& w, const Planes& u, int threads) const = 0;
  virtual void correlate(bool backward_data, const Images& x, const Planes& u, const Finish& finish, const Images& y,
                         const Plan& plan, float* scratch, int threads) const = 0;

  // Add the filter gradient to du, in the transform domain.
  virtual void accumulate(const Images& x, const Images& dy, const Planes& du, const Plan& plan, float* scratch,
                          int threads) const = 0;
  // Add du, transformed back, to dw.
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
