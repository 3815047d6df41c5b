// Paged attention for prefill and decode. Included by each instruction-set unit inside its anonymous namespace.
//
// A task is a set of query rows that look at the same run of positions of one KV head: a tile of a prefill segment, one
// decode segment (its group of query heads), or many decode segments under a shared prefix. Each row has a state per span
// of positions, (max, sum, weighted values), and its spans merge front to back by log-sum-exp (Dao et al. 2022). Spans are
// cut at the same positions in prefill, in decode and under shared prefixes, and every sum inside one has one order: what a
// row gives does not depend on which tasks computed it. Tiles (attention_tiles.h) do not cut their sums there.

constexpr int TILE = 64;          // positions a tile holds
constexpr int SPAN = ATTENTION_SPAN;
constexpr int QUERY_TOKENS = TILES ? 32 : 16;  // prefill: tokens a task covers

struct DecodeTask {
  int32_t first, count;   // members: indices into `member`
  int32_t kv_head, from, to;
  int32_t part;           // which partial of each member this is
};

// Decode bookkeeping of one step, built once and used by every layer.
struct DecodeTasks {
  DecodeTask* task;
  int64_t num_tasks;
  int32_t* member;        // segment ids
  int32_t* part_base;     // [segments]: first partial of a segment
  int32_t* part_count;    // [segments]
  int64_t num_parts;
  bool merge;             // whether any segment has more than one partial
};

// Spans of positions [from, to); `from` begins one.
inline int64_t span_count(int64_t from, int64_t to) { return to > from ? (to - from + SPAN - 1) / SPAN : 0; }

inline int64_t count_decode_tasks(const AttentionPlan& p, int kv_heads, int64_t* members) {
  int64_t tasks = 0, total = 0;
  for (int64_t g = 0; g < p.num_groups; g++) {
    tasks += span_count(p.group_from[g], p.group_to[g]);
    total += p.group_count[g];
  }
  for (int64_t s = p.num_prefill; s < p.segments; s++) {
    tasks += span_count(p.group_covered[s], p.starts[s] + 1);
    total += 1;
  }
  *members = total;
  return tasks * kv_heads;
}

inline void add_tasks(DecodeTasks& d, int kv_heads, int32_t first, int32_t count, int32_t from, int32_t to) {
  for (int32_t at = from; at < to; at += SPAN) {
    int32_t part = d.part_count[d.member[first]];
    for (int32_t i = 0; i < count; i++) d.part_count[d.member[first + i]]++;
    for (int32_t h = 0; h < kv_heads; h++)
      d.task[d.num_tasks++] = {first, count, h, at, int32_t(lmin(to, int64_t(at) + SPAN)), part};
  }
}

// Groups come sorted by `from`, so that a member's partials number alike in every group that shares a task.
inline void build_decode_tasks(const AttentionPlan& p, int kv_heads, DecodeTasks& d) {
  d.num_tasks = 0;
  for (int64_t s = 0; s < p.segments; s++) d.part_count[s] = 0;
  int32_t used = 0;
  for (int64_t g = 0; g < p.num_groups; g++) {
    for (int32_t i = 0; i < p.group_count[g]; i++) d.member[used + i] = p.group_members[p.group_first[g] + i];
    add_tasks(d, kv_heads, used, p.group_count[g], p.group_from[g], p.group_to[g]);
    used += p.group_count[g];
  }
  for (int64_t s = p.num_prefill; s < p.segments; s++) {
    d.member[used] = int32_t(s);
    add_tasks(d, kv_heads, used, 1, p.group_covered[s], p.starts[s] + 1);
    used += 1;
  }
  d.num_parts = 0;
  d.merge = false;
  for (int64_t s = 0; s < p.segments; s++) {
    d.part_base[s] = int32_t(d.num_parts);
    d.num_parts += d.part_count[s];
    d.merge |= d.part_count[s] > 1;
  }
}

// Softmax state of the rows of one task.
struct Rows {
  float* score;   // [m, TILE]
  float* out;     // [m, dim]
  float* top;     // [m]
  float* sum;     // [m]
};

