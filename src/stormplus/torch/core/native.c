/* The passes of the optimizers over all tensors of a bundle, in one call each.

   Plain C without Python or torch: kernels.py hands over pointers. A pass cuts the tensors into
   chunks, and the threads share the chunks. Squared norms are summed within a chunk and then in the
   order of the chunks, so that they do not depend on the number of threads. Products are not fused
   with sums (-ffp-contract=off), so that every element comes out as in the plain path, to one
   rounding. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 32768 /* elements; x, d and g of a chunk are 384 kB in float32 */

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

/* -- half precision, as bits ------------------------------------------------------------------- */

typedef struct {
    uint16_t bits;
} bf16;
typedef struct {
    uint16_t bits;
} f16;

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float load_bf16(bf16 v) { return from_bits((uint32_t)v.bits << 16); }

static inline bf16 store_bf16(float value) {
    uint32_t bits = to_bits(value);
    /* to nearest, ties to even; a nan stays one */
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    bf16 out = {(uint16_t)(value != value ? 0x7FC0 : rounded)};
    return out;
}

static inline float load_f16(f16 v) {
    uint32_t sign = (uint32_t)(v.bits & 0x8000) << 16, rest = v.bits & 0x7FFF;
    if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest << 13)); /* inf, nan */
    if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));
    float value = (float)rest * 5.9604644775390625e-8f; /* subnormal: a multiple of 2^-24 */
    return from_bits(sign | to_bits(value));
}

static inline f16 store_f16(float value) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
    uint32_t half;
    if (rest > 0x7F800000)
        half = 0x7E00; /* nan */
    else if (rest >= 0x477FF000)
        half = 0x7C00; /* rounds beyond the largest */
    else if (rest >= 0x38800000)
        half = (rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13;
    else /* subnormal: adding 0.5 lets the processor round to a multiple of 2^-24 */
        half = to_bits(from_bits(rest) + 0.5f) - 0x3F000000;
    f16 out = {(uint16_t)(sign | half)};
    return out;
}

#define LOAD_SAME(v) (v)
#define STORE_SAME(v) (v)

/* -- a chunk, for each dtype ------------------------------------------------------------------- */

/* What is constant in a call of INLINE is compiled away: a loop has no branch in it. */
#define INLINE static inline __attribute__((always_inline))

