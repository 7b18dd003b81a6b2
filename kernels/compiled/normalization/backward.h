// Gradients. With dz, what the activation makes of dy, and means over the elements of a set:
//   dbias = sum dz, dweight = sum dz * (x - mean) * inverse, dadded = dz
//   dx = inverse * (dz * weight - mean(dz * weight) - (x - mean) * inverse^2 * mean(dz * weight * (x - mean)))
#pragma once

#include "normalization/pixels.h"

namespace normalization {

// The coefficients of a vector of the elements of a period.
struct Constants {
  Vec mean, scale, bias;

  INLINE_MEMBER Constants(const Coefficients& with, ptrdiff_t i)
      : mean(load(with.mean + i)), scale(load(with.scale + i)), bias(load(with.bias + i)) {}
};

template <class T, class Function>
INLINE Terms terms_of(const Read<T>& read, const Constants& with, Function function, ptrdiff_t at, int lanes,
                      ptrdiff_t bits) {
  const Vec distance = load_first(read.x + at, lanes) - with.mean, dy = load_first(read.dy + at, lanes);
  return {distance, function.gradient(dy, distance * with.scale + with.bias,
                                      read.mask ? load_bits(read.mask + bits) : Lanes{})};
}

// Add the sums of dz, and of dz * (x - mean), of the elements of a line to those of their places in the period.
template <class T, class Function>
void add_gradients(const Layout& layout, const Line& line, const Coefficients& with, Function function,
                   const Operands& operands, float* floats, double* sums) {
  const Read<T> read(line, operands);
  float *const sum = floats, *const product = floats + layout.padded();
  const ptrdiff_t bits_of_period = mask_bytes(layout.width);
  each_vector(line.count, layout.width, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t bits)
                                             INLINE_LAMBDA {
    if (periods > 1) read.prefetch(at + (periods - 1) * i + periods * layout.width, periods);
    const Constants constants(with, i & with.keep);
    Vec dz{}, dz_distance{};
#pragma GCC unroll 4
    for (int period = 0; period < decltype(periods)::value; ++period) {
      const ptrdiff_t there = at + period * layout.width;
      const Terms terms = terms_of(read, constants, function, there, lanes, bits + period * bits_of_period);
      dz += terms.dz;
      dz_distance += terms.dz * terms.distance;
    }
    store(sum + i, load(sum + i) + first_of(dz, lanes));
    store(product + i, load(product + i) + first_of(dz_distance, lanes));
  });
  flush(floats, 2 * layout.padded(), sums);
}

// Write dx and dz, if there is memory for them.
template <class T, class Function>
void differentiate(const Layout& layout, const Line& line, const Coefficients& with, Function function,
                   const Operands& operands) {
  const Read<T> read(line, operands);
  T* const dx = operands.dx ? operands.dx.as<T>() + line.first : nullptr;
  T* const dadded = operands.dadded ? operands.dadded.as<T>() + line.first : nullptr;
  const bool is_streamed = streams(layout.width, dx ? dx : dadded, operands.x.bytes);
  const ptrdiff_t bits_of_period = mask_bytes(layout.width);
  each_vector(line.count, layout.width, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t bits)
                                             INLINE_LAMBDA {
    if (periods > 1) read.prefetch(at + (periods - 1) * i + periods * layout.width, periods);
    i &= with.keep;
    const Constants constants(with, i);
    const Vec slope = load(with.slope + i), offset = load(with.offset + i);
#pragma GCC unroll 4
    for (int period = 0; period < decltype(periods)::value; ++period) {
      const ptrdiff_t there = at + period * layout.width;
      const Terms terms = terms_of(read, constants, function, there, lanes, bits + period * bits_of_period);
      if (dadded) write(dadded + there, terms.dz, lanes, is_streamed);
      if (dx) write(dx + there, terms.distance * slope + (terms.dz * constants.scale + offset), lanes, is_streamed);
    }
  });
}

