#include "common/filter.h"

namespace {

// Call body(pointer into w, pointer into the buffer, count of vectors, distance of the vectors in the buffer) for runs
// of at most VL elements that are contiguous in every lane: rows of one tap (KRSC), or taps of one row (KCRS).
template <class T, class Body>
INLINE void for_runs(T* w, const FilterBlock& block, float* buffer, Body body) {
  const FilterView& v = block.view;
  const int taps = v.taps();
  if (v.row == 1) {
    for (int t = 0; t < taps; ++t) {
      body(w + block.offset(0, 0, t), buffer + ptrdiff_t(t) * VL, block.rows(), ptrdiff_t(taps) * VL);
    }
    return;
  }
  for (int row = 0; row < block.rows(); ++row)
    for (int t = 0; t < taps; t += VL) {  // t counts in memory order; a turned filter is filled from its end
      const int count = std::min(VL, taps - t);
      const int tap = v.turned ? taps - 1 - t : t;
      body(w + block.offset(0, row, tap), buffer + (ptrdiff_t(row) * taps + tap) * VL, count,
           ptrdiff_t(v.turned ? -VL : VL));
    }
}

template <class T>
void load_filter_block_from(const T* w, const FilterBlock& block, float* buffer) {
  const FilterView& v = block.view;
  const int lanes = block.lanes(), taps = v.taps();
  if (lanes < VL || block.rows() < VL) std::memset(buffer, 0, sizeof(float) * VL * taps * VL);
  if (v.lane == 1) {
    for (int row = 0; row < block.rows(); ++row)
      for (int t = 0; t < taps; ++t)
        store(buffer + (ptrdiff_t(row) * taps + t) * VL, load_first(w + block.offset(0, row, t), lanes));
    return;
  }
  for_runs(w, block, buffer, [&](const T* from, float* to, int count, ptrdiff_t distance) {
    Vec rows[VL];
#pragma GCC unroll 16
    for (int l = 0; l < VL; ++l) rows[l] = l < lanes ? load_first(from + l * v.lane, count) : Vec{};
    transpose(rows);
    for (int i = 0; i < count; ++i) store(to + i * distance, rows[i]);
  });
}

template <class T>
void add_filter_block_to(T* w, const FilterBlock& block, float* buffer) {
  const FilterView& v = block.view;
  const int lanes = block.lanes(), taps = v.taps();
  if (v.lane == 1) {
    for (int row = 0; row < block.rows(); ++row)
      for (int t = 0; t < taps; ++t) {
        T* to = w + block.offset(0, row, t);
        store_first(to, load_first(to, lanes) + load(buffer + (ptrdiff_t(row) * taps + t) * VL), lanes);
      }
    return;
  }
  for_runs(w, block, buffer, [&](T* to, const float* from, int count, ptrdiff_t distance) {
    Vec rows[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) rows[i] = i < count ? load(from + i * distance) : Vec{};
    transpose(rows);
    for (int l = 0; l < lanes; ++l) store_first(to + l * v.lane, load_first(to + l * v.lane, count) + rows[l], count);
  });
}

}  // namespace

void load_filter_block(const FilterBlock& block, float* buffer) {
  block.view.w.visit([&](const auto* w) { load_filter_block_from(w, block, buffer); });
}

void add_filter_block(const FilterBlock& block, float* buffer) {
  block.view.w.visit([&](auto* w) { add_filter_block_to(w, block, buffer); });
}
