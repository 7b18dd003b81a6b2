// One vector type for every build: 16 floats with AVX-512, 8 with AVX2, else 4. GCC and Clang vector extensions, so
// that the same source serves every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)  // AVX-512 has it, too
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VL = 16;
constexpr int REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VL = 4;
constexpr int REGISTERS = 32;
#else
constexpr int VL = 4;
constexpr int REGISTERS = 16;
#endif

#if defined(__SANITIZE_ADDRESS__)  // where every access is checked, all of it inlined takes the compiler an hour
#define INLINE static inline
#define INLINE_MEMBER inline
#else
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#endif

typedef float Vec __attribute__((vector_size(VL * sizeof(float))));
typedef int32_t Lanes __attribute__((vector_size(VL * sizeof(float))));
typedef float UnalignedVec __attribute__((vector_size(VL * sizeof(float)), aligned(4), may_alias));

INLINE Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }
INLINE Vec broadcast(float value) { return value - Vec{}; }

// The first `count` lanes, zero behind them: never touches memory past from[count - 1].
INLINE Vec load_first(const float* from, int count) {
  if (count >= VL) return load(from);
  if (count <= 0) return Vec{};
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
#elif defined(__AVX2__)
  static const int32_t masks[2 * VL] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return (Vec)_mm256_maskload_ps(from, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(masks + VL - count)));
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

// Lanes whose bit D is clear come from a, the others from b, each exchanged with its partner: one butterfly of a
// transpose.
template <int D>
INLINE void exchange(Vec& a, Vec& b) {
  Lanes low, high;
  for (int i = 0; i < VL; ++i) {
    low[i] = (i & D) ? VL + (i ^ D) : i;
    high[i] = (i & D) ? VL + i : (i ^ D);
  }
#if defined(__clang__)
  Vec x = a, y = b;
  for (int i = 0; i < VL; ++i) {
    a[i] = low[i] < VL ? x[low[i]] : y[low[i] - VL];
    b[i] = high[i] < VL ? x[high[i]] : y[high[i] - VL];
  }
#else
  Vec x = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = x;
#endif
}

template <int D>
INLINE void transpose_stage(Vec (&rows)[VL]) {
#pragma GCC unroll 16
  for (int i = 0; i < VL; ++i)
    if (!(i & D)) exchange<D>(rows[i], rows[i | D]);
}

// rows[i][j] becomes rows[j][i].
INLINE void transpose(Vec (&rows)[VL]) {
  transpose_stage<1>(rows);
  transpose_stage<2>(rows);
  if constexpr (VL > 4) transpose_stage<4>(rows);
  if constexpr (VL > 8) transpose_stage<8>(rows);
}
