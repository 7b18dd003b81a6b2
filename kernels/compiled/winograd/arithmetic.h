// The matrix products of Winograd convolution: register tiles of one kind of Step, compiled in a file of its own
// (singles.cpp, pairs.cpp).
#pragma once

#include "common/pairs.h"

namespace winograd {

template <class Step>
struct Arithmetic {
  // Compute C (+)= A B. A: rows x inner (blocked over inner), B: inner x columns, C: rows x columns. Blocks of columns
  // are the outer loop, so that one panel of B stays in the cache during a pass over A. inner is a multiple of VL,
  // padded with zeros. Memory past B is prefetched but never read. summed: steps of inner, a multiple of VL, between
  // writes to C. The rounding error of one sum of n products grows with sqrt(n), that of sums of sums with sqrt(summed
  // + n / summed) (Higham, The Accuracy of Floating Point Summation, 1993).
  static void multiply(bool adds, int rows, int inner, int column_blocks, const float* a, const float* b, float* c,
                       int summed);

  // C += A^T B.  A: inner x rows, B: inner x columns, C: rows x columns, all blocked; rows is a multiple of VL.
  static void add_transposed(int rows, int inner, int column_blocks, const float* a, const float* b, float* c);
};

extern template struct Arithmetic<Singles>;
extern template struct Arithmetic<Pairs>;

}  // namespace winograd
