#define CEIBA_UNIT avx512
#include "unit.inc"