// Folds a tile's scores into the state: rescales what is there, leaves probabilities in `score`.
inline void fold_scores(Rows& r, int m, int dim, int count) {
  for (int i = 0; i < m; i++) {
    float* s = r.score + i * TILE;
    for (int j = count; j % W; j++) s[j] = -1e30f;
    vf peak = set1(-1e30f);
    for (int j = 0; j < count; j += W) peak = vmax(peak, load(s + j));
    float top = hmax(peak);
    if (top < r.top[i]) top = r.top[i];
    vf total = vf{};
    for (int j = 0; j < count; j += W) {
      vf e = vexp(load(s + j) - top);
      e = load(s + j) < -1e29f ? vf{} : e;  // masked: exactly nothing
      store(s + j, e);
      total += e;
    }
    if (top > r.top[i]) {
      float keep = r.top[i] < -1e29f ? 0.f : vexp(set1(r.top[i] - top))[0];
      r.sum[i] *= keep;
      for (int d = 0; d < dim; d += W) store(r.out + i * dim + d, load(r.out + i * dim + d) * keep);
      r.top[i] = top;
    }
    r.sum[i] += hsum(total);
  }
}

// Sums of the lanes of eight vectors, in the order that `hsum` takes.
inline void hsum8(const vf (&v)[8], float* out) {
#if defined(__AVX2__)
  __m256 half[8], quarter[4], two[2];
  CEIBA_UNROLL
  for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
    half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]), _mm512_extractf32x8_ps((__m512)v[i], 1));
#else
    half[i] = (__m256)v[i];
#endif
  }
  CEIBA_UNROLL
  for (int i = 0; i < 4; i++)  // vectors i and i + 4 side by side
    quarter[i] = _mm256_add_ps(_mm256_permute2f128_ps(half[i], half[i + 4], 0x20),
                               _mm256_permute2f128_ps(half[i], half[i + 4], 0x31));
  CEIBA_UNROLL
  for (int i = 0; i < 2; i++) {
    __m256d a = _mm256_castps_pd(quarter[2 * i]), b = _mm256_castps_pd(quarter[2 * i + 1]);
    two[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(two[0], two[1], 0x88), _mm256_shuffle_ps(two[0], two[1], 0xdd)));
#else
  for (int i = 0; i < 8; i++) out[i] = hsum(v[i]);
#endif
}

// Scores of R rows and C positions, R · C = 8: dot products along the head dimension, each one chain.
template <int R, int C>
CEIBA_INLINE void score_block(const float* q, const float* keys, int dim, float (&out)[8]) {
  vf sum[8] = {};
  for (int d = 0; d < dim; d += W) {
    vf key[C];
    CEIBA_UNROLL
    for (int j = 0; j < C; j++) key[j] = load(keys + j * dim + d);
    CEIBA_UNROLL
    for (int i = 0; i < R; i++) {
      vf row = load(q + i * dim + d);
      CEIBA_UNROLL
      for (int j = 0; j < C; j++) sum[i * C + j] = fmadd(row, key[j], sum[i * C + j]);
    }
  }
  hsum8(sum, out);
}

#if defined(__AVX512F__)
// `turned` [dim, TILE] of keys [TILE, dim], whole sixteens of positions.
inline void turn_tile(const float* keys, int dim, int count, float* turned) {
  for (int j = 0; j < count; j += 16)
    for (int d = 0; d < dim; d += 16)
      turn_words(reinterpret_cast<const int32_t*>(keys + j * dim + d), dim, reinterpret_cast<int32_t*>(turned + d * TILE + j), TILE);
}

