/* The passes of plain.py over lists of tensors, one call each.

   Plain C without Python or torch: native.py passes pointers. A pass cuts the tensors into chunks, and the
   threads share the chunks. Sums are taken within a chunk and then in the order of the chunks, so that they do
   not depend on the number of threads. Products are not fused with sums (-ffp-contract=off), so that every
   element equals that of the plain pass, to one rounding. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 32768  /* elements; x, d and g of a chunk are 384 kB in float32 */
#define PORTION 2048 /* elements whose u^2 are summed in float32 */
#define B 0.9        /* INTERPOLATION in untuned_rule.py */

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

/* What is constant in a call of an INLINE function is compiled away: its loop has no branch. */
#define INLINE static inline __attribute__((always_inline))

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
    /* to nearest, ties to even; NaN is kept */
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
        half = 0x7C00; /* rounds to infinity */
    else if (rest >= 0x38800000)
        half = (rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13;
    else /* subnormal: adding 0.5 lets the processor round to a multiple of 2^-24 */
        half = to_bits(from_bits(rest) + 0.5f) - 0x3F000000;
    f16 out = {(uint16_t)(sign | half)};
    return out;
}

#define LOAD_SAME(v) (v)
#define STORE_SAME(v) (v)

/* -- lists of tensors ------------------------------------------------------------------------------ */

/* In the order of `_table` in native.py; what a pass does not use is zero. */
typedef struct {
    int64_t size;
    void *param, *grad, *estimator, *z_minus_x, *grad_rms, *initial_sample, *master;
    int64_t stride, offset; /* of the sample */
} Tensor;

/* The chunks of all tensors, numbered in order: tensor i has those from first[i] to first[i + 1] - 1. */
typedef struct {
    int64_t *first;
    double *sums; /* two per chunk */
    int threads;
} Chunks;

static void free_chunks(Chunks *chunks) {
    free(chunks->first);
    free(chunks->sums);
}

/* As many threads as have something to do: waking one costs as much as some 2^16 elements, and far more if
   its core is busy. Returns 0 if there is no memory. */
static int make_chunks(Chunks *chunks, const Tensor *tensors, int64_t count, int threads) {
    int64_t elements = 0;
    chunks->sums = NULL;
    chunks->first = malloc((size_t)(count + 1) * sizeof *chunks->first);
    if (chunks->first == NULL) return 0;
    chunks->first[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        chunks->first[i + 1] = chunks->first[i] + (tensors[i].size + CHUNK - 1) / CHUNK;
        elements += tensors[i].size;
    }
    int64_t useful = elements / (2 * CHUNK);
    chunks->threads = useful < 1 ? 1 : useful < threads ? (int)useful : threads;
    chunks->sums = calloc((size_t)(2 * chunks->first[count] + 1), sizeof *chunks->sums);
    if (chunks->sums == NULL) free_chunks(chunks);
    return chunks->sums != NULL;
}

