// Gradients. With dz, what the activation makes of dy, and means over the elements of a set:
//   dbias = sum dz, dweight = sum dz * (x - mean) * inverse, dadded = dz
//   dx = inverse * (dz * weight - mean(dz * weight) - (x - mean) * inverse^2 * mean(dz * weight * (x - mean)))
#pragma once

#include "normalization/pixels.h"

namespace normalization {

template <class T, class Function>
INLINE Terms terms_of(const Read<T>& read, const Constants& with, Function function, ptrdiff_t at, int lanes,
                      ptrdiff_t bits) {
  const Vec distance = load_first(read.x + at, lanes) - with.mean, dy = load_first(read.dy + at, lanes);
  return {distance,
          function.gradient(dy, distance * with.scale + with.bias, read.mask ? load_bits(read.mask + bits) : Lanes{})};
}

// Add the sums of dz, and of dz * (x - mean), of the elements of a line to those of their entries. floats: zeros. kept:
// what keeps dz, or null.
template <class T, class Reading, class Function>
void add_gradients(const Layout& layout, const Reading& reading, const Line& line, const Coefficients& with,
                   Function function, const Operands& operands, T* kept, float* floats, double* sums) {
  const Read<T> read(line, operands);
  float *const sum = floats, *const product = floats + layout.padded();
  Vec of_line{}, product_of_line{};
  if (kept) kept += line.first;
  reading.each_vector(
      layout, line, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
        read.prefetch(at + (periods - 1) * i + periods * reading.width, periods);
        const Constants constants(reading, with, i);
        Vec dz{}, dz_distance{};
#pragma GCC unroll 4
        for (int period = 0; period < decltype(periods)::value; ++period) {
          const ptrdiff_t there = at + period * reading.width;
          const Terms terms = terms_of(read, constants, function, there, lanes, bits + period * reading.bits_of_period);
          if (kept) store_first(kept + there, terms.dz, lanes);
          dz += terms.dz;
          dz_distance += terms.dz * terms.distance;
        }
        dz = first_of(dz, lanes), dz_distance = first_of(dz_distance, lanes);
        if constexpr (Reading::IS_LAST) {
          store(sum + i, load(sum + i) + dz);
          store(product + i, load(product + i) + dz_distance);
        } else {
          of_line += dz;
          product_of_line += dz_distance;
        }
      });
  if constexpr (Reading::IS_LAST) return flush(floats, 2 * layout.padded(), sums);
  sums[line.entry] += total(of_line);
  sums[layout.padded() + line.entry] += total(product_of_line);
}

// Write dx and dz, if there is memory for them.
template <class T, class Reading, class Function>
void differentiate(const Layout& layout, const Reading& reading, const Line& line, const Coefficients& with,
                   Function function, const Operands& operands) {
  const Read<T> read(line, operands);
  T* const dx = operands.dx ? operands.dx.as<T>() + line.first : nullptr;
  T* const dadded = operands.dadded ? operands.dadded.as<T>() + line.first : nullptr;
  const bool is_streamed = streams(line, dx ? dx : dadded, operands.x.bytes);
  reading.each_vector(
      layout, line, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t bits) INLINE_LAMBDA {
        read.prefetch(at + (periods - 1) * i + periods * reading.width, periods);
        const Constants constants(reading, with, i);
        const Vec slope = reading.load(with.slope, i), offset = reading.load(with.offset, i);
#pragma GCC unroll 4
        for (int period = 0; period < decltype(periods)::value; ++period) {
          const ptrdiff_t there = at + period * reading.width;
          const Terms terms = terms_of(read, constants, function, there, lanes, bits + period * reading.bits_of_period);
          if (dadded) write(dadded + there, terms.dz, lanes, is_streamed);
          if (dx) write(dx + there, terms.distance * slope + (terms.dz * constants.scale + offset), lanes, is_streamed);
        }
      });
}

// The sums of a set become the offset and the slope of dx, and are added to the gradients of the parameters.
class Parameters {
 public:
  Parameters(const Norm& norm, const Layout& layout, const LineCoefficients& coefficients)
      : padded_(ceil_divide(norm.c, LINE_FLOATS) * LINE_FLOATS),
        sums(norm.threads, 2 * padded_),
        norm_(norm),
        layout_(layout),
        coefficients_(coefficients) {}

