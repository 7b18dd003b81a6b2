// The matrices of F(M, R) by Cook and Toom, computed by the compiler from interpolation points (infinity is the last
// one): y = A^T [(G g) * (B^T d)]. The finite points but 0 come in pairs +a, -a, whose rows (or columns) differ only in
// the sign of the odd (or even) entries, so that each pair costs one even and one odd sum instead of two full ones.
// Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2015). The Python twin: winograd/cook_toom.py.
#pragma once

#include "common/vector.h"

namespace winograd {

template <int SIZE>
struct Points;
template <>
struct Points<4> {
  static constexpr double at[] = {0, 1, -1};
};
template <>
struct Points<6> {  // half the error of 1, 2
  static constexpr double at[] = {0, 0.625, -0.625, 1.5, -1.5};
};
template <>
struct Points<8> {
  static constexpr double at[] = {0, 0.5, -0.5, 1, -1, 2, -2};
};

// Coefficients of prod over finite points except `left_out` of (x - point); left_out = size - 1 leaves out none.
template <int SIZE>
constexpr void polynomial(int left_out, double (&to)[SIZE]) {
  for (int i = 0; i < SIZE; ++i) to[i] = i == 0;
  for (int k = 0; k < SIZE - 1; ++k) {
    if (k == left_out) continue;
    for (int i = SIZE - 1; i >= 0; --i) to[i] = (i ? to[i - 1] : 0) - Points<SIZE>::at[k] * to[i];
  }
}

template <int ROWS, int COLUMNS>
struct Matrix {
  double at[ROWS][COLUMNS] = {};
};

template <int SIZE>
constexpr Matrix<SIZE, SIZE> data_matrix() {  // B^T
  Matrix<SIZE, SIZE> m;
  for (int i = 0; i < SIZE; ++i) polynomial<SIZE>(i, m.at[i]);
  return m;
}

// Row i: the powers of point i, divided by `scaled` ? prod of its distances to the other points : 1. Last row:
// infinity.
template <int SIZE, int TAPS>
constexpr Matrix<SIZE, TAPS> point_matrix(bool scaled) {  // G, and A
  Matrix<SIZE, TAPS> m;
  for (int i = 0; i < SIZE - 1; ++i) {
    double value = 1;
    if (scaled)
      for (int k = 0; k < SIZE - 1; ++k)
        if (k != i) value /= Points<SIZE>::at[i] - Points<SIZE>::at[k];
    for (int j = 0; j < TAPS; ++j, value *= Points<SIZE>::at[i]) m.at[i][j] = value;
  }
  m.at[SIZE - 1][TAPS - 1] = 1;
  return m;
}

// The columns of each row, the smallest entries first: a sum rounds least where its large parts come last.
template <int ROWS, int COLUMNS>
struct Order {
  int at[ROWS][COLUMNS] = {};
};

template <int ROWS, int COLUMNS>
constexpr Order<ROWS, COLUMNS> ascending(const Matrix<ROWS, COLUMNS>& m) {
  const auto size = [&](int i, int j) { return m.at[i][j] < 0 ? -m.at[i][j] : m.at[i][j]; };
  Order<ROWS, COLUMNS> order;
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) {
      int place = j;
      for (; place > 0 && size(i, order.at[i][place - 1]) > size(i, j); --place)
        order.at[i][place] = order.at[i][place - 1];
      order.at[i][place] = j;
    }
  return order;
}

INLINE Vec multiply_add(Vec sum, double factor, Vec value) {
  if (factor == 0) return sum;
  if (factor == 1) return sum + value;
  if (factor == -1) return sum - value;
  return sum + broadcast(float(factor)) * value;
}

// Maps one dimension, IN vectors to OUT vectors. SIZE = M + R - 1 points on one of the sides.
template <int SIZE>
struct ToPointsFromData {  // B^T: SIZE -> SIZE
  static constexpr int IN = SIZE, OUT = SIZE;
  static constexpr auto matrix = data_matrix<SIZE>();
  static constexpr auto order = ascending(matrix);
};

template <int SIZE, int TAPS, bool SCALED>
struct ToPoints {  // G (scaled): R -> SIZE, or A: M -> SIZE
  static constexpr int IN = TAPS, OUT = SIZE;
  static constexpr auto matrix = point_matrix<SIZE, TAPS>(SCALED);
  static constexpr auto order = ascending(matrix);
};

