// The element types of tensors, with 16-bit formats as their bits, and conversions to and from the type of arithmetic.
// No header of the CUDA toolkit is included, so that a runtime compiler is enough.

struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };

#ifdef __CUDACC__
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned float_bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
#endif

__device__ __forceinline__ float widened(float value) { return value; }
__device__ __forceinline__ double widened(double value) { return value; }
__device__ __forceinline__ float widened(Half value) { return half_to_float(value.bits); }
__device__ __forceinline__ float widened(BFloat16 value) { return float_of_bits(unsigned(value.bits) << 16); }

__device__ __forceinline__ void narrow(float value, float& to) { to = value; }
__device__ __forceinline__ void narrow(double value, double& to) { to = value; }
__device__ __forceinline__ void narrow(float value, Half& to) { to.bits = float_to_half(value); }

__device__ __forceinline__ void narrow(float value, BFloat16& to) {
  // The upper half of a float, rounded to nearest, ties to even; a NaN must not be rounded up to infinity.
  const unsigned bits = float_bits(value);
  to.bits = value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
