/* The samplers of a CPU: coupled verification of draft trees, and the k best proposals (kernels.py).

What it is. The definitions of `kernels.coupled_verify_ref` and `gumbel_topk_ref`, tokens and scores bit
for bit, in two passes over a row of logits that fits the second cache: the largest logit, then all
else. Gumbel-max is a race: token v arrives after E_v / w_v, w = exp(y - max y), and the first one wins.
u <= E, so a token can only beat the score s if u <= w exp(max y - s): a hash, an exp and a comparison
per token, and two logarithms for the handful that passes.

Why no bit depends on company. A row of logits is one thread's, and its sums are taken in an order that
the vocabulary alone decides. Built without fused multiply-adds (native.py): the noise is defined in
single operations, and every machine must draw the same.

Left out: logits in other than fp32, and lists of hundreds of proposals (kernels_cpu.py has both).
How it is built and called: native.py, native_sampler.py. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "sampler.h"
#include "vec.h"

enum { PARTS = 16, SPAN = PARTS * LANES };
enum race { NONE, GREEDY, NOISY };

/* The noise (noise.py). */

static const uint32_t TOKEN = 0x9E3779B1, MIX1 = 0x85EBCA6B, MIX2 = 0xC2B2AE35;

static uint32_t turn(uint32_t x, int by) { return x << by | x >> (32 - by); }

static uint32_t row_word(uint32_t h, int64_t key, int64_t position)
{
    uint32_t words[3] = {key, key >> 32, position};
    for (int i = 0; i < 3; i++) {
        h ^= turn(words[i] * 0xCC9E2D51, 15) * 0x1B873593;
        h = turn(h, 13) * 5 + 0xE6546B64;
    }
    h = (h ^ h >> 16) * MIX1;
    h = (h ^ h >> 13) * MIX2;
    return h ^ h >> 16;
}

/* The hash, of one token or of a vector of them; h: word 0 of the row ^ id * TOKEN. */
#define FINISH(h, word1)              \
    h = (h ^ h >> 16) * MIX1 + word1; \
    h = (h ^ h >> 13) * MIX2;         \
    h ^= h >> 16

static float logarithm(float f, float exponent)
{
    float square = f * f, poly = -0.07634492963552475f;
    const float rest[] = {0.12761574983596802f, -0.13160182535648346f, 0.14201758801937103f, -0.16623356938362122f,
                          0.20001226663589478f, -0.2500081956386566f,  0.3333333134651184f};
    for (int i = 0; i < 7; i++) poly = poly * f + rest[i];
    float tail = poly * f * square + exponent * -2.12194440e-4f - 0.5f * square;
    return (f + tail) + exponent * 0.693359375f;
}

static float split(float y, float *exponent)
{
    int32_t bits;
    memcpy(&bits, &y, sizeof bits);
    int32_t power = (bits - 0x3F3504F3) >> 23;
    bits -= power * (1 << 23);
    memcpy(&y, &bits, sizeof y);
    *exponent = power;
    return y - 1.0f;
}

static float gumbel(uint32_t bits)
{
    float u = ((float)bits + 0.5f) * 0x1p-32f, rest = ((float)~bits + 0.5f) * 0x1p-32f, exponent;
    float f = split(rest, &exponent);
    float waiting = u < 0.29f ? -logarithm(-u, 0.0f) : -logarithm(f, exponent);
    f = split(waiting, &exponent);
    return -logarithm(f, exponent);
}

/* A row of logits. */

typedef struct {
    const float *x;     /* as they are */
    const int64_t *ids; /* by which the noise goes, or null: 0, 1, .. */
    int64_t vocab, num_nan;
    float divisor, limit, top; /* smaller ones count as -inf; the largest of what is left, over divisor */
    uint32_t word0, word1;
} Row;

static float bounded(float x) { return x <= FLT_MAX ? x : x > FLT_MAX ? FLT_MAX : -INFINITY; }

static float value(const Row *row, int64_t i)
{
    return row->x[i] < row->limit ? -INFINITY : bounded(row->x[i] / row->divisor);
}

static float score(const Row *row, enum race race, int64_t i)
{
    uint32_t h = row->word0 ^ (uint32_t)(row->ids ? row->ids[i] : i) * TOKEN;
    FINISH(h, row->word1);
    return race == NOISY ? value(row, i) + gumbel(h) : value(row, i);
}

/* SPAN logits; behind the end of the row -inf. */
static const float *span(const float *x, int64_t n, float *room)
{
    if (n >= SPAN) return x;
    for (int i = 0; i < SPAN; i++) room[i] = i < n ? x[i] : -INFINITY;
    return room;
}

