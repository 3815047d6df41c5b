// Packing of GGUF blocks into panels. Scalar: it runs once per model, then the packed form is cached on disk.
#include "formats.h"

namespace ceiba {
namespace {

// One row's 32 columns as small unsigned integers (Q8_0: two's complement bytes).
using Codes = uint8_t[32];

void put_nibbles(uint8_t* out, int row, const Codes& q) {
  for (int c = 0; c < 4; c++)
    for (int j = 0; j < 4; j++) out[64 * c + 4 * row + j] = uint8_t((q[8 * c + j] & 15) | (q[8 * c + 4 + j] & 15) << 4);
}

void put_fifth_bits(uint8_t* out, int row, const Codes& q) {
  for (int g = 0; g < 8; g++)
    for (int j = 0; j < 4; j++) out[4 * row + j] |= uint8_t((q[4 * g + j] >> 4 & 1) << g);
}

void put_two_bits(uint8_t* out, int row, const Codes& q) {
  for (int g = 0; g < 8; g++)
    for (int j = 0; j < 4; j++) out[64 * (g / 4) + 4 * row + j] |= uint8_t((q[4 * g + j] >> 4 & 3) << (2 * (g % 4)));
}

void put_half(uint8_t* out, int row, const uint8_t* half) { std::memcpy(out + 2 * row, half, 2); }

// Legacy GGUF blocks keep column i in the low nibble of byte i and column i + 16 in the high nibble.
void legacy_codes(const uint8_t* nibbles, const uint8_t* fifth, Codes& q) {
  uint32_t high = 0;
  if (fifth) std::memcpy(&high, fifth, 4);
  for (int i = 0; i < 16; i++) {
    q[i] = uint8_t((nibbles[i] & 15) | (high >> i & 1) << 4);
    q[i + 16] = uint8_t((nibbles[i] >> 4) | (high >> (i + 16) & 1) << 4);
  }
}

void pack_legacy(Kind kind, const uint8_t* block, int row, uint8_t* out) {
  Codes q;
  switch (kind) {
    case Kind::Q4_0:
      put_half(out, row, block);
      legacy_codes(block + 2, nullptr, q);
      put_nibbles(out + 32, row, q);
      break;
    case Kind::Q4_1:
      put_half(out, row, block);
      put_half(out + 32, row, block + 2);
      legacy_codes(block + 4, nullptr, q);
      put_nibbles(out + 64, row, q);
      break;
    case Kind::Q5_0:
      put_half(out, row, block);
      legacy_codes(block + 6, block + 2, q);
      put_fifth_bits(out + 32, row, q);
      put_nibbles(out + 96, row, q);
      break;
    case Kind::Q5_1:
      put_half(out, row, block);
      put_half(out + 32, row, block + 2);
      legacy_codes(block + 8, block + 4, q);
      put_fifth_bits(out + 64, row, q);
      put_nibbles(out + 128, row, q);
      break;
    default:  // Q8_0
      put_half(out, row, block);
      for (int g = 0; g < 8; g++) std::memcpy(out + 32 + 64 * g + 4 * row, block + 2 + 4 * g, 4);
  }
}

// The 6-bit scales and mins of Q4_K and Q5_K: 12 bytes hold 8 of each.
void k_scales(const uint8_t* packed, int i, uint8_t& scale, uint8_t& minimum) {
  if (i < 4) {
    scale = packed[i] & 63;
    minimum = packed[i + 4] & 63;
  } else {
    scale = uint8_t((packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4);
    minimum = uint8_t((packed[i + 4] >> 4) | (packed[i] >> 6) << 4);
  }
}

void pack_k45(bool five, const uint8_t* block, int row, uint8_t* out) {
  put_half(out, row, block);
  put_half(out + 32, row, block + 2);
  const uint8_t* scales = block + 4;
  const uint8_t* high = block + 16;
  const uint8_t* low = five ? block + 48 : block + 16;
  int stride = five ? 352 : 288;
  for (int b = 0; b < 8; b++) {
    uint8_t* to = out + 64 + b * stride;
    k_scales(scales, b, to[row], to[16 + row]);
    Codes q;
    for (int i = 0; i < 32; i++) {
      uint8_t byte = low[32 * (b / 2) + i];
      q[i] = uint8_t(b % 2 ? byte >> 4 : byte & 15);
      if (five) q[i] = uint8_t(q[i] | (high[i] >> b & 1) << 4);
    }
    if (five) {
      put_fifth_bits(to + 32, row, q);
      put_nibbles(to + 96, row, q);
    } else {
      put_nibbles(to + 32, row, q);
    }
  }
}

void pack_k6(const uint8_t* block, int row, uint8_t* out) {
  const uint8_t *low = block, *high = block + 128, *scales = block + 192;
  put_half(out, row, block + 208);
  for (int b = 0; b < 8; b++) {
    uint8_t* to = out + 32 + b * 416;
    to[row] = scales[2 * b];
    to[16 + row] = scales[2 * b + 1];
    int half = b / 4, quarter = b % 4;  // 128 columns a half, four runs of 32 in it
    Codes q;
    for (int i = 0; i < 32; i++) {
      uint8_t byte = low[64 * half + 32 * (quarter % 2) + i];
      uint8_t nibble = uint8_t(quarter < 2 ? byte & 15 : byte >> 4);
      q[i] = uint8_t(nibble | (high[32 * half + i] >> (2 * quarter) & 3) << 4);
    }
    put_nibbles(to + 32, row, q);
    put_two_bits(to + 288, row, q);
  }
}

}  // namespace

void pack_panel(Kind kind, const uint8_t* source, int64_t row_bytes, int64_t rows, int64_t cols, int64_t first,
                uint8_t* out) {
  const Format& format = format_of(kind);
  int64_t blocks = cols / format.block_cols;
  std::memset(out, 0, size_t(blocks) * format.packed_bytes);
  for (int row = 0; row < 16 && first + row < rows; row++) {
    const uint8_t* from = source + (first + row) * row_bytes;
    for (int64_t b = 0; b < blocks; b++, from += format.block_bytes) {
      uint8_t* to = out + b * format.packed_bytes;
      switch (kind) {
        case Kind::F32: std::memcpy(to + 4 * row, from, 4); break;
        case Kind::BF16: std::memcpy(to + 2 * row, from, 2); break;
        case Kind::Q4_K: pack_k45(false, from, row, to); break;
        case Kind::Q5_K: pack_k45(true, from, row, to); break;
        case Kind::Q6_K: pack_k6(from, row, to); break;
        default: pack_legacy(kind, from, row, to);
      }
    }
  }
}

}  // namespace ceiba
