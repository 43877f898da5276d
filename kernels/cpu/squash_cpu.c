/* squash.py's samples, eight actions at a time across rows, and their gradients. */

#include <stdint.h>
#include <string.h>

#include "cpu_vectors.h"

#define EXPORT __attribute__((visibility("default")))
#define LOG_2 0.693147182f
#define HALF_LOG_2PI 0.918938518f

typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* log(1 + e) for e in [0, 1]: 2 atanh(s), s = e / (2 + e) <= 1/3, whose series ends here with an
 * error of 1e-8 */
INLINE v8 log_of_one_and(v8 e)
{
    v8 s = e / (e + all(2.0f)), square = s * s;
    v8 p = all(2.0f / 13.0f);
    p = p * square + all(2.0f / 11.0f);
    p = p * square + all(2.0f / 9.0f);
    p = p * square + all(2.0f / 7.0f);
    p = p * square + all(2.0f / 5.0f);
    p = p * square + all(2.0f / 3.0f);
    return (p * square + all(2.0f)) * s;
}

/* Eight samples in place: `action` holds the mean, `step` the log standard deviation; term: the
 * part of each in log_prob. */
INLINE void draw_eight(float *action, float *step, const float *noise, float lowest, float highest,
                       float *term, uint8_t *is_free)
{
    v8 unlimited = load(step), z = load(noise),
       log_std = at_most(at_least(unlimited, all(lowest)), all(highest));
    v8 moved = exponential(log_std) * z, u = load(action) + moved;
    /* tanh and the logarithm of its derivative, both from e^(-2 |u|) */
    i8 is_negative = u < all(0.0f);
    v8 size = choose(is_negative, -u, u),
       e = exponential(size * all(-2.0f));
    v8 tanh_of_size = (all(1.0f) - e) / (all(1.0f) + e),
       log_slope = (all(LOG_2) - size - log_of_one_and(e)) * all(2.0f);
    store(action, choose(is_negative, -tanh_of_size, tanh_of_size));
    store(step, moved);
    store(term, z * z * all(-0.5f) - log_std - all(HALF_LOG_2PI) - log_slope);
    bytes flags = __builtin_convertvector((log_std == unlimited) & 1, bytes);
    memcpy(is_free, &flags, LANES);
}

/* The last cells, fewer than eight, in padded arrays */
static void draw_few(int64_t count, float *action, float *step, const float *noise, float lowest,
                     float highest, float *term, uint8_t *is_free)
{
    float actions[LANES] = {0.0f}, steps[LANES] = {0.0f}, draws[LANES] = {0.0f}, terms[LANES];
    uint8_t flags[LANES];
    for (int64_t i = 0; i < count; i++)
        actions[i] = action[i], steps[i] = step[i], draws[i] = noise[i];
    draw_eight(actions, steps, draws, lowest, highest, terms, flags);
    for (int64_t i = 0; i < count; i++)
        action[i] = actions[i], step[i] = steps[i], term[i] = terms[i], is_free[i] = flags[i];
}

/* As squashed_sample_reference; term: room for one number per cell. Rows are summed from left to
 * right. */
EXPORT void squashed_sample(const float *output, const float *noise, int64_t rows, int64_t width,
                            float lowest, float highest, float *term, float *action,
                            float *log_prob, float *step, uint8_t *is_free)
{
    for (int64_t row = 0; row < rows;
         row++, output +=
                2 * width) { /* dense, so that no lane is idle when rows are short */
        for (int64_t i = 0; i < width; i++) action[row * width + i] = output[i];
        for (int64_t i = 0; i < width; i++) step[row * width + i] = output[width + i];
    }
    int64_t cells = rows * width, cell = 0;
    for (; cell + LANES <= cells; cell += LANES)
        draw_eight(action + cell, step + cell, noise + cell, lowest, highest, term + cell,
                   is_free + cell);
    draw_few(cells - cell, action + cell, step + cell, noise + cell, lowest, highest, term + cell,
             is_free + cell);
    for (int64_t row = 0; row < rows; row++) {
        log_prob[row] = 0.0f;
        for (int64_t i = 0; i < width; i++) log_prob[row] += term[row * width + i];
    }
}

/* As squashed_backward_reference; strides: of the rows of the incoming gradients, in floats. */
EXPORT void squashed_backward(const float *action, const float *step, const uint8_t *is_free,
                              const float *action_slope, int64_t slope_stride,
                              const float *log_prob_slope, int64_t log_prob_stride, int64_t rows,
                              int64_t width, float *gradient)
{
    for (int64_t row = 0; row < rows; row++) {
        float of_log_prob = log_prob_slope[row * log_prob_stride];
        for (int64_t column = 0; column < width; column++) {
            float a = action[column],
                  of_u = action_slope[column] * (1.0f - a * a) + 2.0f * of_log_prob * a;
            gradient[column] = of_u;
            gradient[width + column] = (of_u * step[column] - of_log_prob) * (float)is_free[column];
        }
        action += width, step += width, is_free += width, action_slope += slope_stride,
            gradient += 2 * width;
    }
}
