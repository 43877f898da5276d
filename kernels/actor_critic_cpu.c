/* The MLP actor-critic on a CPU: forward, backward, and PPO's loss and Adam steps between them, over blocks of rows that stay in the cache.

A pass over a rollout's minibatch by one library call an operation reads and writes all activations once an operation. Here a block of
BLOCK rows goes through everything at once: gather, both towers forward, loss, both towers backward; only its sums of gradients leave it.

Rows are cut into slices whose number depends on the number of rows alone, each with sums of its own that are added in the slices' order:
the result is the same bit for bit on any number of threads. Widths are padded to WIDE with zeros. NaN and infinity go through everything,
which is why this is never compiled with -ffast-math. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "adam_cpu.h"
#include "cpu_threads.h"
#include "cpu_vectors.h"

#define BLOCK 96          /* rows: a multiple of TILE and LANES; a tower's activations of so many take half of a core's second cache */
#define TILE 6            /* rows of a product's tile: 6 x 16 sums fill twelve of the sixteen vector registers */
#define WIDE 16           /* columns of a tile */
#define MAX_SLICES 32
#define SLICE_ROWS 384    /* fewer are not worth another thread: their work takes as long as waking one ten times */
#define MAX_LAYERS 64
#define MOST_SUMS (1 << 23)  /* floats of all slices' sums: large networks have fewer slices */

enum { TANH, ELU, RELU };
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

typedef struct {
    Layer layer;
    int64_t inputs_wide, outputs_wide;  /* padded */
    float *forward;   /* weight^T in panels [outputs_wide / WIDE, inputs, WIDE]; of a head the weight itself, [outputs, inputs_wide] */
    float *backward;  /* weight in panels [inputs_wide / WIDE, outputs, WIDE] */
    float *bias;      /* [outputs_wide] */
    int64_t weight_sum, bias_sum;  /* where a slice's sums of the gradients begin: [inputs, outputs_wide], of a head [outputs, inputs_wide] */
} Packed;

typedef struct {
    int64_t towers, hidden, inputs, inputs_wide, outputs, widest, activation;
    Packed layers[MAX_LAYERS], heads[2];  /* layers: tower by tower; heads: actor, critic */
    int64_t num_sums, log_std_sum;        /* floats a slice sums up */
    int64_t max_slices;
    float *sums;                          /* [max_slices, num_sums] */
    double (*parts)[PARTS];               /* [max_slices, PARTS] */
    float *packed;                        /* what the layers' pointers point into */
    int64_t scratch_floats;
    float *scratch[MAX_THREADS];
} Plan;

enum { FORWARD, BACKWARD, LEARN };
typedef struct {  /* one pass over `rows` rows */
    Plan *plan;
    int mode;
    int64_t rows, row;           /* row: floats from one row of x to the next */
    const float *x;              /* [rows, inputs]; LEARN: the rollout, of which `index` [rows] says the rows */
    const int64_t *index;
    float *output, *value;       /* FORWARD writes them: [rows, outputs], [rows] */
    const float *of_output, *of_value;  /* BACKWARD reads them: derivatives of a loss by the two */
    const Loss *loss;
    float weight, mean, scale;   /* of a valid row; what the advantage is normalised with */
    float *std, log_std_total;   /* of a Gaussian: 1 / std [outputs]; sum of the log standard deviations inside their limits */
} Job;

