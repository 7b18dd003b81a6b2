// Means and variances, in one reading: sums of x in double, and sums of (x - shift)^2 in float over a few elements,
// then in double. The shift of a channel is the mean of some of its elements, so that large means do not cancel;
// channels become sets as their means and squares are known (Chan, Golub and LeVeque, "Algorithms for computing the
// sample variance", 1983: shifted data, and the pairwise formula).
#pragma once

#include "normalization/pixels.h"

namespace normalization {

// Add the sums of x, and of (x - shift)^2, of the elements of a line to those of their entries. squares: zeros.
template <class T, class Reading>
void add_moments(const Layout& layout, const Reading& reading, const Line& line, const T* x, const float* shift,
                 float* squares, double* sums) {
  x += line.first;
  const bool fetches = is_fetched(layout.units * layout.sets * layout.set_elements * sizeof(T));
  const Vec single = broadcast(shift[line.entry]);
  Doubles of_line{};
  Vec squares_of_line{};
  reading.each_vector(layout, line, [&](auto periods, ptrdiff_t at, ptrdiff_t i, int lanes, ptrdiff_t) INLINE_LAMBDA {
    if (periods > 1 && fetches) prefetch(x + at + (periods - 1) * i + periods * reading.width, periods);
    const Vec from = Reading::IS_LAST ? load(shift + i) : single;
    Doubles low{}, high{};
    Vec square{};
#pragma GCC unroll 4
    for (int period = 0; period < decltype(periods)::value; ++period) {
      const Vec value = load_first(x + at + period * reading.width, lanes), distance = value - from;
      const Halves halves(value);
      low += halves.low;
      high += halves.high;
      square += distance * distance;
    }
    square = first_of(square, lanes);
    if constexpr (Reading::IS_LAST) {
      *reinterpret_cast<Doubles*>(sums + i) += low;
      *reinterpret_cast<Doubles*>(sums + i + VL / 2) += high;
      store(squares + i, load(squares + i) + square);
    } else {
      of_line += low + high;
      squares_of_line += square;
    }
  });
  if constexpr (Reading::IS_LAST) return flush(squares, layout.padded(), sums + layout.padded());
  sums[line.entry] += total(of_line);
  sums[layout.padded() + line.entry] += total(squares_of_line);
}

// Set the shifts of a unit: of each channel, the mean of elements that are spread over it.
template <class T>
void set_shifts(const Layout& layout, int64_t unit, const T* x, float* shift) {
  constexpr int64_t SAMPLES = 8;
  const int64_t channels = layout.is_last ? layout.channels : 1, size = layout.size / channels;
  const int64_t all = layout.planes * size, samples = std::min(SAMPLES, all), step = all / samples;
  for (int64_t entry = 0; entry < (layout.is_last ? 1 : layout.entries); ++entry)
    for (int64_t i = 0; i < channels; i += VL) {
      Vec sum{};
      for (int64_t j = 0, plane = 0, pixel = 0; j < samples; ++j, pixel += step) {
        for (; pixel >= size; pixel -= size) ++plane;
        const T* const from = x + layout.plane(unit, entry, plane) * layout.size + pixel * channels + i;
        const Vec value =
            channels == 1 ? broadcast(value_of(*from)) : load_first(from, int(std::min<int64_t>(channels - i, VL)));
        sum += value - value == 0 ? value : Vec{};  // no infinity
      }
      store_first(shift + entry + i, sum * (1 / float(samples)), int(std::min<int64_t>(channels - i, VL)));
    }
  for (int64_t i = channels; layout.is_last && i < layout.width; ++i) shift[i] = shift[i - channels];
}

// Update running statistics with those of each channel, averaged over the samples if they have statistics of their own.
template <class T>
void update(T* running, const std::vector<double>& values, int64_t channels, double momentum) {
  const double share = momentum * double(channels) / double(values.size());
  for (int64_t c = 0; c < channels; c += VL) {
    const int count = int(std::min<int64_t>(VL, channels - c));
    Vec updated = load_first(running + c, count);
    for (int i = 0; i < count; ++i) {
      double sum = 0;
      for (size_t n = c + i; n < values.size(); n += channels) sum += values[n];
      updated[i] = float(share * sum + (1 - momentum) * double(updated[i]));
    }
    store_first(running + c, updated, count);
  }
}

// Compute mean and inverse, 1 / sqrt(variance + eps), and update the running statistics.
template <class T>
void moments(const Norm& norm, const Operands& operands, double momentum) {
  if (norm.sets == OF_PIXELS) return moments_of_pixels<T>(norm, operands);
  const Layout layout(norm);
  const int threads = int(norm.threads);
  Sums sums(layout, threads);
  const int64_t padded = layout.padded();
  Parts<float> shifts(threads, padded), squares(threads, padded);
  std::vector<int64_t> units(threads, -1);
  const bool has_running = bool(operands.running_mean);
  std::vector<double> means(has_running ? norm.statistics() : 0), variances(means.size());
  const T* const x = operands.x.as<T>();
  const auto shifts_of = [&](int64_t unit, int part) {
    if (units[part] != unit) set_shifts(layout, unit, x, shifts.of(part));
    units[part] = unit;
    return shifts.of(part);
  };
  const double count = double(layout.set_elements), part_of_set = 1 / count, unbiased = count / (count - 1);
  const double of_channel = double(layout.planes * layout.size / (layout.is_last ? layout.channels : 1));
  const double part_of_channel = 1 / of_channel;
  const auto finish = [&](int64_t unit, int64_t set, int64_t begin, int64_t end, int part) {
    const double* const sum = sums.of(unit, part);
    const float* const shift = shifts_of(unit, part);
    const double mean = std::accumulate(sum + begin, sum + end, 0.0) * part_of_set;
    double squares = 0;
    for (int64_t i = begin; i < end; ++i) {
      const double of = sum[i] * part_of_channel, shifted = of - shift[i], between = of - mean;
      squares += sum[padded + i] + of_channel * (between * between - shifted * shifted);
    }
    const double variance = std::max(squares * part_of_set, 0.0);
    const int64_t place = unit * layout.sets + set;
    operands.mean.as<float>()[place] = float(mean);
    operands.inverse.as<float>()[place] = inverse_of(variance, norm.eps);
    if (has_running) means[place] = mean, variances[place] = variance * unbiased;
  };
  with_reading(layout, [&](const auto& reading) {
    const auto reduce = [&](const Line& line, int part) {
      const float* const shift = shifts_of(line.unit, part);
      add_moments(layout, reading, line, x, shift, squares.of(part), sums.slot(line.unit, part));
    };
    each_unit(layout, sums, threads, reduce, finish, [](const Line&, int) {});
  });
  if (!has_running) return;
  const Elements mean{operands.running_mean.data, Element(norm.running_element)};
  const Elements variance{operands.running_var.data, Element(norm.running_element)};
  mean.visit([&](auto* running) { update(running, means, norm.c, momentum); });
  variance.visit([&](auto* running) { update(running, variances, norm.c, momentum); });
}

}  // namespace normalization
