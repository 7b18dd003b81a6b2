#include "common/moments.h"

namespace {

constexpr int PIXELS = REGISTERS == 32 ? 12 : 6;  // whose values fit the registers

// Add pixels that are equally spaced.
template <class T>
void add_pixels(const LaneMoments& to, double before, const T* from, ptrdiff_t pixel, int64_t count, int lanes) {
  for (int64_t i = 0; i < count; i += PIXELS, from += PIXELS * pixel) {
    if (count - i >= PIXELS && lanes == VL)
      to.add<PIXELS>(before + double(i), VL, [&](int j) INLINE_LAMBDA { return load(from + j * pixel); });
    else
      to.add_some<PIXELS>(int(std::min<int64_t>(PIXELS, count - i)), before + double(i), lanes,
                          [&](int j) INLINE_LAMBDA { return load_first(from + j * pixel, lanes); });
  }
}

}  // namespace

void Moments::add(const Images& of, const Region& region, int count) const {
  const int top = std::max(0, region.top), left = std::max(0, region.left);
  int64_t rows = std::min(of.h, region.top + region.rows) - top;
  int64_t columns = std::min(of.w, region.left + region.columns) - left;
  if (rows <= 0 || columns <= 0) return;
  if (of.sh == columns * of.sw) columns *= rows, rows = 1;
  const ptrdiff_t there = of.offset(region.image, region.channel, top, left);
  const LaneMoments to = at(of.data + there);
  of.data.visit([&](const auto* first) {
    for (int64_t i = 0; i < rows; ++i)
      for (int channel = 0; channel < count; channel += VL)
        add_pixels(to + channel, to.counts[channel] + double(i * columns), first + there + i * of.sh + channel, of.sw,
                   columns, std::min(VL, count - channel));
  });
  to.count(count, double(rows * columns));
}

void Moments::merge(int threads) const {
  double *const counts = data, *const means = counts + row(), *const squares = means + row();
  for (int thread = 0; thread < threads; ++thread) {
    const LaneMoments of = of_thread(thread);
    for (int64_t i = 0; i < channels; ++i) {
      if (of.counts[i] == 0) continue;
      const double rest = of.sums[i] / of.counts[i], distance = of.shifts[i] + rest - means[i];
      const double before = counts[i], share = of.counts[i] / (before + of.counts[i]);
      counts[i] += of.counts[i];
      means[i] += distance * share;
      squares[i] += of.squares[i] - of.sums[i] * rest + distance * distance * (before * share);
    }
  }
  std::memset(of_thread(0).counts, 0, threads * ROWS * row() * sizeof(double));
}
