// The Cook-Toom matrices of F(M, R), computed at compile time from interpolation points, the last of which is infinity:
// y = A^T [(G g) * (B^T d)]. The nonzero finite points come in pairs +a, -a, whose rows (or columns) differ only in the
// sign of the odd (or even) entries, so that each pair costs one even and one odd sum instead of two full ones. Lavin
// and Gray, Fast Algorithms for Convolutional Neural Networks (2015). The Python twin: winograd/cook_toom.py.
//
// A convolution with stride S is the sum of S phases, convolutions with unit stride on every S-th pixel: phase p has
// the taps p, p + S, p + 2 S, ... All phases use the points of the longest. A phase with one tap fewer leaves out
// infinity; at the other points, its values are computed in the same way, without the last tap.
#pragma once

#include <utility>

#include "common/vector.h"

namespace winograd {

template <int SIZE>
struct Points;
template <>
struct Points<3> {
  static constexpr double at[] = {1, -1};
};
template <>
struct Points<4> {
  static constexpr double at[] = {0, 1, -1};
};
template <>
struct Points<5> {
  static constexpr double at[] = {0.5, -0.5, 1.5, -1.5};
};
template <>
struct Points<6> {  // half the error of the points 1 and 2
  static constexpr double at[] = {0, 0.625, -0.625, 1.5, -1.5};
};
template <>
struct Points<8> {
  static constexpr double at[] = {0, 1, -1, 2, -2, 0.5, -0.5};
};

// Compute the coefficients of prod (x - point) over the finite points except `left_out`, or all if it is SIZE - 1.
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

// Return the product of the distances of a finite point to the others.
template <int SIZE>
constexpr double spread(int point) {
  double product = 1;
  for (int k = 0; k < SIZE - 1; ++k)
    if (k != point) product *= Points<SIZE>::at[point] - Points<SIZE>::at[k];
  return product;
}

template <int SIZE>
constexpr Matrix<SIZE, SIZE> data_matrix(bool scaled) {  // B^T
  Matrix<SIZE, SIZE> m;
  for (int i = 0; i < SIZE; ++i) {
    polynomial<SIZE>(i, m.at[i]);
    if (scaled && i < SIZE - 1)
      for (double& entry : m.at[i]) entry /= spread<SIZE>(i);
  }
  return m;
}

// Row i: the powers of point i, divided by its spread if `scaled`. Last row: infinity.
template <int SIZE, int TAPS>
constexpr Matrix<SIZE, TAPS> point_matrix(bool scaled) {  // G, and A
  Matrix<SIZE, TAPS> m;
  for (int i = 0; i < SIZE - 1; ++i) {
    double value = scaled ? 1 / spread<SIZE>(i) : 1;
    for (int j = 0; j < TAPS; ++j, value *= Points<SIZE>::at[i]) m.at[i][j] = value;
  }
  m.at[SIZE - 1][TAPS - 1] = 1;
  return m;
}

INLINE Vec multiply_add(Vec sum, double factor, Vec value) {
  if (factor == 0) return sum;
  if (factor == 1) return sum + value;
  if (factor == -1) return sum - value;
  return sum + broadcast(float(factor)) * value;
}

template <int SIZE>
constexpr bool HAS_ZERO = SIZE % 2 == 0;

// Map IN vectors to OUT vectors along one dimension. One side has COUNT of SIZE points: all, or only the finite ones.
// NEGATED: the row of a point -a is that of +a with the signs of its even entries changed, instead of its odd ones.
template <class Map, int SIZE>
INLINE void apply_rows_in_pairs(const Vec* in, Vec* out) {
  const auto row = [&](int i) INLINE_LAMBDA {
    Vec sum = {};
#pragma GCC unroll 8
    for (int j = 0; j < Map::IN; ++j) sum = multiply_add(sum, Map::matrix.at[i][j], in[j]);
    return sum;
  };
  if (HAS_ZERO<SIZE>) out[0] = row(0);
  if (Map::OUT == SIZE) out[SIZE - 1] = row(SIZE - 1);
#pragma GCC unroll 4
  for (int i = HAS_ZERO<SIZE>; i < SIZE - 1; i += 2) {
    Vec even = {}, odd = {};
#pragma GCC unroll 8
    for (int j = 0; j < Map::IN; ++j) {
      if (j % 2 == 0)
        even = multiply_add(even, Map::matrix.at[i][j], in[j]);
      else
        odd = multiply_add(odd, Map::matrix.at[i][j], in[j]);
    }
    out[i] = even + odd;
    out[i + 1] = Map::NEGATED ? odd - even : even - odd;
  }
}

template <int SIZE, int COUNT = SIZE, bool SCALED = false>
struct ToPointsFromData {  // B^T: COUNT -> COUNT
  static constexpr int IN = COUNT, OUT = COUNT;
  static constexpr bool NEGATED = !HAS_ZERO<SIZE> && !SCALED;
  static constexpr auto matrix = data_matrix<SIZE>(SCALED);
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) { apply_rows_in_pairs<ToPointsFromData, SIZE>(in, out); }
};