static int64_t tensor_of(const Chunks *chunks, int64_t count, int64_t chunk) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (chunks->first[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Makes `chunks`, and runs DO for each: elements [start, start + n) of tensor t. Without memory it returns -1.
   A pass that goes BACKWARDS begins with what the pass before it has left in the cache. */
#define FOR_CHUNKS(BACKWARDS, DO)                                                                                \
    Chunks chunks;                                                                                               \
    if (!make_chunks(&chunks, tensors, count, threads)) return -1;                                               \
    int64_t all = chunks.first[count];                                                                           \
    _Pragma("omp parallel for schedule(static) num_threads(chunks.threads) if (chunks.threads > 1)")             \
    for (int64_t turn = 0; turn < all; turn++) {                                                                 \
        int64_t chunk = BACKWARDS ? all - 1 - turn : turn, i = tensor_of(&chunks, count, chunk);                 \
        int64_t start = (chunk - chunks.first[i]) * CHUNK;                                                       \
        const Tensor *t = tensors + i;                                                                           \
        int64_t n = t->size - start < CHUNK ? t->size - start : CHUNK;                                           \
        DO                                                                                                       \
    }

/* -- pairs of gradients -------------------------------------------------------------------------- */

/* What is minimized; the same fields as `Objective` in _tensors.py. */
typedef struct {
    double sign, l2;
} Objective;

/* X is the parameters' type, D the estimators', U an unsigned integer of X's size, INFINITY_BITS infinity. */
#define PAIR_PASSES(NAME, X, D, LOAD, STORE, U, INFINITY_BITS)                                                   \
    /* Without its sign, a number is not finite if its bits are those of infinity or above. Four places are read \
       at a time: a processor fetches several streams faster than one. */                                        \
    CLONES static int chunk_nonfinite_##NAME(const U *g, int64_t n) {                                            \
        const U magnitude = (U)~((U)1 << (8 * sizeof(U) - 1));                                                   \
        U a = 0, b = 0, c = 0, d = 0;                                                                            \
        int64_t q = n / 4;                                                                                       \
        _Pragma("omp simd reduction(max : a, b, c, d)") for (int64_t i = 0; i < q; i++) {                        \
            U v = g[i] & magnitude, w = g[i + q] & magnitude;                                                    \
            U y = g[i + 2 * q] & magnitude, z = g[i + 3 * q] & magnitude;                                        \
            a = v > a ? v : a, b = w > b ? w : b, c = y > c ? y : c, d = z > d ? z : d;                          \
        }                                                                                                        \
        for (int64_t i = 4 * q; i < n; i++) {                                                                    \
            U v = g[i] & magnitude;                                                                              \
            a = v > a ? v : a;                                                                                   \
        }                                                                                                        \
        return a >= INFINITY_BITS || b >= INFINITY_BITS || c >= INFINITY_BITS || d >= INFINITY_BITS;             \
    }                                                                                                            \
                                                                                                                 \
    INLINE void move_loop_##NAME(X *restrict x, const X *restrict g, D *restrict d, int64_t n, D alpha, D sign,  \
                                 D l2, int decays) {                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                        \
            D old = LOAD(x[i]), g_tilde = sign * LOAD(g[i]);                                                     \
            if (decays)                                                                                          \
                g_tilde += l2 * old;                                                                             \
            x[i] = STORE(old - d[i] * alpha); /* Alg. 1, line 4 */                                               \
            d[i] -= g_tilde;                  /* Alg. 1, line 6: the bracket */                                  \
        }                                                                                                        \
    }                                                                                                            \
                                                                                                                 \
    CLONES static void chunk_move_##NAME(X *x, const X *g, D *d, int64_t n, D alpha, Objective o) {              \
        if (o.l2 != 0)                                                                                           \
            move_loop_##NAME(x, g, d, n, alpha, (D)o.sign, (D)o.l2, 1);                                          \
        else                                                                                                     \
            move_loop_##NAME(x, g, d, n, alpha, (D)o.sign, 0, 0);                                                \
    }                                                                                                            \
                                                                                                                 \
    INLINE void estimate_loop_##NAME(const X *restrict x, const X *restrict g, D *restrict d, int64_t n,         \
                                     D one_minus_a, D sign, D l2, int decays, int first, int finite_only,        \
                                     double *sums) {                                                             \
        double g_sq = 0, d_sq = 0;                                                                               \
        _Pragma("omp simd reduction(+ : g_sq, d_sq)") for (int64_t i = 0; i < n; i++) {                          \
            D value = sign * LOAD(g[i]);                                                                         \
            if (decays) value += l2 * LOAD(x[i]);                                                                \
            g_sq += (double)value * (double)value;                                                               \
            if (finite_only) value = value - value == 0 ? value : 0;                                             \
            if (!first) value += d[i] * one_minus_a; /* Alg. 1, line 6; without d it is line 1 */                \
            d[i] = value;                                                                                        \
            d_sq += (double)value * (double)value;                                                               \
        }                                                                                                        \
        sums[0] = g_sq;                                                                                          \
        sums[1] = d_sq;                                                                                          \
    }                                                                                                            \
                                                                                                                 \
    CLONES static void chunk_estimate_##NAME(const X *x, const X *g, D *d, int64_t n, D one_minus_a, Objective o, \
                                             int first, int finite_only, double *sums) {                         \
        const D sign = (D)o.sign, l2 = (D)o.l2;                                                                  \
        if (first)                                                                                               \
            estimate_loop_##NAME(x, g, d, n, 0, sign, l2, l2 != 0, 1, finite_only, sums);                        \
        else if (l2 != 0)                                                                                        \
            estimate_loop_##NAME(x, g, d, n, one_minus_a, sign, l2, 1, 0, finite_only, sums);                    \
        else                                                                                                     \
            estimate_loop_##NAME(x, g, d, n, one_minus_a, sign, 0, 0, 0, finite_only, sums);                     \
    }                                                                                                            \
                                                                                                                 \
    /* Returns 1 if a gradient is not finite. */                                                                 \
    int stormplus_any_nonfinite_##NAME(const Tensor *tensors, int64_t count, int threads) {                      \
        int found = 0;                                                                                           \
        FOR_CHUNKS(0, {                                                                                          \
            if (chunk_nonfinite_##NAME((const U *)t->grad + start, n)) {                                         \
                _Pragma("omp atomic write") found = 1;                                                           \
            }                                                                                                    \
        })                                                                                                       \
        free_chunks(&chunks);                                                                                    \
        return found;                                                                                            \
    }                                                                                                            \
                                                                                                                 \
    int stormplus_move_##NAME(const Tensor *tensors, int64_t count, int threads, double alpha,                   \
                              const Objective *objective) {                                                      \
        FOR_CHUNKS(1, {                                                                                          \
            chunk_move_##NAME((X *)t->param + start, (const X *)t->grad + start, (D *)t->estimator + start, n,   \
                              (D)alpha, *objective);                                                             \
        })                                                                                                       \
        free_chunks(&chunks);                                                                                    \
        return 0;                                                                                                \
    }                                                                                                            \
                                                                                                                 \
    /* `sums` gets |g|^2 and |d|^2. */                                                                           \
    int stormplus_estimate_##NAME(const Tensor *tensors, int64_t count, int threads, double one_minus_a,         \
                                  const Objective *objective, int first, int finite_only, double *sums) {        \
        FOR_CHUNKS(0, {                                                                                          \
            chunk_estimate_##NAME((const X *)t->param + start, (const X *)t->grad + start,                       \
                                  (D *)t->estimator + start, n, (D)one_minus_a, *objective, first, finite_only,  \
                                  chunks.sums + 2 * chunk);                                                      \
        })                                                                                                       \
        for (int64_t k = 0; k < 2 * all; k++) sums[k % 2] += chunks.sums[k];                                     \
        free_chunks(&chunks);                                                                                    \
        return 0;                                                                                                \
    }

