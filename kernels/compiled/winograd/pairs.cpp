#if defined(__AVX512F__)  // without it, pairs are not multiplied (common/pairs.h)
#include "winograd/product_tiles.h"

template struct winograd::Arithmetic<Pairs>;
#endif
