// Sums, products and activations of rows.
#pragma once

#include "common/functions.h"
#include "program/step.h"

namespace program {

// other: of each pixel, or one number for each channel (stride_w == 0) of a sample.
template <class T, int64_t FUNCTION>
void elementwise(const Step& step, char* const* bases, int threads) {
  const View &out = step.out, &other = step.other;
  const Rows<T> to(out, bases), from(step.x, bases), second(other, bases);
  const bool is_repeated = other.c && other.stride_w == 0;
  const int64_t size = is_repeated ? out.c : out.c * out.w, repeats = is_repeated ? out.w : 1;
  const float factor = float(step.values[0]), addend = float(step.values[1]);
  const bool is_scaled = factor != 1 || addend != 0;
  each_row(out, threads, [&](int64_t n, int64_t h) {
    const T *x = from.at(n, h), *beside = other.c ? second.at(n, h) : nullptr;
    T* y = to.at(n, h);
    for (int64_t repeat = 0; repeat < repeats; ++repeat, x += size, y += size)
      for (int64_t i = 0; i < size; i += VL) {
        const int count = int(std::min<int64_t>(size - i, VL));
        Vec value = load_first(x + i, count);
        if (step.operation == ADD) value += load_first(beside + i, count);
        if (step.operation == MULTIPLY) value *= load_first(beside + i, count);
        if (is_scaled && FUNCTION != LEAKY_RELU) value = value * factor + addend;
        store_first(y + i, computed<FUNCTION>(value, factor), count);
      }
  });
}

template <class T>
void elementwise(const Step& step, char* const* bases, int threads) {
  with_function(step.numbers[0], [&](auto function) { elementwise<T, function()>(step, bases, threads); });
}

}  // namespace program
