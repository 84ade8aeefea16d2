/* One level of a draft: the draft model's layer (eagle3.py has its formulas) over new pairs.

Keys and values stand in the row's slot, position by position; a pair sees the first `seen` of them and, if it
is asked, its own `path`. Names as in decoder.c. */

#include <math.h>
#include <stdlib.h>

#include "drafter.h"

/* Rotates the query and key heads of every pair; keys and values go to their places. */
static void turn_and_place(const Drafter *m, const Level *p, float *qkv, int64_t ld)
{
    int64_t d = m->head_dim, half = d / 2, lane = m->kv_heads * d;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p->num; i++) {
        const Pair *pair = p->pairs + i;
        const float *cos = m->cos + pair->turn * d, *sin = m->sin + pair->turn * d;
        for (int64_t head = 0; head < m->heads + m->kv_heads; head++) {
            float *x = qkv + i * ld + head * d;
            for (int64_t j = 0; j < half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a * cos[j] + b * sin[j];
                x[j + half] = b * cos[j + half] + a * sin[j + half];
            }
        }
        int64_t at = (pair->slot * p->room + pair->place) * lane;
        memcpy(p->keys + at, qkv + i * ld + m->heads * d, lane * sizeof *qkv);
        memcpy(p->values + at, qkv + i * ld + m->heads * d + lane, lane * sizeof *qkv);
    }
}

static void attend_all(const Drafter *m, const Level *p, const float *qkv, int64_t ld, float *out, float *scores)
{
    int64_t d = m->head_dim, lane = m->kv_heads * d;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < p->num_asked * m->heads; item++) {
        int64_t i = item / m->heads, head = item % m->heads;
        const Pair *pair = p->pairs + p->asked[i];
        int64_t at = pair->slot * p->room * lane + head / (m->heads / m->kv_heads) * d;
        attend(qkv + p->asked[i] * ld + head * d, p->keys + at, p->values + at, d, lane, pair->seen,
               p->paths + i * p->steps, p->steps, scores, out + item * d);
    }
}

int draft(const Drafter *m, const Level *p)
{
    int64_t n = p->num, asked = p->num_asked, hidden = m->hidden, most = 0;
    for (int64_t i = 0; i < n; i++) {
        const Pair *pair = p->pairs + i;
        if (pair->token < 0 || pair->token >= m->vocab) return 2;
        if (pair->place < 0 || pair->place >= p->room) return 4;
        most = pair->seen > most ? pair->seen : most;
    }
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
        if (p->features) multiply(&m->fc, n, p->features, fused, STORE);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            norm(m->embed + p->pairs[i].token * hidden, m->norm_in, hidden, m->eps, x + 2 * i * hidden);
            norm(h + i * hidden, m->norm_h, hidden, m->eps, x + (2 * i + 1) * hidden);
        }
        multiply(&m->qkv, n, x, qkv, STORE);
        turn_and_place(m, p, qkv, wide);
        attend_all(m, p, qkv, wide, att, scores);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < asked; i++)
            memcpy(p->h_next + i * hidden, h + p->asked[i] * hidden, hidden * sizeof *h);
        multiply(&m->out, asked, att, p->h_next, ADD);
        norm_all(m->norm_post, hidden, m->eps, asked, p->h_next, normed);
        multiply_gated(&m->gate, &m->up, asked, normed, act);
        multiply(&m->down, asked, act, p->h_next, ADD);
        norm_all(m->norm, hidden, m->eps, asked, p->h_next, normed);
        multiply(&m->head, asked, normed, p->logits, STORE);
    }
    free(work);
    return 0;
}
