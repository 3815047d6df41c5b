// y = x · Wᵀ for many rows of x on matrix tiles. Included by the units that use tiles, inside their anonymous namespace.
//
// Packed codes are the bytes of a tile as they are, and a block of 32 columns is one tile product: with activations of 8
// bits (--enable-int8-activations), or with both bytes of activations of 16, whose sums are put together as the integers
// that wide.h finds. Plain bfloat16 weights meet activations as sums of two bfloat16 values, which leaves a relative error
// of 2^-17.

// Two bfloat16 values side by side in each word; both are exact, so that nothing is rounded by cutting them.
CEIBA_INLINE vi pair_of(vf low, vf high) { return (vi)((vu)low >> 16) | ((vi)high & int32_t(0xffff0000)); }

constexpr int64_t TILE_DEPTH = 2048;  // columns of plain weights whose tiles lie ready: 64 KiB of pairs

// Plain bfloat16 weights: no scales, so a row tile keeps its sums in the tile to the end.
inline void panel_tiles_bf16(const uint8_t* panel, const SplitRows& x, int64_t cols, int m, float* acc) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel);
  alignas(64) uint16_t pairs[TILE_DEPTH * LANES];
  alignas(64) float product[TILE_M * LANES];
  for (int64_t k0 = 0; k0 < cols; k0 += TILE_DEPTH) {
    int64_t depth = lmin(TILE_DEPTH, cols - k0);
    for (int64_t k = 0; k < depth; k += 2)
      for (int v = 0; v < NV; v++) {
        const uint16_t* at = w + (k0 + k) * LANES + v * W;
        vi pair = pair_of(from_bf16(at), from_bf16(at + LANES));
        std::memcpy(pairs + k * LANES + v * W * 2, &pair, sizeof(pair));
      }
    for (int row = 0; row < m; row += TILE_M) {
      tile_zero<C0>();
      for (int64_t k = 0; k < depth; k += 32) {
        tile_load<B16>(pairs + k * LANES, 64);
        tile_load<A16>(x.high + row * cols + k0 + k, cols * 2);
        tile_bf16();
        tile_load<A16>(x.low + row * cols + k0 + k, cols * 2);
        tile_bf16();
      }
      tile_store<C0>(product, 64);
      for (int i = 0; i < imin(TILE_M, m - row) * LANES; i += W)
        store(acc + row * LANES + i, load(acc + row * LANES + i) + load(product + i));
    }
  }
}

// acc [m, 16] += Σ over blocks, each one product of every row tile: `product(row, column)` leaves its integers in sum.
// `facts(row, block)` are those of the activations.
template <Kind K, class Facts, class Product>
CEIBA_INLINE void each_block_tile(const uint8_t* panel, int64_t cols, int m, const int32_t* sum, float* acc,
                                  const Facts& facts, const Product& product) {
  using C = Codec<K>;
  alignas(64) uint8_t codes[8 * 64];
  BlockScales scales;
  const uint8_t *head = panel, *body = panel + C::HEAD;
  for (int64_t b = 0; b < cols / 32; b++, body += C::BLOCK) {
    if (C::SUPER > 1 && b > 0 && b % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    vb w[NV][8];
    for (int v = 0; v < NV; v++) block_codes<K>(body, v, w[v]);
    block_scales<K>(head, body, scales);
    for (int row = 0; row < m; row += TILE_M) {
      for (int h = 0; h < (C::HALVES ? 2 : 1); h++) {
        if (row == 0 || C::HALVES)
          for (int v = 0; v < NV; v++)
            for (int g = 0; g < 8; g++) {
              vb part = C::HALVES && g / 4 != h ? vb{} : w[v][g];
              std::memcpy(codes + 64 * g + v * W * 4, &part, sizeof(part));
            }
        tile_load<B8>(codes, 64);
        product(row, 32 * b);
        for (int v = 0; v < NV; v++) {
          vf s = load(scales.scale[h] + v * W), t = load(scales.shift[h] + v * W);
          for (int i = 0; i < imin(TILE_M, m - row); i++) {
            BlockFacts known = facts(row + i, b);
            float* to = acc + (row + i) * LANES + v * W;
            store(to, fold<C::SIGNED>(load(to), load_words(sum + i * LANES + v * W), s, t, known.scale,
                                      sum_of<C::HALVES>(known, h)));
          }
        }
      }
    }
  }
}

template <Kind K>
void panel_tiles_int8(const uint8_t* panel, const QuantRows& x, int64_t cols, int m, float* acc) {
  alignas(64) int32_t sum[TILE_M * LANES];
  auto facts = [&](int64_t row, int64_t b) {
    const float* sums = x.sums + row * (cols / 16) + 2 * b;
    return BlockFacts{x.scale[row * (cols / 32) + b], {sums[0], sums[1]}, sums[0] + sums[1]};
  };
  each_block_tile<K>(panel, cols, m, sum, acc, facts, [&](int64_t row, int64_t k) {
    tile_zero<C0>();
    tile_load<A8>(x.q + row * cols + k, cols);
    tile_int8<C0, true, Codec<K>::SIGNED>();
    tile_store<C0>(sum, 64);
  });
}

template <Kind K>
void panel_tiles_wide(const uint8_t* panel, const WideRows& x, int64_t cols, int m, float* acc) {
  alignas(64) int32_t sum[TILE_M * LANES], low[TILE_M * LANES];
  auto facts = [&](int64_t row, int64_t b) { return x.facts[row * (cols / 32) + b]; };
  each_block_tile<K>(panel, cols, m, sum, acc, facts, [&](int64_t row, int64_t k) {
    tile_zero<C0>();
    tile_load<A8>(x.high + row * cols + k, cols);
    tile_int8<C0, true, Codec<K>::SIGNED>();
    tile_zero<C1>();
    tile_load<A8>(x.low + row * cols + k, cols);
    tile_int8<C1, false, Codec<K>::SIGNED>();
    tile_store<C0>(sum, 64);
    tile_store<C1>(low, 64);
    for (int i = 0; i < TILE_M * LANES; i += W)
      store_words(sum + i, (load_words(sum + i) << 8) + load_words(low + i));
  });
}
