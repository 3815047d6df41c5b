// Plain float32 rows to GGUF block bytes.
#pragma once

#include "formats.h"

namespace ceiba {

// Whether `quantize_values` knows the type: Q8_0 and Q4_1.
bool can_quantize(Kind kind);

// One row of `cols` (a multiple of 32) values to cols / 32 blocks as a GGUF file stores them.
void quantize_values(Kind kind, const float* x, int64_t cols, uint8_t* out);

}  // namespace ceiba