static float *new_floats(int64_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

/* ---- activations ---- */

static void activate(int64_t activation, float *z, int64_t count)
{
    if (activation == TANH)
        for (int64_t i = 0; i < count; i += LANES) store(z + i, hyperbolic_tangent(load(z + i)));
    else if (activation == RELU)
        for (int64_t i = 0; i < count; i += LANES) store(z + i, at_least(load(z + i), all(0.0f)));
    else
        for (int64_t i = 0; i < count; i += LANES) {
            v8 x = load(z + i);
            store(z + i, choose(x > all(0.0f), x, exponential(x) - all(1.0f)));
        }
}

/* gradient [rows, wide] times the activation's slope, by its value h; the columns' sums are added to bias_sum [wide] */
INLINE void slope_pass(int activation, float *gradient, const float *h, int64_t rows, int64_t wide, float *bias_sum)
{
    for (int64_t column = 0; column < wide; column += LANES) {
        v8 sum = load(bias_sum + column);
        for (int64_t at = column; at < rows * wide; at += wide) {
            v8 value = load(h + at), slope;
            if (activation == TANH) slope = all(1.0f) - value * value;
            else if (activation == ELU) slope = at_most(value, all(0.0f)) + all(1.0f);
            else slope = share(value > all(0.0f));
            v8 changed = load(gradient + at) * slope;
            store(gradient + at, changed);
            sum += changed;
        }
        store(bias_sum + column, sum);
    }
}

/* ---- matrix products ---- */

/* c [rows, WIDE] = start + a b over `depth` steps; rows is a constant, so that the sums stay in registers */
INLINE void tile(const int rows, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                 const float *start, int64_t start_row, float *c, int64_t c_row)
{
    v8 sum[TILE][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) sum[i][0] = load(start + i * start_row), sum[i][1] = load(start + i * start_row + LANES);
    for (int64_t k = 0; k < depth; k++, a += a_step, b += b_step) {
        v8 left = load(b), right = load(b + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            v8 factor = all(a[i * a_row]);
            sum[i][0] += factor * left;
            sum[i][1] += factor * right;
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) store(c + i * c_row, sum[i][0]), store(c + i * c_row + LANES, sum[i][1]);
}

/* c [rows, columns] = start + a [rows, depth] b [depth, columns]; columns: a multiple of WIDE; b_panel: floats from one panel of WIDE columns
   to the next, over WIDE; start_row 0 repeats one row */
INLINE void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b,
                    int64_t b_panel, int64_t b_step, const float *start, int64_t start_row, float *c, int64_t c_row)
{
    for (int64_t n = 0; n < columns; n += WIDE)
        for (int64_t m = 0; m < rows; m += TILE) {
#define PART(count) tile(count, depth, a + m * a_row, a_row, a_step, b + n * b_panel, b_step, start + m * start_row + n, start_row, \
                         c + m * c_row + n, c_row)
            switch (rows - m) {
            case 1: PART(1); break;
            case 2: PART(2); break;
            case 3: PART(3); break;
            case 4: PART(4); break;
            case 5: PART(5); break;
            default: PART(TILE);
            }
        }
}

/* a is stored by rows */
static __attribute__((noinline)) void product_of_rows(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, const float *b, int64_t b_panel,
                            int64_t b_step, const float *start, int64_t start_row, float *c, int64_t c_row)
{
    product(rows, columns, depth, a, a_row, 1, b, b_panel, b_step, start, start_row, c, c_row);
}

/* a is stored by columns */
static __attribute__((noinline)) void product_of_columns(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_step, const float *b, int64_t b_step,
                               const float *start, int64_t start_row, float *c, int64_t c_row)
{
    product(rows, columns, depth, a, 1, a_step, b, 1, b_step, start, start_row, c, c_row);
}

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

/* Copy rows first .. first + count, repeating the last up to `padded` */
static void gather(const Job *job, const Block *block, int64_t first, int64_t count, int64_t padded)
{
    const Plan *plan = job->plan;
    int64_t inputs = plan->inputs, row = job->row;
    for (int64_t r = 0; r < padded; r++) {
        int64_t at = first + (r < count ? r : count - 1);
        const float *from = job->x + (job->index ? job->index[at] : at) * row;
        if (job->index && at + 8 < job->rows) __builtin_prefetch(job->x + job->index[at + 8] * row);
        float *to = block->x + r * plan->inputs_wide;
        for (int64_t d = 0; d < inputs; d++) to[d] = from[d];
        for (int64_t d = inputs; d < plan->inputs_wide; d++) to[d] = 0.0f;
        for (int64_t c = inputs; c < row; c++) block->columns[(c - inputs) * BLOCK + r] = from[c];
    }
}

