// The vector type of every build: 16 floats with AVX-512, 8 with AVX2, otherwise 4. It uses the vector extensions of
// GCC and Clang, so that the same source compiles for every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)  // also defined with AVX-512
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int VL = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)  // which always has NEON
constexpr int VL = 4;
constexpr int REGISTERS = 32;
#else
constexpr int VL = 4;
constexpr int REGISTERS = 16;
#endif

#if defined(__SANITIZE_ADDRESS__)  // with every access checked, full inlining takes the compiler an hour
#define INLINE static inline
#define INLINE_MEMBER inline
#define INLINE_LAMBDA
#else
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#endif

typedef float Vec __attribute__((vector_size(VL * sizeof(float))));
typedef int32_t Lanes __attribute__((vector_size(VL * sizeof(float))));
typedef float UnalignedVec __attribute__((vector_size(VL * sizeof(float)), aligned(4), may_alias));

INLINE Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }

// Store to memory that is aligned to a vector, past the caches: its line is not read first, if all of it is written.
// Other threads see it after `end_streams`.
INLINE void stream(float* to, Vec value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)value);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)value);
#else
  store(to, value);
#endif
}

INLINE void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

constexpr int LINE_FLOATS = 16;  // of a cache line

// Fetch the lines of `count` floats that will be written soon. Processors foresee only long streams; the stores of a
// short run would wait for its lines.
INLINE void prefetch_to_write(const float* to, int count) {
#pragma GCC unroll 4
  for (int i = 0; i < count; i += LINE_FLOATS) __builtin_prefetch(to + i, 1);
}

// Fetch the lines of `count` floats into L2, to be read or written some thousand instructions later. Processors do not
// foresee the next rows of several that are read or written at a time.
INLINE void prefetch_later(const float* from, ptrdiff_t count) {
  constexpr int INTO_L2 = 2;
  for (ptrdiff_t i = 0; i < count; i += LINE_FLOATS) __builtin_prefetch(from + i, 0, INTO_L2);
}

INLINE Vec broadcast(float value) { return value - Vec{}; }

// Return the values, or the bound where they are below it, or above. NaN stays NaN.
INLINE Vec at_least(float bound, Vec value) {
#if defined(__AVX512F__)  // masked with all lanes: GCC warns about the unmasked forms
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)broadcast(bound), (__m512)value);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)broadcast(bound), (__m256)value);
#else
  return value < bound ? broadcast(bound) : value;
#endif
}

INLINE Vec at_most(float bound, Vec value) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)broadcast(bound), (__m512)value);
#elif defined(__AVX2__)
  return (Vec)_mm256_min_ps((__m256)broadcast(bound), (__m256)value);
#else
  return value > bound ? broadcast(bound) : value;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Return a mask with all bits set in the first `count` lanes.
INLINE __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// Load the first `count` lanes and set the others to zero, without touching memory past from[count - 1].
INLINE Vec load_first(const float* from, int count) {
  if (count >= VL) return load(from);
  if (count <= 0) return Vec{};
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#elif defined(__AVX2__)
  return (Vec)_mm256_maskload_ps(from, first_lanes(count));
#else
  Vec value = {};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
#endif
}

INLINE void store_first(float* to, Vec value, int count) {
  if (count >= VL) return store(to, value);
  if (count <= 0) return;
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)value);
#elif defined(__AVX2__)  // masked stores are slow on AMD's processors
  __m128 rest = _mm256_castps256_ps128((__m256)value);
  if (count & 4) {
    _mm_storeu_ps(to, rest);
    rest = _mm256_extractf128_ps((__m256)value, 1);
    to += 4;
  }
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(to), rest);
    rest = _mm_movehl_ps(rest, rest);
    to += 2;
  }
  if (count & 1) _mm_store_ss(to, rest);
#else
  std::memcpy(to, &value, count * sizeof(float));
#endif
}

// Return a vector whose lane i is lane `lanes[i]` of a and b, concatenated.
INLINE Vec shuffled(Vec a, Vec b, Lanes lanes) {
#if defined(__clang__)
  Vec result;
  for (int i = 0; i < VL; ++i) result[i] = lanes[i] < VL ? a[lanes[i]] : b[lanes[i] - VL];
  return result;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Exchange the lanes of a whose index has bit D set with the lanes of b whose index has it clear: one butterfly of a
// transpose.
template <int D>
INLINE void exchange(Vec& a, Vec& b) {
  Lanes low, high;
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i) {
    low[i] = (i & D) ? VL + (i ^ D) : i;
    high[i] = (i & D) ? VL + i : (i ^ D);
  }
  const Vec first = shuffled(a, b, low);
  b = shuffled(a, b, high);
  a = first;
}

// Interleave the lanes of a and b: a gets the lower halves of both, b the upper halves.
INLINE void zip(Vec& a, Vec& b) {
  Lanes low, high;
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i) {
    low[i] = i / 2 + i % 2 * VL;
    high[i] = low[i] + VL / 2;
  }
  const Vec x = a;
  a = shuffled(x, b, low);
  b = shuffled(x, b, high);
}

// Undo `zip`: a gets the even lanes of both, b the odd ones.
INLINE void unzip(Vec& a, Vec& b) {
  Lanes even, odd;
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  const Vec x = a;
  a = shuffled(x, b, even);
  b = shuffled(x, b, odd);
}

template <int D>
INLINE void transpose_stage(Vec (&rows)[VL]) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i)
    if (!(i & D)) exchange<D>(rows[i], rows[i | D]);
}

// Exchange rows[i][j] and rows[j][i].
INLINE void transpose(Vec (&rows)[VL]) {
  transpose_stage<1>(rows);
  transpose_stage<2>(rows);
  if constexpr (VL > 4) transpose_stage<4>(rows);
  if constexpr (VL > 8) transpose_stage<8>(rows);
}
