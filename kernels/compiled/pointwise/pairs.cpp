#if defined(__AVX512F__)  // without it, pairs are not multiplied (common/pairs.h)
#include "pointwise/gradient_tiles.h"

template struct pointwise::Arithmetic<Pairs>;
#endif