#define PASSES(NAME, X, D, LOAD, STORE, U, EXPONENT)                                               \
    /* Without its sign, a number is not finite if its bits are those of infinity or above. Four      \
       places are read at a time: a processor fetches several streams faster than one. */          \
    CLONES static int probe_##NAME(const U *g, int64_t n) {                                        \
        const U magnitude = (U)~((U)1 << (8 * sizeof(U) - 1));                                     \
        U a = 0, b = 0, c = 0, d = 0;                                                              \
        int64_t q = n / 4;                                                                         \
        _Pragma("omp simd reduction(max : a, b, c, d)") for (int64_t i = 0; i < q; i++) {          \
            U v = g[i] & magnitude, w = g[i + q] & magnitude;                                      \
            U y = g[i + 2 * q] & magnitude, z = g[i + 3 * q] & magnitude;                          \
            a = v > a ? v : a, b = w > b ? w : b, c = y > c ? y : c, d = z > d ? z : d;            \
        }                                                                                          \
        for (int64_t i = 4 * q; i < n; i++) {                                                      \
            U v = g[i] & magnitude;                                                                \
            a = v > a ? v : a;                                                                     \
        }                                                                                          \
        return a >= EXPONENT || b >= EXPONENT || c >= EXPONENT || d >= EXPONENT;                   \
    }                                                                                              \
                                                                                                   \
    INLINE void move_loop_##NAME(X *restrict x, D *restrict d, const X *restrict g, int64_t n,     \
                                 D alpha, D sign, D l2, D decoupled, int has_g, int decays) {      \
        for (int64_t i = 0; i < n; i++) {                                                          \
            D old = LOAD(x[i]), step = d[i], g_tilde = has_g ? sign * LOAD(g[i]) : 0;              \
            if (decays) {                                                                          \
                g_tilde += l2 * old;                                                               \
                step += decoupled * old;                                                           \
            }                                                                                      \
            x[i] = STORE(old - step * alpha); /* Alg. 1, line 4 */                                 \
            d[i] -= g_tilde;                  /* Alg. 1, line 6: the bracket */                    \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    CLONES static void move_##NAME(X *x, D *d, const X *g, int64_t n, D alpha, D sign, D l2,       \
                                   D decoupled) {                                                  \
        if (g == NULL)                                                                             \
            move_loop_##NAME(x, d, g, n, alpha, sign, l2, decoupled, 0, 1);                        \
        else if (l2 != 0 || decoupled != 0)                                                        \
            move_loop_##NAME(x, d, g, n, alpha, sign, l2, decoupled, 1, 1);                        \
        else                                                                                       \
            move_loop_##NAME(x, d, g, n, alpha, sign, 0, 0, 1, 0);                                 \
    }                                                                                              \
                                                                                                   \
    INLINE void estimate_loop_##NAME(const X *restrict x, D *restrict d, const X *restrict g,      \
                                     int64_t n, D keep, D sign, D l2, int has_g, int decays,       \
                                     int first, int guard, double *out) {                          \
        double g_sq = 0, d_sq = 0;                                                                 \
        _Pragma("omp simd reduction(+ : g_sq, d_sq)") for (int64_t i = 0; i < n; i++) {            \
            D value = has_g ? sign * LOAD(g[i]) : 0;                                               \
            if (decays) value += l2 * LOAD(x[i]);                                                  \
            g_sq += (double)value * (double)value;                                                 \
            if (guard) value = value - value == 0 ? value : 0;                                     \
            if (!first) value += d[i] * keep; /* Alg. 1, line 6; without d it is line 1 */         \
            d[i] = value;                                                                          \
            d_sq += (double)value * (double)value;                                                 \
        }                                                                                          \
        out[0] += g_sq;                                                                            \
        out[1] += d_sq;                                                                            \
    }                                                                                              \
                                                                                                   \
    CLONES static void estimate_##NAME(const X *x, D *d, const X *g, int64_t n, D keep, D sign,    \
                                       D l2, int first, int guard, double *out) {                  \
        if (first)                                                                                 \
            estimate_loop_##NAME(x, d, g, n, keep, sign, l2, g != NULL, l2 != 0, 1, 0, out);       \
        else if (g == NULL || l2 != 0)                                                             \
            estimate_loop_##NAME(x, d, g, n, keep, sign, l2, g != NULL, l2 != 0, 0, guard, out);   \
        else if (guard)                                                                            \
            estimate_loop_##NAME(x, d, g, n, keep, sign, 0, 1, 0, 0, 1, out);                      \
        else                                                                                       \
            estimate_loop_##NAME(x, d, g, n, keep, sign, 0, 1, 0, 0, 0, out);                      \
    }

PASSES(f32, float, float, LOAD_SAME, STORE_SAME, uint32_t, 0x7F800000u)
PASSES(f64, double, double, LOAD_SAME, STORE_SAME, uint64_t, 0x7FF0000000000000u)
PASSES(bf16, bf16, float, load_bf16, store_bf16, uint16_t, 0x7F80u)
PASSES(f16, f16, float, load_f16, store_f16, uint16_t, 0x7C00u)

/* -- all tensors of a bundle ------------------------------------------------------------------- */

/* Where each tensor's chunks begin in the list of all chunks; NULL without memory. */
static int64_t *first_chunks(int64_t count, const int64_t *sizes) {
    int64_t *first = malloc((size_t)(count + 1) * sizeof *first);
    if (first == NULL) return NULL;
    first[0] = 0;
    for (int64_t i = 0; i < count; i++) first[i + 1] = first[i] + (sizes[i] + CHUNK - 1) / CHUNK;
    return first;
}

