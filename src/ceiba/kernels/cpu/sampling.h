// From logits to tokens, a row a task: the rules of runner/sampler.py with the noise of runner/noise.py, without a sort and
// without a pass per operation. Included by each instruction-set unit inside its anonymous namespace.
//
// The choice is a race: of -ln(1 - u) / weight over the tokens the smallest wins. Since -ln(1 - u) ≥ u, a token whose u
// alone is behind the best so far needs no logarithm, which leaves a handful of them per row. Borders of top-k and top-p
// are found in a histogram of 2048 bins; only the tokens of the border's bin are sorted.

constexpr int BINS = 2048;
constexpr float UNREACHABLE = 25.0139217f;  // ln(17 · 2^32): so far below the best no noise lets a token win

struct Best {
  float value;
  int64_t id;
  bool nan;
};

inline Best best_of(const float* x, int64_t n) {
  vf top = set1(-__builtin_inff());
  vi at = vi{}, now, nan = vi{};
  for (int l = 0; l < W; l++) now[l] = l;
  int64_t i = 0;
  for (; i + W <= n; i += W, now += W) {
    vf v = load(x + i);
    vi above = v > top;
    top = above ? v : top;
    at = above ? now : at;
    nan |= (v != v);
  }
  Best best{-__builtin_inff(), 0, false};
  for (int l = 0; l < W; l++) {
    best.nan |= nan[l] != 0;
    if (top[l] > best.value || (top[l] == best.value && at[l] < best.id)) best.value = top[l], best.id = at[l];
  }
  for (; i < n; i++) {
    best.nan |= x[i] != x[i];
    if (x[i] > best.value) best.value = x[i], best.id = i;
  }
  return best;
}

// The last token kept by a limit: those with a smaller x go, and of equal ones those with a larger id.
struct Cut {
  float x;
  int64_t id;
};

// Orders floats descending and ids ascending in one integer.
inline uint64_t order_key(float x, int64_t id) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(~bits) << 32 | uint32_t(id);
}

inline void sift(uint64_t* heap, int64_t at, int64_t n) {
  uint64_t value = heap[at];
  for (int64_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && heap[child + 1] > heap[child]) child++;
    if (heap[child] <= value) break;
    heap[at] = heap[child];
  }
  heap[at] = value;
}

inline void sort_keys(uint64_t* keys, int64_t n) {
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift(keys, i, n);
  for (int64_t end = n - 1; end > 0; end--) {
    uint64_t last = keys[end];
    keys[end] = keys[0];
    keys[0] = last;
    sift(keys, 0, end);
  }
}

struct SampleScratch {
  float *x, *weight;      // [vocab]: logits over temperature, the best at 0, and their exponentials
  uint16_t* bin;          // [vocab]
  uint64_t* keys;         // [vocab]
  int64_t* count;         // [BINS]
  double* mass;           // [BINS]
};

inline size_t sample_thread_bytes(int64_t vocab) {
  return 2 * aligned(size_t(vocab) * 4) + aligned(size_t(vocab) * 2) + aligned(size_t(vocab) * 8) +
         aligned(BINS * 8) * 2;
}

inline SampleScratch carve_sample(uint8_t* at, int64_t vocab) {
  SampleScratch s{};
  s.x = reinterpret_cast<float*>(carve(at, size_t(vocab) * 4));
  s.weight = reinterpret_cast<float*>(carve(at, size_t(vocab) * 4));
  s.bin = reinterpret_cast<uint16_t*>(carve(at, size_t(vocab) * 2));
  s.keys = reinterpret_cast<uint64_t*>(carve(at, size_t(vocab) * 8));
  s.count = reinterpret_cast<int64_t*>(carve(at, BINS * 8));
  s.mass = reinterpret_cast<double*>(carve(at, BINS * 8));
  return s;
}

inline float weight_of(float x) { return x < -UNREACHABLE ? 0.f : vexp(set1(x))[0]; }

