/* The MLP actor-critic for one block of rows: packed layers, forward pass, and backward pass to
   sums of gradients. */

#pragma once

#include "cpu_threads.h"
#include "products_cpu.h"

#define SLICE_ROWS 384 /* fewer are not worth another thread: their work takes ten times as long as
                          waking one */

enum { GAUSSIAN, CATEGORICAL };
/* columns of a row of the rollout, after obs and action; VALID if has_valid */
enum { LOG_PROB, VALUE, ADVANTAGE, RETURNS, VALID, EXTRA_COLUMNS };
/* metrics of a step */
enum { SURROGATE, VALUE_LOSS, KL, CLIPPED, ENTROPY, NORM, NUM_METRICS };

/* weight [outputs, inputs] and bias [outputs], and where their gradients go */
typedef struct {
    int64_t inputs, outputs, tower;
    const float *weight, *bias;
    float *weight_gradient, *bias_gradient;
} Layer;

/* Constants of PPO's loss; a row of the rollout is obs [inputs], action [actions], then the columns
   LOG_PROB and so on */
typedef struct {
    int64_t head, actions, has_valid, normalizes_advantage, clips_value;
    double clip_range, entropy_coef, value_coef, clip_range_value, min_log_std, max_log_std;
    const float *log_std;
    float *log_std_gradient;
} Loss;

/* Inputs of acting besides the network; shapes and formulas are those of actor_critic_cpu.py.
   obs_shift, value_shift NULL: not normalised */
typedef struct {
    int64_t head;
    double min_log_std, max_log_std, obs_limit;
    const float *log_std, *units;
    const float *obs_shift, *obs_inv_std, *value_shift, *value_inv_std;
    const uint64_t *key, *gamma;
} Policy;

typedef struct {
    Layer layer;
    int64_t inputs_wide, outputs_wide; /* padded */
    float *forward;  /* pack_transposed; of a head the weight itself, [outputs, inputs_wide] */
    float *backward; /* pack_panels */
    float *bias;     /* [outputs_wide] */
    /* offsets in the sums of a slice: of the weight gradient [inputs, outputs_wide], of a head
       [outputs, inputs_wide], and of the bias gradient [outputs_wide] */
    int64_t weight_sum, bias_sum;
} Packed;

typedef struct {
    int64_t towers, hidden, inputs, inputs_wide, outputs, widest, activation;
    Packed layers[MAX_LAYERS], heads[2]; /* layers: tower by tower; heads: actor, critic */
    int64_t num_sums, log_std_sum;       /* floats a slice sums up */
    int64_t max_slices;
    float *sums;            /* [max_slices, num_sums] */
    double (*metrics)[NUM_METRICS]; /* [max_slices, NUM_METRICS] */
    float *std;             /* [outputs], of a Gaussian: see Job */
    float *packed;          /* memory of the layers' packed weights */
    int64_t scratch_floats;
    float *scratch[MAX_THREADS];
    pthread_mutex_t *caller; /* of this plan */
} Plan;

enum { ACT, ONLY_VALUE, LEARN };

/* One pass over `rows` rows */
typedef struct {
    Plan *plan;
    int mode;
    /* row: stride of the rows of x, in floats, of which the first `used` are read */
    int64_t rows, row, used;
    const float *x;       /* [rows, inputs]; LEARN: the rollout */
    const int64_t *index; /* LEARN: [rows] numbers of its rows */
    const Policy *policy; /* ACT and ONLY_VALUE read it */
    uint64_t counter;     /* ACT: the first random word of each stream */
    float *value;         /* ACT and ONLY_VALUE write [rows] */
    void *action;         /* ACT: [rows, outputs] float or [rows] int64_t */
    float *log_prob, *env_action; /* ACT: [rows], [rows, outputs] */
    const Loss *loss;
    float weight, mean, scale; /* of a valid row; of the normalised advantage */
    /* of a Gaussian: std [outputs], in LEARN 1 / std; sum of the clamped log standard deviations */
    float *std, log_std_total;
} Job;

/* ---- heads ---- */

/* output [outputs, BLOCK] = weight h^T + bias; h: [rows, wide]. For few outputs, sums along h waste
   less than columns padded to WIDE */
static void head_forward(const Packed *head, const float *h, int64_t rows, float *output)
{
    int64_t wide = head->inputs_wide;
    for (int64_t o = 0; o < head->layer.outputs; o++)
        for (int64_t r = 0; r < rows; r += 4) {
            v8 sum[4] = {all(0.0f), all(0.0f), all(0.0f), all(0.0f)};
            for (int64_t k = 0; k < wide; k += LANES) {
                v8 weight = load(head->forward + o * wide + k);
                for (int i = 0; i < 4; i++) sum[i] += weight * load(h + (r + i) * wide + k);
            }
            for (int i = 0; i < 4; i++) output[o * BLOCK + r + i] = total(sum[i]) + head->bias[o];
        }
}