static int64_t tensor_of(int64_t chunk, int64_t count, const int64_t *first) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (first[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* As many threads as have something to do: to wake one costs as much as some 2^16 elements, and far
   more if its core is busy. */
static int threads_for(int64_t count, const int64_t *sizes, int threads) {
    int64_t work = 0;
    for (int64_t i = 0; i < count; i++) work += sizes[i];
    int64_t useful = work / (2 * CHUNK);
    return useful < 1 ? 1 : useful < threads ? (int)useful : threads;
}

/* Runs DO for every chunk; a tensor's chunk is elements [start, start + n) of tensor i. BACKWARDS: from
   the last one on, which the pass before has left in the cache. */
#define FOR_CHUNKS(BACKWARDS, GIVE_UP, DO)                                                                    \
    int64_t *first = first_chunks(count, sizes);                                                   \
    if (first == NULL) {                                                                           \
        GIVE_UP;                                                                                   \
        return -1;                                                                                 \
    }                                                                                              \
    int64_t chunks = first[count];                                                                 \
    int used = threads_for(count, sizes, threads);                                                 \
    _Pragma("omp parallel for schedule(static) num_threads(used) if (used > 1)")                   \
    for (int64_t turn = 0; turn < chunks; turn++) {                                                \
        int64_t chunk = BACKWARDS ? chunks - 1 - turn : turn;                                      \
        int64_t i = tensor_of(chunk, count, first), start = (chunk - first[i]) * CHUNK;            \
        int64_t n = sizes[i] - start < CHUNK ? sizes[i] - start : CHUNK;                           \
        DO                                                                                         \
    }                                                                                              \
    free(first);

#define AT(X, pointers) ((pointers)[i] == NULL ? NULL : (X *)(pointers)[i] + start)

#define ENTRIES(NAME, X, D, U)                                                                     \
    /* 1 if a gradient is not finite, 0 if all are; -1 without memory */                           \
    int stormplus_probe_##NAME(int64_t count, const int64_t *sizes, void **g, int threads) {       \
        int found = 0;                                                                             \
        FOR_CHUNKS(0, (void)0, {                                                                   \
            if (g[i] != NULL && probe_##NAME(AT(const U, g), n)) {                                 \
                _Pragma("omp atomic write") found = 1;                                             \
            }                                                                                      \
        })                                                                                         \
        return found;                                                                              \
    }                                                                                              \
                                                                                                   \
    int stormplus_move_##NAME(int64_t count, const int64_t *sizes, void **x, void **d, void **g,   \
                              double alpha, double sign, double l2, double decoupled,              \
                              int threads) {                                                       \
        FOR_CHUNKS(1, (void)0, {                                                                   \
            move_##NAME(AT(X, x), AT(D, d), AT(const X, g), n, (D)alpha, (D)sign, (D)l2,           \
                        (D)decoupled);                                                             \
        })                                                                                         \
        return 0;                                                                                  \
    }                                                                                              \
                                                                                                   \
    int stormplus_estimate_##NAME(int64_t count, const int64_t *sizes, void **x, void **d,         \
                                  void **g, double keep, double sign, double l2, int is_first,     \
                                  int guard, double *out, int threads) {                           \
        int64_t total = 0;                                                                         \
        for (int64_t i = 0; i < count; i++) total += (sizes[i] + CHUNK - 1) / CHUNK;               \
        double *parts = calloc((size_t)(2 * total + 1), sizeof *parts);                            \
        if (parts == NULL) return -1;                                                              \
        FOR_CHUNKS(0, free(parts), {                                                               \
            estimate_##NAME(AT(const X, x), AT(D, d), AT(const X, g), n, (D)keep, (D)sign, (D)l2,  \
                            is_first, guard, parts + 2 * chunk);                                   \
        })                                                                                         \
        for (int64_t k = 0; k < total; k++) {                                                      \
            out[0] += parts[2 * k];                                                                \
            out[1] += parts[2 * k + 1];                                                            \
        }                                                                                          \
        free(parts);                                                                               \
        return 0;                                                                                  \
    }

ENTRIES(f32, float, float, uint32_t)
ENTRIES(f64, double, double, uint64_t)
ENTRIES(bf16, bf16, float, uint16_t)
ENTRIES(f16, f16, float, uint16_t)

/* -- Untuned: the whole step in one pass -------------------------------------------------------- */

/* Scatters 32 bits: neighbours come out far apart. As `_mixed` in untuned.py. */
static inline uint32_t mixed(uint32_t n) {
    n = (n ^ (n >> 16)) * 0x21F0AAADu;
    n = (n ^ (n >> 15)) * 0x735A2D97u;
    return n ^ (n >> 15);
}

/* Up or down with the odds that make it right in the mean. */
static inline bf16 store_at_random(float value, uint32_t place, uint32_t key) {
    bf16 out = {(uint16_t)((to_bits(value) + (mixed(mixed(place) ^ key) & 0xFFFF)) >> 16)};
    return out;
}

#define STORE_STATE(v, place, key) (v)

/* The parameter in full precision; a master that is no longer the same gives way to it. */
#define Y_SAME(y, x, LOAD, STORE) LOAD(x)
#define Y_MASTER(y, x, LOAD, STORE) (STORE(y).bits == (x).bits ? (y) : LOAD(x))

typedef struct {
    double alpha, limit, decay, w, c, sign, t;
} Step;

/* `numbers` has a row for each field. */
static inline Step step_of(const double *numbers, int64_t count, int64_t i) {
    Step step;
    double *fields[] = {&step.alpha, &step.limit, &step.decay, &step.w, &step.c, &step.sign, &step.t};
    for (int k = 0; k < 7; k++) *fields[k] = numbers[k * count + i];
    return step;
}

