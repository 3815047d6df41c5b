#define CEIBA_UNIT generic
#include "unit.inc"
