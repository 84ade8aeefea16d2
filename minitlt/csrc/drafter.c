/* One level of a draft: the draft model's layer (eagle3.py has its formulas) over new pairs of every row.

A row brings `nodes` pairs and wants drafts behind the last `asked` of them. Its keys and values stand in
its slot, position by position; a pair sees the first `seen` of them and then its own `path`. Here a pair's bits
may depend on its company (no token does), but with these parts they do not. Built and called as decoder.c;
names as there, Q asked pairs of all rows. */

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "layers.h"

typedef struct {
    Matrix fc, qkv, out, gate, up, down, head;
    const float *embed, *norm_in, *norm_h, *norm_post, *norm; /* [V, hidden], and [hidden] four times */
    const float *cos, *sin; /* [positions, D]; the second half turns by -sin and sin, as eagle3.py has it */
    int64_t hidden, heads, kv_heads, head_dim, vocab, narrow, threads;
    float eps;
} Drafter;

typedef struct {
    const int64_t *tokens, *turns, *places; /* [rows, nodes]: embedded, rotary position, place in the slot */
    const int64_t *seen, *paths;            /* [rows, asked], [rows, asked, steps] */
    const float *features, *h;              /* [N, 3 hidden] to be fused, or null and [N, hidden] */
    float *keys, *values;                   /* [slots, room, kv_heads, D] */
    float *h_next, *logits;                 /* [Q, hidden], [Q, draft vocabulary] */
    int64_t rows, nodes, asked, steps, room;
} Level;

/* Rotates the query and key heads of every pair; keys and values go to their places. */
static void turn_and_place(const Drafter *m, const Level *p, float *qkv, int64_t ld)
{
    int64_t d = m->head_dim, half = d / 2, lane = m->kv_heads * d;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p->rows * p->nodes; i++) {
        const float *cos = m->cos + p->turns[i] * d, *sin = m->sin + p->turns[i] * d;
        for (int64_t head = 0; head < m->heads + m->kv_heads; head++) {
            float *x = qkv + i * ld + head * d;
            for (int64_t j = 0; j < half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a * cos[j] + b * sin[j];
                x[j + half] = b * cos[j + half] + a * sin[j + half];
            }
        }
        int64_t at = (i / p->nodes * p->room + p->places[i]) * lane;
        memcpy(p->keys + at, qkv + i * ld + m->heads * d, lane * sizeof *qkv);
        memcpy(p->values + at, qkv + i * ld + m->heads * d + lane, lane * sizeof *qkv);
    }
}

/* Of a pair that is asked: which of all pairs it is. */
static int64_t pair(const Level *p, int64_t i)
{
    return i / p->asked * p->nodes + p->nodes - p->asked + i % p->asked;
}

static void attend_all(const Drafter *m, const Level *p, const float *qkv, int64_t ld, float *out, float *scores)
{
    int64_t d = m->head_dim, lane = m->kv_heads * d;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < p->rows * p->asked * m->heads; item++) {
        int64_t i = item / m->heads, head = item % m->heads;
        int64_t at = i / p->asked * p->room * lane + head / (m->heads / m->kv_heads) * d;
        const int64_t *path = p->paths ? p->paths + i * p->steps : 0;
        attend(qkv + pair(p, i) * ld + head * d, p->keys + at, p->values + at, d, lane, p->seen[i], path, p->steps,
               scores, out + item * d);
    }
}

/* Returns 0, 1 if there is no memory for the work, or what is wrong, as decoder.c does. */
int draft(const Drafter *m, const Level *p)
{
    int64_t n = p->rows * p->nodes, asked = p->rows * p->asked, hidden = m->hidden, most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (p->tokens[i] < 0 || p->tokens[i] >= m->vocab) return 2;
        if (p->places[i] < 0 || p->places[i] >= p->room) return 4;
    }
    for (int64_t i = 0; i < asked; i++) most = p->seen[i] > most ? p->seen[i] : most;
    most += p->steps + 2 * LANES;
    int64_t wide = (m->heads + 2 * m->kv_heads) * m->head_dim, inner = m->gate.outputs;
    int64_t floats = n * (3 * hidden + wide) + asked * (hidden + inner + m->heads * m->head_dim) + m->threads * most;
    float *work = malloc(floats * sizeof *work);
    if (!work) return 1;
    float *fused = work, *x = fused + n * hidden, *qkv = x + 2 * n * hidden, *normed = qkv + n * wide;
    float *act = normed + asked * hidden, *att = act + asked * inner, *all_scores = att + asked * m->heads * m->head_dim;
    const float *h = p->features ? fused : p->h;
#pragma omp parallel num_threads(m->threads)
    {
        float *scores = all_scores + omp_get_thread_num() * most;
        if (p->features) multiply(&m->fc, m->narrow, n, p->features, fused, STORE);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            norm(m->embed + p->tokens[i] * hidden, m->norm_in, hidden, m->eps, x + 2 * i * hidden);
            norm(h + i * hidden, m->norm_h, hidden, m->eps, x + (2 * i + 1) * hidden);
        }
        multiply(&m->qkv, m->narrow, n, x, qkv, STORE);
        turn_and_place(m, p, qkv, wide);
        attend_all(m, p, qkv, wide, att, scores);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < asked; i++)
            memcpy(p->h_next + i * hidden, h + pair(p, i) * hidden, hidden * sizeof *h);
        multiply(&m->out, m->narrow, asked, att, p->h_next, ADD);
        norm_all(m->norm_post, hidden, m->eps, asked, p->h_next, normed);
        multiply_gated(&m->gate, &m->up, m->narrow, asked, normed, act);
        multiply(&m->down, m->narrow, asked, act, p->h_next, ADD);
        norm_all(m->norm, hidden, m->eps, asked, p->h_next, normed);
        multiply(&m->head, m->narrow, asked, normed, p->logits, STORE);
    }
    free(work);
    return 0;
}
