/* What a decoder layer is made of; layers.c. */

#pragma once
#include "vec.h"

enum { WIDTH = 2 * LANES };     /* outputs of a panel */
enum { GROUP = 64 };            /* inputs that share a scale, of INT8 */
enum how { STORE, ADD, GATE };  /* y = product; y += product; y = silu(y) * product */
enum kind { FP32, BF16, INT8 }; /* what a weight is in memory; all are widened on the way to the registers */

typedef struct {
    const char *panels;         /* of WIDTH outputs each, [inputs][WIDTH] in memory */
    const float *bias, *scales; /* of whole panels, or null; scales: of INT8, [panels][groups][WIDTH] */
    int64_t inputs, outputs, kind;
} Matrix;

#ifdef _OPENMP
int omp_get_thread_num(void); /* compilers that know OpenMP may have no omp.h */
#else
static inline int omp_get_thread_num(void) { return 0; }
#endif

/* All threads of a parallel region call these four; they end with a barrier. to: which rows of y. */
void multiply(const Matrix *m, int64_t n, const float *x, float *y, enum how how);
void multiply_to(const Matrix *m, int64_t n, const float *x, float *y, const int64_t *to, enum how how);
void multiply_gated(const Matrix *gate, const Matrix *up, int64_t n, const float *x, float *y);
void norm_all(const float *weight, int64_t width, float eps, int64_t n, const float *x, float *y);

/* One thread calls these. */
void norm(const float *x, const float *weight, int64_t n, float eps, float *y);
void attend(const float *q, const float *keys, const float *values, int64_t d, int64_t stride, int64_t length,
            const int64_t *path, int64_t num, float *scores, float *out);