static void forward_block(const Plan *plan, const Block *block, int64_t rows)
{
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        const float *input = l % plan->hidden ? block->hidden[l - 1] : block->x;
        product_of_rows(rows, p->outputs_wide, p->layer.inputs, input, p->inputs_wide, p->forward, p->layer.inputs, WIDE, p->bias, 0,
                        block->hidden[l], p->outputs_wide);
        activate(plan->activation, block->hidden[l], rows * p->outputs_wide);
        for (int64_t r = 0; p->layer.outputs < p->outputs_wide && r < rows; r++)  /* where x is infinite they are NaN: 0 times infinity */
            memset(block->hidden[l] + r * p->outputs_wide + p->layer.outputs, 0, (p->outputs_wide - p->layer.outputs) * sizeof(float));
    }
    for (int i = 0; i < 2; i++)
        head_forward(&plan->heads[i], input_of_head(plan, block, i), rows, block->output + (i ? plan->outputs * BLOCK : 0));
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
            if (plan->activation == TANH) slope_pass(TANH, gradient, block->hidden[l], rows, wide, bias_sum);
            else if (plan->activation == ELU) slope_pass(ELU, gradient, block->hidden[l], rows, wide, bias_sum);
            else slope_pass(RELU, gradient, block->hidden[l], rows, wide, bias_sum);
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

/* ---- PPO's loss ---- */

typedef struct { v8 of_log_prob, of_entropy; } Slopes;

/* gpurl/losses.py's ppo_loss for LANES rows from `at`: writes the value's slope, adds to parts, returns the policy's. `entropy` NULL: it is
   the same for all rows */
INLINE Slopes loss_of_rows(const Job *job, const Block *block, int64_t at, v8 is_row, v8 log_prob, const v8 *entropy, v8 *parts)
{
    const Loss *loss = job->loss;
    const float *columns = block->columns + loss->actions * BLOCK + at;
    v8 one = all(1.0f), weight = is_row * all(job->weight);
    if (loss->has_valid) weight *= load(columns + VALID * BLOCK);
    v8 advantage = (load(columns + ADVANTAGE * BLOCK) - all(job->mean)) * all(job->scale);
    v8 log_ratio = log_prob - load(columns + LOG_PROB * BLOCK), ratio = exponential(log_ratio);
    v8 clipped = at_most(at_least(ratio, all(1.0f - (float)loss->clip_range)), all(1.0f + (float)loss->clip_range));
    v8 surrogate = ratio * advantage, clipped_surrogate = clipped * advantage;
    v8 value = load(block->output + job->plan->outputs * BLOCK + at), old = load(columns + VALUE * BLOCK);
    v8 returns = load(columns + RETURNS * BLOCK), error = value - returns, half_slope = error, square = error * error;
    if (loss->clips_value) {
        v8 step = value - old, limit = all((float)loss->clip_range_value), moved = at_most(at_least(step, -limit), limit);
        v8 other = old + moved - returns, other_square = other * other;
        half_slope = choose(square >= other_square, error, other * share((step >= -limit) & (step <= limit)));
        square = choose(square < other_square, other_square, square);
    }
    store(block->of_output + job->plan->outputs * BLOCK + at, half_slope * weight * all(2.0f * (float)loss->value_coef));
    parts[SURROGATE] += weight * choose(clipped_surrogate < surrogate, clipped_surrogate, surrogate);
    parts[VALUE_LOSS] += weight * square;
    parts[KL] += weight * (ratio - one - log_ratio);
    parts[CLIPPED] += weight * share(ratio != clipped);
    if (entropy) parts[ENTROPY] += weight * *entropy;
    Slopes slopes = {-weight * surrogate * share(surrogate <= clipped_surrogate), -weight * all((float)loss->entropy_coef)};
    return slopes;
}

