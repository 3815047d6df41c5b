// y = x · Wᵀ for packed blocks against activations of 16 bits. Included by each instruction-set unit inside its anonymous
// namespace.
//
// Codes are integers of at most 8 bits and activations are rounded to 16 bits per 32 columns (rows.h), so that a block's
// sum is an integer: exact, and the same in whatever order and company it is taken. Each sum then meets scale and minimum
// in one fixed sequence of two fused steps (`fold`). A row's bits therefore depend on that row alone: few rows decode the
// codes in registers, of many the first do and leave them in a buffer for the rest, and all agree.
//
// A 32-bit word of codes holds columns 4g to 4g + 3 of one row as bytes; its even and odd bytes, widened in place, are the
// two pairs that one multiply-and-add of 16-bit pairs takes, and activations lie in that order: 0, 2, 1, 3.

constexpr int FEW_ROWS = 4;       // rows that decode the codes for themselves
constexpr int DEPTH = 320;        // columns decoded at a time for many rows: 10 KiB of pairs

// acc[row] += Σ over two of pair[row] · x. Whole numbers may be added in any order, and GCC would gather a block's products
// first and add them up as a tree, for which no processor has registers: the empty statement keeps them in sequence.
CEIBA_INLINE vi pair_step(vi acc, vi pair, int32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)pair, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
  acc += (vi)_mm512_madd_epi16((__m512i)pair, _mm512_set1_epi32(x));
  asm("" : "+v"(acc));
  return acc;
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16((__m256i)pair, _mm256_set1_epi32(x));
  asm("" : "+x"(acc));
  return acc;
#else
  return acc + ((pair << 16) >> 16) * ((x << 16) >> 16) + (pair >> 16) * (x >> 16);
#endif
}

// Even and odd bytes of a word as 16-bit pairs.
template <bool SIGNED>
CEIBA_INLINE vi even_pair(vb w) {
  if constexpr (SIGNED) return (vi)((vs)((vs)w << 8) >> 8);
  return (vi)w & 0x00ff00ff;
}
template <bool SIGNED>
CEIBA_INLINE vi odd_pair(vb w) {
  if constexpr (SIGNED) return (vi)((vs)w >> 8);
  return (vi)((vh)w >> 8);
}

// Pair `word` of a block, vector v.
template <Kind K>
CEIBA_INLINE vi pair_of(const uint8_t* body, int word, int v) {
  using C = Codec<K>;
  if constexpr (C::NIBBLES) {
    vb w = load_bytes(body + C::BLOCK - 256 + 64 * (word / 4) + v * W * 4);
    switch (word % 4) {
      case 0: return (vi)w & 0x000f000f;
      case 1: return (vi)((vu)w >> 8) & 0x000f000f;
      case 2: return (vi)((vu)w >> 4) & 0x000f000f;
      default: return (vi)((vh)w >> 12);
    }
  } else {
    vb w = C::group(body, word / 2, v, C::extra(body, word / 8, v));
    return word % 2 ? odd_pair<C::SIGNED>(w) : even_pair<C::SIGNED>(w);
  }
}

// total += Σ codes·q · (scale · d) + shift · Σx, in this order and with these roundings everywhere.
template <bool SIGNED>
CEIBA_INLINE vf fold(vf total, vf sum, vf scale, vf shift, float d, float x_sum) {
  total = fmadd(sum, scale * d, total);
  return SIGNED ? total : fmadd(shift, set1(x_sum), total);
}

CEIBA_INLINE int32_t word_at(const int16_t* q, int word) {
  int32_t x;
  std::memcpy(&x, q + 2 * word, 4);
  return x;
}

// Σx of the columns that half h of a block's sums covers.
template <bool HALVES>
CEIBA_INLINE float sum_of(const BlockFacts& facts, int h) { return HALVES ? facts.sums[h] : facts.sum; }

constexpr int PREFETCH_AHEAD = 4096;  // bytes

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

// Decoded blocks of a panel: word w of block b at pairs[b][w][lane].
struct WideBlocks {
  alignas(64) int32_t pairs[DEPTH / 32][16][LANES];
  BlockScales scales[DEPTH / 32];
};

