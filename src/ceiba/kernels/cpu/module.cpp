// The extension module of the CPU kernels: bindings, argument checks and the choice of instruction set. The work is in
// the instruction-set units; nothing here is compiled for more than the baseline.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(CEIBA_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "engine.h"
#include "quantize.h"

namespace nb = nanobind;
using namespace ceiba;

namespace {

template <class T, size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Floats1 = Array<const float, 1>;
using Floats2 = Array<const float, 2>;
using Ints1 = Array<const int32_t, 1>;
using Ints2 = Array<const int32_t, 2>;
using Longs1 = Array<const int64_t, 1>;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }
void require(bool ok, const char* message) {
  if (!ok) refuse(message);
}

// Whether tiles may be used: the processor has them, the system saves them, and this process has asked for them, which
// it must once before its first tile instruction (arch/x86/kernel/fpu/xstate.c).
bool tiles_allowed() {
#if defined(CEIBA_HAS_AMX)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
  if ((d & (BF16 | TILE)) != (BF16 | TILE)) return false;
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
#else
  return false;
#endif
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.emplace_back("avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    found.emplace_back("avx512");
    if (__builtin_cpu_supports("avx512vnni")) {
      found.emplace_back("avx512vnni");
#if defined(CEIBA_HAS_BF16)
      // On Zen 4 and 5 faster than whole numbers; whether it is on Intel's has not been measured.
      if (__builtin_cpu_supports("avx512bf16")) found.emplace(found.end() - (__builtin_cpu_is("amd") ? 0 : 1), "avx512bf16");
#endif
      if (tiles_allowed()) found.emplace_back("amx");
    }
  }
#endif
  return found;
}

// "auto" never means tiles: kernels.cpu.best_set tries them in a child first.
const Unit* unit_named(const std::string& name) {
  std::vector<std::string> have = instruction_sets();
  std::string wanted = name;
  if (name == "auto") {
    while (!have.empty() && (have.back() == "amx" || have.back() == "avx512bf16")) have.pop_back();
    wanted = have.empty() ? "generic" : have.back();
  }
  if (wanted == "generic") return unit_generic();
#if defined(CEIBA_HAS_EMULATED_AMX)
  if (wanted == "amx_emulated") return unit_amx_emulated();
#endif
#if defined(__x86_64__)
  for (const std::string& set : have) {
    if (set != wanted) continue;
    if (wanted == "avx2") return unit_avx2();
    if (wanted == "avx512") return unit_avx512();
    if (wanted == "avx512vnni") return unit_avx512vnni();
#if defined(CEIBA_HAS_BF16)
    if (wanted == "avx512bf16") return unit_avx512bf16();
#endif
#if defined(CEIBA_HAS_AMX)
    if (wanted == "amx") return unit_amx();
#endif
  }
#endif
  refuse("instruction set '" + wanted + "' is not available on this processor");
}

