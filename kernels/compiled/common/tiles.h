// Products of tiles of pairs, AMX: C += A B, with at most 16 rows of VL pairs in A, and VL rows of VL pairs in B. The
// instructions are in assembly, since the rest of a build must run without them. Where the processor has none, tests
// run an emulator that accepts only what a processor would. (Intel 64 and IA-32 Architectures Software Developer's
// Manual, volume 1, chapter 18.)
#pragma once

#include <cstdio>

#include "common/pairs.h"

namespace tiles {

constexpr int MOST_ROWS = 16;

// The shape of each of the eight registers: its rows, and the bytes of a row. The processor reads it.
struct alignas(64) Shapes {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int of_rows, int columns) {
    rows[tile] = uint8_t(of_rows);
    row_bytes[tile] = uint16_t(columns * sizeof(float));
  }
};
static_assert(sizeof(Shapes) == 64, "as the processor reads it");

class Emulator {
 public:
  void set(const Shapes& shapes) {
    shapes_ = shapes;
    std::memset(values_, 0, sizeof values_);
  }
  void load(int tile, const float* from, ptrdiff_t distance) {
    for (int i = 0; i < rows(tile); ++i) std::memcpy(row(tile, i), from + i * distance, shapes_.row_bytes[tile]);
  }
  void store(int tile, float* to, ptrdiff_t distance) {
    for (int i = 0; i < rows(tile); ++i) std::memcpy(to + i * distance, row(tile, i), shapes_.row_bytes[tile]);
  }
  void add_product(int sum, int a, int b) {
    require(rows(sum) == rows(a) && columns(sum) == columns(b) && columns(a) == rows(b));
    for (int i = 0; i < rows(a); ++i)
      for (int k = 0; k < rows(b); ++k) {
        const Vec left = broadcast(row(a, i)[k]);
        store(row(sum, i), EmulatedPairs::add_product(::load(row(sum, i)), left, ::load(row(b, k))));
      }
  }

 private:
  Shapes shapes_;
  float values_[8][MOST_ROWS * VL];

  static void require(bool is_accepted) {
    if (is_accepted) return;
    std::fputs("the processor would not accept this instruction on tiles\n", stderr);
    std::abort();
  }
  static void store(float* to, Vec value) { ::store(to, value); }
  float* row(int tile, int i) { return values_[tile] + i * VL; }
  int rows(int tile) const {
    require(shapes_.rows[tile] > 0 && shapes_.rows[tile] <= MOST_ROWS);
    return shapes_.rows[tile];
  }
  int columns(int tile) const {
    require(shapes_.row_bytes[tile] > 0 && shapes_.row_bytes[tile] <= sizeof(float) * VL);
    return int(shapes_.row_bytes[tile] / sizeof(float));
  }
};

inline Emulator& emulator() {
  thread_local Emulator of_thread;
  return of_thread;
}

// ---- instructions --------------------------------------------------------------------------------------------------
// Rows in memory are `distance` floats apart. All registers are zero after set().

#if defined(__AVX512F__)
#define OR_EMULATED(emulated, ...) \
  if (emulates_tiles()) return emulator().emulated; \
  asm volatile(__VA_ARGS__ : "memory")
#else
#define OR_EMULATED(emulated, ...) emulator().emulated
#endif

INLINE void set(const Shapes& shapes) { OR_EMULATED(set(shapes), "ldtilecfg %0" : : "m"(shapes)); }

INLINE void release() {
#if defined(__AVX512F__)
  if (!emulates_tiles()) asm volatile("tilerelease" : : : "memory");
#endif
}

template <int TILE>
INLINE void load(const float* from, ptrdiff_t distance) {
  OR_EMULATED(load(TILE, from, distance), "tileloadd (%0,%1,1), %%tmm%c2"
              : : "r"(from), "r"(distance * ptrdiff_t(sizeof(float))), "i"(TILE));
}

template <int TILE>
INLINE void store(float* to, ptrdiff_t distance) {
  OR_EMULATED(store(TILE, to, distance), "tilestored %%tmm%c2, (%0,%1,1)"
              : : "r"(to), "r"(distance * ptrdiff_t(sizeof(float))), "i"(TILE));
}

template <int SUM, int A, int B>
INLINE void add_product() {
  OR_EMULATED(add_product(SUM, A, B), "tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

#undef OR_EMULATED

// ---- sums ----------------------------------------------------------------------------------------------------------

// The rows x VECTORS vectors of sums of a register tile, in registers of tiles.
template <int VECTORS>
class Sums {
 public:
  // rows: at most MOST_ROWS. steps: of a block, VL to each add(); the last add() has the remainder
  Sums(int rows, int steps) {
    static_assert(VECTORS <= A, "more than the registers hold");
    Shapes shapes;
    for (int j = 0; j < VECTORS; ++j) shapes.set(j, rows, VL);
    shapes.set(A, rows, VL);
    for (const int b : {B, B + 1}) shapes.set(b, VL, VL);
    if (steps % VL) {
      shapes.set(LAST_A, rows, steps % VL);
      shapes.set(LAST_B, steps % VL, VL);
    }
    set(shapes);
  }
  Sums(const Sums&) = delete;
  ~Sums() { release(); }

  // Add the product of VL steps, or of the last ones. Vector j of the first step of B is at b[j * b_stream].
  INLINE_MEMBER void add(bool is_whole, const float* a, ptrdiff_t a_distance, const float* b, ptrdiff_t b_stream) {
    if (is_whole) {
      load<A>(a, a_distance);
      add_vector<0, A, B>(b, b_stream);
    } else {
      load<LAST_A>(a, a_distance);
      add_vector<0, LAST_A, LAST_B>(b, b_stream);
    }
  }

  INLINE_MEMBER void store_in(float* sums) const { store_vector<0>(sums); }

 private:
  static constexpr int A = 3, B = 4, LAST_A = 6, LAST_B = 7;  // registers; the sums are in 0 to 2

  template <int J, int OF_A, int OF_B>
  INLINE_MEMBER void add_vector(const float* b, ptrdiff_t b_stream) {
    constexpr int RIGHT = OF_B == B ? B + J % 2 : OF_B;  // two in turn, so that one is loaded while one is multiplied
    load<RIGHT>(b + J * b_stream, VL);
    add_product<J, OF_A, RIGHT>();
    if constexpr (J + 1 < VECTORS) add_vector<J + 1, OF_A, OF_B>(b, b_stream);
  }

  template <int J>
  INLINE_MEMBER void store_vector(float* sums) const {
    store<J>(sums + J * VL, VECTORS * VL);
    if constexpr (J + 1 < VECTORS) store_vector<J + 1>(sums);
  }
};

}  // namespace tiles
