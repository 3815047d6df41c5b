#define CEIBA_UNIT avx2_fixed
#define CEIBA_FIXED_ORDER
#include "unit.inc"
