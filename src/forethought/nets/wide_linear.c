/* A linear layer with many weights and few rows, forward and backward. Its weights do not fit into
 * the core's own cache: each product reads them once (wide_inputs down the columns, a few side by
 * side, the others along the rows) and has the rows of the batch, which fit, in registers and near
 * by. There are exactly GROUP of these, side by side: xt [k, GROUP] is x transposed. */
#include <stdint.h>

#ifdef __AVX512F__
#define LANES 16
#define TILE 8 /* weights by two vectors of rows are as many sums as registers hold */
#else
#define LANES 8
#define TILE 4
#endif
#define GROUP (2 * LANES)

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));

static inline vec load(const float *x) { return *(const vec *)x; }
static inline void store(float *x, vec v) { *(vec *)x = v; }

/* Whether a layer of n outputs and k inputs can be computed here for these rows. */
int64_t wide_fits(int64_t n, int64_t k, int64_t rows) {
    return n % TILE == 0 && k % GROUP == 0 && k % TILE == 0 && rows == GROUP;
}

/* yt [n, GROUP] = bias + w [n, k] xt [k, GROUP] */
void wide_forward(const float *w, const float *bias, const float *xt, float *yt, int64_t n,
                  int64_t k) {
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < n; o += TILE) {
        vec sum[TILE][2];
        for (int r = 0; r < TILE; r++) sum[r][0] = sum[r][1] = bias[o + r] + (vec){0};
        const float *row = w + o * k;
        for (int64_t j = 0; j < k; j++) {
            vec first = load(xt + j * GROUP), second = load(xt + j * GROUP + LANES);
            for (int r = 0; r < TILE; r++) {
                float a = row[r * k + j];
                sum[r][0] += a * first;
                sum[r][1] += a * second;
            }
        }
        for (int r = 0; r < TILE; r++) {
            store(yt + (o + r) * GROUP, sum[r][0]);
            store(yt + (o + r) * GROUP + LANES, sum[r][1]);
        }
    }
}

/* dxt [k, GROUP] = w^T [k, n] dyt [n, GROUP] */
void wide_inputs(const float *w, const float *dyt, float *dxt, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
    for (int64_t j = 0; j < k; j += TILE) {
        vec sum[TILE][2];
        for (int r = 0; r < TILE; r++) sum[r][0] = sum[r][1] = (vec){0};
        for (int64_t o = 0; o < n; o++) {
            const float *a = w + o * k + j;
            __builtin_prefetch(a + 16); /* no processor guesses that the next line is needed */
            vec first = load(dyt + o * GROUP), second = load(dyt + o * GROUP + LANES);
            for (int r = 0; r < TILE; r++) {
                sum[r][0] += a[r] * first;
                sum[r][1] += a[r] * second;
            }
        }
        for (int r = 0; r < TILE; r++) {
            store(dxt + (j + r) * GROUP, sum[r][0]);
            store(dxt + (j + r) * GROUP + LANES, sum[r][1]);
        }
    }
}

/* dw [n, k] = dyt [n, GROUP] x [GROUP, k], and db [n] */
void wide_weights(const float *dyt, const float *x, float *dw, float *db, int64_t n, int64_t k) {
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < n; o += TILE) {
        for (int64_t j = 0; j < k; j += GROUP) {
            vec sum[TILE][2];
            for (int r = 0; r < TILE; r++) sum[r][0] = sum[r][1] = (vec){0};
            for (int64_t b = 0; b < GROUP; b++) {
                vec first = load(x + b * k + j), second = load(x + b * k + j + LANES);
                for (int r = 0; r < TILE; r++) {
                    float a = dyt[(o + r) * GROUP + b];
                    sum[r][0] += a * first;
                    sum[r][1] += a * second;
                }
            }
            for (int r = 0; r < TILE; r++) {
                store(dw + (o + r) * k + j, sum[r][0]);
                store(dw + (o + r) * k + j + LANES, sum[r][1]);
            }
        }
        for (int r = 0; r < TILE; r++) {
            float sum = 0.0f;
            for (int64_t b = 0; b < GROUP; b++) sum += dyt[(o + r) * GROUP + b];
            db[o + r] = sum;
        }
    }
}
