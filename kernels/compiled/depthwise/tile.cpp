#include "depthwise/tile.h"

#include "common/matmul.h"

namespace depthwise {

// Add all columns of TAPS filter rows whose input rows are neighbours.
template <int TAPS, int STRIDE, int ROWS, int VECTORS>
INLINE void add_neighbouring_rows(const DepthwiseTaps& taps, const float* in, ptrdiff_t row, ptrdiff_t vector,
                                  const float* w, Vec (&sum)[ROWS][VECTORS]) {
  const ptrdiff_t next = ptrdiff_t(taps.rows) * VL;
  for (int s = 0; s < taps.count_columns; ++s, w += next) {
    const float* from = in + taps.columns[s];
#pragma GCC unroll 32
    for (int i = 0; i < (ROWS - 1) * STRIDE + TAPS; ++i, from += row) {
      Vec x[VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) x[j] = load(from + j * vector);
#pragma GCC unroll 8
      for (int o = 0; o < ROWS; ++o) {
        const int t = i - o * STRIDE;
        if (t < 0 || t >= TAPS) continue;
        const Vec element = broadcast(w[ptrdiff_t(t) * VL]);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) sum[o][j] += x[j] * element;
      }
    }
  }
}

// Add one filter row, with any stride.
template <int ROWS, int VECTORS>
INLINE void add_row(const DepthwiseTaps& taps, const float* in, ptrdiff_t row, ptrdiff_t vector, const float* w,
                    Vec (&sum)[ROWS][VECTORS]) {
  const ptrdiff_t next = ptrdiff_t(taps.rows) * VL, down = taps.stride * row;
  for (int s = 0; s < taps.count_columns; ++s, w += next) {
    const Vec element = broadcast(*w);
    const float* from = in + taps.columns[s];
#pragma GCC unroll 8
    for (int o = 0; o < ROWS; ++o, from += down)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) sum[o][j] += load(from + j * vector) * element;
  }
}

template <int ROWS, int VECTORS>
INLINE int add_all_neighbouring_rows(const DepthwiseTaps& taps, const float* in, ptrdiff_t row, ptrdiff_t vector,
                                     const float* w, Vec (&sum)[ROWS][VECTORS]) {
  int r = 0;
  const auto from = [&] { return in + r * row; };
  const auto elements = [&] { return w + ptrdiff_t(r) * VL; };
  for (; r + 7 <= taps.rows; r += 7) add_neighbouring_rows<7, 1>(taps, from(), row, vector, elements(), sum);
  for (; r + 5 <= taps.rows; r += 5) add_neighbouring_rows<5, 1>(taps, from(), row, vector, elements(), sum);
  for (; r + 3 <= taps.rows; r += 3) add_neighbouring_rows<3, 1>(taps, from(), row, vector, elements(), sum);
  return r;
}

// Compute ROWS x VECTORS vectors of outputs, starting from `bias`. in: the input of the first one. TAPS: the number of
// filter rows if their input rows are neighbours, otherwise AT_RUN_TIME.
template <int TAPS, int STRIDE, int ROWS, int VECTORS>
INLINE void depthwise_tile(const DepthwiseTaps& taps, const DepthwiseInput& in, ptrdiff_t vector, const float* w,
                           Vec bias, Vec (&sum)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int o = 0; o < ROWS; ++o)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sum[o][j] = bias;
  const ptrdiff_t elements = ptrdiff_t(taps.rows) * taps.count_columns * VL;
  for (int plane = 0; plane < taps.planes; ++plane, w += elements) {
    const float* from = in.data + plane * in.plane;
    if constexpr (TAPS != AT_RUN_TIME) {
      add_neighbouring_rows<TAPS, STRIDE>(taps, from, in.row, vector, w, sum);
    } else {
      int r = 0;
      if (taps.row_step == 1 && taps.stride == 1) r = add_all_neighbouring_rows(taps, from, in.row, vector, w, sum);
      for (; r < taps.rows; ++r)
        add_row(taps, from + r * ptrdiff_t(taps.row_step) * in.row, in.row, vector, w + ptrdiff_t(r) * VL, sum);
    }
  }
}

// Store a tile whose vectors are `vector` floats apart.
template <int ROWS, int VECTORS>
INLINE void store_tile(const DepthwiseOutput& out, float* to, ptrdiff_t vector, bool whole,
                       const Vec (&sum)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int o = 0; o < ROWS; ++o, to += out.row)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) {
      float* at = to + j * vector;
      if (whole)
        store(at, sum[o][j]);
      else
        store_first(at, sum[o][j], int(std::min<ptrdiff_t>(out.lanes, out.end - at)));
    }
}

