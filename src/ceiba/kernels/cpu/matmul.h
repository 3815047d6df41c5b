// y = x · Wᵀ over packed panels. Included by each instruction-set unit inside its anonymous namespace.
//
// Three families. *Wide* (wide.h): packed blocks against activations of 16 bits, the rule. *Int8*: against activations of
// 8 bits, which costs about 0.4% of noise per product; if asked for. *Plain*: float32 and bfloat16 weights against float32.

// ── int8 family ─────────────────────────────────────────────────────────────────────────────────────────────────────

// Σ over groups [G0, G1) of codes · x, as int32 per row.
template <Kind K, int G0, int G1>
inline vi dot_groups(const vb (&w)[8], const int32_t* x) {
  using C = Codec<K>;
  vi acc = vi{};
  if constexpr (C::SIGNED) {
    CEIBA_UNROLL
    for (int g = G0; g < G1; g++) acc = dot_signed(acc, w[g], x[g]);
    return acc;
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Without VNNI the pair sums of several groups fit in 16 bits together, so they share one widening step.
  constexpr int PER = C::PER_MADD < G1 - G0 ? C::PER_MADD : G1 - G0;
  CEIBA_UNROLL
  for (int g = G0; g < G1; g += PER) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)w[g], _mm256_set1_epi32(x[g]));
    CEIBA_UNROLL
    for (int i = 1; i < PER; i++)
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)w[g + i], _mm256_set1_epi32(x[g + i])));
    acc += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#else
  CEIBA_UNROLL
  for (int g = G0; g < G1; g++) acc = Dot::step(acc, w[g], x[g]);
#endif
  return acc;
}

template <Kind K>
void panel_int8(const uint8_t* panel, const PackedRows& x, int64_t cols, int m, float* acc) {
  using C = Codec<K>;
  int64_t blocks = cols / 32;
  const uint8_t *head = panel, *body = panel + C::HEAD;
  for (int64_t b = 0; b < blocks; b++) {
    if (C::SUPER > 1 && b > 0 && b % C::SUPER == 0) {
      head = body;
      body += C::HEAD;
    }
    __builtin_prefetch(body + 1024);
    for (int v = 0; v < NV; v++) {
      vb w[8];
      block_codes<K>(body, v, w);
      Scales s;
      C::scales(head, body, v, s);
      for (int i = 0; i < m; i++) {
        const int32_t* xs = reinterpret_cast<const int32_t*>(x.bytes + i * cols + 32 * b);
        const BlockFacts& known = x.facts[i * blocks + b];
        vf sum = load(acc + LANES * i + v * W);
        sum = fold<C::SIGNED>(sum, to_float(dot_groups<K, 0, C::HALVES ? 4 : 8>(w, xs)), s.scale[0], s.shift[0],
                              known.scale, sum_of<C::HALVES>(known, 0));
        if constexpr (C::HALVES)
          sum = fold<C::SIGNED>(sum, to_float(dot_groups<K, 4, 8>(w, xs)), s.scale[1], s.shift[1], known.scale,
                                sum_of<C::HALVES>(known, 1));
        store(acc + LANES * i + v * W, sum);
      }
    }
    body += C::BLOCK;
  }
}

// ── plain weights ───────────────────────────────────────────────────────────────────────────────────────────────────

struct FloatPanel {
  const float* w;
  CEIBA_INLINE vf operator()(int64_t k, int v) const { return load(w + k * LANES + v * W); }
};
struct HalfPanel {
  const uint16_t* w;
  CEIBA_INLINE vf operator()(int64_t k, int v) const { return from_bf16(w + k * LANES + v * W); }
};

// to[i] += x[i][k] · panel[k]
template <int MT, class Load>
CEIBA_INLINE void plain_step(const float* x, int64_t stride, int64_t k, const Load& panel, vf (&to)[MT][NV]) {
  vf w[NV];
  CEIBA_UNROLL
  for (int v = 0; v < NV; v++) w[v] = panel(k, v);
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    vf xs = set1(x[i * stride + k]);
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) to[i][v] = fmadd(xs, w[v], to[i][v]);
  }
}

