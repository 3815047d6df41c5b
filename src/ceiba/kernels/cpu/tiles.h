// Matrix tiles (AMX): the instructions, or the same in plain C++ (CEIBA_TILES_EMULATED) so that the code around them can be
// checked on a processor without them. Included by the units that use tiles, inside their anonymous namespace.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS, TDPBSUD, TDPBSSD. A tile has
// at most 16 rows of 64 bytes. C[m][n] += Σ A[m][k] · B[k][n], where a 32-bit word of row r of B holds the 2 (bf16) or 4
// (int8) consecutive k from 2r or 4r on.

// Shapes are loaded once per thread and call: C, a block of 32 columns as bf16, half a block, a block as int8.
enum Tile { C0 = 0, A32 = 1, B32 = 2, A16 = 3, B16 = 4, A8 = 5, B8 = 6 };
constexpr int TILE_ROWS[8] = {16, 16, 16, 16, 8, 16, 8, 0};
constexpr int TILE_BYTES[8] = {64, 64, 64, 32, 64, 32, 64, 0};

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
template <int C, int A, int B>
inline void tile_bf16() {
  auto value = [](const uint8_t* p) {
    uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  };
  for (int m = 0; m < TILE_ROWS[A]; m++)
    for (int k = 0; k < TILE_BYTES[A] / 4; k++)
      for (int n = 0; n < 16; n++) {
        float sum;
        uint8_t* to = tiles().data[C][m] + 4 * n;
        std::memcpy(&sum, to, 4);
        for (int i = 0; i < 2; i++)
          sum += value(tiles().data[A][m] + 4 * k + 2 * i) * value(tiles().data[B][k] + 4 * n + 2 * i);
        std::memcpy(to, &sum, 4);
      }
}
template <int C, int A, int B, bool SIGNED>
inline void tile_int8() {
  for (int m = 0; m < TILE_ROWS[A]; m++)
    for (int k = 0; k < TILE_BYTES[A] / 4; k++)
      for (int n = 0; n < 16; n++) {
        int32_t sum;
        uint8_t* to = tiles().data[C][m] + 4 * n;
        std::memcpy(&sum, to, 4);
        for (int i = 0; i < 4; i++) {
          uint8_t b = tiles().data[B][k][4 * n + i];
          sum += int32_t(int8_t(tiles().data[A][m][4 * k + i])) * (SIGNED ? int32_t(int8_t(b)) : int32_t(b));
        }
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
  else if constexpr (T == 3) CASE(3); else if constexpr (T == 4) CASE(4); else if constexpr (T == 5) CASE(5); \
  else CASE(6)
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
  static_assert(T == C0);
  _tile_stored(0, to, stride);
}
template <int C, int A, int B>
CEIBA_INLINE void tile_bf16() {
  static_assert(C == C0 && ((A == A32 && B == B32) || (A == A16 && B == B16)));
  if constexpr (A == A32) _tile_dpbf16ps(0, 1, 2);
  else _tile_dpbf16ps(0, 3, 4);
}
template <int C, int A, int B, bool SIGNED>
CEIBA_INLINE void tile_int8() {
  static_assert(C == C0 && A == A8 && B == B8);
  if constexpr (SIGNED) _tile_dpbssd(0, 5, 6);
  else _tile_dpbsud(0, 5, 6);
}

#endif
