// The element types of tensors in memory. Half-precision elements are widened when they are read and rounded, to
// nearest with ties to even, when they are written; all arithmetic is in float. Only the loop nest takes double, and
// computes in it.
#pragma once

#include <vector>

#include "common/vector.h"

enum Element : int64_t { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

typedef uint32_t Bits __attribute__((vector_size(VL * sizeof(float))));
typedef uint16_t HalfBits __attribute__((vector_size(VL * sizeof(uint16_t))));
typedef uint16_t UnalignedHalfBits __attribute__((vector_size(VL * sizeof(uint16_t)), aligned(2), may_alias));

INLINE Bits select(Lanes condition, Bits yes, Bits no) { return (Bits(condition) & yes) | (~Bits(condition) & no); }

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;

  INLINE_MEMBER static Vec widened(HalfBits half) { return (Vec)(__builtin_convertvector(half, Bits) << 16); }
  INLINE_MEMBER static HalfBits rounded(Vec value) {
    const Bits bits = (Bits)value, upper = bits >> 16;
    const Bits nearest = (bits + 0x7fff + (upper & 1)) >> 16;  // overflow gives the bits of infinity
    return __builtin_convertvector(select(value != value, upper | 0x40, nearest), HalfBits);
  }
};

// IEEE 754 binary16: sign, 5 bits of exponent, 10 of fraction.
struct Float16 {
  uint16_t bits;

#if defined(__AVX512F__)  // masked with all lanes: GCC warns about the unmasked forms
  INLINE_MEMBER static Vec widened(HalfBits half) { return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half); }
  INLINE_MEMBER static HalfBits rounded(Vec value) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (HalfBits)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, NEAREST);
  }
#elif defined(__F16C__)
  INLINE_MEMBER static Vec widened(HalfBits half) { return (Vec)_mm256_cvtph_ps((__m128i)half); }
  INLINE_MEMBER static HalfBits rounded(Vec value) {
    return (HalfBits)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(__aarch64__)
  INLINE_MEMBER static Vec widened(HalfBits half) { return (Vec)vcvt_f32_f16((float16x4_t)half); }
  INLINE_MEMBER static HalfBits rounded(Vec value) { return (HalfBits)vcvt_f16_f32((float32x4_t)value); }
#else
  // The exponent is moved to its place in a float. Subnormals go through a sum with the smallest normal half: no
  // intermediate value is a subnormal float, which the processor may be set to flush to zero.
  static constexpr uint32_t BIAS = (127 - 15) << 23, SMALLEST_NORMAL = (127 - 14) << 23, INFINITY_BITS = 0x7f800000;

  INLINE_MEMBER static Vec widened(HalfBits half) {
    const Bits bits = __builtin_convertvector(half, Bits), sign = (bits & 0x8000) << 16;
    const Bits shifted = (bits & 0x7fff) << 13, exponent = shifted & 0xf800000;
    const Bits smallest = SMALLEST_NORMAL - Bits{};
    const Bits subnormal = (Bits)((Vec)(shifted + smallest) - (Vec)smallest);
    const Bits finite = select(exponent == 0, subnormal, shifted + BIAS);
    const Bits quiet = select((bits & 0x3ff) != 0, 0x400000 - Bits{}, Bits{});  // makes a NaN quiet
    return (Vec)(sign | select(exponent == 0xf800000, shifted | INFINITY_BITS | quiet, finite));
  }
  INLINE_MEMBER static HalfBits rounded(Vec value) {
    constexpr uint32_t PAST_LARGEST = (127 + 16) << 23;  // 2^16; values that round up to it get the bits of infinity
    constexpr uint32_t LAST_PLACE = (127 - 14 - 10 + 23) << 23;  // the float with the last place of subnormal halves
    const Bits bits = (Bits)value, sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    const Bits last = LAST_PLACE - Bits{};
    const Bits subnormal = (Bits)((Vec)size + (Vec)last) - last;
    const Bits normal = (size - BIAS + 0xfff + ((size >> 13) & 1)) >> 13;
    const Bits finite = select(Lanes(size) < int32_t(SMALLEST_NORMAL), subnormal, normal);
    const Bits nan = ((size >> 13) & 0x3ff) | 0x7e00;
    const Bits endless = select(Lanes(size) > int32_t(INFINITY_BITS), nan, 0x7c00 - Bits{});
    return __builtin_convertvector(sign | select(Lanes(size) < int32_t(PAST_LARGEST), finite, endless), HalfBits);
  }
#endif
};

