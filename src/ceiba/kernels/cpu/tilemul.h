// y = x · Wᵀ for many rows of x on matrix tiles. Included by the units that use tiles, inside their anonymous namespace.
//
// *Near-exact*: codes are integers of at most 8 bits, which bfloat16 holds exactly; an activation is the sum of two
// bfloat16 values, which leaves a relative error of 2^-17. A block's 32 columns are one tile product each for the high and
// the low part, and its sums meet scale and minimum in float32. *Int8*: the packed codes are the tile as they are.

// Two bfloat16 values side by side in each word; both are exact, so that nothing is rounded by cutting them.
CEIBA_INLINE vi pair_of(vf low, vf high) { return (vi)((vu)low >> 16) | ((vi)high & int32_t(0xffff0000)); }

// The codes of a block as 16 rows of 16 pairs.
template <Kind K>
inline void block_pairs(const uint8_t* body, uint16_t* out) {
  using C = Codec<K>;
  for (int v = 0; v < NV; v++) {
    vb w[8];
    C::codes(body, v, w);
    for (int g = 0; g < 8; g++) {
      vi word = (vi)w[g];
      vf code[4];
      for (int j = 0; j < 4; j++) code[j] = to_float(C::SIGNED ? (word << (24 - 8 * j)) >> 24 : (word >> (8 * j)) & 255);
      for (int r = 0; r < 2; r++) {
        vi pair = pair_of(code[2 * r], code[2 * r + 1]);
        std::memcpy(out + (2 * g + r) * 32 + v * W * 2, &pair, sizeof(pair));
      }
    }
  }
}

constexpr int64_t TILE_DEPTH = 2048;  // columns whose tiles lie ready: 64 KiB of pairs

struct BlockScales {
  float scale[2][LANES], shift[2][LANES];
};

template <Kind K>
inline void block_scales(const uint8_t* head, const uint8_t* body, BlockScales& out) {
  using C = Codec<K>;
  for (int v = 0; v < NV; v++) {
    Scales s;
    C::scales(head, body, v, s);
    for (int h = 0; h < (C::HALVES ? 2 : 1); h++) {
      store(out.scale[h] + v * W, s.scale[h]);
      store(out.shift[h] + v * W, s.shift[h]);
    }
  }
}

// sum[i] += tile row i · scale + shift · Σx of the columns it covers
template <bool SHIFTED, class Value>
CEIBA_INLINE void fold_tile(float* acc, int rows, const float* scale, const float* shift, const Value& value,
                            const float* sums, int64_t sums_stride, int parts) {
  for (int v = 0; v < NV; v++) {
    vf s = load(scale + v * W), t = load(shift + v * W);
    for (int i = 0; i < rows; i++) {
      float* to = acc + i * LANES + v * W;
      vf sum = load(to) + value(i, v) * s;
      if (SHIFTED) sum += t * (parts == 2 ? sums[i * sums_stride] + sums[i * sums_stride + 1] : sums[i * sums_stride]);
      store(to, sum);
    }
  }
}

