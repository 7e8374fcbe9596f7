/* Images to features by convolutions without padding, each with a ReLU behind it, and back, image by
 * image: what one layer writes is still in the core's own cache when the next one reads it. Layer by
 * layer over a whole batch, as tensor operations go, it has left the cache by then.
 *
 * Values lie with their channels together: x [height, width, channels]. A window's line is then one
 * piece of memory, and nothing is copied to be multiplied. Weights are packed into the order in
 * which they are read. Sums over the batch are made in `parts` fixed pieces, so that they come out
 * in the same order in every run with the same number of parts. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Sums that are kept in registers: POSITIONS windows by VECTORS vectors of outputs, or, in layers of
 * fewer outputs, MORE_POSITIONS by FEW_VECTORS; and TAPS weights by FEW_VECTORS. */
#define FEW_VECTORS 2
#define INPUT_POSITIONS 5
#ifdef __AVX512F__
#define LANES 16
#define VECTORS 4
#define POSITIONS 5
#define MORE_POSITIONS 10
#define TAPS 8
#else
#define LANES 8
#define VECTORS 2
#define POSITIONS 6
#define MORE_POSITIONS 6
#define TAPS 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t bits __attribute__((vector_size(LANES * 4), aligned(4)));

typedef struct {
    int64_t height, width, channels; /* of what comes in */
    int64_t kernel, stride;
    int64_t rows, columns, outputs; /* of what goes out */
} Layer;

/* A batch of images: floats that lie as the first layer takes them, or, where `bytes` is not null,
 * stacks of grey frames whose bytes are to be multiplied by `scale`. `next_stack` and `next_frame`
 * are the bytes between stacks and between the frames of one. */
typedef struct {
    const float *floats;
    const uint8_t *bytes;
    int64_t next_stack, next_frame;
    float scale;
} Images;

static inline vec load(const float *x) { return *(const vec *)x; }
static inline void store(float *x, vec v) { *(vec *)x = v; }
static inline int64_t line_of(const Layer *l) { return l->kernel * l->channels; }
static inline int64_t taps_of(const Layer *l) { return l->kernel * line_of(l); }
static inline int64_t values_in(const Layer *l) { return l->height * l->width * l->channels; }
static inline int64_t values_out(const Layer *l) { return l->rows * l->columns * l->outputs; }
static inline int is_wide(const Layer *l) { return l->outputs % (VECTORS * LANES) == 0; }

/* Where the window of a position begins. */
static inline int64_t window(const Layer *l, int64_t position) {
    int64_t row = position / l->columns, column = position % l->columns;
    return (row * l->width + column) * l->stride * l->channels;
}

/* Whether these layers can be computed here: whole vectors everywhere. */
int64_t stack_fits(const Layer *layers, int64_t depth) {
    for (int64_t k = 0; k < depth; k++) {
        const Layer *l = &layers[k];
        if (l->outputs % (FEW_VECTORS * LANES) || line_of(l) % TAPS) return 0;
        if (l->rows < 1 || l->columns < 1 || l->rows * l->columns < MORE_POSITIONS) return 0;
        if (k && line_of(l) % (VECTORS * LANES)) return 0;
    }
    return 1;
}

/* ---- forward ---- */

/* y = max(0, bias + sum over the window of x w) for P windows. What is not a number stays so. */
#define FORWARD(NAME, P, V)                                                                       \
    static inline __attribute__((always_inline)) void NAME(                                       \
        const Layer *l, const float *const *from, const float *w, const float *bias,              \
        float *const *to) {                                                                       \
        int64_t n = l->outputs, line = line_of(l), next = l->width * l->channels;                 \
        vec sum[P][V];                                                                            \
        for (int p = 0; p < P; p++)                                                               \
            for (int v = 0; v < V; v++) sum[p][v] = load(bias + v * LANES);                       \
        for (int64_t y = 0; y < l->kernel; y++)                                                   \
            for (int64_t j = 0; j < line; j++, w += n) {                                          \
                vec b[V];                                                                         \
                for (int v = 0; v < V; v++) b[v] = load(w + v * LANES);                           \
                for (int p = 0; p < P; p++) {                                                     \
                    float a = from[p][y * next + j];                                              \
                    for (int v = 0; v < V; v++) sum[p][v] += a * b[v];                            \
                }                                                                                 \
            }                                                                                     \
        for (int p = 0; p < P; p++)                                                               \
            for (int v = 0; v < V; v++)                                                           \
                store(to[p] + v * LANES, (vec)((bits)sum[p][v] & ~(sum[p][v] <= 0.0f)));          \
    }
