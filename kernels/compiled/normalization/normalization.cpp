// Batch, instance, group and layer normalization in training, with an addition and an activation behind them.
#include "normalization/backward.h"
#include "normalization/moments.h"

namespace normalization {

static void require_whole(const char* name, const Buffer& buffer, int64_t elements, int64_t type) {
  if (buffer) require_all_bytes(name, buffer.bytes, elements, Elements{nullptr, Element(type)}.element_bytes());
}

static void require(const Norm& norm, const Operands& operands) {
  norm.require();
  require_between("the function", norm.function, IDENTITY, GELU_TANH);
  if (norm.function == SIGMOID || norm.function == HARD_SIGMOID)
    refuse(MISMATCH, "a function that normalization does not have");
  if (operands.running_mean && norm.sets != norm.c) require_equal("the sets of running statistics", norm.sets, 0);
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
  const auto parameter = [&](const char* name, const Buffer& buffer, int64_t type) {
    require_whole(name, buffer, norm.c, type);
  };
  parameter("weight", operands.weight, norm.parameter_element);
  parameter("bias", operands.bias, norm.parameter_element);
  parameter("dweight", operands.dweight, norm.parameter_element);
  parameter("dbias", operands.dbias, norm.parameter_element);
  parameter("running mean", operands.running_mean, norm.running_element);
  parameter("running variance", operands.running_var, norm.running_element);
  if (operands.mask) require_bytes("mask", operands.mask.bytes, Layout(norm).total_mask_bytes);
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