template <class Half>
INLINE Vec load(const Half* from) {
  return Half::widened(*reinterpret_cast<const UnalignedHalfBits*>(from));
}

template <class Half>
INLINE void store(Half* to, Vec value) {
  *reinterpret_cast<UnalignedHalfBits*>(to) = Half::rounded(value);
}

// Load the first `count` lanes and set the others to zero, without touching memory past from[count - 1].
template <class Half>
INLINE Vec load_first(const Half* from, int count) {
  if (count >= VL) return load(from);
  if (count <= 0) return Vec{};
#if defined(__AVX512F__)
  return Half::widened((HalfBits)_mm256_maskz_loadu_epi16(__mmask16((1u << count) - 1), from));
#else
  HalfBits bits = {};
  std::memcpy(&bits, from, count * sizeof(Half));
  return Half::widened(bits);
#endif
}

template <class Half>
INLINE void store_first(Half* to, Vec value, int count) {
  if (count >= VL) return store(to, value);
  if (count <= 0) return;
  const HalfBits bits = Half::rounded(value);
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(to, __mmask16((1u << count) - 1), (__m256i)bits);
#else
  std::memcpy(to, &bits, count * sizeof(Half));
#endif
}

INLINE float value_of(float element) { return element; }
INLINE double value_of(double element) { return element; }
template <class Half>
INLINE float value_of(Half element) {
  HalfBits bits = {};
  bits[0] = element.bits;
  return Half::widened(bits)[0];
}

// Copy elements, widened or rounded if the types differ.
template <class From, class To>
INLINE void copy_elements(const From* from, int count, To* to) {
  int i = 0;
  for (; i + VL <= count; i += VL) store(to + i, load(from + i));
  store_first(to + i, load_first(from + i, count - i), count - i);
}

// A pointer to elements whose type is known at run time.
struct Elements {
  void* first;
  Element type;

  ptrdiff_t element_bytes() const {
    if (type == FLOAT64) return sizeof(double);
    return type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
  }
  explicit operator bool() const { return first != nullptr; }
  template <class T>
  T* as() const {
    return static_cast<T*>(first);
  }
  Elements operator+(ptrdiff_t count) const {
    return {first ? as<char>() + count * element_bytes() : nullptr, type};
  }

  // Return the distance from `others`, of the same tensor, in elements.
  ptrdiff_t operator-(const Elements& others) const { return (as<char>() - others.as<char>()) / element_bytes(); }

  // Call body with a pointer of the elements' type, which must not be double.
  template <class Body>
  void visit(Body body) const {
    if (type == BFLOAT16) return body(as<BFloat16>());
    if (type == FLOAT16) return body(as<Float16>());
    body(as<float>());
  }
};

static inline Vec load_first(const Elements& from, int count) {
  Vec value;
  from.visit([&](const auto* typed) { value = load_first(typed, count); });
  return value;
}

// A few elements as floats: the elements themselves if they are floats, otherwise a copy; null if there are none.
class AsFloats {
 public:
  AsFloats(const Elements& from, int64_t count) : floats_(from.as<float>()) {
    if (!from || from.type == FLOAT32) return;
    copy_.resize(count);
    floats_ = copy_.data();
    from.visit([&](const auto* first) { copy_elements(first, int(count), copy_.data()); });
  }
  const float* data() const { return floats_; }

 private:
  const float* floats_;
  std::vector<float> copy_;
};