FORWARD(forward_wide, POSITIONS, VECTORS)
FORWARD(forward_narrow, MORE_POSITIONS, FEW_VECTORS)

static void forward(const Layer *l, const float *x, const float *w, const float *bias, float *y) {
    int64_t n = l->outputs, positions = l->rows * l->columns;
    int64_t tile = is_wide(l) ? POSITIONS : MORE_POSITIONS;
    int64_t block = LANES * (is_wide(l) ? VECTORS : FEW_VECTORS);
    const float *from[MORE_POSITIONS];
    float *to[MORE_POSITIONS];
    for (int64_t first = 0; first < positions; first += tile) {
        int64_t begin = first + tile <= positions ? first : positions - tile; /* some twice */
        for (int64_t c = 0; c < n; c += block) {
            for (int64_t p = 0; p < tile; p++) {
                from[p] = x + window(l, begin + p);
                to[p] = y + (begin + p) * n + c;
            }
            if (is_wide(l)) forward_wide(l, from, w + c, bias + c, to);
            else forward_narrow(l, from, w + c, bias + c, to);
        }
    }
}

/* w [outputs, channels, kernel, kernel] -> packed [kernel, kernel, channels, outputs] */
static void pack_forward(const Layer *l, const float *w, float *packed) {
    int64_t area = l->kernel * l->kernel, taps = taps_of(l), n = l->outputs;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += LANES)
        for (int64_t c = 0; c < l->channels; c++)
            for (int64_t k = 0; k < area; k++)
                for (int64_t o = 0; o < LANES; o++)
                    packed[(k * l->channels + c) * n + first + o] =
                        w[(first + o) * taps + c * area + k];
}

static int64_t most_values(const Layer *layers, int64_t depth) {
    int64_t most = 0;
    for (int64_t k = 0; k < depth; k++)
        most = values_out(&layers[k]) > most ? values_out(&layers[k]) : most;
    return most;
}

/* Image i as the first layer takes it, in `room` where it has to be made of bytes. */
static const float *image(const Images *x, const Layer *first, int64_t i, float *room) {
    if (!x->bytes) return x->floats + i * values_in(first);
    int64_t size = first->height * first->width, frames = first->channels;
    const uint8_t *a = x->bytes + i * x->next_stack;
    if (frames == 4) { /* a loop that the compiler can turn into whole registers */
        const uint8_t *b = a + x->next_frame, *c = b + x->next_frame, *d = c + x->next_frame;
        for (int64_t j = 0; j < size; j++) {
            room[4 * j] = a[j] * x->scale;
            room[4 * j + 1] = b[j] * x->scale;
            room[4 * j + 2] = c[j] * x->scale;
            room[4 * j + 3] = d[j] * x->scale;
        }
        return room;
    }
    for (int64_t f = 0; f < frames; f++, a += x->next_frame)
        for (int64_t j = 0; j < size; j++) room[j * frames + f] = a[j] * x->scale;
    return room;
}

/* The features of `count` images: [count, outputs, rows, columns] of the last layer. y[k] keeps what
 * layer k gave, [count, rows, columns, outputs]; where y is null nothing is kept. w[k] [outputs,
 * channels, kernel, kernel]; `packed` has room for all of them. Returns 0, or 1 where there is no
 * memory. */
int64_t stack_forward(const Layer *layers, int64_t depth, const Images *x, const float *const *w,
                      const float *const *bias, float *packed, float *const *y, float *features,
                      int64_t count) {
    const Layer *last = &layers[depth - 1];
    int64_t positions = last->rows * last->columns, n = last->outputs, failed = 0;
    int64_t most = most_values(layers, depth), begin = 0;
    for (int64_t k = 0; k < depth; begin += taps_of(&layers[k]) * layers[k].outputs, k++)
        pack_forward(&layers[k], w[k], packed + begin);
#pragma omp parallel
    {
        int64_t size = (x->bytes ? values_in(&layers[0]) : 0) + (y ? 0 : 2 * most);
        float *room = malloc((size + 1) * sizeof(float));
        if (!room) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            if (!room) continue;
            const float *from = image(x, &layers[0], i, room), *weights = packed;
            for (int64_t k = 0; k < depth; k++) {
                const Layer *l = &layers[k];
                float *to = y ? y[k] + i * values_out(l) : room + size - (2 - k % 2) * most;
                forward(l, from, weights, bias[k], to);
                weights += taps_of(l) * l->outputs;
                from = to;
            }
            float *to = features + i * positions * n;
            for (int64_t c = 0; c < n; c++)
                for (int64_t p = 0; p < positions; p++) to[c * positions + p] = from[p * n + c];
        }
        free(room);
    }
    return failed;
}

