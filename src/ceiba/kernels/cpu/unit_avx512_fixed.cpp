#define CEIBA_UNIT avx512_fixed
#define CEIBA_FIXED_ORDER
#include "unit.inc"
