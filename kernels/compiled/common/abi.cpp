// The sizes and constants that Python mirrors: library.py compares them with its own when it loads a build.
#include <cstdint>

#include "program/step.h"

extern "C" __attribute__((visibility("default"))) const int64_t* mucudnn_abi() {
  static const int64_t numbers[] = {
      sizeof(TensorArgument), sizeof(Geometry), sizeof(EpilogueArgument), sizeof(Stage), sizeof(program::Step),
      LARGEST_SIZE, NO_MEMORY,
      FLOAT32, BFLOAT16, FLOAT16, FLOAT64,
      IDENTITY, RELU, RELU6, SILU,
      FORWARD, BACKWARD_DATA, BACKWARD_FILTER,
      OPEN, STEP, CLOSE,
  };
  return numbers;
}
