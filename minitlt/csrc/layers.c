/* Products with packed weights, norms, attention: what decoder.c and drafter.c are made of.

A product brings the next panel into the second cache while it multiplies this one, so that few rows take
as long as reading the weights does. Left out: attention in blocks of queries. */

#include <math.h>

#include "layers.h"

#if defined __AVX512F__ || defined __aarch64__ && !defined __clang__
#define ROWS 12 /* 24 sums and 2 weights fill the 32 registers, with a few to spare */
#else
#define ROWS 6 /* the same with half as many, or with vectors of two registers */
#endif

/* Bytes of a panel that belong to one input. */
INLINE int64_t stripe(enum kind kind) { return WIDTH * (kind == INT8 ? 1 : kind == BF16 ? 2 : 4); }

/* Of the weights of a panel those of input k. */
INLINE void widen(const enum kind kind, const char *panel, int64_t k, vec *a, vec *b)
{
    const char *at = panel + k * stripe(kind);
    if (kind == INT8) {
        *a = from_bytes(at), *b = from_bytes(at + LANES);
    } else if (kind == BF16) { /* outputs i and i + LANES share 32 bits */
        uvec pair = *(const uvec *)at;
        *a = (vec)(pair << 16), *b = (vec)(pair & 0xffff0000u);
    } else {
        *a = *(const vec *)at, *b = *(const vec *)(at + LANES * 4);
    }
}

/* `rows` rows, `ld` floats apart, times `inputs` weights of one panel. On the way `ahead` is brought into the second
   cache, `stride` bytes a turn. */
INLINE void tile(const int rows, const enum kind kind, const float *x, int64_t ld, const char *panel, int64_t inputs,
                 const char *ahead, int64_t stride, vec (*y)[2])
{
    vec low[ROWS], high[ROWS];
    UNROLL for (int r = 0; r < rows; r++) low[r] = y[r][0], high[r] = y[r][1];
    for (int64_t k = 0; k < inputs; k++, ahead += stride) {
        vec a, b;
        __builtin_prefetch(ahead, 0, 2);
        if (kind == FP32) __builtin_prefetch(ahead + 64, 0, 2);
        widen(kind, panel, k, &a, &b);
        UNROLL for (int r = 0; r < rows; r++)
        {
            float value = x[r * ld + k];
            low[r] += a * value, high[r] += b * value;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) y[r][0] = low[r], y[r][1] = high[r];
}

/* The same of INT8, a group after the other. */
INLINE void tile_of_groups(const int rows, const float *x, const char *panel, const vec *scales, int64_t inputs,
                           const char *ahead, int64_t stride, vec (*y)[2])
{
    for (int64_t k = 0; k < inputs; k += GROUP, scales += 2) {
        vec part[ROWS][2] = {{{0}}};
        int64_t num = inputs - k < GROUP ? inputs - k : GROUP;
        tile(rows, INT8, x + k, inputs, panel + k * WIDTH, num, ahead + k * stride, stride, part);
        UNROLL for (int r = 0; r < rows; r++) y[r][0] += part[r][0] * scales[0], y[r][1] += part[r][1] * scales[1];
    }
}

static int64_t panels(const Matrix *m) { return (m->outputs + WIDTH - 1) / WIDTH; }

static int64_t groups(const Matrix *m) { return (m->inputs + GROUP - 1) / GROUP; }

static void write_back(const vec *sums, float *y, enum how how, int64_t columns)
{
    float last[WIDTH] = {0};
    if (columns < WIDTH) memcpy(last, y, columns * sizeof *y);
    vec *to = (vec *)(columns < WIDTH ? last : y);
    for (int half = 0; half < 2; half++) {
        if (how == STORE) to[half] = sums[half];
        if (how == ADD) to[half] += sums[half];
        if (how == GATE) to[half] = silu(to[half]) * sums[half];
    }
    if (columns < WIDTH) memcpy(y, last, columns * sizeof *y);
}

/* y[n, panel p] from x[n, K]; row i of y is row to[i], if `to` is given. Rows go through in equal chunks; each
   brings its part of the next panel. */
static void multiply_panel(const Matrix *m, int64_t p, int64_t n, const float *x, float *y,
                           const int64_t *to, enum how how)
{
    if (n < 1) return;
    int64_t size = m->inputs * stripe(m->kind), chunks = (n + ROWS - 1) / ROWS;
    int64_t stride = size / m->inputs / chunks, columns = m->outputs - p * WIDTH, at = 0;
    const char *panel = m->panels + p * size, *ahead = panel + size;
    const vec none[2] = {{0}}, *bias = m->bias ? (const vec *)(m->bias + p * WIDTH) : none;
    const vec *scales = m->kind == INT8 ? (const vec *)m->scales + p * groups(m) * 2 : 0;
    for (int64_t c = 0; c < chunks; c++, ahead += stride * m->inputs) {
        int64_t rows = (n - at + chunks - c - 1) / (chunks - c);
        const float *from = x + at * m->inputs;
        vec sums[ROWS][2];
        for (int64_t r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++)
                sums[r][half] = bias[half];
#define CASE(M)                                                                                          \
    case M:                                                                                              \
        if (m->kind == INT8) tile_of_groups(M, from, panel, scales, m->inputs, ahead, stride, sums);     \
        else if (m->kind == BF16) tile(M, BF16, from, m->inputs, panel, m->inputs, ahead, stride, sums); \
        else tile(M, FP32, from, m->inputs, panel, m->inputs, ahead, stride, sums);                      \
        break;
        switch (rows) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
        for (int64_t r = 0; r < rows; r++, at++)
            write_back(sums[r], y + (to ? to[at] : at) * m->outputs + p * WIDTH, how, columns);
    }
}

void multiply_to(const Matrix *m, int64_t n, const float *x, float *y, const int64_t *to, enum how how)
{
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels(m); p++) multiply_panel(m, p, n, x, y, to, how);
}

