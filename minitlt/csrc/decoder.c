/* The decoder of the Llama family for a CPU: products with packed weights, attention, the forward.

What it is. Decoding reads all weights for a handful of tokens, so a step takes as long as that reading
takes, if nothing else gets in its way: one call per forward instead of four hundred small operations,
weights in the order in which they are read, and the next panel on its way while this one is multiplied.

Why no bit depends on company. Every output of a product is one chain of multiply-adds (fused where the
processor has them) over the inputs in ascending order, whatever other rows, threads or vector widths
there are. A query attends to what it sees as to one sequence: the committed context, then its own
ancestors; so a node of a tree does the sums of plain decoding, in their order. Weights may be narrow
(bf16): they are widened on the way into the registers, and all arithmetic is fp32.

Left out: other than fp32 arithmetic, attention in blocks of queries (a prompt's keys are
read from the second cache once per query, an eighth of the time of its products).

How it is built and called: native.py, with the C compiler of the machine. Names: N nodes (of all rows),
K inputs, D head size; a panel is WIDTH outputs, [K][WIDTH] in memory. */

#include <math.h>
#include <stdlib.h>

#include "layers.h"

typedef struct {
    Matrix qkv, out, gate, up, down;
    const float *norm_in, *norm_mlp, *norm_q, *norm_k; /* the last two may be null */
} Layer;

typedef struct {
    const Layer *layers;
    const float *embed, *norm; /* [V, hidden], [hidden] */
    const float *turn;         /* per position and pair of a head: cosine and sine */
    Matrix head;
    int64_t num_layers, hidden, heads, kv_heads, head_dim, taps[3], vocab, threads;
    float eps;
} Model;

typedef struct {
    const int64_t *tokens, *lengths, *parents; /* [rows, nodes], [rows], [rows, nodes] or null: chains */
    float *cache;                              /* [layers, slots, 2 kv_heads, room, D] */
    float *features, *last;                    /* [rows, nodes, 3 hidden], [rows, nodes, hidden] */
    float *logits;                             /* [rows, nodes, V], or null */
    int64_t rows, nodes, slots, first_slot, room;
} Pass;

/* Node i of those that are fed. */
typedef struct {
    int64_t row, node, depth;
} Fed;

/* Where the way to a node from its root stands in the cache. */
static void path_to(const int64_t *parents, int64_t length, Fed to, int64_t *path)
{
    for (int64_t at = to.depth, node = to.node; at >= 0; at--, node = parents[node]) path[at] = length + node;
}

/* Turns the query and key heads of every node by its position and writes keys and values to the cache. */
static void place(const Model *m, const Layer *layer, const Pass *p, const Fed *fed, int64_t num, float *cache,
                  float *qkv, int64_t ld)
{
    int64_t d = m->head_dim;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num; i++) {
        int64_t row = fed[i].row;
        const float *turn = m->turn + (p->lengths[row] + fed[i].depth) * d;
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
            float *to = cache + (lane * p->room + p->lengths[row] + fed[i].node) * d;
            memcpy(to, qkv + i * ld + (m->heads + h) * d, d * sizeof *to);
        }
    }
}

static void attend_all(const Model *m, const Pass *p, const Fed *fed, int64_t num, const float *cache, const float *qkv,
                       int64_t ld, float *out, float *scores, int64_t *path)
{
    int64_t d = m->head_dim, items = num * m->heads, chunk = items / (m->threads * 8) + 1;
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < items; item++) {
        int64_t i = item / m->heads, h = item % m->heads, row = fed[i].row;
        int64_t lane = (p->first_slot + row) * 2 * m->kv_heads + h / (m->heads / m->kv_heads);
        const float *keys = cache + lane * p->room * d, *values = keys + m->kv_heads * p->room * d;
        int64_t length = p->lengths[row], num = fed[i].depth + 1;
        if (p->parents) path_to(p->parents + row * p->nodes, length, fed[i], path);
        else length += num, num = 0; /* a chain stands in its own order */
        attend(qkv + i * ld + h * d, keys, values, d, d, length, path, num, scores, out + item * d);
    }
}

/* What is wrong with a pass, by the numbers of native.py; 0: nothing. */
static int check(const Model *m, const Pass *p)
{
    for (int64_t i = 0; i < p->rows * p->nodes; i++) {
        int64_t node = i % p->nodes, parent = p->parents ? p->parents[i] : node - 1;
        if (p->tokens[i] >= m->vocab) return 2;
        if (parent >= node) return 3;
        if (parent > 0 && p->tokens[i] >= 0 && p->tokens[i - node + parent] < 0) return 5; /* a pad has no keys */
        if (p->lengths[i / p->nodes] < 0 || p->lengths[i / p->nodes] + p->nodes > p->room) return 4;
    }
    return 0;
}

