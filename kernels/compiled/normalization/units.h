// How threads share the units of a call: whole ones if there are many, so that what a unit's second reading needs is
// still in the caches; otherwise equal shares of all lines.
#pragma once

#include "normalization/tiles.h"

namespace normalization {

// Two sums, in double, of each place in the period of each row. A thread adds to a slot of its own, in the order of
// lines, and slots are added in the order of threads: with the same number of threads, the same bits.
class Sums {
 public:
  Sums(const Layout& layout, int threads)
      : is_whole(layout.units % threads == 0 || layout.units >= 4 * threads),
        size(layout.padded()),
        layout_(layout),
        threads_(threads),
        slots_(times(layout.rows, is_whole ? threads : plus(layout.units, threads)), 2 * size) {}

  const bool is_whole;
  const int64_t size;

  // Return the first line of a thread's share.
  int64_t begin(int thread) const { return thread * layout_.all_lines() / threads_; }

  // Return a thread's slot of a row.
  double* slot(int64_t row, int thread) {
    const int64_t unit = is_whole ? thread : row / layout_.rows + thread;
    return slots_.of(unit * layout_.rows + row % layout_.rows);
  }

  // Return the sums of a row: after `merge`, those of its channels.
  double* of(int64_t row, int thread) { return slot(row, is_whole ? thread : owner(row / layout_.rows * layout_.lines)); }

  void merge(int64_t row, int thread) {
    const int64_t first = row / layout_.rows * layout_.lines, channels = layout_.channels_of_row();
    double* const total = of(row, thread);
    for (int part = owner(first) + 1; !is_whole && part <= owner(first + layout_.lines - 1); ++part)
      for (int64_t i = 0; i < 2 * size; ++i) total[i] += slot(row, part)[i];
    for (int64_t repeats = layout_.width / channels, half; repeats > 1; repeats = half) {
      half = (repeats + 1) / 2;
      for (double* const sums : {total, total + size})
        for (int64_t i = 0; i < (repeats - half) * channels; ++i) sums[i] += sums[half * channels + i];
    }
  }

  void clear(int64_t unit, int thread) {
    for (int64_t row = unit * layout_.rows; row < (unit + 1) * layout_.rows; ++row)
      std::fill_n(slot(row, thread), 2 * size, 0.0);
  }

 private:
  int owner(int64_t line) const { return int(((line + 1) * threads_ - 1) / layout_.all_lines()); }

  const Layout& layout_;
  int threads_;
  Parts<double> slots_;
};

// Call reduce(line, part) for all lines, finish(unit, part) for all units, whose sums are merged, and then
// apply(line, part) for all lines in reverse: those that were read last are in the caches. Each thread has a part.
template <class Reduce, class Finish, class Apply>
void each_unit(const Layout& layout, Sums& sums, int threads, Reduce reduce, Finish finish, Apply apply) {
  const int64_t of_unit = layout.lines;
  const auto finish_unit = [&](int64_t unit, int part) {
    for (int64_t row = unit * layout.rows; row < (unit + 1) * layout.rows; ++row) sums.merge(row, part);
    finish(unit, part);
  };
#pragma omp parallel num_threads(threads)
  if (sums.is_whole) {
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part) {
      for (int64_t unit = part * layout.units / threads; unit < (part + 1) * layout.units / threads; ++unit) {
        sums.clear(unit, part);
        for (int64_t i = 0; i < of_unit; ++i) reduce(layout.line(unit * of_unit + i), part);
        finish_unit(unit, part);
        for (int64_t i = of_unit; i-- > 0;) apply(layout.reversed(unit * of_unit + i), part);
      }
      end_streams();
    }
  } else {
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t i = sums.begin(part); i < sums.begin(part + 1); ++i) reduce(layout.line(i), part);
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t unit = part * layout.units / threads; unit < (part + 1) * layout.units / threads; ++unit)
        finish_unit(unit, part);
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part) {
      for (int64_t i = sums.begin(part + 1); i-- > sums.begin(part);) apply(layout.reversed(i), part);
      end_streams();
    }
  }
}

}  // namespace normalization
