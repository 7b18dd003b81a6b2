#include "implicit_gemm/filter_gradient_tiles.h"
#include "implicit_gemm/forward_tiles.h"
#include "implicit_gemm/pixel_tiles.h"

template struct implicit_gemm::Arithmetic<Singles>;
