// Rows of activations in the forms that products read. Included by each instruction-set unit inside its anonymous
// namespace.

constexpr int TILE_M = 16;

inline int64_t tile_rows(int64_t m) { return (m + TILE_M - 1) / TILE_M * TILE_M; }

struct BlockFacts {
  float scale;    // NaN or an infinity if the block holds one, so that it shows in every product
  float sums[2];  // Σ value of the first and the last 16 columns
  float sum;      // of all
};

// Activations for packed weights as integers per 32 columns, value = scale · integer, in one of two forms. 16 bits are off by
// half a step, about 2^-16 of the largest of the 32. Columns lie in the order 0, 2, 1, 3 of each four, but for bytes.
struct PackedRows {
  int16_t* wide;          // [m, cols]: 16 bits
  int8_t* bytes;          // [m, cols]: 8 bits, for --enable-int8-activations
  BlockFacts* facts;      // [m, cols / 32]
};

struct TileFacts {
  float scale[TILE_M], sum[TILE_M];  // of 16 rows
};

// The same integers as bfloat16 values, for tiles: 16 rows by 32 columns lie together, as one tile of upper bytes and one of
// lower bytes, or as one of 8 bits.
struct TiledRows {
  uint16_t* values;       // [tile_rows(m) / 16, cols / 32, parts, 16, 32], or null
  TileFacts* facts;       // [tile_rows(m) / 16, cols / 32]
  int parts;
};

// Calls note(block, scale, sum of its first half, of its last) and put(column, integers of W columns) for a row.
template <int TOP, class Note, class Put>
CEIBA_INLINE void quantize(const float* x, int64_t cols, const Note& note, const Put& put) {
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
    note(b, d, sums[0], sums[1]);
  }
}

// Columns 0, 2, 1, 3 of each four.
CEIBA_INLINE vi in_pairs(vi n) {
  vi order;
  CEIBA_UNROLL
  for (int i = 0; i < W; i += 4) order[i] = i, order[i + 1] = i + 2, order[i + 2] = i + 1, order[i + 3] = i + 3;
  return __builtin_shuffle(n, order);
}

CEIBA_INLINE auto note_in(BlockFacts* facts) {
  return [=](int64_t b, float d, float first, float last) __attribute__((always_inline)) {
    facts[b] = {d, {first, last}, first + last};
  };
}

inline void narrow_row(const float* x, int64_t cols, int8_t* q, BlockFacts* facts) {
  quantize<127>(x, cols, note_in(facts), [&](int64_t at, vi n) __attribute__((always_inline)) {
    *reinterpret_cast<quarter_vec*>(q + at) = __builtin_convertvector(n, quarter_vec);
  });
}

inline void widen_row(const float* x, int64_t cols, int16_t* q, BlockFacts* facts) {
  quantize<32767>(x, cols, note_in(facts), [&](int64_t at, vi n) __attribute__((always_inline)) {
    *reinterpret_cast<short_vec*>(q + at) = __builtin_convertvector(in_pairs(n), short_vec);
  });
}

// Integers of at most 8 bits beside zeros as bfloat16 values, which are exact.
CEIBA_INLINE void put_bf16(uint16_t* to, vi n) {
  *reinterpret_cast<half_vec*>(to) = __builtin_convertvector((vi)((vu)to_float(n) >> 16), half_vec);
}

// Row `row` of `to`.
inline void tile_row(const float* x, int64_t cols, const TiledRows& to, int64_t row) {
  const int64_t tile = row / TILE_M, lane = row % TILE_M, blocks = cols / 32;
  uint16_t* values = to.values + tile * TILE_M * cols * to.parts + 32 * lane;
  TileFacts* facts = to.facts + tile * blocks;
  auto note = [&](int64_t b, float d, float first, float last) __attribute__((always_inline)) {
    facts[b].scale[lane] = d;
    facts[b].sum[lane] = first + last;
  };
  constexpr int SIZE = 32 * TILE_M;
  if (to.parts == 1)
    quantize<127>(x, cols, note, [&](int64_t at, vi n) __attribute__((always_inline)) {
      put_bf16(values + at / 32 * SIZE + at % 32, (in_pairs(n) << 24) >> 24);  // of NaN some integer, but a small one
    });
  else
    quantize<32767>(x, cols, note, [&](int64_t at, vi n) __attribute__((always_inline)) {
      uint16_t* here = values + at / 32 * (2 * SIZE) + at % 32;
      n = (in_pairs(n) << 16) >> 16;
      put_bf16(here, n & ~255);
      put_bf16(here + SIZE, n & 255);
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

// Fewest rows that tiles multiply faster than vectors do, as an earlier form of this unit did on one core of a Xeon with AMX
// (not measured for int8 activations): of 4 and 5 bits tiles win from a nearly full tile on, of 8 bits from the second on.
// Never where each half of a block has a scale of its own, which takes twice the products and folds.
constexpr int64_t tiles_from(Kind kind) {
  return kind == Kind::Q6_K ? INT64_MAX : kind == Kind::Q8_0 ? 17 : kind == Kind::BF16 ? 5 : 13;
}
inline bool on_tiles(Kind kind, int64_t m) { return TILES && m >= tiles_from(kind); }

// The forms that the matrices of a call need beside float32.
struct Forms {
  bool int8 = false;      // asked for: 8 bits for packed weights
  bool packed = false;    // packed weights
  bool tiled = false;     // packed weights on tiles
  bool split = false;     // bfloat16 weights on tiles, whose order of summation depends on the number of rows

  // `m` rows will meet `w`.
  void add(const Matrix& w, int64_t m, bool asked_int8, bool fixed_order) {
    int8 = asked_int8;
    bool tiles = on_tiles(w.kind, m);
    if (format_of(w.kind).quantized) (tiles ? tiled : packed) = true;
    split |= tiles && w.kind == Kind::BF16 && !fixed_order;
  }
  bool any() const { return packed || tiled || split; }
};

// Rows of activations in all forms that are there.
struct Input {
  const float* x;
  int64_t cols, m;        // of all rows of the call, which decide what multiplies them
  PackedRows packed;
  TiledRows tiled;
  SplitRows split;
  // From row i on, a multiple of 16.
  Input rows(int64_t i) const {
    Input at = *this;
    at.x += i * cols;
    if (packed.wide) at.packed.wide += i * cols;
    if (packed.bytes) at.packed.bytes += i * cols;
    if (packed.facts) at.packed.facts += i * (cols / 32);
    if (tiled.values) at.tiled.values += i * cols * tiled.parts, at.tiled.facts += i / TILE_M * (cols / 32);
    if (split.high) at.split.high += i * cols, at.split.low += i * cols;
    return at;
  }
};
