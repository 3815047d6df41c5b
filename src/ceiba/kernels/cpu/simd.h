// Vectors of one instruction set. Included by each instruction-set unit inside its anonymous namespace, so that nothing
// emitted here can be linked into code for an older processor. LANES output rows make a panel; a panel is NV vectors.
//
// Arithmetic is GCC's vector extension (also NEON); only what it cannot say is written with intrinsics.

// Arrays of vectors live in registers only if the loops over them are gone before the compiler looks.
#define CEIBA_UNROLL _Pragma("GCC unroll 16")
// The parts of a kernel's innermost loop: a call there would spill every vector.
#define CEIBA_INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int NV = LANES / W;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint8_t vb __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 4)));
typedef int16_t vs __attribute__((vector_size(W * 4)));
typedef float vf_u __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint8_t vb_u __attribute__((vector_size(W * 4), aligned(1), may_alias));
typedef int32_t vi_u __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t half_vec __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef int16_t short_vec __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef int8_t quarter_vec __attribute__((vector_size(W), aligned(1), may_alias));
typedef uint8_t uquarter_vec __attribute__((vector_size(W), aligned(1), may_alias));

inline vf set1(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
inline vf load(const float* p) { return *reinterpret_cast<const vf_u*>(p); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_u*>(p) = v; }
inline vb load_bytes(const uint8_t* p) { return *reinterpret_cast<const vb_u*>(p); }
inline vi load_words(const int32_t* p) { return *reinterpret_cast<const vi_u*>(p); }
inline void store_words(int32_t* p, vi v) { *reinterpret_cast<vi_u*>(p) = v; }
inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }
// b where either is NaN. GCC 12 would compare and blend.
inline vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
inline vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}
template <int N>
struct Count {
  static constexpr int value = N;
};

// a · b + c with one rounding where the set can: said by name, so that no compiler decides which products are fused.
CEIBA_INLINE vf fmadd(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// To the nearest integer. NaN and what does not fit become some integer.
inline vi to_int(vf v) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtps_epi32((__m256)v);
#else
  return __builtin_convertvector(v + (v < 0.f ? set1(-0.5f) : set1(0.5f)), vi);
#endif
}
inline int imin(int a, int b) { return a < b ? a : b; }
inline int64_t lmin(int64_t a, int64_t b) { return a < b ? a : b; }

