/* Vectors of the widest registers there are, and functions on them; the compiler's own vector types.
   The same bits with any number of lanes, but for `sum` and `sums`. */

#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#elif defined __AVX__ || defined __aarch64__ && defined __clang__
enum { LANES = 8 };
#else /* gcc makes lane by lane what no register holds; clang makes two vectors of it */
enum { LANES = 4 };
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline, unused))
#ifdef __clang__ /* a number makes old ones unroll too late, when arrays are no registers any more */
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Whole numbers of 8 bits. gcc 12 takes its own conversion apart, byte by byte. */
INLINE vec from_bytes(const char *x)
{
#if defined __AVX512F__
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)x)));
#elif defined __AVX2__
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)x)));
#else
    return __builtin_convertvector(*(const bytes *)x, vec);
#endif
}

INLINE float sum(vec x)
{
    float part[LANES];
    memcpy(part, &x, sizeof x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}

INLINE vec part(const float *x, int64_t n)
{
    if (n >= LANES) return *(const vec *)x;
    vec y = {0};
    memcpy(&y, x, n * sizeof *x);
    return y;
}

#ifdef __clang__
INLINE vec pick(vec a, vec b, ivec from)
{
    vec y;
    UNROLL for (int i = 0; i < LANES; i++) y[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
    return y;
}
#else
INLINE vec pick(vec a, vec b, ivec from) { return __builtin_shuffle(a, b, from); }
#endif

/* The sums of LANES vectors. Halves are added, then quarters, ..; all vectors alike, so that it does
   not matter which of them one is. */
INLINE vec sums(vec x[LANES])
{
    ivec lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    UNROLL for (int step = LANES / 2; step; step /= 2)
    {
        ivec second = (lane & step) != 0; /* lanes that take of x[i + step]: its own, and their partners */
        ivec own = lane + (second & LANES), partner = own + (step & ~second) - (step & second);
        UNROLL for (int i = 0; i < step; i++)
            x[i] = pick(x[i], x[i + step], own) + pick(x[i], x[i + step], partner);
    }
    return x[0];
}

INLINE vec choose(ivec which, vec a, vec b) { return (vec)(((ivec)a & which) | ((ivec)b & ~which)); }

/* exp to 2 units in the last place: 2^n times a polynomial of what is left, |r| <= log(2) / 2. */
INLINE vec exponential(vec x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the whole part in the last bits */
    x = choose(x > 88.0f, (vec){0} + 88.0f, x);
    x = choose(x < -87.0f, (vec){0} - 87.0f, x);
    vec shifted = x * 1.44269504f + round, n = shifted - round;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = (((((r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r
              + 1.6666665459e-1f) * r + 5.0000001201e-1f) * (r * r) + r + 1.0f;
    return y * (vec)(((ivec)shifted << 23) + (127 << 23));
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }
