/* One level of a draft; drafter.c. */

#pragma once
#include "layers.h"

typedef struct {
    Matrix fc, qkv, out, gate, up, down, head;
    const float *embed, *norm_in, *norm_h, *norm_post, *norm; /* [V, hidden], and [hidden] four times */
    const float *cos, *sin; /* [positions, D]; the second half turns by -sin and sin, as eagle3.py has it */
    int64_t hidden, heads, kv_heads, head_dim, vocab, threads;
    float eps;
} Drafter;

/* A new pair: its slot, the token that is embedded, the rotary position, its place in the slot, and how many
   of the slot's first pairs it sees. */
typedef struct {
    int64_t slot, token, turn, place, seen;
} Pair;

typedef struct {
    const Pair *pairs;
    const int64_t *asked, *paths; /* which pairs drafts are wanted behind, and [num_asked, steps] places */
    const float *features, *h;    /* [num, 3 hidden] to be fused, or null and [num, hidden] */
    float *keys, *values;         /* [slots, room, kv_heads, D] */
    float *h_next, *logits;       /* [num_asked, hidden], [num_asked, draft vocabulary] */
    int64_t num, num_asked, steps, room;
} Level;

/* Returns 0, 1 if there is no memory for the work, or what is wrong, as decoder.c does. */
int draft(const Drafter *m, const Level *p);
