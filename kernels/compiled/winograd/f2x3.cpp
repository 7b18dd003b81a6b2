#include "winograd/variant.h"

namespace winograd {

const Winograd* f2x3(int64_t stride, bool of_pairs) {
  static const Variant<2, 3, 1> UNSTRIDED;
  static const Variant<2, 3, 2> STRIDED;
  static const Variant<2, 3, 1, Pairs> OF_PAIRS;
  if (of_pairs) return stride == 1 ? &OF_PAIRS : nullptr;
  if (stride == 2) return &STRIDED;
  return stride == 1 ? &UNSTRIDED : nullptr;
}

}  // namespace winograd