// What `hsum` would leave of lanes FIRST, FIRST + STEP, ... of the products of R rows with 32 positions, in its order.
template <int R, int FIRST, int STEP>
CEIBA_INLINE void lanes_of(const float* q, const float* turned, int dim, vf (&out)[R][2]) {
  if constexpr (STEP == 8) {
    vf sum[2][R][2] = {};
    for (int d = FIRST; d < dim; d += 16)
      CEIBA_UNROLL
      for (int h = 0; h < 2; h++) {
        const float* keys = turned + (d + 8 * h) * TILE;
        vf a = load(keys), b = load(keys + 16);
        CEIBA_UNROLL
        for (int i = 0; i < R; i++) {
          vf x = set1(q[i * dim + d + 8 * h]);
          sum[h][i][0] = fmadd(x, a, sum[h][i][0]);
          sum[h][i][1] = fmadd(x, b, sum[h][i][1]);
        }
      }
    CEIBA_UNROLL
    for (int i = 0; i < R; i++)
      for (int v = 0; v < 2; v++) out[i][v] = sum[0][i][v] + sum[1][i][v];
  } else {
    vf other[R][2];
    lanes_of<R, FIRST, 2 * STEP>(q, turned, dim, out);
    lanes_of<R, FIRST + STEP, 2 * STEP>(q, turned, dim, other);
    CEIBA_UNROLL
    for (int i = 0; i < R; i++)
      for (int v = 0; v < 2; v++) out[i][v] += other[i][v];
  }
}

template <int R>
__attribute__((noinline)) void score_turned(const float* q, const float* turned, int dim, int count, float* score) {
  for (int j = 0; j < count; j += 32) {
    vf sum[R][2];
    lanes_of<R, 0, 1>(q, turned + j, dim, sum);
    CEIBA_UNROLL
    for (int i = 0; i < R; i++)
      for (int v = 0; v < 2; v++) store(score + i * TILE + j + 16 * v, sum[i][v]);
  }
}
constexpr int TURN_ROWS = 12;     // rows that are worth turning the keys for
#endif

// score [m, TILE] of a tile's keys [TILE, dim]; positions up to the next multiple of 32 get some score too. Many rows have
// positions side by side instead of parts of a sum, which spares them the adding up of lanes; the order is the same.
inline void scores(const float* q, const float* keys, int m, int dim, int count, float* score, [[maybe_unused]] float* turned) {
#if defined(__AVX512F__)
  if (m >= TURN_ROWS) {
    turn_tile(keys, dim, count, turned);
    int i = 0;
    for (; i + 2 <= m; i += 2) score_turned<2>(q + i * dim, turned, dim, count, score + i * TILE);
    if (i < m) score_turned<1>(q + i * dim, turned, dim, count, score + i * TILE);
    return;
  }
#endif
  float out[8];
  int i = 0;
  for (; i + 2 <= m; i += 2)
    for (int j = 0; j < count; j += 4) {
      score_block<2, 4>(q + i * dim, keys + j * dim, dim, out);
      std::memcpy(score + i * TILE + j, out, 16);
      std::memcpy(score + (i + 1) * TILE + j, out + 4, 16);
    }
  if (i < m)
    for (int j = 0; j < count; j += 8) {
      score_block<1, 8>(q + i * dim, keys + j * dim, dim, out);
      std::memcpy(score + i * TILE + j, out, 32);
    }
}

constexpr int SLOTS_AHEAD = 8;

// Asks for `bytes` of memory. Slots of one request lie apart, so that no processor foresees which comes next.
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// A tile's keys or values as float32 [TILE, dim]. Meanwhile what lies in `next` at the same slots is asked for, or null;
// `bytes` of each slot: of all heads where whoever reads the first goes on with the others.
template <Kv K, bool STEPS>
inline void read_tile(const uint8_t* from, const uint8_t* next, const int32_t* slots, int64_t stride, int64_t bytes, int dim,
                      int count, float* out) {
  for (int j = 0; next && j < imin(SLOTS_AHEAD, count); j++) fetch(from + slots[j] * stride, bytes);
  for (int j = 0; j < count; j++) {
    const uint8_t* head = from + slots[j] * stride;
    if (next) {
      if (j + SLOTS_AHEAD < count) fetch(from + slots[j + SLOTS_AHEAD] * stride, bytes);
      fetch(next + slots[j] * stride, bytes);
    }
    for (int d = 0; d < dim; d += W) {
      vf value = kv_load<K>(head, d);
      store(out + j * dim + d, STEPS && K == Kv::I8 ? value * kv_step<K>(head, dim) : value);
    }
  }
}

