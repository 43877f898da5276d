/* random.py's numbers in one pass over memory, one stream after the other. */

#include "random_cpu.h"

#define EXPORT __attribute__((visibility("default")))

/* out [streams, count] in [0, 1), or standard normal; step: one number, or one of each stream where
   step_stride is 1 */
EXPORT void random_numbers(const uint64_t *key, const uint64_t *gamma, const uint64_t *step,
                           int64_t step_stride, uint64_t offset, int64_t streams, int64_t count,
                           int64_t is_normal, float *out)
{
    for (int64_t stream = 0; stream < streams; stream++) {
        uint64_t number = step[stream * step_stride] * WORDS_PER_STEP + offset;
        draw_numbers(key[stream], gamma[stream], number, count, is_normal, out + stream * count, 1);
    }
}
