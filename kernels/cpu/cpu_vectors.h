/* Eight floats at once, in the vectors of GCC and clang, which become the machine's own:
   arithmetic, selection, 2^x, e^x, log and tanh. */

#pragma once

#include <stdint.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef float v8_anywhere __attribute__((vector_size(32), aligned(4), may_alias));

INLINE v8 load(const float *p) { return *(const v8_anywhere *)p; }
INLINE void store(float *p, v8 x) { *(v8_anywhere *)p = x; }
INLINE v8 all(float x) { return (v8){x, x, x, x, x, x, x, x}; }
INLINE v8 choose(i8 mask, v8 yes, v8 no) { return (v8)((mask & (i8)yes) | (~mask & (i8)no)); }
INLINE v8 share(i8 mask) { return choose(mask, all(1.0f), all(0.0f)); }
#ifdef __AVX__
/* with this order of operands NaN in x stays */
INLINE v8 at_least(v8 x, v8 low) { return __builtin_ia32_maxps256(low, x); }
INLINE v8 at_most(v8 x, v8 high) { return __builtin_ia32_minps256(high, x); }
#else
INLINE v8 at_least(v8 x, v8 low) { return choose(x < low, low, x); }
INLINE v8 at_most(v8 x, v8 high) { return choose(x > high, high, x); }
#endif
INLINE float total(v8 x)
{ return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

#define ROUNDER                                                                                    \
    12582912.0f  /* 1.5 * 2^23: adding it leaves the nearest whole number in the low bits */

/* 2^r for |r| <= 1/2, relative error 2e-9 before rounding: fitted for the least largest relative
 * error */
INLINE v8 small_power(v8 r)
{
    v8 p = all(0.000153458116f);
    p = p * r + all(0.00133999312f);
    p = p * r + all(0.00961848896f);
    p = p * r + all(0.0555032878f);
    p = p * r + all(0.240226469f);
    p = p * r + all(0.693147206f);
    return p * r + all(1.0f);
}

INLINE v8 scale_of(i8 exponent) { return (v8)((exponent + 127) << 23); }

INLINE v8 exponential(v8 x)  /* relative error 2e-7; overflows to infinity, underflows through the
                                denormal numbers to 0 */
{
    x = at_most(at_least(x, all(-104.0f)), all(89.0f));
    v8 shifted = x * all(1.44269502f) + all(ROUNDER), whole = shifted - all(ROUNDER);
    v8 r = x * all(1.44269502f) - whole;
    i8 n = (i8)shifted - (i8)all(ROUNDER), half = n >> 1;
    return small_power(r + x * all(1.92596299e-8f)) * scale_of(half) *
           scale_of(n - half);  /* two halves: 2^n alone leaves the floats */
}

/* Of positive numbers that are not denormal, as in FreeBSD's e_logf.c, relative error 1e-7; NaN and
   infinity stay */
INLINE v8 logarithm(v8 x)
{
    i8 exponent = ((i8)x - 0x3f3504f3) >> 23;  /* x = (1 + f) 2^exponent, 1 + f about 1 */
    v8 f = (v8)((i8)x - (exponent << 23)) - all(1.0f), s = f / (f + all(2.0f)), square = s * s;
    v8 p = all(0.242790788f) * square + all(0.284987867f);
    p = (p * square + all(0.400009722f)) * square + all(0.666666627f);
    v8 half = all(0.5f) * f * f, n = __builtin_convertvector(exponent, v8);
    v8 low = s * (half + p * square) + n * all(9.05800061e-6f);
    v8 result = n * all(0.693138123f) - (half - low - f);
    return choose(x - x == all(0.0f), result, x);
}

INLINE v8 hyperbolic_tangent(v8 x)  /* 1 - 2 / (e^2x + 1), absolute error 1e-7 */
{
    x = at_most(at_least(x, all(-10.0f)), all(10.0f));
    v8 shifted = x * all(2.88539004f) + all(ROUNDER), whole = shifted - all(ROUNDER);
    v8 power = small_power(x * all(2.88539004f) - whole) * (v8)(((i8)shifted << 23) + 0x3f800000);
    return all(1.0f) - all(2.0f) / (power + all(1.0f));
}

#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif

/* to [columns, rows] = from [rows, columns]; from_row, to_row: floats from one row to the next */
static void transpose(const float *from, int64_t rows, int64_t columns, int64_t from_row, float *to,
                      int64_t to_row)
{
    int64_t whole_rows = rows / LANES * LANES, whole_columns = columns / LANES * LANES;
    for (int64_t r = 0; r < whole_rows; r += LANES)
        for (int64_t c = 0; c < whole_columns; c += LANES) {
            v8 a[LANES], b[LANES];
            for (int i = 0; i < LANES; i++) a[i] = load(from + (r + i) * from_row + c);
            for (int round = 0; round < 3;
                 round++) {  /* three riffles of eight are a transposition */
                for (int i = 0; i < 4; i++) {
                    b[2 * i] = MIX(a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
                    b[2 * i + 1] = MIX(a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
                }
                for (int i = 0; i < LANES; i++) a[i] = b[i];
            }
            for (int i = 0; i < LANES; i++) store(to + (c + i) * to_row + r, a[i]);
        }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; c++)
            to[c * to_row + r] = from[r * from_row + c];
}