// out [R, V vectors] += Σ_j weight[i][j] · value(j), one chain of additions over the positions.
template <int R, int V, class Value>
CEIBA_INLINE void weigh_block(const float* weight, const Value& value, int count, float* out, int dim) {
  vf sum[R][V];
  CEIBA_UNROLL
  for (int i = 0; i < R; i++) {
    CEIBA_UNROLL
    for (int x = 0; x < V; x++) sum[i][x] = load(out + i * dim + x * W);
  }
  for (int j = 0; j < count; j++) {
    vf v[V];
    CEIBA_UNROLL
    for (int x = 0; x < V; x++) v[x] = value(j, x);
    CEIBA_UNROLL
    for (int i = 0; i < R; i++) {
      vf w = set1(weight[i * TILE + j]);
      CEIBA_UNROLL
      for (int x = 0; x < V; x++) sum[i][x] = fmadd(w, v[x], sum[i][x]);
    }
  }
  CEIBA_UNROLL
  for (int i = 0; i < R; i++) {
    CEIBA_UNROLL
    for (int x = 0; x < V; x++) store(out + i * dim + x * W, sum[i][x]);
  }
}

// Never inlined: its sums need all registers.
template <int R, int V, class Value>
__attribute__((noinline)) void weigh(const float* weight, const Value& value_at, int count, float* out, int dim) {
  for (int d = 0; d < dim; d += V * W)
    weigh_block<R, V>(weight, [&](int j, int x) __attribute__((always_inline)) { return value_at(j, d + x * W); }, count,
                      out + d, dim);
}

template <class Value>
inline void weigh_rows(const float* weight, const Value& value, int m, int count, float* out, int dim) {
  constexpr int WIDE = 32 / W < 4 ? 32 / W : 4;  // vectors: head dimensions are multiples of 32
  int i = 0;
  for (; i + 6 <= m; i += 6) weigh<6, 2>(weight + i * TILE, value, count, out + i * dim, dim);
  for (; i + 3 <= m; i += 3) weigh<3, WIDE>(weight + i * TILE, value, count, out + i * dim, dim);
  for (; i < m; i++) weigh<1, WIDE>(weight + i * TILE, value, count, out + i * dim, dim);
}

// One tile for the rows in `q` [m, dim] (scaled already). `limit[i]`: positions row i may see in this tile, or null. A
// position that a row may not see has weight 0, which hides any finite value.
template <Kv K>
void attend_tile(const AttentionShape& shape, const void* k, const void* v, const int32_t* slots, int kv_head,
                        const float* q, int m, int count, const int32_t* limit, Rows& r, float* tile, float* turned,
                        bool together) {
  int dim = shape.head_dim;
  int64_t head_bytes = kv_bytes<K>(dim), stride = shape.kv_heads * head_bytes;
  const uint8_t *keys = static_cast<const uint8_t*>(k) + kv_head * head_bytes;
  const uint8_t *values = static_cast<const uint8_t*>(v) + kv_head * head_bytes;
  read_tile<K, true>(keys, values, slots, stride, together && !kv_head ? stride : head_bytes, dim, count, tile);
  scores(q, tile, m, dim, count, r.score, turned);
  if (limit)
    for (int i = 0; i < m; i++)
      for (int j = limit[i] < 0 ? 0 : limit[i]; j < count; j++) r.score[i * TILE + j] = -1e30f;
  fold_scores(r, m, dim, count);
  if constexpr (K == Kv::I8)  // the steps of the values go into their weights, whose sum is taken already
    for (int j = 0; j < count; j++) {
      float step = kv_step<K>(values + slots[j] * stride, dim);
      for (int i = 0; i < m; i++) r.score[i * TILE + j] *= step;
    }
  if (m <= 6) {  // every value is read once: straight from the pool
    weigh_rows(r.score, [&](int j, int d) __attribute__((always_inline)) { return kv_load<K>(values + slots[j] * stride, d); },
               m, count, r.out, dim);
  } else {
    read_tile<K, false>(values, nullptr, slots, stride, 0, dim, count, tile);
    weigh_rows(r.score, [&](int j, int d) __attribute__((always_inline)) { return load(tile + j * dim + d); }, m, count,
               r.out, dim);
  }
}

