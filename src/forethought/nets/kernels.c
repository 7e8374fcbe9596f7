/* A linear layer's bias, dropout, LayerNorm and Mish or SimNorm, forward and backward, in one pass
 * over each row; the value of two-hot logits; and bytes of images as a convolution takes them.
 *
 * On a CPU these two activations cost as much as the matrix products between them when they are
 * written as tensor operations. Built on first use by kernels.py, which also states the formulas.
 * Rows are cut into `chunks` fixed pieces, so that sums over rows come out in the same order in
 * every run with the same number of chunks. */
#include <math.h>
#include <stdint.h>

#define EPS 1e-5f

/* e^x for -87 <= x <= 20 by range reduction and a polynomial; relative error below 2e-7. Written
 * without calls so that the compiler vectorises the loops around it. */
static inline float exp_f(float x) {
    float r = rintf(x * 1.44269504088896341f);
    float f = x - r * 0.693359375f + r * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    union { int32_t i; float f; } two_to_r;
    two_to_r.i = ((int32_t)r + 127) << 23;
    return p * two_to_r.f;
}

static inline float clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* out = (x + pre) * dropout, and its sum; pre and keep may be null. */
static inline float load_row(const float *x, const float *pre, const uint8_t *keep, float scale,
                             int64_t d, float *out) {
    float sum = 0.0f;
    if (pre && keep)
        for (int64_t j = 0; j < d; j++) {
            out[j] = (x[j] + pre[j]) * (keep[j] ? scale : 0.0f);
            sum += out[j];
        }
    else if (pre)
        for (int64_t j = 0; j < d; j++) { out[j] = x[j] + pre[j]; sum += out[j]; }
    else if (keep)
        for (int64_t j = 0; j < d; j++) { out[j] = x[j] * (keep[j] ? scale : 0.0f); sum += out[j]; }
    else
        for (int64_t j = 0; j < d; j++) { out[j] = x[j]; sum += out[j]; }
    return sum;
}

/* Loads a row and finds its mean and 1/std, in two passes: one would cancel digits. */
static inline void load_with_stats(const float *x, const float *pre, const uint8_t *keep,
                                   float scale, int64_t d, float *out, float *stats) {
    float m = load_row(x, pre, keep, scale, d, out) / d, square = 0.0f;
    for (int64_t j = 0; j < d; j++) { float c = out[j] - m; square += c * c; }
    stats[0] = m;
    stats[1] = 1.0f / sqrtf(square / d + EPS);
}

/* y = mish(LN(x + pre)); mish(h) = h n / (n + 2), n = e^h (e^h + 2). y may be x. */
void norm_mish(const float *x, const float *restrict pre, const uint8_t *restrict keep,
               float scale, const float *restrict weight, const float *restrict bias, float *y,
               float *restrict stats, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        float *o = y + i * d, own[2], *st = stats ? stats + 2 * i : own;
        const uint8_t *kept = keep ? keep + i * d : 0;
        load_with_stats(x + i * d, pre, kept, scale, d, o, st);
        float m = st[0], k = st[1];
        for (int64_t j = 0; j < d; j++) {
            float h = (o[j] - m) * k * weight[j] + bias[j];
            float e = exp_f(clamp(h, -87.0f, 20.0f));
            float n = e * (e + 2.0f);
            o[j] = h * (n / (n + 2.0f));
        }
    }
}

/* LN's backward for one row: g is d loss / d (hat * weight + bias) and becomes d loss / d x, where
 * `hat` is the normalised row. Adds to the sums of the gradients of weight, bias and pre. */
static inline void norm_backward(float *restrict g, const float *restrict hat,
                                 const float *restrict weight, const uint8_t *restrict keep,
                                 float scale, float k, int64_t d, float *restrict dweight,
                                 float *restrict dbias, float *restrict dpre) {
    float mean = 0.0f, dot = 0.0f;
    for (int64_t j = 0; j < d; j++) {
        dweight[j] += g[j] * hat[j];
        dbias[j] += g[j];
        g[j] *= weight[j];
        mean += g[j];
        dot += g[j] * hat[j];
    }
    mean /= d;
    dot /= d;
    if (keep)
        for (int64_t j = 0; j < d; j++) {
            g[j] = k * (g[j] - mean - hat[j] * dot) * (keep[j] ? scale : 0.0f);
            dpre[j] += g[j];
        }
    else
        for (int64_t j = 0; j < d; j++) {
            g[j] = k * (g[j] - mean - hat[j] * dot);
            dpre[j] += g[j];
        }
}

/* o = g times the slope of mish at hat * weight + bias. */
static inline void mish_backward(const float *restrict g, const float *restrict hat,
                                 const float *restrict weight, const float *restrict bias,
                                 int64_t d, float *restrict o) {
    for (int64_t j = 0; j < d; j++) {
        float h = hat[j] * weight[j] + bias[j];
        float e = exp_f(clamp(h, -87.0f, 20.0f));
        float n = e * (e + 2.0f);
        float t = n / (n + 2.0f); /* tanh(softplus(h)) */
        o[j] = g[j] * (t + h * (e / (1.0f + e)) * (1.0f - t * t));
    }
}

