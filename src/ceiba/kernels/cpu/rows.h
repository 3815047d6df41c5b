// Rows of activations in the forms that products read. Included by each instruction-set unit inside its anonymous
// namespace.

constexpr int TILE_M = 16;

inline int64_t tile_rows(int64_t m) { return (m + TILE_M - 1) / TILE_M * TILE_M; }

// Activations as integers per 32 columns: value = scale · q; `sums` holds Σ value per 16 columns. A block that holds NaN or
// an infinity gets NaN or infinity as its scale, so that it shows in every product.
struct QuantRows {
  int8_t* q;      // [tile_rows(m), cols]: 8 bits, for --enable-int8-activations
  float* scale;   // [m, cols / 32]
  float* sums;    // [m, cols / 16]
};

struct BlockFacts {
  float scale;
  float sums[2];  // Σ value of the first and the last 16 columns
  float sum;      // of all
};

// The same with 16 bits: off by half a step, about 2^-16 of the largest of the 32. For tiles as two bytes, q = 256 · high + low.
struct WideRows {
  int16_t* q;     // [m, cols], columns 0, 2, 1, 3 of each four; or null
  int8_t* high;   // [tile_rows(m), cols], or null
  uint8_t* low;
  BlockFacts* facts;  // [m, cols / 32]
};

// Calls put(column, integers of W columns) for a row, and facts(block, scale, Σ of its first and of its last 16 columns).
template <int TOP, class Put, class Facts>
CEIBA_INLINE void quantize(const float* x, int64_t cols, const Put& put, const Facts& facts) {
  for (int64_t b = 0; b < cols / 32; b++) {
    const float* from = x + 32 * b;
    vf peak = vf{};
    vi odd = vi{};
    CEIBA_UNROLL
    for (int i = 0; i < 32; i += W) {
      vf v = load(from + i);
      peak = vmax(peak, vmax(v, -v));
      odd |= (vi)(v != v);
    }
    float top = hmax(peak), inverse = top > 0.f ? float(TOP) / top : 0.f;
    float d = any(odd) ? __builtin_nanf("") : top / float(TOP);
    float sums[2];
    for (int half = 0; half < 2; half++) {
      vf total = vf{};  // of integers far below 2^24: exact in any order
      CEIBA_UNROLL
      for (int i = 16 * half; i < 16 * half + 16; i += W) {
        vi n = to_int(load(from + i) * inverse);
        put(32 * b + i, n);
        total += to_float(n);
      }
      sums[half] = d * hsum(total);
    }
    facts(b, d, sums[0], sums[1]);
  }
}

inline void quantize_row(const float* x, int64_t cols, int8_t* q, float* scale, float* sums) {
  quantize<127>(
      x, cols,
      [&](int64_t at, vi n) __attribute__((always_inline)) {
        *reinterpret_cast<quarter_vec*>(q + at) = __builtin_convertvector(n, quarter_vec);
      },
      [&](int64_t b, float d, float first, float last) __attribute__((always_inline)) {
        scale[b] = d;
        sums[2 * b] = first;
        sums[2 * b + 1] = last;
      });
}

template <class Put>
CEIBA_INLINE void widen(const float* x, int64_t cols, BlockFacts* facts, const Put& put) {
  quantize<32767>(x, cols, put, [&](int64_t b, float d, float first, float last) __attribute__((always_inline)) {
    facts[b] = {d, {first, last}, first + last};
  });
}

inline void widen_row(const float* x, int64_t cols, int16_t* q, BlockFacts* facts) {
  widen(x, cols, facts, [&](int64_t at, vi n) __attribute__((always_inline)) {
    vi order;
    CEIBA_UNROLL
    for (int i = 0; i < W; i += 4) order[i] = i, order[i + 1] = i + 2, order[i + 2] = i + 1, order[i + 3] = i + 3;
    *reinterpret_cast<short_vec*>(q + at) = __builtin_convertvector(__builtin_shuffle(n, order), short_vec);
  });
}

inline void widen_row_in_bytes(const float* x, int64_t cols, int8_t* high, uint8_t* low, BlockFacts* facts) {
  widen(x, cols, facts, [&](int64_t at, vi n) __attribute__((always_inline)) {
    *reinterpret_cast<quarter_vec*>(high + at) = __builtin_convertvector(n >> 8, quarter_vec);
    *reinterpret_cast<uquarter_vec*>(low + at) = __builtin_convertvector(n & 255, uquarter_vec);
  });
}

// Activations as sums of two bfloat16 values, for tiles and plain weights; the sums of the rows that fill up a tile go
// nowhere.
struct SplitRows {
  uint16_t *high, *low;   // [tile_rows(m), cols], or null
};

inline void split_row(const float* x, int64_t cols, uint16_t* high, uint16_t* low) {
  for (int64_t k = 0; k < cols; k += W) {
    vf v = load(x + k);
    to_bf16(high + k, v);
    to_bf16(low + k, v - from_bf16(high + k));
  }
}

// The forms that the matrices of a call need beside float32.
struct Forms {
  bool int8 = false;      // asked for: 8 bits for packed blocks
  bool wide = false;      // packed blocks
  bool split = false;     // bfloat16 weights on tiles, whose order of summation depends on the number of rows

  void add(const Matrix& w, bool asked_int8, bool fixed_order) {
    bool packed = format_of(w.kind).quantized;
    int8 |= packed && asked_int8;
    wide |= packed && !asked_int8;
    split |= TILES && w.kind == Kind::BF16 && !fixed_order;
  }
};

// Rows of activations in all forms that are there.
struct Input {
  const float* x;
  int64_t cols;
  QuantRows quant;
  WideRows wide;
  SplitRows split;
  Input rows(int64_t i) const {
    Input at = *this;
    at.x += i * cols;
    if (quant.q) {
      at.quant.q += i * cols;
      at.quant.scale += i * (cols / 32);
      at.quant.sums += i * (cols / 16);
    }
    if (wide.q) at.wide.q += i * cols;
    if (wide.high) at.wide.high += i * cols, at.wide.low += i * cols;
    if (wide.facts) at.wide.facts += i * (cols / 32);
    if (split.high) at.split.high += i * cols, at.split.low += i * cols;
    return at;
  }
};
