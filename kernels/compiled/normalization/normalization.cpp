// Batch, instance, group and layer normalization in training, with an addition and an activation behind them.
#include "normalization/backward.h"
#include "normalization/moments.h"

namespace normalization {

static Vec hard_sigmoid(Vec z) {
  z = z * (1 / 6.f) + 0.5f;
  z = z < 0 ? Vec{} : z;
  return z > 1 ? broadcast(1) : z;
}

Vec smooth(int64_t function, Vec z) {
  if (function == SILU) return z / (1 + exponential(-z));
  return z * hard_sigmoid(z);
}

Vec smooth_slope(int64_t function, Vec z) {
  if (function == SILU) {
    const Vec sigmoid = 1 / (1 + exponential(-z));
    return sigmoid * (1 + z * (1 - sigmoid));
  }
  return z < -3 ? Vec{} : z <= 3 ? z * (1 / 3.f) + 0.5f : broadcast(1);
}

static void require_whole(const char* name, const Buffer& buffer, int64_t elements, int64_t type) {
  if (buffer) require_all_bytes(name, buffer.bytes, elements, Elements{nullptr, Element(type)}.element_bytes());
}

static void require(const Norm& norm, const Operands& operands) {
  norm.require();
  const auto is_function = [&](int64_t function) { return norm.function == function; };
  if (!(norm.function >= IDENTITY && norm.function <= SILU) && !is_function(program::HARD_SWISH) &&
      !is_function(program::LEAKY_RELU))
    refuse(MISMATCH, "a function that normalization does not have");
  const Layout layout(norm);
  const int64_t elements = norm.elements();
  const auto tensor = [&](const char* name, const Buffer& buffer) {
    require_whole(name, buffer, elements, norm.element);
  };
  tensor("x", operands.x);
  tensor("added", operands.added);
  tensor("y", operands.y);
  tensor("dy", operands.dy);
  tensor("dx", operands.dx);
  tensor("dadded", operands.dadded);
  require_whole("mean", operands.mean, norm.statistics(), FLOAT32);
  require_whole("inverse", operands.inverse, norm.statistics(), FLOAT32);
  for (const Buffer& buffer : {operands.weight, operands.bias, operands.dweight, operands.dbias})
    require_whole("a parameter", buffer, norm.c, norm.parameter_element);
  for (const Buffer& buffer : {operands.running_mean, operands.running_var})
    require_whole("a running statistic", buffer, norm.c, norm.running_element);
  if (operands.mask) require_bytes("mask", operands.mask.bytes, layout.total_mask_bytes);
}

// Call body with a pointer of the type of x's elements, after all checks.
template <class Body>
static int64_t checked(const Norm& norm, const Operands& operands, Body body) {
  return refusable([&] {
    require(norm, operands);
    Elements{operands.x.data, Element(norm.element)}.visit(body);
    return int64_t(0);
  });
}

}  // namespace normalization

using namespace normalization;
#define TYPE_OF(pointer) std::remove_pointer_t<decltype(pointer)>

extern "C" {
__attribute__((visibility("default"))) int64_t mucudnn_norm_mask_bytes(const Norm* norm) {
  return refusable([&] { return norm->require(), Layout(*norm).total_mask_bytes; });
}

__attribute__((visibility("default"))) int64_t mucudnn_norm_moments(const Norm* norm, const Operands* operands,
                                                                    double momentum) {
  return checked(*norm, *operands, [&](auto* x) { moments<TYPE_OF(x)>(*norm, *operands, momentum); });
}

__attribute__((visibility("default"))) int64_t mucudnn_norm_forward(const Norm* norm, const Operands* operands) {
  return checked(*norm, *operands, [&](auto* x) { forward<TYPE_OF(x)>(*norm, *operands); });
}

__attribute__((visibility("default"))) int64_t mucudnn_norm_backward(const Norm* norm, const Operands* operands) {
  return checked(*norm, *operands, [&](auto* x) { backward<TYPE_OF(x)>(*norm, *operands); });
}
}
