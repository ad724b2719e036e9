/* The passes of plain.py over lists of tensors, one call each, in plain C: native.py passes pointers.

   A pass cuts the tensors into chunks, which the threads share. Sums are taken within a chunk and
   then in the order of the chunks, so that they do not depend on the number of threads. Products are
   not fused with sums (-ffp-contract=off), so that every element equals that of the plain pass, to
   one rounding.

   This file includes itself twice: its last part, the loops, is compiled for float and for double. */

#ifndef WIDE

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 32768  /* elements; x, d and g of a chunk are 384 kB in float32 */
#define PORTION 2048 /* elements whose u^2 are summed in float32 */
#define B 0.9        /* INTERPOLATION in untuned_rule.py */

#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
/* A dtype that is constant in the call of an INLINE function is compiled away. */
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CLONES
#endif

typedef enum { F32, F64, BF16, F16 } Dtype; /* in the order of native.py */

/* Of one tensor; the fields of `UntunedCoefficients` in plain.py. */
typedef struct {
    double alpha, max_move, decay, grad_weight, average_weight, grad_factor, step;
} Coefficients;

/* How many coordinates of a tensor are sampled: every k-th one or, where the stride is 0, which, and
   where they are in the whole sample. */
typedef struct {
    int64_t count, stride;
    const int64_t *index, *in_whole;
} Sample;

/* The fields of `_Arguments` in native.py; what a pass does not use is zero. */
typedef struct {
    int64_t count; /* of tensors; each of the lists has one entry per tensor */
    const int64_t *sizes;
    void *const *params, *const *grads, *const *estimators;
    void *const *z_minus_x, *const *grad_rms, *const *initial_sample, *const *masters;
    const Sample *samples;
    double *sums; /* two per tensor: |g|^2 and |d|^2, or the sums of u^2 and of (z - z_1)^2 */
    int threads;
    double sign, l2;          /* -1 to maximize; weight decay as part of the objective */
    Dtype dtype, state_dtype; /* of the parameters, and of the two buffers of Untuned */
    double alpha, one_minus_a;
    int finite_only;
    const Coefficients *coefficients; /* one per tensor */
} Arguments;

/* Elements [start, stop) of a tensor, and their sums. */
typedef struct {
    int64_t tensor, start, stop;
    double sums[2];
} Chunk;

/* -- numbers in memory --------------------------------------------------------------------------- */

typedef union {
    float value;
    uint32_t bits;
} Float;

INLINE float from_bits(uint32_t bits) { return ((Float){.bits = bits}).value; }

INLINE uint32_t to_bits(float value) { return ((Float){.value = value}).bits; }

INLINE float from_half(uint16_t half, Dtype dtype) {
    if (dtype == BF16) return from_bits((uint32_t)half << 16);
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest << 13)); /* inf, nan */
    if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));
    return from_bits(sign | to_bits((float)rest * 0x1p-24f)); /* subnormal */
}