// Fills x and weight, and returns Σ weight; bins too if asked.
inline double weigh(const float* logits, int64_t n, float best, float temperature, bool binned, SampleScratch& s) {
  double total = 0.0;
  if (binned) {
    std::memset(s.count, 0, BINS * 8);
    std::memset(s.mass, 0, BINS * 8);
  }
  alignas(64) int32_t bins[W];
  for (int64_t i = 0; i < n; i += W) {
    int width = int(lmin(W, n - i));
    if (width == W) {
      vf x = (load(logits + i) - best) / temperature;
      vf weight = x < -UNREACHABLE ? vf{} : vexp(x);
      store(s.x + i, x);
      store(s.weight + i, weight);
      if (!binned) continue;
      vf scaled = x * (-float(BINS) / UNREACHABLE);
      scaled = scaled < float(BINS - 1) ? scaled : set1(float(BINS - 1));
      *reinterpret_cast<vi*>(bins) = __builtin_convertvector(scaled, vi);
    } else {
      for (int l = 0; l < width; l++) {
        float x = (logits[i + l] - best) / temperature, scaled = x * (-float(BINS) / UNREACHABLE);
        s.x[i + l] = x;
        s.weight[i + l] = weight_of(x);
        bins[l] = scaled < float(BINS - 1) ? int32_t(scaled) : BINS - 1;
      }
      if (!binned) continue;
    }
    for (int l = 0; l < width; l++) {
      s.bin[i + l] = uint16_t(bins[l]);
      s.count[bins[l]]++;
      s.mass[bins[l]] += double(s.weight[i + l]);
    }
  }
  if (binned)
    for (int b = 0; b < BINS; b++) total += s.mass[b];
  return total;
}

// The last token before which `measure` (1 or its weight), added up from the best token on, is below `limit`.
template <bool WEIGHTS>
inline Cut find_cut(int64_t n, double limit, const SampleScratch& s) {
  double before = 0.0;
  int border = 0;
  for (; border < BINS; border++) {
    double here = WEIGHTS ? s.mass[border] : double(s.count[border]);
    if (before + here >= limit) break;
    before += here;
  }
  if (border >= BINS - 1) return {-__builtin_inff(), n};  // in the last bin lies nothing that can win
  int64_t found = 0;
  for (int64_t i = 0; i < n; i++)
    if (s.bin[i] == border) s.keys[found++] = order_key(s.x[i], i);
  sort_keys(s.keys, found);
  int64_t id = 0;
  for (int64_t i = 0; i < found && (before < limit || i == 0); i++) {
    id = int64_t(uint32_t(s.keys[i]));
    before += WEIGHTS ? double(s.weight[id]) : 1.0;
  }
  return {s.x[id], id};
}

