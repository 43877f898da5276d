/* random.py's numbers in one pass over memory, one stream after the other. */

#include "draws_cpu.h"

#define EXPORT __attribute__((visibility("default")))

/* What `mixed` makes the first word of a draw of */
static inline uint64_t beginning(const uint64_t *key, const uint64_t *gamma, const uint64_t *step,
                                 int64_t step_stride, uint64_t offset, int64_t stream)
{
    uint64_t number = step[stream * step_stride] * WORDS_PER_STEP + offset;
    return gamma[stream] * number + key[stream];
}

/* out [streams, count] in [0, 1), or standard normal; step: one number, or one of each stream where
   step_stride is 1 */
EXPORT void random_numbers(const uint64_t *key, const uint64_t *gamma, const uint64_t *step,
                           int64_t step_stride, uint64_t offset, int64_t streams, int64_t count,
                           int64_t is_normal, float *out)
{
    int64_t pairs = (count + 1) / 2, total = streams * pairs;
    if (!total) return;
    /* LANES words at a time, of one stream or of several */
    uint64_t next = beginning(key, gamma, step, step_stride, offset, 0);
    for (int64_t start = 0, stream = 0, pair = 0; start < total; start += LANES) {
        uint64_t words[LANES] = {0};
        int64_t lanes = total - start < LANES ? total - start : LANES, from = pair;
        float *row = out + stream * count;
        if (pair + LANES < pairs) {
            for (int i = 0; i < LANES; i++) words[i] = mixed(next + i * gamma[stream]);
            next += LANES * gamma[stream], pair += LANES;
        } else
            for (int64_t i = 0; i < lanes; i++) {
                words[i] = mixed(next), next += gamma[stream];
                if (++pair < pairs) continue;
                pair = 0;
                if (++stream < streams)
                    next = beginning(key, gamma, step, step_stride, offset, stream);
            }
        v8 first, second;
        numbers_of(words, is_normal, &first, &second);
        if (lanes == LANES && count == 2 * pairs) {
            store(out + 2 * start, MIX(first, second, 0, 8, 1, 9, 2, 10, 3, 11));
            store(out + 2 * start + LANES, MIX(first, second, 4, 12, 5, 13, 6, 14, 7, 15));
            continue;
        }
        for (int64_t i = 0; i < lanes; i++) {
            row[2 * from] = first[i];
            if (2 * from + 1 < count) row[2 * from + 1] = second[i];
            if (++from == pairs) from = 0, row += count;
        }
    }
}
