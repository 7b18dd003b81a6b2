// The inner loops over columns: tiles of outputs, and sums of products for the filter's gradient, in registers.
//
// A vector holds VL neighbouring columns of one channel; filter elements are broadcast. The output rows of a tile share
// loaded input rows, each with a different filter row.
#pragma once

#include "common/vector.h"

namespace depthwise {

// The input of a tile; distances in floats.
struct DepthwiseInput {
  const float* data;
  ptrdiff_t row, column, plane;  // to the next input row, output column, and summed channel
};

struct DepthwiseOutput {
  float* data;
  ptrdiff_t row, column;
  int lanes;         // of each vector that exist
  const float* end;  // past the last element that may be written
};

// The taps of one phase: filter rows are `row_step` input rows apart, filter column s is at columns[s] floats. Elements
// are stored as [plane][column][row][VL], of which planar loops read one lane.
struct DepthwiseTaps {
  int planes, rows, count_columns, row_step, stride;
  const ptrdiff_t* columns;
};

// Compute rows x columns outputs. Filters of 3, 5 and 7 rows are specialized, and so are the phases of strided ones.
void depthwise_outputs(const DepthwiseTaps& taps, const DepthwiseInput& in, const float* w, Vec bias,
                       const DepthwiseOutput& out, int rows, int columns);

// `rows` x `vectors` vectors of dy. Lanes outside `mask` are ignored.
struct DepthwiseGradient {
  const float* data;
  ptrdiff_t row, vector;
  int rows, vectors;
  Lanes mask;
};

// Add the sums of x * dy to the vectors sums[column][row]. x: one channel, with vectors `vector` floats apart. MASKED:
// whether dy has a mask.
template <bool MASKED>
void depthwise_products(const DepthwiseTaps& taps, const float* x, ptrdiff_t row, ptrdiff_t vector,
                        const DepthwiseGradient& dy, float* sums);

}  // namespace depthwise
