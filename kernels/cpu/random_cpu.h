/* The words of random.py's streams, and the numbers in them: word number `offset` of step s of a
   stream is mixed(key + (s WORDS_PER_STEP + offset) gamma). */

#include <math.h>
#include <stdint.h>

#define WORDS_PER_STEP 65536
#define UNIT 5.9604644775390625e-8f  /* 2^-24 */

static inline uint64_t mixed(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* In [0, 1), of a word's high 53 bits. */
static inline double fraction(uint64_t word) { return (double)(int64_t)(word >> 11) * 0x1p-53; }

/* `count` numbers of one stream, from its word `number` on: out[i * stride] is in [0, 1), or
   standard normal. */
static inline void draw_numbers(uint64_t key, uint64_t gamma, uint64_t number, int64_t count,
                                int64_t is_normal, float *out, int64_t stride)
{
    for (int64_t i = 0; i < count; i += 2, number++) {
        uint64_t word = mixed(gamma * number + key);
        float first = (float)(int32_t)((word >> 8) & 0xFFFFFF) * UNIT;
        float second = (float)(int32_t)(word >> 40) * UNIT;
        if (is_normal) {
            float radius = sqrtf(-2.0f * logf(first + UNIT));
            float angle = second * 6.28318530717958647692f;
            first = radius * cosf(angle), second = radius * sinf(angle);
        }
        out[i * stride] = first;
        if (i + 1 < count) out[(i + 1) * stride] = second;
    }
}