PAIR_PASSES(f32, float, float, LOAD_SAME, STORE_SAME, uint32_t, 0x7F800000u)
PAIR_PASSES(f64, double, double, LOAD_SAME, STORE_SAME, uint64_t, 0x7FF0000000000000u)
PAIR_PASSES(bf16, bf16, float, load_bf16, store_bf16, uint16_t, 0x7F80u)
PAIR_PASSES(f16, f16, float, load_f16, store_f16, uint16_t, 0x7C00u)

/* -- Untuned: the whole step in one pass ------------------------------------------------------------ */

/* Of one tensor; the same fields as `UntunedCoefficients` in plain.py. */
typedef struct {
    double step_size, max_move, decay, grad_weight, average_weight, grad_factor, step;
} Coefficients;

/* Hashes 32 bits; the same as `mix_bits` in plain.py. */
static inline uint32_t mix_bits(uint32_t n) {
    n = (n ^ (n >> 16)) * 0x21F0AAADu;
    n = (n ^ (n >> 15)) * 0x735A2D97u;
    return n ^ (n >> 15);
}

/* Rounds up or down with probabilities that make the mean exact; the same as `stochastic_round` in plain.py. */
static inline bf16 store_stochastic(float value, uint32_t place, uint32_t key) {
    uint32_t rounded = (to_bits(value) + (mix_bits(mix_bits(place) ^ key) & 0xFFFF)) >> 16;
    bf16 out = {(uint16_t)(value != value ? 0x7FC0 : rounded)};
    return out;
}

#define STORE_EXACT(v, place, key) (v)

/* y: the parameter, or its master where that still rounds to it. */
#define Y_SAME(y, x, LOAD, STORE) LOAD(x)
#define Y_MASTER(y, x, LOAD, STORE) (STORE(y).bits == (x).bits ? (y) : LOAD(x))

/* Returns s, and u = g / s with 0/0 = 0. The squares of 1e-20 and 1e20 are no float32, so both numbers are
   first scaled by a power of two, which is exact, such that the larger one is near 1. */