// The sums of a unit become the offset and the slope of dx, and are added to the gradients of the parameters.
class Parameters {
 public:
  Parameters(const Norm& norm, const Layout& layout, const RowCoefficients& coefficients)
      : padded_(ceil_divide(norm.c, LINE_FLOATS) * LINE_FLOATS),
        sums(norm.threads, 2 * padded_),
        norm_(norm),
        layout_(layout),
        coefficients_(coefficients) {}

  void finish(int64_t unit, int part, Sums& sums) {
    const int64_t size = sums.size, first_row = unit * layout_.rows;
    const double count = double(layout_.set_elements);
    for (int64_t set = 0; set < layout_.sets; ++set) {
      const Span span = layout_.span(set);
      const double inverse = coefficients_.inverse(unit * layout_.sets + set);
      double sum = 0, product = 0;
      for (int64_t row = first_row + span.row; row < first_row + span.end_row; ++row) {
        const double* const of_row = sums.of(row, part);
        for (int64_t i = span.begin; i < span.end; ++i) {
          const int64_t channel = layout_.is_last ? i : row % layout_.channels;
          double* const gradients = this->sums.of(part) + channel;
          gradients[0] += of_row[size + i] * inverse;
          gradients[padded_] += of_row[i];
          sum += coefficients_.weight(channel) * of_row[i];
          product += coefficients_.weight(channel) * of_row[size + i];
        }
      }
      const double offset = -inverse * sum / count, slope = -inverse * inverse * inverse * product / count;
      for (int64_t row = first_row + span.row; row < first_row + span.end_row; ++row) {
        double* const of_row = sums.of(row, part);
        std::fill(of_row + span.begin, of_row + span.end, norm_.is_fixed ? 0 : offset);
        std::fill(of_row + size + span.begin, of_row + size + span.end, norm_.is_fixed ? 0 : slope);
      }
    }
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
  const RowCoefficients& coefficients_;
};

template <class T>
void backward(const Norm& norm, const Operands& operands) {
  const Layout layout(norm);
  const int threads = int(norm.threads);
  RowCoefficients coefficients(norm, layout, operands), of_dx(norm, layout, operands);
  Sums sums(layout, threads);
  Parts<float> floats(threads, 2 * layout.padded());
  Parameters parameters(norm, layout, coefficients);
  const bool reduces = operands.dweight || operands.dbias || (operands.dx && !norm.is_fixed);
  const bool writes = operands.dx || operands.dadded;
  with_activation(norm, bool(operands.mask), [&](auto function) {
    if (norm.sets == OF_PIXELS) return differentiate_pixels<T>(norm, operands, function, parameters.sums);
    const auto reduce = [&](const Line& line, int part) {
      if (!reduces) return;
      const Coefficients with = coefficients.of(line.row, part);
      add_gradients<T>(layout, line, with, function, operands, floats.of(part), sums.slot(line.row, part));
    };
    const auto finish = [&](int64_t unit, int part) { parameters.finish(unit, part, sums); };
    const auto apply = [&](const Line& line, int part) {
      if (!writes) return;
      const Coefficients with = of_dx.of(line.row, part, &sums);
      differentiate<T>(layout, line, with, function, operands);
    };
    each_unit(layout, sums, threads, reduce, finish, apply);
  });
  parameters.write(0, operands.dweight);
  parameters.write(1, operands.dbias);
}

template <class T>
void forward(const Norm& norm, const Operands& operands) {
  const Layout layout(norm);
  const int threads = int(norm.threads);
  RowCoefficients coefficients(norm, layout, operands);
  with_activation(norm, false, [&](auto function) {
    if (norm.sets == OF_PIXELS) return normalize_pixels<T>(norm, operands, function);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part) {  // in reverse: the end of each part was read last, by `moments`
      for (int64_t i = (part + 1) * layout.all_lines() / threads; i-- > part * layout.all_lines() / threads;) {
        const Line line = layout.reversed(i);
        normalize<T>(layout, line, coefficients.of(line.row, part), function, operands);
      }
      end_streams();
    }
  });
}

}  // namespace normalization
