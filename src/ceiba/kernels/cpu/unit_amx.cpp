#define CEIBA_UNIT amx
#define CEIBA_TILES
#include "unit.inc"
