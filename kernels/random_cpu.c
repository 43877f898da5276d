/* random.py's numbers, one stream after the other: torch makes a dozen passes over memory for them. */

#include <math.h>
#include <stdint.h>

#include "random_cpu.h"

#define EXPORT __attribute__((visibility("default")))
#define UNIT 5.9604644775390625e-8f  /* 2^-24 */

/* out [streams, count] in [0, 1), or standard normal; step: one number, or one of each stream where step_stride is 1 */
EXPORT void random_numbers(const uint64_t *key, const uint64_t *gamma, const uint64_t *step, int64_t step_stride, uint64_t offset,
                           int64_t streams, int64_t count, int64_t is_normal, float *out)
{
    for (int64_t stream = 0; stream < streams; stream++, out += count) {
        uint64_t number = step[stream * step_stride] * WORDS_PER_STEP + offset;
        for (int64_t i = 0; i < count; i += 2, number++) {
            uint64_t word = mixed(gamma[stream] * number + key[stream]);
            float first = (float)(int32_t)((word >> 8) & 0xFFFFFF) * UNIT, second = (float)(int32_t)(word >> 40) * UNIT;
            if (is_normal) {
                float radius = sqrtf(-2.0f * logf(first + UNIT)), angle = second * 6.28318530717958647692f;
                first = radius * cosf(angle), second = radius * sinf(angle);
            }
            out[i] = first;
            if (i + 1 < count) out[i + 1] = second;
        }
    }
}
