#include "winograd/variant.h"

namespace winograd {

const Winograd* f2x5(int64_t stride) {
  static const Variant<2, 5, 1> UNSTRIDED;
  return stride == 1 ? &UNSTRIDED : nullptr;
}

}  // namespace winograd
