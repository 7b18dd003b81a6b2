#include "winograd/product_tiles.h"

template struct winograd::Arithmetic<Singles>;