// Compute rows x columns outputs in tiles; the last tiles overlap the ones before. columns: at least a tile's width, or
// less than one vector: then the next row overwrites the excess of a row, and the last row is cut off at the output's
// end. Arguments are copies, so that the compiler knows that no store changes them.
template <int TAPS, int STRIDE, int ROWS, int VECTORS>
static void depthwise_tiles(DepthwiseTaps taps, DepthwiseInput in, int spacing, const float* w, Vec bias,
                            DepthwiseOutput out, int rows, int columns) {
  const int width = (VECTORS - 1) * spacing + VL, last = std::max(0, columns - width);
  const ptrdiff_t vector = spacing * in.column, out_vector = spacing * out.column;
  const bool whole = out.lanes == VL && columns >= VL;
  DepthwiseInput from = in;
  for (int i = 0; i < rows; i += ROWS) {
    const ptrdiff_t top = std::min(i, rows - ROWS);
    const float* row = in.data + top * taps.stride * in.row;
    float* to = out.data + top * out.row;
    for (int j = 0; j < columns; j += width) {
      const ptrdiff_t left = std::min(j, last);
      from.data = row + left * in.column;
      Vec sum[ROWS][VECTORS];
      depthwise_tile<TAPS, STRIDE>(taps, from, vector, w, bias, sum);
      store_tile(out, to + left * out.column, out_vector, whole, sum);
    }
  }
}

constexpr int WIDE_ROWS = REGISTERS == 32 ? 7 : 4;  // of tiles that are two vectors wide

template <int TAPS, int STRIDE>
static void depthwise_outputs(const DepthwiseTaps& taps, const DepthwiseInput& in, const float* w, Vec bias,
                              const DepthwiseOutput& out, int rows, int columns) {
  if (columns > VL) {
    const int spacing = std::min(VL, columns - VL);
    if (rows >= WIDE_ROWS)
      depthwise_tiles<TAPS, STRIDE, WIDE_ROWS, 2>(taps, in, spacing, w, bias, out, rows, columns);
    else
      depthwise_tiles<TAPS, STRIDE, 1, 2>(taps, in, spacing, w, bias, out, rows, columns);
  } else if (rows >= 7) {
    depthwise_tiles<TAPS, STRIDE, 7, 1>(taps, in, VL, w, bias, out, rows, columns);
  } else {
    depthwise_tiles<TAPS, STRIDE, 1, 1>(taps, in, VL, w, bias, out, rows, columns);
  }
}

void depthwise_outputs(const DepthwiseTaps& taps, const DepthwiseInput& in, const float* w, Vec bias,
                       const DepthwiseOutput& out, int rows, int columns) {
  const auto with = [&](auto run) { run(taps, in, w, bias, out, rows, columns); };
  const int known = taps.row_step == 1 && taps.stride <= 2 ? taps.rows : AT_RUN_TIME;
  if (taps.stride == 1) {
    if (known == 1) return with(depthwise_outputs<1, 1>);
    if (known == 2) return with(depthwise_outputs<2, 1>);
    if (known == 3) return with(depthwise_outputs<3, 1>);
    if (known == 4) return with(depthwise_outputs<4, 1>);
    if (known == 5) return with(depthwise_outputs<5, 1>);
    if (known == 7) return with(depthwise_outputs<7, 1>);
  } else {
    if (known == 3) return with(depthwise_outputs<3, 2>);
    if (known == 5) return with(depthwise_outputs<5, 2>);
    if (known == 7) return with(depthwise_outputs<7, 2>);
  }
  with(depthwise_outputs<AT_RUN_TIME, 1>);
}

// ---- the filter's gradient -----------------------------------------------------------------------------------------

template <bool MASKED>
INLINE Vec load_masked(const float* from, Lanes mask) {
  return MASKED ? (Vec)((Lanes)load(from) & mask) : load(from);
}

// Add x * dy, over ROWS rows of dy from row `first` on, to sum[t][s].
template <bool MASKED, int TAPS, int COLUMNS, int STRIDE, int ROWS>
INLINE void add_products_of_rows(const float* x, ptrdiff_t row, ptrdiff_t vector, const ptrdiff_t* columns,
                                 const DepthwiseGradient& dy, int first, Vec (&sum)[TAPS][COLUMNS]) {
  const float* gradients = dy.data + first * dy.row;
  x += first * ptrdiff_t(STRIDE) * row;
  for (int v = 0; v < dy.vectors; ++v, x += vector, gradients += dy.vector) {
    Vec gradient[ROWS];
#pragma GCC unroll 8
    for (int o = 0; o < ROWS; ++o) gradient[o] = load_masked<MASKED>(gradients + o * dy.row, dy.mask);
    const float* from = x;
#pragma GCC unroll 32
    for (int i = 0; i < (ROWS - 1) * STRIDE + TAPS; ++i, from += row)
#pragma GCC unroll 4
      for (int s = 0; s < COLUMNS; ++s) {
        const Vec value = load_masked<MASKED>(from + columns[s], dy.mask);
#pragma GCC unroll 8
        for (int o = 0; o < ROWS; ++o) {
          const int t = i - o * STRIDE;
          if (t >= 0 && t < TAPS) sum[t][s] += value * gradient[o];
        }
      }
  }
}

