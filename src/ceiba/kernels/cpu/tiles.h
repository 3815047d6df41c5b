// Matrix tiles (AMX): the instructions, or the same in plain C++ (CEIBA_TILES_EMULATED) so that the code around them can be
// checked on a processor without them. Included by the units that use tiles, inside their anonymous namespace.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, TDPBSSD and its kin. A tile has
// at most 16 rows of 64 bytes. C[m][n] += Σ A[m][k] · B[k][n], where a 32-bit word of row r of B holds the 2 (bf16) or 4
// (int8) consecutive k from 2r or 4r on.

// Shapes are loaded once per thread and call: two C, a block of 32 columns as bf16 and as bytes.
enum Tile { C0 = 0, C1 = 1, A16 = 2, B16 = 3, A8 = 4, B8 = 5 };
constexpr int TILE_ROWS[8] = {16, 16, 16, 16, 16, 8, 0, 0};
constexpr int TILE_BYTES[8] = {64, 64, 64, 64, 32, 64, 0, 0};

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
inline void tile_zero() { std::memset(tiles().data[T], 0, 1024); }
template <int T>
inline void tile_load(const void* from, int64_t stride) {
  for (int r = 0; r < TILE_ROWS[T]; r++)
    std::memcpy(tiles().data[T][r], static_cast<const uint8_t*>(from) + r * stride, size_t(TILE_BYTES[T]));
}
template <int T>
inline void tile_store(void* to, int64_t stride) {
  for (int r = 0; r < TILE_ROWS[T]; r++)
    std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles().data[T][r], size_t(TILE_BYTES[T]));
}
// C0 += A16 · B16
inline void tile_bf16() {
  auto value = [](const uint8_t* p) {
    uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  };
  for (int m = 0; m < TILE_ROWS[A16]; m++)
    for (int k = 0; k < TILE_BYTES[A16] / 4; k++)
      for (int n = 0; n < 16; n++) {
        float sum;
        uint8_t* to = tiles().data[C0][m] + 4 * n;
        std::memcpy(&sum, to, 4);
        for (int i = 0; i < 2; i++)
          sum += value(tiles().data[A16][m] + 4 * k + 2 * i) * value(tiles().data[B16][k] + 4 * n + 2 * i);
        std::memcpy(to, &sum, 4);
      }
}
// C += A8 · B8, bytes of either with or without a sign.
template <int C, bool A_SIGNED, bool B_SIGNED>
inline void tile_int8() {
  auto value = [](uint8_t byte, bool is_signed) { return is_signed ? int32_t(int8_t(byte)) : int32_t(byte); };
  for (int m = 0; m < TILE_ROWS[A8]; m++)
    for (int k = 0; k < TILE_BYTES[A8] / 4; k++)
      for (int n = 0; n < 16; n++) {
        int32_t sum;
        uint8_t* to = tiles().data[C][m] + 4 * n;
        std::memcpy(&sum, to, 4);
        for (int i = 0; i < 4; i++)
          sum += value(tiles().data[A8][m][4 * k + i], A_SIGNED) * value(tiles().data[B8][k][4 * n + i], B_SIGNED);
        std::memcpy(to, &sum, 4);
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
      config.bytes[t] = uint16_t(TILE_BYTES[t]);
      config.rows[t] = uint8_t(TILE_ROWS[t]);
    }
    // GCC 12 sees no use of `config` in the intrinsic and drops the stores above without this.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};
// The intrinsics are macros that need the tile's number as a literal.
#define CEIBA_TILE_CASES(T, CASE) \
  if constexpr (T == 0) CASE(0); else if constexpr (T == 1) CASE(1); else if constexpr (T == 2) CASE(2); \
  else if constexpr (T == 3) CASE(3); else if constexpr (T == 4) CASE(4); else CASE(5)
template <int T>
CEIBA_INLINE void tile_zero() {
#define CASE(N) _tile_zero(N)
  CEIBA_TILE_CASES(T, CASE);
#undef CASE
}
template <int T>
CEIBA_INLINE void tile_load(const void* from, int64_t stride) {
#define CASE(N) _tile_loadd(N, from, stride)
  CEIBA_TILE_CASES(T, CASE);
#undef CASE
}
template <int T>
CEIBA_INLINE void tile_store(void* to, int64_t stride) {
  static_assert(T == C0 || T == C1);
  if constexpr (T == C0) _tile_stored(0, to, stride);
  else _tile_stored(1, to, stride);
}
CEIBA_INLINE void tile_bf16() { _tile_dpbf16ps(0, 2, 3); }
template <int C, bool A_SIGNED, bool B_SIGNED>
CEIBA_INLINE void tile_int8() {
  static_assert(C == C0 ? A_SIGNED : !A_SIGNED);
  if constexpr (C == C0) {
    if constexpr (B_SIGNED) _tile_dpbssd(0, 4, 5);
    else _tile_dpbsud(0, 4, 5);
  } else {
    if constexpr (B_SIGNED) _tile_dpbusd(1, 4, 5);
    else _tile_dpbuud(1, 4, 5);
  }
}

#endif
