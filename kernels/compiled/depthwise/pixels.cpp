#include "depthwise/pixels.h"

#include "common/matmul.h"

namespace depthwise {

// Which inputs of a tile may be outside the image: none, up to half a filter row at either end, or any.
enum Border { INSIDE, NEAR, ANYWHERE };

// Call body(input, column of the tile, tap) for all inputs of a tile, with one filter row of TAPS neighbouring taps.
template <int TAPS, int STRIDE, int COLUMNS, Border BORDER, class Body>
INLINE void for_inputs(const TileInput& in, const float* x, Body body) {
  constexpr int INPUTS = (COLUMNS - 1) * STRIDE + TAPS;
#pragma GCC unroll 32
  for (int i = 0; i < INPUTS; ++i, x += in.pixel) {
    if ((BORDER == ANYWHERE || (BORDER == NEAR && i < TAPS / 2)) && i < in.first) continue;
    if ((BORDER == ANYWHERE || (BORDER == NEAR && i >= INPUTS - TAPS / 2)) && i >= in.last) continue;
    const Vec value = load(x);
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; ++j)
      if (i - j * STRIDE >= 0 && i - j * STRIDE < TAPS) body(value, j, i - j * STRIDE);
  }
}

// Do the same for any taps: call body(input, column of the tile) for all inputs of one tap.
template <int COLUMNS, class Body>
INLINE void for_inputs_of_tap(const TileInput& in, const float* x, int tap, int stride, int step, Body body) {
#pragma GCC unroll 8
  for (int j = 0; j < COLUMNS; ++j) {
    const int i = tap * step + j * stride;
    if (i >= in.first && i < in.last) body(load(x + i * in.pixel), j);
  }
}

constexpr bool begins_line(int block) { return block * VL % LINE_FLOATS == 0; }

// Fetch the rows below a tile into L2, which the next row of tiles reads first, and a later tile's outputs: a few lines
// of each pixel are too short a stream for the processor to notice. Memory past the images may be prefetched, but is
// neither read nor written.
template <int STRIDE, int COLUMNS, class Float>
INLINE void prefetch_later_tiles(const TileInput& in, const TileOutput<Float>& out) {
  constexpr int TILES_AHEAD = 2;
  const float* below = in.data + in.last_row * in.row;
#pragma GCC unroll 2
  for (int r = 0; r < STRIDE; ++r, below += in.row)
#pragma GCC unroll 32
    for (int i = 0; i < COLUMNS * STRIDE; ++i) prefetch_later(below + i * in.pixel, VL);
#pragma GCC unroll 8
  for (int j = 0; j < COLUMNS; ++j) prefetch_later(out.data + (TILES_AHEAD * COLUMNS + j) * out.pixel, VL);
}

// ---- forward and backward data -------------------------------------------------------------------------------------

template <int TAPS, int STRIDE, int COLUMNS, Border BORDER>
INLINE void add_filter_row(const TileInput& in, const float* x, const TileFilter<const float>& filter, const float* w,
                           Vec (&sum)[COLUMNS]) {
  if constexpr (TAPS != AT_RUN_TIME) {
    Vec element[TAPS];
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) element[t] = load(w + t * filter.column());
    for_inputs<TAPS, STRIDE, COLUMNS, BORDER>(
        in, x, [&](Vec value, int j, int t) INLINE_LAMBDA { sum[j] += value * element[t]; });
  } else {
    for (int t = 0; t < filter.columns; ++t) {
      const Vec element = load(w + t * filter.column());
      for_inputs_of_tap<COLUMNS>(in, x, t, filter.stride, filter.step,
                                 [&](Vec value, int j) INLINE_LAMBDA { sum[j] += value * element; });
    }
  }
}

// Compute a tile. ROWS: of the filter, all of which are in the image, in one plane; or AT_RUN_TIME.
template <int TAPS, int STRIDE, int COLUMNS, Border BORDER, int ROWS>
INLINE void compute_rows_of_tile(TileInput in, TileFilter<const float> filter, const float* bias,
                                 const Epilogue* epilogue, TileOutput<float> out, int blocks) {
  if constexpr (ROWS != AT_RUN_TIME) filter.rows = ROWS;
  for (int block = 0; block < blocks; ++block) {
    if (begins_line(block)) prefetch_later_tiles<STRIDE, COLUMNS>(in, out);
    Vec sum[COLUMNS];
    const Vec begin = bias ? load(bias + block * VL) : Vec{};
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; ++j) sum[j] = begin;
    if constexpr (ROWS != AT_RUN_TIME) {
      const float* x = in.data;
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r, x += in.row)
        add_filter_row<TAPS, STRIDE, COLUMNS, BORDER>(in, x, filter, filter.data + r * VL, sum);
    } else {
      for (int plane = 0; plane < in.planes; ++plane) {
        const float *x = in.data + plane * in.plane + in.first_row * in.row,
                    *w = filter.data + plane * filter.plane() + in.first_row * VL;
        for (int r = in.first_row; r < in.last_row; ++r, x += in.row, w += VL)
          add_filter_row<TAPS, STRIDE, COLUMNS, BORDER>(in, x, filter, w, sum);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; ++j) {
      float* to = out.data + j * out.pixel;
      store(to, epilogue ? epilogue->of(sum[j], to, VL) : sum[j]);
    }
    in.data += VL;
    filter.data += filter.block;
    out.data += VL;
  }
}

