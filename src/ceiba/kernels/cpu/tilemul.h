// y = x · Wᵀ for many rows of x on matrix tiles. Included by the units that use tiles, inside their anonymous namespace.
//
// A tile multiplies bfloat16 values, and both the codes of packed weights and the two bytes of an activation of 16 bits are
// such values, so that a block of 32 columns is one product for the upper bytes and one for the lower. The first is exact,
// the second too, and adding them rounds once: what a tile holds is the block's integer (wide.h) as float32, bit for bit.
// Activations of 8 bits (--enable-int8-activations) take the first product alone. Plain bfloat16 weights meet activations as
// sums of two bfloat16 values, which leaves a relative error of 2^-17.
//
// A tile's sums reach vector registers through memory, and a load of what a tile has just stored waits for long. So a block
// is folded one step behind the products, which run meanwhile. Two panels share the tiles of activations.

enum Tile { A0 = 4, A1 = 5, B0 = 6, B1 = 7 };  // sums take 0 to 3

// Two bfloat16 values side by side in each word; both are exact, so that nothing is rounded by cutting them.
CEIBA_INLINE vi pair_of(vf low, vf high) { return (vi)((vu)low >> 16) | ((vi)high & int32_t(0xffff0000)); }

// ── plain weights ───────────────────────────────────────────────────────────────────────────────────────────────────

constexpr int64_t TILE_DEPTH = 2048;  // columns of plain weights whose tiles lie ready: 64 KiB of pairs

// acc [m, 16] += x · pairsᵀ for up to 16 · G rows: G sums at once, since each waits for its own last product.
template <int G>
inline void plain_tiles(const uint16_t* pairs, const uint16_t* high, const uint16_t* low, int64_t cols, int64_t depth, int m,
                        float* acc) {
  alignas(64) float sums[TILE_WORDS];
  auto each = [&](const auto& run) __attribute__((always_inline)) {
    run(Count<0>{});
    if constexpr (G > 1) run(Count<1>{});
    if constexpr (G > 2) run(Count<2>{}), run(Count<3>{});
  };
  each([&](auto g) { tile_zero<decltype(g)::value>(); });
  for (int64_t k = 0; k < depth; k += 32) {
    tile_load<B0>(pairs + k * LANES, 64);
    each([&](auto g) {
      tile_load<A0>(high + 16 * decltype(g)::value * cols + k, cols * 2);
      tile_multiply<decltype(g)::value, A0, B0>();
    });
    each([&](auto g) {
      tile_load<A1>(low + 16 * decltype(g)::value * cols + k, cols * 2);
      tile_multiply<decltype(g)::value, A1, B0>();
    });
  }
  each([&](auto g) {
    constexpr int FIRST = 16 * decltype(g)::value;
    tile_store<decltype(g)::value>(sums, 64);
    for (int i = 0; i < imin(16, m - FIRST) * LANES; i += W) {
      float* to = acc + FIRST * LANES + i;
      store(to, load(to) + load(sums + i));
    }
  });
}

inline void panel_tiles_bf16(const uint8_t* panel, const SplitRows& x, int64_t cols, int m, float* acc) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel);
  alignas(64) uint16_t pairs[TILE_DEPTH * LANES];
  for (int64_t k0 = 0; k0 < cols; k0 += TILE_DEPTH) {
    int64_t depth = lmin(TILE_DEPTH, cols - k0);
    for (int64_t k = 0; k < depth; k += 2)
      for (int v = 0; v < NV; v++) {
        const uint16_t* at = w + (k0 + k) * LANES + v * W;
        vi pair = pair_of(from_bf16(at), from_bf16(at + LANES));
        std::memcpy(pairs + k * LANES + v * W * 2, &pair, sizeof(pair));
      }
    int row = 0;
    auto rows = [&](auto count) {
      constexpr int G = decltype(count)::value;
      for (; row + 16 * (G - 1) < m; row += 16 * G) {
        const int64_t at = row * cols + k0;
        plain_tiles<G>(pairs, x.high + at, x.low + at, cols, depth, m - row, acc + row * LANES);
      }
    };
    rows(Count<4>{});
    rows(Count<2>{});
    rows(Count<1>{});
  }
}

