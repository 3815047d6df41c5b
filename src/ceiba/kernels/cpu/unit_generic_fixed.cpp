#define CEIBA_UNIT generic_fixed
#define CEIBA_FIXED_ORDER
#include "unit.inc"