#define UPDATE_RMS(FLOAT, UINT, EXPONENT, LOWEST, HIGHEST, ONE_TWICE, SQRT)                                      \
    INLINE FLOAT update_rms_##FLOAT(FLOAT g, FLOAT old, FLOAT rest, FLOAT w, FLOAT *u) {                         \
        UINT g_bits, s_bits;                                                                                     \
        memcpy(&g_bits, &g, sizeof g), memcpy(&s_bits, &old, sizeof old);                                        \
        g_bits &= (UINT) ~((UINT)1 << (8 * sizeof(UINT) - 1));                                                   \
        UINT exponent = (g_bits > s_bits ? g_bits : s_bits) & EXPONENT;                                          \
        exponent = exponent < LOWEST ? LOWEST : exponent > HIGHEST ? HIGHEST : exponent;                         \
        UINT inverse_bits = ONE_TWICE - exponent;                                                                \
        FLOAT scale, inverse;                                                                                    \
        memcpy(&scale, &exponent, sizeof scale), memcpy(&inverse, &inverse_bits, sizeof inverse);                \
        FLOAT near_g = g * inverse, near_s = old * inverse;                                                      \
        FLOAT root = SQRT(rest * (near_s * near_s) + w * (near_g * near_g));                                     \
        *u = near_g / (root == 0 ? 1 : root);                                                                    \
        return root * scale;                                                                                     \
    }

UPDATE_RMS(float, uint32_t, 0x7F800000u, 0x00800000u, 0x7E800000u, 0x7F000000u, __builtin_sqrtf)
UPDATE_RMS(double, uint64_t, 0x7FF0000000000000u, 0x0010000000000000u, 0x7FD0000000000000u,
           0x7FE0000000000000u, __builtin_sqrt)

