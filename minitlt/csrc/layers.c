/* Products with packed weights, norms, attention: what decoder.c and drafter.c are made of.

A product brings the next panel into the second cache while it multiplies this one, so that few rows take
as long as reading the weights does. Left out: weights of int8, attention in blocks of queries. */

#include <math.h>

#include "layers.h"

#if defined __AVX512F__ || defined __aarch64__ && !defined __clang__
#define ROWS 12 /* 24 sums and 2 weights fill the 32 registers, with a few to spare */
#else
#define ROWS 6 /* the same with half as many, or with vectors of two registers */
#endif

/* `rows` rows times one panel. On the way `ahead` is brought into the second cache, `stride` bytes a turn. */
INLINE void tile(const int rows, const int narrow, const float *x, const char *panel, int64_t inputs,
                 const char *ahead, int64_t stride, vec (*y)[2])
{
    vec low[ROWS], high[ROWS];
    UNROLL for (int r = 0; r < rows; r++) low[r] = y[r][0], high[r] = y[r][1];
    for (int64_t k = 0; k < inputs; k++, ahead += stride) {
        vec a, b;
        __builtin_prefetch(ahead, 0, 2);
        if (narrow) { /* outputs i and i + LANES share 32 bits */
            uvec pair = *(const uvec *)(panel + k * WIDTH * 2);
            a = (vec)(pair << 16), b = (vec)(pair & 0xffff0000u);
        } else {
            __builtin_prefetch(ahead + 64, 0, 2);
            a = *(const vec *)(panel + k * WIDTH * 4), b = *(const vec *)(panel + k * WIDTH * 4 + LANES * 4);
        }
        UNROLL for (int r = 0; r < rows; r++)
        {
            float value = x[r * inputs + k];
            low[r] += a * value, high[r] += b * value;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) y[r][0] = low[r], y[r][1] = high[r];
}

static int64_t panels(const Matrix *m) { return (m->outputs + WIDTH - 1) / WIDTH; }

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
static void multiply_panel(const Matrix *m, int64_t p, int narrow, int64_t n, const float *x, float *y,
                           const int64_t *to, enum how how)
{
    if (n < 1) return;
    int64_t bytes = m->inputs * WIDTH * (narrow ? 2 : 4), chunks = (n + ROWS - 1) / ROWS;
    int64_t stride = bytes / m->inputs / chunks, columns = m->outputs - p * WIDTH, at = 0;
    const char *panel = m->panels + p * bytes, *ahead = panel + bytes;
    for (int64_t c = 0; c < chunks; c++, ahead += stride * m->inputs) {
        int64_t rows = (n - at + chunks - c - 1) / (chunks - c);
        const float *from = x + at * m->inputs;
        vec sums[ROWS][2];
        for (int64_t r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++)
                sums[r][half] = m->bias ? ((const vec *)(m->bias + p * WIDTH))[half] : (vec){0};
#define CASE(M)                                                                                  \
    case M:                                                                                      \
        if (narrow) tile(M, 1, from, panel, m->inputs, ahead, stride, sums);                \
        else tile(M, 0, from, panel, m->inputs, ahead, stride, sums);                       \
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

void multiply_to(const Matrix *m, int narrow, int64_t n, const float *x, float *y, const int64_t *to, enum how how)
{
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels(m); p++) multiply_panel(m, p, narrow, n, x, y, to, how);
}

void multiply(const Matrix *m, int narrow, int64_t n, const float *x, float *y, enum how how)
{
    multiply_to(m, narrow, n, x, y, 0, how);
}

void multiply_gated(const Matrix *gate, const Matrix *up, int narrow, int64_t n, const float *x, float *y)
{
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels(gate); p++) {
        multiply_panel(gate, p, narrow, n, x, y, 0, STORE);
        multiply_panel(up, p, narrow, n, x, y, 0, GATE);
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