// ── packed weights ──────────────────────────────────────────────────────────────────────────────────────────────────

constexpr int TILE_BLOCKS = 12;  // decoded at a time, of each of two panels: 24 KiB stay in the first cache

// Decoded blocks of a panel.
struct TileBlocks {
  alignas(64) int32_t codes[TILE_BLOCKS][TILE_WORDS];
  BlockScales scales[TILE_BLOCKS];
};

// Two 16-bit codes in each word as bfloat16 values.
template <Kind K>
CEIBA_INLINE vi code_values(vi pair) {
#if defined(__AVX512BW__)
  if constexpr (!Codec<K>::SIGNED) {  // at most 5 bits
    alignas(64) static constexpr uint16_t VALUES[32] = {
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8,
        0x41b0, 0x41b8, 0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};
    return (vi)_mm512_permutexvar_epi16((__m512i)pair, _mm512_load_si512(VALUES));
  }
#endif
  return pair_of(to_float((pair << 16) >> 16), to_float(pair >> 16));
}

template <Kind K>
inline void decode_tiles(PanelAt& panel, TileBlocks& w, int64_t blocks) {
  using C = Codec<K>;
  static_assert(!C::HALVES);
  const uint8_t *head = panel.head, *body = panel.body;
  for (int64_t b = 0; b < blocks; b++, body += C::BLOCK) {
    int64_t at = panel.block + b;
    if (C::SUPER > 1 && at > 0 && at % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    for (int line = 0; line < C::BLOCK; line += 64) __builtin_prefetch(body + PREFETCH_AHEAD + line);
    block_scales<K>(head, body, w.scales[b]);
    CEIBA_UNROLL
    for (int word = 0; word < 16; word++)
      for (int v = 0; v < NV; v++)
        store_words(w.codes[b] + word * LANES + v * W, code_values<K>(pair_of<K>(body, word, v)));
  }
  panel = {head, body, panel.block + blocks};
}

// acc[p] of up to 16 rows += their sums of N blocks from `b` on, sums [N][P], with panel p.
template <int P, int N, bool SIGNED>
CEIBA_INLINE void fold_blocks(const TileBlocks* w, int64_t b, const float (*sums)[TILE_WORDS], const TileFacts* known, int rows,
                              float* const (&acc)[P]) {
  CEIBA_UNROLL
  for (int v = 0; v < NV; v++) {
    vf s[N][P], t[N][P];
    float* to[P];
    CEIBA_UNROLL
    for (int p = 0; p < P; p++) {
      to[p] = acc[p] + v * W;
      CEIBA_UNROLL
      for (int n = 0; n < N; n++) {
        s[n][p] = load(w[p].scales[b + n].scale[0] + v * W);
        t[n][p] = load(w[p].scales[b + n].shift[0] + v * W);
      }
    }
    for (int i = 0; i < rows; i += 4) {
      CEIBA_UNROLL
      for (int j = i; j < i + 4; j++)
        CEIBA_UNROLL
        for (int p = 0; p < P; p++) {
          float* at = to[p] + j * LANES;
          vf total = load(at);
          CEIBA_UNROLL
          for (int n = 0; n < N; n++)
            total = fold<SIGNED>(total, load(sums[n * P + p] + j * LANES + v * W), s[n][p], t[n][p], known[n].scale[j], known[n].sum[j]);
          store(at, total);
        }
    }
  }
}

// acc[p] of up to 16 rows += x · (decoded blocks of panel p)ᵀ, two blocks at a time: their sums begin and end together,
// since a zeroed tile waits for every product under way.
template <int P, bool LOW, bool SIGNED>
__attribute__((noinline)) void tile_steps(const TileBlocks* w, int64_t blocks, TiledRows x, int rows, float* const (&acc)[P]) {
  constexpr int SIZE = 32 * TILE_M, STEP = LOW ? 2 * SIZE : SIZE;
  alignas(64) float sums[2][2 * P][TILE_WORDS];
  rows = imin(rows, TILE_M);
  // Products of block b into sums C on.
  auto multiply = [&](int64_t b, auto first) __attribute__((always_inline)) {
    constexpr int C = decltype(first)::value, A = C ? A1 : A0;
    tile_load<B0>(w[0].codes[b], 64);
    if constexpr (P > 1) tile_load<B1>(w[P - 1].codes[b], 64);
    tile_load<A>(x.values + b * STEP, 64);
    tile_multiply<C, A, B0>();
    if constexpr (P > 1) tile_multiply<C + 1, A, B1>();
    if constexpr (LOW) {
      tile_load<A>(x.values + b * STEP + SIZE, 64);
      tile_multiply<C, A, B0>();
      if constexpr (P > 1) tile_multiply<C + 1, A, B1>();
    }
  };
  auto fold_step = [&](int64_t b, int slot) __attribute__((always_inline)) {
    fold_blocks<P, 2, SIGNED>(w, b, sums[slot], x.facts + b, rows, acc);
  };
  int64_t b = 0;
  int slot = 0;
  for (; b + 2 <= blocks; b += 2, slot ^= 1) {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (P > 1) tile_zero<2>(), tile_zero<3>();
    multiply(b, Count<0>{});
    multiply(b + 1, Count<P>{});
    if (b > 0) fold_step(b - 2, slot ^ 1);
    tile_store<0>(sums[slot][0], 64);
    tile_store<1>(sums[slot][1], 64);
    if constexpr (P > 1) {
      tile_store<2>(sums[slot][2], 64);
      tile_store<3>(sums[slot][3], 64);
    }
  }
  if (b > 0) fold_step(b - 2, slot ^ 1);
  if (b < blocks) {
    tile_zero<0>();
    if constexpr (P > 1) tile_zero<1>();
    multiply(b, Count<0>{});
    tile_store<0>(sums[0][0], 64);
    if constexpr (P > 1) tile_store<1>(sums[0][1], 64);
    fold_blocks<P, 1, SIGNED>(w, b, sums[0], x.facts + b, rows, acc);
  }
}

// acc[p] [m in whole tiles, 16] += x · (panel p)ᵀ
template <Kind K, int P, bool LOW>
inline void packed_tiles(const uint8_t* const (&panel)[P], const TiledRows& x, int64_t cols, int m, float* const (&acc)[P]) {
  using C = Codec<K>;
  TileBlocks w[P];
  PanelAt at[P];
  for (int p = 0; p < P; p++) at[p] = {panel[p], panel[p] + C::HEAD, 0};
  int64_t total = cols / 32, runs = (total + TILE_BLOCKS - 1) / TILE_BLOCKS, each = (total + runs - 1) / runs;
  for (int64_t first = 0; first < total; first += each) {
    int64_t blocks = lmin(each, total - first);
    for (int p = 0; p < P; p++) decode_tiles<K>(at[p], w[p], blocks);
    for (int row = 0; row < m; row += TILE_M) {
      int64_t tile = row / TILE_M * total + first;
      TiledRows here{x.values + tile * (32 * TILE_M) * (LOW ? 2 : 1), x.facts + tile, x.parts};
      float* to[P];
      for (int p = 0; p < P; p++) to[p] = acc[p] + row * LANES;
      tile_steps<P, LOW, C::SIGNED>(w, blocks, here, m - row, to);
    }
  }
}

template <Kind K, int P>
inline void panel_tiles(const uint8_t* const (&panel)[P], const TiledRows& x, int64_t cols, int m, float* const (&acc)[P]) {
  if constexpr (!Codec<K>::HALVES)
    return x.parts == 2 ? packed_tiles<K, P, true>(panel, x, cols, m, acc) : packed_tiles<K, P, false>(panel, x, cols, m, acc);
}
