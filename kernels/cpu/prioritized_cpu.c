/* prioritized.py's draws: one pass for running sums of groups, then for each draw a search in them
 * and a walk through one group. */

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "random_cpu.h"

#define EXPORT __attribute__((visibility("default")))

typedef int32_t i4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef double d4 __attribute__((vector_size(32)));

static inline float counted(float priority)
{ return priority > 0.0f && priority <= FLT_MAX ? priority : 0.0f; }

/* Sum of the priorities of a group. All are added; if a sign bit or an infinite sum shows that some
 * do not count, they are added again one by one. */
static double sum_of_group(const float *priority, int64_t count)
{
    d4 sums[4] = {{0.0}};
    i4 signs = {0};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int k = 0; k < 4; k++) {
            const float *p = priority + i + 4 * k;
            sums[k] += (d4){p[0], p[1], p[2],
                            p[3]}; /* one instruction; __builtin_convertvector is four in GCC 12 */
            signs |= *(const i4 *)p;
        }
    d4 lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    if ((signs[0] | signs[1] | signs[2] | signs[3]) < 0 || !(sum <= DBL_MAX)) sum = 0.0, i = 0;
    for (; i < count; i++) sum += counted(priority[i]);
    return sum;
}

/* The first group whose running sum is above r, else the last group. */
static int64_t group_of(const double *running, int64_t groups, double r)
{
    int64_t first = 0;
    for (int64_t left = groups - 1; left > 0;) {
        int64_t half = (left + 1) / 2;
        first += running[first + half - 1] <= r ? half : 0;
        left -= half;
    }
    return first;
}

/* The entry at which the running sum of those from `start` on exceeds `rest`, else the last one
 * that counts, 0 where none does. */
static int64_t entry_of(const float *priority, int64_t start, int64_t end, double rest)
{
    int64_t pick = 0;
    double sum = 0.0;
    for (int64_t i = start; i < end; i++) {
        float value = counted(priority[i]);
        if (value > 0.0f) {
            sum += value, pick = i;
            if (sum > rest) break;
        }
    }
    return pick;
}

/* As prioritized_draw_reference. running: room for one sum for each `group` entries; place: for one
 * number for each draw. */
EXPORT void prioritized_draw(const float *priority, const uint64_t *key, const uint64_t *gamma,
                             const uint64_t *step, double *running, double *place, int64_t *index,
                             float *probability, int64_t size, uint64_t offset, int64_t batch_size,
                             int64_t group)
{
    int64_t groups = (size + group - 1) / group;
    double total = 0.0;
    for (int64_t g = 0, start = 0; g < groups; g++, start += group)
        running[g] = total +=
            sum_of_group(priority + start, size - start < group ? size - start : group);
    uint64_t number = *step * WORDS_PER_STEP + offset;
    for (int64_t i = 0; i < batch_size; i++, number++) {
        double r =
            ((double)i + fraction(mixed(*gamma * number + *key))) * (total / (double)batch_size);
        place[i] =
            r < total
                ? r
                : nextafter(total, 0.0); /* rounded up: the search must end inside the entries */
        index[i] = group_of(running, groups, place[i]) * group;
        __builtin_prefetch(priority + index[i]);
    }
    for (int64_t i = 0; i < batch_size;
         i++) { /* a second loop: searches can overlap, walks end at unpredictable entries */
        int64_t start = index[i], end = start + group < size ? start + group : size;
        index[i] =
            entry_of(priority, start, end, place[i] - (start ? running[start / group - 1] : 0.0));
        probability[i] = total > 0.0 ? (float)(counted(priority[index[i]]) / total) : 0.0f;
    }
}