template <int SIZE, int COUNT, int TAPS, bool SCALED>
struct ToPoints {  // G (scaled): R -> COUNT, or A: M -> COUNT
  static constexpr int IN = TAPS, OUT = COUNT;
  static constexpr bool NEGATED = !HAS_ZERO<SIZE> && SCALED;
  static constexpr auto matrix = point_matrix<SIZE, TAPS>(SCALED);
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) { apply_rows_in_pairs<ToPoints, SIZE>(in, out); }
};

template <int SIZE, int COUNT, int TAPS, bool SCALED>
struct FromPoints {  // A^T: COUNT -> M, or G^T (scaled): COUNT -> R
  static constexpr int IN = COUNT, OUT = TAPS;
  static constexpr bool NEGATED = !HAS_ZERO<SIZE> && SCALED;
  static constexpr auto matrix = point_matrix<SIZE, TAPS>(SCALED);  // transposed when applied
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) {
#pragma GCC unroll 8
    for (int i = 0; i < OUT; ++i) {
      out[i] = HAS_ZERO<SIZE> ? multiply_add(Vec{}, matrix.at[0][i], in[0]) : Vec{};
      if (COUNT == SIZE) out[i] = multiply_add(out[i], matrix.at[SIZE - 1][i], in[SIZE - 1]);
    }
#pragma GCC unroll 4
    for (int j = HAS_ZERO<SIZE>; j < SIZE - 1; j += 2) {
      const Vec sum = in[j] + in[j + 1], difference = in[j] - in[j + 1];
#pragma GCC unroll 8
      for (int i = 0; i < OUT; ++i)
        out[i] = multiply_add(out[i], matrix.at[j][i], (i % 2 == 0) != NEGATED ? sum : difference);
    }
  }
};

// The phases of R taps with stride S, which share SIZE points. Along one dimension, the WINDOW products of all phases
// are stored one after another, and so are the FILTERS values of the transformed filter. The last LATE phases have one
// tap fewer, and one product and one value fewer. A phase of a single tap has one value for all points, the tap itself:
// the division by the spread is then part of the transform of x.
template <int M, int R, int S>
struct Phases {
  static constexpr int STRIDE = S, TILE = M, TAPS = (R + S - 1) / S, SIZE = M + TAPS - 1, LATE = S * TAPS - R;
  static constexpr int WINDOW = S * (M - 1) + R;
  static constexpr int taps(int phase) { return TAPS - (phase >= S - LATE); }
  static constexpr int points(int phase) { return SIZE - (phase >= S - LATE); }
  static constexpr bool is_single(int phase) { return phase >= S - LATE && taps(phase) == 1; }
  static constexpr int filters(int phase) { return is_single(phase) ? 1 : points(phase); }

  struct Tables {
    int first_product[S + 1] = {}, first_filter[S + 1] = {};
    int point_of[WINDOW] = {}, filter_of[WINDOW] = {};  // by product
  };
  static constexpr Tables make_tables() {
    Tables t;
    for (int p = 0; p < S; ++p) {
      for (int i = 0; i < points(p); ++i) {
        t.point_of[t.first_product[p] + i] = i;
        t.filter_of[t.first_product[p] + i] = t.first_filter[p] + (is_single(p) ? 0 : i);
      }
      t.first_product[p + 1] = t.first_product[p] + points(p);
      t.first_filter[p + 1] = t.first_filter[p] + filters(p);
    }
    return t;
  }
  static constexpr Tables tables = make_tables();
  static constexpr int FILTERS = tables.first_filter[S];
};

// Call body(phase) with an integral constant for each phase.
template <class Body, int... PHASES>
INLINE void for_phases(std::integer_sequence<int, PHASES...>, Body body) {
  (body(std::integral_constant<int, PHASES>{}), ...);
}
template <int S, class Body>
INLINE void for_phases(Body body) {
  for_phases(std::make_integer_sequence<int, S>{}, body);
}

