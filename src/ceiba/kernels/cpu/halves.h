// Tiles (tiles.h) multiplied by the instructions for bfloat16 of AVX-512, on processors without matrix tiles. Included by the
// unit that does so, inside its anonymous namespace.
//
// A word of a row, two columns, meets the same word of sixteen lanes: `vdpbf16ps` adds both products to a float32, as
// often a cycle as 16-bit whole numbers, whose sums a scale would have to meet every 32 columns.

struct TileScope {};

// acc[p] [ROWS, 16] += x · (panel p)ᵀ over blocks of 32 columns; `FRESH`: = instead. Never inlined: its sums need all
// registers.
template <int P, int ROWS, bool FRESH>
__attribute__((noinline)) void half_rows(const int32_t* const (&w)[P], const uint16_t* x, int64_t blocks,
                                         float* const (&acc)[P]) {
  vf sum[ROWS][P];
  CEIBA_UNROLL
  for (int i = 0; i < ROWS; i++) {
    CEIBA_UNROLL
    for (int p = 0; p < P; p++) sum[i][p] = FRESH ? vf{} : load(acc[p] + i * LANES);
  }
  for (int64_t b = 0; b < blocks; b++) {
    const uint16_t* row = x + b * (2 * TILE_WORDS);
    CEIBA_UNROLL
    for (int word = 0; word < 16; word++) {
      vi pair[P];
      CEIBA_UNROLL
      for (int p = 0; p < P; p++) pair[p] = load_words(w[p] + b * TILE_WORDS + word * LANES);
      CEIBA_UNROLL
      for (int i = 0; i < ROWS; i++) {
        int32_t two;
        std::memcpy(&two, row + i * 32 + word * 2, 4);
        __m512i both = _mm512_set1_epi32(two);
        CEIBA_UNROLL
        for (int p = 0; p < P; p++) sum[i][p] = (vf)_mm512_dpbf16_ps((__m512)sum[i][p], (__m512bh)both, (__m512bh)pair[p]);
      }
    }
  }
  CEIBA_UNROLL
  for (int i = 0; i < ROWS; i++) {
    CEIBA_UNROLL
    for (int p = 0; p < P; p++) store(acc[p] + i * LANES, sum[i][p]);
  }
}

// As in tiles.h. Rows from `rows` on may be left out, by eights.
template <int R, int P, bool FRESH = false>
inline void tile_steps(const int32_t* const (&w)[P], const uint16_t* const (&x)[R], int64_t blocks, float* const (&acc)[R][P],
                       int64_t rows = R * TILE_M) {
  constexpr int ROWS = 8;
  for (int r = 0; r < R; r++)
    for (int i = 0; i < TILE_M && r * TILE_M + i < rows; i += ROWS) {
      float* to[P];
      for (int p = 0; p < P; p++) to[p] = acc[r][p] + i * LANES;
      half_rows<P, ROWS, FRESH>(w, x[r] + i * 32, blocks, to);
    }
}