/* s and u = g / s. The squares of 1e-20 and 1e20 are no float32: both are brought near 1 first, by a
   power of two, which is exact. 0/0 is 0. */
INLINE float unit_float(float g, float old, float keep, float w, float *u) {
    uint32_t a = to_bits(g) & 0x7FFFFFFF, b = to_bits(old), larger = a > b ? a : b;
    uint32_t exponent = larger & 0x7F800000;
    exponent = exponent < 0x00800000 ? 0x00800000 : exponent > 0x7E800000 ? 0x7E800000 : exponent;
    float scale = from_bits(exponent), inverse = from_bits(0x7F000000 - exponent);
    float near_g = g * inverse, near_s = old * inverse;
    float root = __builtin_sqrtf(keep * (near_s * near_s) + w * (near_g * near_g));
    *u = near_g / (root == 0 ? 1 : root);
    return root * scale;
}

INLINE double unit_double(double g, double old, double keep, double w, double *u) {
    double s = __builtin_sqrt(keep * (old * old) + w * (g * g));
    *u = s == 0 ? 0 : g / s;
    return s;
}

#define PORTION 2048
#define B 0.9 /* INTERPOLATION in rules.py */

/* W is the dtype of the arithmetic, S that of the buffers. */
#define UNTUNED(NAME, X, W, S, LOAD, STORE, LOAD_S, STORE_S, Y, MASTERED)                          \
    INLINE W untuned_loop_##NAME(     X *restrict x, const X *restrict g, S *restrict lead,        \
                                      S *restrict unit, W *restrict master, int64_t n, Step step,  \
                                      int64_t start, int decays) {                                 \
        const W alpha = (W)step.alpha, limit = (W)step.limit, decay = (W)step.decay;               \
        const W keep = (W)(1 - step.c), ahead = (W)(step.c + (1 - B) * (1 - step.c));              \
        const W w = (W)step.w, rest = (W)(1 - step.w), sign = (W)step.sign;                        \
        const uint32_t key = mixed((uint32_t)(2 * (uint64_t)step.t));                              \
        const uint32_t other = mixed((uint32_t)(2 * (uint64_t)step.t + 1));                        \
        W u_sq = 0;                                                                                \
        _Pragma("omp simd reduction(+ : u_sq)") for (int64_t i = 0; i < n; i++) {                  \
            uint32_t place = (uint32_t)(start + i);                                                \
            (void)place, (void)key, (void)other;                                                   \
            W u, s = unit_##W(sign * LOAD(g[i]), LOAD_S(unit[i]), rest, w, &u);                    \
            u_sq += u * u;                                                                         \
            W y = MASTERED ? Y(master[i], x[i], LOAD, STORE) : LOAD(x[i]);                         \
            W e = LOAD_S(lead[i]), move = u * alpha;                                               \
            move = move > limit ? limit : move < -limit ? -limit : move;                           \
            if (decays) move += decay * (y + (W)B * e);                                            \
            W m = e - move;                                                                        \
            y += ahead * m - (W)(1 - B) * e;                                                       \
            x[i] = STORE(y);                                                                       \
            if (MASTERED) master[i] = y;                                                           \
            lead[i] = STORE_S(keep * m, place, key);                                               \
            unit[i] = STORE_S(s, place, other);                                                    \
        }                                                                                          \
        return u_sq;                                                                               \
    }                                                                                              \
                                                                                                   \
    /* What is counted is a mean of squares, and float32 will do for a few at a time. */           \
    CLONES static double untuned_##NAME(X *x, const X *g, S *lead, S *unit, W *master, int64_t n,  \
                                        Step step, int64_t start) {                                \
        double u_sq = 0;                                                                           \
        for (int64_t i = 0; i < n; i += PORTION) {                                                 \
            int64_t m = n - i < PORTION ? n - i : PORTION;                                         \
            W *wide = MASTERED ? master + i : NULL;                                                \
            u_sq += step.decay != 0 ? untuned_loop_##NAME(x + i, g + i, lead + i, unit + i, wide,  \
                                                          m, step, start + i, 1)                   \
                                    : untuned_loop_##NAME(x + i, g + i, lead + i, unit + i, wide,  \
                                                          m, step, start + i, 0);                  \
        }                                                                                          \
        return u_sq;                                                                               \
    }                                                                                              \
                                                                                                   \
    /* |z - z_1|^2 over every stride-th element, while the chunk is in the cache. */               \
    INLINE double moved_loop_##NAME(const X *x, const S *lead, const W *master,                    \
                                    const W *origin, int64_t n, int64_t start, int64_t stride) {   \
        double moved = 0;                                                                          \
        int64_t first = (start + stride - 1) / stride, end = (start + n + stride - 1) / stride;    \
        _Pragma("omp simd reduction(+ : moved)") for (int64_t k = first; k < end; k++) {           \
            int64_t i = k * stride - start;                                                        \
            /* A half-precision x can be infinite where its master is not. */                      \
            W y = MASTERED ? master[i] + 0 * LOAD(x[i]) : LOAD(x[i]);                              \
            double away = (double)(y + (W)B * LOAD_S(lead[i]) - origin[k]);                        \
            moved += away * away;                                                                  \
        }                                                                                          \
        return moved;                                                                              \
    }                                                                                              \
                                                                                                   \
    CLONES static double untuned_moved_##NAME(const X *x, const S *lead, const W *master,          \
                                              const W *origin, int64_t n, int64_t start,           \
                                              int64_t stride) {                                    \
        if (stride == 0) return 0;                                                                 \
        return stride == 1 ? moved_loop_##NAME(x, lead, master, origin, n, start, 1)               \
                           : moved_loop_##NAME(x, lead, master, origin, n, start, stride);         \
    }

