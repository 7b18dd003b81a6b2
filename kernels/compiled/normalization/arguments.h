// What Python passes to the normalization functions. library.py mirrors the structures.
#pragma once

#include "common/abi.h"

namespace normalization {

// How many sets of elements have statistics of their own: a positive number is that of groups of channels of each sample.
enum Sets : int64_t { OF_PIXELS = -1, OF_CHANNELS = 0 };

// x (N, C, pixels), or (N, pixels, C) with the channels last, and what is computed of it. parameter_element: of weight,
// bias and their gradients; running_element: of the running statistics.
struct Norm {
  int64_t element, parameter_element, running_element, n, c, pixels, channels_last, sets, function, is_fixed, threads;
  double eps, slope;

  int64_t elements() const { return times(times(n, c), pixels); }

  // Return how many means there are.
  int64_t statistics() const {
    if (sets == OF_CHANNELS) return c;
    return times(n, sets == OF_PIXELS ? pixels : sets);
  }

  void require() const {
    for (const int64_t type : {element, parameter_element, running_element})
      require_between("the type of elements", type, FLOAT32, FLOAT16);
    require_between("the number of samples", n, 1, INT64_MAX);
    require_size("the number of channels", c);
    require_between("the number of pixels", pixels, 1, INT64_MAX);
    elements();
    require_between("the sets of statistics", sets, OF_PIXELS, c);
    if (sets > 0) require_divides(sets, c);
    if (sets == OF_PIXELS) require_equal("channels last", channels_last, 1);
    require_threads(threads);
  }
};

struct Buffer {
  void* data;
  int64_t bytes;

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Those that a function does not need are null.
struct Operands {
  Buffer x, mean, inverse, running_mean, running_var, weight, bias, added, mask, y, dy, dx, dadded, dweight, dbias;
};

}  // namespace normalization