template <class Map>
INLINE void apply_rows_in_pairs(const Vec* in, Vec* out) {
  constexpr int last = Map::OUT - 1;
  Vec first = {}, infinity = {};
#pragma GCC unroll 8
  for (int n = 0; n < Map::IN; ++n) {
    const int of_first = Map::order.at[0][n], of_infinity = Map::order.at[last][n];
    first = multiply_add(first, Map::matrix.at[0][of_first], in[of_first]);
    infinity = multiply_add(infinity, Map::matrix.at[last][of_infinity], in[of_infinity]);
  }
  out[0] = first;
  out[last] = infinity;
#pragma GCC unroll 4
  for (int i = 1; i < last; i += 2) {
    Vec even = {}, odd = {};
#pragma GCC unroll 8
    for (int n = 0; n < Map::IN; ++n) {
      const int j = Map::order.at[i][n];
      if (j % 2 == 0)
        even = multiply_add(even, Map::matrix.at[i][j], in[j]);
      else
        odd = multiply_add(odd, Map::matrix.at[i][j], in[j]);
    }
    out[i] = even + odd;
    out[i + 1] = even - odd;
  }
}

template <int SIZE, int TAPS, bool SCALED>
struct FromPoints {  // A^T: SIZE -> M, or G^T (scaled): SIZE -> R
  static constexpr int IN = SIZE, OUT = TAPS;
  static constexpr auto matrix = point_matrix<SIZE, TAPS>(SCALED);  // transposed when applied
};

template <class Map>
INLINE void apply_columns_in_pairs(const Vec* in, Vec* out) {
  constexpr int last = Map::IN - 1;
#pragma GCC unroll 8
  for (int i = 0; i < Map::OUT; ++i)
    out[i] = multiply_add(multiply_add(Vec{}, Map::matrix.at[0][i], in[0]), Map::matrix.at[last][i], in[last]);
#pragma GCC unroll 4
  for (int j = 1; j < last; j += 2) {
    const Vec sum = in[j] + in[j + 1], difference = in[j] - in[j + 1];
#pragma GCC unroll 8
    for (int i = 0; i < Map::OUT; ++i)
      out[i] = multiply_add(out[i], Map::matrix.at[j][i], i % 2 == 0 ? sum : difference);
  }
}

template <int SIZE>
INLINE void apply(ToPointsFromData<SIZE>, const Vec* in, Vec* out) {
  apply_rows_in_pairs<ToPointsFromData<SIZE>>(in, out);
}
template <int SIZE, int TAPS, bool SCALED>
INLINE void apply(ToPoints<SIZE, TAPS, SCALED>, const Vec* in, Vec* out) {
  apply_rows_in_pairs<ToPoints<SIZE, TAPS, SCALED>>(in, out);
}
template <int SIZE, int TAPS, bool SCALED>
INLINE void apply(FromPoints<SIZE, TAPS, SCALED>, const Vec* in, Vec* out) {
  apply_columns_in_pairs<FromPoints<SIZE, TAPS, SCALED>>(in, out);
}

// The map along both dimensions. Vector (i, j) of the source at from[i * from_row + j * from_column], likewise the
// result; `offset` is added to each vector of the result.
template <class Map>
static inline void transform(const float* from, ptrdiff_t from_row, ptrdiff_t from_column, float* to, ptrdiff_t to_row,
                             ptrdiff_t to_column, Vec offset = Vec{}) {
  Vec half[Map::IN][Map::OUT];
#pragma GCC unroll 8
  for (int i = 0; i < Map::IN; ++i) {
    Vec in[Map::IN];
#pragma GCC unroll 8
    for (int j = 0; j < Map::IN; ++j) in[j] = load(from + i * from_row + j * from_column);
    apply(Map{}, in, half[i]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < Map::OUT; ++j) {
    Vec in[Map::IN], out[Map::OUT];
#pragma GCC unroll 8
    for (int i = 0; i < Map::IN; ++i) in[i] = half[i][j];
    apply(Map{}, in, out);
#pragma GCC unroll 8
    for (int i = 0; i < Map::OUT; ++i) store(to + i * to_row + j * to_column, out[i] + offset);
  }
}

}  // namespace winograd
