#define CEIBA_UNIT avx512vnni
#include "unit.inc"
