/* replay.py's ring on a CPU: one call writes a block of steps, one samples a batch; torch needs a
 * dozen calls for each. */

#include <stdint.h>
#include <string.h>

#include "random_cpu.h"

#define EXPORT __attribute__((visibility("default")))
#define LINE 64 /* bytes of a cache line */
#define AHEAD 4 /* transitions between the prefetch of a row and its use */
/* bytes of a row that are prefetched: the processor then reads on by itself */
#define MAX_PREFETCH 1024

enum { TERMINATED = 1, TRUNCATED = 2, INVALID = 4, DONE = 3 };
enum { OBS, NUMBERS, FLAGS, SLOT, FINAL_OBS, OWNER, COUNTS }; /* of a Ring */
enum { ROWS, ENVS, OBS_SIZE, WIDTH, FINALS, KIND }; /* of its sizes */
enum { FLOAT32, BFLOAT16, UINT8 }; /* kinds of its observations */
enum {
    GIVEN_OBS,
    GIVEN_FINAL,
    GIVEN_TERMINATED,
    GIVEN_TRUNCATED,
    GIVEN_VALID,
    GIVEN_COLUMNS
}; /* of steps that go in */
enum { INDEX, OUT_OBS, OUT_NUMBERS, REWARD, DISCOUNT, NEXT_OBS, WEIGHT }; /* of a Batch */

static const int64_t stored_bytes[] = {4, 2, 1}, given_bytes[] = {4, 4, 1};

/* Convert `count` numbers of observations to the stored dtype; bfloat16 rounds to even, NaN stays
 * NaN */