// acc[i][lane] += Σ_k x[i][k] · panel(k, lane), MT rows at once. Even and odd columns are two sums for any number of rows,
// since one chain of additions would wait for itself where rows are few: together if the registers hold both, else one
// after the other. Never inlined: its accumulators need all registers.
template <int MT, class Load>
__attribute__((noinline)) void micro(const float* x, int64_t stride, int64_t depth, const Load& panel, float* acc) {
  vf even[MT][NV], odd[MT][NV] = {};
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) even[i][v] = load(acc + i * LANES + v * W);
  }
  if constexpr (MT * NV <= 6) {
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
      plain_step<MT>(x, stride, k, panel, even);
      plain_step<MT>(x, stride, k + 1, panel, odd);
    }
    if (k < depth) plain_step<MT>(x, stride, k, panel, even);
  } else {
    for (int64_t k = 0; k < depth; k += 2) plain_step<MT>(x, stride, k, panel, even);
    CEIBA_UNROLL
    for (int i = 0; i < MT; i++) {
      CEIBA_UNROLL
      for (int v = 0; v < NV; v++) store(acc + i * LANES + v * W, even[i][v]);
    }
    for (int64_t k = 1; k < depth; k += 2) plain_step<MT>(x, stride, k, panel, odd);
    CEIBA_UNROLL
    for (int i = 0; i < MT; i++) {
      CEIBA_UNROLL
      for (int v = 0; v < NV; v++) even[i][v] = load(acc + i * LANES + v * W);
    }
  }
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) store(acc + i * LANES + v * W, even[i][v] + odd[i][v]);
  }
}

template <class Load>
inline void multiply(const float* x, int64_t stride, int64_t depth, const Load& panel, int m, float* acc) {
  int i = 0;
  auto rows = [&](auto count) {
    constexpr int MT = decltype(count)::value;
    for (; i + MT <= m; i += MT) micro<MT>(x + i * stride, stride, depth, panel, acc + i * LANES);
  };
  rows(Count<WIDE_ROWS>{});
  rows(Count<3>{});
  rows(Count<1>{});
}

inline void panel_f32(const uint8_t* panel, const float* x, int64_t stride, int64_t cols, int m, float* acc) {
  multiply(x, stride, cols, FloatPanel{reinterpret_cast<const float*>(panel)}, m, acc);
}

inline void panel_bf16(const uint8_t* panel, const float* x, int64_t stride, int64_t cols, int m, float* acc) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel);
  alignas(64) float buffer[DEPTH * LANES];
  for (int64_t k0 = 0; k0 < cols; k0 += DEPTH) {  // cut for few rows too: where sums are cut is part of their order
    int64_t depth = lmin(DEPTH, cols - k0);
    if (m <= WIDE_ROWS) {
      multiply(x + k0, stride, depth, HalfPanel{w + k0 * LANES}, m, acc);
      continue;
    }
    for (int64_t i = 0; i < depth * LANES; i += W) store(buffer + i, from_bf16(w + k0 * LANES + i));
    multiply(x + k0, stride, depth, FloatPanel{buffer}, m, acc);
  }
}

// ── one row of a matrix ─────────────────────────────────────────────────────────────────────────────────────────────

template <Kind K>
inline void decode_block(const uint8_t* head, const uint8_t* body, float* out) {
  using C = Codec<K>;
  for (int v = 0; v < NV; v++) {
    vb w[8];
    block_codes<K>(body, v, w);
    Scales s;
    C::scales(head, body, v, s);
    for (int g = 0; g < 8; g++) {
      int half = C::HALVES ? g / 4 : 0;
      for (int j = 0; j < 4; j++) {
        vi code = C::SIGNED ? ((vi)w[g] << (24 - 8 * j)) >> 24 : ((vi)w[g] >> (8 * j)) & 255;
        store(out + (4 * g + j) * LANES + v * W, fmadd(to_float(code), s.scale[half], s.shift[half]));
      }
    }
  }
}

// ── dispatch ────────────────────────────────────────────────────────────────────────────────────────────────────────

#define CEIBA_EACH_QUANT(CASE) \
  CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)

