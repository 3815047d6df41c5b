// The whole decoder in one call: every thread of the team walks the layers together and meets at barriers, so a step
// costs no Python and no dispatch per operation. Included by each instruction-set unit inside its anonymous namespace.
//
// Work inside a stage is handed out by a shared counter (one per stage, zeroed before the run): a core that the front
// end disturbs simply takes fewer panels.

// Activation rows that panels meet at once, so that they stay in the second cache while every panel passes. Tiles take more,
// since every chunk decodes the panels again: as many as half of a cache of 2 MiB holds.
constexpr int ROW_CHUNK = 64, TILED_CHUNK = 256, MOST_CHUNK = TILES ? TILED_CHUNK : ROW_CHUNK;
constexpr int64_t CHUNK_VALUES = (int64_t(1) << 20) / sizeof(uint16_t);
inline int64_t row_chunk(const Input& in) {
  const int64_t rows = CHUNK_VALUES / in.cols / TILE_M * TILE_M;
  return !in.tiled.values || rows < ROW_CHUNK ? ROW_CHUNK : lmin(rows, TILED_CHUNK);
}
// Floats of one panel's sums of a chunk. Those of a second panel lie a little farther than a multiple of 4 KiB away, or the
// processor would take a load of one for a load of what was stored to the other.
constexpr int CHUNK_SUMS = MOST_CHUNK * LANES + 528;
constexpr int STAGES = 8;         // counters a layer uses

inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  vf sum = vf{};
  for (int64_t i = 0; i < n; i += W) {
    vf v = load(x + i);
    sum = fmadd(v, v, sum);
  }
  float mean = hsum(sum) / float(n) + eps;
  float scale = 1.f / __builtin_sqrtf(mean);
  for (int64_t i = 0; i < n; i += W) store(out + i, load(x + i) * scale * load(weight + i));
}

inline void rotate(float* head, const float* cos, const float* sin, int dim) {
  int half = dim / 2;
  for (int i = 0; i < half; i += W) {
    vf a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, fmadd(a, c, -(b * s)));
    store(head + half + i, fmadd(b, c, a * s));
  }
}

// Activations of a stage in the forms that its products read.
struct Activations {
  float* x;
  PackedRows packed;
  TiledRows tiled;
};

inline bool few(int64_t tokens) { return tokens <= 8; }

inline size_t activation_bytes(int64_t tokens, int64_t cols, const Forms& forms) {
  size_t values = size_t(tokens * cols), whole = size_t(tile_rows(tokens) * cols), bytes = aligned(values * 4);
  if (forms.packed) bytes += aligned(values * (forms.int8 ? 1 : 2)) + aligned(values / 32 * sizeof(BlockFacts));
  if (forms.tiled) bytes += aligned(whole * 2);
  return bytes;
}

inline Activations carve_activations(uint8_t*& at, int64_t tokens, int64_t cols, const Forms& forms) {
  size_t values = size_t(tokens * cols), whole = size_t(tile_rows(tokens) * cols);
  Activations a{};
  a.x = reinterpret_cast<float*>(carve(at, values * 4));
  if (forms.packed) {
    if (forms.int8) a.packed.bytes = reinterpret_cast<int8_t*>(carve(at, values));
    else a.packed.wide = reinterpret_cast<int16_t*>(carve(at, values * 2));
    a.packed.facts = reinterpret_cast<BlockFacts*>(carve(at, values / 32 * sizeof(BlockFacts)));
  }
  if (forms.tiled) a.tiled.values = reinterpret_cast<uint16_t*>(carve(at, whole * 2));
  return a;
}

// Fills the other forms of a row of `a` from `x`.
inline void derive(const Activations& a, const float* x, int64_t row, int64_t cols) {
  int64_t at = row * cols;
  if (a.packed.bytes) narrow_row(x, cols, a.packed.bytes + at, a.packed.facts + at / 32);
  if (a.packed.wide) widen_row(x, cols, a.packed.wide + at, a.packed.facts + at / 32);
  if (a.tiled.values) tile_row(x, cols, a.tiled, row);
}