template <class Of>
struct ToProducts {  // B^T of all phases, of a window of x
  static constexpr int IN = Of::WINDOW, OUT = Of::WINDOW;
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) {
    for_phases<Of::STRIDE>([&](auto phase) INLINE_LAMBDA {
      constexpr int p = phase.value, COUNT = Of::points(p);
      Vec part[COUNT];
#pragma GCC unroll 8
      for (int i = 0; i < COUNT; ++i) part[i] = in[Of::STRIDE * i + p];
      ToPointsFromData<Of::SIZE, COUNT, Of::is_single(p)>::apply(part, out + Of::tables.first_product[p]);
    });
  }
};

template <class Of>
struct FromProducts {  // A^T of all phases, to a tile of dx, with the filter turned: the last phase comes first
  static constexpr int IN = Of::WINDOW, OUT = Of::STRIDE * Of::TILE;
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) {
    for_phases<Of::STRIDE>([&](auto phase) INLINE_LAMBDA {
      constexpr int p = phase.value;
      Vec part[Of::TILE];
      FromPoints<Of::SIZE, Of::points(p), Of::TILE, Of::is_single(p)>::apply(in + Of::tables.first_product[p], part);
#pragma GCC unroll 8
      for (int i = 0; i < Of::TILE; ++i) out[Of::STRIDE * (i + 1) - 1 - p] = part[i];
    });
  }
};

template <class Of>
struct ToFilters {  // G of all phases
  static constexpr int IN = Of::STRIDE * Of::TAPS - Of::LATE, OUT = Of::FILTERS;
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) {
    for_phases<Of::STRIDE>([&](auto phase) INLINE_LAMBDA {
      constexpr int p = phase.value, TAPS = Of::taps(p);
      Vec* const to = out + Of::tables.first_filter[p];
      if constexpr (Of::is_single(p)) {
        to[0] = in[p];
      } else {
        Vec part[TAPS];
#pragma GCC unroll 8
        for (int i = 0; i < TAPS; ++i) part[i] = in[Of::STRIDE * i + p];
        ToPoints<Of::SIZE, Of::points(p), TAPS, true>::apply(part, to);
      }
    });
  }
};

template <class Of>
struct FromFilters {  // G^T of all phases
  static constexpr int IN = Of::FILTERS, OUT = Of::STRIDE * Of::TAPS - Of::LATE;
  static INLINE_MEMBER void apply(const Vec* in, Vec* out) {
    for_phases<Of::STRIDE>([&](auto phase) INLINE_LAMBDA {
      constexpr int p = phase.value, TAPS = Of::taps(p);
      const Vec* const from = in + Of::tables.first_filter[p];
      if constexpr (Of::is_single(p)) {
        out[p] = from[0];
      } else {
        Vec part[TAPS];
        FromPoints<Of::SIZE, Of::points(p), TAPS, true>::apply(from, part);
#pragma GCC unroll 8
        for (int i = 0; i < TAPS; ++i) out[Of::STRIDE * i + p] = part[i];
      }
    });
  }
};

// Apply Map along both dimensions. Vector (i, j) of the source is at from[i * from_row + j * from_column], likewise
// that of the result; `offset` is added to each vector of the result.
template <class Map>
static inline void transform(const float* from, ptrdiff_t from_row, ptrdiff_t from_column, float* to, ptrdiff_t to_row,
                             ptrdiff_t to_column, Vec offset = Vec{}) {
  Vec half[Map::IN][Map::OUT];
#pragma GCC unroll 16
  for (int i = 0; i < Map::IN; ++i) {
    Vec in[Map::IN];
#pragma GCC unroll 16
    for (int j = 0; j < Map::IN; ++j) in[j] = load(from + i * from_row + j * from_column);
    Map::apply(in, half[i]);
  }
#pragma GCC unroll 16
  for (int j = 0; j < Map::OUT; ++j) {
    Vec in[Map::IN], out[Map::OUT];
#pragma GCC unroll 16
    for (int i = 0; i < Map::IN; ++i) in[i] = half[i][j];
    Map::apply(in, out);
#pragma GCC unroll 16
    for (int i = 0; i < Map::OUT; ++i) store(to + i * to_row + j * to_column, out[i] + offset);
  }
}

}  // namespace winograd