static void store(char *to, const char *from, int64_t count, int64_t kind)
{
    if (kind != BFLOAT16) {
        memcpy(to, from, (size_t)(count * stored_bytes[kind]));
        return;
    }
    const float *numbers = (const float *)from;
    uint16_t *halves = (uint16_t *)to;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &numbers[i], 4);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        halves[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

static void load(char *to, const char *from, int64_t count, int64_t kind)
{
    if (kind != BFLOAT16) {
        memcpy(to, from, (size_t)(count * stored_bytes[kind]));
        return;
    }
    const uint16_t *halves = (const uint16_t *)from;
    uint32_t *bits = (uint32_t *)to;
    for (int64_t i = 0; i < count; i++) bits[i] = (uint32_t)halves[i] << 16;
}

/* As replay_add_reference: add `steps` rows after the newest. widths: numbers of a step in each
 * column; terminated, truncated and valid are bytes of 0 and 1, and valid may be NULL. */
EXPORT void replay_add(void **ring, const int64_t *size, void **given, int64_t steps,
                       const int64_t *widths, int64_t num_columns)
{
    int64_t envs = size[ENVS], finals = size[FINALS], kind = size[KIND];
    int64_t stored = size[OBS_SIZE] * stored_bytes[kind],
            given_row = size[OBS_SIZE] * given_bytes[kind];
    int64_t *counts = ring[COUNTS], *owner = ring[OWNER];
    const uint8_t *terminated = given[GIVEN_TERMINATED], *truncated = given[GIVEN_TRUNCATED],
                  *valid = given[GIVEN_VALID];
    const char *final_obs = given[GIVEN_FINAL];
    for (int64_t t = 0; t < steps; t++, counts[0]++) {
        int64_t row = counts[0] % size[ROWS] * envs, from = t * envs;
        store((char *)ring[OBS] + row * stored, (const char *)given[GIVEN_OBS] + from * given_row,
              envs * size[OBS_SIZE], kind);
        float *numbers = (float *)ring[NUMBERS] + row * size[WIDTH];
        for (int64_t column = 0; column < num_columns; numbers += widths[column], column++) {
            int64_t width = widths[column];
            const float *source = (const float *)given[GIVEN_COLUMNS + column] + from * width;
            for (int64_t n = 0; n < envs; n++)
                for (int64_t i = 0; i < width; i++)
                    numbers[n * size[WIDTH] + i] = source[n * width + i];
        }
        for (int64_t n = 0; n < envs; n++) {
            int32_t *slot = (int32_t *)ring[SLOT] + row + n;
            uint8_t flags =
                (uint8_t)(terminated[from + n] * TERMINATED | truncated[from + n] * TRUNCATED);
            if (valid && !valid[from + n]) flags |= INVALID;
            ((uint8_t *)ring[FLAGS])[row + n] = flags;
            *slot = 0;
            if (!(flags & DONE)) continue;
            *slot = (int32_t)(counts[1]++ % finals);
            owner[*slot] = row + n;
            store((char *)ring[FINAL_OBS] + *slot * stored, final_obs + (from + n) * given_row,
                  size[OBS_SIZE], kind);
        }
    }
    counts[2] = (counts[0] - 1) % size[ROWS];
    store((char *)ring[FINAL_OBS] + finals * stored, final_obs + (steps - 1) * envs * given_row,
          envs * size[OBS_SIZE], kind);
}

/* As replay_sample_reference; draws the rows, or reads them from out[INDEX]. */
EXPORT void replay_sample(void **ring, const int64_t *size, const uint64_t **streams, void **out,
                          uint64_t offset, int64_t batch_size, int64_t num_steps, int64_t draws,
                          float gamma)
{
    int64_t rows = size[ROWS], envs = size[ENVS], width = size[WIDTH], kind = size[KIND];
    int64_t stored = size[OBS_SIZE] * stored_bytes[kind],
            given = size[OBS_SIZE] * given_bytes[kind];
    const int64_t *counts = ring[COUNTS], *owner = ring[OWNER];
    const float *numbers = ring[NUMBERS];
    const uint8_t *flags = ring[FLAGS];
    const int32_t *slots = ring[SLOT];
    const char *obs = ring[OBS];
    int64_t prefetched =
        (stored < MAX_PREFETCH ? stored : MAX_PREFETCH) - 1; /* a row may begin inside a line */
    int64_t *index = out[INDEX], newest = counts[2];
    int64_t filled = (counts[0] < rows ? counts[0] : rows) * envs, total = filled < 1 ? 1 : filled;
    uint64_t first_word = streams[2][0] * WORDS_PER_STEP + offset;
    if (draws)
        for (int64_t i = 0; i < batch_size; i++) {
            uint64_t word = mixed(streams[1][0] * (first_word + (uint64_t)i) + streams[0][0]);
            int64_t drawn = (int64_t)(fraction(word) * (double)total);
            index[i] = drawn < total ? drawn : total - 1;
        }
    for (int64_t i = 0; i < batch_size; i++) {
        int64_t n = index[i] % envs, last = index[i] / envs;
        if (i + AHEAD < batch_size) { /* rows lie anywhere in memory; not a function: gcc drops
                                         calls of one that only prefetches */
            int64_t soon = index[i + AHEAD], next = soon + envs < rows * envs ? soon + envs : soon;
            for (int64_t byte = 0; byte < prefetched; byte += LINE)
                __builtin_prefetch(obs + soon * stored + byte),
                    __builtin_prefetch(obs + next * stored + byte);
            __builtin_prefetch(obs + soon * stored + prefetched),
                __builtin_prefetch(obs + next * stored + prefetched);
            __builtin_prefetch(flags + soon), __builtin_prefetch(flags + next);
            __builtin_prefetch(numbers + soon * width);
        }
        float reward = 0.0f, discount = 1.0f;
        for (int64_t step = 0, here = last; step < num_steps;
             step++, here = here + 1 == rows ? 0 : here + 1) {
            int64_t at = here * envs + n;
            if (step && flags[at] & INVALID) break;
            reward += discount * numbers[at * width], discount *= gamma, last = here;
            if (flags[at] & DONE || here == newest) break;
        }
        int64_t end = last * envs + n, after = (last + 1 == rows ? 0 : last + 1) * envs + n,
                slot = 0;
        int ended = flags[end] & DONE, terminated = flags[end] & TERMINATED;
        if (ended) slot = slots[end];
        int in_table = ended || last == newest;
        int lost = in_table ? ended && !terminated && owner[slot] != end : flags[after] & INVALID;
        ((float *)out[REWARD])[i] = reward;
        ((float *)out[DISCOUNT])[i] = terminated ? 0.0f : discount;
        ((float *)out[WEIGHT])[i] = !(flags[index[i]] & INVALID) && !lost ? 1.0f : 0.0f;
        memcpy((float *)out[OUT_NUMBERS] + i * width, numbers + index[i] * width,
               (size_t)width * sizeof(float));
        load((char *)out[OUT_OBS] + i * given, obs + index[i] * stored, size[OBS_SIZE], kind);
        const char *final_obs =
            (const char *)ring[FINAL_OBS] + (ended ? slot : size[FINALS] + n) * stored;
        load((char *)out[NEXT_OBS] + i * given, in_table ? final_obs : obs + after * stored,
             size[OBS_SIZE], kind);
    }
}
