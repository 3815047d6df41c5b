// Packed weight layouts and their scalar description: the one place that knows how bytes lie.
//
// A matrix [rows, cols] is cut into panels of 16 rows (rows padded with zeros). Inside a panel, blocks of 32 columns
// follow each other, so one thread streams a panel front to back. In a block the 16 rows are interleaved in groups of 4
// columns: byte (row·4 + j) of group g belongs to column 4g + j. A vector then holds one partial sum per row and needs
// no horizontal step.
//
//   nibbles   256 B: 4 chunks of 64 B; low nibble of chunk c is group 2c, high nibble group 2c + 1
//   fifth bit  64 B: bit g of byte (row·4 + j) belongs to group g
//   two bits  128 B: half h, bits 2t..2t+1 belong to group 4h + t
//   bytes     512 B: group g at 64·g
//
// K types keep their super-block of 256 columns: a header per super-block, then 8 blocks with their integer scales.
#pragma once

#include <cstdint>
#include <cstring>

namespace ceiba {

enum class Kind : int { F32, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, COUNT };

struct Format {
  const char* name;
  int block_cols;        // columns a GGUF block spans (1: plain)
  int block_bytes;       // bytes of one GGUF block of one row
  int packed_bytes;      // bytes of 16 rows × block_cols, packed
  bool quantized;
};

// Q4_1 for instance: 16 × (2 d + 2 m + 16 nibble bytes) = 320.
constexpr Format FORMATS[] = {
    {"F32", 1, 4, 64, false},        {"BF16", 1, 2, 32, false},       {"Q4_0", 32, 18, 288, true},
    {"Q4_1", 32, 20, 320, true},     {"Q5_0", 32, 22, 352, true},     {"Q5_1", 32, 24, 384, true},
    {"Q8_0", 32, 34, 544, true},     {"Q4_K", 256, 144, 64 + 8 * 288, true},
    {"Q5_K", 256, 176, 64 + 8 * 352, true}, {"Q6_K", 256, 210, 32 + 8 * 416, true},
};

inline const Format& format_of(Kind kind) { return FORMATS[int(kind)]; }

struct Matrix {
  Kind kind;
  int64_t rows;
  int64_t cols;
  const uint8_t* data;   // panels, back to back
  const float* bias;     // [rows padded to 16] or null
  int64_t panels() const { return (rows + 15) / 16; }
  int64_t panel_bytes() const { return cols / format_of(kind).block_cols * format_of(kind).packed_bytes; }
};

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float tiny = float(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Packs rows [first, first + 16) of a matrix in its file layout (`row_bytes` each; rows ≥ `rows` become zeros).
void pack_panel(Kind kind, const uint8_t* source, int64_t row_bytes, int64_t rows, int64_t cols, int64_t first,
                uint8_t* out);

}  // namespace ceiba