#if defined(CEIBA_TILES)
// Whether `m` query rows go to tiles: fewer are not worth turning the values for, and float32 is not to be rounded.
template <Kv K>
inline bool tiled(const AttentionShape& shape, int m) { return m >= 8 && K != Kv::F32 && !shape.fixed_order; }
#endif

// Merges the state of a later span into (top, sum, out).
inline void merge_span(int dim, float& top, float& sum, float* out, float span_top, float span_sum,
                       const float* span_out) {
  float both = top > span_top ? top : span_top;
  float keep = vexp(set1(top - both))[0], add = vexp(set1(span_top - both))[0];
  top = both;
  sum = sum * keep + span_sum * add;
  for (int d = 0; d < dim; d += W) store(out + d, fmadd(load(span_out + d), set1(add), load(out + d) * keep));
}

inline void reset_rows(Rows& r, int m, int dim) {
  for (int i = 0; i < m; i++) {
    r.top[i] = -1e30f;
    r.sum[i] = 0.f;
  }
  std::memset(r.out, 0, sizeof(float) * size_t(m) * size_t(dim));
}

// Bytes of scratch one thread needs for tasks of up to `m` rows.
inline size_t thread_scratch(int m, int dim) {
  size_t bytes = sizeof(float) * (size_t(tile_rows(m)) * (TILE + 3 * dim + 5) + 2 * size_t(TILE) * dim) + 1024;
#if defined(CEIBA_TILES)
  bytes += TileScratch::bytes(m, dim);
#endif
  return bytes;
}

struct Scratch {
  Rows rows;              // of the span at hand
  float *q, *tile;
  float* turned;          // the tile's keys by dimension
  float *out, *top, *sum; // of the spans before it
  int32_t* limit;
  bool together = false;  // whether this thread takes all heads of a task in turn
  uint8_t* tiles;         // of a TileScratch
  Scratch(uint8_t* memory, int most, int dim) {
    const int64_t m = tile_rows(most);
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t(63));
    tile = at, at += TILE * dim;
    turned = at, at += TILE * dim;
    q = at, at += m * dim;
    out = at, at += m * dim;
    rows.out = at, at += m * dim;
    rows.score = at, at += m * TILE;
    rows.top = at, at += m;
    rows.sum = at, at += m;
    top = at, at += m;
    sum = at, at += m;
    limit = reinterpret_cast<int32_t*>(at), at += m;
    tiles = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t(63));
  }
};

// Puts the state of the span at hand behind those before it.
inline void end_span(Scratch& s, int m, int dim, bool first) {
  if (first) {
    std::swap(s.out, s.rows.out);
    std::swap(s.top, s.rows.top);
    std::swap(s.sum, s.rows.sum);
    return;
  }
  for (int i = 0; i < m; i++)
    merge_span(dim, s.top[i], s.sum[i], s.out + i * dim, s.rows.top[i], s.rows.sum[i], s.rows.out + i * dim);
}

