// Statistics of each pixel over its channels, which are last: a pixel is read again while it is in the caches.
#pragma once

#include <cmath>

#include "normalization/forward.h"

namespace normalization {

inline Line pixel_line(const Norm& norm, int64_t pixel) {
  return {pixel, 0, pixel * norm.c, pixel * mask_bytes(norm.c), norm.c, norm.c, 1};
}

// Call body(pixel, part) for all pixels, and then end(part).
template <class Body, class End>
void each_pixel(const Norm& norm, Body body, End end) {
  const int64_t pixels = norm.n * norm.pixels;
  const int threads = int(norm.threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int part = 0; part < threads; ++part) {
    for (int64_t i = part * pixels / threads; i < (part + 1) * pixels / threads; ++i) body(i, part);
    end(part);
  }
}

// In two readings, the first of x - shift, where the shift is the first channel.
template <class T>
void moments_of_pixels(const Norm& norm, const Operands& operands) {
  const auto end = [](int) {};
  each_pixel(norm, [&](int64_t pixel, int) {
    const T* const x = operands.x.as<T>() + pixel * norm.c;
    const Vec shift = broadcast(value_of(*x));
    Vec sum = {}, squares = {};
    each_vector(norm.c, norm.c, [&](auto, ptrdiff_t i, ptrdiff_t, int lanes, ptrdiff_t) INLINE_LAMBDA {
      sum += first_of(load_first(x + i, lanes) - shift, lanes);
    });
    const float mean = float(double(shift[0]) + total(sum) / double(norm.c));
    each_vector(norm.c, norm.c, [&](auto, ptrdiff_t i, ptrdiff_t, int lanes, ptrdiff_t) INLINE_LAMBDA {
      const Vec distance = first_of(load_first(x + i, lanes) - mean, lanes);
      squares += distance * distance;
    });
    operands.mean.as<float>()[pixel] = mean;
    operands.inverse.as<float>()[pixel] = inverse_of(total(squares) / double(norm.c), norm.eps);
  }, end);
}

// A pixel's scalars, and the parameters of channels.
class PixelCoefficients {
 public:
  PixelCoefficients(const Norm& norm, const Operands& operands)
      : weight_({operands.weight.data, Element(norm.parameter_element)}, norm.c),
        bias_({operands.bias.data, Element(norm.parameter_element)}, norm.c) {}

  INLINE_MEMBER Vec weight(ptrdiff_t i, int lanes) const {
    return weight_.data() ? load_first(weight_.data() + i, lanes) : broadcast(1);
  }
  INLINE_MEMBER Vec bias(ptrdiff_t i, int lanes) const {
    return bias_.data() ? load_first(bias_.data() + i, lanes) : Vec{};
  }

 private:
  AsFloats weight_, bias_;
};

template <class T, class Function>
void normalize_pixels(const Norm& norm, const Operands& operands, Function function) {
  const PixelCoefficients with(norm, operands);
  const auto end = [](int) { end_streams(); };
  each_pixel(norm, [&](int64_t pixel, int) {
    const Line line = pixel_line(norm, pixel);
    const T* const x = operands.x.as<T>() + line.first;
    const T* const added = operands.added ? operands.added.as<T>() + line.first : nullptr;
    T* const y = operands.y.as<T>() + line.first;
    uint8_t* const mask = operands.mask ? operands.mask.as<uint8_t>() + line.mask : nullptr;
    const float mean = operands.mean.as<float>()[pixel], inverse = operands.inverse.as<float>()[pixel];
    const bool is_streamed = streams(line, y, operands.y.bytes);
    each_vector(norm.c, norm.c, [&](auto, ptrdiff_t i, ptrdiff_t, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
      Vec z = (load_first(x + i, lanes) - mean) * inverse * with.weight(i, lanes) + with.bias(i, lanes);
      if (added) z += load_first(added + i, lanes);
      if (mask) store_bits(mask + bits, function.passes(z));
      write(y + i, function.value(z), lanes, is_streamed);
    });
  }, end);
}

// sums: of each part, in double, the gradients of the weight and the bias.
template <class T, class Function>
void differentiate_pixels(const Norm& norm, const Operands& operands, Function function, Parts<double>& sums) {
  constexpr int64_t MOST = 64;  // pixels whose sums are in float
  const PixelCoefficients with(norm, operands);
  const int64_t padded = ceil_divide(norm.c, LINE_FLOATS) * LINE_FLOATS;
  Parts<float> floats(norm.threads, 2 * padded);
  const auto end = [&](int part) {
    flush(floats.of(part), 2 * padded, sums.of(part));
    end_streams();
  };
  each_pixel(norm, [&](int64_t pixel, int part) {
    const Line line = pixel_line(norm, pixel);
    const Read<T> read(line, operands);
    const float mean = operands.mean.as<float>()[pixel], inverse = operands.inverse.as<float>()[pixel];
    float *const of_weight = floats.of(part), *const of_bias = of_weight + padded;
    const auto terms_at = [&](ptrdiff_t i, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
      const Vec distance = load_first(read.x + i, lanes) - mean;
      const Vec z = distance * inverse * with.weight(i, lanes) + with.bias(i, lanes);
      return Terms{distance, function.gradient(load_first(read.dy + i, lanes), z,
                                               read.mask ? load_bits(read.mask + bits) : Lanes{})};
    };
    Vec sum = {}, product = {};
    each_vector(norm.c, norm.c, [&](auto, ptrdiff_t i, ptrdiff_t, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
      const Terms terms = terms_at(i, lanes, bits);
      const Vec weighted = first_of(terms.dz * with.weight(i, lanes), lanes);
      sum += weighted;
      product += first_of(weighted * terms.distance, lanes);
      store(of_weight + i, load(of_weight + i) + terms.dz * terms.distance * inverse);
      store(of_bias + i, load(of_bias + i) + terms.dz);
    });
    if (pixel % MOST == 0) flush(floats.of(part), 2 * padded, sums.of(part));
    if (!operands.dx && !operands.dadded) return;
    const double scale = norm.is_fixed ? 0 : double(inverse) / double(norm.c);
    const float offset = float(-scale * total(sum)), slope = float(-scale * inverse * inverse * total(product));
    T* const dx = operands.dx ? operands.dx.as<T>() + pixel * norm.c : nullptr;
    T* const dadded = operands.dadded ? operands.dadded.as<T>() + pixel * norm.c : nullptr;
    const bool is_streamed = streams(line, dx ? dx : dadded, operands.x.bytes);
    each_vector(norm.c, norm.c, [&](auto, ptrdiff_t i, ptrdiff_t, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
      const Terms terms = terms_at(i, lanes, bits);
      if (dadded) write(dadded + i, terms.dz, lanes, is_streamed);
      const Vec value = terms.dz * with.weight(i, lanes) * inverse + offset;
      if (dx) write(dx + i, terms.distance * slope + value, lanes, is_streamed);
    });
  }, end);
}

}  // namespace normalization