template <Kind K>
void panel_tiles(const uint8_t* panel, const SplitRows& x, int64_t cols, int m, float* acc) {
  using C = Codec<K>;
  alignas(64) uint16_t pairs[TILE_DEPTH * LANES];
  BlockScales scales[TILE_DEPTH / 32];
  alignas(64) float product[TILE_M * LANES];
  const uint8_t *head = panel, *body = panel + C::HEAD;
  auto value = [&](int i, int v) { return load(product + i * LANES + v * W); };
  for (int64_t k0 = 0; k0 < cols; k0 += TILE_DEPTH) {
    int64_t blocks = lmin(TILE_DEPTH, cols - k0) / 32;
    for (int64_t b = 0; b < blocks; b++, body += C::BLOCK) {
      int64_t at = k0 / 32 + b;
      if (C::SUPER > 1 && at > 0 && at % C::SUPER == 0) {
        head = body;
        body += C::HEAD;
      }
      block_pairs<K>(body, pairs + b * 32 * LANES);
      block_scales<K>(head, body, scales[b]);
    }
    for (int row = 0; row < m; row += TILE_M) {
      int rows = imin(TILE_M, m - row);
      for (int64_t b = 0; b < blocks; b++) {
        int64_t k = k0 + 32 * b, from = row * cols + k;
        const float* sums = x.sums + (row * cols + k) / 16;
        if constexpr (C::HALVES) {
          for (int h = 0; h < 2; h++) {
            tile_zero<C0>();
            tile_load<B16>(pairs + (2 * b + h) * 16 * LANES, 64);
            tile_load<A16>(x.high + from + 16 * h, cols * 2);
            tile_bf16<C0, A16, B16>();
            tile_load<A16>(x.low + from + 16 * h, cols * 2);
            tile_bf16<C0, A16, B16>();
            tile_store<C0>(product, 64);
            fold_tile<true>(acc + row * LANES, rows, scales[b].scale[h], scales[b].shift[h], value, sums + h, cols / 16, 1);
          }
        } else {
          tile_zero<C0>();
          tile_load<B32>(pairs + b * 32 * LANES, 64);
          tile_load<A32>(x.high + from, cols * 2);
          tile_bf16<C0, A32, B32>();
          tile_load<A32>(x.low + from, cols * 2);
          tile_bf16<C0, A32, B32>();
          tile_store<C0>(product, 64);
          fold_tile<!C::SIGNED>(acc + row * LANES, rows, scales[b].scale[0], scales[b].shift[0], value, sums, cols / 16, 2);
        }
      }
    }
  }
}

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
        tile_load<B32>(pairs + k * LANES, 64);
        tile_load<A32>(x.high + row * cols + k0 + k, cols * 2);
        tile_bf16<C0, A32, B32>();
        tile_load<A32>(x.low + row * cols + k0 + k, cols * 2);
        tile_bf16<C0, A32, B32>();
      }
      tile_store<C0>(product, 64);
      for (int i = 0; i < imin(TILE_M, m - row) * LANES; i += W)
        store(acc + row * LANES + i, load(acc + row * LANES + i) + load(product + i));
    }
  }
}

template <Kind K>
void panel_tiles_int8(const uint8_t* panel, const QuantRows& x, int64_t cols, int m, float* acc) {
  using C = Codec<K>;
  alignas(64) uint8_t codes[8 * 64];
  alignas(64) int32_t product[TILE_M * LANES];
  BlockScales scales;
  const uint8_t *head = panel, *body = panel + C::HEAD;
  for (int64_t b = 0; b < cols / 32; b++, body += C::BLOCK) {
    if (C::SUPER > 1 && b > 0 && b % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    vb w[NV][8];
    for (int v = 0; v < NV; v++) C::codes(body, v, w[v]);
    block_scales<K>(head, body, scales);
    for (int row = 0; row < m; row += TILE_M) {
      int rows = imin(TILE_M, m - row);
      const float *d = x.scale + (row * cols + 32 * b) / 32, *sums = x.sums + (row * cols + 32 * b) / 16;
      auto value = [&](int i, int v) {
        vi whole;
        std::memcpy(&whole, product + i * LANES + v * W, sizeof(whole));
        return to_float(whole) * d[i * (cols / 32)];
      };
      for (int h = 0; h < (C::HALVES ? 2 : 1); h++) {
        if (row == 0 || C::HALVES)
          for (int v = 0; v < NV; v++)
            for (int g = 0; g < 8; g++) {
              vb part = C::HALVES && g / 4 != h ? vb{} : w[v][g];
              std::memcpy(codes + 64 * g + v * W * 4, &part, sizeof(part));
            }
        tile_zero<C0>();
        tile_load<B8>(codes, 64);
        tile_load<A8>(x.q + row * cols + 32 * b, cols);
        tile_int8<C0, A8, B8, C::SIGNED>();
        tile_store<C0>(product, 64);
        fold_tile<!C::SIGNED>(acc + row * LANES, rows, scales.scale[h], scales.shift[h], value, sums + h, cols / 16,
                              C::HALVES ? 1 : 2);
      }
    }
  }
}