inline Input input_of(const Activations& a, const float* x, int64_t cols) {
  return {x, cols, a.packed, a.tiled};
}

inline int64_t grain_of(int64_t total, int threads) {
  int64_t g = total / (int64_t(threads) * 8);
  return g < 1 ? 1 : g;
}

enum class Epilogue { STORE, ADD };

// Writes a panel's [m, 16] sums where they belong.
inline void finish_panel(const Matrix& w, int64_t p, const float* acc, int m, float* out, int64_t stride,
                         Epilogue epilogue) {
  int64_t width = lmin(LANES, w.rows - p * LANES);
  for (int i = 0; i < m; i++) {
    float* to = out + i * stride + p * LANES;
    float sums[LANES];
    for (int v = 0; v < NV; v++) {
      vf value = load(acc + i * LANES + v * W);
      if (w.bias) value += load(w.bias + p * LANES + v * W);
      if (epilogue == Epilogue::ADD && width == LANES) value += load(to + v * W);
      store((width == LANES ? to : sums) + v * W, value);
    }
    if (width < LANES)
      for (int64_t l = 0; l < width; l++) to[l] = epilogue == Epilogue::ADD ? to[l] + sums[l] : sums[l];
  }
}

// Cuts a product into tasks and shares them among the team: `steps` runs of panels, for one chunk of rows after the other,
// so that all threads are at the same rows. Calls fn(step, first row, rows).
template <class Fn>
inline void share_chunks(const Input& in, int64_t tokens, int64_t steps, int64_t* next, int threads, const Fn& fn) {
  const int64_t chunk = row_chunk(in), total = (tokens + chunk - 1) / chunk * steps;
  share(next, total, grain_of(steps, threads), [&](int64_t task) {
    int64_t row = task / steps * chunk;
    fn(task % steps, row, int(lmin(chunk, tokens - row)));
  });
}

// Panels of a task: two where they multiply faster together and each thread still gets several tasks.
inline int64_t panels_at_once(const Input& in, int64_t panels, int64_t tokens, int threads) {
  if (in.tiled.values) return 2;
  const int64_t chunks = (tokens + row_chunk(in) - 1) / row_chunk(in);
  return PANEL_PAIRS && in.packed.wide && tokens >= PAIR_ROWS && panels * chunks >= 8 * threads ? 2 : 1;
}

// out [tokens, stride] (+)= in · wᵀ + bias, shared among the team. Several matrices stand side by side in `out`.
inline void product(const Matrix* const* stack, int count, const Input& in, int64_t tokens, float* out, int64_t stride,
                    Epilogue epilogue, int64_t* next, int threads) {
  int64_t panels = 0, steps = 0;
  for (int i = 0; i < count; i++) panels += stack[i]->panels();
  const int64_t run = panels_at_once(in, panels, tokens, threads);
  for (int i = 0; i < count; i++) steps += (stack[i]->panels() + run - 1) / run;
  share_chunks(in, tokens, steps, next, threads, [&](int64_t step, int64_t row, int m) {
    const Matrix* const* at = stack;
    float* to = out + row * stride;
    for (int64_t here; step >= (here = ((*at)->panels() + run - 1) / run); at++) {
      step -= here;
      to += (*at)->rows;
    }
    const Matrix& w = **at;
    const int64_t p = step * run;
    const bool two = p + 1 < w.panels() && run == 2;
    alignas(64) float acc[2][CHUNK_SUMS];
    for (int i = 0; i < 1 + two; i++) std::memset(acc[i], 0, sizeof(float) * size_t(tile_rows(m)) * LANES);
    if (two) panel_products({{&w, p}, {&w, p + 1}}, in.rows(row), m, {acc[0], acc[1]});
    else panel_product(w, p, in.rows(row), m, acc[0]);
    for (int i = 0; i < 1 + two; i++) finish_panel(w, p + i, acc[i], m, to, stride, epilogue);
  });
}

