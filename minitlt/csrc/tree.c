/* A whole proposal of the draft model: a tree of drafts for every row, or a chain.

The definition is drafter.py's (`_tree`, `_chain`, `_best`, `_prune`): level by level the `width` most trusted
nodes get `width` children each, all of them enter the row's pool, and its most trusted `nodes` are the draft. A
chain is the tree of width 1. Here rows bring only the new pairs that they have, and rows without any nothing.

Left out: drafts that hand over their logits (`coupled` false). Names as in drafter.c; W width, P pool. */

#include <math.h>
#include <stdlib.h>

#include "drafter.h"
#include "sampler.h"

static const float SOFTNESS = 1.5f, STEP_PENALTY = 1e-4f, FLOOR = -30.0f, NEVER = -1e3f; /* as in drafter.py */

typedef struct {
    const int64_t *tokens;                                      /* [slots, room]; row b is in slot b */
    const void *features;                                       /* [slots, room, 3 hidden], bf16 or fp32 */
    float *keys, *values;                                       /* [slots, room, kv_heads, D] */
    const int64_t *roots, *noise_keys, *positions, *new_pairs;  /* [rows]; a row without new pairs gets pads */
    const float *temperatures;                                  /* [rows] */
    const int64_t *stops, *ids;                                 /* ids: of the draft vocabulary, or null */
    int64_t *drafts, *parents;                                  /* [rows, 1 + nodes] */
    int64_t rows, room, narrow_taps, num_stops, depth, width, nodes;
    float least; /* log of how sure a tree's drafts must be */
} Proposal;

/* parent: its index in the pool, -1 for the root. kept: how many nodes are, up to this one. */
typedef struct {
    int64_t token, parent, kept;
    float trust;
} Node;

typedef struct {
    Pair *pairs;
    Node *pool;                                  /* [rows, P] */
    int64_t *asked, *rows, *beam, *path, *other; /* beam: indices in the pool, [rows, W]; two buffers of paths */
    float *taps, *h, *h_next, *logits;
    int64_t num_pairs, num_rows, pool_size;
} Work;

static int is_stop(const Proposal *p, int64_t token)
{
    int64_t found = 0;
    for (int64_t i = 0; i < p->num_stops; i++) found |= p->stops[i] == token;
    return found;
}

/* The k most trusted of `num` nodes, best first; of equals the first. */
static void most_trusted(const Node *nodes, int64_t num, int64_t k, int64_t *index)
{
    for (int64_t i = 0, found = 0; i < num; i++) {
        if (found == k && !(nodes[i].trust > nodes[index[k - 1]].trust)) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && nodes[i].trust > nodes[index[at - 1]].trust; at--) index[at] = index[at - 1];
        index[at] = i;
    }
}

/* The first level: the new pairs and their taps; drafts are wanted behind a row's last. */
static void take_pairs(const Drafter *m, const Proposal *p, Work *w)
{
    int64_t size = 3 * m->hidden;
    for (int64_t b = 0; b < p->rows; b++) {
        int64_t stop = p->positions[b] - 1, num = p->new_pairs[b];
        for (int64_t at = stop - num; at < stop; at++, w->num_pairs++) {
            int64_t from = b * p->room + at;
            float *to = w->taps + w->num_pairs * size;
            const uint16_t *halves = (const uint16_t *)p->features + from * size;
            for (int64_t j = 0; j < size && p->narrow_taps; j++) {
                uint32_t bits = (uint32_t)halves[j] << 16;
                memcpy(to + j, &bits, sizeof bits);
            }
            if (!p->narrow_taps) memcpy(to, (const float *)p->features + from * size, size * sizeof *to);
            w->pairs[w->num_pairs] = (Pair){b, p->tokens[from + 1], at, at, at + 1};
        }
        if (num) w->rows[w->num_rows] = b, w->asked[w->num_rows++] = w->num_pairs - 1;
    }
}

/* The `width` children of a node (index `parent` of the pool; -1: of the root) enter the pool from `first` on. */
static void add_children(const Drafter *m, const Proposal *p, int64_t b, int64_t level, Node *pool, int64_t parent,
                         int64_t first, const float *logits)
{
    float scores[p->width], total = 0.0f, before = 0.0f;
    int64_t index[p->width];
    best_of(logits, p->ids, m->head.outputs, p->temperatures[b], p->noise_keys[b], p->positions[b] + level, p->width,
            scores, index);
    if (parent >= 0) before = is_stop(p, pool[parent].token) ? NEVER : pool[parent].trust;
    for (int64_t i = 0; i < p->width; i++) total += expf(scores[i] / SOFTNESS - scores[0] / SOFTNESS);
    for (int64_t i = 0; i < p->width; i++) {
        float trust = scores[i] / SOFTNESS - scores[0] / SOFTNESS - logf(total);
        trust = (trust > FLOOR ? trust : FLOOR) - STEP_PENALTY; /* not a number: FLOOR */
        int64_t token = p->ids ? p->ids[index[i]] : index[i];
        pool[first + i] = (Node){token, parent, 0, trust + before};
    }
}

