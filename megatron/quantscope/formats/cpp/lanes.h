// Vectors as wide as the machine has them, in the compiler's own vector syntax.
//
// One source serves AVX-512, AVX2 and any other machine: arithmetic, shifts, comparisons and `?:` work lane by lane on
// the types below, and the compiler chooses the instructions. By hand is what has no syntax: stores past the cache,
// conversions, sums and maxima of all lanes.
//
// A bf16 is the upper half of a float32. Two neighbours in memory are one 32-bit lane, so the even elements of a vector
// become floats by a shift and the odd ones by a mask: no shuffle, in either direction.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define QS_INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QS_AVX512
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif
constexpr int LANES = WIDTH / 4;       // 32-bit lanes
constexpr int HALF_LANES = WIDTH / 2;  // 16-bit lanes

typedef float F32 __attribute__((vector_size(WIDTH)));
typedef int32_t I32 __attribute__((vector_size(WIDTH)));
typedef double F64 __attribute__((vector_size(WIDTH)));
typedef int16_t I16 __attribute__((vector_size(WIDTH)));
typedef int64_t I64 __attribute__((vector_size(WIDTH)));
typedef uint32_t U32 __attribute__((vector_size(WIDTH)));
typedef uint16_t U16 __attribute__((vector_size(WIDTH)));

constexpr int FRACTION = 23;  // bits of a float32
constexpr int BIAS = 127;
constexpr int32_t SIGN = INT32_MIN;
constexpr int32_t EXPONENT = 0x7f800000;  // also the bits of Inf
constexpr int32_t QUIET_NAN = 0x7fc00000;
constexpr int32_t UPPER = -65536;  // the odd bf16 of a pair

template <class To, class From> QS_INLINE To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <class V> QS_INLINE V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V> QS_INLINE void put(void* to, V value) { std::memcpy(to, &value, sizeof value); }

// Writes past the cache, for results too large to stay in it: memory then need not be read before it is written.
template <bool STREAM, class V> QS_INLINE void store(void* to, V value) {
#if defined(__SSE2__)
  if constexpr (STREAM) {
#if defined(QS_AVX512)
    if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)value);
#endif
#if defined(__AVX__)
    if constexpr (sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)value);
#endif
    if constexpr (sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)value);
  }
#endif
  put(to, value);
}

// Streamed stores are not in order with others until a fence.
QS_INLINE void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A vector as doubles, lower half first.
QS_INLINE void widened(F32 v, F64 (&halves)[2]) {
#if defined(QS_AVX512)
  halves[0] = (F64)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
  halves[1] = (F64)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
  halves[0] = (F64)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
  halves[1] = (F64)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
  typedef float Half __attribute__((vector_size(WIDTH / 2)));
  Half parts[2];
  std::memcpy(parts, &v, sizeof parts);
  for (int h = 0; h < 2; h++) halves[h] = __builtin_convertvector(parts[h], F64);
#endif
}

// Even and odd elements of two vectors, in their order again.
QS_INLINE void interleaved(F32 even, F32 odd, F32 (&natural)[2]) {
#if defined(QS_AVX512)
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  natural[0] = (F32)_mm512_permutex2var_ps((__m512)even, low, (__m512)odd);
  natural[1] =
      (F32)_mm512_permutex2var_ps((__m512)even, _mm512_add_epi32(low, _mm512_set1_epi32(LANES / 2)), (__m512)odd);
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps((__m256)even, (__m256)odd),
               high = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
  natural[0] = (F32)_mm256_permute2f128_ps(low, high, 0x20);
  natural[1] = (F32)_mm256_permute2f128_ps(low, high, 0x31);
#else
  float both[2 * LANES];
  for (int lane = 0; lane < LANES; lane++) {
    both[2 * lane] = even[lane];
    both[2 * lane + 1] = odd[lane];
  }
  std::memcpy(natural, both, sizeof both);
#endif
}

QS_INLINE F32 all(float value) { return value - F32{}; }
QS_INLINE I32 all(int32_t value) { return value - I32{}; }
QS_INLINE I16 all(int16_t value) { return value - I16{}; }

template <class V> QS_INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> QS_INLINE V smaller(V a, V b) { return a < b ? a : b; }

// All lanes made one by a function of two, the upper half onto the lower.
template <class Lane, int COUNT, class F> QS_INLINE Lane folded(Lane (&lanes)[COUNT], const F& f) {
  for (int width = COUNT / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = f(lanes[i], lanes[i + width]);
  return lanes[0];
}

template <class Lane, class V, class F> QS_INLINE Lane folded_by(V v, const F& f) {
  Lane lanes[sizeof(V) / sizeof(Lane)];
  put(lanes, v);
  return folded(lanes, f);
}

// The largest of lanes that are not negative.
QS_INLINE int16_t largest_magnitude(I16 v) {
#if defined(__AVX2__)
#if defined(QS_AVX512)
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256((__m512i)v), _mm512_extracti64x4_epi64((__m512i)v, 1));
#else
  const __m256i half = (__m256i)v;
#endif
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // The machine has the smallest of eight as one instruction.
  return static_cast<int16_t>(~_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0));