template <int TAPS, int STRIDE, int COLUMNS, Border BORDER>
static void compute_tile(TileInput in, TileFilter<const float> filter, const float* bias, const Epilogue* epilogue,
                         TileOutput<float> out, int blocks) {
  constexpr bool HAS_SQUARE_LOOPS = BORDER != ANYWHERE && (TAPS == 3 || TAPS == 5);
  if constexpr (HAS_SQUARE_LOOPS) {
    if (in.planes == 1 && filter.rows == TAPS && in.last_row - in.first_row == TAPS)
      return compute_rows_of_tile<TAPS, STRIDE, COLUMNS, BORDER, TAPS>(in, filter, bias, epilogue, out, blocks);
  }
  compute_rows_of_tile<TAPS, STRIDE, COLUMNS, BORDER, AT_RUN_TIME>(in, filter, bias, epilogue, out, blocks);
}

// ---- the filter's gradient -----------------------------------------------------------------------------------------

template <int TAPS, int STRIDE, int COLUMNS, Border BORDER>
INLINE void add_to_sums(const TileInput& in, const float* x, const TileFilter<float>& filter, float* sums,
                        const Vec (&dy)[COLUMNS]) {
  if constexpr (TAPS != AT_RUN_TIME) {
    Vec sum[TAPS];
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) sum[t] = load(sums + t * filter.column());
    for_inputs<TAPS, STRIDE, COLUMNS, BORDER>(in, x,
                                              [&](Vec value, int j, int t) INLINE_LAMBDA { sum[t] += value * dy[j]; });
#pragma GCC unroll 8
    for (int t = 0; t < TAPS; ++t) store(sums + t * filter.column(), sum[t]);
  } else {
    for (int t = 0; t < filter.columns; ++t) {
      Vec sum = load(sums + t * filter.column());
      for_inputs_of_tap<COLUMNS>(in, x, t, filter.stride, filter.step,
                                 [&](Vec value, int j) INLINE_LAMBDA { sum += value * dy[j]; });
      store(sums + t * filter.column(), sum);
    }
  }
}

template <int TAPS, int STRIDE, int COLUMNS, Border BORDER>
static void add_products_of_tile(TileInput in, TileFilter<float> sums, TileOutput<const float> dy, int blocks) {
  for (int block = 0; block < blocks; ++block) {
    if (begins_line(block)) prefetch_later_tiles<STRIDE, COLUMNS>(in, dy);
    Vec gradient[COLUMNS];
#pragma GCC unroll 8
    for (int j = 0; j < COLUMNS; ++j) gradient[j] = load(dy.data + j * dy.pixel);
    const float* x = in.data + in.first_row * in.row;
    float* sum = sums.data + in.first_row * VL;
    for (int r = in.first_row; r < in.last_row; ++r, x += in.row, sum += VL)
      add_to_sums<TAPS, STRIDE, COLUMNS, BORDER>(in, x, sums, sum, gradient);
    in.data += VL;
    sums.data += sums.block;
    dy.data += VL;
  }
}

// ---- which loops ---------------------------------------------------------------------------------------------------

template <class Loops>
struct Specialized;

template <>
struct Specialized<ComputeTile> {
  template <int TAPS, int STRIDE, int COLUMNS, Border BORDER>
  static constexpr ComputeTile::Function function = compute_tile<TAPS, STRIDE, COLUMNS, BORDER>;
};

template <>
struct Specialized<AddProductsOfTile> {
  template <int TAPS, int STRIDE, int COLUMNS, Border BORDER>
  static constexpr AddProductsOfTile::Function function = add_products_of_tile<TAPS, STRIDE, COLUMNS, BORDER>;
};

// Return the loops, specialized for filter rows of 3, 5 and 7 taps, and for the shorter rows that strides leave.
template <class Loops, int COLUMNS, Border BORDER>
typename Loops::Function loops_of(int taps, int stride, int step) {
  using Of = Specialized<Loops>;
  if (step == 1 && stride == 1) {
    if (taps == 1) return Of::template function<1, 1, COLUMNS, BORDER>;
    if (taps == 2) return Of::template function<2, 1, COLUMNS, BORDER>;
    if (taps == 3) return Of::template function<3, 1, COLUMNS, BORDER>;
    if (taps == 4) return Of::template function<4, 1, COLUMNS, BORDER>;
    if (taps == 5) return Of::template function<5, 1, COLUMNS, BORDER>;
    if (taps == 7) return Of::template function<7, 1, COLUMNS, BORDER>;
  } else if (step == 1 && stride == 2) {
    if (taps == 3) return Of::template function<3, 2, COLUMNS, BORDER>;
    if (taps == 5) return Of::template function<5, 2, COLUMNS, BORDER>;
    if (taps == 7) return Of::template function<7, 2, COLUMNS, BORDER>;
  }
  return Of::template function<AT_RUN_TIME, 1, COLUMNS, ANYWHERE>;
}

template <class Loops>
TileLoops<Loops>::TileLoops(int taps, int stride, int step)
    : inside(loops_of<Loops, TILE, INSIDE>(taps, stride, step)),
      near(loops_of<Loops, TILE, NEAR>(taps, stride, step)),
      anywhere(loops_of<Loops, TILE, ANYWHERE>(taps, stride, step)),
      single(loops_of<Loops, 1, ANYWHERE>(taps, stride, step)) {}

template struct TileLoops<ComputeTile>;
template struct TileLoops<AddProductsOfTile>;

}  // namespace depthwise