inline void product(const Matrix& w, const Input& in, int64_t tokens, float* out, int64_t stride, Epilogue epilogue,
                    int64_t* next, int threads) {
  const Matrix* stack[] = {&w};
  product(stack, 1, in, tokens, out, stride, epilogue, next, threads);
}

// out [tokens, ffn] = silu(gate) · up; straight in the form of tiles, if `tiled` is given: what a tile multiplies next is then
// neither written nor read as float32.
inline void product_silu(const Matrix& gate, const Matrix& up, const Input& in, int64_t tokens, float* out, int64_t stride,
                         const TiledRows* tiled, int64_t* next, int threads) {
  share_chunks(in, tokens, gate.panels(), next, threads, [&](int64_t p, int64_t row, int m) {
    alignas(64) float sums[2][CHUNK_SUMS];
    float *g = sums[0], *u = sums[1];
    std::memset(g, 0, sizeof(float) * size_t(tile_rows(m)) * LANES);
    std::memset(u, 0, sizeof(float) * size_t(tile_rows(m)) * LANES);
    panel_products({{&gate, p}, {&up, p}}, in.rows(row), m, {g, u});
    for (int v = 0; v < NV; v++) {
      const int64_t col = p * LANES + v * W;
      const vf gate_bias = gate.bias ? load(gate.bias + col) : vf{}, up_bias = up.bias ? load(up.bias + col) : vf{};
      for (int i = 0; i < m; i++) {
        vf x = load(g + i * LANES + v * W) + gate_bias, y = load(u + i * LANES + v * W) + up_bias;
        x = x / (1.f + vexp(-x)) * y;
        if (tiled) to_bf16(tile_place(*tiled, stride, row + i, col), (vf)in_pairs((vi)x));
        else store(out + (row + i) * stride + col, x);
      }
    }
  });
}

// Of few tokens every thread derives its inputs for itself, which is cheaper than meeting the others once more; of many
// the rows are shared out.
struct DecoderScratch {
  Activations normed, attended, inner;
  Activations* local;     // [threads], for few tokens
  float* qkv;
  int64_t* counters;
  AttentionState attention;
};

struct DecoderRun {
  const Forward* f;
  Forms forms;
  DecoderScratch s;
};

inline int64_t qkv_width(const AttentionShape& a) { return int64_t(a.heads + 2 * a.kv_heads) * a.head_dim; }

inline int64_t widest(const Model& m) {
  int64_t heads = int64_t(m.attention.heads) * m.attention.head_dim, cols = m.hidden > m.ffn ? m.hidden : m.ffn;
  return heads > cols ? heads : cols;
}

inline size_t counter_bytes(const Model& m) { return size_t(m.num_layers * 2 * STAGES + STAGES) * 8; }

inline Forms forms_of(const Forward& f) {
  const Model& m = *f.model;
  Forms forms;
  for (int64_t i = 0; i < m.num_layers; i++) {
    const Layer& l = m.layers[i];
    for (const Matrix* w : {&l.q, &l.k, &l.v, &l.out, &l.gate, &l.up, &l.down}) forms.add(*w, f.plan->tokens, m.int8, f.fixed_order);
  }
  return forms;
}

inline size_t local_bytes(int64_t tokens, int64_t cols, const Forms& forms, int threads) {
  if (!few(tokens)) return 0;
  return aligned(sizeof(Activations) * size_t(threads)) + size_t(threads) * activation_bytes(tokens, cols, forms);
}

inline Activations* carve_local(uint8_t*& at, int64_t tokens, int64_t cols, const Forms& forms, int threads) {
  if (!few(tokens)) return nullptr;
  Activations* local = reinterpret_cast<Activations*>(carve(at, sizeof(Activations) * size_t(threads)));
  for (int id = 0; id < threads; id++) local[id] = carve_activations(at, tokens, cols, forms);
  return local;
}