/* As Gaussian.evaluate in gpurl/distributions.py; `sums` [outputs + 1]: slope times z^2, for the gradient of log_std, then the slope alone */
INLINE void gaussian_rows(const Job *job, const Block *block, int64_t at, v8 is_row, float *sums, v8 *parts)
{
    int64_t outputs = job->plan->outputs;
    v8 squares = all(0.0f);
    for (int64_t a = 0; a < outputs; a++) {
        v8 z = (load(block->columns + a * BLOCK + at) - load(block->output + a * BLOCK + at)) * all(job->std[a]);
        squares += z * z;
        store(block->of_output + a * BLOCK + at, z);
    }
    v8 log_prob = all(-job->log_std_total - 0.918938533f * (float)outputs) - all(0.5f) * squares;
    v8 slope = loss_of_rows(job, block, at, is_row, log_prob, NULL, parts).of_log_prob;
    for (int64_t a = 0; a < outputs; a++) {
        v8 z = load(block->of_output + a * BLOCK + at), moved = slope * z;
        store(block->of_output + a * BLOCK + at, moved * all(job->std[a]));
        sums[a] += total(moved * z);
    }
    sums[outputs] += total(slope);
}

/* As Categorical.evaluate; of_output holds the probabilities and output the log-probabilities on the way */
INLINE void categorical_rows(const Job *job, const Block *block, int64_t at, v8 is_row, v8 *parts)
{
    int64_t outputs = job->plan->outputs;
    v8 most = load(block->output + at), sum = all(0.0f), log_sum, picked = all(0.0f), entropy = all(0.0f), action = load(block->columns + at);
    for (int64_t a = 1; a < outputs; a++) most = at_least(most, load(block->output + a * BLOCK + at));
    for (int64_t a = 0; a < outputs; a++) sum += exponential(load(block->output + a * BLOCK + at) - most);
    for (int i = 0; i < LANES; i++) log_sum[i] = logf(sum[i]);
    for (int64_t a = 0; a < outputs; a++) {
        v8 log_prob = load(block->output + a * BLOCK + at) - most - log_sum, probability = exponential(log_prob);
        store(block->output + a * BLOCK + at, log_prob);
        store(block->of_output + a * BLOCK + at, probability);
        entropy -= probability * log_prob;
        picked = choose(action == all((float)a), log_prob, picked);
    }
    Slopes slopes = loss_of_rows(job, block, at, is_row, picked, &entropy, parts);
    for (int64_t a = 0; a < outputs; a++) {
        v8 probability = load(block->of_output + a * BLOCK + at), log_prob = load(block->output + a * BLOCK + at);
        v8 gradient = -probability * (slopes.of_log_prob + slopes.of_entropy * (log_prob + entropy));
        store(block->of_output + a * BLOCK + at, gradient + slopes.of_log_prob * share(action == all((float)a)));
    }
}

static void loss_block(const Job *job, const Block *block, int64_t count, int64_t padded, float *sums, double *parts)
{
    v8 sum[PARTS] = {0}, lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int64_t at = 0; at < padded; at += LANES) {
        v8 is_row = share(lane < all((float)(count - at)));
        if (job->loss->head == GAUSSIAN) gaussian_rows(job, block, at, is_row, sums + job->plan->log_std_sum, sum);
        else categorical_rows(job, block, at, is_row, sum);
    }
    for (int part = 0; part < PARTS; part++) parts[part] += total(sum[part]);
}

/* ---- slices ---- */

static int64_t slices_of(const Plan *plan, int64_t rows)
{
    int64_t slices = rows / SLICE_ROWS;
    return slices < 1 ? 1 : slices > plan->max_slices ? plan->max_slices : slices;
}

