// Rows of activations in the forms that products read. Included by each instruction-set unit inside its anonymous
// namespace.

constexpr int TILE_M = 16;

inline int64_t tile_rows(int64_t m) { return (m + TILE_M - 1) / TILE_M * TILE_M; }

struct BlockFacts {
  float scale;    // NaN or an infinity if the block holds one, so that it shows in every product
  float sums[2];  // Σ value of the first and the last 16 columns
  float sum;      // of all
};

// Activations for packed weights as integers per 32 columns, value = scale · integer, in one of three forms. 16 bits are off
// by half a step, about 2^-16 of the largest of the 32. Columns lie in the order 0, 2, 1, 3 of each four, but for bytes.
struct PackedRows {
  int16_t* wide;          // [m, cols]: 16 bits
  int8_t* bytes;          // [m, cols]: 8 bits, for --enable-int8-activations
  uint16_t *high, *low;   // [tile_rows(m), cols], for tiles: bfloat16 values that add up to 16 bits; 8 bits as one, low null
  BlockFacts* facts;      // [m, cols / 32]; for tiles of m in whole eights
};

// Calls put(column, integers of W columns) for a row.
template <int TOP, class Put>
CEIBA_INLINE void quantize(const float* x, int64_t cols, BlockFacts* facts, const Put& put) {
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
    facts[b] = {d, {sums[0], sums[1]}, sums[0] + sums[1]};
  }
}

// Columns 0, 2, 1, 3 of each four.
CEIBA_INLINE vi in_pairs(vi n) {
  vi order;
  CEIBA_UNROLL
  for (int i = 0; i < W; i += 4) order[i] = i, order[i + 1] = i + 2, order[i + 2] = i + 1, order[i + 3] = i + 3;
  return __builtin_shuffle(n, order);
}

inline void narrow_row(const float* x, int64_t cols, int8_t* q, BlockFacts* facts) {
  quantize<127>(x, cols, facts, [&](int64_t at, vi n) __attribute__((always_inline)) {
    *reinterpret_cast<quarter_vec*>(q + at) = __builtin_convertvector(n, quarter_vec);
  });
}

inline void widen_row(const float* x, int64_t cols, int16_t* q, BlockFacts* facts) {
  quantize<32767>(x, cols, facts, [&](int64_t at, vi n) __attribute__((always_inline)) {
    *reinterpret_cast<short_vec*>(q + at) = __builtin_convertvector(in_pairs(n), short_vec);
  });
}

// Integers of at most 8 bits beside zeros as bfloat16 values, which are exact.
CEIBA_INLINE void put_bf16(uint16_t* to, vi n) {
  *reinterpret_cast<half_vec*>(to) = __builtin_convertvector((vi)((vu)to_float(n) >> 16), half_vec);
}

inline void narrow_row_for_tiles(const float* x, int64_t cols, uint16_t* high, BlockFacts* facts) {
  quantize<127>(x, cols, facts, [&](int64_t at, vi n) __attribute__((always_inline)) {
    put_bf16(high + at, (in_pairs(n) << 24) >> 24);  // of NaN some integer, but a small one
  });
}

inline void widen_row_for_tiles(const float* x, int64_t cols, uint16_t* high, uint16_t* low, BlockFacts* facts) {
  quantize<32767>(x, cols, facts, [&](int64_t at, vi n) __attribute__((always_inline)) {
    n = (in_pairs(n) << 16) >> 16;
    put_bf16(high + at, n & ~255);
    put_bf16(low + at, n & 255);
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
  bool int8 = false;      // asked for: 8 bits for packed weights
  bool packed = false;    // packed weights
  bool split = false;     // bfloat16 weights on tiles, whose order of summation depends on the number of rows

  void add(const Matrix& w, bool asked_int8, bool fixed_order) {
    int8 = asked_int8;
    packed |= format_of(w.kind).quantized;
    split |= TILES && w.kind == Kind::BF16 && !fixed_order;
  }
};

// Rows of activations in all forms that are there.
struct Input {
  const float* x;
  int64_t cols;
  PackedRows packed;
  SplitRows split;
  Input rows(int64_t i) const {
    Input at = *this;
    at.x += i * cols;
    if (packed.wide) at.packed.wide += i * cols;
    if (packed.bytes) at.packed.bytes += i * cols;
    if (packed.high) at.packed.high += i * cols;
    if (packed.low) at.packed.low += i * cols;
    if (packed.facts) at.packed.facts += i * (cols / 32);
    if (split.high) at.split.high += i * cols, at.split.low += i * cols;
    return at;
  }
};
