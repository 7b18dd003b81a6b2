// Pixels, numbered through a mini-batch: image by image, row by row. Ranges of them are copied to small matrices and
// back, with one channel per row (*planes*) or one pixel per row (*rows*), as in memory: nothing is transposed.
#pragma once

#include "common/checks.h"
#include "common/epilogue.h"
#include "common/filter.h"
#include "common/image.h"
#include "common/matmul.h"

namespace pointwise {

constexpr int64_t pixels_of_image(const Images& x) { return int64_t(x.h) * x.w; }

// Return whether all pixels of a mini-batch are equally spaced, as in one long row.
static inline bool is_one_row(const Images& x) {
  return (x.h == 1 || x.sh == x.w * x.sw) && x.sn == pixels_of_image(x) * x.sw;
}

// Return the images as one long row each, if their pixels are equally spaced; otherwise unchanged.
static inline Images joined_rows(Images x) {
  if (x.sh != x.w * x.sw || pixels_of_image(x) > LARGEST_SIZE) return x;
  x.w *= x.h;
  x.h = 1;
  return x;
}

static inline Images channels_of(Images x, int first, int count) {
  x.data = x.data + first * x.sc;
  x.c = count;
  return x;
}

// `count` neighbouring pixels in one row of an image; the first is number `offset` of the range.
struct Run {
  int64_t image;
  int row, column, offset, count;
};

// Call body(run) for the runs of pixels [first, first + count) of x.
template <class Body>
INLINE void for_runs(const Images& x, int64_t first, int count, Body body) {
  for (int offset = 0; offset < count;) {
    const int64_t pixel = (first + offset) % pixels_of_image(x);
    const int row = int(pixel / x.w), column = int(pixel % x.w);
    const Run run{(first + offset) / pixels_of_image(x), row, column, offset, std::min(count - offset, x.w - column)};
    body(run);
    offset += run.count;
  }
}

// Load VL elements that are `step` apart, without reading past the last of them.
template <class Pixels>
INLINE Vec load_every(Pixels from, ptrdiff_t step) {
  if (step == 1) return load(from);
  Vec value = {};
  if (step == 2) {  // the second half overlaps the first by one float
    Lanes even;
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) even[i] = 2 * i < VL ? 2 * i : 2 * i + 1;
    return shuffled(load(from), load(from + (VL - 1)), even);
  }
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i) value[i] = value_of(from[i * step]);
  return value;
}

// Write elements `step` apart, with zeros between and after them, `width` elements in all.
template <class T>
INLINE void store_every(const float* from, int count, ptrdiff_t step, T* to, int width) {
  int i = 0;
  if (step == 2) {
    Lanes low, high;
#pragma GCC unroll 16
    for (int lane = 0; lane < VL; ++lane) {
      low[lane] = lane % 2 ? VL : lane / 2;
      high[lane] = lane % 2 ? VL : (VL + lane) / 2;
    }
    for (; i + VL <= count && 2 * (i + VL) <= width; i += VL) {
      const Vec value = load(from + i);
      store(to + 2 * i, shuffled(value, Vec{}, low));
      store(to + 2 * i + VL, shuffled(value, Vec{}, high));
    }
  }
  std::memset(to + i * step, 0, std::max<ptrdiff_t>(0, width - i * step) * sizeof(T));
  for (; i < count; ++i) store_first(to + i * step, broadcast(from[i]), 1);
}

// ---- planes --------------------------------------------------------------------------------------------------------

// Copy the pixels of a run, for channels [begin, end): see copy_planes.
template <int STEP, class Pixels>
INLINE void copy_run(Pixels pixels, const Images& x, const Run& run, int begin, int end, int stride, float* to) {
  const ptrdiff_t block = ptrdiff_t(stride) * VL, step = STEP == AT_RUN_TIME ? x.sw : STEP;
  const int head = std::min(run.count, (VL - run.offset % VL) % VL);
  const Pixels from = pixels + x.offset(run.image, 0, run.row, run.column);
  float* part = to + run.offset / VL * block + run.offset % VL;  // the rest of a vector that an earlier run began
  for (int c = begin; c < end && head; ++c)
    for (int i = 0; i < head; ++i) part[ptrdiff_t(c) * VL + i] = value_of(from[c * x.sc + i * step]);
  float* vectors = to + (run.offset + head) / VL * block;
  int i = head;
  for (; i + VL <= run.count; i += VL, vectors += block)
    for (int c = begin; c < end; ++c) store(vectors + ptrdiff_t(c) * VL, load_every(from + c * x.sc + i * step, step));
  for (int c = begin; c < end && i < run.count; ++c)
    for (int j = i; j < run.count; ++j) vectors[ptrdiff_t(c) * VL + j - i] = value_of(from[c * x.sc + j * step]);
}

