/* PPO's loss of a block of rows and its derivatives, eight rows at a time, by the formulas of
 * gpurl/losses.py and gpurl/nn/distributions.py. */

#include "network_cpu.h"

#define LARGEST_LOG_RATIO 20.0f  /* as in ppo_loss.py */

typedef struct {
    v8 log_prob_slope, entropy_slope;
} Slopes;

/* ppo_loss of gpurl/losses.py for LANES rows from `at`: writes the gradient by the value, adds to
   metrics, returns the derivatives by log-probability and entropy. `entropy` NULL: the same for all
   rows */
INLINE Slopes loss_of_rows(const Job *job, const Block *block, int64_t at, v8 is_row, v8 log_prob,
                           const v8 *entropy, v8 *metrics)
{
    const Loss *loss = job->loss;
    const float *columns = block->columns + loss->actions * BLOCK + at;
    v8 one = all(1.0f), weight = is_row * all(job->weight);
    if (loss->has_valid) weight *= load(columns + VALID * BLOCK);
    v8 advantage = (load(columns + ADVANTAGE * BLOCK) - all(job->mean)) * all(job->scale);
    v8 unbounded = log_prob - load(columns + LOG_PROB * BLOCK),
       log_ratio = at_most(unbounded, all(LARGEST_LOG_RATIO));
    v8 ratio = exponential(log_ratio);
    v8 clipped = at_most(at_least(ratio, all(1.0f - (float)loss->clip_range)),
                         all(1.0f + (float)loss->clip_range));
    v8 surrogate = ratio * advantage, clipped_surrogate = clipped * advantage;
    v8 value = load(block->output + job->plan->outputs * BLOCK + at),
       old = load(columns + VALUE * BLOCK);
    v8 returns = load(columns + RETURNS * BLOCK), error = value - returns, half_slope = error,
       square = error * error;
    if (loss->clips_value) {
        v8 step = value - old, limit = all((float)loss->clip_range_value),
           moved = at_most(at_least(step, -limit), limit);
        v8 other = old + moved - returns, other_square = other * other;
        half_slope = choose(square >= other_square, error,
                            other * share((step >= -limit) & (step <= limit)));
        square = choose(square < other_square, other_square, square);
    }
    store(block->output_gradient + job->plan->outputs * BLOCK + at,
          half_slope * weight * all(2.0f * (float)loss->value_coef));
    metrics[SURROGATE] +=
        weight * choose(clipped_surrogate < surrogate, clipped_surrogate, surrogate);
    metrics[VALUE_LOSS] += weight * square;
    metrics[KL] += weight * (ratio - one - log_ratio);
    metrics[CLIPPED] += weight * share(ratio != clipped);
    if (entropy) metrics[ENTROPY] += weight * *entropy;
    Slopes slopes = {-weight * surrogate *
                         share((surrogate <= clipped_surrogate) & (log_ratio == unbounded)),
                     -weight * all((float)loss->entropy_coef)};
    return slopes;
}

/* As Gaussian.evaluate in gpurl/nn/distributions.py; `sums` [outputs + 1]: slope times z^2, for
 * log_std's gradient, then the slope alone */
INLINE void gaussian_rows(const Job *job, const Block *block, int64_t at, v8 is_row, float *sums,
                          v8 *metrics)
{
    int64_t outputs = job->plan->outputs;
    v8 squares = all(0.0f);
    for (int64_t a = 0; a < outputs; a++) {
        v8 z = (load(block->columns + a * BLOCK + at) - load(block->output + a * BLOCK + at)) *
               all(job->std[a]);
        squares += z * z;
        store(block->output_gradient + a * BLOCK + at, z);
    }
    v8 log_prob = all(log_density_at_mean(job)) - all(0.5f) * squares;
    v8 slope = loss_of_rows(job, block, at, is_row, log_prob, NULL, metrics).log_prob_slope;
    for (int64_t a = 0; a < outputs; a++) {
        v8 z = load(block->output_gradient + a * BLOCK + at), moved = slope * z;
        store(block->output_gradient + a * BLOCK + at, moved * all(job->std[a]));
        sums[a] += total(moved * z);
    }
    sums[outputs] += total(slope);
}

/* As Categorical.evaluate; in between output_gradient holds the probabilities, and output the
 * log-probabilities */
INLINE void categorical_rows(const Job *job, const Block *block, int64_t at, v8 is_row, v8 *metrics)
{
    int64_t outputs = job->plan->outputs;
    v8 action = load(block->columns + at), picked = all(0.0f), entropy = picked;
    v8 highest, log_sum = log_sum_of_powers(block->output + at, outputs, &highest);
    for (int64_t a = 0; a < outputs; a++) {
        v8 log_prob = load(block->output + a * BLOCK + at) - highest - log_sum,
           probability = exponential(log_prob);
        store(block->output + a * BLOCK + at, log_prob);
        store(block->output_gradient + a * BLOCK + at, probability);
        entropy -= probability * log_prob;
        picked = choose(action == all((float)a), log_prob, picked);
    }
    Slopes slopes = loss_of_rows(job, block, at, is_row, picked, &entropy, metrics);
    for (int64_t a = 0; a < outputs; a++) {
        v8 probability = load(block->output_gradient + a * BLOCK + at),
           log_prob = load(block->output + a * BLOCK + at);
        v8 gradient =
            -probability * (slopes.log_prob_slope + slopes.entropy_slope * (log_prob + entropy));
        store(block->output_gradient + a * BLOCK + at,
              gradient + slopes.log_prob_slope * share(action == all((float)a)));
    }
}

static void loss_block(const Job *job, const Block *block, int64_t count, int64_t padded,
                       float *sums, double *metrics)
{
    v8 sum[NUM_METRICS] = {0}, lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int64_t at = 0; at < padded; at += LANES) {
        v8 is_row = share(lane < all((float)(count - at)));
        if (job->loss->head == GAUSSIAN)
            gaussian_rows(job, block, at, is_row, sums + job->plan->log_std_sum, sum);
        else categorical_rows(job, block, at, is_row, sum);
    }
    for (int metric = 0; metric < NUM_METRICS; metric++) metrics[metric] += total(sum[metric]);
}