/* Set job->std of a Gaussian to e^(sign * log_std), and job->log_std_total, with clamped log_std */
static void limit_log_std(Job *job, const float *log_std, double lowest, double highest, float sign)
{
    job->log_std_total = 0.0f;
    for (int64_t a = 0; a < job->plan->outputs; a++) {
        float limited = fmaxf(fminf(log_std[a], (float)highest), (float)lowest);
        if (isnan(log_std[a])) limited = NAN;
        job->std[a] = expf(sign * limited);
        job->log_std_total += limited;
    }
}

/* Log-probability of a Gaussian at its mean: the sum of -log(std sqrt(2 pi)) */
static float log_density_at_mean(const Job *job)
{
    return -job->log_std_total - 0.918938533f * (float)job->plan->outputs;
}

/* log(sum of e^(logit - highest)) of logits [outputs, BLOCK], one row in each lane; NaN if one of
   them is */
INLINE v8 log_sum_of_powers(const float *logits, int64_t outputs, v8 *highest)
{
    v8 sum = all(0.0f);
    *highest = load(logits);
    for (int64_t a = 1; a < outputs; a++) *highest = at_least(*highest, load(logits + a * BLOCK));
    for (int64_t a = 0; a < outputs; a++) sum += exponential(load(logits + a * BLOCK) - *highest);
    return logarithm(sum);
}

/* ---- a block of rows ---- */

/* Arrays of a block in its thread's scratch */
typedef struct {
    float *x, *gradient, *next_gradient; /* [BLOCK, inputs_wide], 2 x [BLOCK, widest] */
    float *output, *output_gradient;     /* [outputs + 1, BLOCK]: the actor's, then the value */
    float *columns;                      /* [actions + EXTRA_COLUMNS, BLOCK] of the rollout */
    float *hidden[MAX_LAYERS];           /* [BLOCK, outputs_wide] */
} Block;

static Block block_in(const Plan *plan, float *scratch)
{
    Block block;
    block.x = scratch;
    block.gradient = block.x + BLOCK * plan->inputs_wide;
    block.next_gradient = block.gradient + BLOCK * plan->widest;
    block.output = block.next_gradient + BLOCK * plan->widest;
    block.output_gradient = block.output + BLOCK * (plan->outputs + 1);
    block.columns = block.output_gradient + BLOCK * (plan->outputs + 1);
    scratch = block.columns + BLOCK * (plan->outputs + EXTRA_COLUMNS);
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        block.hidden[l] = scratch;
        scratch += BLOCK * plan->layers[l].outputs_wide;
    }
    return block;
}

/* Input of head number `number`: the last hidden layer of its tower, or x */
static float *input_of_head(const Plan *plan, const Block *block, int number)
{
    if (!plan->hidden) return block->x;
    return block->hidden[(plan->heads[number].layer.tower + 1) * plan->hidden - 1];
}

/* One row of observations, as Normalizer in gpurl/nn/normalizer.py; NaN stays */
static void normalize(const Policy *policy, const float *from, int64_t inputs, float *to)
{
    float limit = (float)policy->obs_limit;
    for (int64_t d = 0; d < inputs; d++) {
        float x = (from[d] - policy->obs_shift[d]) * policy->obs_inv_std[d];
        x = x < -limit ? -limit : x;
        to[d] = x > limit ? limit : x;
    }
}

/* Copy rows first .. first + count, repeating the last up to `padded` */
static void gather(const Job *job, const Block *block, int64_t first, int64_t count,
                   int64_t padded)
{
    const Plan *plan = job->plan;
    int64_t inputs = plan->inputs, row = job->row, used = job->used;
    for (int64_t r = 0; r < padded; r++) {
        int64_t at = first + (r < count ? r : count - 1);
        const float *from = job->x + (job->index ? job->index[at] : at) * row;
        if (job->index && at + 8 < job->rows) __builtin_prefetch(job->x + job->index[at + 8] * row);
        float *to = block->x + r * plan->inputs_wide;
        if (job->policy && job->policy->obs_shift) normalize(job->policy, from, inputs, to);
        else memcpy(to, from, inputs * sizeof(float));
        for (int64_t d = inputs; d < plan->inputs_wide; d++) to[d] = 0.0f;
        for (int64_t c = inputs; c < used; c++) block->columns[(c - inputs) * BLOCK + r] = from[c];
    }
}

