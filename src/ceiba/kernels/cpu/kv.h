// How keys and values lie in the pool, and the way in and out of it. Included by each instruction-set unit inside its
// anonymous namespace, after simd.h.
//
// A token's keys of one layer are kv_heads runs, one a head. F32, BF16 and the two eight-bit floats (OCP 8-bit floating
// point, 2023) store head_dim values at scale 1. I8 stores head_dim signed bytes and then a float32: the head's step,
// max / 127. Writes round to nearest even and saturate at the largest finite value; what is not a number stays so.

template <Kv K>
constexpr int kv_bytes(int dim) {
  return K == Kv::F32 ? 4 * dim : K == Kv::BF16 ? 2 * dim : K == Kv::I8 ? dim + 4 : dim;
}

inline vi widen_bytes(const uint8_t* p) {
  return __builtin_convertvector(*reinterpret_cast<const uquarter_vec*>(p), vi);
}
inline void narrow_bytes(uint8_t* p, vi v) {
  *reinterpret_cast<uquarter_vec*>(p) = __builtin_convertvector(v & 255, uquarter_vec);
}

// EXPONENT bits of exponent, then the mantissa: moved to where float32 has them, a power of two apart from the value.
template <int EXPONENT>
inline vf from_fp8(const uint8_t* p) {
  constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, MANTISSA = 7 - EXPONENT;
  vi code = widen_bytes(p), size = code & 127;
  vi bits = size << (23 - MANTISSA);
  // Below the smallest normal the mantissa counts in steps of 2^(1 - BIAS - MANTISSA).
  vf normal = (vf)(bits + ((127 - BIAS) << 23));
  vf tiny = to_float(size) * (1.f / float(1 << (BIAS - 1 + MANTISSA)));
  vf value = size < (1 << MANTISSA) ? tiny : normal;
  constexpr int LAST = EXPONENT == 4 ? 126 : 123;  // the largest finite code
  vi found = (vi)value | ((code & 128) << 24);
  return (vf)(size > LAST ? found | 0x7fc00000 : found);
}

template <int EXPONENT>
inline void to_fp8(uint8_t* p, vf v) {
  constexpr int BIAS = (1 << (EXPONENT - 1)) - 1, MANTISSA = 7 - EXPONENT, DROP = 23 - MANTISSA;
  constexpr float MOST = EXPONENT == 4 ? 448.f : 57344.f;
  constexpr float LEAST = 1.f / float(1 << (BIAS - 1));  // the smallest normal
  vi sign = ((vi)v >> 24) & 128;
  vf size = (vf)((vi)v & 0x7fffffff);
  size = size > MOST ? set1(MOST) : size;
  vi bits = (vi)size;
  vi normal = ((bits + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP) - ((127 - BIAS) << MANTISSA);
  // Adding a number whose last bit is the step of the subnormals rounds to that step.
  vf raised = size + set1(LEAST * float(1 << (23 - MANTISSA)));
  vi tiny = (vi)raised - (vi)set1(LEAST * float(1 << (23 - MANTISSA)));
  vi code = size < LEAST ? tiny : normal;
  code = v == v ? code : (vi)set1(0.f) + (EXPONENT == 4 ? 127 : 126);
  narrow_bytes(p, code | sign);
}

// W values of a head, from position i on; of I8 without its step.
template <Kv K>
inline vf kv_load(const uint8_t* head, int i) {
  if constexpr (K == Kv::F32) return load(reinterpret_cast<const float*>(head) + i);
  if constexpr (K == Kv::BF16) return from_bf16(reinterpret_cast<const uint16_t*>(head) + i);
  if constexpr (K == Kv::E4M3) return from_fp8<4>(head + i);
  if constexpr (K == Kv::E5M2) return from_fp8<5>(head + i);
  return from_s8(reinterpret_cast<const int8_t*>(head) + i);
}

// What the loaded values of a head are to be multiplied by.
template <Kv K>
inline float kv_step(const uint8_t* head, int dim) {
  if constexpr (K != Kv::I8) return 1.f;
  float step;
  std::memcpy(&step, head + dim, 4);
  return step;
}

template <Kv K>
inline void kv_store(uint8_t* head, const float* from, int dim) {
  if constexpr (K == Kv::I8) {
    vf top = vf{};
    for (int i = 0; i < dim; i += W) top = vmax((vf)((vi)load(from + i) & 0x7fffffff), top);
    float step = hmax(top) / 127.f;
    bool usable = step > 1e-37f && step < 1e37f;
    float inverse = usable ? 1.f / step : 0.f;
    float unknown = 0.f;
    for (int i = 0; i < dim; i += W) {
      vf scaled = load(from + i) * inverse;
      vi code = __builtin_convertvector(scaled + (scaled < 0.f ? set1(-0.5f) : set1(0.5f)), vi);
      code = code > 127 ? (vi)vf{} + 127 : code;
      code = code < -127 ? (vi)vf{} - 127 : code;
      narrow_bytes(head + i, code);
      unknown += hsum(load(from + i) * 0.f);  // 0, or not a number where a value is not finite
    }
    step = usable || unknown != unknown ? step + unknown : 0.f;
    std::memcpy(head + dim, &step, 4);
  } else {
    for (int i = 0; i < dim; i += W) {
      vf v = load(from + i);
      if constexpr (K == Kv::F32) store(reinterpret_cast<float*>(head) + i, v);
      if constexpr (K == Kv::BF16) to_bf16(reinterpret_cast<uint16_t*>(head) + i, v);
      if constexpr (K == Kv::E4M3) to_fp8<4>(head + i, v);
      if constexpr (K == Kv::E5M2) to_fp8<5>(head + i, v);
    }
  }
}

#define CEIBA_EACH_KV(CASE) CASE(F32) CASE(BF16) CASE(E4M3) CASE(E5M2) CASE(I8)

// All heads of one token, k and v alike.
inline void kv_write(const AttentionShape& a, void* pool, int64_t slot, const float* from) {
  for (int h = 0; h < a.kv_heads; h++) {
    const float* head = from + h * a.head_dim;
    switch (a.kv) {
#define CASE(K)                                                                                                    \
  case Kv::K:                                                                                                      \
    kv_store<Kv::K>(static_cast<uint8_t*>(pool) + (slot * a.kv_heads + h) * kv_bytes<Kv::K>(a.head_dim), head, a.head_dim); \
    break;
      CEIBA_EACH_KV(CASE)
#undef CASE
    }
  }
}