/* ---- backward ---- */

/* dw += sum over positions of x dy, for TAPS values of the window. */
static inline void add_taps(const Layer *l, const float *x, const float *dy, float *dw) {
    int64_t n = l->outputs, step = l->stride * l->channels;
    vec sum[TAPS][FEW_VECTORS];
    for (int k = 0; k < TAPS; k++)
        for (int v = 0; v < FEW_VECTORS; v++) sum[k][v] = load(dw + k * n + v * LANES);
    for (int64_t row = 0; row < l->rows; row++) {
        const float *a = x + row * step * l->width;
        for (int64_t column = 0; column < l->columns; column++, a += step, dy += n) {
            vec b[FEW_VECTORS];
            for (int v = 0; v < FEW_VECTORS; v++) b[v] = load(dy + v * LANES);
            for (int k = 0; k < TAPS; k++)
                for (int v = 0; v < FEW_VECTORS; v++) sum[k][v] += a[k] * b[v];
        }
    }
    for (int k = 0; k < TAPS; k++)
        for (int v = 0; v < FEW_VECTORS; v++) store(dw + k * n + v * LANES, sum[k][v]);
}

/* dw [kernel, kernel, channels, outputs] and db [outputs] grow by one image's share. */
static void add_weights(const Layer *l, const float *x, const float *dy, float *dw, float *db) {
    int64_t n = l->outputs, line = line_of(l);
    for (int64_t y = 0; y < l->kernel; y++)
        for (int64_t j = 0; j < line; j += TAPS)
            for (int64_t c = 0; c < n; c += FEW_VECTORS * LANES)
                add_taps(l, x + y * l->width * l->channels + j, dy + c,
                         dw + (y * line + j) * n + c);
    for (int64_t p = 0; p < l->rows * l->columns; p++)
        for (int64_t c = 0; c < n; c++) db[c] += dy[p * n + c];
}

/* dx of P windows += w dy, for VECTORS vectors of each. */
#define INPUTS(NAME, P)                                                                           \
    static inline __attribute__((always_inline)) void NAME(const Layer *l, const float *dy,       \
                                                           const float *w, float *const *dx) {    \
        int64_t n = l->outputs, taps = taps_of(l);                                                \
        vec sum[P][VECTORS];                                                                      \
        memset(sum, 0, sizeof sum);                                                               \
        for (int64_t c = 0; c < n; c++, w += taps) {                                              \
            vec b[VECTORS];                                                                       \
            for (int v = 0; v < VECTORS; v++) b[v] = load(w + v * LANES);                         \
            for (int p = 0; p < P; p++) {                                                         \
                float a = dy[p * n + c];                                                          \
                for (int v = 0; v < VECTORS; v++) sum[p][v] += a * b[v];                          \
            }                                                                                     \
        }                                                                                         \
        for (int p = 0; p < P; p++) /* one after the other: windows overlap */                    \
            for (int v = 0; v < VECTORS; v++)                                                     \
                store(dx[p] + v * LANES, load(dx[p] + v * LANES) + sum[p][v]);                    \
    }
INPUTS(inputs_of_several, INPUT_POSITIONS)
INPUTS(inputs_of_one, 1)

/* dx from dy; w [outputs, kernel, kernel, channels]. */
static void find_inputs(const Layer *l, const float *dy, const float *w, float *dx) {
    int64_t n = l->outputs, line = line_of(l), positions = l->rows * l->columns;
    memset(dx, 0, sizeof(float) * values_in(l));
    for (int64_t first = 0, tile; first < positions; first += tile) {
        tile = first + INPUT_POSITIONS <= positions ? INPUT_POSITIONS : 1;
        for (int64_t y = 0; y < l->kernel; y++)
            for (int64_t j = 0; j < line; j += VECTORS * LANES) {
                float *to[INPUT_POSITIONS];
                for (int64_t p = 0; p < tile; p++)
                    to[p] = dx + window(l, first + p) + y * l->width * l->channels + j;
                const float *from = w + y * line + j;
                if (tile > 1) inputs_of_several(l, dy + first * n, from, to);
                else inputs_of_one(l, dy + first * n, from, to);
            }
    }
}