/* only_value: computes the row of the value only */
static void forward_block(const Plan *plan, const Block *block, int64_t rows, int only_value)
{
    int64_t first_tower = only_value ? plan->towers - 1 : 0;
    for (int64_t l = first_tower * plan->hidden; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        const float *input = l % plan->hidden ? block->hidden[l - 1] : block->x;
        int64_t outputs = p->layer.outputs, wide = p->outputs_wide;
        product_of_rows(rows, wide, p->layer.inputs, input, p->inputs_wide, p->forward,
                        p->layer.inputs, WIDE, p->bias, 0, block->hidden[l], wide);
        activate(plan->activation, block->hidden[l], rows * wide);
        /* infinite x makes the padding NaN: 0 times infinity */
        for (int64_t r = 0; outputs < wide && r < rows; r++)
            memset(block->hidden[l] + r * wide + outputs, 0, (wide - outputs) * sizeof(float));
    }
    for (int i = only_value; i < 2; i++)
        head_forward(&plan->heads[i], input_of_head(plan, block, i), rows,
                     block->output + (i ? plan->outputs * BLOCK : 0));
}

/* columns [width, BLOCK] -> rows [count, width] */
static void write_rows(const float *columns, int64_t width, int64_t count, float *rows)
{
    for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < width; c++) rows[r * width + c] = columns[c * BLOCK + r];
}

/* The values of a block's rows, in units of returns */
static void write_value(const Job *job, const Block *block, int64_t first, int64_t count)
{
    const Policy *policy = job->policy;
    const float *value = block->output + job->plan->outputs * BLOCK;
    memcpy(job->value + first, value, count * sizeof(float));
    if (policy->value_shift)
        for (int64_t r = 0; r < count; r++)
            job->value[first + r] = value[r] / *policy->value_inv_std + *policy->value_shift;
}

/* Add the gradients of head number i, from output_gradient, to sums. If there are hidden layers,
   write the gradient by the last one into `gradient`, or add it unless this head is the first */
static void backward_head(const Plan *plan, const Block *block, int i, int64_t rows, float *sums,
                          float *gradient, int is_first)
{
    static const float zeros[WIDE];
    const Packed *p = &plan->heads[i];
    const float *output_gradient = block->output_gradient + (i ? plan->outputs * BLOCK : 0);
    int64_t wide = p->inputs_wide, outputs = p->layer.outputs;
    float *sum = sums + p->weight_sum;
    product_of_rows(outputs, wide, rows, output_gradient, BLOCK, input_of_head(plan, block, i), 1,
                    wide, sum, wide, sum, wide);
    for (int64_t o = 0; o < outputs; o++) {
        v8 bias = all(0.0f);
        for (int64_t r = 0; r < rows; r += LANES) bias += load(output_gradient + o * BLOCK + r);
        sums[p->bias_sum + o] += total(bias);
    }
    for (int64_t n = 0; plan->hidden && n < wide; n += WIDE)
        product_of_columns(rows, WIDE, outputs, output_gradient, BLOCK, p->forward + n, wide,
                           is_first ? zeros : gradient + n, is_first ? 0 : wide, gradient + n,
                           wide);
}

/* Add the gradients of a block, from output_gradient, to sums */
static void backward_block(const Plan *plan, const Block *block, int64_t rows, float *sums)
{
    static const float zeros[WIDE];
    for (int64_t tower = plan->towers - 1; tower >= 0; tower--) {
        float *gradient = block->gradient, *next = block->next_gradient;

        /* the heads of this tower */
        int is_first = 1;
        for (int i = 0; i < 2; i++) {
            if (plan->heads[i].layer.tower != tower) continue;
            backward_head(plan, block, i, rows, sums, gradient, is_first);
            is_first = 0;
        }

        /* its hidden layers, last one first */
        for (int64_t l = (tower + 1) * plan->hidden - 1; l >= tower * plan->hidden; l--) {
            const Packed *p = &plan->layers[l];
            const float *input = l % plan->hidden ? block->hidden[l - 1] : block->x;
            int64_t wide = p->outputs_wide, outputs = p->layer.outputs;
            float *sum = sums + p->weight_sum, *bias_sum = sums + p->bias_sum;
            slope(plan->activation, gradient, block->hidden[l], rows, wide, wide, bias_sum);
            product_of_columns(p->layer.inputs, wide, rows, input, p->inputs_wide, gradient, wide,
                               sum, wide, sum, wide);
            if (l % plan->hidden == 0) break;
            for (int64_t n = 0; n < p->inputs_wide; n += WIDE)
                product_of_rows(rows, WIDE, outputs, gradient, wide, p->backward + n * outputs, 1,
                                WIDE, zeros, 0, next + n, p->inputs_wide);
            float *used = gradient;
            gradient = next;
            next = used;
        }
    }
}