template <Kv K>
inline void prefill_task(const AttentionShape& shape, const AttentionPlan& p, int64_t segment, int64_t token0,
                         int kv_head, int first, int count, const float* q, int64_t q_stride, const void* k,
                         const void* v, float* out, Scratch& s) {
  int group = shape.heads / shape.kv_heads, dim = shape.head_dim, m = count * group;
  const int32_t* slots = p.slot_table + p.rows[segment] * p.slot_stride;
  for (int t = 0; t < count; t++)
    for (int g = 0; g < group; g++) {
      const float* from = q + (token0 + first + t) * q_stride + (kv_head * group + g) * dim;
      for (int d = 0; d < dim; d += W) store(s.q + (t * group + g) * dim + d, load(from + d) * shape.scale);
    }
  int32_t begin = p.starts[segment] + first, end = begin + count;
  auto give = [&](const float* rows, const float* sums) {
    for (int i = 0; i < m; i++) {
      float* to = out + ((token0 + first + i / group) * shape.heads + kv_head * group + i % group) * dim;
      float inverse = 1.f / sums[i];
      for (int d = 0; d < dim; d += W) store(to + d, load(rows + i * dim + d) * inverse);
    }
  };
#if defined(CEIBA_TILES)
  if (tiled<K>(shape, m)) {
    for (int i = 0; i < m; i++) s.limit[i] = begin + i / group + 1;
    TileScratch tiles(s.tiles, m, dim);
    attend_tiled<K>(shape, k, v, slots, kv_head, s.q, m, 0, end, s.limit, s.rows.out, s.rows.top, s.rows.sum, tiles);
    return give(s.rows.out, s.rows.sum);
  }
#endif
  reset_rows(s.rows, m, dim);
  for (int32_t at = 0; at < end; at += TILE) {
    if (at > 0 && at % SPAN == 0) {
      end_span(s, m, dim, at == SPAN);
      reset_rows(s.rows, m, dim);
    }
    int tile = imin(TILE, end - at);
    bool masked = at + tile > begin + 1;
    if (masked)
      for (int i = 0; i < m; i++) s.limit[i] = begin + i / group + 1 - at;
    attend_tile<K>(shape, k, v, slots + at, kv_head, s.q, m, tile, masked ? s.limit : nullptr, s.rows, s.tile, s.turned, s.together);
  }
  if (end > SPAN) end_span(s, m, dim, false);
  else std::swap(s.out, s.rows.out), std::swap(s.sum, s.rows.sum);
  give(s.out, s.sum);
}

// Partials: [part][heads][dim + 2], the last two being max and sum.
template <Kv K>
inline void decode_task(const AttentionShape& shape, const AttentionPlan& p, const DecodeTasks& d,
                        const DecodeTask& task, int64_t token_base, const float* q, int64_t q_stride, const void* k,
                        const void* v, float* out, float* parts, Scratch& s, int max_rows) {
  int group = shape.heads / shape.kv_heads, dim = shape.head_dim, per = max_rows / group;
  for (int32_t done = 0; done < task.count; done += per) {
    int members = imin(per, task.count - done), m = members * group;
    const int32_t* segment = d.member + task.first + done;
    const int32_t* slots = p.slot_table + p.rows[segment[0]] * p.slot_stride;
    for (int i = 0; i < m; i++) {
      int64_t token = token_base + segment[i / group] - p.num_prefill;
      const float* from = q + token * q_stride + (task.kv_head * group + i % group) * dim;
      for (int x = 0; x < dim; x += W) store(s.q + i * dim + x, load(from + x) * shape.scale);
    }
#if defined(CEIBA_TILES)
    if (tiled<K>(shape, m)) {
      TileScratch tiles(s.tiles, m, dim);
      attend_tiled<K>(shape, k, v, slots, task.kv_head, s.q, m, task.from, task.to, nullptr, s.rows.out, s.rows.top, s.rows.sum, tiles);
    } else
#endif
    {
      reset_rows(s.rows, m, dim);
      for (int32_t at = task.from; at < task.to; at += TILE)
        attend_tile<K>(shape, k, v, slots + at, task.kv_head, s.q, m, imin(TILE, task.to - at), nullptr, s.rows,
                       s.tile, s.turned, s.together);
    }
    for (int i = 0; i < m; i++) {
      int32_t seg = segment[i / group];
      int head = task.kv_head * group + i % group;
      if (d.part_count[seg] == 1) {
        float* to = out + ((token_base + seg - p.num_prefill) * shape.heads + head) * dim;
        float inverse = 1.f / s.rows.sum[i];
        for (int x = 0; x < dim; x += W) store(to + x, load(s.rows.out + i * dim + x) * inverse);
      } else {
        float* to = parts + (int64_t(d.part_base[seg] + task.part) * shape.heads + head) * (dim + 2);
        std::memcpy(to, s.rows.out + i * dim, sizeof(float) * size_t(dim));
        to[dim] = s.rows.top[i];
        to[dim + 1] = s.rows.sum[i];
      }
    }
  }
}

