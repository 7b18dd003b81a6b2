// The matrix products of Winograd convolution: register tiles of one kind of Step, compiled in a file of its own
// (singles.cpp, pairs.cpp).
#pragma once

#include <vector>

#include "common/pairs.h"

namespace winograd {

// Adjacent frames of the target that are sums over the same taps of the filter. The first frame is the sum over
// i < taps of frame `source + i * Frames::tap_step` of the source times tap `tap + i`, the next one reads the next
// frames. adds: to what is there.
struct Run {
  int target, frames, tap, taps, source;
  bool adds;

  // Return whether another run, of one frame, goes on where this one ends.
  bool is_before(const Run& next) const {
    return tap == next.tap && taps == next.taps && adds == next.adds && target + frames == next.target &&
           (taps == 0 || source + frames == next.source);
  }
};

// Frames of the source, A, in each of which there are as many rows as in one of the target, C.
struct Frames {
  int rows;      // of a frame
  int tap_step;  // frames of A between those that two adjacent taps read
  int of_a, of_c;
};

template <class Step>
struct Arithmetic {
  // Compute C (+)= A B, where a frame of C is the sum of products of frames of A and taps of B. A frame of A: rows x
  // inner (blocked over inner), B: (taps inner) x columns, a frame of C: rows x columns. Blocks of columns are the outer
  // loop, so that one panel of B stays in the cache during a pass over A. inner is a multiple of VL, padded with zeros.
  // Memory past B is prefetched but never read. summed: steps of inner, a multiple of VL, between writes to C. The
  // rounding error of one sum of n products grows with sqrt(n), that of sums of sums with sqrt(summed + n / summed)
  // (Higham, The Accuracy of Floating Point Summation, 1993).
  static void multiply(bool adds, const std::vector<Run>& runs, const Frames& frames, int taps, int inner,
                       int column_blocks, const float* a, const float* b, float* c, int summed);

  // C += A^T B for each tap of C, (taps rows) x columns, where A are those frames of the source that the tap reads for
  // frames of the target, B. A frame of A: inner x rows, B: inner x columns, all blocked; rows is a multiple of VL.
  static void add_transposed(const std::vector<Run>& runs, const Frames& frames, int taps, int rows, int column_blocks,
                             const float* a, const float* b, float* c);
};

extern template struct Arithmetic<Singles>;
extern template struct Arithmetic<Pairs>;

}  // namespace winograd
