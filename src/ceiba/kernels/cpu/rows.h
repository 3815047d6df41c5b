// Rows of activations in the forms that products read. Included by each instruction-set unit inside its anonymous
// namespace.

// Activations quantized per 32 columns: value = scale · q; `sums` holds Σ value per 16 columns.
struct QuantRows {
  int8_t* q;      // [m, cols]
  float* scale;   // [m, cols / 32]
  float* sums;    // [m, cols / 16]
};

inline void quantize_row(const float* x, int64_t cols, int8_t* q, float* scale, float* sums) {
  for (int64_t b = 0; b < cols / 32; b++) {
    const float* from = x + 32 * b;
    vf peak = vf{};
    for (int i = 0; i < 32; i += W) {
      vf v = load(from + i);
      peak = vmax(peak, vmax(v, -v));
    }
    float top = hmax(peak), d = top / 127.f, inverse = top > 0.f ? 127.f / top : 0.f;
    for (int half = 0; half < 2; half++) {
      int32_t total = 0;
      for (int i = 16 * half; i < 16 * half + 16; i += W) {
        vf scaled = load(from + i) * inverse;
        vi n = __builtin_convertvector(scaled + (scaled < 0.f ? set1(-0.5f) : set1(0.5f)), vi);
        *reinterpret_cast<quarter_vec*>(q + 32 * b + i) = __builtin_convertvector(n, quarter_vec);
        for (int l = 0; l < W; l++) total += n[l];
      }
      sums[2 * b + half] = d * float(total);
    }
    scale[b] = d;
  }
}

constexpr int TILE_M = 16;

inline int64_t tile_rows(int64_t m) { return (m + TILE_M - 1) / TILE_M * TILE_M; }

// Activations as sums of two bfloat16 values, for tiles; the sums of the rows that fill up a tile go nowhere.
struct SplitRows {
  uint16_t *high, *low;   // [tile_rows(m), cols]
  float* sums;            // [m, cols / 16]: Σ x
};

inline void split_row(const float* x, int64_t cols, uint16_t* high, uint16_t* low, float* sums) {
  for (int64_t k = 0; k < cols; k += 16) {
    vf sum = vf{};
    for (int i = 0; i < 16; i += W) {
      vf v = load(x + k + i);
      sum += v;
      to_bf16(high + k + i, v);
      to_bf16(low + k + i, v - from_bf16(high + k + i));
    }
    sums[k / 16] = hsum(sum);
  }
}

// Rows of activations in all forms; `quant.q` is null where the exact family is asked for, `scaled.x` for
// many rows, `split.high` where there are no tiles.
struct Input {
  const float* x;
  int64_t cols;
  QuantRows quant;
  ScaledRows scaled;
  SplitRows split;
  Input rows(int64_t i) const {
    Input at = *this;
    at.x += i * cols;
    if (quant.q) {
      at.quant.q += i * cols;
      at.quant.scale += i * (cols / 32);
      at.quant.sums += i * (cols / 16);
    }
    if (split.high) {
      at.split.high += i * cols;
      at.split.low += i * cols;
      at.split.sums += i * (cols / 16);
    }
    return at;
  }
};
