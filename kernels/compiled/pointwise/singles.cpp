#include "pointwise/gradient_tiles.h"

template struct pointwise::Arithmetic<Singles>;
