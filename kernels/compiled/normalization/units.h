// How threads share the units of a call: whole ones if there are many, so that what a unit's second reading needs is
// still in the caches; otherwise equal shares of all lines.
#pragma once

#include "normalization/tiles.h"

namespace normalization {

// Two sums, in double, of each element of the period of each row. A thread adds to a slot of its own, in the order of
// lines, and slots are added in the order of threads: with the same number of threads, the same bits.
class Sums {
 public:
  Sums(const Layout& layout, int threads)
      : is_whole(layout.units % threads == 0 || layout.units >= 4 * threads),
        layout_(layout),
        threads_(threads),
        size_(layout.is_last ? layout.width : 1),
        data_(times(2 * size_, is_whole ? times(threads, layout.rows) : plus(layout.all_rows(), threads))) {}

  const bool is_whole;

  int64_t size() const { return size_; }

  // Return the first line of a thread's share.
  int64_t begin(int thread) const { return thread * layout_.all_lines() / threads_; }

  // Return the slot of a thread; those of the same row follow each other.
  double* slot(int64_t row, int thread) {
    return data_.data() + 2 * size_ * (is_whole ? thread * layout_.rows + row % layout_.rows : row + thread);
  }

  // Return the sums of a row, after `merge`.
  double* of(int64_t row, int thread) { return slot(row, is_whole ? thread : owner(row * layout_.lines)); }

  void merge(int64_t row) {
    if (is_whole) return;
    const int64_t first = row * layout_.lines;
    double* const total = of(row, 0);
    const int64_t count = 2 * size_ * (owner(first + layout_.lines - 1) - owner(first));
    for (int64_t i = 0; i < count; ++i) total[i % (2 * size_)] += total[2 * size_ + i];
  }

  void clear(int64_t unit, int thread) {
    for (int64_t row = unit * layout_.rows; row < (unit + 1) * layout_.rows; ++row)
      std::fill_n(slot(row, thread), 2 * size_, 0.0);
  }

 private:
  int owner(int64_t line) const { return int(((line + 1) * threads_ - 1) / layout_.all_lines()); }

  const Layout& layout_;
  int threads_;
  int64_t size_;
  std::vector<double> data_;
};

// Call reduce(line, part) for all lines, finish(unit, part) for all units, whose sums are merged, and then
// apply(line, part) for all lines in reverse: those that were read last are in the caches. Each thread has a part.
template <class Reduce, class Finish, class Apply>
void each_unit(const Layout& layout, Sums& sums, int threads, Reduce reduce, Finish finish, Apply apply) {
  const int64_t of_unit = layout.rows * layout.lines;
#pragma omp parallel num_threads(threads)
  if (sums.is_whole) {
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t unit = part * layout.units / threads; unit < (part + 1) * layout.units / threads; ++unit) {
        sums.clear(unit, part);
        for (int64_t i = 0; i < of_unit; ++i) reduce(layout.line(unit * of_unit + i), part);
        finish(unit, part);
        for (int64_t i = of_unit; i-- > 0;) apply(layout.line(unit * of_unit + i), part);
      }
  } else {
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t i = sums.begin(part); i < sums.begin(part + 1); ++i) reduce(layout.line(i), part);
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t unit = part * layout.units / threads; unit < (part + 1) * layout.units / threads; ++unit) {
        for (int64_t row = unit * layout.rows; row < (unit + 1) * layout.rows; ++row) sums.merge(row);
        finish(unit, part);
      }
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t i = sums.begin(part + 1); i-- > sums.begin(part);) apply(layout.line(i), part);
  }
}

}  // namespace normalization