void multiply(const Matrix *m, int64_t n, const float *x, float *y, enum how how)
{
    multiply_to(m, n, x, y, 0, how);
}

void multiply_gated(const Matrix *gate, const Matrix *up, int64_t n, const float *x, float *y)
{
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels(gate); p++) {
        multiply_panel(gate, p, n, x, y, 0, STORE);
        multiply_panel(up, p, n, x, y, 0, GATE);
    }
}

/* Some weights of a panel in int8: of every output, what is furthest from 0 becomes 127 or -127. */
static void narrow(enum kind kind, const char *panel, int64_t inputs, int8_t *to, vec *scales)
{
    vec w[2], most[2] = {{0}}, factor[2];
    for (int64_t k = 0; k < inputs; k++) {
        widen(kind, panel, k, w, w + 1);
        for (int half = 0; half < 2; half++) {
            vec size = choose(w[half] < 0.0f, -w[half], w[half]);
            most[half] = choose(size > most[half], size, most[half]);
        }
    }
    for (int half = 0; half < 2; half++) {
        scales[half] = most[half] / 127.0f;
        factor[half] = choose(most[half] > 0.0f, 127.0f / most[half], most[half]);
    }
    for (int64_t k = 0; k < inputs; k++) {
        widen(kind, panel, k, w, w + 1);
        for (int half = 0; half < 2; half++) {
            ivec whole = (ivec)(w[half] * factor[half] + 12582912.0f) - 0x4b400000; /* as in `exponential` */
            *(bytes *)(to + k * WIDTH + half * LANES) = __builtin_convertvector(whole, bytes);
        }
    }
}

/* All of m in int8. */
void to_int8(const Matrix *m, int64_t threads, int8_t *to, float *scales)
{
    int64_t num = groups(m);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < panels(m) * num; i++) {
        int64_t first = i / num * m->inputs + i % num * GROUP, left = m->inputs - i % num * GROUP;
        const char *from = m->panels + first * stripe(m->kind);
        narrow(m->kind, from, left < GROUP ? left : GROUP, to + first * WIDTH, (vec *)(scales + i * WIDTH));
    }
}

/* y = x / sqrt(mean(x^2) + eps) * weight */
void norm(const float *x, const float *weight, int64_t n, float eps, float *y)
{
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = part(x + i, n - i);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

void norm_all(const float *weight, int64_t width, float eps, int64_t n, const float *x, float *y)
{
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) norm(x + i * width, weight, width, eps, y + i * width);
}

/* scores[i] = softmax over i of x[i]; behind the end there is room for a vector. */
static void softmax(float *x, int64_t n)
{
    for (int64_t i = n; i < n + LANES; i++) x[i] = -INFINITY;
    vec most_of = *(vec *)x, total = {0};
    for (int64_t i = LANES; i < n; i += LANES) most_of = choose(*(vec *)(x + i) > most_of, *(vec *)(x + i), most_of);
    float most = most_of[0];
    for (int i = 1; i < LANES; i++) most = most_of[i] > most ? most_of[i] : most;
    for (int64_t i = 0; i < n; i += LANES) {
        vec e = exponential(*(vec *)(x + i) - most);
        e = choose(*(vec *)(x + i) == -INFINITY, (vec){0}, e);
        *(vec *)(x + i) = e;
        total += e;
    }
    float scale = 1.0f / sum(total);
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

/* One query attends to the first `length` positions and to those of `path`, as to one sequence. Positions are
   `stride` floats apart; scores: room for all of them and two vectors. */
INLINE void attend_sized(const float *q, const float *keys, const float *values, const int64_t d,
                         int64_t stride, int64_t length, const int64_t *path, int64_t num, float *scores, float *out)
{
    float factor = 1.0f / sqrtf(d);
    for (int64_t i = 0; i < length + num; i += LANES) {
        vec products[LANES];
        UNROLL for (int k = 0; k < LANES; k++)
        {
            int64_t at = i + k < length ? i + k : i + k < length + num ? path[i + k - length] : 0;
            const float *key = keys + at * stride;
            products[k] = (vec){0};
            UNROLL for (int64_t j = 0; j < d; j += LANES) products[k] += part(q + j, d - j) * part(key + j, d - j);
        }
        *(vec *)(scores + i) = sums(products) * factor;
    }
    softmax(scores, length + num);
    for (int64_t j = 0; j < d; j += 4 * LANES) {
        vec sums[4] = {{0}};
        for (int64_t i = 0; i < length + num; i++) {
            const float *value = values + (i < length ? i : path[i - length]) * stride + j;
            UNROLL for (int v = 0; v < 4; v++)
            {
                if (v * LANES < d - j) sums[v] += part(value + v * LANES, d - j - v * LANES) * scores[i];
            }
        }
        for (int64_t i = j; i < d && i < j + 4 * LANES; i++) out[i] = sums[(i - j) / LANES][(i - j) % LANES];
    }
}

/* The same, unrolled for the usual sizes of a head. */
void attend(const float *q, const float *keys, const float *values, int64_t d, int64_t stride, int64_t length,
            const int64_t *path, int64_t num, float *scores, float *out)
{
    switch (d) {
    case 64: attend_sized(q, keys, values, 64, stride, length, path, num, scores, out); break;
    case 128: attend_sized(q, keys, values, 128, stride, length, path, num, scores, out); break;
    default: attend_sized(q, keys, values, d, stride, length, path, num, scores, out);
    }
}