inline uint64_t row_key(int64_t seed, int64_t position) {
  uint64_t x = uint64_t(seed) + uint64_t(position + 1) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// u of the tokens in `id`, in [2^-32, 1): 31 bits of the hash as runner.noise mixes them.
inline vf noise_of(vu id, uint32_t low, uint32_t high) {
  vu x = id * 0x9E3779B1u + low;
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x ^= x >> 13;
  x = (x + high) * 0xC2B2AE35u;
  x ^= x >> 15;
  x *= 0x85EBCA6Bu;
  x ^= x >> 16;
  vf u = (to_float((vi)(x >> 1)) + 0.5f) * 0x1p-31f;
  return u < 1.f - 0x1p-24f ? u : set1(1.f - 0x1p-24f);
}

// Runs the race among tokens with weight; `first` starts it.
inline int64_t race(const float* weight, int64_t n, uint64_t key, int64_t first) {
  uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
  vu lanes;
  for (int l = 0; l < W; l++) lanes[l] = uint32_t(l);
  auto value = [](float u) { return float(-__builtin_log1p(-double(u))); };
  float best = value(noise_of(lanes + uint32_t(first), low, high)[0]) / weight[first];
  int64_t winner = first;
  for (int64_t i = 0; i < n; i += W) {
    vf u = noise_of(lanes + uint32_t(i), low, high);
    alignas(64) float last[W] = {};
    if (i + W > n) std::memcpy(last, weight + i, sizeof(float) * size_t(n - i));
    vf w = i + W > n ? load(last) : load(weight + i);
    vi near = (u <= w * (best * 1.000001f)) & (w > 0.f);
    if (!any(near)) continue;
    for (int l = 0; l < W; l++) {
      if (!near[l]) continue;
      float time = value(u[l]) / w[l];
      if (time < best || (time == best && i + l < winner)) best = time, winner = i + l;
    }
  }
  return winner;
}

inline int64_t draw(const SampleCall& c, int64_t row, const Best& best, SampleScratch& s) {
  const float* logits = c.logits + row * c.vocab;
  int64_t n = c.vocab, top_k = c.top_k[row];
  float top_p = c.top_p[row], min_p = c.min_p[row];
  bool limit_k = top_k > 0 && top_k < n, limit_p = top_p < 1.f;
  double total = weigh(logits, n, best.value, c.temperature[row], limit_k || limit_p, s);
  Cut cuts[2];
  int count = 0;
  if (limit_k) cuts[count++] = find_cut<false>(n, double(top_k), s);
  if (limit_p) cuts[count++] = find_cut<true>(n, double(top_p * float(total)), s);
  for (int i = 0; i < count; i++) {
    Cut cut = cuts[i];
    for (int64_t t = 0; t < n; t++)
      if (s.x[t] < cut.x || (s.x[t] == cut.x && t > cut.id)) s.weight[t] = 0.f;
  }
  if (min_p > 0.f)
    for (int64_t t = 0; t < n; t++) s.weight[t] = s.weight[t] < min_p ? 0.f : s.weight[t];
  s.weight[best.id] = 1.f;
  return race(s.weight, n, row_key(c.seeds[row], c.positions[c.rows[row]]), best.id);
}

struct SampleRun {
  const SampleCall* call;
  uint8_t* threads;
  int64_t* next;
};

void sample_thread(void* context, int id) {
  const SampleRun& r = *static_cast<SampleRun*>(context);
  const SampleCall& c = *r.call;
  share(r.next, c.n, 1, [&](int64_t row) {
    if (c.edited && c.faults[row]) return;
    Best best = best_of(c.logits + row * c.vocab, c.vocab);
    if (best.nan || !(best.value - best.value == 0.f)) {
      bool empty = c.edited && !best.nan && best.value < 0.f;
      c.faults[row] = empty ? 2 : 1;
      c.tokens[row] = 0;
      return;
    }
    c.faults[row] = 0;
    c.tokens[row] = best.id;
    if (!c.temperature || c.temperature[row] <= 0.f) return;
    SampleScratch s = carve_sample(r.threads + sample_thread_bytes(c.vocab) * size_t(id), c.vocab);
    c.tokens[row] = draw(c, row, best, s);
  });
}

size_t sample_scratch(const SampleCall& c) {
  return 64 + (c.temperature ? sample_thread_bytes(c.vocab) * size_t(c.team->size()) : 0);
}

void sample(const SampleCall& c) {
  uint8_t* at = c.arena->data;
  int64_t* next = reinterpret_cast<int64_t*>(carve(at, 8));
  *next = 0;
  SampleRun r{&c, at, next};
  c.team->run(sample_thread, &r);
}

// ── before the choice: penalties and allowed tokens ─────────────────────────────────────────────────────────────────

struct EditRun {
  const EditCall* call;
  int64_t* next;
};

inline void penalize(const EditCall& c, int64_t i) {
  float* x = c.logits + c.segments[i] * c.vocab;
  const int32_t* output = c.output + c.lines[i] * c.vocab;
  const uint8_t* seen = c.seen + c.lines[i] * c.vocab;
  float frequency = c.frequency[i], presence = c.presence[i], repetition = c.repetition[i];
  for (int64_t t = 0; t < c.vocab; t++) {
    float value = x[t] - frequency * float(output[t]);
    value -= output[t] > 0 ? presence : 0.f;
    float scaled = value > 0.f ? value / repetition : value * repetition;
    x[t] = seen[t] ? scaled : value;
  }
}

inline void allow(const EditCall& c, int64_t i) {
  float* x = c.logits + c.mask_segments[i] * c.vocab;
  const int32_t* bits = c.bits + c.mask_lines[i] * c.words;
  for (int64_t word = 0; 32 * word < c.vocab; word++) {
    uint32_t allowed = uint32_t(bits[word]);
    if (allowed == 0xffffffffu) continue;
    int64_t width = lmin(32, c.vocab - 32 * word);
    for (int64_t b = 0; b < width; b++)
      if (!(allowed >> b & 1)) x[32 * word + b] = -__builtin_inff();
  }
}

void edit_thread(void* context, int) {
  const EditRun& r = *static_cast<EditRun*>(context);
  const EditCall& c = *r.call;
  int64_t total = c.num_penalties + c.num_masks;
  share(r.next, total, 1, [&](int64_t i) { i < c.num_penalties ? penalize(c, i) : allow(c, i - c.num_penalties); });
}

void edit_logits(const EditCall& c) {
  int64_t next = 0;
  EditRun r{&c, &next};
  c.team->run(edit_thread, &r);
}
