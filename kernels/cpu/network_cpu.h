/* The MLP actor-critic for one block of rows: its layers in the form that the products read,
   forward, and backward to sums of gradients. */

#pragma once

#include "products_cpu.h"

#define BLOCK 96          /* rows: a multiple of TILE and LANES; a tower's activations of so many take half of a core's second cache */
#define MAX_SLICES 32
#define SLICE_ROWS 384    /* fewer are not worth another thread: their work takes as long as waking one ten times */
#define MAX_LAYERS 64
#define MAX_SUMS (1 << 23)  /* floats of all slices' sums: large networks have fewer slices */

enum { GAUSSIAN, CATEGORICAL };
enum { LOG_PROB, VALUE, ADVANTAGE, RETURNS, VALID, EXTRA_COLUMNS };  /* of a row of the rollout, after obs and action; VALID if has_valid */
enum { SURROGATE, VALUE_LOSS, KL, CLIPPED, ENTROPY, NORM, PARTS };   /* what a step tells */

typedef struct {  /* weight [outputs, inputs] and bias [outputs], and where their gradients go */
    int64_t inputs, outputs, tower;
    const float *weight, *bias;
    float *weight_gradient, *bias_gradient;
} Layer;

typedef struct {  /* of PPO's loss; a row of the rollout is obs [inputs], action [actions], then columns as LOG_PROB and so on */
    int64_t head, actions, has_valid, normalizes_advantage, clips_value;
    double clip_range, entropy_coef, value_coef, clip_range_value, min_log_std, max_log_std;
    const float *log_std;
    float *log_std_gradient;
} Loss;

/* What observations become actions by, beside the network; shapes and formulas are
   actor_critic_cpu.py's. obs_shift, value_shift NULL: nothing is normalised */
typedef struct {
    int64_t head;
    double min_log_std, max_log_std, obs_limit;
    const float *log_std, *units;
    const float *obs_shift, *obs_inv_std, *value_shift, *value_inv_std;
    const uint64_t *key, *gamma;
} Policy;

typedef struct {
    Layer layer;
    int64_t inputs_wide, outputs_wide;  /* padded */
    float *forward;   /* weight^T in panels [outputs_wide / WIDE, inputs, WIDE]; of a head the weight itself, [outputs, inputs_wide] */
    float *backward;  /* weight in panels [inputs_wide / WIDE, outputs, WIDE] */
    float *bias;      /* [outputs_wide] */
    int64_t weight_sum, bias_sum;  /* where a slice's sums of gradients begin: [inputs, outputs_wide], of a head [outputs, inputs_wide] */
} Packed;

typedef struct {
    int64_t towers, hidden, inputs, inputs_wide, outputs, widest, activation;
    Packed layers[MAX_LAYERS], heads[2];  /* layers: tower by tower; heads: actor, critic */
    int64_t num_sums, log_std_sum;        /* floats a slice sums up */
    int64_t max_slices;
    float *sums;                          /* [max_slices, num_sums] */
    double (*parts)[PARTS];               /* [max_slices, PARTS] */
    float *std;                           /* [outputs], of a Gaussian: see Job */
    float *packed;                        /* what the layers' pointers point into */
    int64_t scratch_floats;
    float *scratch[MAX_THREADS];
} Plan;

enum { FORWARD, ACT, BACKWARD, LEARN };
typedef struct {  /* one pass over `rows` rows */
    Plan *plan;
    int mode;
    int64_t rows, row, used;     /* row: floats from one row of x to the next, of which the first `used` are read */
    const float *x;              /* [rows, inputs]; LEARN: the rollout, of which `index` [rows] says the rows */
    const int64_t *index;
    const Policy *policy;        /* ACT reads it, and FORWARD where it is not NULL */
    uint64_t counter;            /* ACT: the word that each stream's numbers begin with */
    float *output, *value;       /* FORWARD writes [rows, outputs] unless NULL; it and ACT [rows] */
    void *action;                /* ACT: [rows, outputs] float or [rows] int64_t */
    float *log_prob, *env_action;  /* ACT: [rows], [rows, outputs] */
    const float *of_output, *of_value;  /* BACKWARD reads them: derivatives of a loss by the two */
    const Loss *loss;
    float weight, mean, scale;   /* of a valid row; what the advantage is normalised with */
    /* of a Gaussian: std [outputs], where it learns 1 / std; sum of the log standard deviations
       inside their limits */
    float *std, log_std_total;
} Job;

/* ---- heads ---- */

/* output [outputs, BLOCK] = weight h^T + bias; h: [rows, wide]. A head is thin: sums along h waste less than columns padded to WIDE */
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

/* Of a Gaussian, from the log standard deviations: job->std, e^(sign * log_std), and their sum */
static void limit_log_std(Job *job, const float *log_std, double least, double most, float sign)
{
    job->log_std_total = 0.0f;
    for (int64_t a = 0; a < job->plan->outputs; a++) {
        float limited = fmaxf(fminf(log_std[a], (float)most), (float)least);
        if (isnan(log_std[a])) limited = NAN;
        job->std[a] = expf(sign * limited);
        job->log_std_total += limited;
    }
}

/* Of a Gaussian: what the log-probability is at the mean, the sum of -log(std sqrt(2 pi)) */
static float log_density_at_mean(const Job *job)
{
    return -job->log_std_total - 0.918938533f * (float)job->plan->outputs;
}

/* Of a row of logits [outputs, BLOCK] a lane: the logarithm of the sum of e^(logit - most), NaN
   where one of them is */
INLINE v8 log_sum_of_powers(const float *logits, int64_t outputs, v8 *most)
{
    v8 sum = all(0.0f);
    *most = load(logits);
    for (int64_t a = 1; a < outputs; a++) *most = at_least(*most, load(logits + a * BLOCK));
    for (int64_t a = 0; a < outputs; a++) sum += exponential(load(logits + a * BLOCK) - *most);
    return logarithm(sum);
}