constexpr const char* KV_NAMES[] = {"float32", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"};

Kv kv_named(const std::string& name) {
  for (int k = 0; k < int(sizeof KV_NAMES / sizeof *KV_NAMES); k++)
    if (name == KV_NAMES[k]) return Kv(k);
  refuse("no CPU kernel for a KV cache of type '" + name + "'");
}

Kind kind_named(const std::string& name) {
  for (int k = 0; k < int(Kind::COUNT); k++)
    if (name == FORMATS[k].name) return Kind(k);
  refuse("no CPU kernel for weights of type '" + name + "'");
}

struct ScratchArena : Arena {
  ~ScratchArena() { std::free(data); }
  void reserve(size_t bytes) {
    if (bytes <= size) return;
    std::free(data);
    size = (bytes + bytes / 4 + 4095) & ~size_t(4095);
    data = static_cast<uint8_t*>(std::aligned_alloc(4096, size));
    if (!data) {
      size = 0;
      throw std::bad_alloc();
    }
  }
};

// Threads, scratch and the chosen unit: everything a call needs beside its data. One call at a time.
struct Context {
  Team team;
  ScratchArena arena;
  const Unit* unit;
  bool fixed_order;
  Context(int threads, const std::string& isa, bool fixed) : team(threads), unit(unit_named(isa)), fixed_order(fixed) {}
};

struct PackedMatrix {
  Matrix m;
  nb::object data, bias;  // keep the memory alive

  PackedMatrix(const std::string& kind, int64_t rows, int64_t cols, Array<const uint8_t, 1> packed,
               std::optional<Floats1> bias_values)
      : m{kind_named(kind), rows, cols, packed.data(), nullptr} {
    const Format& format = format_of(m.kind);
    require(rows > 0 && cols > 0, "rows and cols must be positive");
    require(cols % format.block_cols == 0, "cols must be a multiple of the weight type's block");
    require(int64_t(packed.size()) == m.panels() * m.panel_bytes(), "packed size does not match rows, cols and type");
    require(reinterpret_cast<uintptr_t>(packed.data()) % 4 == 0, "packed data must be aligned to 4 bytes");
    data = nb::cast(packed);
    if (bias_values) {
      require(int64_t(bias_values->size()) == m.panels() * 16, "bias must be padded to a multiple of 16 rows");
      m.bias = bias_values->data();
      bias = nb::cast(*bias_values);
    }
  }
};

int64_t packed_size(const std::string& kind, int64_t rows, int64_t cols) {
  Matrix m{kind_named(kind), rows, cols, nullptr, nullptr};
  require(cols % format_of(m.kind).block_cols == 0, "cols must be a multiple of the weight type's block");
  return m.panels() * m.panel_bytes();
}

struct PackJob {
  Kind kind;
  const uint8_t* source;
  int64_t row_bytes, rows, cols, panels, panel_bytes;
  uint8_t* out;
  int64_t next = 0;
};

void pack_thread(void* context, int) {
  PackJob& job = *static_cast<PackJob*>(context);
  for (int64_t p; (p = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.panels;)
    pack_panel(job.kind, job.source, job.row_bytes, job.rows, job.cols, p * 16, job.out + p * job.panel_bytes);
}

void pack(Context& context, const std::string& kind, Array<const uint8_t, 2> source, int64_t cols,
          Array<uint8_t, 1> out) {
  Matrix m{kind_named(kind), int64_t(source.shape(0)), cols, nullptr, nullptr};
  const Format& format = format_of(m.kind);
  require(cols % format.block_cols == 0, "cols must be a multiple of the weight type's block");
  require(int64_t(source.shape(1)) == cols / format.block_cols * format.block_bytes, "row bytes do not match cols");
  require(int64_t(out.size()) == m.panels() * m.panel_bytes(), "out has the wrong size");
  PackJob job{m.kind, source.data(), int64_t(source.shape(1)), m.rows, cols, m.panels(), m.panel_bytes(), out.data()};
  nb::gil_scoped_release unlocked;
  context.team.run(pack_thread, &job);
}

struct QuantizeJob {
  Kind kind;
  const float* source;
  int64_t rows, cols, row_bytes;
  uint8_t* out;
  int64_t next = 0;
};

void quantize_thread(void* context, int) {
  QuantizeJob& job = *static_cast<QuantizeJob*>(context);
  for (int64_t row; (row = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.rows;)
    quantize_values(job.kind, job.source + row * job.cols, job.cols, job.out + row * job.row_bytes);
}

void quantize(Context& context, const std::string& kind, Floats2 source, Array<uint8_t, 2> out) {
  QuantizeJob job{kind_named(kind), source.data(), int64_t(source.shape(0)), int64_t(source.shape(1)),
                  int64_t(out.shape(1)), out.data()};
  if (!can_quantize(job.kind)) refuse("values cannot be quantized to " + kind + "; Q8_0 and Q4_1 can be made");
  require(job.cols % 32 == 0, "cols must be a multiple of 32");
  require(int64_t(out.shape(0)) == job.rows && job.row_bytes == job.cols / 32 * format_of(job.kind).block_bytes,
          "out has the wrong shape");
  nb::gil_scoped_release unlocked;
  context.team.run(quantize_thread, &job);
}

struct Groups {
  Ints1 from, to, first, count, members, covered;
};

struct SlotTable {
  const int32_t* data;
  int64_t rows, stride;
};

// Everything of a plan but the tokens' slots.
AttentionPlan make_plan(const Ints1& rows, const Ints1& starts, const Ints1& lengths, int64_t num_prefill,
                        const SlotTable& table, const std::optional<Groups>& groups, std::vector<int32_t>& no_cover) {
  AttentionPlan p{};
  p.segments = int64_t(rows.size());
  p.num_prefill = num_prefill;
  p.rows = rows.data();
  p.starts = starts.data();
  p.lengths = lengths.data();
  p.slot_table = table.data;
  p.slot_stride = table.stride;
  require(int64_t(starts.size()) == p.segments && int64_t(lengths.size()) == p.segments, "rows, starts, lengths differ");
  require(num_prefill >= 0 && num_prefill <= p.segments, "num_prefill is out of range");
  for (int64_t i = 0; i < p.segments; i++) {
    require(rows.data()[i] >= 0 && rows.data()[i] < table.rows, "row is out of range");
    require(starts.data()[i] >= 0 && lengths.data()[i] > 0 &&
                int64_t(starts.data()[i]) + lengths.data()[i] <= p.slot_stride,
            "segment leaves the slot table");
    require(i < num_prefill || lengths.data()[i] == 1, "decode segments have one token");
    p.tokens += lengths.data()[i];
  }
  if (groups) {
    p.num_groups = int64_t(groups->from.size());
    p.group_from = groups->from.data();
    p.group_to = groups->to.data();
    p.group_first = groups->first.data();
    p.group_count = groups->count.data();
    p.group_members = groups->members.data();
    p.group_covered = groups->covered.data();
    require(int64_t(groups->covered.size()) == p.segments, "covered must have one entry per segment");
    for (int64_t i = num_prefill; i < p.segments; i++) {
      int32_t covered = p.group_covered[i];
      require(covered >= 0 && covered % ATTENTION_SPAN == 0 && covered <= p.starts[i] + 1, "covered is out of range");
    }
    for (int64_t g = 0; g < p.num_groups; g++) {
      require(p.group_from[g] >= 0 && p.group_from[g] % ATTENTION_SPAN == 0 && p.group_from[g] < p.group_to[g] &&
                  p.group_to[g] % ATTENTION_SPAN == 0,
              "groups begin and end where spans do");
      require(p.group_first[g] >= 0 && p.group_count[g] > 0 &&
                  p.group_first[g] + p.group_count[g] <= int64_t(groups->members.size()),
              "group members are out of range");
      for (int64_t i = 0; i < p.group_count[g]; i++) {
        int32_t segment = p.group_members[p.group_first[g] + i];
        require(segment >= num_prefill && segment < p.segments, "group member is not a decode segment");
        require(p.group_to[g] <= starts.data()[segment] + 1, "group is longer than its member");
      }
    }
  } else {
    no_cover.assign(size_t(p.segments), 0);
    p.group_covered = no_cover.data();
  }
  return p;
}

void set_slots(AttentionPlan& p, const int64_t* slots, size_t count, int64_t pool_slots) {
  require(int64_t(count) == p.tokens, "slots must have one entry per token");
  for (int64_t i = 0; i < p.tokens; i++) require(slots[i] >= 0 && slots[i] < pool_slots, "slot is outside the pool");
  p.slots = slots;
}

AttentionShape make_shape(int heads, int kv_heads, int head_dim, float scale, const std::string& kv) {
  require(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  require(head_dim % 32 == 0 && head_dim <= 256, "head_dim must be a multiple of 32, at most 256");
  return {heads, kv_heads, head_dim, scale, kv_named(kv), false};
}

// What persists between steps, by row (runner/rows.py).
struct RowState {
  Array<int32_t, 2> slot_table;  // [rows, context]
  Array<int32_t, 1> last_token;  // [rows]

  RowState(Array<int32_t, 2> table, Array<int32_t, 1> last) : slot_table(table), last_token(last) {
    require(table.shape(0) == last.size(), "row state: slot table and last tokens differ in rows");
  }
};

// A whole decoder of the Llama shape. Python keeps every array alive through `keep`.
class Decoder {
 public:
  Decoder(int64_t hidden, int64_t ffn, int heads, int kv_heads, int head_dim, float eps, float scale,
          const std::string& kv, bool int8, Floats2 cos, Floats2 sin, Floats1 final_norm, const PackedMatrix& embedding,
          const PackedMatrix& head, nb::list layers, nb::object keep)
      : keep_(std::move(keep)) {
    model_ = {hidden, ffn, head.m.rows, make_shape(heads, kv_heads, head_dim, scale, kv), eps, cos.data(),
              sin.data(), final_norm.data(), embedding.m, head.m, nullptr, 0, int8};
    positions_ = int64_t(cos.shape(0));
    require(hidden % 32 == 0 && ffn % 32 == 0, "hidden and ffn sizes must be multiples of 32");
    require(int64_t(cos.shape(1)) == head_dim / 2 && int64_t(sin.shape(1)) == head_dim / 2, "rotary tables do not fit");
    require(embedding.m.cols == hidden && head.m.cols == hidden, "embedding does not fit the hidden size");
    for (nb::handle item : layers) add_layer(nb::cast<nb::dict>(item));
    model_.layers = layers_.data();
    model_.num_layers = int64_t(layers_.size());
  }

  // A whole step: its slots go to the rows' table, tokens still to come are the rows' last ones, `hidden` receives the
  // layers' output of every token, and `logits` those of the tokens in `select`, or of all.
  void step(Context& context, const RowState& state, Ints1 rows, Ints1 starts, Ints1 lengths, int64_t num_prefill,
            Ints1 tokens, Ints1 slots, int64_t pool_slots, std::optional<Groups> groups, std::optional<Ints1> select,
            Array<float, 2> hidden, Array<float, 2> logits) {
    const Array<int32_t, 2>& table = state.slot_table;
    SlotTable slot_table{table.data(), int64_t(table.shape(0)), int64_t(table.shape(1))};
    AttentionPlan plan = make_plan(rows, starts, lengths, num_prefill, slot_table, groups, no_cover_);
    require(int64_t(tokens.size()) == plan.tokens, "tokens do not fit the plan");
    slots_.assign(slots.data(), slots.data() + slots.size());
    set_slots(plan, slots_.data(), slots_.size(), pool_slots);
    require(int64_t(hidden.shape(0)) == plan.tokens && int64_t(hidden.shape(1)) == model_.hidden, "hidden does not fit");
    int64_t n = select ? int64_t(select->size()) : plan.tokens;
    require(int64_t(logits.shape(0)) == n && int64_t(logits.shape(1)) == model_.vocab, "logits do not fit");
    for (int64_t i = 0; select && i < n; i++)
      require(select->data()[i] >= 0 && select->data()[i] < plan.tokens, "a selected token is out of range");
    place(plan, state, tokens.data());
    nb::gil_scoped_release unlocked;
    Forward call{&model_, &plan, ids_.data(), at_.data(), hidden.data(), context.fixed_order, &context.team,
                 &context.arena};
    context.arena.reserve(context.unit->forward_scratch(call));
    context.unit->forward(call);
    const float* last = hidden.data();
    if (select) {
      last_.resize(size_t(n * model_.hidden));
      for (int64_t i = 0; i < n; i++)
        std::copy_n(hidden.data() + select->data()[i] * model_.hidden, model_.hidden, last_.data() + i * model_.hidden);
      last = last_.data();
    }
    run_logits(context, last, n, logits.data());
  }

  void logits(Context& context, Floats2 hidden, Array<float, 2> out) {
    require(int64_t(hidden.shape(1)) == model_.hidden && out.shape(0) == hidden.shape(0) &&
                int64_t(out.shape(1)) == model_.vocab,
            "logits: shapes do not fit");
    nb::gil_scoped_release unlocked;
    run_logits(context, hidden.data(), int64_t(hidden.shape(0)), out.data());
  }

 private:
  // Ids and positions of a step's tokens, and their slots in the table.
  void place(const AttentionPlan& plan, const RowState& state, const int32_t* tokens) {
    ids_.resize(size_t(plan.tokens));
    at_.resize(size_t(plan.tokens));
    for (int64_t i = 0, t = 0; i < plan.segments; i++) {
      int32_t row = plan.rows[i];
      int32_t* table = state.slot_table.data() + row * plan.slot_stride;
      for (int32_t p = plan.starts[i]; p < plan.starts[i] + plan.lengths[i]; p++, t++) {
        ids_[t] = tokens[t] < 0 ? state.last_token.data()[row] : tokens[t];
        at_[t] = p;
        require(ids_[t] >= 0 && ids_[t] < model_.embedding.rows, "token id is outside the vocabulary");
        require(p < positions_, "position is outside the rotary table");
        table[p] = int32_t(plan.slots[t]);
      }
    }
  }

  void run_logits(Context& context, const float* hidden, int64_t n, float* out) {
    if (n == 0) return;
    Logits call{&model_, hidden, out, n, context.fixed_order, &context.team, &context.arena};
    context.arena.reserve(context.unit->logits_scratch(call));
    context.unit->logits(call);
  }

  static const float* optional_floats(nb::dict d, const char* name, int64_t size) {
    nb::object value = d[name];
    if (value.is_none()) return nullptr;
    Floats1 array = nb::cast<Floats1>(value);
    require(int64_t(array.size()) == size, "a norm weight has the wrong size");
    return array.data();
  }

  void add_layer(nb::dict d) {
    const AttentionShape& a = model_.attention;
    int64_t heads = int64_t(a.heads) * a.head_dim, kv = int64_t(a.kv_heads) * a.head_dim;
    auto matrix = [&](const char* name, int64_t rows, int64_t cols) {
      const Matrix& m = nb::cast<const PackedMatrix&>(d[name]).m;
      if (m.rows != rows || m.cols != cols) refuse(std::string(name) + " has the wrong shape");
      return m;
    };
    Layer layer{};
    layer.attn_norm = optional_floats(d, "attn_norm", model_.hidden);
    layer.ffn_norm = optional_floats(d, "ffn_norm", model_.hidden);
    require(layer.attn_norm && layer.ffn_norm, "a layer needs both norms");
    layer.q_norm = optional_floats(d, "q_norm", a.head_dim);
    layer.k_norm = optional_floats(d, "k_norm", a.head_dim);
    layer.q = matrix("q", heads, model_.hidden);
    layer.k = matrix("k", kv, model_.hidden);
    layer.v = matrix("v", kv, model_.hidden);
    layer.out = matrix("out", model_.hidden, heads);
    layer.gate = matrix("gate", model_.ffn, model_.hidden);
    layer.up = matrix("up", model_.ffn, model_.hidden);
    layer.down = matrix("down", model_.hidden, model_.ffn);
    layer.k_pool = reinterpret_cast<void*>(nb::cast<uintptr_t>(d["k_pool"]));
    layer.v_pool = reinterpret_cast<void*>(nb::cast<uintptr_t>(d["v_pool"]));
    layers_.push_back(layer);
  }

  Model model_;
  int64_t positions_;
  std::vector<Layer> layers_;
  std::vector<int32_t> ids_, at_, no_cover_;  // of the step that runs
  std::vector<int64_t> slots_;
  std::vector<float> last_;
  nb::object keep_;
};

void linear(Context& context, const PackedMatrix& weight, Floats2 x, Array<float, 2> out, bool int8) {
  require(int64_t(x.shape(1)) == weight.m.cols && out.shape(0) == x.shape(0) && int64_t(out.shape(1)) == weight.m.rows,
          "linear: shapes do not fit");
  require(weight.m.cols % 32 == 0, "linear: cols must be a multiple of 32");
  if (x.shape(0) == 0) return;
  LinearCall call{&weight.m, x.data(), out.data(), int64_t(x.shape(0)), int8, context.fixed_order, &context.team,
                  &context.arena};
  nb::gil_scoped_release unlocked;
  context.arena.reserve(context.unit->linear_scratch(call));
  context.unit->linear(call);
}

void lookup(Context& context, const PackedMatrix& weight, Longs1 ids, Array<float, 2> out) {
  require(out.shape(0) == ids.size() && int64_t(out.shape(1)) == weight.m.cols, "lookup: shapes do not fit");
  for (size_t i = 0; i < ids.size(); i++)
    require(ids.data()[i] >= 0 && ids.data()[i] < weight.m.rows, "lookup: row is out of range");
  context.unit->lookup(weight.m, ids.data(), int64_t(ids.size()), out.data());
}

void attention(Context& context, Array<const float, 3> q, std::optional<Array<const float, 3>> k,
               std::optional<Array<const float, 3>> v, uintptr_t k_pool, uintptr_t v_pool, int64_t pool_slots,
               int kv_heads, const std::string& kv, float scale, Ints1 rows, Ints1 starts, Ints1 lengths, int64_t num_prefill,
               Ints2 slot_table, Longs1 slots, std::optional<Groups> groups, Array<float, 3> out) {
  std::vector<int32_t> no_cover;
  SlotTable table{slot_table.data(), int64_t(slot_table.shape(0)), int64_t(slot_table.shape(1))};
  AttentionPlan plan = make_plan(rows, starts, lengths, num_prefill, table, groups, no_cover);
  set_slots(plan, slots.data(), slots.size(), pool_slots);
  AttentionShape shape = make_shape(int(q.shape(1)), kv_heads, int(q.shape(2)), scale, kv);
  shape.fixed_order = context.fixed_order;
  require(int64_t(q.shape(0)) == plan.tokens && out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) &&
              out.shape(2) == q.shape(2),
          "attention: q and out do not fit the plan");
  require(k.has_value() == v.has_value(), "attention: give both k and v, or neither");
  if (k)
    require(int64_t(k->shape(0)) == plan.tokens && int(k->shape(1)) == kv_heads && k->shape(2) == q.shape(2) &&
                v->shape(0) == k->shape(0) && v->shape(1) == k->shape(1) && v->shape(2) == k->shape(2),
            "attention: k and v do not fit the plan");
  AttentionCall call{shape, &plan, q.data(), k ? k->data() : nullptr, v ? v->data() : nullptr,
                     reinterpret_cast<void*>(k_pool), reinterpret_cast<void*>(v_pool), out.data(), &context.team,
                     &context.arena};
  nb::gil_scoped_release unlocked;
  context.arena.reserve(context.unit->attention_scratch(call));
  context.unit->attention(call);
}

// How rows are drawn; see SampleCall. Of one value per sampled row.
struct Draws {
  Floats1 temperature, top_p, min_p;
  Longs1 top_k, seeds, rows;
};

void sample(Context& context, Floats2 logits, Array<int64_t, 1> tokens, Array<uint8_t, 1> faults, bool edited,
            const Draws* draws, std::optional<Longs1> positions) {
  int64_t n = int64_t(logits.shape(0));
  require(int64_t(tokens.size()) == n && int64_t(faults.size()) == n, "sample: tokens and faults need one entry per row");
  require(logits.shape(1) > 0, "sample: the vocabulary is empty");
  SampleCall call{};
  call.logits = logits.data();
  call.n = n;
  call.vocab = int64_t(logits.shape(1));
  call.tokens = tokens.data();
  call.faults = faults.data();
  call.edited = edited;
  call.team = &context.team;
  call.arena = &context.arena;
  if (draws) {
    require(positions.has_value(), "sample: draws need positions");
    for (size_t size : {draws->temperature.size(), draws->top_p.size(), draws->min_p.size(), draws->top_k.size(),
                        draws->seeds.size(), draws->rows.size()})
      require(int64_t(size) == n, "sample: draws need one entry per row");
    for (int64_t i = 0; i < n; i++)
      require(draws->rows.data()[i] >= 0 && draws->rows.data()[i] < int64_t(positions->size()), "sample: no such row");
    call.temperature = draws->temperature.data();
    call.top_p = draws->top_p.data();
    call.min_p = draws->min_p.data();
    call.top_k = draws->top_k.data();
    call.seeds = draws->seeds.data();
    call.rows = draws->rows.data();
    call.positions = positions->data();
  }
  if (n == 0) return;
  nb::gil_scoped_release unlocked;
  context.arena.reserve(context.unit->sample_scratch(call));
  context.unit->sample(call);
}

void check_indices(const Longs1& values, size_t limit, const char* message) {
  for (size_t i = 0; i < values.size(); i++)
    require(values.data()[i] >= 0 && size_t(values.data()[i]) < limit, message);
}

void penalize(Context& context, Array<float, 2> logits, Longs1 segments, Longs1 lines, Ints2 output,
              Array<const bool, 2> seen, Floats1 frequency, Floats1 presence, Floats1 repetition) {
  size_t n = segments.size();
  require(lines.size() == n && frequency.size() == n && presence.size() == n && repetition.size() == n,
          "penalize: columns differ in length");
  require(output.shape(1) == logits.shape(1) && seen.shape(1) == logits.shape(1) && seen.shape(0) == output.shape(0),
          "penalize: tables do not fit the vocabulary");
  check_indices(segments, logits.shape(0), "penalize: segment is out of range");
  check_indices(lines, output.shape(0), "penalize: line is out of range");
  EditCall call{};
  call.logits = logits.data();
  call.vocab = int64_t(logits.shape(1));
  call.num_penalties = int64_t(n);
  call.segments = segments.data();
  call.lines = lines.data();
  call.output = output.data();
  call.seen = reinterpret_cast<const uint8_t*>(seen.data());
  call.frequency = frequency.data();
  call.presence = presence.data();
  call.repetition = repetition.data();
  call.team = &context.team;
  nb::gil_scoped_release unlocked;
  context.unit->edit_logits(call);
}

void allow(Context& context, Array<float, 2> logits, Longs1 segments, Longs1 lines, Ints2 bits) {
  require(lines.size() == segments.size(), "allow: columns differ in length");
  require(bits.shape(1) * 32 >= logits.shape(1), "allow: masks are shorter than the vocabulary");
  check_indices(segments, logits.shape(0), "allow: segment is out of range");
  check_indices(lines, bits.shape(0), "allow: line is out of range");
  EditCall call{};
  call.logits = logits.data();
  call.vocab = int64_t(logits.shape(1));
  call.num_masks = int64_t(segments.size());
  call.mask_segments = segments.data();
  call.mask_lines = lines.data();
  call.bits = bits.data();
  call.words = int64_t(bits.shape(1));
  call.team = &context.team;
  nb::gil_scoped_release unlocked;
  context.unit->edit_logits(call);
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of Ceiba: packed weights, whole-decoder steps, paged attention.";
  m.attr("ATTENTION_SPAN") = ATTENTION_SPAN;
  m.def("instruction_sets", &instruction_sets, "Instruction sets of this processor that a unit exists for, best last.");
  nb::class_<Context>(m, "Context", "Threads, scratch memory and the instruction set of calls; one call at a time. With fixed_order nothing meets "
                         "tiles, so that a row's bits never depend on the other rows.")
      .def(nb::init<int, std::string, bool>(), nb::arg("threads"), nb::arg("isa") = "auto",
           nb::arg("fixed_order") = false)
      .def_prop_ro("threads", [](const Context& c) { return c.team.size(); })
      .def_prop_ro("tiles", [](const Context& c) { return c.unit->tiles && !c.fixed_order; },
                   "Whether many rows meet tiles, so that a row's bits depend on the rows beside it.")
      .def_prop_ro("isa", [](const Context& c) { return std::string(c.unit->name); });
  nb::class_<PackedMatrix>(m, "PackedMatrix", "A weight matrix in panels of 16 rows (formats.h).")
      .def(nb::init<std::string, int64_t, int64_t, Array<const uint8_t, 1>, std::optional<Floats1>>(), nb::arg("kind"),
           nb::arg("rows"), nb::arg("cols"), nb::arg("packed"), nb::arg("bias").none() = nb::none())
      .def_prop_ro("rows", [](const PackedMatrix& p) { return p.m.rows; })
      .def_prop_ro("cols", [](const PackedMatrix& p) { return p.m.cols; })
      .def_prop_ro("kind", [](const PackedMatrix& p) { return std::string(format_of(p.m.kind).name); });
  nb::class_<Groups>(m, "Groups", "Shared-prefix groups of a step's decode segments, parents before children.")
      .def(nb::init<Ints1, Ints1, Ints1, Ints1, Ints1, Ints1>(), nb::arg("from_"), nb::arg("to"), nb::arg("first"),
           nb::arg("count"), nb::arg("members"), nb::arg("covered"));
  m.def("packed_size", &packed_size, nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), "Bytes of a packed matrix.");
  m.def("pack", &pack, nb::arg("context"), nb::arg("kind"), nb::arg("source"), nb::arg("cols"), nb::arg("out"),
        "Pack `source` uint8 [rows, row bytes] into `out` uint8 [packed_size].");
  m.def("quantize", &quantize, nb::arg("context"), nb::arg("kind"), nb::arg("source"), nb::arg("out"),
        "Quantize `source` float32 [rows, cols] to GGUF blocks of type Q8_0 or Q4_1: `out` uint8 [rows, row bytes].");
  m.def("linear", &linear, nb::arg("context"), nb::arg("weight"), nb::arg("x"), nb::arg("out"), nb::arg("int8"),
        "out [m, rows] = x [m, cols] · weightᵀ + bias, float32.");
  m.def("lookup", &lookup, nb::arg("context"), nb::arg("weight"), nb::arg("ids"), nb::arg("out"),
        "out [n, cols] = rows `ids` int64 [n] of the matrix, float32.");
  m.def("attention", &attention, nb::arg("context"), nb::arg("q"), nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("k_pool"), nb::arg("v_pool"), nb::arg("pool_slots"), nb::arg("kv_heads"), nb::arg("kv"),
        nb::arg("scale"), nb::arg("rows"), nb::arg("starts"), nb::arg("lengths"), nb::arg("num_prefill"),
        nb::arg("slot_table"), nb::arg("slots"), nb::arg("groups").none(), nb::arg("out"),
        "Write k and v to the pool at `slots`, then attend: float32 [tokens, heads, head_dim]. `kv`: how the pool is "
        "stored, one of kv_types.");
  m.attr("kv_types") = nb::make_tuple(KV_NAMES[0], KV_NAMES[1], KV_NAMES[2], KV_NAMES[3], KV_NAMES[4]);
  nb::class_<Draws>(m, "Draws", "How the rows of a step are drawn: one value per row each, temperature 0 for greedy.")
      .def(nb::init<Floats1, Floats1, Floats1, Longs1, Longs1, Longs1>(), nb::arg("temperature"), nb::arg("top_p"),
           nb::arg("min_p"), nb::arg("top_k"), nb::arg("seeds"), nb::arg("rows"));
  m.def("sample", &sample, nb::arg("context"), nb::arg("logits"), nb::arg("tokens"), nb::arg("faults"),
        nb::arg("edited"), nb::arg("draws").none(), nb::arg("positions").none(),
        "Choose a token for each row of logits float32 [n, vocab] by the rules of runner.sampler; writes tokens int64 [n] "
        "and faults uint8 [n]. `positions` int64: tokens sampled so far, by row.");
  m.def("penalize", &penalize, nb::arg("context"), nb::arg("logits"), nb::arg("segments"), nb::arg("lines"),
        nb::arg("output"), nb::arg("seen"), nb::arg("frequency"), nb::arg("presence"), nb::arg("repetition"),
        "Frequency, presence and repetition penalties in place: count tables [lines, vocab], columns [n].");
  m.def("allow", &allow, nb::arg("context"), nb::arg("logits"), nb::arg("segments"), nb::arg("lines"), nb::arg("bits"),
        "Minus infinity where the bit of a token in its mask, int32 [lines, words], is not set.");
  nb::class_<RowState>(m, "RowState", "What persists between steps, by row: slot_table int32 [rows, context] and "
                                      "last_token int32 [rows], both written in place.")
      .def(nb::init<Array<int32_t, 2>, Array<int32_t, 1>>(), nb::arg("slot_table"), nb::arg("last_token"));
  nb::class_<Decoder>(m, "Decoder", "A whole decoder of the Llama shape; `step` is one call.")
      .def(nb::init<int64_t, int64_t, int, int, int, float, float, std::string, bool, Floats2, Floats2, Floats1,
                    const PackedMatrix&, const PackedMatrix&, nb::list, nb::object>(),
           nb::arg("hidden"), nb::arg("ffn"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("eps"), nb::arg("scale"), nb::arg("kv"), nb::arg("int8"), nb::arg("cos"), nb::arg("sin"),
           nb::arg("final_norm"), nb::arg("embedding"), nb::arg("head"), nb::arg("layers"), nb::arg("keep"))
      .def("step", &Decoder::step, nb::arg("context"), nb::arg("state"), nb::arg("rows"), nb::arg("starts"),
           nb::arg("lengths"), nb::arg("num_prefill"), nb::arg("tokens"), nb::arg("slots"), nb::arg("pool_slots"),
           nb::arg("groups").none(), nb::arg("select").none(), nb::arg("hidden"), nb::arg("logits"),
           "A step's layers and logits. `tokens` int32, negative for the row's last token; `slots` int32, written to the "
           "rows' slot table; `hidden` float32 [tokens, hidden] receives the output before the final norm; `logits` "
           "float32 [selected, vocab] those of the tokens that `select` int32 names, None for all of them.")
      .def("logits", &Decoder::logits, nb::arg("context"), nb::arg("hidden"), nb::arg("out"),
           "Final norm and output head of the given rows.");
}