// GCC 12 would convert these byte by byte.
inline vf from_s8(const int8_t* p) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return to_float((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const quarter_vec*>(p), vf);
#endif
}
inline vf from_u8(const uint8_t* p) {
#if defined(__AVX512F__)
  return to_float((vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return to_float((vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const uquarter_vec*>(p), vf);
#endif
}

inline vf from_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = half_to_float(p[i]);
  return out;
#endif
}

inline vf from_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  vi wide = (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  vi wide = (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vi wide = __builtin_convertvector(*reinterpret_cast<const half_vec*>(p), vi);
#endif
  return (vf)(wide << 16);
}
inline void to_bf16(uint16_t* p, vf v) {  // round to nearest even; NaN stays NaN because its payload's top bit is set
  vi bits = (vi)v;
  vi rounded = bits + 0x7fff + ((bits >> 16) & 1);
  rounded = (v == v) ? rounded : (bits | 0x400000);
  *reinterpret_cast<half_vec*>(p) = __builtin_convertvector((rounded >> 16) & 0xffff, half_vec);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline float hsum(vf v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float hmax(vf v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
#elif defined(__AVX512F__)
inline float hsum(vf v) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float hmax(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float hsum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float hmax(vf v) {
  float best = v[0];
  for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
  return best;
}
#endif

// Whether any lane of a comparison holds.
inline bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// to[c · to_stride + r] = from[r · from_stride + c]: 16 by 16 words change places.
inline void turn_words(const int32_t* from, int64_t from_stride, int32_t* to, int64_t to_stride) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
  CEIBA_UNROLL
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
  CEIBA_UNROLL
  for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  CEIBA_UNROLL
  for (int i = 0; i < 16; i += 4)
    CEIBA_UNROLL
    for (int h = 0; h < 2; h++) {  // columns 4 l + 2 h and the next of four rows, l being a quarter
      a[i + 2 * h] = _mm512_unpacklo_epi64(b[i + h], b[i + 2 + h]);
      a[i + 2 * h + 1] = _mm512_unpackhi_epi64(b[i + h], b[i + 2 + h]);
    }
  CEIBA_UNROLL
  for (int k = 0; k < 4; k++) {  // column k of each quarter, of all sixteen rows
    __m512i even[2], odd[2];
    CEIBA_UNROLL
    for (int h = 0; h < 2; h++) {
      even[h] = _mm512_shuffle_i32x4(a[8 * h + k], a[8 * h + 4 + k], 0x88);
      odd[h] = _mm512_shuffle_i32x4(a[8 * h + k], a[8 * h + 4 + k], 0xdd);
    }
    _mm512_storeu_si512(to + k * to_stride, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
    _mm512_storeu_si512(to + (4 + k) * to_stride, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
    _mm512_storeu_si512(to + (8 + k) * to_stride, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
    _mm512_storeu_si512(to + (12 + k) * to_stride, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
  }
#else
  for (int r = 0; r < 16; r++)
    for (int c = 0; c < 16; c++) std::memcpy(to + c * to_stride + r, from + r * from_stride + c, 4);
#endif
}

// exp by 2^n · p(r): range reduction with two-part ln 2 and a degree-6 polynomial; relative error below 2e-7.
inline vf vexp(vf x) {
  x = vmin(set1(88.3f), vmax(set1(-87.3f), x));
  vf scaled = x * 1.44269504f;
  vf half = (vf)(((vi)scaled & INT32_MIN) | (vi)set1(0.5f));
  vi n = __builtin_convertvector(scaled + half, vi);
  vf nf = to_float(n);
  vf r = fmadd(nf, set1(-0.693359375f), x);
  r = fmadd(nf, set1(2.12194440e-4f), r);
  vf p = set1(1.3888889e-3f);
  p = fmadd(p, r, set1(8.3333333e-3f));
  p = fmadd(p, r, set1(4.1666667e-2f));
  p = fmadd(p, r, set1(1.6666667e-1f));
  p = fmadd(p, r, set1(0.5f));
  p = fmadd(p, r, set1(1.0f));
  p = fmadd(p, r, set1(1.0f));
  return p * (vf)((n + 127) << 23);
}

// acc[row] += sum over 4 of w[row][j] · x[j]: w unsigned 7-bit at most where the set lacks VNNI.
struct Dot {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  static inline vi step(vi acc, vb w, int32_t x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
  }
#elif defined(__AVX512BW__)
  static inline vi step(vi acc, vb w, int32_t x) {
    __m512i pairs = _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(x));
    return acc + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
  }
#elif defined(__AVX2__)
  static inline vi step(vi acc, vb w, int32_t x) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(x));
    return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
#else
  static inline vi step(vi acc, vb w, int32_t x) {
    const int8_t* xs = reinterpret_cast<const int8_t*>(&x);
    for (int r = 0; r < W; r++)
      for (int j = 0; j < 4; j++) acc[r] += int32_t(w[4 * r + j]) * xs[j];
    return acc;
  }
#endif
};

// The same with signed 8-bit w.
inline vi dot_signed(vi acc, vb w, int32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  // (w + 128) unsigned times x, less 128 · Σx, which a second dot with a constant gives.
  vb biased = w ^ 0x80;
  acc = (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)biased, _mm512_set1_epi32(x));
  __m512i offset = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8((char)0x80), _mm512_set1_epi32(x));
  return acc - (vi)offset;
#elif defined(__AVX512BW__)
  __m512i lo = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16((__m512i)w, 8), 8),
                                 _mm512_srai_epi16(_mm512_slli_epi16(_mm512_set1_epi32(x), 8), 8));
  __m512i hi = _mm512_madd_epi16(_mm512_srai_epi16((__m512i)w, 8), _mm512_srai_epi16(_mm512_set1_epi32(x), 8));
  return acc + (vi)lo + (vi)hi;
#elif defined(__AVX2__)
  __m256i xs = _mm256_set1_epi32(x);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8(xs, (__m256i)w));
  return acc + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  const int8_t* xs = reinterpret_cast<const int8_t*>(&x);
  for (int r = 0; r < W; r++)
    for (int j = 0; j < 4; j++) acc[r] += int32_t(int8_t(w[4 * r + j])) * xs[j];
  return acc;
#endif
}