// acc [MT, 16] += x · (block b)ᵀ, whose pairs and scales `words` gives: pair(word, v), scale(h, v), shift(h, v).
template <bool SIGNED, bool HALVES, int MT, class Words>
CEIBA_INLINE void wide_block(const Words& words, const int16_t* q, const BlockFacts* facts, int64_t cols, float* acc) {
  constexpr int PARTS = HALVES ? 2 : 1, WORDS = 16 / PARTS;
  const int16_t* at[MT];
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    at[i] = q + i * cols;
    asm("" : "+r"(at[i]));  // or GCC would work out, and spill, an address for every word
  }
  CEIBA_UNROLL
  for (int h = 0; h < PARTS; h++) {
    vi sum[MT][NV] = {};
    CEIBA_UNROLL
    for (int word = 0; word < WORDS; word++) {
      vi pair[NV];
      CEIBA_UNROLL
      for (int v = 0; v < NV; v++) pair[v] = words.pair(WORDS * h + word, v);
      CEIBA_UNROLL
      for (int i = 0; i < MT; i++) {
        int32_t x = word_at(at[i], WORDS * h + word);
        CEIBA_UNROLL
        for (int v = 0; v < NV; v++) sum[i][v] = pair_step(sum[i][v], pair[v], x);
      }
    }
    CEIBA_UNROLL
    for (int i = 0; i < MT; i++) {
      const BlockFacts& known = facts[i * (cols / 32)];
      float d = known.scale, x_sum = sum_of<HALVES>(known, h);
      CEIBA_UNROLL
      for (int v = 0; v < NV; v++) {
        float* to = acc + i * LANES + v * W;
        store(to, fold<SIGNED>(load(to), to_float(sum[i][v]), words.scale(h, v), words.shift(h, v), d, x_sum));
      }
    }
  }
}

// acc [MT, 16] += x · (decoded blocks)ᵀ. Never inlined: its sums need all registers.
template <bool SIGNED, bool HALVES, int MT>
__attribute__((noinline)) void wide_micro(const WideBlocks& w, int64_t blocks, const int16_t* q, const BlockFacts* facts,
                                          int64_t cols, float* acc) {
  struct Decoded {
    const int32_t (*pairs)[LANES];
    const BlockScales* s;
    CEIBA_INLINE vi pair(int word, int v) const { return load_words(pairs[word] + v * W); }
    CEIBA_INLINE vf scale(int h, int v) const { return load(s->scale[h] + v * W); }
    CEIBA_INLINE vf shift(int h, int v) const { return load(s->shift[h] + v * W); }
  };
  for (int64_t b = 0; b < blocks; b++)
    wide_block<SIGNED, HALVES, MT>(Decoded{w.pairs[b], w.scales + b}, q + 32 * b, facts + b, cols, acc);
}

// Where a panel is read.
struct PanelAt {
  const uint8_t *head, *body;
  int64_t block;
};