/* w [outputs, channels, kernel, kernel] -> packed [outputs, kernel, kernel, channels] */
static void pack_backward(const Layer *l, const float *w, float *packed) {
    int64_t area = l->kernel * l->kernel, taps = taps_of(l);
#pragma omp parallel for schedule(static)
    for (int64_t o = 0; o < l->outputs; o++)
        for (int64_t k = 0; k < area; k++)
            for (int64_t c = 0; c < l->channels; c++)
                packed[o * taps + k * l->channels + c] = w[o * taps + c * area + k];
}

/* The sum over parts of [kernel, kernel, channels, outputs], as the weights lie: [outputs, channels,
 * kernel, kernel]; and that of [outputs] behind them. `next` is the way from part to part. */
static void unpack(const Layer *l, const float *parts, int64_t count, int64_t next, float *dw,
                   float *db) {
    int64_t area = l->kernel * l->kernel, taps = taps_of(l), n = l->outputs;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += LANES) {
        for (int64_t c = 0; c < l->channels; c++)
            for (int64_t k = 0; k < area; k++) {
                const float *from = parts + (k * l->channels + c) * n + first;
                vec sum = load(from);
                for (int64_t part = 1; part < count; part++) sum += load(from + part * next);
                for (int64_t o = 0; o < LANES; o++)
                    dw[(first + o) * taps + c * area + k] = sum[o];
            }
        vec sum = load(parts + taps * n + first);
        for (int64_t part = 1; part < count; part++)
            sum += load(parts + taps * n + first + part * next);
        store(db + first, sum);
    }
}

/* What the weights w and the biases of all layers have to do with dfeatures: dw[k] [outputs,
 * channels, kernel, kernel] and db[k] [outputs]. x and y are those of `stack_forward`. `packed` has
 * room for all weights, `sums` for `parts` times all weights and biases. Returns 0, or 1 where there
 * is no memory. */
int64_t stack_backward(const Layer *layers, int64_t depth, const Images *x, const float *const *w,
                       const float *const *y, const float *dfeatures, float *packed, float *sums,
                       float *const *dw, float *const *db, int64_t count, int64_t parts) {
    const Layer *last = &layers[depth - 1];
    int64_t positions = last->rows * last->columns, n = last->outputs, failed = 0;
    int64_t most = most_values(layers, depth), all = 0, whole = 0;
    for (int64_t k = 0; k < depth; k++) {
        int64_t size = taps_of(&layers[k]) * layers[k].outputs;
        pack_backward(&layers[k], w[k], packed + all);
        all += size;
        whole += size + layers[k].outputs;
    }
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        int64_t size = 2 * most + (x->bytes ? values_in(&layers[0]) : 0);
        float *room = malloc(size * sizeof(float));
        if (!room) {
#pragma omp atomic write
            failed = 1;
            continue;
        }
        float *dy = room, *dx = room + most;
        memset(sums + part * whole, 0, whole * sizeof(float));
        for (int64_t i = count * part / parts; i < count * (part + 1) / parts; i++) {
            const float *given = dfeatures + i * positions * n;
            for (int64_t p = 0; p < positions; p++)
                for (int64_t c = 0; c < n; c++) dy[p * n + c] = given[c * positions + p];
            const float *weights = packed + all;
            float *sum = sums + (part + 1) * whole;
            for (int64_t k = depth - 1; k >= 0; k--) {
                const Layer *l = &layers[k];
                const float *own = y[k] + i * values_out(l);
                for (int64_t j = 0; j < values_out(l); j++) dy[j] = own[j] <= 0.0f ? 0.0f : dy[j];
                const float *from = k ? y[k - 1] + i * values_in(l)
                                      : image(x, l, i, room + 2 * most);
                int64_t taps = taps_of(l) * l->outputs;
                weights -= taps;
                sum -= taps + l->outputs;
                add_weights(l, from, dy, sum, sum + taps);
                if (k) {
                    find_inputs(l, dy, weights, dx);
                    float *other = dy;
                    dy = dx;
                    dx = other;
                }
            }
        }
        free(room);
    }
    for (int64_t k = 0, begin = 0; k < depth && !failed; k++) {
        unpack(&layers[k], sums + begin, parts, whole, dw[k], db[k]);
        begin += (taps_of(&layers[k]) + 1) * layers[k].outputs;
    }
    return failed;
}
