// y = x · Wᵀ for many rows of x on matrix tiles. Included by the units that use tiles, inside their anonymous namespace.
//
// A tile multiplies bfloat16 values, and both the codes of packed weights and the two bytes of an activation of 16 bits are
// such values, so that a block of 32 columns is one product for the upper bytes and one for the lower. The first is exact,
// the second too, and adding them rounds once: what a tile holds is the block's integer (wide.h) as float32, bit for bit.
// Activations of 8 bits (--enable-int8-activations) take the first product alone. Plain bfloat16 weights meet activations as
// sums of two bfloat16 values, which leaves a relative error of 2^-17.
//
// A tile's sums reach vector registers through memory, and a load of what a tile has just stored waits for long. So blocks
// are folded some steps behind the products that run meanwhile.

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

constexpr int TILE_BLOCKS = 24;  // decoded at a time: 24 KiB of codes stay in the first cache beside the activations
constexpr int BEHIND = 2;        // blocks between a product and its fold

// Decoded blocks of a panel. Of blocks in halves each half is a tile of its own, with zeros in place of the other.
template <int PARTS>
struct TileBlocks {
  alignas(64) int32_t codes[TILE_BLOCKS / PARTS][PARTS][TILE_WORDS];
  BlockScales scales[TILE_BLOCKS / PARTS];
};

// Two 16-bit codes in each word as bfloat16 values.
template <Kind K>
CEIBA_INLINE vi code_values(vi pair) {
#if defined(__AVX512BW__)
  if constexpr (!Codec<K>::SIGNED && !Codec<K>::HALVES) {  // at most 5 bits
    alignas(64) static constexpr uint16_t VALUES[32] = {
        0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x4180, 0x4188, 0x4190, 0x4198, 0x41a0, 0x41a8,
        0x41b0, 0x41b8, 0x41c0, 0x41c8, 0x41d0, 0x41d8, 0x41e0, 0x41e8, 0x41f0, 0x41f8};
    return (vi)_mm512_permutexvar_epi16((__m512i)pair, _mm512_load_si512(VALUES));
  }
#endif
  return pair_of(to_float((pair << 16) >> 16), to_float(pair >> 16));
}

template <Kind K, int PARTS>
inline void decode_tiles(PanelAt& panel, TileBlocks<PARTS>& w, int64_t blocks) {
  using C = Codec<K>;
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
      for (int v = 0; v < NV; v++) {
        vi pair = code_values<K>(pair_of<K>(body, word, v));
        for (int h = 0; h < PARTS; h++)
          store_words(w.codes[b][h] + word * LANES + v * W, PARTS == 1 || word / 8 == h ? pair : vi{});
      }
  }
  panel = {head, body, panel.block + blocks};
}

// Where one row tile's activations lie.
struct TileRows {
  const uint16_t *high, *low;
  const BlockFacts* facts;
  int64_t bytes;           // of a row of either
  int64_t blocks;          // facts of a row
};

// Products of block b, into sums C and C + 1.
template <int PARTS, bool LOW, int C>
CEIBA_INLINE void multiply_block(const int32_t (*codes)[TILE_WORDS], const TileRows& x, int64_t b, float (*sums)[TILE_WORDS]) {
  tile_load<B0>(codes[0], 64);
  if constexpr (PARTS == 2) tile_load<B1>(codes[1], 64);
  tile_zero<C>();
  if constexpr (PARTS == 2) tile_zero<C + 1>();
  tile_load<A0>(x.high + 32 * b, x.bytes);
  tile_multiply<C, A0, B0>();
  if constexpr (PARTS == 2) tile_multiply<C + 1, A0, B1>();
  if constexpr (LOW) {
    tile_load<A1>(x.low + 32 * b, x.bytes);
    tile_multiply<C, A1, B0>();
    if constexpr (PARTS == 2) tile_multiply<C + 1, A1, B1>();
  }
  tile_store<C>(sums[0], 64);
  if constexpr (PARTS == 2) tile_store<C + 1>(sums[1], 64);
}

