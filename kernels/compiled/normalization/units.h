// How threads share the units of a call: whole ones if there are many, so that what a unit's second reading needs is
// still in the caches; otherwise equal shares of all lines.
#pragma once

#include "normalization/tiles.h"

namespace normalization {

// Two sums, in double, of each entry of each unit. A thread adds to a slot of its own, in the order of lines, and slots
// are added in the order of threads: with the same number of threads, the same bits.
class Sums {
 public:
  Sums(const Layout& layout, int threads)
      : is_whole(layout.units % threads == 0 || layout.units >= 4 * threads),
        size(layout.padded()),
        layout_(layout),
        threads_(threads),
        slots_(is_whole ? threads : plus(layout.units, threads), 2 * size) {}

  const bool is_whole;
  const int64_t size;

  // Return the first line of a thread's share.
  int64_t begin(int thread) const { return thread * layout_.all_lines() / threads_; }

  // Return a thread's slot of a unit.
  double* slot(int64_t unit, int thread) { return slots_.of(is_whole ? thread : unit + thread); }

  // Return the sums of a unit: after `merge`, those of its channels.
  double* of(int64_t unit, int thread) { return slot(unit, is_whole ? thread : owner(unit * layout_.lines)); }

  // Add the slots of some channels of a unit, and then their places in the period.
  void merge(int64_t unit, int thread, int64_t begin, int64_t end) {
    const int64_t first = unit * layout_.lines, repeats = layout_.is_last ? layout_.width / layout_.channels : 1;
    double* const total = of(unit, thread);
    for (int part = owner(first) + 1; !is_whole && part <= owner(first + layout_.lines - 1); ++part)
      for (int64_t half = 0; half < 2 * size; half += size)
        for (int64_t repeat = 0; repeat < repeats; ++repeat)
          for (int64_t i = half + repeat * layout_.channels + begin; i < half + repeat * layout_.channels + end; ++i)
            total[i] += slot(unit, part)[i];
    for (int64_t repeat = 1; repeat < repeats; ++repeat)
      for (double* const sums : {total, total + size})
        for (int64_t i = begin; i < end; ++i) sums[i] += sums[repeat * layout_.channels + i];
  }

  void clear(int64_t unit, int thread) { std::fill_n(slot(unit, thread), 2 * size, 0.0); }

 private:
  int owner(int64_t line) const { return int(((line + 1) * threads_ - 1) / layout_.all_lines()); }

  const Layout& layout_;
  int threads_;
  Parts<double> slots_;
};

// Call reduce(line, part) for all lines, finish(unit, set, begin, end, part) for the entries of all sets, whose sums
// are merged, and then apply(line, part) for all lines in reverse: those that were read last are in the caches. Each
// thread has a part.
template <class Reduce, class Finish, class Apply>
void each_unit(const Layout& layout, Sums& sums, int threads, Reduce reduce, Finish finish, Apply apply) {
  const int64_t of_unit = layout.lines, of_set = (layout.is_last ? layout.channels : layout.entries) / layout.sets;
  const auto finish_sets = [&](int64_t unit, int64_t first, int64_t last, int part) {
    for (int64_t set = first; set < last; ++set) {
      sums.merge(unit, part, set * of_set, (set + 1) * of_set);
      finish(unit, set, set * of_set, (set + 1) * of_set, part);
    }
  };
#pragma omp parallel num_threads(threads)
  if (sums.is_whole) {
#pragma omp for schedule(static) nowait
    for (int part = 0; part < threads; ++part) {
      for (int64_t unit = part * layout.units / threads; unit < (part + 1) * layout.units / threads; ++unit) {
        sums.clear(unit, part);
        for (int64_t i = 0; i < of_unit; ++i) reduce(layout.line(unit * of_unit + i), part);
        finish_sets(unit, 0, layout.sets, part);
        for (int64_t i = of_unit; i-- > 0;) apply(layout.reversed(unit * of_unit + i), part);
      }
      end_streams();
    }
  } else {
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)
      for (int64_t i = sums.begin(part); i < sums.begin(part + 1); ++i) reduce(layout.line(i), part);
#pragma omp for schedule(static)
    for (int part = 0; part < threads; ++part)  // an equal share of the sets of each unit
      for (int64_t unit = 0; unit < layout.units; ++unit)
        finish_sets(unit, part * layout.sets / threads, (part + 1) * layout.sets / threads, part);
#pragma omp for schedule(static) nowait
    for (int part = 0; part < threads; ++part) {
      for (int64_t i = sums.begin(part + 1); i-- > sums.begin(part);) apply(layout.reversed(i), part);
      end_streams();
    }
  }
}

}  // namespace normalization