static void find_top(Row *row)
{
    vec most[4];
    ivec nans[4] = {{0}};
    for (int v = 0; v < 4; v++) most[v] = (vec){0} - INFINITY;
    for (int64_t i = 0; i < row->vocab; i += SPAN) {
        float room[SPAN];
        const float *at = span(row->x + i, row->vocab - i, room);
        UNROLL for (int v = 0; v < PARTS; v++)
        {
            vec y = *(const vec *)(at + v * LANES);
            most[v % 4] = choose(y > most[v % 4], y, most[v % 4]);
            nans[v % 4] -= y != y;
        }
    }
    float top = -INFINITY;
    row->num_nan = 0;
    for (int i = 0; i < 4 * LANES; i++) {
        top = most[i / LANES][i % LANES] > top ? most[i / LANES][i % LANES] : top;
        row->num_nan += nans[i / LANES][i % LANES];
    }
    row->top = bounded(top / row->divisor);
}

static int some(ivec which)
{
    int64_t parts[LANES / 2], any = 0;
    memcpy(parts, &which, sizeof which);
    for (int i = 0; i < LANES / 2; i++) any |= parts[i];
    return any != 0;
}

/* Puts a score in its place among the `num` best, best first; of equal ones the first come is first. */
static void insert(float *scores, int64_t *index, int64_t num, float s, int64_t i)
{
    int64_t at = num - 1;
    for (; at > 0 && s > scores[at - 1]; at--) scores[at] = scores[at - 1], index[at] = index[at - 1];
    scores[at] = s, index[at] = i;
}

/* What a token must stay under (2^32 u / w) or go beyond (GREEDY: its value) to beat the k-th best.
   Rounding moves a score by units in the last place of |top|: a slack that wide sees every rounded tie.
   The best of all is no less than top with the least noise there is, -3.13. */
static float bar_for(const Row *row, enum race race, float kth, int alone)
{
    if (race != NOISY) return kth;
    double least = alone ? fmax(kth, row->top - 3.14) : kth;
    return exp(row->top - least + (fabs(row->top) + 64.0) * 0x1p-21 + 1e-4) * 0x1p32;
}

/* Over all of a row: sums of w and of w (y - top), and the k best. plain: its values are the logits as
   they are. */
INLINE void pass_of(const Row *row, const enum race race, const int plain, int64_t k, float *scores, int64_t *index,
                    double *sums)
{
    float top = row->top > -FLT_MAX ? row->top : -FLT_MAX, bar = 0.0f;
    for (int64_t i = 0; race && i < k; i++) insert(scores, index, i + 1, score(row, race, i), i);
    if (race) bar = bar_for(row, race, scores[k - 1], k == 1);
    uvec half;
    for (int j = 0; j < LANES; j++) half[j] = j * TOKEN;
    for (int64_t i = 0; i < row->vocab; i += SPAN) {
        float room[SPAN];
        const float *at = span(row->x + i, row->vocab - i, room);
        vec total = {0}, spread = {0};
        ivec passes[PARTS], any = {0};
        for (int v = 0; v < PARTS; v++) {
            vec raw = *(const vec *)(at + v * LANES), y = raw;
            if (!plain) {
                y /= row->divisor;
                y = choose(y > FLT_MAX, (vec){0} + FLT_MAX, y);
                y = choose((raw >= row->limit) & (y == y), y, (vec){0} - INFINITY);
            }
            vec gap = y - top, w = exponential(gap);
            ivec near = gap >= -87.0f; /* the others weigh nothing, but may be among the best k */
            total += choose(near, w, (vec){0}), spread += choose(near, w * gap, (vec){0});
            if (race == NOISY) {
                uvec h = half;
                for (int j = 0; row->ids && j < LANES && i + v * LANES + j < row->vocab; j++)
                    h[j] = (uint32_t)row->ids[i + v * LANES + j] * TOKEN;
                h ^= row->word0;
                FINISH(h, row->word1);
                passes[v] = __builtin_convertvector(h, vec) <= w * bar;
                half += LANES * TOKEN;
            }
            if (race == GREEDY) passes[v] = y > bar;
            if (race) any |= passes[v];
        }
        sums[0] += sum(total), sums[1] += sum(spread);
        if (!race || !some(any)) continue;
        for (int j = 0; j < SPAN && i + j < row->vocab; j++) {
            if (i + j < k || !passes[j / LANES][j % LANES]) continue;
            float s = score(row, race, i + j);
            if (!(s > scores[k - 1])) continue;
            insert(scores, index, k, s, i + j);
            bar = bar_for(row, race, scores[k - 1], k == 1);
        }
    }
}

static void pass(const Row *row, enum race race, int64_t k, float *scores, int64_t *index, double *sums)
{
    int plain = row->divisor == 1.0f && row->limit == -INFINITY && row->top < FLT_MAX && !row->num_nan;
#define CASE(RACE)                                                       \
    case RACE:                                                           \
        if (plain) pass_of(row, RACE, 1, k, scores, index, sums);        \
        else pass_of(row, RACE, 0, k, scores, index, sums);              \
        break;
    switch (race) {
        CASE(NONE) CASE(GREEDY) CASE(NOISY)
    }
}

/* The k best of a row: scores, index, logprobs. `from`, if given, decides instead of x, which still
   gives the logprobs. entropy: of the law of x, or null. */