/* dx and, per chunk, sums of the gradients of weight, bias and pre: partial [chunks, 4, d], whose
 * fourth row is scratch for the normalised row. */
void norm_mish_backward(const float *restrict grad, const float *restrict x,
                        const float *restrict pre, const uint8_t *restrict keep, float scale,
                        const float *restrict weight, const float *restrict bias,
                        const float *restrict stats, float *restrict dx, float *restrict partial,
                        int64_t chunks, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
        float *dweight = partial + c * 4 * d, *dbias = dweight + d, *dpre = dbias + d;
        float *hat = dpre + d;
        for (int64_t i = c * rows / chunks; i < (c + 1) * rows / chunks; i++) {
            const float *g = grad + i * d;
            const uint8_t *kept = keep ? keep + i * d : 0;
            float *o = dx + i * d, m = stats[2 * i], k = stats[2 * i + 1];
            load_row(x + i * d, pre, kept, scale, d, hat);
            for (int64_t j = 0; j < d; j++) hat[j] = (hat[j] - m) * k;
            mish_backward(g, hat, weight, bias, d, o);
            norm_backward(o, hat, weight, kept, scale, k, d, dweight, dbias, dpre);
        }
    }
}

/* Softmax over each group of neighbours, in place; inlined with a constant group it vectorises. */
static inline void group_softmax(float *o, int64_t d, int64_t group) {
    for (int64_t s = 0; s < d; s += group) {
        float top = o[s];
        for (int64_t j = 1; j < group; j++) top = o[s + j] > top ? o[s + j] : top;
        for (int64_t j = 0; j < group; j++) o[s + j] -= top;
    }
    for (int64_t j = 0; j < d; j++) o[j] = exp_f(clamp(o[j], -87.0f, 0.0f));
    for (int64_t s = 0; s < d; s += group) {
        float sum = 0.0f;
        for (int64_t j = 0; j < group; j++) sum += o[s + j];
        sum = 1.0f / sum;
        for (int64_t j = 0; j < group; j++) o[s + j] *= sum;
    }
}

/* The same for groups of eight. Each lane meets the others in three exchanges, so that a group stays
 * in one register from beginning to end. */
static inline void softmax_of_eights(float *o, int64_t d) {
    for (int64_t s = 0; s < d; s += 8) {
        float v[8], a[8], b[8];
        for (int l = 0; l < 8; l++) v[l] = o[s + l];
        for (int l = 0; l < 8; l++) a[l] = v[l] > v[l ^ 4] ? v[l] : v[l ^ 4];
        for (int l = 0; l < 8; l++) b[l] = a[l] > a[l ^ 2] ? a[l] : a[l ^ 2];
        for (int l = 0; l < 8; l++) a[l] = b[l] > b[l ^ 1] ? b[l] : b[l ^ 1];
        for (int l = 0; l < 8; l++) v[l] = exp_f(clamp(v[l] - a[l], -87.0f, 0.0f));
        for (int l = 0; l < 8; l++) a[l] = v[l] + v[l ^ 4];
        for (int l = 0; l < 8; l++) b[l] = a[l] + a[l ^ 2];
        for (int l = 0; l < 8; l++) o[s + l] = v[l] / (b[l] + b[l ^ 1]);
    }
}

static inline void group_softmax_backward(const float *g, const float *s, float *o, int64_t d,
                                          int64_t group) {
    for (int64_t b = 0; b < d; b += group) {
        float dot = 0.0f;
        for (int64_t j = 0; j < group; j++) dot += g[b + j] * s[b + j];
        for (int64_t j = 0; j < group; j++) o[b + j] = s[b + j] * (g[b + j] - dot);
    }
}

/* y = softmax over groups of `group` neighbours of LN(x + pre); y may be x. */
void norm_simnorm(const float *x, const float *restrict pre, const float *restrict weight,
                  const float *restrict bias, float *y, float *restrict stats, int64_t rows,
                  int64_t d, int64_t group) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        float *o = y + i * d, own[2], *st = stats ? stats + 2 * i : own;
        load_with_stats(x + i * d, pre, 0, 1.0f, d, o, st);
        float m = st[0], k = st[1];
        for (int64_t j = 0; j < d; j++) o[j] = (o[j] - m) * k * weight[j] + bias[j];
        if (group == 8)
            softmax_of_eights(o, d);
        else
            group_softmax(o, d, group);
    }
}