/* The most trusted of a row's `num` newest nodes are the next level's pairs; r: among the rows that draft. */
static void take_beam(const Drafter *m, const Proposal *p, Work *w, int64_t r, int64_t level, int64_t first, int64_t num)
{
    int64_t width = p->width, b = w->rows[r], last = p->positions[b] - 1, best[width];
    const Node *pool = w->pool + r * w->pool_size;
    most_trusted(pool + first, num, width, best);
    for (int64_t i = 0; i < width; i++) {
        int64_t to = r * width + i, from = (r * num + best[i]) / width, place = last + level * width + i;
        memcpy(w->h + to * m->hidden, w->h_next + from * m->hidden, m->hidden * sizeof *w->h);
        memcpy(w->other + to * (level + 1), w->path + from * level, level * sizeof *w->path);
        w->other[to * (level + 1) + level] = place;
        w->beam[to] = first + best[i], w->asked[to] = to;
        w->pairs[to] = (Pair){b, pool[w->beam[to]].token, last + level, place, last};
    }
}

/* The most trusted of the pool, parents before children, under the root. A child is less trusted than its parent,
   so a kept node's ancestors are kept too, and the pool is in the order of levels. */
static void prune(const Proposal *p, int64_t b, Node *pool, int64_t num)
{
    int64_t *drafts = p->drafts + b * (1 + p->nodes), *parents = p->parents + b * (1 + p->nodes);
    int64_t best[p->nodes], kept = 0, stopped = 0;
    most_trusted(pool, num, p->nodes, best);
    for (int64_t i = 0; i < p->nodes; i++) pool[best[i]].kept = !(pool[best[i]].trust < p->least);
    for (int64_t i = 0; i < num; i++) {
        if (pool[i].kept && !stopped) {
            drafts[++kept] = pool[i].token;
            parents[kept] = pool[i].parent < 0 ? 0 : pool[pool[i].parent].kept;
            stopped = p->width == 1 && is_stop(p, pool[i].token); /* a tree's budget is spent elsewhere first */
        }
        pool[i].kept = kept;
    }
}

static int grow(const Drafter *m, const Proposal *p, Work *w)
{
    int64_t first = 0, parents = 1;
    for (int64_t level = 0; level < p->depth; level++) {
        Level given = {w->pairs, w->asked, w->path, level ? 0 : w->taps, w->h, p->keys, p->values, w->h_next, w->logits,
                       level ? w->num_rows * parents : w->num_pairs, w->num_rows * parents, level, p->room};
        int wrong = draft(m, &given);
        if (wrong) return wrong;
#pragma omp parallel for num_threads(m->threads) schedule(dynamic) if (given.num_asked > 1)
        for (int64_t i = 0; i < given.num_asked; i++) {
            int64_t r = i / parents;
            add_children(m, p, w->rows[r], level, w->pool + r * w->pool_size, level ? w->beam[i] : -1,
                         first + i % parents * p->width, w->logits + i * m->head.outputs);
        }
        for (int64_t r = 0; r < w->num_rows && level + 1 < p->depth; r++)
            take_beam(m, p, w, r, level, first, parents * p->width);
        int64_t *path = w->path;
        w->path = w->other, w->other = path;
        first += parents * p->width, parents = p->width;
    }
    for (int64_t r = 0; r < w->num_rows; r++) prune(p, w->rows[r], w->pool + r * w->pool_size, w->pool_size);
    return 0;
}

/* Returns what `draft` does. */
int propose(const Drafter *m, const Proposal *p)
{
    int64_t width = p->width, most = p->rows * width, pairs = 0, size = width + (p->depth - 1) * width * width;
    for (int64_t b = 0; b < p->rows; b++) {
        pairs += p->new_pairs[b];
        for (int64_t i = b * (1 + p->nodes); i < (b + 1) * (1 + p->nodes); i++) p->drafts[i] = p->parents[i] = -1;
        p->drafts[b * (1 + p->nodes)] = p->roots[b];
    }
    if (!pairs) return 0;
    int64_t num = pairs > most ? pairs : most, ints = most * (3 + 2 * p->depth);
    int64_t floats = pairs * 3 * m->hidden + most * (2 * m->hidden + m->head.outputs);
    char *memory = malloc(num * sizeof(Pair) + p->rows * size * sizeof(Node) + ints * 8 + floats * 4);
    if (!memory) return 1;
    Work w = {.pairs = (Pair *)memory, .pool = (Node *)(memory + num * sizeof(Pair)), .pool_size = size};
    w.asked = (int64_t *)(w.pool + p->rows * size), w.rows = w.asked + most, w.beam = w.rows + most;
    w.path = w.beam + most, w.other = w.path + most * p->depth;
    w.taps = (float *)(w.other + most * p->depth), w.h = w.taps + pairs * 3 * m->hidden;
    w.h_next = w.h + most * m->hidden, w.logits = w.h_next + most * m->hidden;
    take_pairs(m, p, &w);
    int wrong = grow(m, p, &w);
    free(memory);
    return wrong;
}
