// Paged attention for prefill and decode. Included by each instruction-set unit inside its anonymous namespace.
//
// A task is a set of query rows that look at the same run of positions of one KV head: a tile of a prefill segment, one
// decode segment (its group of query heads), or many decode segments under a shared prefix. Runs are cut into spans; a
// task leaves (max, sum, weighted values) per row and span, and spans merge exactly by log-sum-exp (Dao et al. 2022).

constexpr int TILE = 64;          // positions a tile holds
// Decode: positions a task covers. In a fixed order a row's positions are one task, as they are in prefill.
constexpr int SPAN = FIXED_ORDER ? 1 << 30 : 512;
constexpr int QUERY_TOKENS = 16;  // prefill: tokens a task covers
constexpr int MAX_DIM = 256;

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

// Scores of few rows (m ≤ 4·heads in a group): dot products along the head dimension, straight from the pool.
template <Kv K>
inline void scores_direct(const float* q, const uint8_t* k, const int32_t* slots, int64_t stride, int m, int dim,
                          int count, float* score) {
  for (int j = 0; j < count; j++) {
    const uint8_t* head = k + slots[j] * stride;
    vf key[MAX_DIM / W];
    for (int d = 0; d < dim; d += W) key[d / W] = kv_load<K>(head, d);
    float step = kv_step<K>(head, dim);
    for (int i = 0; i < m; i++) {
      vf sum = vf{}, more = vf{};
      for (int d = 0; d < dim; d += 2 * W) {
        sum += load(q + i * dim + d) * key[d / W];
        more += load(q + i * dim + d + W) * key[d / W + 1];
      }
      score[i * TILE + j] = K == Kv::I8 ? hsum(sum + more) * step : hsum(sum + more);
    }
  }
}

// Keys of a tile, transposed into panels of 16 positions [panel][dim][16], for the matrix kernel.
template <Kv K>
inline void gather_keys(const uint8_t* k, const int32_t* slots, int64_t stride, int dim, int count, float* panels) {
  float row[MAX_DIM];
  for (int j = 0; j < (count + LANES - 1) / LANES * LANES; j++) {
    float* to = panels + (j / LANES) * dim * LANES + j % LANES;
    if (j < count) {
      const uint8_t* head = k + slots[j] * stride;
      float step = kv_step<K>(head, dim);
      for (int d = 0; d < dim; d += W) store(row + d, K == Kv::I8 ? kv_load<K>(head, d) * step : kv_load<K>(head, d));
      for (int d = 0; d < dim; d++) to[d * LANES] = row[d];
    } else {
      for (int d = 0; d < dim; d++) to[d * LANES] = 0.f;
    }
  }
}

// One tile for the rows in `q` [m, dim] (scaled already). `limit[i]`: positions row i may see in this tile, or null.
template <Kv K>
inline void attend_tile(const AttentionShape& shape, const void* k, const void* v, const int32_t* slots, int kv_head,
                        const float* q, int m, int count, const int32_t* limit, Rows& r, float* panels) {
  int dim = shape.head_dim;
  int64_t head_bytes = kv_bytes<K>(dim), stride = shape.kv_heads * head_bytes;
  const uint8_t *keys = static_cast<const uint8_t*>(k) + kv_head * head_bytes;
  const uint8_t *values = static_cast<const uint8_t*>(v) + kv_head * head_bytes;
  if (FIXED_ORDER || m <= 8) {
    scores_direct<K>(q, keys, slots, stride, m, dim, count, r.score);
  } else {
    gather_keys<K>(keys, slots, stride, dim, count, panels);
    for (int j = 0; j < count; j += LANES) {
      for (int i = 0; i < m; i++)
        for (int x = 0; x < NV; x++) store(r.score + i * TILE + j + x * W, vf{});
      const float* panel = panels + j / LANES * dim * LANES;
      multiply(q, dim, dim, FloatPanel{panel}, m, r.score + j, TILE);
    }
  }
  if (limit)
    for (int i = 0; i < m; i++)
      for (int j = limit[i] < 0 ? 0 : limit[i]; j < count; j++) r.score[i * TILE + j] = -1e30f;
  fold_scores(r, m, dim, count);
  if constexpr (K == Kv::I8)  // the steps of the values go into their weights, whose sum is taken already
    for (int j = 0; j < count; j++) {
      float step = kv_step<K>(values + slots[j] * stride, dim);
      for (int i = 0; i < m; i++) r.score[i * TILE + j] *= step;
    }
  for (int d = 0; d < dim; d += LANES) {
    auto at = [&](int64_t j, int x) { return kv_load<K>(values + slots[j] * stride, d + x * W); };
    multiply(r.score, TILE, count, at, m, r.out + d, dim);
  }
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
  return sizeof(float) * (size_t(m) * (TILE + 2 * dim + 3) + size_t(TILE) * dim) + 1024;
}