void norm_simnorm_backward(const float *restrict grad, const float *restrict x,
                           const float *restrict pre, const float *restrict y,
                           const float *restrict weight, const float *restrict stats,
                           float *restrict dx, float *restrict partial, int64_t chunks,
                           int64_t rows, int64_t d, int64_t group) {
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
        float *dweight = partial + c * 4 * d, *dbias = dweight + d, *dpre = dbias + d;
        float *hat = dpre + d;
        for (int64_t i = c * rows / chunks; i < (c + 1) * rows / chunks; i++) {
            const float *g = grad + i * d, *s = y + i * d;
            float *o = dx + i * d, m = stats[2 * i], k = stats[2 * i + 1];
            load_row(x + i * d, pre, 0, 1.0f, d, hat);
            for (int64_t j = 0; j < d; j++) hat[j] = (hat[j] - m) * k;
            if (group == 8)
                group_softmax_backward(g, s, o, d, 8);
            else
                group_softmax_backward(g, s, o, d, group);
            norm_backward(o, hat, weight, 0, 1.0f, k, d, dweight, dbias, dpre);
        }
    }
}

/* The largest of n numbers, in eight lanes: a single running maximum does not vectorise, because a
 * NaN would make its order matter. (With a NaN the result is some number or NaN; the sums over the
 * row are NaN either way.) */
static inline float largest(const float *x, int64_t n) {
    float lanes[8];
    int64_t j = 0;
    for (int l = 0; l < 8; l++) lanes[l] = x[0];
    for (; j + 8 <= n; j += 8)
        for (int l = 0; l < 8; l++) lanes[l] = x[j + l] > lanes[l] ? x[j + l] : lanes[l];
    for (; j < n; j++) lanes[0] = x[j] > lanes[0] ? x[j] : lanes[0];
    float top = lanes[0];
    for (int l = 1; l < 8; l++) top = lanes[l] > top ? lanes[l] : top;
    return top;
}

/* value = symexp(softmax(logits) . centres), centres evenly spaced from `low`. */
void two_hot_decode(const float *restrict logits, float low, float width, float *restrict value,
                    int64_t rows, int64_t bins) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *x = logits + i * bins;
        float top = largest(x, bins), sum = 0.0f, moment = 0.0f;
        for (int32_t j = 0; j < bins; j++) { /* 32 bits: only those become floats eight at a time */
            float e = exp_f(clamp(x[j] - top, -87.0f, 0.0f));
            sum += e;
            moment += e * (float)j;
        }
        float mean = low + width * moment / sum;
        float size = expm1f(fabsf(mean));
        value[i] = mean < 0.0f ? -size : size;
    }
}

/* Stacks of four grey frames that are not moved, as Atari's are: a loop that the compiler can turn
 * into whole registers, four times as fast as the general one. */
static void four_planes(const uint8_t *frames, int64_t next_stack, int64_t next_frame, float *out,
                        int64_t n, int64_t size, float scale, float bias) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *a = frames + i * next_stack, *b = a + next_frame, *c = b + next_frame,
                      *d = c + next_frame;
        float *restrict to = out + i * size * 4;
        for (int64_t x = 0; x < size; x++) {
            to[4 * x] = a[x] * scale + bias;
            to[4 * x + 1] = b[x] * scale + bias;
            to[4 * x + 2] = c[x] * scale + bias;
            to[4 * x + 3] = d[x] * scale + bias;
        }
    }
}

/* Stacks of frames of bytes as [n, height, width, stack * channels] of floats, byte * scale + bias.
 * `offset` [n, 2], which may be null, moves a stack by whole pixels: row y comes from row
 * y + offset - pad, from the edge where there is none. `next_stack` and `next_frame` are the bytes
 * between stacks and between the frames of one, which overlap in a window over an episode. */
void images(const uint8_t *frames, int64_t next_stack, int64_t next_frame, const int64_t *offset,
            int64_t pad, float *out, int64_t n, int64_t stack, int64_t height, int64_t width,
            int64_t channels, int64_t channels_last, float scale, float bias) {
    int64_t pixel = channels_last ? channels : 1, plane = channels_last ? 1 : height * width;
    int64_t depth = stack * channels;
    if (!offset && stack == 4 && channels == 1) {
        four_planes(frames, next_stack, next_frame, out, n, height * width, scale, bias);
        return;
    }
    float value[256];
    for (int i = 0; i < 256; i++) value[i] = i * scale + bias;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        int64_t dy = offset ? offset[2 * i] - pad : 0, dx = offset ? offset[2 * i + 1] - pad : 0;
        for (int64_t y = 0; y < height; y++) {
            int64_t row = y + dy < 0 ? 0 : y + dy >= height ? height - 1 : y + dy;
            float *to = out + (i * height + y) * width * depth;
            for (int64_t f = 0; f < stack; f++) {
                const uint8_t *line =
                    frames + i * next_stack + f * next_frame + row * width * pixel;
                for (int64_t c = 0; c < channels; c++, to++) {
                    const uint8_t *from = line + c * plane;
                    for (int64_t x = 0; x < width; x++) {
                        int64_t column = x + dx < 0 ? 0 : x + dx >= width ? width - 1 : x + dx;
                        to[x * depth] = value[from[column * pixel]];
                    }
                }
            }
        }
    }
}
