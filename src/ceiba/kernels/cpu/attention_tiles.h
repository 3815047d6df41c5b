// Attention of many query rows over one run of positions on matrix tiles. Included by the units that use tiles, inside their
// anonymous namespace.
//
// Scores stand by position: a tile of keys as they lie in the pool meets sixteen queries turned on their side, so that the
// softmax of sixteen queries is vertical, its probabilities are next to each other in the pairs that the next product reads,
// and only values are turned. Queries, probabilities and eight-bit keys and values are rounded to bfloat16; sums are float32.

constexpr int KEY_BLOCK = 128;    // positions at a time: with their scores they fit the first cache for 64 dimensions
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f, HIDDEN_SCORE = -1e30f;

// 2^x for x <= 0, with a relative error of 3e-6; 0 for what is far below.
CEIBA_INLINE vf exp2_below(vf x) {
#if defined(__AVX512F__)
  vf whole = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  x = vmax(set1(-126.f), x);  // in this order NaN stays
  vf whole = to_float(to_int(x));
#endif
  vf r = x - whole, p = set1(9.58285294e-3f);  // the least relative error of degree 4 on [-1/2, 1/2]
  p = fmadd(p, r, set1(5.59064262e-2f));
  p = fmadd(p, r, set1(2.40240991e-1f));
  p = fmadd(p, r, set1(6.93124175e-1f));
  p = fmadd(p, r, set1(1.f));
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  vf found = (vf)((vi)p + (to_int(whole) << 23));
  return x <= -126.f ? vf{} : found;
#endif
}

// What one thread needs for tasks of up to `m` query rows.
struct TileScratch {
  int32_t* queries;  // [query tiles][dim / 32][16, 16]: pairs of dimensions by query
  uint16_t* keys;    // [KEY_BLOCK / 16][dim / 32][16, 32]
  uint16_t* values;  // [dim / 16][KEY_BLOCK / 32][16, 32]: turned
  float* scores;     // [2][KEY_BLOCK, 16]
  int32_t* weights;  // [2][KEY_BLOCK / 2, 16]: pairs of positions by query
  float* out;        // [query tiles][dim, 16]
  float *top, *sum;  // [query tiles, 16]
  int32_t* limit;    // [query tiles, 16]
  static size_t bytes(int m, int dim) {
    return size_t(tile_rows(m)) * (6 * dim + 12) + size_t(KEY_BLOCK) * (4 * dim + 2 * 64 + 2 * 32) + 64;
  }
  TileScratch(uint8_t* memory, int m, int dim) {
    const int64_t rows = tile_rows(m);
    auto take = [&](int64_t size) {
      uint8_t* here = memory;
      memory += size;
      return here;
    };
    queries = reinterpret_cast<int32_t*>(take(rows * dim * 2));
    keys = reinterpret_cast<uint16_t*>(take(KEY_BLOCK * dim * 2));
    values = reinterpret_cast<uint16_t*>(take(KEY_BLOCK * dim * 2));
    scores = reinterpret_cast<float*>(take(KEY_BLOCK * 2 * 64));
    weights = reinterpret_cast<int32_t*>(take(KEY_BLOCK * 2 * 32));
    out = reinterpret_cast<float*>(take(rows * dim * 4));
    top = reinterpret_cast<float*>(take(rows * 4));
    sum = reinterpret_cast<float*>(take(rows * 4));
    limit = reinterpret_cast<int32_t*>(take(rows * 4));
  }
};

// 32 values of a head, from dimension d on, as bfloat16.
template <Kv K>
CEIBA_INLINE void head_values(const uint8_t* head, int d, int dim, uint16_t* to) {
  if constexpr (K == Kv::BF16) std::memcpy(to, reinterpret_cast<const uint16_t*>(head) + d, 64);
  else
    for (int i = 0; i < 32; i += W) to_bf16(to + i, kv_load<K>(head, d + i) * kv_step<K>(head, dim));
}

