// Packed blocks as vectors: codes, scales and minimums of each weight type. Included by each instruction-set unit inside
// its anonymous namespace. The bytes are described in formats.h.

// ── codes: one block of 32 columns as eight groups of 4, for one vector of rows ─────────────────────────────────────

template <Kind K>
struct Codec;

// Group g of a block; `bits`: the fifth bits, or the two-bit half that the group lies in.
CEIBA_INLINE vb nibble_group_of(const uint8_t* p, int g, int v) {
  vb byte = load_bytes(p + 64 * (g / 2) + v * W * 4);
  return (g % 2 ? (vb)((vh)byte >> 4) : byte) & 15;
}
CEIBA_INLINE vb fifth_of(vb bits, int g) { return (g < 4 ? (vb)((vh)bits << (4 - g)) : (vb)((vh)bits >> (g - 4))) & 16; }

// Value of a code: scale[half] · code + shift[half], half = group / 4 (only Q6_K has two different halves).
struct Scales {
  vf scale[2], shift[2];
};

template <int OFFSET, bool MINIMUM, bool FIFTH>
struct Legacy {
  static constexpr int BLOCK = 32 + (MINIMUM ? 32 : 0) + (FIFTH ? 64 : 0) + 256;
  static constexpr int SUPER = 1, HEAD = 0;
  static constexpr bool SIGNED = false, HALVES = false, NIBBLES = !FIFTH;
  static constexpr int PER_MADD = FIFTH ? 4 : 8;
  static CEIBA_INLINE vb extra(const uint8_t* b, int, int v) { return FIFTH ? load_bytes(b + BLOCK - 320 + v * W * 4) : vb{}; }
  static CEIBA_INLINE vb group(const uint8_t* b, int g, int v, vb bits) {
    vb low = nibble_group_of(b + BLOCK - 256, g, v);
    return FIFTH ? low | fifth_of(bits, g) : low;
  }
  static CEIBA_INLINE void scales(const uint8_t*, const uint8_t* b, int v, Scales& s) {
    s.scale[0] = from_half(reinterpret_cast<const uint16_t*>(b) + v * W);
    s.shift[0] = MINIMUM ? from_half(reinterpret_cast<const uint16_t*>(b + 32) + v * W) : s.scale[0] * float(-OFFSET);
  }
};
template <> struct Codec<Kind::Q4_0> : Legacy<8, false, false> {};
template <> struct Codec<Kind::Q4_1> : Legacy<0, true, false> {};
template <> struct Codec<Kind::Q5_0> : Legacy<16, false, true> {};
template <> struct Codec<Kind::Q5_1> : Legacy<0, true, true> {};

template <>
struct Codec<Kind::Q8_0> {
  static constexpr int BLOCK = 544, SUPER = 1, HEAD = 0, PER_MADD = 1;
  static constexpr bool SIGNED = true, HALVES = false, NIBBLES = false;
  static CEIBA_INLINE vb extra(const uint8_t*, int, int) { return vb{}; }
  static CEIBA_INLINE vb group(const uint8_t* b, int g, int v, vb) { return load_bytes(b + 32 + 64 * g + v * W * 4); }
  static CEIBA_INLINE void scales(const uint8_t*, const uint8_t* b, int v, Scales& s) {
    s.scale[0] = from_half(reinterpret_cast<const uint16_t*>(b) + v * W);
    s.shift[0] = vf{};
  }
};

template <bool FIFTH>
struct SuperK {
  static constexpr int BLOCK = FIFTH ? 352 : 288, SUPER = 8, HEAD = 64, PER_MADD = FIFTH ? 4 : 8;
  static constexpr bool SIGNED = false, HALVES = false, NIBBLES = !FIFTH;
  static CEIBA_INLINE vb extra(const uint8_t* b, int, int v) { return FIFTH ? load_bytes(b + 32 + v * W * 4) : vb{}; }
  static CEIBA_INLINE vb group(const uint8_t* b, int g, int v, vb bits) {
    vb low = nibble_group_of(b + BLOCK - 256, g, v);
    return FIFTH ? low | fifth_of(bits, g) : low;
  }
  static CEIBA_INLINE void scales(const uint8_t* head, const uint8_t* b, int v, Scales& s) {
    vf d = from_half(reinterpret_cast<const uint16_t*>(head) + v * W);
    vf m = from_half(reinterpret_cast<const uint16_t*>(head + 32) + v * W);
    s.scale[0] = d * from_u8(b + v * W);
    s.shift[0] = -(m * from_u8(b + 16 + v * W));
  }
};
template <> struct Codec<Kind::Q4_K> : SuperK<false> {};
template <> struct Codec<Kind::Q5_K> : SuperK<true> {};

template <>
struct Codec<Kind::Q6_K> {
  static constexpr int BLOCK = 416, SUPER = 8, HEAD = 32, PER_MADD = 2;
  static constexpr bool SIGNED = false, HALVES = true, NIBBLES = false;
  static CEIBA_INLINE vb extra(const uint8_t* b, int half, int v) { return load_bytes(b + 288 + 64 * half + v * W * 4); }
  static CEIBA_INLINE vb group(const uint8_t* b, int g, int v, vb bits) {
    int t = g % 4;
    vb two = t < 2 ? (vb)((vh)bits << (4 - 2 * t)) : (vb)((vh)bits >> (2 * t - 4));
    return nibble_group_of(b + 32, g, v) | (two & 48);
  }
  static CEIBA_INLINE void scales(const uint8_t* head, const uint8_t* b, int v, Scales& s) {
    vf d = from_half(reinterpret_cast<const uint16_t*>(head) + v * W);
    for (int h = 0; h < 2; h++) {
      s.scale[h] = d * from_s8(reinterpret_cast<const int8_t*>(b) + 16 * h + v * W);
      s.shift[h] = s.scale[h] * -32.f;
    }
  }
};

template <Kind K>
CEIBA_INLINE void block_codes(const uint8_t* body, int v, vb (&w)[8]) {
  CEIBA_UNROLL
  for (int g = 0; g < 8; g++) w[g] = Codec<K>::group(body, g, v, Codec<K>::extra(body, g / 4, v));
}