UNTUNED(f32, float, float, float, LOAD_SAME, STORE_SAME, LOAD_SAME, STORE_STATE, Y_SAME, 0)
UNTUNED(f64, double, double, double, LOAD_SAME, STORE_SAME, LOAD_SAME, STORE_STATE, Y_SAME, 0)
UNTUNED(bf16, bf16, float, float, load_bf16, store_bf16, LOAD_SAME, STORE_STATE, Y_MASTER, 1)
UNTUNED(f16, f16, float, float, load_f16, store_f16, LOAD_SAME, STORE_STATE, Y_MASTER, 1)
UNTUNED(bf16_f32, float, float, bf16, LOAD_SAME, STORE_SAME, load_bf16, store_at_random, Y_SAME, 0)
UNTUNED(bf16_bf16, bf16, float, bf16, load_bf16, store_bf16, load_bf16, store_at_random, Y_MASTER, 1)
UNTUNED(bf16_f16, f16, float, bf16, load_f16, store_f16, load_bf16, store_at_random, Y_MASTER, 1)

/* `out` has two rows: the sums of (g / s)^2 and of |z - z_1|^2, added in the order of the chunks,
   whatever the number of threads. */
#define UNTUNED_ENTRY(NAME, X, W, S)                                                               \
    int stormplus_untuned_##NAME(int64_t count, const int64_t *sizes, void **x, void **g,          \
                                 void **lead, void **unit, void **origin, void **master,           \
                                 const int64_t *strides, const double *numbers, double *out,       \
                                 int threads) {                                                    \
        int64_t total = 0;                                                                         \
        for (int64_t i = 0; i < count; i++) total += (sizes[i] + CHUNK - 1) / CHUNK;               \
        double *parts = calloc((size_t)(2 * total + 1), sizeof *parts);                            \
        int64_t *owner = malloc((size_t)(total + 1) * sizeof *owner);                              \
        if (parts == NULL || owner == NULL) {                                                      \
            free(parts);                                                                           \
            free(owner);                                                                           \
            return -1;                                                                             \
        }                                                                                          \
        FOR_CHUNKS(1, free(parts); free(owner), {                                                   \
            Step step = step_of(numbers, count, i);                                                \
            W *wide = AT(W, master);                                                               \
            owner[chunk] = i;                                                                      \
            parts[2 * chunk] = untuned_##NAME(AT(X, x), AT(const X, g), AT(S, lead), AT(S, unit),  \
                                              wide, n, step, start);                               \
            parts[2 * chunk + 1] = untuned_moved_##NAME(                                           \
                AT(const X, x), AT(const S, lead), wide, (const W *)origin[i], n, start,           \
                strides[i]);                                                                       \
        })                                                                                         \
        for (int64_t k = 0; k < total; k++) {                                                      \
            out[owner[k]] += parts[2 * k];                                                         \
            out[count + owner[k]] += parts[2 * k + 1];                                             \
        }                                                                                          \
        free(parts);                                                                               \
        free(owner);                                                                               \
        return 0;                                                                                  \
    }

UNTUNED_ENTRY(f32, float, float, float)
UNTUNED_ENTRY(f64, double, double, double)
UNTUNED_ENTRY(bf16, bf16, float, float)
UNTUNED_ENTRY(f16, f16, float, float)
UNTUNED_ENTRY(bf16_f32, float, float, bf16)
UNTUNED_ENTRY(bf16_bf16, bf16, float, bf16)
UNTUNED_ENTRY(bf16_f16, f16, float, bf16)