static void run_slice(void *pointer, int thread, int64_t slice)
{
    const Job *job = pointer;
    const Plan *plan = job->plan;
    Block block = block_in(plan, plan->scratch[thread]);
    int64_t blocks = (job->rows + BLOCK - 1) / BLOCK, slices = slices_of(job->plan, job->rows), outputs = plan->outputs;
    int64_t end = blocks * (slice + 1) / slices * BLOCK;
    float *sums = plan->sums + slice * plan->num_sums;
    if (end > job->rows) end = job->rows;
    if (job->mode != FORWARD) memset(sums, 0, plan->num_sums * sizeof(float)), memset(plan->parts[slice], 0, sizeof *plan->parts);
    for (int64_t first = blocks * slice / slices * BLOCK; first < end; first += BLOCK) {
        int64_t count = end - first < BLOCK ? end - first : BLOCK, padded = (count + LANES - 1) / LANES * LANES;
        gather(job, &block, first, count, padded);
        forward_block(plan, &block, padded);
        if (job->mode == FORWARD) {
            for (int64_t r = 0; r < count; r++) {
                for (int64_t o = 0; o < outputs; o++) job->output[(first + r) * outputs + o] = block.output[o * BLOCK + r];
                job->value[first + r] = block.output[outputs * BLOCK + r];
            }
            continue;
        }
        if (job->mode == LEARN) loss_block(job, &block, count, padded, sums, plan->parts[slice]);
        else
            for (int64_t r = 0; r < padded; r++) {
                for (int64_t o = 0; o < outputs; o++)
                    block.of_output[o * BLOCK + r] = r < count ? job->of_output[(first + r) * outputs + o] : 0.0f;
                block.of_output[outputs * BLOCK + r] = r < count ? job->of_value[first + r] : 0.0f;
            }
        backward_block(plan, &block, padded, sums);
    }
}

/* Weights into the form that the products read; those of the step before are no longer true */
static void pack(const Plan *plan)
{
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        for (int64_t n = 0; n < outputs; n += WIDE)
            transpose(p->layer.weight + n * inputs, outputs - n < WIDE ? outputs - n : WIDE, inputs, inputs, p->forward + n * inputs, WIDE);
        for (int64_t k = 0; l % plan->hidden && k < inputs; k += WIDE)
            for (int64_t n = 0; n < outputs; n++) {
                float *to = p->backward + k * outputs + n * WIDE;
                const float *from = p->layer.weight + n * inputs + k;
                if (inputs - k >= WIDE) store(to, load(from)), store(to + LANES, load(from + LANES));
                else memcpy(to, from, (inputs - k) * sizeof(float));
            }
        memcpy(p->bias, p->layer.bias, outputs * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        const Packed *p = &plan->heads[i];
        for (int64_t o = 0; o < p->layer.outputs; o++)
            memcpy(p->forward + o * p->inputs_wide, p->layer.weight + o * p->layer.inputs, p->layer.inputs * sizeof(float));
        memcpy(p->bias, p->layer.bias, p->layer.outputs * sizeof(float));
    }
}

/* Add the slices' sums in order, then write them where the gradients belong */
static void write_gradients(const Plan *plan, int64_t slices)
{
    float *sums = plan->sums;
    for (int64_t slice = 1; slice < slices; slice++)
        for (int64_t i = 0; i < plan->num_sums; i += LANES) store(sums + i, load(sums + i) + load(sums + slice * plan->num_sums + i));
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        transpose(sums + p->weight_sum, p->layer.inputs, p->layer.outputs, p->outputs_wide, p->layer.weight_gradient, p->layer.inputs);
        memcpy(p->layer.bias_gradient, sums + p->bias_sum, p->layer.outputs * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        const Packed *p = &plan->heads[i];
        for (int64_t o = 0; o < p->layer.outputs; o++)
            memcpy(p->layer.weight_gradient + o * p->layer.inputs, sums + p->weight_sum + o * p->inputs_wide,
                   p->layer.inputs * sizeof(float));
        memcpy(p->layer.bias_gradient, sums + p->bias_sum, p->layer.outputs * sizeof(float));
    }
}

/* 0, or 1 where there is no memory */
static int run_job(Job *job, int64_t threads)
{
    Plan *plan = job->plan;
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    for (int64_t thread = 0; thread < threads; thread++)
        if (!plan->scratch[thread] && !(plan->scratch[thread] = new_floats(plan->scratch_floats))) return 1;
    pack(plan);
    run_slices(run_slice, job, slices_of(job->plan, job->rows), threads);
    if (job->mode != FORWARD) write_gradients(plan, slices_of(job->plan, job->rows));
    return 0;
}

