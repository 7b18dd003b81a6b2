// Pooling and resizing of rows.
#pragma once

#include "program/step.h"

namespace program {

// top: the row of x at which the window of the first row of out begins, which may be negative; left likewise. For
// averages, height: how many rows of the image there are from row 0 of x on; divisor: COUNTS_PADDING, COUNTS_IMAGE, or
// the divisor itself.
struct Pooling {
  int64_t kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w, top, left, height, pad_h, pad_w, divisor;
};

constexpr int64_t COUNTS_PADDING = 0, COUNTS_IMAGE = -1;

// The taps of a window at `first` that are among `size` rows or columns.
struct Taps {
  int64_t start, stop;

  Taps(int64_t first, int64_t taps, int64_t dilation, int64_t size) : start(0), stop(taps) {
    while (start < stop && first + start * dilation < 0) ++start;
    while (stop > start && first + (stop - 1) * dilation >= size) --stop;
  }
};

template <class T, class Start, class Take, class Finish>
INLINE void pool(const View& out, const View& x, const Pooling& of, char* const* bases, int threads, Start start,
                 Take take, Finish finish) {
  const Rows<T> to(out, bases), from(x, bases);
  each_row(out, threads, [&](int64_t n, int64_t h) {
    const int64_t top = of.top + h * of.stride_h;
    const Taps rows(top, of.kernel_h, of.dilation_h, x.h);
    T* y = to.at(n, h);
    for (int64_t w = 0; w < out.w; ++w, y += out.c) {
      const int64_t left = of.left + w * of.stride_w;
      const Taps columns(left, of.kernel_w, of.dilation_w, x.w);
      for (int64_t c = 0; c < out.c; c += VL) {
        const int count = int(std::min<int64_t>(out.c - c, VL));
        Vec value = start();
        for (int64_t r = rows.start; r < rows.stop; ++r) {
          const T* read = from.at(n, top + r * of.dilation_h) + left * x.c + c;
          Vec of_row = start();  // sums of sums, which are more precise
          for (int64_t s = columns.start; s < columns.stop; ++s)
            of_row = take(of_row, load_first(read + s * of.dilation_w * x.c, count));
          value = take(value, of_row);
        }
        store_first(y + c, finish(value, top, left, rows, columns), count);
      }
    }
  });
}

template <class T>
void max_pool(const Step& step, char* const* bases, int threads) {
  Pooling of;
  std::memcpy(&of, step.numbers, sizeof of);
  pool<T>(
      step.out, step.x, of, bases, threads,
      []() INLINE_LAMBDA { return broadcast(-std::numeric_limits<float>::infinity()); },
      [](Vec most, Vec value) INLINE_LAMBDA { return ((value > most) | (value != value)) ? value : most; },
      [](Vec most, int64_t, int64_t, const Taps&, const Taps&) INLINE_LAMBDA { return most; });
}

// The windows of an average are cut off where the padding ends, as in torch; x has all rows that they read.
template <class T>
void average_pool(const Step& step, char* const* bases, int threads) {
  Pooling of;
  std::memcpy(&of, step.numbers, sizeof of);
  const auto counted = [](int64_t first, int64_t taps, int64_t size, int64_t pad) INLINE_LAMBDA {
    return std::min(first + taps, size + pad) - first;
  };
  pool<T>(
      step.out, step.x, of, bases, threads, []() INLINE_LAMBDA { return Vec{}; },
      [](Vec sum, Vec value) INLINE_LAMBDA { return sum + value; },
      [&](Vec sum, int64_t top, int64_t left, const Taps& rows, const Taps& columns) INLINE_LAMBDA {
        int64_t divisor = of.divisor;
        if (divisor == COUNTS_PADDING)
          divisor = counted(top, of.kernel_h, of.height, of.pad_h) * counted(left, of.kernel_w, step.x.w, of.pad_w);
        if (divisor == COUNTS_IMAGE) divisor = (rows.stop - rows.start) * (columns.stop - columns.start);
        return sum / float(divisor);
      });
}

// For each row of out the rows of x above and below it and the weight of the latter; for each column likewise.
struct Resizing {
  const int64_t *above, *below;
  const float* weights_h;
  const int64_t *left, *right;
  const float* weights_w;
};

template <class T>
void resize(const Step& step, char* const* bases, int threads) {
  const View &out = step.out, &x = step.x;
  Resizing of;
  std::memcpy(&of, step.tables, sizeof of);
  const Rows<T> to(out, bases), from(x, bases);
  const int64_t c = out.c;
  const bool is_bilinear = step.numbers[0];
  each_row(out, threads, [&](int64_t n, int64_t h) {
    const T *above = from.at(n, of.above[h]), *below = from.at(n, of.below[h]);
    T* y = to.at(n, h);
    for (int64_t w = 0; w < out.w; ++w, y += c) {
      const int64_t left = of.left[w] * c, right = of.right[w] * c;
      if (!is_bilinear) {
        std::memcpy(y, above + left, c * sizeof(T));
        continue;
      }
      const float weight_h = of.weights_h[h], weight_w = of.weights_w[w];
      for (int64_t i = 0; i < c; i += VL) {
        const int count = int(std::min<int64_t>(c - i, VL));
        const auto between = [&](const T* row) INLINE_LAMBDA {
          return load_first(row + left + i, count) * (1 - weight_w) + load_first(row + right + i, count) * weight_w;
        };
        store_first(y + i, between(above) * (1 - weight_h) + between(below) * weight_h, count);
      }
    }
  });
}

}  // namespace program