/* Rounds to nearest, ties to even. */
INLINE uint16_t to_half(float value, Dtype dtype) {
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
    if (dtype == BF16) return value != value ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    if (rest > 0x7F800000) return sign | 0x7E00;  /* nan */
    if (rest >= 0x477FF000) return sign | 0x7C00; /* rounds to infinity */
    if (rest >= 0x38800000) return sign | (rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13;
    /* Subnormal: adding 0.5 lets the processor round to a multiple of 2^-24. */
    return sign | (to_bits(from_bits(rest) + 0.5f) - 0x3F000000);
}

/* A float that becomes a double and a float again is the same: the compiler leaves both out. */
INLINE double load(const void *data, int64_t i, Dtype dtype) {
    if (dtype == F64) return ((const double *)data)[i];
    if (dtype == F32) return ((const float *)data)[i];
    return from_half(((const uint16_t *)data)[i], dtype);
}

INLINE void store(void *data, int64_t i, double value, Dtype dtype) {
    if (dtype == F64)
        ((double *)data)[i] = value;
    else if (dtype == F32)
        ((float *)data)[i] = (float)value;
    else
        ((uint16_t *)data)[i] = to_half((float)value, dtype);
}

/* Hashes 32 bits; the same as `mix_bits` in plain.py. */
INLINE uint32_t mix_bits(uint32_t n) {
    n = (n ^ (n >> 16)) * 0x21F0AAADu;
    n = (n ^ (n >> 15)) * 0x735A2D97u;
    return n ^ (n >> 15);
}

/* Stores, to bfloat16 as `stochastic_round` in plain.py. */
INLINE void store_state(void *data, int64_t i, double value, Dtype dtype, uint32_t key) {
    if (dtype != BF16) {
        store(data, i, value, dtype);
        return;
    }
    uint32_t random_bits = mix_bits(mix_bits((uint32_t)i) ^ key) & 0xFFFF;
    uint32_t rounded = (to_bits((float)value) + random_bits) >> 16;
    ((uint16_t *)data)[i] = (uint16_t)(value != value ? 0x7FC0 : rounded);
}

/* Returns which of the n sampled coordinates, in ascending order, is the first at `place` or after. */
static int64_t first_sample(const int64_t *index, int64_t n, int64_t stride, int64_t place) {
    int64_t low = 0;
    if (stride) return (place + stride - 1) / stride;
    while (low < n) {
        int64_t middle = low + (n - low) / 2;
        if (index[middle] < place)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

/* -- looking for NaN and infinity ---------------------------------------------------------------- */

/* Without its sign, a number is not finite if its bits are those of infinity or above. Four places
   are read at a time: a processor fetches several streams faster than one. */
#define LARGEST(UINT)                                                                              \
    INLINE UINT largest_##UINT(const UINT *v, int64_t n) {                                         \
        const UINT magnitude = (UINT)((UINT)-1 >> 1);                                              \
        const int64_t q = n / 4;                                                                   \
        UINT a = 0, b = 0, c = 0, d = 0;                                                           \
        _Pragma("omp simd reduction(max : a, b, c, d)") for (int64_t i = 0; i < q; i++) {          \
            a = MAX(a, (UINT)(v[i] & magnitude));                                                  \
            b = MAX(b, (UINT)(v[i + q] & magnitude));                                              \
            c = MAX(c, (UINT)(v[i + 2 * q] & magnitude));                                          \
            d = MAX(d, (UINT)(v[i + 3 * q] & magnitude));                                          \
        }                                                                                          \
        for (int64_t i = 4 * q; i < n; i++) a = MAX(a, (UINT)(v[i] & magnitude));                  \
        return MAX(MAX(a, b), MAX(c, d));                                                          \
    }
LARGEST(uint16_t)
LARGEST(uint32_t)
LARGEST(uint64_t)

CLONES static void any_nonfinite(const Arguments *args, Chunk *chunk) {
    const int64_t start = chunk->start, n = chunk->stop - start;
    const void *g = args->grads[chunk->tensor];
    if (args->dtype == F64)
        chunk->sums[0] = largest_uint64_t((const uint64_t *)g + start, n) >= 0x7FF0000000000000u;
    else if (args->dtype == F32)
        chunk->sums[0] = largest_uint32_t((const uint32_t *)g + start, n) >= 0x7F800000u;
    else
        chunk->sums[0] = largest_uint16_t((const uint16_t *)g + start, n) >=
                         (args->dtype == BF16 ? 0x7F80 : 0x7C00);
}

/* -- the passes: each returns 0, or -1 if there is no memory ------------------------------------- */

/* Calls a loop with the dtype of the parameters and whether there is weight decay as constants. */
#define SPECIALISE(LOOP, DECAYS)                                          \
    if (WIDE_DTYPE == F64)                                                \
        DECAYS ? LOOP(args, chunk, 1, F64) : LOOP(args, chunk, 0, F64);   \
    else if (args->dtype == BF16)                                         \
        DECAYS ? LOOP(args, chunk, 1, BF16) : LOOP(args, chunk, 0, BF16); \
    else if (args->dtype == F16)                                          \
        DECAYS ? LOOP(args, chunk, 1, F16) : LOOP(args, chunk, 0, F16);   \
    else                                                                  \
        DECAYS ? LOOP(args, chunk, 1, F32) : LOOP(args, chunk, 0, F32)

#define WIDE_DTYPE (sizeof(WIDE) == 8 ? F64 : F32)
#define JOIN(function, type) function##_##type
#define NAME_OF(function, type) JOIN(function, type)
#define NAME(function) NAME_OF(function, WIDE)
#define WIDE float
#define BITS uint32_t
#include "native.c"
#define WIDE double
#define BITS uint64_t
#include "native.c"

/* Runs a pass on all chunks. If it goes backwards, it begins with what the pass before it has left
   in the cache. */
static int for_chunks(void pass(const Arguments *, Chunk *), const Arguments *args, int backwards) {
    int64_t all = 0, elements = 0;
    for (int64_t i = 0; i < args->count; i++) {
        all += (args->sizes[i] + CHUNK - 1) / CHUNK;
        elements += args->sizes[i];
    }
    Chunk *chunks = malloc((size_t)(all + 1) * sizeof *chunks), *next = chunks;
    if (chunks == NULL) return -1;
    for (int64_t i = 0; i < args->count; i++)
        for (int64_t start = 0; start < args->sizes[i]; start += CHUNK)
            *next++ = (Chunk){i, start, MIN(start + CHUNK, args->sizes[i]), {0, 0}};
    /* Waking a thread costs as much as some 2^16 elements, and far more if its core is busy. */
    int64_t useful = elements >> 16;
    int threads = (int)MAX(1, MIN(useful, args->threads));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < all; k++) pass(args, chunks + (backwards ? all - 1 - k : k));
    for (int64_t k = 0; k < all; k++) {
        args->sums[2 * chunks[k].tensor] += chunks[k].sums[0];
        args->sums[2 * chunks[k].tensor + 1] += chunks[k].sums[1];
    }
    free(chunks);
    return 0;
}

int stormplus_any_nonfinite(const Arguments *args) { return for_chunks(any_nonfinite, args, 0); }

int stormplus_move(const Arguments *args) {
    return for_chunks(args->dtype == F64 ? move_double : move_float, args, 1);
}

int stormplus_estimate(const Arguments *args) {
    return for_chunks(args->dtype == F64 ? estimate_double : estimate_float, args, 0);
}

int stormplus_untuned_step(const Arguments *args) {
    return for_chunks(args->dtype == F64 ? untuned_step_double : untuned_step_float, args, 1);
}

#else /* the loops, with arithmetic in WIDE */

INLINE void NAME(move_loop)(const Arguments *args, const Chunk *chunk, int decays, Dtype dtype) {
    const WIDE alpha = (WIDE)args->alpha, sign = (WIDE)args->sign, l2 = (WIDE)args->l2;
    void *param = args->params[chunk->tensor], *grad = args->grads[chunk->tensor];
    WIDE *estimator = args->estimators[chunk->tensor];
#pragma omp simd
    for (int64_t i = chunk->start; i < chunk->stop; i++) {
        WIDE x = (WIDE)load(param, i, dtype), d = estimator[i];
        WIDE g_tilde = sign * (WIDE)load(grad, i, dtype);
        if (decays) g_tilde += l2 * x;
        store(param, i, x - alpha * d, dtype); /* Alg. 1, line 4 */
        estimator[i] = d - g_tilde;              /* Alg. 1, line 6: the bracket */
    }
}

CLONES static void NAME(move)(const Arguments *args, Chunk *chunk) {
    SPECIALISE(NAME(move_loop), args->l2 != 0);
}

INLINE void NAME(estimate_loop)(const Arguments *args, Chunk *chunk, int decays, Dtype dtype) {
    const WIDE one_minus_a = (WIDE)args->one_minus_a, sign = (WIDE)args->sign, l2 = (WIDE)args->l2;
    const int finite_only = args->finite_only;
    const void *param = args->params[chunk->tensor], *grad = args->grads[chunk->tensor];
    WIDE *estimator = args->estimators[chunk->tensor];
    double g_sq = 0, d_sq = 0;
#pragma omp simd reduction(+ : g_sq, d_sq)
    for (int64_t i = chunk->start; i < chunk->stop; i++) {
        WIDE d = sign * (WIDE)load(grad, i, dtype);
        if (decays) d += l2 * (WIDE)load(param, i, dtype);
        g_sq += (double)d * (double)d;
        d = (d - d != 0) & finite_only ? 0 : d; /* & and no branch: it vectorises */
        d += one_minus_a * estimator[i];        /* Alg. 1, line 6 */
        estimator[i] = d;
        d_sq += (double)d * (double)d;
    }
    chunk->sums[0] = g_sq;
    chunk->sums[1] = d_sq;
}

CLONES static void NAME(estimate)(const Arguments *args, Chunk *chunk) {
    SPECIALISE(NAME(estimate_loop), args->l2 != 0);
}

/* Updates s, and returns u = g / s with 0/0 = 0. The squares of 1e-20 and 1e20 are no float32, so both
   numbers are first scaled by a power of two, which is exact, such that the larger is near 1. */
INLINE WIDE NAME(update_rms)(WIDE g, WIDE *s, WIDE w, WIDE one_minus_w) {
    const BITS one = (BITS)1 << (WIDE_DTYPE == F64 ? 52 : 23); /* in the exponent */
    const BITS infinity = ((BITS)1 << (8 * sizeof(BITS) - 1)) - one;
    BITS g_bits, exponent;
    memcpy(&g_bits, &g, sizeof g), memcpy(&exponent, s, sizeof *s);
    g_bits &= (BITS)-1 >> 1;
    exponent = (g_bits > exponent ? g_bits : exponent) & infinity;
    exponent = exponent < one ? one : exponent > infinity - 2 * one ? infinity - 2 * one : exponent;
    BITS inverse_exponent = infinity - one - exponent;
    WIDE scale, inverse;
    memcpy(&scale, &exponent, sizeof scale), memcpy(&inverse, &inverse_exponent, sizeof inverse);
    WIDE near_g = g * inverse, near_s = *s * inverse;
    WIDE root = (WIDE)__builtin_sqrt(one_minus_w * (near_s * near_s) + w * (near_g * near_g));
    *s = root * scale;
    return near_g / (root == 0 ? 1 : root);
}

/* Updates elements [start, stop) of a tensor, and returns the sum of u^2. */
INLINE WIDE NAME(update)(const Arguments *args, int64_t tensor, int64_t start, int64_t stop,
                         int decays, Dtype state, Dtype dtype) {
    const Coefficients k = args->coefficients[tensor];
    const double c = k.average_weight;
    const WIDE alpha = (WIDE)k.alpha, max_move = (WIDE)k.max_move, decay = (WIDE)k.decay;
    const WIDE w = (WIDE)k.grad_weight, one_minus_w = (WIDE)(1 - k.grad_weight);
    const WIDE one_minus_c = (WIDE)(1 - c), m_weight = (WIDE)(c + (1 - B) * (1 - c));
    const WIDE grad_factor = (WIDE)k.grad_factor;
    const uint32_t twice_step = (uint32_t)(2 * (uint64_t)k.step);
    const uint32_t key_e = mix_bits(twice_step), key_s = mix_bits(twice_step + 1);
    const int has_master = dtype == BF16 || dtype == F16;
    const void *grad = args->grads[tensor];
    void *param = args->params[tensor];
    void *z_minus_x = args->z_minus_x[tensor], *grad_rms = args->grad_rms[tensor];
    WIDE *master = has_master ? args->masters[tensor] : NULL, u_sq = 0;
#pragma omp simd reduction(+ : u_sq)
    for (int64_t i = start; i < stop; i++) {
        WIDE g = grad_factor * (WIDE)load(grad, i, dtype), s = (WIDE)load(grad_rms, i, state);
        WIDE u = NAME(update_rms)(g, &s, w, one_minus_w);
        WIDE y = (WIDE)load(param, i, dtype), e = (WIDE)load(z_minus_x, i, state);
        if (has_master) y = from_half(to_half(master[i], dtype), dtype) == y ? master[i] : y;
        WIDE move = alpha * u;
        move = move > max_move ? max_move : move < -max_move ? -max_move : move;
        if (decays) move += decay * (y + (WIDE)B * e);
        WIDE m = e - move; /* the algebra is in plain.py */
        y += m_weight * m - (WIDE)(1 - B) * e;
        store(param, i, y, dtype);
        if (has_master) master[i] = y;
        store_state(z_minus_x, i, one_minus_c * m, state, key_e);
        store_state(grad_rms, i, s, state, key_s);
        u_sq += u * u;
    }
    return u_sq;
}

/* Returns the sum of (z - z_1)^2 over the sampled elements of a chunk. */
INLINE double NAME(measure)(const Arguments *args, const Chunk *chunk, int64_t stride, Dtype state,
                            Dtype dtype) {
    const int64_t tensor = chunk->tensor;
    const Sample sample = args->samples[tensor];
    const int64_t first = first_sample(sample.index, sample.count, stride, chunk->start);
    const int64_t end = first_sample(sample.index, sample.count, stride, chunk->stop);
    const void *param = args->params[tensor], *z_minus_x = args->z_minus_x[tensor];
    const int has_master = dtype == BF16 || dtype == F16;
    const WIDE *z_1 = args->initial_sample[tensor];
    const WIDE *master = has_master ? args->masters[tensor] : NULL;
    double displacement_sq = 0;
#pragma omp simd reduction(+ : displacement_sq)
    for (int64_t k = first; k < end; k++) {
        int64_t i = stride ? k * stride : sample.index[k], place = stride ? k : sample.in_whole[k];
        WIDE y = (WIDE)load(param, i, dtype), e = (WIDE)load(z_minus_x, i, state);
        if (has_master) y = master[i] + 0 * y; /* y can be infinite where its master is not */
        double moved = (double)(y + (WIDE)B * e - z_1[place]);
        displacement_sq += moved * moved;
    }
    return displacement_sq;
}

INLINE void NAME(untuned_chunk)(const Arguments *args, Chunk *chunk, int decays, Dtype state,
                                Dtype dtype) {
    const int64_t tensor = chunk->tensor, stride = args->samples[tensor].stride;
    for (int64_t start = chunk->start; start < chunk->stop; start += PORTION) {
        int64_t stop = MIN(start + PORTION, chunk->stop);
        chunk->sums[0] += NAME(update)(args, tensor, start, stop, decays, state, dtype);
    }
    if (stride == 1) /* as a constant it is twice as fast */
        chunk->sums[1] = NAME(measure)(args, chunk, 1, state, dtype);
    else
        chunk->sums[1] = NAME(measure)(args, chunk, stride, state, dtype);
}

INLINE void NAME(untuned_loop)(const Arguments *args, Chunk *chunk, int decays, Dtype dtype) {
    if (WIDE_DTYPE == F32 && args->state_dtype == BF16)
        NAME(untuned_chunk)(args, chunk, decays, BF16, dtype);
    else
        NAME(untuned_chunk)(args, chunk, decays, WIDE_DTYPE, dtype);
}

CLONES static void NAME(untuned_step)(const Arguments *args, Chunk *chunk) {
    SPECIALISE(NAME(untuned_loop), args->coefficients[chunk->tensor].decay != 0);
}

#undef WIDE
#undef BITS

#endif