template <int TAPS, int COLUMNS>
INLINE void add_to(float* sums, int rows, Vec (&sum)[TAPS][COLUMNS]) {
#pragma GCC unroll 4
  for (int s = 0; s < COLUMNS; ++s)
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) {
      float* to = sums + (ptrdiff_t(s) * rows + t) * VL;
      store(to, load(to) + sum[t][s]);
    }
}

// Add the products of TAPS neighbouring filter rows and COLUMNS filter columns.
template <bool MASKED, int TAPS, int COLUMNS, int STRIDE>
static void add_products(const DepthwiseTaps& taps, const float* x, ptrdiff_t row, ptrdiff_t vector,
                         const ptrdiff_t* columns, DepthwiseGradient dy, float* sums) {
  Vec sum[TAPS][COLUMNS] = {};
  int o = 0;
  if constexpr (TAPS * COLUMNS <= 7)  // with more, there are too few registers
    for (; o + 7 <= dy.rows; o += 7)
      add_products_of_rows<MASKED, TAPS, COLUMNS, STRIDE, 7>(x, row, vector, columns, dy, o, sum);
  for (; o + 4 <= dy.rows; o += 4)
    add_products_of_rows<MASKED, TAPS, COLUMNS, STRIDE, 4>(x, row, vector, columns, dy, o, sum);
  for (; o + 2 <= dy.rows; o += 2)
    add_products_of_rows<MASKED, TAPS, COLUMNS, STRIDE, 2>(x, row, vector, columns, dy, o, sum);
  for (; o < dy.rows; ++o) add_products_of_rows<MASKED, TAPS, COLUMNS, STRIDE, 1>(x, row, vector, columns, dy, o, sum);
  add_to(sums, taps.rows, sum);
}

// Add the products of all columns of TAPS neighbouring filter rows, as many columns at a time as fit the registers.
template <bool MASKED, int TAPS, int STRIDE>
INLINE void add_products_of_columns(const DepthwiseTaps& taps, const float* x, ptrdiff_t row, ptrdiff_t vector,
                                    const DepthwiseGradient& dy, float* sums) {
  constexpr int COLUMNS = TAPS == 3 ? 3 : TAPS == 5 ? 2 : 1;
  int s = 0;
  const auto of_column = [&] { return sums + ptrdiff_t(s) * taps.rows * VL; };
  for (; s + COLUMNS <= taps.count_columns; s += COLUMNS)
    add_products<MASKED, TAPS, COLUMNS, STRIDE>(taps, x, row, vector, taps.columns + s, dy, of_column());
  for (; s < taps.count_columns; ++s)
    add_products<MASKED, TAPS, 1, STRIDE>(taps, x, row, vector, taps.columns + s, dy, of_column());
}

template <bool MASKED, int STRIDE>
INLINE int add_products_of_neighbouring_rows(const DepthwiseTaps& taps, const float* x, ptrdiff_t row, ptrdiff_t vector,
                                             const DepthwiseGradient& dy, float* sums) {
  int r = 0;
  const auto of_row = [&] { return sums + ptrdiff_t(r) * VL; };
  for (; r + 7 <= taps.rows; r += 7)
    add_products_of_columns<MASKED, 7, STRIDE>(taps, x + r * row, row, vector, dy, of_row());
  for (; r + 5 <= taps.rows; r += 5)
    add_products_of_columns<MASKED, 5, STRIDE>(taps, x + r * row, row, vector, dy, of_row());
  for (; r + 3 <= taps.rows; r += 3)
    add_products_of_columns<MASKED, 3, STRIDE>(taps, x + r * row, row, vector, dy, of_row());
  return r;
}

template <bool MASKED>
void depthwise_products(const DepthwiseTaps& taps, const float* x, ptrdiff_t row, ptrdiff_t vector,
                        const DepthwiseGradient& dy, float* sums) {
  int r = 0;
  if (taps.row_step == 1 && taps.stride == 1)
    r = add_products_of_neighbouring_rows<MASKED, 1>(taps, x, row, vector, dy, sums);
  else if (taps.row_step == 1 && taps.stride == 2)
    r = add_products_of_neighbouring_rows<MASKED, 2>(taps, x, row, vector, dy, sums);
  for (; r < taps.rows; ++r)  // the rows of x that this filter row reads, as if they were neighbours
    add_products_of_columns<MASKED, 1, 1>(taps, x + r * ptrdiff_t(taps.row_step) * row, taps.stride * row, vector, dy,
                                          sums + ptrdiff_t(r) * VL);
}

template void depthwise_products<false>(const DepthwiseTaps&, const float*, ptrdiff_t, ptrdiff_t,
                                        const DepthwiseGradient&, float*);
template void depthwise_products<true>(const DepthwiseTaps&, const float*, ptrdiff_t, ptrdiff_t,
                                       const DepthwiseGradient&, float*);

}  // namespace depthwise
