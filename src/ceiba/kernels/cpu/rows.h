// Rows of activations in the forms that products read. Included by each instruction-set unit inside its anonymous
// namespace.

constexpr int TILE_M = 16, TILE_WORDS = 16 * 16;

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

// Rows as bfloat16 values for tiles: 16 rows by 32 columns lie together as one tile. Columns lie in the same order.
struct TiledRows {
  uint16_t* values;       // [tile_rows(m) / 16, cols / 32, 16, 32], or null
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

// Where row `row` has its columns from `col` on, up to the next multiple of 32.
CEIBA_INLINE uint16_t* tile_place(const TiledRows& to, int64_t cols, int64_t row, int64_t col) {
  return to.values + row / TILE_M * TILE_M * cols + col / 32 * (32 * TILE_M) + row % TILE_M * 32 + col % 32;
}

// Row `row` of `to`.
inline void tile_row(const float* x, int64_t cols, const TiledRows& to, int64_t row) {
  for (int64_t k = 0; k < cols; k += W) to_bf16(tile_place(to, cols, row, k), (vf)in_pairs((vi)load(x + k)));
}

// Fewest rows that tiles multiply faster than the other families do. Decoding to bfloat16 costs a matrix tile what eight rows
// cost vectors; without matrix tiles there is less to win, but for plain weights, which meet float32 otherwise, and nothing
// where packed weights may meet int8.
#if defined(CEIBA_TILES_IN_VECTORS)
constexpr int64_t PACKED_ON_TILES = 32, PLAIN_ON_TILES = 9;
constexpr bool TILES_BEAT_INT8 = false;
#else
constexpr int64_t PACKED_ON_TILES = 9, PLAIN_ON_TILES = 9;
constexpr bool TILES_BEAT_INT8 = true;
#endif
inline bool on_tiles(Kind kind, int64_t m, bool asked_int8, bool fixed_order) {
  if (!TILES || fixed_order || kind == Kind::F32) return false;
  if (!format_of(kind).quantized) return m >= PLAIN_ON_TILES;
  return m >= PACKED_ON_TILES && (TILES_BEAT_INT8 || !asked_int8);
}

// The form that the matrices of a call need beside float32.
struct Forms {
  bool int8 = false;      // asked for: 8 bits for packed weights
  bool packed = false;    // packed weights, and no tiles
  bool tiled = false;     // tiles, which then multiply all that is not float32

  // `m` rows will meet `w`.
  void add(const Matrix& w, int64_t m, bool asked_int8, bool fixed_order) {
    int8 = asked_int8;
    tiled |= on_tiles(w.kind, m, asked_int8, fixed_order);
    packed = !tiled && (packed || format_of(w.kind).quantized);
  }
  bool any() const { return packed || tiled; }
};

// Rows of activations in all forms that are there.
struct Input {
  const float* x;
  int64_t cols;
  PackedRows packed;
  TiledRows tiled;        // there if tiles multiply them
  // From row i on, a multiple of 16.
  Input rows(int64_t i) const {
    Input at = *this;
    if (x) at.x += i * cols;
    if (packed.wide) at.packed.wide += i * cols;
    if (packed.bytes) at.packed.bytes += i * cols;
    if (packed.facts) at.packed.facts += i * (cols / 32);
    if (tiled.values) at.tiled.values += i * cols;
    return at;
  }
};