size_t forward_scratch(const Forward& f) {
  const Model& m = *f.model;
  const AttentionShape& a = m.attention;
  int64_t t = f.plan->tokens, heads = int64_t(a.heads) * a.head_dim;
  Forms forms = forms_of(f);
  return activation_bytes(t, m.hidden, forms) + activation_bytes(t, heads, forms) + activation_bytes(t, m.ffn, forms) +
         local_bytes(t, widest(m), forms, f.team->size()) +
         aligned(size_t(t * qkv_width(a)) * 4) + aligned(counter_bytes(m)) +
         attention_bytes(a, *f.plan, f.team->size()) + 4096;
}

// Rows of `hidden`, normed. Ends with a barrier unless every thread works for itself.
inline Input normed_input(DecoderRun& run, const float* weight, int64_t* next, int id) {
  const Forward& f = *run.f;
  const Model& m = *f.model;
  int64_t t = f.plan->tokens, cols = m.hidden;
  const Activations& to = few(t) ? run.s.local[id] : run.s.normed;
  auto row = [&](int64_t i) {
    rms_norm(f.hidden + i * cols, weight, cols, m.eps, to.x + i * cols);
    derive(to, to.x + i * cols, i, cols);
  };
  if (few(t)) {
    for (int64_t i = 0; i < t; i++) row(i);
  } else {
    share(next, t, grain_of(t, f.team->size()), row);
    f.team->barrier();
  }
  return input_of(to, to.x, cols);
}

// Rows that lie in `from` already.
inline Input plain_input(DecoderRun& run, const Activations& from, int64_t cols, int64_t* next, int id) {
  const Forward& f = *run.f;
  int64_t t = f.plan->tokens;
  const Activations& to = few(t) ? run.s.local[id] : from;
  auto row = [&](int64_t i) { derive(to, from.x + i * cols, i, cols); };
  if (few(t)) {
    for (int64_t i = 0; i < t; i++) row(i);
  } else if (run.forms.any()) {
    share(next, t, grain_of(t, f.team->size()), row);
    f.team->barrier();
  }
  return input_of(to, from.x, cols);
}

// Rotates q and k of one token, writes k and v to the pool.
inline void place_token(const Model& m, const Layer& layer, const Forward& f, float* qkv, int64_t token) {
  const AttentionShape& a = m.attention;
  int dim = a.head_dim;
  const float* cos = m.cos + int64_t(f.positions[token]) * (dim / 2);
  const float* sin = m.sin + int64_t(f.positions[token]) * (dim / 2);
  float* at = qkv + token * qkv_width(a);
  for (int h = 0; h < a.heads + a.kv_heads; h++) {
    float* head = at + h * dim;
    const float* norm = h < a.heads ? layer.q_norm : layer.k_norm;
    if (norm) rms_norm(head, norm, dim, m.eps, head);
    rotate(head, cos, sin, dim);
  }
  const float *k = at + a.heads * dim, *v = k + a.kv_heads * dim;
  kv_write(a, layer.k_pool, f.plan->slots[token], k);
  kv_write(a, layer.v_pool, f.plan->slots[token], v);
}

inline void run_layer(DecoderRun& run, const Layer& layer, int64_t* counters, int id) {
  const Forward& f = *run.f;
  const Model& m = *f.model;
  AttentionShape a = m.attention;
  a.fixed_order = f.fixed_order;
  DecoderScratch& s = run.s;
  Team& team = *f.team;
  int threads = team.size();
  int64_t t = f.plan->tokens, heads = int64_t(a.heads) * a.head_dim, width = qkv_width(a);
  int64_t rows = grain_of(t, threads);

  Input in = normed_input(run, layer.attn_norm, counters + 0, id);
  const Matrix* qkv[] = {&layer.q, &layer.k, &layer.v};
  product(qkv, 3, in, t, s.qkv, width, Epilogue::STORE, counters + 1, threads);
  team.barrier();
  share(counters + 2, t, rows, [&](int64_t i) { place_token(m, layer, f, s.qkv, i); });
  team.barrier();
  attend(a, *f.plan, s.attention, s.qkv, width, layer.k_pool, layer.v_pool, s.attended.x, counters + 3, counters + 4, team, id);
  team.barrier();
  in = plain_input(run, s.attended, heads, counters + 5, id);
  product(layer.out, in, t, f.hidden, m.hidden, Epilogue::ADD, counters + 6, threads);
  team.barrier();
}

