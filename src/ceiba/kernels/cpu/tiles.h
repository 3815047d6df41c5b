// Matrix tiles (AMX): the instructions, or the same in plain C++ (CEIBA_TILES_EMULATED) so that the code around them can be
// checked on a processor without them. Included by the units that use tiles, inside their anonymous namespace.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS. A tile has 16 rows of 64
// bytes. C[m][n] += Σ A[m][k] · B[k][n] over 32 bfloat16 values k, where word n of row r of B holds k = 2r and 2r + 1. Even
// and odd products are summed apart from nothing on, each step fused; both sums, then C, are added with one rounding each.

constexpr int TILE_WORDS = 16 * 16;

#if defined(CEIBA_TILES_EMULATED)

struct EmulatedTiles {
  uint8_t data[8][16][64];
};
inline EmulatedTiles& tiles() {
  static thread_local EmulatedTiles state;
  return state;
}
struct TileScope {};
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  for (int r = 0; r < 16; r++) std::memcpy(tiles().data[T][r], static_cast<const uint8_t*>(from) + r * stride, 64);
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < 16; r++) std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles().data[T][r], 64);
}
// C += A · B
template <int C, int A, int B>
inline void tile_multiply() {
  auto value = [](const uint8_t* p) {
    uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  };
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum[2] = {}, total;
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++)
          sum[i] = __builtin_fmaf(value(tiles().data[A][m] + 4 * k + 2 * i), value(tiles().data[B][k] + 4 * n + 2 * i), sum[i]);
      std::memcpy(&total, tiles().data[C][m] + 4 * n, 4);
      total += sum[0] + sum[1];
      std::memcpy(tiles().data[C][m] + 4 * n, &total, 4);
    }
}

#else

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// The tile state of this thread while it computes. Released afterwards, or every context switch would carry 8 KiB.
struct TileScope {
  TileScope() {
    TileConfig config{};
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
      config.bytes[t] = 64;
      config.rows[t] = 16;
    }
    // GCC 12 sees no use of `config` in the intrinsic and drops the stores above without this.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};
// Not the intrinsics: those are macros that need a tile's number as a literal, and GCC's load does not say that it reads.
template <int T>
CEIBA_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
CEIBA_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
// C += A · B
template <int C, int A, int B>
CEIBA_INLINE void tile_multiply() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }

#endif
