// y = x · Wᵀ for many rows of x on matrix tiles. Included by the units that use tiles, inside their anonymous namespace.
//
// Weights of any type are decoded to bfloat16 and activations rounded to it, each with a relative error of at most 2^-9;
// a tile adds up products of a whole panel as float32. That is not what the other families give (wide.h), so a row's bits
// depend on how many rows are multiplied together; with `fixed_order` no product comes here.
//
// Two tiles of rows meet two panels at once: four products for four loads.

// Two bfloat16 values in each word, rounded to nearest. An infinity stays one, and so does a NaN unless its payload is all
// ones (`plain_nan`).
CEIBA_INLINE vi bf16_pair(vf low, vf high) {
  return (vi)(((vu)low + 0x8000) >> 16 | (((vu)high + 0x8000) & 0xffff0000));
}

// Any NaN as the one that arithmetic makes.
CEIBA_INLINE vf plain_nan(vf v) { return v == v ? v : set1(__builtin_nanf("")); }

// Words of a panel as tiles read them: word w of block b at pairs[(b · 16 + w) · 16 + lane], two columns each.
template <Kind K>
inline void decode_tiles(PanelAt& panel, int32_t* pairs, int64_t blocks) {
  using C = Codec<K>;
  const uint8_t *head = panel.head, *body = panel.body;
  for (int64_t b = 0; b < blocks; b++, body += C::BLOCK, pairs += 16 * LANES) {
    int64_t at = panel.block + b;
    if (C::SUPER > 1 && at > 0 && at % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    for (int line = 0; line < C::BLOCK; line += 64) __builtin_prefetch(body + PREFETCH_AHEAD + line);
    for (int v = 0; v < NV; v++) {
      Scales s;
      C::scales(head, body, v, s);
      for (int h = 0; h < (C::HALVES ? 2 : 1); h++) {
        s.scale[h] = plain_nan(s.scale[h]);
        s.shift[h] = plain_nan(C::SIGNED ? s.shift[h] : fmadd(s.scale[h], set1(-128.f), s.shift[h]));
      }
      CEIBA_UNROLL
      for (int word = 0; word < 16; word++) {
        const int half = C::HALVES ? word / 8 : 0;
        vi code = pair_of<K>(body, word, v);
        vf first, second;
        if constexpr (C::SIGNED) {
          first = to_float((code << 16) >> 16), second = to_float(code >> 16);
        } else {  // the upper half of 128 + code as float32 is 0x4300 + code
          first = (vf)(code << 16 | 0x43000000), second = (vf)((code & 0x7f0000) | 0x43000000);
        }
        store_words(pairs + word * LANES + v * W,
                    bf16_pair(fmadd(first, s.scale[half], s.shift[half]), fmadd(second, s.scale[half], s.shift[half])));
      }
    }
  }
  panel = {head, body, panel.block + blocks};
}

template <>
inline void decode_tiles<Kind::BF16>(PanelAt& panel, int32_t* pairs, int64_t blocks) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel.body);
  for (int64_t b = 0; b < blocks; b++, pairs += 16 * LANES, w += 32 * LANES)
    for (int word = 0; word < 16; word++)
      for (int v = 0; v < NV; v++) {
        const uint16_t* first = w + (word / 2 * 4 + word % 2) * LANES + v * W;  // columns 0, 2 or 1, 3 of four
        vi low = (vi)from_bf16(first), high = (vi)from_bf16(first + 2 * LANES);
        store_words(pairs + word * LANES + v * W, (vi)((vu)low >> 16) | high);
      }
  panel = {nullptr, reinterpret_cast<const uint8_t*>(w), panel.block + blocks};
}

constexpr int TILE_BLOCKS = 64;  // decoded at a time, of each of two panels: 128 KiB stay in the second cache

// acc[p] [tile_rows(m), 16] += x · (panel p)ᵀ
template <Kind K, int P>
inline void panel_tiles(const uint8_t* const (&panel)[P], const TiledRows& x, int64_t cols, int m, float* const (&acc)[P]) {
  alignas(64) int32_t pairs[P][TILE_BLOCKS * TILE_WORDS];
  PanelAt at[P];
  for (int p = 0; p < P; p++)
    if constexpr (K == Kind::BF16) at[p] = {nullptr, panel[p], 0};
    else at[p] = {panel[p], panel[p] + Codec<K>::HEAD, 0};
  const int64_t total = cols / 32, runs = (total + TILE_BLOCKS - 1) / TILE_BLOCKS, run = (total + runs - 1) / runs;
  for (int64_t first = 0; first < total; first += run) {
    const int64_t blocks = lmin(run, total - first);
    for (int p = 0; p < P; p++) decode_tiles<K>(at[p], pairs[p], blocks);
    const int32_t* w[P];
    for (int p = 0; p < P; p++) w[p] = pairs[p];
    auto rows = [&](int64_t tile, auto count) {
      constexpr int R = decltype(count)::value;
      const uint16_t* from[R];
      float* to[R][P];
      for (int r = 0; r < R; r++) {
        from[r] = x.values + ((tile + r) * total + first) * (2 * TILE_WORDS);
        for (int p = 0; p < P; p++) to[r][p] = acc[p] + (tile + r) * TILE_WORDS;
      }
      tile_steps<R, P>(w, from, blocks, to, m - tile * TILE_M);
    };
    const int64_t tiles = tile_rows(m) / TILE_M;
    int64_t tile = 0;
    for (; tile + 2 <= tiles; tile += 2) rows(tile, Count<2>{});
    if (tile < tiles) rows(tile, Count<1>{});
  }
}
