// y = x · Wᵀ for at most GEMV_ROWS rows of x, straight on packed panels: no weight is written anywhere. Included by each
// instruction-set unit inside its anonymous namespace.
//
// A code is isolated where it stands in its 32-bit word, c · 2^(8j) for byte j, and becomes a float in one conversion;
// the factor 2^(-8j) lies in the activations, prepared once per row. It is a power of two, so nothing is rounded by it.
// A block's sum then meets its scale once, and its minimum meets Σx, known per 16 columns. That is three instructions
// per vector of weights for one row of x and one more for each further row. Above four rows the panel is walked once per
// vector of it, so that the sums still fit.

// None in a fixed order: a row's sums would depend on how many there are.
constexpr int GEMV_ROWS = FIXED_ORDER ? 0 : TILES ? 4 : 8;
constexpr int ACCUMULATORS = 8;  // vectors of sums at a time: they and what they need fit the registers of AVX2

// Rows a kernel exists for; the sums of those that are missing go nowhere.
inline int gemv_rows(int64_t m) { return m <= 4 ? int(m) : m <= 6 ? 6 : 8; }

// Activations of m = gemv_rows(rows) rows as the kernel wants them, the rows side by side.
struct ScaledRows {
  float* x;       // [cols, m]: x[k] · {1, 2^-8, 2^-16, 1}[k % 4]
  float* sums;    // [cols / 16, m]: Σ x
};

inline void scale_row(const float* x, int64_t cols, int64_t row, int64_t rows, const ScaledRows& out) {
  int64_t m = gemv_rows(rows);
  constexpr float FACTORS[16] = {1.f, 0x1p-8f, 0x1p-16f, 1.f, 1.f, 0x1p-8f, 0x1p-16f, 1.f,
                                 1.f, 0x1p-8f, 0x1p-16f, 1.f, 1.f, 0x1p-8f, 0x1p-16f, 1.f};
  vf factors = load(FACTORS);
  alignas(64) float scaled[16];
  for (int64_t k = 0; k < cols; k += 16) {
    vf sum = vf{};
    float* to = m == 1 ? out.x + k : scaled;
    CEIBA_UNROLL
    for (int i = 0; i < 16; i += W) {
      vf v = load(x + k + i);
      sum += v;
      store(to + i, v * factors);
    }
    if (m > 1)
      for (int i = 0; i < 16; i++) out.x[(k + i) * m + row] = scaled[i];
    out.sums[k / 16 * m + row] = hsum(sum);
  }
}

// Byte j of every word as a float, times 2^(8j) for j < 3.
template <int J>
CEIBA_INLINE vf byte_in_place(vb w) {
  if constexpr (J == 3) return to_float((vi)((vu)w >> 24));
  return to_float((vi)w & (255 << (8 * J)));
}

// Four columns of nibbles (SHIFT 0: low, 4: high) likewise.
template <int J, int SHIFT>
CEIBA_INLINE vf nibble_in_place(vb w) {
  if constexpr (J == 3 && SHIFT == 4) return to_float((vi)((vu)w >> 28));
  if constexpr (J == 3) return to_float((vi)((vu)w >> 24) & 15);
  vi word = SHIFT ? (vi)((vu)w >> SHIFT) : (vi)w;
  return to_float(word & (15 << (8 * J)));
}

// Σ over four columns of one group for MT rows; chains of additions are as many as the registers hold.
template <int MT, int VECS>
struct BlockSums {
  static constexpr int WANTED = ACCUMULATORS / (MT * VECS);
  static constexpr int CHAINS = WANTED < 1 ? 1 : WANTED;
  vf sum[CHAINS][MT][VECS];

  CEIBA_INLINE void clear() {
    CEIBA_UNROLL
    for (int c = 0; c < CHAINS; c++) {
      CEIBA_UNROLL
      for (int i = 0; i < MT; i++) {
        CEIBA_UNROLL
        for (int v = 0; v < VECS; v++) sum[c][i][v] = vf{};
      }
    }
  }
  // Column `k` of the block: `code(v)` gives the panel's vectors.
  template <class Code>
  CEIBA_INLINE void column(int k, const float* x, const Code& code) {
    vf w[VECS];
    CEIBA_UNROLL
    for (int v = 0; v < VECS; v++) w[v] = code(v);
    CEIBA_UNROLL
    for (int i = 0; i < MT; i++) {
      vf xs = set1(x[k * MT + i]);
      CEIBA_UNROLL
      for (int v = 0; v < VECS; v++) sum[k % CHAINS][i][v] += w[v] * xs;
    }
  }
  CEIBA_INLINE vf total(int i, int v) const {
    vf t = sum[0][i][v];
    CEIBA_UNROLL
    for (int c = 1; c < CHAINS; c++) t += sum[c][i][v];
    return t;
  }
};

template <int MT, int VECS, class Words>
CEIBA_INLINE void byte_group(BlockSums<MT, VECS>& s, int g, const float* x, const Words& w) {
  s.column(4 * g + 0, x, [&](int v) __attribute__((always_inline)) { return byte_in_place<0>(w[v]); });
  s.column(4 * g + 1, x, [&](int v) __attribute__((always_inline)) { return byte_in_place<1>(w[v]); });
  s.column(4 * g + 2, x, [&](int v) __attribute__((always_inline)) { return byte_in_place<2>(w[v]); });
  s.column(4 * g + 3, x, [&](int v) __attribute__((always_inline)) { return byte_in_place<3>(w[v]); });
}

