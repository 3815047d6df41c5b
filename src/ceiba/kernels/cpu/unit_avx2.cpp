#define CEIBA_UNIT avx2
#include "unit.inc"
