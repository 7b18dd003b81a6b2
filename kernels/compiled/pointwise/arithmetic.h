// The arithmetic of 1x1 convolutions: register tiles of one kind of Step, compiled in a file of its own (singles.cpp,
// pairs.cpp).
#pragma once

#include "common/pairs.h"

namespace pointwise {

struct Product;
struct ProductTask;
struct Results;
struct FilterGradient;
struct GradientTask;

template <class Step>
struct Arithmetic {
  // Add the products of channels [first_step, first_step + steps) of the pixels of a task to its results. The rows of a
  // tile are pixels, or channels.
  static void multiply_pixels(const Product& p, const ProductTask& task, int first_step, int steps, const float* packed,
                              const float* bias, float* input, const Results& results);
  static void multiply_channels(const Product& p, const ProductTask& task, int first_step, int steps,
                                const float* packed, const float* bias, float* input, const Results& results);

  // Add a task's chunk of pixels to dw. dy: room for that of dy.
  static void add_outer_products(const FilterGradient& f, const GradientTask& task, const float* x, float* dy,
                                 float* dw);
  static void add_dot_products(const FilterGradient& f, const GradientTask& task, const float* x, float* dy, float* dw);

  // Add pixels [first, first + count) to dw, read in place (FilterGradient::reads_in_place). Only of Singles.
  static void add_rows_in_place(const FilterGradient& f, int64_t first, int count, float* normalized, float* dw);
};

extern template struct Arithmetic<Singles>;
extern template struct Arithmetic<Pairs>;

}  // namespace pointwise