template <class Pixels>
INLINE void copy_planes_from(Pixels pixels, const Images& x, int64_t first, int count, int stride, float* to) {
  constexpr int ROWS = 8;  // of x at a time: as many streams as a processor tracks, and whole cache lines of the result
  for (int c = 0; c < x.c; ++c) store(to + (ptrdiff_t((count - 1) / VL) * stride + c) * VL, Vec{});
  for_runs(x, first, count, [&](const Run& run) {
    for (int begin = 0; begin < x.c; begin += ROWS) {
      const int end = std::min(x.c, begin + ROWS);
      if (x.sw == 1)
        copy_run<1>(pixels, x, run, begin, end, stride, to);
      else if (x.sw == 2)
        copy_run<2>(pixels, x, run, begin, end, stride, to);
      else
        copy_run<AT_RUN_TIME>(pixels, x, run, begin, end, stride, to);
    }
  });
}

// Copy `count` pixels of every channel in blocks of VL, padded with zeros: pixel p of channel c goes to
// to[(p / VL * stride + c) * VL + p % VL].
static inline void copy_planes(const Images& x, int64_t first, int count, int stride, float* to) {
  x.visit_pixels([&](auto pixels) { copy_planes_from(pixels, x, first, count, stride, to); });
}

// Copy bfloat16 pixels of every channel in the same way, but in pairs of neighbouring pixels: pixel p of channel c goes
// to half p % (2 VL) of the vector at to[(p / (2 VL) * stride + c) * VL].
static inline void copy_planes_in_pairs(const Images& x, int64_t first, int count, int stride, float* to) {
  constexpr int PIXELS = 2 * VL;  // of a vector
  for (int c = 0; c < x.c; ++c) store(to + (ptrdiff_t((count - 1) / PIXELS) * stride + c) * VL, Vec{});
  for_runs(x, first, count, [&](const Run& run) {
    for (int c = 0; c < x.c; ++c) {
      const BFloat16* from = x.data.as<const BFloat16>() + x.offset(run.image, c, run.row, run.column);
      for (int i = 0, copied; i < run.count; i += copied) {
        const int pixel = run.offset + i;
        copied = std::min(PIXELS - pixel % PIXELS, run.count - i);
        auto* at = reinterpret_cast<BFloat16*>(to + (ptrdiff_t(pixel / PIXELS) * stride + c) * VL) + pixel % PIXELS;
        if (x.sw == 1 && copied == PIXELS)
          std::memcpy(at, from + i, sizeof(Vec));
        else
          for (int j = 0; j < copied; ++j) at[j] = from[(i + j) * x.sw];
      }
    }
  });
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Prefetch channel c of a pixel that will be copied soon: part of the channels of each pixel is too short a stream for
// the processor to notice. Memory past the images may be prefetched, but is never read.
template <class T>
INLINE void prefetch_later_pixel(const T* pixel, ptrdiff_t step, int c) {
  constexpr int PIXELS_AHEAD = 8;
  __builtin_prefetch(pixel + PIXELS_AHEAD * step + c);
}

// Copy all channels of `count` pixels: channel c of pixel p goes to to[p * x.c + c].
static inline void copy_rows(const Images& x, int64_t first, int count, float* to) {
  x.data.visit([&](const auto* pixels) {
    for_runs(x, first, count, [&](const Run& run) {
      const auto* from = pixels + x.offset(run.image, 0, run.row, run.column);
      for (int i = 0; i < run.count; ++i) {
        for (int c = 0; c < x.c; c += VL) prefetch_later_pixel(from + i * x.sw, x.sw, c);
        copy_elements(from + i * x.sw, x.c, to + ptrdiff_t(run.offset + i) * x.c);
      }
    });
  });
}

// Copy all channels of `count` pixels in blocks of VL, padded with zeros: channel c of pixel p goes to
// to[c / VL * block + p * VL + c % VL].
static inline void copy_blocked_rows(const Images& x, int64_t first, int count, float* to, ptrdiff_t block) {
  x.data.visit([&](const auto* pixels) {
    for_runs(x, first, count, [&](const Run& run) {
      const auto* from = pixels + x.offset(run.image, 0, run.row, run.column);
      for (int i = 0; i < run.count; ++i)
        for (int c = 0; c < x.c; c += VL) {
          prefetch_later_pixel(from + i * x.sw, x.sw, c);
          store(to + c / VL * block + ptrdiff_t(run.offset + i) * VL, load_first(from + i * x.sw + c, x.c - c));
        }
    });
  });
}

// Copy bfloat16 channels of `count` pixels in the same way, but in pairs of neighbouring pixels: those of pixels p and
// p + 1, p even, go to to[c / VL * block + p / 2 * VL + c % VL].
static inline void copy_paired_rows(const Images& x, int64_t first, int count, float* to, ptrdiff_t block) {
  const BFloat16* pixels = x.data.as<BFloat16>();
  for_runs(x, first, count, [&](const Run& run) {
    const BFloat16* from = pixels + x.offset(run.image, 0, run.row, run.column);
    const int end = run.offset + run.count;
    for (int pixel = run.offset; pixel < end; from += (pixel % 2 ? 1 : 2) * x.sw, pixel += pixel % 2 ? 1 : 2)
      for (int c = 0; c < x.c; c += VL) {
        prefetch_later_pixel(from, x.sw, c);
        float* at = to + c / VL * block + ptrdiff_t(pixel / 2) * VL;
        const Vec value = load_first(from + c, x.c - c);
        if (pixel % 2)  // an earlier run began the pair
          store(at, (Vec)((Bits)load(at) | (Bits)value));
        else
          store(at, paired_exactly(value, pixel + 1 < end ? load_first(from + x.sw + c, x.c - c) : Vec{}));
      }
  });
}

// ---- writing to images ---------------------------------------------------------------------------------------------

// Pixels that are a stride apart in images; those between them are zero.
struct Spread {
  Images whole;
  int64_t stride_h, stride_w;

  Images pixels() const { return every(whole, stride_h, stride_w); }
  bool is_dense() const { return stride_h == 1 && stride_w == 1; }
};

// Call body(top, bottom, left, right) with the part of the whole image from a run's pixels up to the next ones.
template <class Body>
INLINE void with_cell(const Spread& y, const Run& run, Body body) {
  const int64_t bottom = std::min<int64_t>(y.whole.h, (run.row + 1) * y.stride_h);
  const int64_t right = std::min<int64_t>(y.whole.w, (run.column + run.count) * y.stride_w);
  body(int(run.row * y.stride_h), int(bottom), int(run.column * y.stride_w), int(right));
}

// Write `channels` planes of `count` pixels from channel `channel` on: pixel p of plane c is from[c * row + p]. If
// pixels are dense, as in forward, the epilogue is applied to `from` first.
template <class T>
INLINE void spread_planes_to(T* pixels, const Spread& y, int channel, int channels, int64_t first, int count,
                             float* from, ptrdiff_t row, const Epilogue& epilogue) {
  const Images& whole = y.whole;
  if (y.is_dense()) {
    const Images joined = joined_rows(whole);
    return for_runs(joined, first, count, [&](const Run& run) {
      for (int c = 0; c < channels; ++c) {
        const ptrdiff_t there = joined.offset(run.image, channel + c, run.row, run.column);
        float* plane = from + c * row + run.offset;
        if (epilogue) apply(epilogue, whole.data + there, plane, run.count);
        copy_elements(plane, run.count, pixels + there);
      }
    });
  }
  for_runs(y.pixels(), first, count, [&](const Run& run) {
    with_cell(y, run, [&](int top, int bottom, int left, int right) {
      for (int c = 0; c < channels; ++c) {
        T* to = pixels + whole.offset(run.image, channel + c, top, left);
        store_every(from + c * row + run.offset, run.count, y.stride_w, to, right - left);
        for (int i = top + 1; i < bottom; ++i) std::memset(to + (i - top) * whole.sh, 0, (right - left) * sizeof(T));
      }
    });
  });
}

static inline void spread_planes(const Spread& y, int channel, int channels, int64_t first, int count, float* from,
                                 ptrdiff_t row, const Epilogue& epilogue) {
  y.whole.data.visit([&](auto* pixels) {
    spread_planes_to(pixels, y, channel, channels, first, count, from, row, epilogue);
  });
}

// Write the same channels from rows: channel `channel` + c of pixel p is from[p * row + c].
template <class T>
INLINE void spread_rows_to(T* pixels, const Spread& y, int channel, int channels, int64_t first, int count,
                           float* from, ptrdiff_t row, const Epilogue& epilogue) {
  const Images& whole = y.whole;
  if (y.is_dense()) {
    return for_runs(whole, first, count, [&](const Run& run) {
      for (int i = 0; i < run.count; ++i) {
        const ptrdiff_t there = whole.offset(run.image, channel, run.row, run.column + i);
        float* pixel = from + (run.offset + i) * row;
        if (epilogue) apply(epilogue, whole.data + there, pixel, channels);
        copy_elements(pixel, channels, pixels + there);
      }
    });
  }
  for_runs(y.pixels(), first, count, [&](const Run& run) {
    with_cell(y, run, [&](int top, int bottom, int left, int right) {
      for (int i = top; i < bottom; ++i)
        for (int j = left; j < right; ++j) {
          T* to = pixels + whole.offset(run.image, channel, i, j);
          if (i == top && (j - left) % y.stride_w == 0)
            copy_elements(from + (run.offset + (j - left) / y.stride_w) * row, channels, to);
          else
            std::memset(to, 0, channels * sizeof(T));
        }
    });
  });
}

static inline void spread_rows(const Spread& y, int channel, int channels, int64_t first, int count, float* from,
                               ptrdiff_t row, const Epilogue& epilogue) {
  y.whole.data.visit([&](auto* pixels) {
    spread_rows_to(pixels, y, channel, channels, first, count, from, row, epilogue);
  });
}

}  // namespace pointwise
