// Products of pairs of bfloat16 numbers, which processors with AVX512_BF16 add to floats, a vector at a time: twice the
// arithmetic of float32. A pair is stored where a float would be, so a matrix of pairs is a matrix of floats with
// half as many steps of the inner dimension. Which two steps make a pair does not matter, if it is the same two on both
// sides of a product.
#pragma once

#include <cstdlib>

#include "common/elements.h"

// Return whether products of pairs are used: if the processor has the instruction. MUCUDNN_PAIRS=0 prevents it.
// MUCUDNN_PAIRS=1 demands it of a build without the instruction, where loops compute the same, slowly: for tests.
static inline bool multiplies_pairs() {
  static const bool is_used = [] {
    const char* set = std::getenv("MUCUDNN_PAIRS");
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512bf16") && !(set && *set == '0');
#else
    return set && *set == '1';
#endif
  }();
  return is_used;
}

// Return the vector of pairs of two vectors' lanes, rounded to bfloat16.
INLINE Vec paired(Vec low, Vec high) {
#if defined(__AVX512F__)  // in assembly, since the rest of the build must run without the instruction
  Vec apart;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(apart) : "v"(low), "v"(high));
  constexpr Lanes ORDER = {0x00100000, 0x00110001, 0x00120002, 0x00130003, 0x00140004, 0x00150005,
                           0x00160006, 0x00170007, 0x00180008, 0x00190009, 0x001a000a, 0x001b000b,
                           0x001c000c, 0x001d000d, 0x001e000e, 0x001f000f};
  return (Vec)_mm512_permutexvar_epi16((__m512i)ORDER, (__m512i)apart);
#else
  const Bits lower = __builtin_convertvector(BFloat16::rounded(low), Bits);
  return (Vec)(lower | __builtin_convertvector(BFloat16::rounded(high), Bits) << 16);
#endif
}

// Store the first `count` lanes, rounded to bfloat16.
INLINE void store_rounded(BFloat16* to, Vec value, int count) {
#if defined(__AVX512F__)
  HalfBits bits;
  asm("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(value));
  _mm256_mask_storeu_epi16(to, count >= VL ? __mmask16(0xffff) : __mmask16((1u << count) - 1), (__m256i)bits);
#else
  store_first(to, value, count);
#endif
}

// Do the same as `paired` for numbers that are bfloat16, widened, without rounding.
INLINE Vec paired_exactly(Vec low, Vec high) { return (Vec)((Bits)low >> 16 | (Bits)high); }

// The steps of a product: floats, one at a time.
struct Singles {
  static constexpr int NUMBERS = 1;
  INLINE_MEMBER static Vec add_product(Vec sum, Vec a, Vec b) { return sum + a * b; }
};

// The steps of a product: pairs.
struct Pairs {
  static constexpr int NUMBERS = 2;
  INLINE_MEMBER static Vec add_product(Vec sum, Vec a, Vec b) {
#if defined(__AVX512F__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    const auto low = [](Vec pairs) { return (Vec)((Bits)pairs << 16); };
    const auto high = [](Vec pairs) { return (Vec)((Bits)pairs & 0xffff0000); };
    return sum + high(a) * high(b) + low(a) * low(b);
#endif
  }
};
