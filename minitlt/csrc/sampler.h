/* What tree.c needs of sampler.c. */

#pragma once
#include <stdint.h>

/* The k best of a row of logits, best first: scores and index. ids: by which the noise goes, or null: 0, 1, .. */
void best_of(const float *logits, const int64_t *ids, int64_t vocab, float heat, int64_t key, int64_t position,
             int64_t k, float *scores, int64_t *index);
