// The inner loops over pixels: a vector holds VL neighbouring channels of one pixel, read in place.
//
// A tile is TILE neighbouring outputs of a row. Each input is loaded once and multiplied, for all outputs of the tile,
// by the elements of one filter row, which stay in registers. Images are not padded: taps outside the image are
// skipped, by the range of filter rows and the range of input columns.
#pragma once

#include "common/epilogue.h"

namespace depthwise {

constexpr int TILE = 7;  // with a filter row of 7 and an input: 15 registers; divides image sizes 224 / 2^k

// The input of a tile, relative to output 0; distances in floats.
struct TileInput {
  const float* data;            // the input of the first tap, which may be outside the image
  ptrdiff_t row, pixel, plane;  // to the next filter row, pixel, and summed channel
  int planes;
  int first_row, last_row;  // filter rows whose inputs are in the image
  int first, last;          // pixels that are in the image, counted from `data`
};

// Filter elements of one phase, or their gradients: [plane][column][row][VL] for each block of channels.
template <class Float>
struct TileFilter {
  Float* data;
  ptrdiff_t block;
  int rows, columns;
  int stride, step;  // pixels between outputs, and between filter columns

  ptrdiff_t plane() const { return ptrdiff_t(rows) * columns * VL; }
  ptrdiff_t column() const { return ptrdiff_t(rows) * VL; }
};

// Outputs, or their gradients; blocks of channels are contiguous.
template <class Float>
struct TileOutput {
  Float* data;
  ptrdiff_t pixel;
};

// Compute a tile for some blocks of channels: bias, products, epilogue. bias and epilogue may be null.
struct ComputeTile {
  typedef void (*Function)(TileInput in, TileFilter<const float> filter, const float* bias, const Epilogue* epilogue,
                           TileOutput<float> out, int blocks);
};

// Add the products of x and a tile of dy to sums.
struct AddProductsOfTile {
  typedef void (*Function)(TileInput in, TileFilter<float> sums, TileOutput<const float> dy, int blocks);
};

// The loops of one column phase: for tiles inside the image, for those of which at most half a filter row of inputs is
// outside it at either end, for others, and for single outputs.
template <class Loops>
struct TileLoops {
  typename Loops::Function inside, near, anywhere, single;

  TileLoops(int taps, int stride, int step);

  // outside: the greater number of a tile's inputs outside the image at one end.
  typename Loops::Function of(bool is_tile, int outside, int taps) const {
    return !is_tile ? single : outside <= 0 ? inside : outside <= taps / 2 ? near : anywhere;
  }
};

extern template struct TileLoops<ComputeTile>;
extern template struct TileLoops<AddProductsOfTile>;

}  // namespace depthwise
