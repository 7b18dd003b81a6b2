#include "common/prologue.h"

#include <algorithm>

#include "common/functions.h"

namespace {

struct Coefficients {
  Vec mean, scale, bias;
};

template <class Function>
INLINE Vec normalized(Vec x, const Coefficients& with, Function, float slope) {
  return computed<Function::value>((x - with.mean) * with.scale + with.bias, slope);
}

// Do the same for pairs: the second coefficients are those of the second numbers.
template <PairsOf PAIRS, class Function>
INLINE Vec normalized(Vec x, const Coefficients (&with)[2], Function function, float slope) {
  if constexpr (PAIRS == NO_PAIRS) return normalized(x, with[0], function, slope);
  const Vec low = (Vec)((Bits)x << 16), high = (Vec)((Bits)x & 0xffff0000);
  return paired(normalized(low, with[0], function, slope), normalized(high, with[1], function, slope));
}

template <PairsOf PAIRS>
INLINE void load_coefficients(const Prologue& prologue, int channel, Coefficients (&to)[2]) {
  Vec* const first[] = {&to[0].mean, &to[0].scale, &to[0].bias};
  Vec* const second[] = {&to[1].mean, &to[1].scale, &to[1].bias};
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    const float* from = prologue.coefficients + i * prologue.row + channel;
    *first[i] = *second[i] = load(from);
    if constexpr (PAIRS == PAIRS_OF_CHANNELS) {
      *second[i] = load(from + VL);
      unzip(*first[i], *second[i]);
    }
  }
}

template <PairsOf PAIRS>
INLINE void broadcast_coefficients(const Prologue& prologue, int channel, Coefficients (&to)[2]) {
  Vec* const first[] = {&to[0].mean, &to[0].scale, &to[0].bias};
  Vec* const second[] = {&to[1].mean, &to[1].scale, &to[1].bias};
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    const float* from = prologue.coefficients + i * prologue.row + channel;
    *first[i] = broadcast(from[0]);
    *second[i] = broadcast(from[PAIRS == PAIRS_OF_CHANNELS]);
  }
}

template <class Body>
void with_pairs(PairsOf pairs, Body body) {
  if (pairs == PAIRS_OF_CHANNELS) return body(std::integral_constant<PairsOf, PAIRS_OF_CHANNELS>());
  if (pairs == PAIRS_OF_PIXELS) return body(std::integral_constant<PairsOf, PAIRS_OF_PIXELS>());
  body(std::integral_constant<PairsOf, NO_PAIRS>());
}

// Call body with the function and the kind of pairs as constants.
template <class Body>
void with_constants(const Prologue& prologue, PairsOf pairs, Body body) {
  with_function(prologue.function, [&](auto function) { with_pairs(pairs, [&](auto of) { body(function, of); }); });
}

constexpr int STRIP = 4;  // pixels for which coefficients are loaded once

}  // namespace

template <PairsOf PAIRS, class Function>
static void normalize_rows_by(Function function, Prologue prologue, const float* from, ptrdiff_t from_row, int channels,
                              int64_t pixels, float* to, ptrdiff_t to_row) {
  const bool is_dense = from_row == channels;  // then the next pixels are fetched in their order in memory
  for (; pixels > 0; pixels -= STRIP, from += STRIP * from_row, to += STRIP * to_row)
    for (int c = 0; c < channels; c += VL) {
      const int lanes = channels - c;
      Coefficients with[2];
      load_coefficients<PAIRS>(prologue, PAIRS == PAIRS_OF_CHANNELS ? 2 * c : c, with);
      if (pixels >= STRIP && lanes >= VL) {
#pragma GCC unroll 8
        for (int i = 0; i < STRIP; ++i) {
          __builtin_prefetch(is_dense ? from + STRIP * from_row + c * STRIP + i * VL
                                      : from + (i + STRIP) * from_row + c);
          store(to + i * to_row + c, normalized<PAIRS>(load(from + i * from_row + c), with, function, prologue.slope));
        }
        continue;
      }
      for (int i = 0; i < std::min<int64_t>(STRIP, pixels); ++i) {
        const Vec value = load_first(from + i * from_row + c, lanes);
        store_first(to + i * to_row + c, normalized<PAIRS>(value, with, function, prologue.slope), lanes);
      }
    }
}

void normalize_rows(const Prologue& prologue, PairsOf pairs, const float* from, ptrdiff_t from_row, int channels,
                    int64_t pixels, float* to, ptrdiff_t to_row) {
  with_constants(prologue, pairs, [&](auto function, auto of) {
    normalize_rows_by<decltype(of)::value>(function, prologue, from, from_row, channels, pixels, to, to_row);
  });
}

void normalize_planes(const Prologue& prologue, PairsOf pairs, float* data, int channels, int vectors, int stride) {
  with_constants(prologue, pairs, [&](auto function, auto of) INLINE_LAMBDA {
    constexpr PairsOf PAIRS = decltype(of)::value;
    for (int c = 0; c < channels; ++c) {
      Coefficients with[2];
      broadcast_coefficients<PAIRS>(prologue, PAIRS == PAIRS_OF_CHANNELS ? 2 * c : c, with);
      for (int v = 0; v < vectors; ++v) {
        float* at = data + (ptrdiff_t(v) * stride + c) * VL;
        store(at, normalized<PAIRS>(load(at), with, function, prologue.slope));
      }
    }
  });
}

void normalize_segments(const Prologue& prologue, float* data, int count, int segments, ptrdiff_t row) {
  with_function(prologue.function, [&](auto function) INLINE_LAMBDA {
    Coefficients with[2];
    broadcast_coefficients<NO_PAIRS>(prologue, 0, with);
    for (int segment = 0; segment < segments; ++segment, data += row)
      for (int i = 0; i < count; i += VL) {
        const Vec value = load_first(data + i, count - i);
        store_first(data + i, normalized<NO_PAIRS>(value, with, function, prologue.slope), count - i);
      }
  });
}
