// The code around the tiles on a processor without them, for tests (-DCEIBA_EMULATED_UNITS=ON).
#define CEIBA_UNIT amx_emulated
#define CEIBA_TILES
#define CEIBA_TILES_EMULATED
#include "unit.inc"
