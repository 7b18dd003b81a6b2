// The sizes and constants that Python mirrors: library.py compares them with its own when it loads a build.
#include <cstdint>

#include "common/functions.h"
#include "normalization/arguments.h"
#include "program/step.h"

extern "C" __attribute__((visibility("default"))) const int64_t* mucudnn_abi() {
  static const int64_t numbers[] = {
      sizeof(TensorArgument), sizeof(Geometry), sizeof(EpilogueArgument), sizeof(Stage), sizeof(program::Step),
      sizeof(normalization::Norm), sizeof(normalization::Operands),
      LARGEST_SIZE, NO_MEMORY,
      FLOAT32, BFLOAT16, FLOAT16, FLOAT64,
      IDENTITY, RELU, RELU6, SILU, SIGMOID, HARD_SIGMOID, HARD_SWISH, LEAKY_RELU,
      GELU, GELU_TANH,
      FORWARD, BACKWARD_DATA, BACKWARD_FILTER,
      program::CONVOLUTION, program::COPY, program::ELEMENTWISE, program::MAX_POOL, program::AVERAGE_POOL,
      program::RESIZE, program::SHUFFLE, program::MOMENTS, program::NORMALIZE, program::SCALE,
      program::NONE, program::ADD, program::MULTIPLY,
      OPEN, STEP, CLOSE,
      Moments::ROWS, Moments::PADDING,
  };
  return numbers;
}

extern "C" __attribute__((visibility("default"))) int64_t mucudnn_vector_length() { return VL; }

extern "C" __attribute__((visibility("default"))) int64_t mucudnn_products() { return best_products(); }