// Keys and turned values of `count` positions; of values up to the next 32, nothing.
template <Kv K>
inline void read_block(const uint8_t* keys, const uint8_t* values, const int32_t* slots, int64_t stride, int dim, int count,
                       TileScratch& s) {
  for (int j = 0; j < count; j++)
    for (int d = 0; d < dim; d += 32)
      head_values<K>(keys + slots[j] * stride, d, dim, s.keys + (j / 16 * (dim / 32) + d / 32) * (2 * TILE_WORDS) + j % 16 * 32);
  for (int j = 0; j < count; j += 32)
    for (int d = 0; d < dim; d += 32) {
      alignas(64) int32_t words[2][16][16];
      for (int pair = 0; pair < 16; pair++) {
        alignas(64) uint16_t first[32] = {}, second[32] = {};
        if (j + 2 * pair < count) head_values<K>(values + slots[j + 2 * pair] * stride, d, dim, first);
        if (j + 2 * pair + 1 < count) head_values<K>(values + slots[j + 2 * pair + 1] * stride, d, dim, second);
        for (int i = 0; i < 32; i += W)
          store_words(words[i / 16][pair] + i % 16, (vi)((vu)(vi)from_bf16(first + i) >> 16) | (vi)from_bf16(second + i));
      }
      for (int h = 0; h < 2; h++)
        turn_words(words[h][0], 16,
                   reinterpret_cast<int32_t*>(s.values + ((d / 16 + h) * (KEY_BLOCK / 32) + j / 32) * (2 * TILE_WORDS)), 16);
    }
}

// Softmax of sixteen queries over `count` positions from `at` on: probabilities into `weights`, in pairs; what they have
// so far shrinks where the largest score grows. `limit` [16]: the first position each may not see, or null.
inline void fold_block(float* scores, int count, int32_t at, const int32_t* limit, int32_t* weights, float* top, float* sum,
                       float* out, int dim) {
  for (int v = 0; v < NV; v++) {
    float* s = scores + v * W;
    vf peak = load(top + v * W);
    const vf before = peak;
    if (limit) {
      vi left = load_words(limit + v * W) - at;
      for (int j = 0; j < count; j++) {
        vf x = left > j ? load(s + j * LANES) : set1(HIDDEN_SCORE);
        store(s + j * LANES, x);
        peak = vmax(peak, x);
      }
    } else {
      vf other = peak;
      int j = 0;
      for (; j + 2 <= count; j += 2) peak = vmax(peak, load(s + j * LANES)), other = vmax(other, load(s + (j + 1) * LANES));
      if (j < count) peak = vmax(peak, load(s + j * LANES));
      peak = vmax(peak, other);
    }
    vf total[2] = {};
    const int whole = (count + 31) / 32 * 32;
    for (int j = count; j < whole; j++) store(s + j * LANES, set1(HIDDEN_SCORE));
    for (int j = 0; j < whole; j += 2) {
      vf e[2];
      CEIBA_UNROLL
      for (int i = 0; i < 2; i++) e[i] = exp2_below(load(s + (j + i) * LANES) - peak), total[i] += e[i];
      store_words(weights + j / 2 * LANES + v * W, bf16_pair(e[0], e[1]));
    }
    vf added = total[0] + total[1];
    if (any((vi)(peak != before))) {
      vf keep = exp2_below(before - peak);
      for (int d = 0; d < dim; d++) store(out + d * LANES + v * W, load(out + d * LANES + v * W) * keep);
      added = fmadd(load(sum + v * W), keep, added);
    } else {
      added += load(sum + v * W);
    }
    store(top + v * W, peak);
    store(sum + v * W, added);
  }
}