template <int SHIFT, int MT, int VECS, class Words>
CEIBA_INLINE void nibble_group(BlockSums<MT, VECS>& s, int g, const float* x, const Words& w) {
  s.column(4 * g + 0, x, [&](int v) __attribute__((always_inline)) { return nibble_in_place<0, SHIFT>(w[v]); });
  s.column(4 * g + 1, x, [&](int v) __attribute__((always_inline)) { return nibble_in_place<1, SHIFT>(w[v]); });
  s.column(4 * g + 2, x, [&](int v) __attribute__((always_inline)) { return nibble_in_place<2, SHIFT>(w[v]); });
  s.column(4 * g + 3, x, [&](int v) __attribute__((always_inline)) { return nibble_in_place<3, SHIFT>(w[v]); });
}

// Adds groups [G0, G1) of a block to `s`.
template <Kind K, int G0, int G1, int MT, int VECS>
CEIBA_INLINE void block_groups(const uint8_t* body, int v0, const float* x, BlockSums<MT, VECS>& s) {
  using C = Codec<K>;
  if constexpr (C::NIBBLES) {
    CEIBA_UNROLL
    for (int c = G0 / 2; c < G1 / 2; c++) {
      vb w[VECS];
      CEIBA_UNROLL
      for (int v = 0; v < VECS; v++) w[v] = load_bytes(body + C::BLOCK - 256 + 64 * c + (v0 + v) * W * 4);
      nibble_group<0>(s, 2 * c, x, w);
      nibble_group<4>(s, 2 * c + 1, x, w);
    }
  } else {
    vb extra[VECS];
    CEIBA_UNROLL
    for (int v = 0; v < VECS; v++) extra[v] = C::extra(body, G0 / 4, v0 + v);
    CEIBA_UNROLL
    for (int g = G0; g < G1; g++) {
      vb w[VECS];
      CEIBA_UNROLL
      for (int v = 0; v < VECS; v++) w[v] = C::group(body, g, v0 + v, extra[v]);
      byte_group(s, g, x, w);
    }
  }
}

constexpr int PREFETCH_AHEAD = 2048;

// Vectors [v0, v0 + VECS) of acc [m, 16] += x · panelᵀ.
template <Kind K, int MT, int VECS>
CEIBA_INLINE void gemv_vectors(const uint8_t* panel, const ScaledRows& in, int64_t cols, int m, int v0, float* acc) {
  using C = Codec<K>;
  vf total[MT][VECS];
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    CEIBA_UNROLL
    for (int v = 0; v < VECS; v++) total[i][v] = i < m ? load(acc + i * LANES + (v0 + v) * W) : vf{};
  }
  const uint8_t *head = panel, *body = panel + C::HEAD;
  const float* x = in.x;
  const float* sums = in.sums;
  for (int64_t b = 0; b < cols / 32; b++, x += 32 * MT, sums += 2 * MT) {
    if (C::SUPER > 1 && b > 0 && b % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    if (v0 == 0)
      for (int line = 0; line < C::BLOCK; line += 64) __builtin_prefetch(body + PREFETCH_AHEAD + line);
    Scales scales[VECS];
    BlockSums<MT, VECS> s;
    s.clear();
    block_groups<K, 0, C::HALVES ? 4 : 8>(body, v0, x, s);
    CEIBA_UNROLL
    for (int v = 0; v < VECS; v++) {
      C::scales(head, body, v0 + v, scales[v]);
      vf shift = C::SIGNED ? scales[v].scale[0] * -128.f : scales[v].shift[0];
      CEIBA_UNROLL
      for (int i = 0; i < MT; i++)
        total[i][v] += s.total(i, v) * scales[v].scale[0] + shift * (C::HALVES ? sums[i] : sums[i] + sums[MT + i]);
    }
    if constexpr (C::HALVES) {
      s.clear();
      block_groups<K, 4, 8>(body, v0, x, s);
      CEIBA_UNROLL
      for (int v = 0; v < VECS; v++) {
        CEIBA_UNROLL
        for (int i = 0; i < MT; i++)
          total[i][v] += s.total(i, v) * scales[v].scale[1] + scales[v].shift[1] * sums[MT + i];
      }
    }
    body += C::BLOCK;
  }
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    CEIBA_UNROLL
    for (int v = 0; v < VECS; v++)
      if (i < m) store(acc + i * LANES + (v0 + v) * W, total[i][v]);
  }
}

template <Kind K, int MT>
void panel_gemv(const uint8_t* panel, const ScaledRows& in, int64_t cols, int m, float* acc) {
  constexpr int FIT = ACCUMULATORS / MT < 1 ? 1 : ACCUMULATORS / MT, VECS = FIT < NV ? FIT : NV;
  for (int v0 = 0; v0 < NV; v0 += VECS) gemv_vectors<K, MT, VECS>(panel, in, cols, m, v0, acc);
}

// acc [m, 16] += x · panelᵀ for m ≤ GEMV_ROWS
template <Kind K>
inline void panel_few(const uint8_t* panel, const ScaledRows& x, int64_t cols, int m, float* acc) {
  if constexpr (GEMV_ROWS > 0) {
    switch (gemv_rows(m)) {
      case 1: return panel_gemv<K, 1>(panel, x, cols, m, acc);
      case 2: return panel_gemv<K, 2>(panel, x, cols, m, acc);
      case 3: return panel_gemv<K, 3>(panel, x, cols, m, acc);
      case 4: return panel_gemv<K, 4>(panel, x, cols, m, acc);
      case 6: return panel_gemv<K, 6>(panel, x, cols, m, acc);
      default: return panel_gemv<K, 8>(panel, x, cols, m, acc);
    }
  }
}
