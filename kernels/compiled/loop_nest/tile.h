// The inner loops: rows of operands as numbers, and small tiles of products that are added to rows of sums.
#pragma once

#include <type_traits>

#include "common/abi.h"

namespace loop_nest {

constexpr int OUT = 8;      // rows of sums at a time
constexpr int IN = 4;       // rows added to them at a time
constexpr int LANES = 128;  // of a row, at most; all rows of a thread fit its L1 cache

// The type in which an element is computed: float or double.
template <class T>
using Number = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Call body with a pointer of the elements' type.
template <class Body>
void visit(const Elements& elements, Body body) {
  if (elements.type == FLOAT64) return body(elements.as<double>());
  elements.visit(body);
}

// Return `count` elements that are `step` apart as numbers: in place if possible, otherwise in `copy`.
template <class T>
INLINE const Number<T>* numbers(const T* from, ptrdiff_t step, int count, Number<T>* copy) {
  if constexpr (std::is_same_v<T, Number<T>>) {
    if (step == 1) return from;
    for (int j = 0; j < count; ++j) copy[j] = from[j * step];
  } else if (step == 1) {
    copy_elements(from, count, copy);
  } else {
    T gathered[LANES];
    for (int j = 0; j < count; ++j) gathered[j] = from[j * step];
    copy_elements(gathered, count, copy);
  }
  return copy;
}

// Store a row of sums, which may have a higher precision than the elements.
template <class T, class Sum>
INLINE void store_row(const Sum* sums, int count, T* to, ptrdiff_t step) {
  if constexpr (std::is_same_v<T, Number<T>>) {
    for (int j = 0; j < count; ++j) to[j * step] = T(sums[j]);
  } else {
    float rounded[LANES];
    T stored[LANES];
    for (int j = 0; j < count; ++j) rounded[j] = float(sums[j]);
    copy_elements(rounded, count, stored);
    for (int j = 0; j < count; ++j) to[j * step] = stored[j];
  }
}

// Rows of sums, and the factors by which each added row is multiplied: one for each row of sums.
template <class Sum>
struct Sums {
  Sum rows[OUT][LANES], factors[OUT][IN];

  void fill(int row, int count, Sum value) {
    for (int j = 0; j < count; ++j) rows[row][j] = value;
  }

  // Add `ins` rows of `count` numbers, times their factors, to `outs` rows of sums, from lane `first` on.
  template <class T>
  void add(int outs, int ins, const T* const* in, int first, int count) {
    if (outs == OUT && ins == IN) return add_tiles<OUT, IN>(outs, ins, in, first, count);
    if (outs == OUT) return add_tiles<OUT, 1>(outs, ins, in, first, count);
    if (ins == IN) return add_tiles<1, IN>(outs, ins, in, first, count);
    add_tiles<1, 1>(outs, ins, in, first, count);
  }

 private:
  template <int OUTS, int INS, class T>
  void add_tiles(int outs, int ins, const T* const* in, int first, int count) {
    for (int i = 0; i < outs; i += OUTS)
      for (int c = 0; c < ins; c += INS) add_tile<OUTS, INS>(i, c, in, first, count);
  }

  template <int OUTS, int INS, class T>
  INLINE_MEMBER void add_tile(int out, int at, const T* const* in, int first, int count) {
#pragma omp simd
    for (int j = 0; j < count; ++j)
#pragma GCC unroll 8
      for (int i = 0; i < OUTS; ++i) {
        Sum sum = rows[out + i][first + j];
#pragma GCC unroll 4
        for (int c = 0; c < INS; ++c) sum += factors[out + i][at + c] * Sum(in[at + c][j]);
        rows[out + i][first + j] = sum;
      }
  }
};

}  // namespace loop_nest
