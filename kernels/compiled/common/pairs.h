// Products of pairs of bfloat16 numbers, which processors with AVX512_BF16 add to floats, a vector at a time: twice the
// arithmetic of float32. Those with AMX add a tile at a time (tiles.h). A pair is stored where a float would be, so a
// matrix of pairs is a matrix of floats with half as many steps of the inner dimension. Which two steps make a pair
// does not matter, if it is the same two on both sides of a product.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common/elements.h"

enum Products : int64_t { OF_FLOATS, OF_PAIRS, OF_TILES };  // OF_TILES: of pairs too, a tile at a time (tiles.h)

#if defined(__AVX512F__)
// Return whether the processor multiplies tiles, and the operating system lets this process use them.
static inline bool may_multiply_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;  // CPUID, leaf 7, EDX
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

static inline bool products_are_set_to(const char* value) {
  const char* set = std::getenv("MUCUDNN_PRODUCTS");
  return set && std::strcmp(set, value) == 0;
}

// Return the products that bfloat16 numbers are multiplied by; always floats in builds without AVX-512, which have no
// code for others. MUCUDNN_PRODUCTS=floats or =pairs allows no better ones than these. For tests, =emulated-tiles
// demands what the processor lacks, from loops that compute the same, slowly.
static inline Products best_products() {
#if defined(__AVX512F__)
  static const Products products = [] {
    const auto is = products_are_set_to;
    if (is("emulated-tiles")) return OF_TILES;
    if (is("floats") || !__builtin_cpu_supports("avx512bf16")) return OF_FLOATS;
    return !is("pairs") && may_multiply_tiles() ? OF_TILES : OF_PAIRS;
  }();
  return products;
#else
  return OF_FLOATS;
#endif
}

// Return whether tiles are multiplied by loops, where best_products() is OF_TILES.
static inline bool emulates_tiles() {
  static const bool is_demanded = products_are_set_to("emulated-tiles");
  return is_demanded;
}

static inline bool multiplies_pairs() { return best_products() != OF_FLOATS; }

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
struct EmulatedPairs {
  static constexpr int NUMBERS = 2;
  INLINE_MEMBER static Vec add_product(Vec sum, Vec a, Vec b) {
    const auto low = [](Vec pairs) { return (Vec)((Bits)pairs << 16); };
    const auto high = [](Vec pairs) { return (Vec)((Bits)pairs & 0xffff0000); };
    return sum + high(a) * high(b) + low(a) * low(b);
  }
};

#if defined(__AVX512F__)
struct Pairs {
  static constexpr int NUMBERS = 2;
  INLINE_MEMBER static Vec add_product(Vec sum, Vec a, Vec b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
};
#else
using Pairs = Singles;  // which best_products() does not ask for
#endif
