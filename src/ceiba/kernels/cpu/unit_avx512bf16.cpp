#define CEIBA_UNIT avx512bf16
#define CEIBA_TILES
#define CEIBA_TILES_IN_VECTORS
#include "unit.inc"