inline void run_ffn(DecoderRun& run, const Layer& layer, int64_t* counters, int id) {
  const Forward& f = *run.f;
  const Model& m = *f.model;
  DecoderScratch& s = run.s;
  Team& team = *f.team;
  int threads = team.size();
  int64_t t = f.plan->tokens;

  Input in = normed_input(run, layer.ffn_norm, counters + 0, id);
  const bool straight = run.forms.tiled && layer.down.kind != Kind::F32;
  product_silu(layer.gate, layer.up, in, t, s.inner.x, m.ffn, straight ? &s.inner.tiled : nullptr, counters + 1, threads);
  team.barrier();
  in = straight ? input_of(s.inner, nullptr, m.ffn) : plain_input(run, s.inner, m.ffn, counters + 2, id);
  product(layer.down, in, t, f.hidden, m.hidden, Epilogue::ADD, counters + 3, threads);
  team.barrier();
}

void forward_thread(void* context, int id) {
  [[maybe_unused]] TileScope tiles_of_this_thread;
  DecoderRun& run = *static_cast<DecoderRun*>(context);
  const Forward& f = *run.f;
  const Model& m = *f.model;
  int64_t* counters = run.s.counters;
  share(counters, f.plan->tokens, 1, [&](int64_t i) { matrix_row(m.embedding, f.ids[i], f.hidden + i * m.hidden); });
  f.team->barrier();
  for (int64_t l = 0; l < m.num_layers; l++) {
    int64_t* at = counters + STAGES + 2 * l * STAGES;
    run_layer(run, m.layers[l], at, id);
    run_ffn(run, m.layers[l], at + STAGES, id);
  }
}

void forward(const Forward& f) {
  const Model& m = *f.model;
  const AttentionShape& a = m.attention;
  int64_t t = f.plan->tokens, heads = int64_t(a.heads) * a.head_dim;
  uint8_t* at = f.arena->data;
  Forms forms = forms_of(f);
  DecoderRun run{&f, forms, {}};
  run.s.normed = carve_activations(at, t, m.hidden, forms);
  run.s.attended = carve_activations(at, t, heads, forms);
  run.s.inner = carve_activations(at, t, m.ffn, forms);
  run.s.qkv = reinterpret_cast<float*>(carve(at, size_t(t * qkv_width(a)) * 4));
  run.s.local = carve_local(at, t, widest(m), forms, f.team->size());
  run.s.counters = reinterpret_cast<int64_t*>(carve(at, counter_bytes(m)));
  std::memset(run.s.counters, 0, counter_bytes(m));
  prepare_attention(a, *f.plan, f.team->size(), at, run.s.attention);
  f.team->run(forward_thread, &run);
}

// ── logits, one linear layer, one attention call ────────────────────────────────────────────────────────────────────

struct LinearRun {
  const Matrix* weight;
  Forms forms;
  int64_t m;
  float* out;
  Team* team;
  const float* raw;       // [m, cols]
  const float* norm;      // final norm to apply first, or null
  float eps;
  Activations in;
  Activations* local;     // [threads], for few rows
  int64_t* counters;
};

void linear_thread(void* context, int id) {
  [[maybe_unused]] TileScope tiles_of_this_thread;
  LinearRun& r = *static_cast<LinearRun*>(context);
  int64_t cols = r.weight->cols;
  const Activations& to = few(r.m) ? r.local[id] : r.in;
  auto row = [&](int64_t i) {
    const float* x = r.raw + i * cols;
    if (r.norm) {
      rms_norm(x, r.norm, cols, r.eps, to.x + i * cols);
      x = to.x + i * cols;
    }
    derive(to, x, i, cols);
  };
  if (few(r.m)) {
    for (int64_t i = 0; i < r.m; i++) row(i);
  } else {
    share(r.counters, r.m, 1, row);
    r.team->barrier();
  }
  product(*r.weight, input_of(to, r.norm ? to.x : r.raw, cols), r.m, r.out, r.weight->rows, Epilogue::STORE,
          r.counters + 1, r.team->size());
}