/* What the weights and the advantage of a minibatch are: 1 / count of its valid rows, and its own mean and spread if wanted */
static void weigh(Job *job)
{
    const Loss *loss = job->loss;
    const float *columns = job->x + job->plan->inputs + loss->actions;
    double count = (double)job->rows, sum = 0.0, square = 0.0;
    if (loss->has_valid) {
        count = 0.0;
        for (int64_t i = 0; i < job->rows; i++) count += columns[job->index[i] * job->row + VALID];
        if (count < 1.0) count = 1.0;
    }
    job->weight = (float)(1.0 / count), job->mean = 0.0f, job->scale = 1.0f;
    if (!loss->normalizes_advantage) return;
    for (int64_t i = 0; i < job->rows; i++) {
        const float *row = columns + job->index[i] * job->row;
        sum += (double)row[ADVANTAGE] * (loss->has_valid ? row[VALID] : 1.0f);
    }
    for (int64_t i = 0; i < job->rows; i++) {
        const float *row = columns + job->index[i] * job->row;
        double centred = row[ADVANTAGE] - sum / count;
        square += centred * centred * (loss->has_valid ? row[VALID] : 1.0f);
    }
    job->mean = (float)(sum / count), job->scale = (float)(1.0 / (sqrt(square / count) + 1e-8));
}

/* One minibatch: gradients of the loss, and its parts [PARTS] but the norm */
static int learn(Job *job, int64_t threads, double *parts)
{
    Plan *plan = job->plan;
    const Loss *loss = job->loss;
    int64_t outputs = plan->outputs;
    job->log_std_total = 0.0f;
    for (int64_t a = 0; loss->head == GAUSSIAN && a < outputs; a++) {
        float log_std = fmaxf(fminf(loss->log_std[a], (float)loss->max_log_std), (float)loss->min_log_std);
        if (isnan(loss->log_std[a])) log_std = NAN;
        job->std[a] = expf(-log_std);
        job->log_std_total += log_std;
    }
    weigh(job);
    if (run_job(job, threads)) return 1;
    for (int part = 0; part < PARTS; part++) parts[part] = 0.0;
    for (int64_t slice = 0; slice < slices_of(job->plan, job->rows); slice++)
        for (int part = 0; part < PARTS; part++) parts[part] += plan->parts[slice][part];
    if (loss->head != GAUSSIAN) return 0;
    const float *sums = plan->sums + plan->log_std_sum;
    parts[ENTROPY] = job->log_std_total + 1.418938533 * (double)outputs;  /* (1 + log 2 pi) / 2 each */
    for (int64_t a = 0; a < outputs; a++) {  /* at a limit of log_std nothing moves it */
        float is_free = loss->log_std[a] >= (float)loss->min_log_std && loss->log_std[a] <= (float)loss->max_log_std;
        loss->log_std_gradient[a] = (sums[a] - sums[outputs] - (float)loss->entropy_coef) * is_free;
    }
    return 0;
}

/* ---- what Python calls; each returns 0, or 1 where there is no memory ---- */

#define EXPORT __attribute__((visibility("default")))

EXPORT void plan_free(Plan *plan)
{
    if (!plan) return;
    for (int thread = 0; thread < MAX_THREADS; thread++) free(plan->scratch[thread]);
    free(plan->packed), free(plan->sums), free(plan->parts), free(plan);
}

static int64_t wide(int64_t width) { return (width + WIDE - 1) / WIDE * WIDE; }

/* Sizes and places of one layer; the packed weights lie `at` floats into their memory, which comes later */
static int64_t place(Plan *plan, Packed *p, const Layer *layer, int is_head, int64_t at)
{
    p->layer = *layer;
    p->inputs_wide = wide(layer->inputs), p->outputs_wide = wide(layer->outputs);
    if (p->inputs_wide > plan->widest) plan->widest = p->inputs_wide;
    if (p->outputs_wide > plan->widest) plan->widest = p->outputs_wide;
    int64_t weights = is_head ? layer->outputs * p->inputs_wide : layer->inputs * p->outputs_wide;
    p->weight_sum = plan->num_sums, p->bias_sum = p->weight_sum + weights, plan->num_sums = p->bias_sum + p->outputs_wide;
    if (plan->packed) {
        p->forward = plan->packed + at, p->bias = p->forward + weights;
        p->backward = p->bias + p->outputs_wide;
    }
    return at + weights + p->outputs_wide + (is_head ? 0 : p->inputs_wide * layer->outputs);
}