  void finish(int64_t unit, int64_t set, int64_t begin, int64_t end, int part, Sums& sums) {
    double *const sum = sums.of(unit, part), *const product = sum + sums.size;
    const double inverse = coefficients_.inverse(unit * layout_.sets + set);
    double weighted = 0, weighted_product = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = layout_.channel(unit, i);
      double* const gradients = this->sums.of(part) + channel;
      gradients[0] += product[i] * inverse;
      gradients[padded_] += sum[i];
      weighted += coefficients_.weight(channel) * sum[i];
      weighted_product += coefficients_.weight(channel) * product[i];
    }
    const double scale = norm_.is_fixed ? 0 : inverse / double(layout_.set_elements);
    std::fill(sum + begin, sum + end, -scale * weighted);
    std::fill(product + begin, product + end, -scale * inverse * inverse * weighted_product);
  }

  // Write the gradients of the weight (which = 0) or the bias, in the order of parts.
  void write(int which, const Buffer& to) {
    if (!to) return;
    Elements{to.data, Element(norm_.parameter_element)}.visit([&](auto* gradient) {
      for (int64_t c = 0; c < norm_.c; ++c) {
        double sum = 0;
        for (int64_t part = 0; part < norm_.threads; ++part) sum += sums.of(part)[which * padded_ + c];
        store_first(gradient + c, broadcast(float(sum)), 1);
      }
    });
  }

 private:
  const int64_t padded_;

 public:
  Parts<double> sums;  // of each part, those of the weight and of the bias

 private:
  const Norm& norm_;
  const Layout& layout_;
  const LineCoefficients& coefficients_;
};

template <class T>
void backward(const Norm& norm, const Operands& operands) {
  const Layout layout(norm);
  const int threads = int(norm.threads);
  LineCoefficients coefficients(norm, layout, operands), of_dx(norm, layout, operands);
  Sums sums(layout, threads);
  Parts<float> floats(threads, 2 * layout.padded());
  Parameters parameters(norm, layout, coefficients);
  const bool reduces = operands.dweight || operands.dbias || (operands.dx && !norm.is_fixed);
  const bool writes = operands.dx || operands.dadded;
  with_activation(norm, bool(operands.mask), [&](auto function) {
    if (norm.sets == OF_PIXELS) return differentiate_pixels<T>(norm, operands, function, parameters.sums);
    // The derivative of a smooth function is worth a sweep: its product is kept where dx will be.
    constexpr bool IS_KEPT = decltype(function)::KIND == SMOOTH && std::is_same_v<T, float>;
    T* const kept =
        IS_KEPT && reduces && !operands.dadded && !is_large(operands.x.bytes) ? operands.dx.as<T>() : nullptr;
    Operands of_kept = operands;
    of_kept.dy = operands.dx;
    with_reading(layout, [&](const auto& reading) {
      const auto reduce = [&](const Line& line, int part) {
        if (!reduces) return;
        const Coefficients with = coefficients.of(line, part);
        add_gradients<T>(layout, reading, line, with, function, operands, kept, floats.of(part),
                         sums.slot(line.unit, part));
      };
      const auto finish = [&](int64_t unit, int64_t set, int64_t begin, int64_t end, int part) {
        parameters.finish(unit, set, begin, end, part, sums);
      };
      const auto apply = [&](const Line& line, int part) {
        if (!writes) return;
        const Coefficients with = of_dx.of(line, part, &sums);
        if (kept) return differentiate<T>(layout, reading, line, with, Activation<CLAMPED>(norm), of_kept);
        differentiate<T>(layout, reading, line, with, function, operands);
      };
      each_unit(layout, sums, threads, reduce, finish, apply);
    });
  });
  parameters.write(0, operands.dweight);
  parameters.write(1, operands.dbias);
}

template <class T>
void forward(const Norm& norm, const Operands& operands) {
  const Layout layout(norm);
  const int threads = int(norm.threads);
  LineCoefficients coefficients(norm, layout, operands);
  with_activation(norm, false, [&](auto function) {
    if (norm.sets == OF_PIXELS) return normalize_pixels<T>(norm, operands, function);
    with_reading(layout, [&](const auto& reading) {
#pragma omp parallel for num_threads(threads) schedule(static)
      for (int part = 0; part < threads; ++part) {  // in reverse: the end of each part was read last, by `moments`
        for (int64_t i = (part + 1) * layout.all_lines() / threads; i-- > part * layout.all_lines() / threads;) {
          const Line line = layout.reversed(i);
          normalize<T>(layout, reading, line, coefficients.of(line, part), function, operands);
        }
        end_streams();
      }
    });
  });
}

}  // namespace normalization