/* ---- a block of rows ---- */

typedef struct {  /* where a block's numbers lie in its thread's scratch */
    float *x, *gradient, *next_gradient;  /* [BLOCK, inputs_wide], 2 x [BLOCK, widest] */
    float *output, *of_output;            /* [outputs + 1, BLOCK]: the actor's, then the value */
    float *columns;                       /* [actions + EXTRA_COLUMNS, BLOCK] of the rollout */
    float *hidden[MAX_LAYERS];            /* [BLOCK, outputs_wide] */
} Block;

static Block block_in(const Plan *plan, float *scratch)
{
    Block block;
    block.x = scratch, scratch += BLOCK * plan->inputs_wide;
    block.gradient = scratch, scratch += BLOCK * plan->widest;
    block.next_gradient = scratch, scratch += BLOCK * plan->widest;
    block.output = scratch, scratch += BLOCK * (plan->outputs + 1);
    block.of_output = scratch, scratch += BLOCK * (plan->outputs + 1);
    block.columns = scratch, scratch += BLOCK * (plan->outputs + EXTRA_COLUMNS);
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) block.hidden[l] = scratch, scratch += BLOCK * plan->layers[l].outputs_wide;
    return block;
}

/* What head number `number` reads: the last hidden layer of its tower, or x */
static float *input_of_head(const Plan *plan, const Block *block, int number)
{
    return plan->hidden ? block->hidden[(plan->heads[number].layer.tower + 1) * plan->hidden - 1] : block->x;
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
static void gather(const Job *job, const Block *block, int64_t first, int64_t count, int64_t padded)
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

/* only_value: output gets the value's row alone */
static void forward_block(const Plan *plan, const Block *block, int64_t rows, int only_value)
{
    int64_t first_tower = only_value ? plan->towers - 1 : 0;
    for (int64_t l = first_tower * plan->hidden; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        const float *input = l % plan->hidden ? block->hidden[l - 1] : block->x;
        product_of_rows(rows, p->outputs_wide, p->layer.inputs, input, p->inputs_wide, p->forward, p->layer.inputs, WIDE, p->bias, 0,
                        block->hidden[l], p->outputs_wide);
        activate(plan->activation, block->hidden[l], rows * p->outputs_wide);
        for (int64_t r = 0; p->layer.outputs < p->outputs_wide && r < rows; r++)  /* where x is infinite they are NaN: 0 times infinity */
            memset(block->hidden[l] + r * p->outputs_wide + p->layer.outputs, 0, (p->outputs_wide - p->layer.outputs) * sizeof(float));
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

/* What a FORWARD writes, and an ACT of the value */
static void write_output(const Job *job, const Block *block, int64_t first, int64_t count)
{
    const Policy *policy = job->policy;
    int64_t outputs = job->plan->outputs;
    const float *value = block->output + outputs * BLOCK;
    if (job->output) write_rows(block->output, outputs, count, job->output + first * outputs);
    memcpy(job->value + first, value, count * sizeof(float));
    if (policy && policy->value_shift)
        for (int64_t r = 0; r < count; r++)
            job->value[first + r] = value[r] / *policy->value_inv_std + *policy->value_shift;
}

/* Add the gradients of a block, from of_output, to sums */
static void backward_block(const Plan *plan, const Block *block, int64_t rows, float *sums)
{
    static const float zeros[WIDE];
    for (int64_t tower = plan->towers - 1; tower >= 0; tower--) {
        float *gradient = block->gradient, *next = block->next_gradient;
        int is_first = 1;
        for (int i = 0; i < 2; i++) {
            const Packed *p = &plan->heads[i];
            if (p->layer.tower != tower) continue;
            const float *of_output = block->of_output + (i ? plan->outputs * BLOCK : 0);
            int64_t wide = p->inputs_wide, outputs = p->layer.outputs;
            float *sum = sums + p->weight_sum;
            product_of_rows(outputs, wide, rows, of_output, BLOCK, input_of_head(plan, block, i), 1, wide, sum, wide, sum, wide);
            for (int64_t o = 0; o < outputs; o++) {
                v8 bias = all(0.0f);
                for (int64_t r = 0; r < rows; r += LANES) bias += load(of_output + o * BLOCK + r);
                sums[p->bias_sum + o] += total(bias);
            }
            for (int64_t n = 0; plan->hidden && n < wide; n += WIDE)
                product_of_columns(rows, WIDE, outputs, of_output, BLOCK, p->forward + n, wide, is_first ? zeros : gradient + n,
                                   is_first ? 0 : wide, gradient + n, wide);
            is_first = 0;
        }
        for (int64_t l = (tower + 1) * plan->hidden - 1; l >= tower * plan->hidden; l--) {
            const Packed *p = &plan->layers[l];
            const float *input = l % plan->hidden ? block->hidden[l - 1] : block->x;
            int64_t wide = p->outputs_wide;
            float *sum = sums + p->weight_sum, *bias_sum = sums + p->bias_sum;
            slope(plan->activation, gradient, block->hidden[l], rows, wide, wide, bias_sum);
            product_of_columns(p->layer.inputs, wide, rows, input, p->inputs_wide, gradient, wide, sum, wide, sum, wide);
            if (l % plan->hidden == 0) break;
            for (int64_t n = 0; n < p->inputs_wide; n += WIDE)
                product_of_rows(rows, WIDE, p->layer.outputs, gradient, wide, p->backward + n * p->layer.outputs, 1, WIDE, zeros, 0,
                                next + n, p->inputs_wide);
            float *used = gradient;
            gradient = next, next = used;
        }
    }
}