/* layers: [towers * hidden] tower by tower, then actor and critic. NULL where there is no memory */
EXPORT Plan *plan_make(const Layer *layers, int64_t towers, int64_t hidden, int64_t inputs, int64_t activation)
{
    Plan *plan = calloc(1, sizeof *plan);
    if (!plan) return NULL;
    int64_t count = towers * hidden, used = 0;
    plan->towers = towers, plan->hidden = hidden, plan->inputs = inputs, plan->activation = activation;
    plan->inputs_wide = wide(inputs), plan->outputs = layers[count].outputs;
    for (int pass = 0; pass < 2; pass++) {  /* the second knows how much memory the first wanted */
        plan->num_sums = 0, used = 0;
        for (int64_t l = 0; l < count; l++) used = place(plan, &plan->layers[l], &layers[l], 0, used);
        for (int i = 0; i < 2; i++) used = place(plan, &plan->heads[i], &layers[count + i], 1, used);
        if (!plan->packed && !(plan->packed = new_floats(used))) break;
        memset(plan->packed, 0, used * sizeof(float));
    }
    plan->log_std_sum = plan->num_sums, plan->num_sums += wide(plan->outputs + 1);
    plan->scratch_floats = BLOCK * (plan->inputs_wide + 2 * plan->widest + 3 * plan->outputs + 2 + EXTRA_COLUMNS);
    for (int64_t l = 0; l < count; l++) plan->scratch_floats += BLOCK * plan->layers[l].outputs_wide;
    plan->max_slices = MOST_SUMS / plan->num_sums < 1 ? 1 : MOST_SUMS / plan->num_sums < MAX_SLICES ? MOST_SUMS / plan->num_sums : MAX_SLICES;
    plan->sums = new_floats(plan->max_slices * plan->num_sums);
    plan->parts = malloc(plan->max_slices * sizeof *plan->parts);
    if (plan->packed && plan->sums && plan->parts) return plan;
    plan_free(plan);
    return NULL;
}

/* x: [rows, inputs] -> output [rows, outputs], value [rows] */
EXPORT int forward(Plan *plan, const float *x, int64_t rows, float *output, float *value, int64_t threads)
{
    Job job = {.plan = plan, .mode = FORWARD, .rows = rows, .row = plan->inputs, .x = x, .output = output, .value = value};
    pthread_mutex_lock(&one_caller);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(&one_caller);
    return failed;
}

/* Writes the gradients of a loss with the derivatives of_output [rows, outputs] and of_value [rows] */
EXPORT int backward(Plan *plan, const float *x, int64_t rows, const float *of_output, const float *of_value, int64_t threads)
{
    Job job = {.plan = plan, .mode = BACKWARD, .rows = rows, .row = plan->inputs, .x = x, .of_output = of_output, .of_value = of_value};
    pthread_mutex_lock(&one_caller);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(&one_caller);
    return failed;
}

/* Steps of PPO: rollout [.., row], order [minibatches * rows] -> parts [minibatches, PARTS] */
EXPORT int ppo_steps(Plan *plan, const Loss *loss, const Adam *adam, const float *rollout, int64_t row, const int64_t *order, int64_t rows,
                     int64_t minibatches, double *parts, int64_t threads)
{
    Job job = {.plan = plan, .mode = LEARN, .rows = rows, .row = row, .x = rollout, .loss = loss};
    int failed = !(job.std = malloc(plan->outputs * sizeof(float)));
    pthread_mutex_lock(&one_caller);
    for (int64_t step = 0; step < minibatches && !failed; step++, parts += PARTS) {
        job.index = order + step * rows;
        failed = learn(&job, threads, parts);
        if (!failed) parts[NORM] = adam_step(adam);
    }
    pthread_mutex_unlock(&one_caller);
    free(job.std);
    return failed;
}