size_t linear_bytes(int64_t m, int64_t cols, const Forms& forms, int threads) {
  return activation_bytes(m, cols, forms) + local_bytes(m, cols, forms, threads) + 256;
}

void run_linear(LinearRun& r, Arena& arena) {
  uint8_t* at = arena.data;
  r.counters = reinterpret_cast<int64_t*>(carve(at, 2 * 8));
  r.counters[0] = r.counters[1] = 0;
  r.in = carve_activations(at, r.m, r.weight->cols, r.forms);
  r.local = carve_local(at, r.m, r.weight->cols, r.forms, r.team->size());
  r.team->run(linear_thread, &r);
}

Forms forms_of(const Matrix& w, int64_t m, bool int8, bool fixed_order) {
  Forms forms;
  forms.add(w, m, int8, fixed_order);
  return forms;
}

size_t logits_scratch(const Logits& l) {
  Forms forms = forms_of(l.model->head, l.n, l.model->int8, l.fixed_order);
  return linear_bytes(l.n, l.model->hidden, forms, l.team->size());
}
void logits(const Logits& l) {
  const Model& m = *l.model;
  LinearRun r{&m.head, forms_of(m.head, l.n, m.int8, l.fixed_order), l.n, l.out, l.team, l.hidden, m.final_norm, m.eps, {}, nullptr,
              nullptr};
  run_linear(r, *l.arena);
}

size_t linear_scratch(const LinearCall& c) {
  return linear_bytes(c.m, c.weight->cols, forms_of(*c.weight, c.m, c.int8, c.fixed_order), c.team->size());
}
void linear(const LinearCall& c) {
  LinearRun r{c.weight, forms_of(*c.weight, c.m, c.int8, c.fixed_order), c.m, c.out, c.team, c.x, nullptr, 0.f, {}, nullptr, nullptr};
  run_linear(r, *c.arena);
}

void lookup(const Matrix& w, const int64_t* ids, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) matrix_row(w, ids[i], out + i * w.cols);
}

struct AttentionRun {
  const AttentionCall* call;
  AttentionState state;
  int64_t* counters;
};

void attention_thread(void* context, int id) {
  [[maybe_unused]] TileScope tiles_of_this_thread;
  AttentionRun& r = *static_cast<AttentionRun*>(context);
  const AttentionCall& c = *r.call;
  const AttentionShape& a = c.shape;
  int64_t width = int64_t(a.kv_heads) * a.head_dim;
  if (c.new_k) {
    share(r.counters, c.plan->tokens, 1, [&](int64_t t) {
      kv_write(a, c.k, c.plan->slots[t], c.new_k + t * width);
      kv_write(a, c.v, c.plan->slots[t], c.new_v + t * width);
    });
    c.team->barrier();
  }
  int64_t stride = int64_t(a.heads) * a.head_dim;
  attend(a, *c.plan, r.state, c.q, stride, c.k, c.v, c.out, r.counters + 1, r.counters + 2, *c.team, id);
}

size_t attention_scratch(const AttentionCall& c) { return attention_bytes(c.shape, *c.plan, c.team->size()) + 256; }
void attention(const AttentionCall& c) {
  uint8_t* at = c.arena->data;
  AttentionRun r{&c, {}, nullptr};
  r.counters = reinterpret_cast<int64_t*>(carve(at, 3 * 8));
  r.counters[0] = r.counters[1] = r.counters[2] = 0;
  prepare_attention(c.shape, *c.plan, c.team->size(), at, r.state);
  c.team->run(attention_thread, &r);
}