template <int PARTS, bool SIGNED, int ROWS>
CEIBA_INLINE void fold_block(const BlockScales& scales, const float (*sums)[TILE_WORDS], const TileRows& x, int64_t b,
                             vf (&acc)[ROWS][NV]) {
  CEIBA_UNROLL
  for (int v = 0; v < NV; v++)
    CEIBA_UNROLL
    for (int h = 0; h < PARTS; h++) {
      vf s = load(scales.scale[h] + v * W), t = load(scales.shift[h] + v * W);
      const BlockFacts* known = x.facts + b;
      CEIBA_UNROLL
      for (int i = 0; i < ROWS; i++, known += x.blocks) {
        asm("" : "+r"(known));  // or GCC would work out, and spill, a place for every row
        vf sum = load(sums[h] + i * LANES + v * W);
        acc[i][v] = fold<SIGNED>(acc[i][v], sum, s, t, known->scale, sum_of<(PARTS > 1)>(*known, h));
      }
    }
}

// acc [ROWS, 16] += x · (decoded blocks)ᵀ. Never inlined: its sums need all registers.
template <int PARTS, bool LOW, bool SIGNED, int ROWS>
__attribute__((noinline)) void packed_tile(const TileBlocks<PARTS>& w, int64_t blocks, TileRows x, float* to) {
  constexpr int RING = 4;
  static_assert(BEHIND < RING);
  alignas(64) float sums[RING][PARTS][TILE_WORDS];
  vf acc[ROWS][NV];
  CEIBA_UNROLL
  for (int i = 0; i < ROWS; i++)
    for (int v = 0; v < NV; v++) acc[i][v] = load(to + i * LANES + v * W);
  auto step = [&](int64_t b, auto odd) __attribute__((always_inline)) {
    int64_t done = b - BEHIND;
    if (b < blocks) multiply_block<PARTS, LOW, 2 * decltype(odd)::value>(w.codes[b], x, b, sums[b & (RING - 1)]);
    if (done >= 0 && done < blocks) fold_block<PARTS, SIGNED>(w.scales[done], sums[done & (RING - 1)], x, done, acc);
  };
  for (int64_t b = 0; b < blocks + BEHIND; b += 2) {
    step(b, Count<0>{});
    step(b + 1, Count<1>{});
  }
  CEIBA_UNROLL
  for (int i = 0; i < ROWS; i++)
    for (int v = 0; v < NV; v++) store(to + i * LANES + v * W, acc[i][v]);
}

// acc [m in whole eights, 16] += x · panelᵀ
template <Kind K, bool LOW>
inline void packed_tiles(const uint8_t* panel, const PackedRows& x, int64_t cols, int m, float* acc) {
  using C = Codec<K>;
  constexpr int PARTS = C::HALVES ? 2 : 1, MOST = TILE_BLOCKS / PARTS;
  TileBlocks<PARTS> w;
  PanelAt at{panel, panel + C::HEAD, 0};
  int64_t total = cols / 32, runs = (total + MOST - 1) / MOST, each = (total + runs - 1) / runs;
  for (int64_t first = 0; first < total; first += each) {
    int64_t blocks = lmin(each, total - first);
    decode_tiles<K>(at, w, blocks);
    for (int row = 0; row < m; row += 16) {
      int64_t from = row * cols + 32 * first;
      TileRows rows{x.high + from, LOW ? x.low + from : nullptr, x.facts + from / 32, 2 * cols, total};
      float* to = acc + row * LANES;
      if (m - row > 8) packed_tile<PARTS, LOW, C::SIGNED, 16>(w, blocks, rows, to);
      else packed_tile<PARTS, LOW, C::SIGNED, 8>(w, blocks, rows, to);
    }
  }
}

// acc [m in whole eights, 16] += x · panelᵀ
template <Kind K>
inline void panel_tiles(const uint8_t* panel, const PackedRows& x, int64_t cols, int m, float* acc) {
  return x.low ? packed_tiles<K, true>(panel, x, cols, m, acc) : packed_tiles<K, false>(panel, x, cols, m, acc);
}
