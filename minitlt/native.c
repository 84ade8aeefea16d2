/* The decoder of the Llama family for a CPU: products with packed weights, attention, the forward.

What it is. Decoding reads all weights for a handful of tokens, so a step takes as long as that reading
takes, if nothing else gets in its way: one call per forward instead of four hundred small operations,
weights in the order in which they are read, and the next panel on its way while this one is multiplied.

Why no bit depends on company. Every output of a product is one chain of fused multiply-adds over the
inputs in ascending order, whatever other rows, threads or vector widths there are. A query attends to
what it sees as to one sequence: the committed context, then its own ancestors; so a node of a tree
does the sums of plain decoding, in their order. Weights may be narrow (bf16): they are widened on the
way into the registers, and all arithmetic is fp32.

Left out: other than fp32 arithmetic, int8 weights, attention in blocks of queries (a prompt's keys are
read from the second cache once per query, an eighth of the time of its products).

How it is built and called: native.py, with the C compiler of the machine. Names: N nodes (of all rows),
K inputs, D head size; a panel is WIDTH outputs, [K][WIDTH] in memory. Rows of buffers here are padded
with zeros to whole panels. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vec.h"

#ifdef __AVX512F__
enum { ROWS = 12 }; /* 24 sums and 2 weights fill the 32 registers, with a few to spare */
#else
enum { ROWS = 6 };
#endif
enum { WIDTH = 2 * LANES };
enum how { STORE, ADD, GATE }; /* y = product; y += product; y = silu(y) * product */

typedef struct {
    const char *panels;
    const float *bias; /* of whole panels, or null */
    int64_t inputs, outputs;
} Matrix;

typedef struct {
    Matrix qkv, out, gate, up, down;
    const float *norm_in, *norm_mlp, *norm_q, *norm_k; /* the last two may be null */
} Layer;

typedef struct {
    const Layer *layers;
    const float *embed, *norm; /* [V, hidden], [hidden] */
    const float *turn;         /* per position and pair of a head: cosine and sine */
    int64_t num_layers, hidden, heads, kv_heads, head_dim, taps[3], vocab, narrow, threads;
    float eps;
} Model;

typedef struct {
    const int64_t *tokens, *lengths, *parents; /* [rows, nodes], [rows], [rows, nodes] or null: chains */
    float *cache;                              /* [layers, slots, 2 kv_heads, room, D] */
    float *features, *last;                    /* [N, 3 hidden], [N, hidden] */
    int64_t rows, nodes, slots, first_slot, room;
} Pass;

static int64_t whole(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

/* `rows` rows times one panel. On the way `ahead` is brought into the second cache, `stride` bytes a turn. */
INLINE void tile(const int rows, const int narrow, const float *x, int64_t ldx, const char *panel, int64_t inputs,
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
            float value = x[r * ldx + k];
            low[r] += a * value, high[r] += b * value;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) y[r][0] = low[r], y[r][1] = high[r];
}

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

/* y[n, panel p] from x[n, K]. Rows go through in equal chunks; each brings its part of the next panel. */
static void multiply_panel(const Matrix *m, int64_t p, int narrow, int64_t n, const float *x, int64_t ldx, float *y,
                           int64_t ldy, enum how how)
{
    int64_t bytes = m->inputs * WIDTH * (narrow ? 2 : 4), chunks = (n + ROWS - 1) / ROWS;
    int64_t stride = bytes / m->inputs / chunks, columns = m->outputs - p * WIDTH, at = 0;
    const char *panel = m->panels + p * bytes, *ahead = panel + bytes;
    for (int64_t c = 0; c < chunks; c++, ahead += stride * m->inputs) {
        int64_t rows = (n - at + chunks - c - 1) / (chunks - c);
        const float *from = x + at * ldx;
        vec sums[ROWS][2];
        for (int64_t r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++)
                sums[r][half] = m->bias ? ((const vec *)(m->bias + p * WIDTH))[half] : (vec){0};
#define CASE(M)                                                                                  \
    case M:                                                                                      \
        if (narrow) tile(M, 1, from, ldx, panel, m->inputs, ahead, stride, sums);                \
        else tile(M, 0, from, ldx, panel, m->inputs, ahead, stride, sums);                       \
        break;
        switch (rows) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#ifdef __AVX512F__
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
        }
        for (int64_t r = 0; r < rows; r++, at++) write_back(sums[r], y + at * ldy + p * WIDTH, how, columns);
    }
}

/* Called by all threads of a region, as the functions below. */
static void multiply(const Matrix *m, int narrow, int64_t n, const float *x, int64_t ldx, float *y, int64_t ldy,
                     enum how how)
{
#pragma omp for schedule(static)
    for (int64_t p = 0; p < whole(m->outputs) / WIDTH; p++) multiply_panel(m, p, narrow, n, x, ldx, y, ldy, how);
}