inline void merge_parts(const AttentionShape& shape, const AttentionPlan& p, const DecodeTasks& d, int64_t segment,
                        int head, int64_t token_base, const float* parts, float* out) {
  int dim = shape.head_dim, n = d.part_count[segment];
  int64_t step = int64_t(shape.heads) * (dim + 2);
  const float* part = parts + d.part_base[segment] * step + int64_t(head) * (dim + 2);
  float* to = out + ((token_base + segment - p.num_prefill) * shape.heads + head) * dim;
  std::memcpy(to, part, sizeof(float) * size_t(dim));
  float top = part[dim], sum = part[dim + 1];
  for (int i = 1; i < n; i++) {
    const float* from = part + i * step;
    merge_span(dim, top, sum, to, from[dim], from[dim + 1], from);
  }
  float inverse = 1.f / sum;
  for (int x = 0; x < dim; x += W) store(to + x, load(to + x) * inverse);
}

// Hands out [0, total) in runs of `grain` among the team.
template <class Fn>
inline void share(int64_t* next, int64_t total, int64_t grain, const Fn& fn) {
  for (int64_t at; (at = __atomic_fetch_add(next, grain, __ATOMIC_RELAXED)) < total;)
    for (int64_t i = at; i < lmin(at + grain, total); i++) fn(i);
}

// ── one layer's attention, run by every thread of the team ──────────────────────────────────────────────────────────

struct AttentionState {
  DecodeTasks decode;
  float* parts;
  uint8_t* threads;       // per-thread scratch
  size_t thread_bytes;
  int max_rows;           // query rows of a task
  int64_t prefill_tasks;
  int64_t* prefill_token0;  // [num_prefill]: first token of a segment
  int64_t decode_token0;
};

inline int attention_rows(const AttentionShape& shape) {
  int group = shape.heads / shape.kv_heads;
  return QUERY_TOKENS * group;
}

inline size_t aligned(size_t bytes) { return (bytes + 63) & ~size_t(63); }

inline size_t attention_bytes(const AttentionShape& shape, const AttentionPlan& p, int threads) {
  int64_t members = 0, tasks = count_decode_tasks(p, shape.kv_heads, &members);
  int64_t parts = 0;
  for (int64_t g = 0; g < p.num_groups; g++) parts += span_count(p.group_from[g], p.group_to[g]) * p.group_count[g];
  for (int64_t s = p.num_prefill; s < p.segments; s++) parts += span_count(p.group_covered[s], p.starts[s] + 1);
  return aligned(size_t(tasks) * sizeof(DecodeTask)) + aligned(size_t(members) * 4) + 2 * aligned(size_t(p.segments) * 4) +
         aligned(size_t(p.num_prefill + 1) * 8) +
         aligned(size_t(parts) * shape.heads * (shape.head_dim + 2) * sizeof(float)) +
         threads * aligned(thread_scratch(attention_rows(shape), shape.head_dim)) + 64;
}

inline uint8_t* carve(uint8_t*& at, size_t bytes) {
  uint8_t* here = at;
  at += aligned(bytes);
  return here;
}

