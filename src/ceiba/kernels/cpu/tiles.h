// Matrix tiles (AMX): the instructions, or the same in plain C++ (CEIBA_TILES_EMULATED) so that the code around them can be
// checked on a processor without them. Included by the units that use tiles, inside their anonymous namespace.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS. A tile has 16 rows of 64
// bytes. C[m][n] += Σ A[m][k] · B[k][n] over 32 bfloat16 values k, where word n of row r of B holds k = 2r and 2r + 1. Even
// and odd products are summed apart from nothing on, each step fused; both sums, then C, are added with one rounding each.

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

// acc[r][p] [16, 16] += x[r] · (panel p)ᵀ over blocks of 32 columns; `FRESH`: = instead. A tile is multiplied whole, however
// many of its `rows` are there. Where sums leave tiles free, two steps take turns with two sets of operands, since a tile is
// loaded only when the product that read it is done.
template <int R, int P, bool FRESH = false>
inline void tile_steps(const int32_t* const (&w)[P], const uint16_t* const (&x)[R], int64_t blocks, float* const (&acc)[R][P],
                       [[maybe_unused]] int64_t rows = R * TILE_M) {
  constexpr int SUMS = R * P, SPARE = SUMS + R + P;
  constexpr bool TURNS = SPARE + R + P <= 8;
  auto each = [](auto count, const auto& run) __attribute__((always_inline)) {
    run(Count<0>{});
    if constexpr (decltype(count)::value > 1) run(Count<1>{});
  };
  auto sums = [&](const auto& run) __attribute__((always_inline)) {
    each(Count<R>{}, [&](auto r) __attribute__((always_inline)) {
      each(Count<P>{}, [&](auto p) __attribute__((always_inline)) {
        run(Count<decltype(r)::value * P + decltype(p)::value>{}, acc[decltype(r)::value][decltype(p)::value]);
      });
    });
  };
  auto step = [&](int64_t b, auto first) __attribute__((always_inline)) {
    constexpr int A = decltype(first)::value, B = A + R;
    each(Count<P>{}, [&](auto p) __attribute__((always_inline)) {
      tile_load<B + decltype(p)::value>(w[decltype(p)::value] + b * TILE_WORDS, 64);
    });
    each(Count<R>{}, [&](auto r) __attribute__((always_inline)) {
      constexpr int I = decltype(r)::value;
      tile_load<A + I>(x[I] + b * (2 * TILE_WORDS), 64);
      each(Count<P>{}, [&](auto p) __attribute__((always_inline)) {
        tile_multiply<I * P + decltype(p)::value, A + I, B + decltype(p)::value>();
      });
    });
  };
  sums([](auto tile, float* from) __attribute__((always_inline)) {
    alignas(64) static constexpr float NOTHING[16] = {};  // a tile zeroed by its own instruction costs more
    tile_load<decltype(tile)::value>(FRESH ? NOTHING : from, FRESH ? 0 : 64);
  });
  int64_t b = 0;
  for (; b + 2 <= blocks; b += 2) {
    step(b, Count<SUMS>{});
    step(b + 1, Count<TURNS ? SPARE : SUMS>{});
  }
  if (b < blocks) step(b, Count<SUMS>{});
  sums([](auto tile, float* to) __attribute__((always_inline)) { tile_store<decltype(tile)::value>(to, 64); });
}