/* y = x / sqrt(mean(x^2) + eps) * weight */
static void norm(const float *x, const float *weight, int64_t n, float eps, float *y)
{
    vec squares = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        vec v = part(x + i, n - i);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

static void norm_all(const Model *m, int64_t n, const float *x, int64_t ldx, const float *weight, float *y, int64_t ldy)
{
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) norm(x + i * ldx, weight, m->hidden, m->eps, y + i * ldy);
}

/* Of node `n` of a row: its depth, and the way to it from the root. A pad is a root of its own. */
static int64_t path_to(const int64_t *parents, int64_t n, int64_t *path)
{
    int64_t depth = 0;
    if (!parents) {
        for (; depth < n; depth++) path[depth] = depth;
    } else {
        for (int64_t up = n; (up = parents[up]) >= 0;) depth++;
        for (int64_t up = n, at = depth; at > 0; at--) path[at - 1] = up = parents[up];
    }
    path[depth] = n;
    return depth;
}

/* Turns the query and key heads of every node by its position and writes keys and values to the cache. */
static void place(const Model *m, const Layer *layer, const Pass *p, float *cache, float *qkv, int64_t ld)
{
    int64_t d = m->head_dim;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p->rows * p->nodes; i++) {
        int64_t row = i / p->nodes, n = i % p->nodes, depth = n;
        if (p->parents) {
            depth = 0;
            for (int64_t up = n; (up = p->parents[row * p->nodes + up]) >= 0;) depth++;
        }
        const float *turn = m->turn + (p->lengths[row] + depth) * d;
        for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
            float *x = qkv + i * ld + h * d;
            const float *weight = h < m->heads ? layer->norm_q : layer->norm_k;
            if (weight) norm(x, weight, d, m->eps, x);
            for (int64_t j = 0; j < d; j += 2) {
                float a = x[j], b = x[j + 1];
                x[j] = a * turn[j] - b * turn[j + 1];
                x[j + 1] = a * turn[j + 1] + b * turn[j];
            }
        }
        for (int64_t h = 0; h < 2 * m->kv_heads; h++) {
            int64_t lane = (p->first_slot + row) * 2 * m->kv_heads + h;
            float *to = cache + (lane * p->room + p->lengths[row] + n) * d;
            memcpy(to, qkv + i * ld + (m->heads + h) * d, d * sizeof *to);
        }
    }
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

/* One query: `length` committed positions, then `path` behind them. scores: room for all of these. */
INLINE void attend_sized(const float *q, const float *keys, const float *values, const int64_t d,
                          int64_t length, const int64_t *path, int64_t num, float *scores, float *out)
{
    float factor = 1.0f / sqrtf(d);
    for (int64_t i = 0; i < length + num; i += LANES) {
        vec products[LANES];
        UNROLL for (int k = 0; k < LANES; k++)
        {
            int64_t at = i + k < length ? i + k : i + k < length + num ? length + path[i + k - length] : 0;
            products[k] = (vec){0};
            UNROLL for (int64_t j = 0; j < d; j += LANES) products[k] += part(q + j, d - j) * part(keys + at * d + j, d - j);
        }
        *(vec *)(scores + i) = sums(products) * factor;
    }
    softmax(scores, length + num);
    for (int64_t j = 0; j < d; j += 4 * LANES) {
        vec sums[4] = {{0}};
        for (int64_t i = 0; i < length + num; i++) {
            const float *value = values + (i < length ? i : length + path[i - length]) * d + j;
            UNROLL for (int v = 0; v < 4; v++)
            {
                if (v * LANES < d - j) sums[v] += part(value + v * LANES, d - j - v * LANES) * scores[i];
            }
        }
        for (int64_t i = j; i < d && i < j + 4 * LANES; i++) out[i] = sums[(i - j) / LANES][(i - j) % LANES];
    }
}

/* The same, unrolled for the usual sizes of a head. */
static void attend(const float *q, const float *keys, const float *values, int64_t d, int64_t length,
                   const int64_t *path, int64_t num, float *scores, float *out)
{
    switch (d) {
    case 64: attend_sized(q, keys, values, 64, length, path, num, scores, out); break;
    case 128: attend_sized(q, keys, values, 128, length, path, num, scores, out); break;
    default: attend_sized(q, keys, values, d, length, path, num, scores, out);
    }
}