/* W is the type of the arithmetic, S that of the two buffers. The algebra is in plain.py. */
#define UNTUNED_PASS(NAME, X, W, S, LOAD, STORE, LOAD_S, STORE_S, Y, MASTERED)                                   \
    INLINE W untuned_loop_##NAME(X *restrict x, const X *restrict g, S *restrict z_minus_x,                      \
                                 S *restrict grad_rms, W *restrict master, int64_t n, const Coefficients *by,    \
                                 int64_t place, int decays) {                                                    \
        const W alpha = (W)by->step_size, limit = (W)by->max_move, decay = (W)by->decay;                         \
        const double c = by->average_weight;                                                                     \
        const W kept = (W)(1 - c), ahead = (W)(c + (1 - B) * (1 - c));                                           \
        const W w = (W)by->grad_weight, rest = (W)(1 - by->grad_weight), grad_factor = (W)by->grad_factor;       \
        const uint32_t key_e = mix_bits((uint32_t)(2 * (uint64_t)by->step));                                     \
        const uint32_t key_s = mix_bits((uint32_t)(2 * (uint64_t)by->step + 1));                                 \
        W u_sq = 0;                                                                                              \
        (void)key_e, (void)key_s, (void)place;                                                                   \
        _Pragma("omp simd reduction(+ : u_sq)") for (int64_t i = 0; i < n; i++) {                                \
            W u, s = update_rms_##W(grad_factor * LOAD(g[i]), LOAD_S(grad_rms[i]), rest, w, &u);                 \
            u_sq += u * u;                                                                                       \
            W y = MASTERED ? Y(master[i], x[i], LOAD, STORE) : LOAD(x[i]);                                       \
            W e = LOAD_S(z_minus_x[i]), move = u * alpha;                                                        \
            move = move > limit ? limit : move < -limit ? -limit : move;                                         \
            if (decays) move += decay * (y + (W)B * e);                                                          \
            W m = e - move;                                                                                      \
            y += ahead * m - (W)(1 - B) * e;                                                                     \
            x[i] = STORE(y);                                                                                     \
            if (MASTERED) master[i] = y;                                                                         \
            z_minus_x[i] = STORE_S(kept * m, (uint32_t)(place + i), key_e);                                      \
            grad_rms[i] = STORE_S(s, (uint32_t)(place + i), key_s);                                              \
        }                                                                                                        \
        return u_sq;                                                                                             \
    }                                                                                                            \
                                                                                                                 \
    /* Returns the sum of (z - z_1)^2 over the sampled elements, while the chunk is in the cache. */             \
    INLINE double moved_loop_##NAME(const X *x, const S *z_minus_x, const W *master, const W *z_1, int64_t n,    \
                                    int64_t place, int64_t stride) {                                             \
        double moved_sq = 0;                                                                                     \
        int64_t first = (place + stride - 1) / stride, end = (place + n + stride - 1) / stride;                  \
        _Pragma("omp simd reduction(+ : moved_sq)") for (int64_t k = first; k < end; k++) {                      \
            int64_t i = k * stride - place;                                                                      \
            /* A half-precision x can be infinite where its master is not. */                                    \
            W y = MASTERED ? master[i] + 0 * LOAD(x[i]) : LOAD(x[i]);                                            \
            double moved = (double)(y + (W)B * LOAD_S(z_minus_x[i]) - z_1[k]);                                   \
            moved_sq += moved * moved;                                                                           \
        }                                                                                                        \
        return moved_sq;                                                                                         \
    }                                                                                                            \
                                                                                                                 \
    CLONES static void chunk_untuned_##NAME(const Tensor *t, int64_t start, int64_t n, const Coefficients *by,   \
                                            double *sums) {                                                      \
        X *x = (X *)t->param + start;                                                                            \
        const X *g = (const X *)t->grad + start;                                                                 \
        S *e = (S *)t->z_minus_x + start, *s = (S *)t->grad_rms + start;                                         \
        W *master = MASTERED ? (W *)t->master + start : NULL;                                                    \
        int64_t place = t->offset + start;                                                                       \
        for (int64_t i = 0; i < n; i += PORTION) {                                                               \
            int64_t m = n - i < PORTION ? n - i : PORTION;                                                       \
            W *wide = MASTERED ? master + i : NULL;                                                              \
            sums[0] += by->decay != 0                                                                            \
                           ? untuned_loop_##NAME(x + i, g + i, e + i, s + i, wide, m, by, place + i, 1)          \
                           : untuned_loop_##NAME(x + i, g + i, e + i, s + i, wide, m, by, place + i, 0);         \
        }                                                                                                        \
        if (t->stride == 1)                                                                                      \
            sums[1] = moved_loop_##NAME(x, e, master, t->initial_sample, n, place, 1);                           \
        else if (t->stride > 1)                                                                                  \
            sums[1] = moved_loop_##NAME(x, e, master, t->initial_sample, n, place, t->stride);                   \
    }                                                                                                            \
                                                                                                                 \
    /* `sums` has two rows with one entry per tensor: the sums of u^2 and of (z - z_1)^2. */                     \
    int stormplus_untuned_step##NAME(const Tensor *tensors, int64_t count, int threads,                          \
                                     const Coefficients *coefficients, double *sums) {                           \
        FOR_CHUNKS(1, { chunk_untuned_##NAME(t, start, n, coefficients + i, chunks.sums + 2 * chunk); })         \
        for (int64_t i = 0; i < count; i++)                                                                      \
            for (int64_t k = chunks.first[i]; k < chunks.first[i + 1]; k++) {                                    \
                sums[i] += chunks.sums[2 * k];                                                                   \
                sums[count + i] += chunks.sums[2 * k + 1];                                                       \
            }                                                                                                    \
        free_chunks(&chunks);                                                                                    \
        return 0;                                                                                                \
    }

UNTUNED_PASS(_f32, float, float, float, LOAD_SAME, STORE_SAME, LOAD_SAME, STORE_EXACT, Y_SAME, 0)
UNTUNED_PASS(_f64, double, double, double, LOAD_SAME, STORE_SAME, LOAD_SAME, STORE_EXACT, Y_SAME, 0)
UNTUNED_PASS(_bf16, bf16, float, float, load_bf16, store_bf16, LOAD_SAME, STORE_EXACT, Y_MASTER, 1)
UNTUNED_PASS(_f16, f16, float, float, load_f16, store_f16, LOAD_SAME, STORE_EXACT, Y_MASTER, 1)
UNTUNED_PASS(_bf16_state_f32, float, float, bf16, LOAD_SAME, STORE_SAME, load_bf16, store_stochastic, Y_SAME, 0)
UNTUNED_PASS(_bf16_state_bf16, bf16, float, bf16, load_bf16, store_bf16, load_bf16, store_stochastic, Y_MASTER, 1)
UNTUNED_PASS(_bf16_state_f16, f16, float, bf16, load_f16, store_f16, load_bf16, store_stochastic, Y_MASTER, 1)
