/* adam.py's step on flat arrays in one pass: the square root and the division become vectors. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float *parameters, *exp_avg, *exp_avg_sq, *target;  /* target may be NULL */
    const float *gradient;
    int64_t *step, size, decoupled;
    const float *learning_rate;
    double beta_1, beta_2, epsilon, weight_decay, max_norm, largest_norm,
        tau;  /* max_norm infinite: no clip */
    int64_t *counts;  /* adam.py's SkippedSteps, or NULL */
    float *first_gradient, *first_losses;
} Adam;

/* Count a step; keep the gradient and losses of the first skipped one */
static void count_step(const Adam *adam, const double *losses, int64_t num_losses, int is_finite)
{
    int64_t *counts = adam->counts;
    if (!counts) return;
    counts[0]++;
    counts[2] = is_finite ? 0 : counts[2] + 1;
    if (is_finite) return;
    counts[1]++;
    if (counts[3] < counts[2]) counts[3] = counts[2];
    if (counts[4]) return;
    counts[4] = counts[0];
    memcpy(adam->first_gradient, adam->gradient, adam->size * sizeof(float));
    for (int64_t i = 0; i < num_losses; i++) adam->first_losses[i] = (float)losses[i];
}

/* One step; returns the norm of the gradient, which is not finite if the step was skipped. */
static double adam_step(const Adam *adam, const double *losses, int64_t num_losses)
{
    const float *restrict gradient = adam->gradient;
    float *restrict parameters = adam->parameters, *restrict exp_avg = adam->exp_avg,
                    *restrict exp_avg_sq = adam->exp_avg_sq;
    float *restrict target = adam->target;
    /* norm of the gradient, summed in eight lanes so that the loop becomes vectors */
    double sums[8] = {0.0};
    int64_t whole = adam->size / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8)
        for (int lane = 0; lane < 8; lane++)
            sums[lane] += (double)gradient[i + lane] * gradient[i + lane];
    for (int64_t i = whole; i < adam->size; i++) sums[0] += (double)gradient[i] * gradient[i];
    double norm = sqrt(((sums[0] + sums[4]) + (sums[2] + sums[6])) +
                       ((sums[1] + sums[5]) + (sums[3] + sums[7])));
    /* whether the step is taken */
    int is_finite = norm <= adam->largest_norm;  /* false for NaN */
    for (int64_t i = 0; i < num_losses; i++) is_finite &= isfinite((float)losses[i]);
    count_step(adam, losses, num_losses, is_finite);
    if (!is_finite) return norm * INFINITY;
    /* clip, weight decay, bias corrections */
    double count = (double)++*adam->step, rate = *adam->learning_rate;
    float clip = (float)fmin(adam->max_norm / (norm + 1e-6), 1.0), tau = (float)adam->tau;
    float keep = adam->decoupled ? (float)(1.0 - rate * adam->weight_decay) : 1.0f;
    float decay = adam->decoupled ? 0.0f : (float)adam->weight_decay;
    float move_1 = (float)(1.0 - adam->beta_1), move_2 = (float)(1.0 - adam->beta_2),
          epsilon = (float)adam->epsilon;
    float size = (float)(rate / (1.0 - pow(adam->beta_1, count)));
    float correction = (float)(1.0 / sqrt(1.0 - pow(adam->beta_2, count)));
    /* one pass over all arrays */
    for (int64_t i = 0; i < adam->size; i++) {
        float g = gradient[i] * clip + decay * parameters[i],
              average = exp_avg[i] + move_1 * (g - exp_avg[i]);
        float square = exp_avg_sq[i] + move_2 * (g * g - exp_avg_sq[i]);
        exp_avg[i] = average;
        exp_avg_sq[i] = square;
        parameters[i] =
            parameters[i] * keep - size * average / (sqrtf(square) * correction + epsilon);
        if (target) target[i] += tau * (parameters[i] - target[i]);
    }
    return norm;
}
