/* The numbers in random.py's words, those of eight words at once. */

#include <math.h>

#include "cpu_vectors.h"
#include "random_cpu.h"

/* Cosine and sine of 2 pi turn, for turns in [0, 1), absolute error 1e-7: of the angle to the
   nearest quarter turn, at most pi / 4, by the polynomials of Cephes' sinf.c and cosf.c */
INLINE void cosine_and_sine(v8 turn, v8 *cosine, v8 *sine)
{
    v8 shifted = turn * all(4.0f) + all(ROUNDER);
    v8 angle = (turn - (shifted - all(ROUNDER)) * all(0.25f)) * all(6.28318530717958647692f);
    i8 quarter = (i8)shifted;  /* in its lowest two bits */
    v8 square = angle * angle;
    v8 s = (all(-1.9515295891e-4f) * square + all(8.3321608736e-3f)) * square;
    s = (s + all(-1.6666654611e-1f)) * square * angle + angle;
    v8 c = (all(2.443315711809948e-5f) * square + all(-1.388731625493765e-3f)) * square;
    c = (c + all(4.166664568298827e-2f)) * square * square + (all(1.0f) - all(0.5f) * square);
    i8 is_odd = -(quarter & 1);
    *cosine = (v8)((i8)choose(is_odd, s, c) ^ (((quarter + 1) & 2) << 30));
    *sine = (v8)((i8)choose(is_odd, c, s) ^ ((quarter & 2) << 30));
}

/* The two numbers of each of LANES words, in [0, 1) or standard normal */
INLINE void numbers_of(const uint64_t *words, int64_t is_normal, v8 *first, v8 *second)
{
    float low[LANES], high[LANES];
    for (int i = 0; i < LANES; i++) {
        low[i] = (float)(int32_t)((words[i] >> 8) & 0xFFFFFF) * UNIT;
        high[i] = (float)(int32_t)(words[i] >> 40) * UNIT;
    }
    *first = load(low), *second = load(high);
    if (!is_normal) return;
    v8 radius = all(-2.0f) * logarithm(*first + all(UNIT)), cosine, sine;
    for (int i = 0; i < LANES; i++) radius[i] = sqrtf(radius[i]);
    cosine_and_sine(*second, &cosine, &sine);
    *first = radius * cosine, *second = radius * sine;
}
