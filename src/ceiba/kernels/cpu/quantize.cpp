// Quantization of plain values into GGUF block bytes, for weights that are stored plain: absolute rounding for Q8_0, a
// search for scale and offset for Q4_1. Baseline code: it runs once per model, and its result may be kept on disk.
#include "quantize.h"

#include <cmath>
#include <cstring>

namespace ceiba {
namespace {

constexpr int BLOCK = 32;
constexpr float HALF_MAX = 65504.f;
constexpr int ROUNDS = 5;                     // least-squares rounds from each start
constexpr float STARTS[] = {1.f, 0.9f};         // shares of the values' range that the codes are stretched over first

// To half precision, to nearest even; out of range becomes the largest finite value.
uint16_t half_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  float size;
  std::memcpy(&size, &magnitude, 4);
  if (size > HALF_MAX) size = HALF_MAX;
  if (size < 6.103515625e-5f) {  // subnormal: adding 0.5 leaves size / 2^-24, rounded, in the last bits
    float shifted = size + 0.5f;
    uint32_t raised;
    std::memcpy(&raised, &shifted, 4);
    return uint16_t(sign | (raised - 0x3f000000));
  }
  std::memcpy(&magnitude, &size, 4);
  magnitude += 0xfff + (magnitude >> 13 & 1);
  uint32_t half = (magnitude >> 13) - (112 << 10);
  return uint16_t(sign | (half > 0x7bff ? 0x7bff : half));
}

// The smallest half that is not below x ≥ 0 (or the largest there is).
uint16_t half_above(float x) {
  uint16_t half = half_bits(x);
  return half_to_float(half) < x && half < 0x7bff ? uint16_t(half + 1) : half;
}

inline int nearest(float x) { return int(x + (x < 0.f ? -0.5f : 0.5f)); }

// d = max|x| / 127, rounded up to a half, so that every value is within d / 2 of its code.
void block_q8_0(const float* x, uint8_t* out) {
  float top = 0.f;
  for (int i = 0; i < BLOCK; i++) top = std::fmax(top, std::fabs(x[i]));
  uint16_t half = half_above(top / 127.f);
  float d = half_to_float(half), inverse = d > 0.f ? 1.f / d : 0.f;
  std::memcpy(out, &half, 2);
  for (int i = 0; i < BLOCK; i++) {
    int code = nearest(x[i] * inverse);
    out[2 + i] = uint8_t(int8_t(code < -127 ? -127 : code > 127 ? 127 : code));
  }
}

// Four values at a time, which every processor that we build for has: the compiler may not reorder float sums itself.
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
constexpr int VECTORS = BLOCK / 4;

inline float total(v4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

struct Fit {
  uint16_t d, m;
  v4 codes[VECTORS];  // whole numbers, 0 to 15
  float error;
};

// Codes for x ≈ d · code + m with d and m as they are stored, and the squared error that they leave.
inline void assign(const v4* x, float d, float m, Fit& fit) {
  fit.d = half_bits(d);
  fit.m = half_bits(m);
  d = half_to_float(fit.d);
  m = half_to_float(fit.m);
  float inverse = d > 0.f ? 1.f / d : 0.f;
  v4 error = {};
  for (int i = 0; i < VECTORS; i++) {
    v4 scaled = (x[i] - m) * inverse + 0.5f;
    scaled = scaled > 0.f ? scaled : v4{};
    scaled = scaled < 15.f ? scaled : v4{} + 15.f;
    v4 code = __builtin_convertvector(__builtin_convertvector(scaled, i4), v4);
    v4 off = x[i] - (d * code + m);
    fit.codes[i] = code;
    error += off * off;
  }
  fit.error = total(error);
}

// The d and m that are best for given codes: a line through (code, x). False where all codes are one.
inline bool regress(const v4* x, const v4* codes, float sum_x, float& d, float& m) {
  v4 sums = {}, squares = {}, crosses = {};
  for (int i = 0; i < VECTORS; i++) {
    sums += codes[i];
    squares += codes[i] * codes[i];
    crosses += codes[i] * x[i];
  }
  float n = BLOCK, sum = total(sums), spread = n * total(squares) - sum * sum;
  if (spread <= 0.f) return false;
  d = (n * total(crosses) - sum * sum_x) / spread;
  m = (sum_x - d * sum) / n;
  return d > 0.f;
}

// Scale and offset by alternating assignment and regression (Lloyd's algorithm on a line of 16 equal steps), from
// several ranges; what leaves the least squared error is kept.
void block_q4_1(const float* from, uint8_t* out) {
  v4 x[VECTORS], sums = {};
  std::memcpy(x, from, sizeof x);
  float low = from[0], high = from[0];
  for (int i = 1; i < BLOCK; i++) {
    low = from[i] < low ? from[i] : low;
    high = from[i] > high ? from[i] : high;
  }
  for (int i = 0; i < VECTORS; i++) sums += x[i];
  Fit best{}, now{};
  best.error = INFINITY;
  for (float share : STARTS) {
    float m = low + (1.f - share) * 0.5f * (high - low), d = (high - low) * share / 15.f, before = INFINITY;
    for (int round = 0; round < ROUNDS; round++) {
      assign(x, d, m, now);
      if (now.error < best.error) best = now;
      if (!(now.error < before) || !regress(x, now.codes, total(sums), d, m)) break;
      before = now.error;
    }
    if (!(best.error > 0.f)) break;
  }
  if (best.error == INFINITY) assign(x, 0.f, low, best);  // values that are not finite: keep what a block can say
  std::memcpy(out, &best.d, 2);
  std::memcpy(out + 2, &best.m, 2);
  for (int i = 0; i < 16; i++)
    out[4 + i] = uint8_t(int(best.codes[i / 4][i % 4]) | int(best.codes[i / 4 + 4][i % 4]) << 4);
}

}  // namespace

bool can_quantize(Kind kind) { return kind == Kind::Q8_0 || kind == Kind::Q4_1; }

void quantize_values(Kind kind, const float* x, int64_t cols, uint8_t* out) {
  const Format& format = format_of(kind);
  for (int64_t b = 0; b < cols / BLOCK; b++) {
    if (kind == Kind::Q8_0)
      block_q8_0(x + b * BLOCK, out + b * format.block_bytes);
    else
      block_q4_1(x + b * BLOCK, out + b * format.block_bytes);
  }
}

}  // namespace ceiba
