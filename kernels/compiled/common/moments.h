// Counts, means and sums of squared deviations (*moments*) of the channels of y, for batch norm in training, added up from
// what a thread has just written, while that is in registers or in its caches: y is not read from memory once more.
//
// A thread sums deviations from a shift, a median of the first values that it sees: so nothing cancels, however far a mean
// is from zero. Sums of a few pixels are in float, all others in double. The moments of threads are merged as in Chan,
// Golub and LeVeque, "Algorithms for computing the sample variance: analysis and recommendations" (1983), equations 2.1.
#pragma once

#include <omp.h>

#include "common/checks.h"
#include "common/image.h"

constexpr int DL = VL / 2;
typedef double Doubles __attribute__((vector_size(DL * sizeof(double))));
typedef double UnalignedDoubles __attribute__((vector_size(DL * sizeof(double)), aligned(8), may_alias));
typedef float HalfVec __attribute__((vector_size(DL * sizeof(float))));

INLINE Doubles load_doubles(const double* from) { return *reinterpret_cast<const UnalignedDoubles*>(from); }
INLINE void store_doubles(double* to, Doubles value) { *reinterpret_cast<UnalignedDoubles*>(to) = value; }

// Return lanes [DL * half, DL * half + DL) as doubles.
INLINE Doubles widened(Vec value, int half) {
  HalfVec halves[2];
  std::memcpy(halves, &value, sizeof value);
#if defined(__AVX512F__)  // masked with all lanes: GCC warns about the unmasked form, and converts quarters by itself
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)halves[half]);
#elif defined(__AVX2__)
  return (Doubles)_mm256_cvtps_pd((__m128)halves[half]);
#else
  return __builtin_convertvector(halves[half], Doubles);
#endif
}

// The sums of neighbouring channels in the buffer of a thread.
struct LaneMoments {
  double *counts, *sums, *squares;  // counts are null if none are wanted
  float* shifts;

  explicit operator bool() const { return counts != nullptr; }
  LaneMoments operator+(ptrdiff_t channels) const {
    return counts ? LaneMoments{counts + channels, sums + channels, squares + channels, shifts + channels} : *this;
  }

  // Add the deviations of COUNT values of each of VL channels, and their squares, after `before` values. value(i): the
  // values number i. Lanes from `lanes` on are no channels: they are written, but keep what they have.
  template <int COUNT, class Value>
  INLINE_MEMBER void add(double before, int lanes, Value value) const {
    if (before == 0) set_shifts(value(0), value(COUNT / 2), value(COUNT - 1), lanes);
    const Vec shift = load(shifts);
    Vec sum = {}, square = {};
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i) {
      const Vec deviation = value(i) - shift;
      sum += deviation;
      square += deviation * deviation;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int first = half * DL;
      Doubles exists{};  // 1 for lanes that are channels
      for (int i = 0; i < DL; ++i) exists[i] = first + i < lanes;
      store_doubles(sums + first, load_doubles(sums + first) + widened(sum, half) * exists);
      store_doubles(squares + first, load_doubles(squares + first) + widened(square, half) * exists);
    }
  }

  // Do the same for 1 to COUNT values, known at run time.
  template <int COUNT, class Value>
  INLINE_MEMBER void add_some(int count, double before, int lanes, Value value) const {
    if constexpr (COUNT > 1) {
      if (count < COUNT) return add_some<COUNT - 1>(count, before, lanes, value);
    }
    add<COUNT>(before, lanes, value);
  }

  // Count the values that have been added.
  void count(int channels, double values) const {
    for (int i = 0; i < channels; ++i) counts[i] += values;
  }

 private:
  // Shift by the median, which no single value spoils. With its last bits zero, it has none below those of most
  // deviations, whose rounding would be biased.
  INLINE_MEMBER void set_shifts(Vec a, Vec b, Vec c, int lanes) const {
    const Vec low = a < b ? a : b, high = a < b ? b : a, below = high < c ? high : c;
    store_first(shifts, (Vec)((Bits)(low < below ? below : low) & 0xffffff80), lanes);
  }
};

// The moments of y: counts, means and sums of squared deviations of all threads, then the sums of each thread.
struct Moments {
  static constexpr int ROWS = 4, PADDING = 16;  // rows of doubles for each thread, and what vectors may pass their ends by

  double* data;  // null if none are wanted
  int64_t channels;
  Elements y;  // the first element of the mini-batch, channels last

  explicit operator bool() const { return data != nullptr; }
  int64_t row() const { return channels + PADDING; }
  int64_t doubles(int64_t threads) const { return times(times(threads + 1, ROWS), row()); }

  LaneMoments of_thread(int64_t thread) const {
    double* const counts = data + (thread + 1) * ROWS * row();
    return {counts, counts + row(), counts + 2 * row(), reinterpret_cast<float*>(counts + 3 * row())};
  }

  // Return this thread's sums of the channels from that of an element on.
  LaneMoments at(const Elements& there) const {
    if (!data) return {};
    return of_thread(omp_get_thread_num()) + (there - y) % channels;
  }

  // Add some channels of the part of a region that is inside the image.
  void add(const Images& of, const Region& region, int channels) const;

  // Merge the moments of threads, in their order, with those of all, and set their sums to zero.
  void merge(int threads) const;
};