// The same for the first rows, which decode the panel and leave it in `w` for the others: the processor multiplies while
// it stores.
template <Kind K, int MT>
__attribute__((noinline)) void wide_first(PanelAt& panel, WideBlocks& w, int64_t blocks, const int16_t* q,
                                          const BlockFacts* facts, int64_t cols, float* acc) {
  using C = Codec<K>;
  struct Decoding {
    const uint8_t* body;
    int32_t (*pairs)[LANES];
    const BlockScales* s;
    CEIBA_INLINE vi pair(int word, int v) const {
      vi found = pair_of<K>(body, word, v);
      store_words(pairs[word] + v * W, found);
      return found;
    }
    CEIBA_INLINE vf scale(int h, int v) const { return load(s->scale[h] + v * W); }
    CEIBA_INLINE vf shift(int h, int v) const { return load(s->shift[h] + v * W); }
  };
  const uint8_t *head = panel.head, *body = panel.body;
  for (int64_t b = 0; b < blocks; b++, body += C::BLOCK) {
    int64_t at = panel.block + b;
    if (C::SUPER > 1 && at > 0 && at % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    for (int line = 0; line < C::BLOCK; line += 64) __builtin_prefetch(body + PREFETCH_AHEAD + line);
    block_scales<K>(head, body, w.scales[b]);
    wide_block<C::SIGNED, C::HALVES, MT>(Decoding{body, w.pairs[b], w.scales + b}, q + 32 * b, facts + b, cols, acc);
  }
  panel = {head, body, panel.block + blocks};
}

#if defined(__AVX512F__)
constexpr int WIDE_ROWS = 12;
constexpr bool PANEL_PAIRS = true;  // registers hold the sums of two panels
#else
constexpr int WIDE_ROWS = 6;        // 12 accumulators either way
constexpr bool PANEL_PAIRS = false;
#endif

// acc[p] [MT, 16] += x · (decoded blocks of panel p)ᵀ. An activation that is read meets two panels: of one it would be the
// processor's loads that decide, since every product needs one. A row's bits are those that one panel at a time gives.
template <bool SIGNED, bool HALVES, int MT>
__attribute__((noinline)) void wide_pair(const WideBlocks* w, int64_t blocks, const int16_t* q, const BlockFacts* facts,
                                         int64_t cols, float* const (&acc)[2]) {
  constexpr int PARTS = HALVES ? 2 : 1, WORDS = 16 / PARTS;
  constexpr int STEP = 3;  // rows that one address reaches with a multiple of the distance between rows
  for (int64_t b = 0; b < blocks; b++, q += 32) {
    const int16_t* at[(MT + STEP - 1) / STEP];
    int64_t stride = cols;
    asm("" : "+r"(stride));
    CEIBA_UNROLL
    for (int i = 0; i < (MT + STEP - 1) / STEP; i++) {
      at[i] = q + STEP * i * cols;
      asm("" : "+r"(at[i]));
    }
    CEIBA_UNROLL
    for (int h = 0; h < PARTS; h++) {
      vi sum[MT][2][NV] = {};
      CEIBA_UNROLL
      for (int word = WORDS * h; word < WORDS * (h + 1); word++) {
        vi pair[2][NV];
        CEIBA_UNROLL
        for (int v = 0; v < NV; v++)
          for (int p = 0; p < 2; p++) pair[p][v] = load_words(w[p].pairs[b][word] + v * W);
        CEIBA_UNROLL
        for (int i = 0; i < MT; i++) {
          int32_t x = word_at(at[i / STEP] + i % STEP * stride, word);
          CEIBA_UNROLL
          for (int v = 0; v < NV; v++)
            for (int p = 0; p < 2; p++) sum[i][p][v] = pair_step(sum[i][p][v], pair[p][v], x);
        }
      }
      CEIBA_UNROLL
      for (int i = 0; i < MT; i++) {
        const BlockFacts& known = facts[i * (cols / 32) + b];
        float d = known.scale, x_sum = sum_of<HALVES>(known, h);
        CEIBA_UNROLL
        for (int v = 0; v < NV; v++)
          for (int p = 0; p < 2; p++) {
            float* to = acc[p] + i * LANES + v * W;
            const BlockScales& by = w[p].scales[b];
            store(to, fold<SIGNED>(load(to), to_float(sum[i][p][v]), load(by.scale[h] + v * W), load(by.shift[h] + v * W),
                                   d, x_sum));
          }
      }
    }
  }
}

constexpr int PAIR_DEPTH = DEPTH / 2;  // columns decoded at a time of each of two panels
constexpr int PAIR_ROWS = 8;           // rows from which that is faster

// acc[p] [m, 16] += x · (panel p)ᵀ, for at least four rows, the first of which decode both panels.
template <Kind K>
void wide_pairs(const uint8_t* const (&panel)[2], const PackedRows& x, int64_t cols, int m, float* const (&acc)[2]) {
  using C = Codec<K>;
  WideBlocks w[2];
  PanelAt at[2] = {{panel[0], panel[0] + C::HEAD, 0}, {panel[1], panel[1] + C::HEAD, 0}};
  for (int64_t k0 = 0; k0 < cols; k0 += PAIR_DEPTH) {
    int64_t blocks = lmin(PAIR_DEPTH, cols - k0) / 32;
    const int16_t* q = x.wide + k0;
    const BlockFacts* facts = x.facts + k0 / 32;
    for (int p = 0; p < 2; p++) wide_first<K, 4>(at[p], w[p], blocks, q, facts, cols, acc[p]);
    int row = 4;
    auto rows = [&](auto count) {
      constexpr int MT = decltype(count)::value;
      for (; row + MT <= m; row += MT) {
        float* const to[] = {acc[0] + row * LANES, acc[1] + row * LANES};
        wide_pair<C::SIGNED, C::HALVES, MT>(w, blocks, q + row * cols, facts + row * cols / 32, cols, to);
      }
    };
    rows(Count<WIDE_ROWS>{});
    rows(Count<4>{});
    rows(Count<2>{});
    rows(Count<1>{});
  }
}

// acc [MT, 16] += x · panelᵀ
template <Kind K, int MT>
void wide_few(const uint8_t* panel, const PackedRows& x, int64_t cols, float* acc) {
  using C = Codec<K>;
  struct Reading {
    const uint8_t* body;
    Scales s[NV];
    CEIBA_INLINE vi pair(int word, int v) const { return pair_of<K>(body, word, v); }
    CEIBA_INLINE vf scale(int h, int v) const { return s[v].scale[h]; }
    CEIBA_INLINE vf shift(int h, int v) const { return s[v].shift[h]; }
  };
  alignas(64) float total[MT * LANES];
  std::memcpy(total, acc, sizeof total);
  const uint8_t *head = panel, *body = panel + C::HEAD;
  for (int64_t b = 0; b < cols / 32; b++, body += C::BLOCK) {
    if (C::SUPER > 1 && b > 0 && b % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    for (int line = 0; line < C::BLOCK; line += 64) __builtin_prefetch(body + PREFETCH_AHEAD + line);
    Reading words{body, {}};
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) C::scales(head, body, v, words.s[v]);
    wide_block<C::SIGNED, C::HALVES, MT>(words, x.wide + 32 * b, x.facts + b, cols, total);
  }
  std::memcpy(acc, total, sizeof total);
}

template <Kind K>
void wide_many(const uint8_t* panel, const PackedRows& x, int64_t cols, int m, float* acc) {
  using C = Codec<K>;
  WideBlocks w;
  PanelAt at{panel, panel + C::HEAD, 0};
  for (int64_t k0 = 0; k0 < cols; k0 += DEPTH) {
    int64_t blocks = lmin(DEPTH, cols - k0) / 32;
    const int16_t* q = x.wide + k0;
    const BlockFacts* facts = x.facts + k0 / 32;
    int row = 0;
    if (m >= WIDE_ROWS) wide_first<K, WIDE_ROWS>(at, w, blocks, q, facts, cols, acc), row = WIDE_ROWS;
    else wide_first<K, 4>(at, w, blocks, q, facts, cols, acc), row = 4;
    auto rows = [&](auto count) {
      constexpr int MT = decltype(count)::value;
      for (; row + MT <= m; row += MT)
        wide_micro<C::SIGNED, C::HALVES, MT>(w, blocks, q + row * cols, facts + row * cols / 32, cols, acc + row * LANES);
    };
    rows(Count<WIDE_ROWS>{});
    rows(Count<4>{});
    rows(Count<2>{});
    rows(Count<1>{});
  }
}

// acc [m, 16] += x · panelᵀ
template <Kind K>
inline void panel_wide(const uint8_t* panel, const PackedRows& x, int64_t cols, int m, float* acc) {
  switch (m) {
    case 1: return wide_few<K, 1>(panel, x, cols, acc);
    case 2: return wide_few<K, 2>(panel, x, cols, acc);
    case 3: return wide_few<K, 3>(panel, x, cols, acc);
    case 4: return wide_few<K, 4>(panel, x, cols, acc);
    default: return wide_many<K>(panel, x, cols, m, acc);
  }
}