#else
  int16_t lanes[HALF_LANES];
  put(lanes, v);
  return folded(lanes, [](int16_t a, int16_t b) { return a > b ? a : b; });
#endif
}

QS_INLINE int32_t largest_magnitude(I32 v) {
#if defined(QS_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t lanes[LANES];
  put(lanes, v);
  return folded(lanes, [](int32_t a, int32_t b) { return a > b ? a : b; });
#endif
}

QS_INLINE int32_t total(I32 v) {
#if defined(QS_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t lanes[LANES];
  put(lanes, v);
  return folded(lanes, [](int32_t a, int32_t b) { return a + b; });
#endif
}

// Whether any bit is set, as it is where a comparison holds in any lane.
template <class V> QS_INLINE bool any(V v) {
#if defined(QS_AVX512)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
  uint64_t words[WIDTH / 8], found = 0;
  put(words, v);
  for (uint64_t word : words) found |= word;
  return found != 0;
#endif
}

#if defined(__AVX2__)
#define QS_SWEEPS  // the machine has what `sweep.h` takes

// A comparison as one bit a lane.
QS_INLINE uint32_t bit_a_lane(I16 holds) {
#if defined(QS_AVX512)
  return _mm512_movepi16_mask((__m512i)holds);
#else
  const __m256i bytes = _mm256_packs_epi16((__m256i)holds, _mm256_setzero_si256());  // each half by itself
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0x58)));
#endif
}
QS_INLINE uint32_t bit_a_lane(I32 holds) {
#if defined(QS_AVX512)
  return _mm512_movepi32_mask((__m512i)holds);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)holds));
#endif
}

// Which of eight lanes the bits of a byte stand for, one a byte, lowest first.
struct Places {
  uint64_t of[256];
  constexpr Places() : of{} {
    for (int bits = 0; bits < 256; bits++)
      for (int lane = 7; lane >= 0; lane--)
        if (bits >> lane & 1) of[bits] = of[bits] << 8 | static_cast<uint64_t>(lane);
  }
};
constexpr Places PLACES{};

// The lanes that `wanted` has bits for, one after the other: how many. As much as a vector may be written.
template <class Lane> QS_INLINE int gathered(Lane* to, I32 v, uint32_t wanted) {
  static_assert(sizeof(Lane) == 4);
#if defined(QS_AVX512)
  put(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(wanted), (__m512i)v));
#else
  const __m128i places = _mm_loadu_si64(PLACES.of + wanted);
  put(to, _mm256_permutevar8x32_epi32((__m256i)v, _mm256_cvtepu8_epi32(places)));
#endif
  return __builtin_popcount(wanted);
}
template <class Lane> QS_INLINE int gathered(Lane* to, I16 v, uint32_t wanted) {
  static_assert(sizeof(Lane) == 2);
#if defined(__AVX512VBMI2__)
  put(to, _mm512_maskz_compress_epi16(wanted, (__m512i)v));
#else
  __m128i eights[HALF_LANES / 8];
  put(eights, v);
  for (int i = 0, count = 0; i < HALF_LANES / 8; i++) {
    const uint32_t bits = wanted >> (8 * i) & 255;
    const __m128i places = _mm_cvtepu8_epi16(_mm_loadu_si64(PLACES.of + bits));
    const __m128i bytes = _mm_add_epi16(_mm_mullo_epi16(places, _mm_set1_epi16(0x0202)), _mm_set1_epi16(0x0100));
    put(to + count, _mm_shuffle_epi8(eights[i], bytes));
    count += __builtin_popcount(bits);
  }
#endif
  return __builtin_popcount(wanted);
}

// 2^n in the lanes where n is 0 to 15, 0 where it is 16 to 255.
QS_INLINE I16 power_of_two(I16 n) {
#if defined(QS_AVX512)
  return (I16)_mm512_sllv_epi16(_mm512_set1_epi16(1), (__m512i)n);
#else
  const __m256i powers = _mm256_set_epi64x(0, static_cast<int64_t>(0x8040201008040201), 0, 0x8040201008040201);
  const __m256i twice = _mm256_adds_epu8((__m256i)(n | n << 8), _mm256_set1_epi8(0x70));  // 16 and more: no place
  return (I16)_mm256_shuffle_epi8(powers, _mm256_xor_si256(twice, _mm256_set1_epi16(0x0800)));
#endif
}

// The sum of three bits, in every place: what stays, and what is carried.
QS_INLINE I16 parity(I16 a, I16 b, I16 c) {
#if defined(QS_AVX512)
  return (I16)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}
QS_INLINE I16 majority(I16 a, I16 b, I16 c) {
#if defined(QS_AVX512)
  return (I16)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0xe8);
#else
  return (a & b) | ((a ^ b) & c);
#endif
}

// In how many lanes a bit is set.
QS_INLINE int lanes_with(I16 v, int bit) {
#if defined(QS_AVX512)
  return __builtin_popcount(_mm512_test_epi16_mask((__m512i)v, _mm512_set1_epi16(static_cast<short>(1 << bit))));
#else
  return __builtin_popcount(static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16((__m256i)v, 15 - bit))) &
                            0xaaaaaaaa);
#endif
}

#endif

}  // namespace
