/* Samples the actions of a block of rows from the outputs of the network, as `sample` and `to_env`
   of gpurl/nn/distributions.py, eight rows at a time. */

#include "network_cpu.h"
#include "draws_cpu.h"

/* The random numbers of a block's rows, each from its own stream, those of padding from word 0 ->
   columns [outputs, BLOCK] */
static void draw_block(const Job *job, const Block *block, int64_t first, int64_t count,
                       int64_t padded)
{
    const Policy *policy = job->policy;
    int64_t outputs = job->plan->outputs;
    const uint64_t *key = policy->key + first, *gamma = policy->gamma + first;
    for (int64_t r = 0; r < padded; r += LANES)
        for (int64_t o = 0; o < outputs; o += 2) {
            uint64_t words[LANES] = {0};
            int64_t lanes = count - r < LANES ? count - r : LANES;
            for (int64_t i = 0; i < lanes; i++)
                words[i] = mixed(gamma[r + i] * (job->counter + o / 2) + key[r + i]);
            v8 one, other;
            numbers_of(words, policy->head == GAUSSIAN, &one, &other);
            store(block->columns + o * BLOCK + r, one);
            if (o + 1 < outputs) store(block->columns + (o + 1) * BLOCK + r, other);
        }
}

/* Returns the log-probabilities of LANES rows from `at`; writes their actions into output_gradient,
   and those for the environment into columns, over the noise */
INLINE v8 gaussian_draw(const Job *job, const Block *block, int64_t at)
{
    int64_t outputs = job->plan->outputs;
    const float *low = job->policy->units, *high = low + outputs;
    const float *half_width = high + outputs, *centre = half_width + outputs;
    v8 squares = all(0.0f);
    for (int64_t a = 0; a < outputs; a++) {
        v8 noise = load(block->columns + a * BLOCK + at);
        v8 action = load(block->output + a * BLOCK + at) + noise * all(job->std[a]);
        v8 limited = at_most(at_least(action, all(low[a])), all(high[a]));
        store(block->output_gradient + a * BLOCK + at, action);
        store(block->columns + a * BLOCK + at, limited * all(half_width[a]) + all(centre[a]));
        squares += noise * noise;
    }
    return all(log_density_at_mean(job)) - all(0.5f) * squares;
}

/* The same for a categorical action, by the Gumbel maximum; its number goes into output_gradient.
   As in argmax the first of equal logits wins, and NaN is larger than any number */
INLINE v8 categorical_draw(const Job *job, const Block *block, int64_t at)
{
    v8 chosen = all(0.0f), best = all(-INFINITY), logit_of_chosen = load(block->output + at);
    for (int64_t a = 0; a < job->plan->outputs; a++) {
        v8 uniform = load(block->columns + a * BLOCK + at);
        v8 logit = load(block->output + a * BLOCK + at);
        /* never 0, never 1; a product with 1 - UNIT would be rounded once with its sum */
        v8 inside = uniform - uniform * all(UNIT) + all(0.5f * UNIT);
        v8 perturbed = logit - logarithm(-logarithm(inside));
        i8 is_better = (perturbed > best) | ((perturbed != perturbed) & (best == best));
        chosen = choose(is_better, all((float)a), chosen);
        best = choose(is_better, perturbed, best);
        logit_of_chosen = choose(is_better, logit, logit_of_chosen);
    }
    store(block->output_gradient + at, chosen);
    v8 highest, log_sum = log_sum_of_powers(block->output + at, job->plan->outputs, &highest);
    return logit_of_chosen - highest - log_sum;
}

/* Draws and writes action, log_prob and, where it is another, the environment's action */
static void act_block(const Job *job, const Block *block, int64_t first, int64_t count,
                      int64_t padded)
{
    int64_t outputs = job->plan->outputs, is_gaussian = job->policy->head == GAUSSIAN;
    float *log_prob = block->output_gradient + outputs * BLOCK;
    draw_block(job, block, first, count, padded);
    for (int64_t at = 0; at < padded; at += LANES)
        store(log_prob + at, is_gaussian ? gaussian_draw(job, block, at)
                                         : categorical_draw(job, block, at));
    memcpy(job->log_prob + first, log_prob, count * sizeof(float));
    if (is_gaussian) {
        write_rows(block->output_gradient, outputs, count, (float *)job->action + first * outputs);
        write_rows(block->columns, outputs, count, job->env_action + first * outputs);
    } else
        for (int64_t r = 0; r < count; r++)
            ((int64_t *)job->action)[first + r] = (int64_t)block->output_gradient[r];
}