static void sample(Row row, const float *from, float limit, float heat, int64_t key, int64_t position, int64_t k,
                   float *scores, int64_t *index, float *logprobs, float *entropy, int64_t *num_nan)
{
    enum race race = heat > 0 ? NOISY : GREEDY;
    double sums[2] = {0}, unused[2] = {0};
    row.divisor = heat > 0 ? heat : 1.0f, row.limit = -INFINITY;
    row.word0 = row_word(0x243F6A88, key, position), row.word1 = row_word(0xB7E15162, key, position);
    find_top(&row);
    *num_nan += row.num_nan;
    if (from || limit > -INFINITY) {
        pass(&row, NONE, k, scores, index, sums);
        Row other = row;
        other.limit = limit > -INFINITY ? limit : -INFINITY;
        if (from) {
            other.x = from;
            find_top(&other);
            *num_nan += other.num_nan;
        }
        pass(&other, race, k, scores, index, unused);
    } else {
        pass(&row, race, k, scores, index, sums);
    }
    float lse = row.top + (float)log(sums[0]);
    for (int64_t i = 0; i < k; i++) {
        float x = value(&row, index[i]);
        logprobs[i] = x == -INFINITY ? x : x - lse;
    }
    if (entropy) *entropy = sums[0] > 0 ? log(sums[0]) - sums[1] / sums[0] : 0.0;
}

typedef struct {
    const float *logits, *others, *thresholds, *temperatures; /* others, thresholds: or null */
    const int64_t *keys, *positions, *tokens, *parents, *limits, *stops; /* limits: or null */
    int64_t *emitted, *at, *num_emit, *num_nan;
    float *logprobs, *entropies; /* the last: or null */
    int64_t rows, nodes, vocab, num_stops, threads, strides[2], other_strides[2];
} Trees;

static void walk(const Trees *t, int64_t b)
{
    int64_t node = 0, depth = 0, limit = t->limits ? t->limits[b] : t->nodes, first = b * t->nodes;
    const int64_t *parents = t->parents + first, *tokens = t->tokens + first;
    t->num_nan[b] = 0;
    while (depth < limit && node < t->nodes) {
        int64_t token, next = t->nodes, stops = 0;
        float unused;
        Row row = {.x = t->logits + b * t->strides[0] + node * t->strides[1], .vocab = t->vocab};
        sample(row, t->others ? t->others + b * t->other_strides[0] + node * t->other_strides[1] : 0,
               t->thresholds ? t->thresholds[first + node] : -INFINITY, t->temperatures[b], t->keys[b],
               t->positions[b] + depth, 1, &unused, &token, t->logprobs + first + depth,
               t->entropies ? t->entropies + first + depth : 0, t->num_nan + b);
        t->emitted[first + depth] = token, t->at[first + depth] = node, depth++;
        for (int64_t i = 0; i < t->num_stops; i++) stops |= t->stops[i] == token;
        for (int64_t child = t->nodes - 1; child > node && !stops; child--)
            if (parents[child] == node && tokens[child] == token) next = child;
        node = next;
    }
    t->num_emit[b] = depth;
    for (; depth < t->nodes; depth++) {
        t->emitted[first + depth] = t->at[first + depth] = -1, t->logprobs[first + depth] = 0.0f;
        if (t->entropies) t->entropies[first + depth] = 0.0f;
    }
}

/* kernels.coupled_verify. Rows of logits that no walk reaches are not read. */
void verify(const Trees *t)
{
#pragma omp parallel for num_threads(t->threads) schedule(dynamic) if (t->rows > 1 && t->threads > 1)
    for (int64_t b = 0; b < t->rows; b++) walk(t, b);
}

void best_of(const float *logits, const int64_t *ids, int64_t vocab, float heat, int64_t key, int64_t position,
             int64_t k, float *scores, int64_t *index)
{
    float logprobs[k];
    int64_t unused = 0;
    sample((Row){.x = logits, .ids = ids, .vocab = vocab}, 0, -INFINITY, heat, key, position, k, scores, index,
           logprobs, 0, &unused);
}

typedef struct {
    const float *logits, *temperatures;
    const int64_t *keys, *positions, *ids; /* ids: or null, and then tokens is null too */
    int64_t *tokens, *index;
    float *scores, *logprobs;
    int64_t rows, vocab, k, stride, threads;
} Proposals;

/* kernels.gumbel_topk. */
void topk(const Proposals *p)
{
#pragma omp parallel for num_threads(p->threads) schedule(dynamic) if (p->rows > 1 && p->threads > 1)
    for (int64_t n = 0; n < p->rows; n++) {
        int64_t unused = 0, at = n * p->k;
        Row row = {.x = p->logits + n * p->stride, .ids = p->ids, .vocab = p->vocab};
        sample(row, 0, -INFINITY, p->temperatures[n], p->keys[n], p->positions[n], p->k, p->scores + at, p->index + at,
               p->logprobs + at, 0, &unused);
        for (int64_t i = at; p->ids && i < at + p->k; i++) p->tokens[i] = p->ids[p->index[i]];
    }
}