inline void prepare_attention(const AttentionShape& shape, const AttentionPlan& p, int threads, uint8_t*& at,
                              AttentionState& s) {
  int64_t members = 0, tasks = count_decode_tasks(p, shape.kv_heads, &members);
  s.decode.task = reinterpret_cast<DecodeTask*>(carve(at, size_t(tasks) * sizeof(DecodeTask)));
  s.decode.member = reinterpret_cast<int32_t*>(carve(at, size_t(members) * 4));
  s.decode.part_base = reinterpret_cast<int32_t*>(carve(at, size_t(p.segments) * 4));
  s.decode.part_count = reinterpret_cast<int32_t*>(carve(at, size_t(p.segments) * 4));
  s.prefill_token0 = reinterpret_cast<int64_t*>(carve(at, size_t(p.num_prefill + 1) * 8));
  build_decode_tasks(p, shape.kv_heads, s.decode);
  s.parts = reinterpret_cast<float*>(
      carve(at, size_t(s.decode.num_parts) * shape.heads * (shape.head_dim + 2) * sizeof(float)));
  s.max_rows = attention_rows(shape);
  s.thread_bytes = aligned(thread_scratch(s.max_rows, shape.head_dim));
  s.threads = carve(at, s.thread_bytes * threads);
  int64_t token = 0;
  s.prefill_tasks = 0;
  for (int64_t i = 0; i < p.num_prefill; i++) {
    s.prefill_token0[i] = token;
    token += p.lengths[i];
    s.prefill_tasks += (p.lengths[i] + QUERY_TOKENS - 1) / QUERY_TOKENS * shape.kv_heads;
  }
  s.decode_token0 = token;
}

template <Kv K>
inline void attend_prefill(const AttentionShape& shape, const AttentionPlan& p, const AttentionState& a, int64_t task,
                           const float* q, int64_t q_stride, const void* k, const void* v, float* out, Scratch& s) {
  int64_t segment = 0;
  for (;; segment++) {  // few segments, long tasks: a search costs nothing
    int64_t here = (p.lengths[segment] + QUERY_TOKENS - 1) / QUERY_TOKENS * shape.kv_heads;
    if (task < here) {
      int64_t tiles = here / shape.kv_heads, tile = tiles - 1 - task / shape.kv_heads;  // the longest first
      int first = int(tile) * QUERY_TOKENS;
      int count = imin(QUERY_TOKENS, p.lengths[segment] - first);
      return prefill_task<K>(shape, p, segment, a.prefill_token0[segment], int(task % shape.kv_heads), first, count,
                                q, q_stride, k, v, out, s);
    }
    task -= here;
  }
}

template <Kv K>
inline void attend_stored(const AttentionShape& shape, const AttentionPlan& p, const AttentionState& a, const float* q,
                          int64_t q_stride, const void* k, const void* v, float* out, int64_t* next,
                          int64_t* merge_next, Team& team, int id) {
  Scratch s(a.threads + a.thread_bytes * size_t(id), a.max_rows, shape.head_dim);
  // All heads of a slot lie side by side: one thread takes them in turn where there is work enough for all.
  const int64_t total = a.prefill_tasks + a.decode.num_tasks;
  s.together = total >= 8 * shape.kv_heads * team.size();
  share(next, total, s.together ? shape.kv_heads : 1, [&](int64_t t) {
    if (t < a.prefill_tasks)
      attend_prefill<K>(shape, p, a, t, q, q_stride, k, v, out, s);
    else
      decode_task<K>(shape, p, a.decode, a.decode.task[t - a.prefill_tasks], a.decode_token0, q, q_stride, k, v, out,
                        a.parts, s, a.max_rows);
  });
  if (!a.decode.merge) return;
  team.barrier();
  const int64_t heads = shape.heads;
  share(merge_next, (p.segments - p.num_prefill) * heads, 8, [&](int64_t i) {
    if (a.decode.part_count[p.num_prefill + i / heads] > 1)
      merge_parts(shape, p, a.decode, p.num_prefill + i / heads, int(i % heads), a.decode_token0, a.parts, out);
  });
}

// Every thread calls this; `next` and `merge_next` are shared counters that start at 0. The caller puts a barrier behind.
inline void attend(const AttentionShape& shape, const AttentionPlan& p, const AttentionState& a, const float* q,
                   int64_t q_stride, const void* k, const void* v, float* out, int64_t* next, int64_t* merge_next,
                   Team& team, int id) {
  switch (shape.kv) {
#define CASE(K) \
  case Kv::K: return attend_stored<Kv::K>(shape, p, a, q, q_stride, k, v, out, next, merge_next, team, id);
    CEIBA_EACH_KV(CASE)
#undef CASE
  }
}