// One block of positions for P tiles of queries from `tile` on.
template <int P>
inline void attend_block(TileScratch& s, int tile, int count, int32_t at, bool limited, int dim) {
  const int steps = dim / 32, key_tiles = (count + 31) / 32 * 2;
  const int32_t *queries[P], *weights[P];
  for (int p = 0; p < P; p++) {
    queries[p] = s.queries + (tile + p) * steps * TILE_WORDS;
    weights[p] = s.weights + p * (KEY_BLOCK / 2 * LANES);
  }
  auto rows = [&](const uint16_t* from, int64_t step, int i, float* to, int64_t width, auto fresh, const int32_t* const (&w)[P],
                  int64_t blocks) {
    const uint16_t* x[2] = {from + i * step, from + (i + 1) * step};
    float* acc[2][P];
    for (int r = 0; r < 2; r++)
      for (int p = 0; p < P; p++) acc[r][p] = to + p * width + (i + r) * TILE_WORDS;
    tile_steps<2, P, decltype(fresh)::value>(w, x, blocks, acc);
  };
  for (int i = 0; i < key_tiles; i += 2)
    rows(s.keys, steps * 2 * TILE_WORDS, i, s.scores, KEY_BLOCK * LANES, Count<1>{}, queries, steps);
  for (int p = 0; p < P; p++) {
    const int row = (tile + p) * 16;
    fold_block(s.scores + p * KEY_BLOCK * LANES, count, at, limited ? s.limit + row : nullptr,
               s.weights + p * (KEY_BLOCK / 2 * LANES), s.top + row, s.sum + row, s.out + row * dim, dim);
  }
  for (int i = 0; i < dim / 16; i += 2)
    rows(s.values, KEY_BLOCK / 32 * 2 * TILE_WORDS, i, s.out + tile * 16 * dim, dim * LANES, Count<0>{}, weights, (count + 31) / 32);
}

// Softmax state of `m` rows over positions [from, to) of a KV head: out [tile_rows(m), dim] not yet divided by `sum`, and
// `top`, the largest score. Row i of q [m, dim] (scaled already) does not see positions from limit[i] on, if given.
template <Kv K>
void attend_tiled(const AttentionShape& shape, const void* k, const void* v, const int32_t* slots, int kv_head, const float* q,
                  int m, int32_t from, int32_t to, const int32_t* limit, float* out, float* top, float* sum, TileScratch& s) {
  const int dim = shape.head_dim, tiles = int(tile_rows(m) / 16), steps = dim / 32;
  const int64_t head_bytes = kv_bytes<K>(dim), stride = shape.kv_heads * head_bytes;
  const uint8_t *keys = static_cast<const uint8_t*>(k) + kv_head * head_bytes;
  const uint8_t *values = static_cast<const uint8_t*>(v) + kv_head * head_bytes;
  int32_t least = to;
  for (int i = 0; i < tiles * 16; i++) {
    int32_t* pairs = s.queries + i / 16 * steps * TILE_WORDS + i % 16;
    for (int d = 0; d < dim; d += W) {
      alignas(64) uint16_t halves[W];
      to_bf16(halves, i < m ? load(q + i * dim + d) * LOG2_E : vf{});
      for (int c = 0; c < W; c += 2) std::memcpy(pairs + (d + c) / 2 * LANES, halves + c, 4);
    }
    s.top[i] = HIDDEN_SCORE / 2;  // above hidden ones, which then weigh nothing whatever else there is
    s.sum[i] = 0.f;
    s.limit[i] = limit && i < m ? limit[i] : to;
    if (s.limit[i] < least) least = s.limit[i];
  }
  std::memset(s.out, 0, sizeof(float) * size_t(tiles) * 16 * size_t(dim));
  for (int32_t at = from; at < to; at += KEY_BLOCK) {
    const int count = imin(KEY_BLOCK, to - at);
    read_block<K>(keys, values, slots + at, stride, dim, count, s);
    int tile = 0;
    for (; tile + 2 <= tiles; tile += 2) attend_block<2>(s, tile, count, at, least < at + count, dim);
    if (tile < tiles) attend_block<1>(s, tile, count, at, least < at + count, dim);
  }
  for (int i = 0; i < m; i++) {
    top[i] = s.top[i] * LN_2;
    sum[i] = s.sum[i];
  }
  for (int tile = 0; tile < tiles; tile++)
    for (int d = 0; d < dim; d += 16)
      turn_words(reinterpret_cast<const int32_t*>(s.out + (tile * dim + d) * 16), 16,
                 reinterpret_cast<int32_t*>(out + tile * 16 * dim + d), dim);
}