static void attend_all(const Model *m, const Pass *p, const float *cache, const float *qkv, int64_t ldq, float *out,
                       int64_t ldo, float *scores, int64_t *path)
{
    int64_t d = m->head_dim, items = p->rows * p->nodes * m->heads;
    int64_t chunk = items / (m->threads * 8) + 1;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < items; item++) {
        int64_t i = item / m->heads, h = item % m->heads, row = i / p->nodes, n = i % p->nodes;
        int64_t lane = (p->first_slot + row) * 2 * m->kv_heads + h / (m->heads / m->kv_heads);
        int64_t depth = path_to(p->parents ? p->parents + row * p->nodes : 0, n, path);
        const float *keys = cache + lane * p->room * d, *values = keys + m->kv_heads * p->room * d;
        attend(qkv + i * ldq + h * d, keys, values, d, p->lengths[row], path, depth + 1, scores, out + i * ldo + h * d);
    }
}

/* What is wrong with a pass, by the numbers of native.py; 0: nothing. */
static int check(const Model *m, const Pass *p)
{
    for (int64_t i = 0; i < p->rows * p->nodes; i++) {
        if (p->tokens[i] >= m->vocab) return 2;
        if (p->parents && p->parents[i] >= i % p->nodes) return 3;
        if (p->lengths[i / p->nodes] < 0 || p->lengths[i / p->nodes] + p->nodes > p->room) return 4;
    }
    return 0;
}

/* Feeds the nodes of all rows. Returns 0, 1 if there is no memory for the work, or what is wrong. */
int forward(const Model *m, const Pass *p)
{
    int wrong = check(m, p);
    if (wrong) return wrong;
    int64_t n = p->rows * p->nodes, hidden = m->hidden, seen = 0;
    for (int64_t row = 0; row < p->rows; row++) seen = p->lengths[row] > seen ? p->lengths[row] : seen;
    seen += p->nodes + 2 * LANES;
    int64_t ldh = whole(hidden), ldq = whole((m->heads + 2 * m->kv_heads) * m->head_dim);
    int64_t ldi = whole(m->layers[0].gate.outputs), lda = m->heads * m->head_dim;
    int64_t floats = n * (2 * ldh + ldq + ldi + lda) + m->threads * (seen + 2 * p->nodes) + 1;
    float *work = aligned_alloc(64, (floats * sizeof *work + 63) / 64 * 64);
    if (!work) return 1;
    float *h = work, *x = h + n * ldh, *qkv = x + n * ldh, *act = qkv + n * ldq, *att = act + n * ldi;
    int64_t *paths = (int64_t *)(att + n * lda + (n * lda & 1));
    float *all_scores = (float *)(paths + m->threads * p->nodes);
    memset(h, 0, n * ldh * sizeof *h);
#pragma omp parallel num_threads(m->threads)
    {
        int me = omp_get_thread_num();
        float *scores = all_scores + me * seen;
        int64_t *path = paths + me * p->nodes;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            int64_t token = p->tokens[i] > 0 ? p->tokens[i] : 0;
            memcpy(h + i * ldh, m->embed + token * hidden, hidden * sizeof *h);
        }
        for (int64_t at = 0; at < m->num_layers; at++) {
            const Layer *layer = m->layers + at;
            float *cache = p->cache + at * p->slots * 2 * m->kv_heads * p->room * m->head_dim;
            for (int tap = 0; tap < 3; tap++) {
                if (m->taps[tap] != at) continue;
#pragma omp for schedule(static) nowait
                for (int64_t i = 0; i < n; i++)
                    memcpy(p->features + (3 * i + tap) * hidden, h + i * ldh, hidden * sizeof *h);
            }
            norm_all(m, n, h, ldh, layer->norm_in, x, ldh);
            multiply(&layer->qkv, m->narrow, n, x, ldh, qkv, ldq, STORE);
            place(m, layer, p, cache, qkv, ldq);
            attend_all(m, p, cache, qkv, ldq, att, lda, scores, path);
            multiply(&layer->out, m->narrow, n, att, lda, h, ldh, ADD);
            norm_all(m, n, h, ldh, layer->norm_mlp, x, ldh);
#pragma omp for schedule(static)
            for (int64_t q = 0; q < ldi / WIDTH; q++) {
                multiply_panel(&layer->gate, q, m->narrow, n, x, ldh, act, ldi, STORE);
                multiply_panel(&layer->up, q, m->narrow, n, x, ldh, act, ldi, GATE);
            }
            multiply(&layer->down, m->narrow, n, act, ldi, h, ldh, ADD);
        }
        norm_all(m, n, h, ldh, m->norm, p->last, hidden);
    }
    free(work);
    return 0;
}

/* y = x W^T + bias, of rows without padding. */
void product(const Matrix *m, int64_t narrow, int64_t threads, int64_t n, const float *x, float *y)
{
#pragma omp parallel num_threads(threads)
    multiply(m, narrow, n, x, m->inputs, y, m->outputs, STORE);
}

int64_t width(void) { return WIDTH; }