// acc [m, 16] += x · (panel p of w)ᵀ
inline void panel_product(const Matrix& w, int64_t p, const Input& in, int m, float* acc) {
  const uint8_t* panel = w.data + p * w.panel_bytes();
#if defined(CEIBA_TILES)
  if (in.tiled.values && w.kind != Kind::F32) {
    const uint8_t* const one[] = {panel};
    float* const to[] = {acc};
    switch (w.kind) {
#define CASE(K) \
  case Kind::K: return panel_tiles<Kind::K, 1>(one, in.tiled, w.cols, m, to);
      CASE(BF16) CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: break;
    }
  }
#endif
  if (in.packed.bytes && format_of(w.kind).quantized) {
    switch (w.kind) {
#define CASE(K) \
  case Kind::K: return panel_int8<Kind::K>(panel, in.packed, w.cols, m, acc);
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: return;
    }
  }
  switch (w.kind) {
    case Kind::F32: return panel_f32(panel, in.x, in.cols, w.cols, m, acc);
    case Kind::BF16: return panel_bf16(panel, in.x, in.cols, w.cols, m, acc);
#define CASE(K) \
  case Kind::K: return panel_wide<Kind::K>(panel, in.packed, w.cols, m, acc);
    CEIBA_EACH_QUANT(CASE)
#undef CASE
    default: return;
  }
}

// Panel `at` of a matrix.
struct Panel {
  const Matrix* w;
  int64_t at;
};

// Two panels at once, which tiles and wide registers multiply faster than one after the other.
inline void panel_products(const Panel (&panel)[2], const Input& in, int m, float* const (&acc)[2]) {
  const Matrix &a = *panel[0].w, &b = *panel[1].w;
  const uint8_t* const both[] = {a.data + panel[0].at * a.panel_bytes(), b.data + panel[1].at * b.panel_bytes()};
  if (PANEL_PAIRS && m >= PAIR_ROWS && in.packed.wide && !in.tiled.values && a.kind == b.kind && format_of(a.kind).quantized) {
    switch (a.kind) {
#define CASE(K) \
  case Kind::K: return wide_pairs<Kind::K>(both, in.packed, a.cols, m, acc);
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: break;
    }
  }
#if defined(CEIBA_TILES)
  if (in.tiled.values && a.kind == b.kind && a.kind != Kind::F32) {
    switch (a.kind) {
#define CASE(K) \
  case Kind::K: return panel_tiles<Kind::K, 2>(both, in.tiled, a.cols, m, acc);
      CASE(BF16) CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: break;
    }
  }
#endif
  for (int i = 0; i < 2; i++) panel_product(*panel[i].w, panel[i].at, in, m, acc[i]);
}

// One row of a matrix as float32 (the embedding lookup).
inline void matrix_row(const Matrix& w, int64_t row, float* out) {
  const uint8_t* panel = w.data + row / LANES * w.panel_bytes();
  int lane = int(row % LANES);
  if (w.kind == Kind::F32) {
    for (int64_t k = 0; k < w.cols; k++) std::memcpy(out + k, panel + (k * LANES + lane) * 4, 4);
    return;
  }
  if (w.kind == Kind::BF16) {
    for (int64_t k = 0; k < w.cols; k++) {
      uint16_t half;
      std::memcpy(&half, panel + (k * LANES + lane) * 2, 2);
      uint32_t bits = uint32_t(half) << 16;
      std::memcpy(out + k, &bits, 4);
    }
    return;
  }
  alignas(64) float block[32 * LANES];
  for (int64_t b = 0; b < w.cols / 32; b++) {
    const Format& format = format_of(w.kind);
    int per = format.block_cols / 32;
    const uint8_t* head = panel + b / per * format.packed_bytes;
    switch (w.kind) {
#define CASE(K)                                                                                         \
  case Kind::K:                                                                                         \
    decode_block<Kind::K>(head, head + Codec<Kind::K>::HEAD + b % per * Codec<Kind::K>::BLOCK, block);     \
    break;
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: return;
    }
    for (int i = 0; i < 32; i++) out[32 * b + i] = block[i * LANES + lane];
  }
}