/* The nodes that are fed: all but pads, i.e. tokens below 0 behind the root. Returns their number; `places` are their
   numbers among all nodes. */
static int64_t gather(const Pass *p, Fed *fed, int64_t *places)
{
    int64_t num = 0;
    for (int64_t i = 0; i < p->rows * p->nodes; i++) {
        int64_t row = i / p->nodes, node = i % p->nodes, depth = node;
        if (node && p->tokens[i] < 0) continue;
        if (p->parents) {
            depth = 0;
            for (int64_t up = node; (up = p->parents[row * p->nodes + up]) >= 0;) depth++;
        }
        fed[num] = (Fed){row, node, depth};
        places[num++] = i;
    }
    return num;
}

/* Feeds the nodes of all rows; of pads nothing is read, and what is at their place in the results stays as it was.
   Returns 0, 1 if there is no memory for the work, or what is wrong. */
int forward(const Model *m, const Pass *p)
{
    int wrong = check(m, p);
    if (wrong) return wrong;
    int64_t most = p->rows * p->nodes, hidden = m->hidden, seen = 0;
    for (int64_t row = 0; row < p->rows; row++) seen = p->lengths[row] > seen ? p->lengths[row] : seen;
    seen += p->nodes + 2 * LANES;
    int64_t wide = (m->heads + 2 * m->kv_heads) * m->head_dim, inner = m->layers[0].gate.outputs;
    int64_t outs = m->heads * m->head_dim;
    int64_t floats = most * (2 * hidden + wide + inner + outs) + m->threads * seen;
    int64_t *places = malloc((most + m->threads * p->nodes) * sizeof *places + most * sizeof(Fed));
    float *h = malloc(floats * sizeof *h);
    if (!places || !h) {
        free(places), free(h);
        return 1;
    }
    int64_t *paths = places + most;
    Fed *fed = (Fed *)(paths + m->threads * p->nodes);
    int64_t n = gather(p, fed, places);
    float *x = h + n * hidden, *qkv = x + n * hidden, *act = qkv + n * wide, *att = act + n * inner;
    float *all_scores = att + n * outs;
#pragma omp parallel num_threads(m->threads)
    {
        int me = omp_get_thread_num();
        float *scores = all_scores + me * seen;
        int64_t *path = paths + me * p->nodes;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n; i++) {
            int64_t token = p->tokens[places[i]];
            memcpy(h + i * hidden, m->embed + (token > 0 ? token : 0) * hidden, hidden * sizeof *h);
        }
        for (int64_t at = 0; at < m->num_layers; at++) {
            const Layer *layer = m->layers + at;
            float *cache = p->cache + at * p->slots * 2 * m->kv_heads * p->room * m->head_dim;
            for (int tap = 0; tap < 3; tap++) {
                if (m->taps[tap] != at) continue;
#pragma omp for schedule(static) nowait
                for (int64_t i = 0; i < n; i++)
                    memcpy(p->features + (3 * places[i] + tap) * hidden, h + i * hidden, hidden * sizeof *h);
            }
            norm_all(layer->norm_in, hidden, m->eps, n, h, x);
            multiply(&layer->qkv, n, x, qkv, STORE);
            place(m, layer, p, fed, n, cache, qkv, wide);
            attend_all(m, p, fed, n, cache, qkv, wide, att, scores, path);
            multiply(&layer->out, n, att, h, ADD);
            norm_all(layer->norm_mlp, hidden, m->eps, n, h, x);
            multiply_gated(&layer->gate, &layer->up, n, x, act);
            multiply(&layer->down, n, act, h, ADD);
        }
        norm_all(m->norm, hidden, m->eps, n, h, x);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < n; i++) memcpy(p->last + places[i] * hidden, x + i * hidden, hidden * sizeof *x);
        if (p->logits) multiply_to(&m->head, n, x, p->logits, places, STORE);
    }
    free(places), free(h);
    return 0;
}

/* y = x W^T + bias, of rows without padding. */
void product(const Matrix *m, int64_t threads, int64_t n, const float *x, float *y)
{
#pragma omp parallel num_threads(threads)
    multiply(m, n, x, y, STORE);
}

int64_t width(void) { return WIDTH; }
