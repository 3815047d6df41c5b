// What crosses from the bindings to an instruction-set unit: plain structs and a table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.h"
#include "threads.h"

namespace ceiba {

// Positions of one softmax state: groups end where a span ends (attention.h).
constexpr int ATTENTION_SPAN = 256;

// Paged attention of one step over one layer's keys and values. Segments as in the step contract: `num_prefill` ragged
// ones first, then one-token segments. Slots index tokens of the pool.
struct AttentionPlan {
  int64_t segments, num_prefill, tokens;
  const int32_t *rows, *starts, *lengths;   // [segments]
  const int32_t* slot_table;                // [rows, slot_stride]
  int64_t slot_stride;
  const int64_t* slots;                     // [tokens]: where new keys and values go
  // Prefix groups of decode segments: group g covers positions [from, to) of members[first .. first + count).
  int64_t num_groups;
  const int32_t *group_from, *group_to, *group_first, *group_count, *group_members;
  const int32_t* group_covered;             // [segments]: positions that groups serve, from 0
};

// How keys and values are stored (kv.h).
enum class Kv : int { F32, BF16, E4M3, E5M2, I8 };

struct AttentionShape {
  int heads, kv_heads, head_dim;
  float scale;
  Kv kv;
  bool fixed_order;                         // no tiles, whose sums depend on what is computed together
};

struct Layer {
  const float *attn_norm, *ffn_norm;
  const float *q_norm, *k_norm;             // [head_dim] or null
  Matrix q, k, v, out, gate, up, down;      // apart, because one file may store them in different types
  void *k_pool, *v_pool;                    // of this layer: [slots, kv_heads], runs as in kv.h
};

struct Model {
  int64_t hidden, ffn, vocab;
  AttentionShape attention;
  float eps;
  const float *cos, *sin;                   // [positions, head_dim / 2]
  const float* final_norm;
  Matrix embedding, head;
  const Layer* layers;
  int64_t num_layers;
  bool int8;                                // int8 activations for quantized weights
};

// Scratch that grows to the largest batch seen; owned by the bindings so that no unit allocates.
struct Arena {
  uint8_t* data = nullptr;
  size_t size = 0;
};

struct Forward {
  const Model* model;
  const AttentionPlan* plan;
  const int32_t *ids, *positions;           // [tokens]
  float* hidden;                            // [tokens, hidden], written
  bool fixed_order;                         // no tiles
  Team* team;
  Arena* arena;
};

struct Logits {
  const Model* model;
  const float* hidden;                      // [n, hidden], before the final norm
  float* out;                               // [n, vocab]
  int64_t n;
  bool fixed_order;
  Team* team;
  Arena* arena;
};

struct LinearCall {
  const Matrix* weight;
  const float* x;                           // [m, cols]
  float* out;                               // [m, rows]
  int64_t m;
  bool int8, fixed_order;
  Team* team;
  Arena* arena;
};

struct AttentionCall {
  AttentionShape shape;
  const AttentionPlan* plan;
  const float* q;                           // [tokens, heads, head_dim]
  const float *new_k, *new_v;               // [tokens, kv_heads, head_dim] or null: already written
  void *k, *v;
  float* out;                               // [tokens, heads, head_dim]
  Team* team;
  Arena* arena;
};

// Choice of a token for each of n rows of logits. Columns of noise are [n]; temperature null: all greedy, 0: this row.
struct SampleCall {
  const float* logits;                      // [n, vocab]
  int64_t n, vocab;
  int64_t* tokens;                          // [n], written
  uint8_t* faults;                          // [n], written; keys of runner.sampler.FAULTS
  bool edited;                              // `faults` is known of the raw logits, and rows at fault are left alone
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k, *seeds, *rows;
  const int64_t* positions;                 // of all rows: tokens sampled so far
  Team* team;
  Arena* arena;
};

// Penalties, or masks of allowed tokens, on rows of logits in place.
struct EditCall {
  float* logits;                            // [n, vocab]
  int64_t vocab;
  int64_t num_penalties;
  const int64_t *segments, *lines;          // [num_penalties]
  const int32_t* output;                    // [lines, vocab]
  const uint8_t* seen;                      // [lines, vocab]
  const float *frequency, *presence, *repetition;
  int64_t num_masks;
  const int64_t *mask_segments, *mask_lines;  // [num_masks]
  const int32_t* bits;                      // [lines, words]: bit t % 32 of word t / 32
  int64_t words;
  Team* team;
};

struct Unit {
  const char* name;
  bool tiles;                               // whether many rows meet tiles, unless a call asks for a fixed order
  size_t (*forward_scratch)(const Forward&);
  void (*forward)(const Forward&);
  size_t (*logits_scratch)(const Logits&);
  void (*logits)(const Logits&);
  size_t (*linear_scratch)(const LinearCall&);
  void (*linear)(const LinearCall&);
  size_t (*attention_scratch)(const AttentionCall&);
  void (*attention)(const AttentionCall&);
  void (*lookup)(const Matrix&, const int64_t* ids, int64_t n, float* out);
  size_t (*sample_scratch)(const SampleCall&);
  void (*sample)(const SampleCall&);
  void (*edit_logits)(const EditCall&);
};

const Unit* unit_generic();
#if defined(__x86_64__)
const Unit* unit_avx2();
const Unit* unit_avx512();
const Unit* unit_avx512vnni();
const Unit* unit_avx512bf16();
const Unit* unit_amx();
const Unit* unit_amx_emulated();
#endif

}  // namespace ceiba
