// y = x · Wᵀ over packed panels. Included by each instruction-set unit inside its anonymous namespace.
//
// Two families. *Exact*: float32 activations meet weights made float32: in registers for few rows (gemv.h), block by
// block in a buffer that stays in the first cache for many. *Int8*: activations are quantized per 32 columns and meet
// the integer codes, which costs about 0.4% of noise per product. Plain weights always take the exact family.

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
void panel_int8(const uint8_t* panel, const QuantRows& x, int64_t cols, int m, float* acc) {
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
      C::codes(body, v, w);
      Scales s;
      C::scales(head, body, v, s);
      for (int i = 0; i < m; i++) {
        const int32_t* xs = reinterpret_cast<const int32_t*>(x.q + i * cols + 32 * b);
        const float* sums = x.sums + i * (cols / 16) + 2 * b;
        float d = x.scale[i * blocks + b];
        vf sum = load(acc + LANES * i + v * W);
        if constexpr (C::HALVES) {
          sum += to_float(dot_groups<K, 0, 4>(w, xs)) * (s.scale[0] * d) + s.shift[0] * sums[0];
          sum += to_float(dot_groups<K, 4, 8>(w, xs)) * (s.scale[1] * d) + s.shift[1] * sums[1];
        } else {
          sum += to_float(dot_groups<K, 0, 8>(w, xs)) * (s.scale[0] * d);
          if constexpr (!C::SIGNED) sum += s.shift[0] * (sums[0] + sums[1]);
        }
        store(acc + LANES * i + v * W, sum);
      }
    }
    body += C::BLOCK;
  }
}

// ── exact family ────────────────────────────────────────────────────────────────────────────────────────────────────

constexpr int DEPTH = 320;  // columns that the float32 buffer holds: 20 KiB

// Columns of one filling of the buffer: equal parts, since a short last one costs as much around its sums as a long one.
inline int64_t part_of(int64_t cols) {
  int64_t parts = (cols + DEPTH - 1) / DEPTH;
  return (cols + 32 * parts - 1) / (32 * parts) * 32;
}

// acc[i][lane] += Σ_k x[i][k] · panel(k, lane), MT rows at once; `Load` gives panel vectors. Few rows keep several sums
// each, since one chain of additions would wait for itself. Never inlined: its accumulators need all registers.
template <int MT, class Load>
__attribute__((noinline)) void micro(const float* x, int64_t stride, int64_t depth, const Load& panel, float* acc,
                                     int64_t acc_stride) {
  // Two chains for any number of rows when the order is fixed: element k then always belongs to chain k % 2.
  constexpr int CHAINS = FIXED_ORDER ? 2 : MT == 1 ? 4 : MT == 2 ? 2 : 1;
  vf sum[CHAINS][MT][NV];
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) {
      sum[0][i][v] = load(acc + i * acc_stride + v * W);
      CEIBA_UNROLL
      for (int c = 1; c < CHAINS; c++) sum[c][i][v] = vf{};
    }
  }
  auto step = [&](vf (&to)[MT][NV], int64_t k) __attribute__((always_inline)) {
    vf w[NV];
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) w[v] = panel(k, v);
    CEIBA_UNROLL
    for (int i = 0; i < MT; i++) {
      vf xs = set1(x[i * stride + k]);
      CEIBA_UNROLL
      for (int v = 0; v < NV; v++) to[i][v] += xs * w[v];
    }
  };
  int64_t k = 0;
  for (; k + CHAINS <= depth; k += CHAINS) {
    CEIBA_UNROLL
    for (int c = 0; c < CHAINS; c++) step(sum[c], k + c);
  }
  for (; k < depth; k++) step(sum[0], k);
  CEIBA_UNROLL
  for (int i = 0; i < MT; i++) {
    CEIBA_UNROLL
    for (int v = 0; v < NV; v++) {
      CEIBA_UNROLL
      for (int c = 1; c < CHAINS; c++) sum[0][i][v] += sum[c][i][v];
      store(acc + i * acc_stride + v * W, sum[0][i][v]);
    }
  }
}

#if defined(__AVX512F__)
constexpr int MT = 12;
#else
constexpr int MT = FIXED_ORDER ? 3 : 6;  // 12 accumulators either way
#endif

struct FloatPanel {
  const float* w;
  CEIBA_INLINE vf operator()(int64_t k, int v) const { return load(w + k * LANES + v * W); }
};
struct HalfPanel {
  const uint16_t* w;
  CEIBA_INLINE vf operator()(int64_t k, int v) const { return from_bf16(w + k * LANES + v * W); }
};

template <class Load>
inline void multiply(const float* x, int64_t stride, int64_t depth, const Load& panel, int m, float* acc,
                     int64_t acc_stride) {
  int i = 0;
  for (; i + MT <= m; i += MT) micro<MT>(x + i * stride, stride, depth, panel, acc + i * acc_stride, acc_stride);
  for (; i + 4 <= m; i += 4) micro<4>(x + i * stride, stride, depth, panel, acc + i * acc_stride, acc_stride);
  for (; i + 2 <= m; i += 2) micro<2>(x + i * stride, stride, depth, panel, acc + i * acc_stride, acc_stride);
  for (; i < m; i++) micro<1>(x + i * stride, stride, depth, panel, acc + i * acc_stride, acc_stride);
}