struct Scratch {
  Rows rows;
  float *q, *panels;
  int32_t* limit;
  Scratch(uint8_t* memory, int m, int dim) {
    float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) & ~uintptr_t(63));
    panels = at, at += TILE * dim;
    q = at, at += m * dim;
    rows.out = at, at += m * dim;
    rows.score = at, at += m * TILE;
    rows.top = at, at += m;
    rows.sum = at, at += m;
    limit = reinterpret_cast<int32_t*>(at);
  }
};

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
  reset_rows(s.rows, m, dim);
  int32_t begin = p.starts[segment] + first, end = begin + count;
  for (int32_t at = 0; at < end; at += TILE) {
    int tile = imin(TILE, end - at);
    bool masked = at + tile > begin + 1;
    if (masked)
      for (int i = 0; i < m; i++) s.limit[i] = begin + i / group + 1 - at;
    attend_tile<K>(shape, k, v, slots + at, kv_head, s.q, m, tile, masked ? s.limit : nullptr, s.rows, s.panels);
  }
  for (int i = 0; i < m; i++) {
    float* to = out + ((token0 + first + i / group) * shape.heads + kv_head * group + i % group) * dim;
    float inverse = 1.f / s.rows.sum[i];
    for (int d = 0; d < dim; d += W) store(to + d, load(s.rows.out + i * dim + d) * inverse);
  }
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
    reset_rows(s.rows, m, dim);
    for (int32_t at = task.from; at < task.to; at += TILE)
      attend_tile<K>(shape, k, v, slots + at, task.kv_head, s.q, m, imin(TILE, task.to - at), nullptr, s.rows,
                        s.panels);
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
  float top = -1e30f, sum = 0.f;
  for (int i = 0; i < n; i++) top = part[i * step + dim] > top ? part[i * step + dim] : top;
  float* to = out + ((token_base + segment - p.num_prefill) * shape.heads + head) * dim;
  for (int x = 0; x < dim; x += W) store(to + x, vf{});
  for (int i = 0; i < n; i++) {
    const float* from = part + i * step;
    float weight = vexp(set1(from[dim] - top))[0];
    sum += from[dim + 1] * weight;
    for (int x = 0; x < dim; x += W) store(to + x, load(to + x) + load(from + x) * weight);
  }
  for (int x = 0; x < dim; x += W) store(to + x, load(to + x) * (1.f / sum));
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
  int64_t total = a.prefill_tasks + a.decode.num_tasks;
  for (int64_t t; (t = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < total;) {
    if (t < a.prefill_tasks)
      attend_prefill<K>(shape, p, a, t, q, q_stride, k, v, out, s);
    else
      decode_task<K>(shape, p, a.decode, a.decode.task[t - a.prefill_tasks], a.decode_token0, q, q_stride, k, v, out,
                        a.parts, s, a.max_rows);
  }
  if (!a.decode.merge) return;
  team.barrier();
  int64_t heads = shape.heads, merges = (p.segments - p.num_prefill) * heads;
  for (int64_t t; (t = __atomic_fetch_add(merge_next, 8, __ATOMIC_RELAXED)) < merges;)
    for (int64_t i = t; i < lmin(t + 8, merges); i++)
      if (a.decode.part_count[p.num_prefill + i / heads] > 1)
        merge_parts(shape, p, a.decode, p.num_prefill + i / heads, int(i % heads), a.decode_token0, a.parts, out);
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