template <Kind K>
inline void dequantize_block(const uint8_t* head, const uint8_t* body, float* out) {
  using C = Codec<K>;
  for (int v = 0; v < NV; v++) {
    vb w[8];
    C::codes(body, v, w);
    Scales s;
    C::scales(head, body, v, s);
    // A code is masked where it stands in its word; its scale carries the power of two, which rounds nothing.
    constexpr float AT[4] = {1.f, 0x1p-8f, 0x1p-16f, 0x1p-24f};
    vf scales[4];
    CEIBA_UNROLL
    for (int g = 0; g < 8; g++) {
      int half = C::HALVES ? g / 4 : 0;
      if (g == 0 || (C::HALVES && g == 4)) {
        CEIBA_UNROLL
        for (int j = 0; j < 4; j++) scales[j] = s.scale[half] * AT[C::SIGNED ? 3 : j];
      }
      vi codes = (vi)w[g];
      CEIBA_UNROLL
      for (int j = 0; j < 4; j++) {
        // Unsigned codes stay below 128, so that the highest one is no sign.
        vi code = C::SIGNED ? (codes << (24 - 8 * j)) & int32_t(0xff000000u) : codes & (255 << (8 * j));
        store(out + (4 * g + j) * LANES + v * W, to_float(code) * scales[j] + s.shift[half]);
      }
    }
  }
}

template <Kind K>
void panel_exact(const uint8_t* panel, const float* x, int64_t stride, int64_t cols, int m, float* acc) {
  using C = Codec<K>;
  alignas(64) float buffer[DEPTH * LANES];
  const uint8_t *head = panel, *body = panel + C::HEAD;
  const int64_t part = part_of(cols);
  for (int64_t k0 = 0; k0 < cols; k0 += part) {
    int64_t depth = lmin(part, cols - k0);
    for (int64_t k = 0; k < depth; k += 32) {
      int64_t b = (k0 + k) / 32;
      if (C::SUPER > 1 && b > 0 && b % C::SUPER == 0) {
        head = body;
        body += C::HEAD;
      }
      dequantize_block<K>(head, body, buffer + k * LANES);
      body += C::BLOCK;
    }
    multiply(x + k0, stride, depth, FloatPanel{buffer}, m, acc, LANES);
  }
}

inline void panel_f32(const uint8_t* panel, const float* x, int64_t stride, int64_t cols, int m, float* acc) {
  multiply(x, stride, cols, FloatPanel{reinterpret_cast<const float*>(panel)}, m, acc, LANES);
}

inline void panel_bf16(const uint8_t* panel, const float* x, int64_t stride, int64_t cols, int m, float* acc) {
  const uint16_t* w = reinterpret_cast<const uint16_t*>(panel);
  // In a fixed order the columns are never cut.
  if (FIXED_ORDER || m <= MT) return multiply(x, stride, cols, HalfPanel{w}, m, acc, LANES);
  alignas(64) float buffer[DEPTH * LANES];
  for (int64_t k0 = 0; k0 < cols; k0 += DEPTH) {
    int64_t depth = lmin(DEPTH, cols - k0);
    for (int64_t i = 0; i < depth * LANES; i += W) store(buffer + i, from_bf16(w + k0 * LANES + i));
    multiply(x + k0, stride, depth, FloatPanel{buffer}, m, acc, LANES);
  }
}

// ── dispatch ────────────────────────────────────────────────────────────────────────────────────────────────────────

#define CEIBA_EACH_QUANT(CASE) \
  CASE(Q4_0) CASE(Q4_1) CASE(Q5_0) CASE(Q5_1) CASE(Q8_0) CASE(Q4_K) CASE(Q5_K) CASE(Q6_K)

// acc [m, 16] += x · (panel p of w)ᵀ
inline void panel_product(const Matrix& w, int64_t p, const Input& in, int m, float* acc) {
  const uint8_t* panel = w.data + p * w.panel_bytes();
#if defined(CEIBA_TILES)
  if (in.split.high || (in.quant.q && m > GEMV_ROWS)) {
    bool int8 = in.quant.q != nullptr;
    switch (w.kind) {
      case Kind::BF16:
        if (!int8) return panel_tiles_bf16(panel, in.split, w.cols, m, acc);
        break;
#define CASE(K)                                                                       \
  case Kind::K:                                                                       \
    return int8 ? panel_tiles_int8<Kind::K>(panel, in.quant, w.cols, m, acc)          \
                : panel_tiles<Kind::K>(panel, in.split, w.cols, m, acc);
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: break;
    }
  }
#endif
  if (in.quant.q && format_of(w.kind).quantized) {
    switch (w.kind) {
#define CASE(K) \
  case Kind::K: return panel_int8<Kind::K>(panel, in.quant, w.cols, m, acc);
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: return;
    }
  }
  if (in.scaled.x && format_of(w.kind).quantized) {
    switch (w.kind) {
#define CASE(K) \
  case Kind::K: return panel_few<Kind::K>(panel, in.scaled, w.cols, m, acc);
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: return;
    }
  }
  switch (w.kind) {
    case Kind::F32: return panel_f32(panel, in.x, in.cols, w.cols, m, acc);
    case Kind::BF16: return panel_bf16(panel, in.x, in.cols, w.cols, m, acc);
#define CASE(K) \
  case Kind::K: return panel_exact<Kind::K>(panel, in.x, in.cols, w.cols, m, acc);
    CEIBA_EACH_QUANT(CASE)
#undef CASE
    default: return;
  }
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
    dequantize_block<Kind::K>(head, head + Codec<Kind::K>::HEAD + b % per * Codec<Kind::K>::BLOCK, block); \
    break;
      CEIBA_EACH_QUANT(CASE)
#undef CASE
      default: return;
    }
    for (int i = 0; i < 32; i++) out[32 * b + i] = block[i * LANES + lane];
  }
}
