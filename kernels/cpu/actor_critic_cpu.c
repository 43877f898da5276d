/* The MLP actor-critic on a CPU: acting, values, and PPO's minibatch steps with Adam between them,
   over blocks of rows that stay in the cache.

A pass over a rollout's minibatch by one library call an operation reads and writes all activations
once an operation. Here a block of BLOCK rows goes through everything at once: gather, both towers
forward, loss, both towers backward; only its sums of gradients leave it.

Rows are cut into slices whose number depends on the number of rows alone, each with sums of its own
that are added in the slices' order: the result is the same bit for bit on any number of threads.
Widths are padded to WIDE with zeros. NaN and infinity go through everything, which is why this is
never compiled with -ffast-math. */

#include "adam_cpu.h"
#include "cpu_threads.h"
#include "ppo_loss_cpu.h"
#include "sample_cpu.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- slices ---- */

static int64_t slices_of(const Plan *plan, int64_t rows)
{
    int64_t slices = rows / SLICE_ROWS;
    return slices < 1 ? 1 : slices > plan->max_slices ? plan->max_slices : slices;
}

/* What a job does with the blocks of one slice */
static void run_slice(void *pointer, int thread, int64_t slice)
{
    const Job *job = pointer;
    const Plan *plan = job->plan;
    Block block = block_in(plan, plan->scratch[thread]);
    int64_t blocks = (job->rows + BLOCK - 1) / BLOCK, slices = slices_of(plan, job->rows);
    int64_t begin = blocks * slice / slices * BLOCK, end = blocks * (slice + 1) / slices * BLOCK;
    if (end > job->rows) end = job->rows;
    float *sums = plan->sums + slice * plan->num_sums;
    if (job->mode == LEARN) {
        memset(sums, 0, plan->num_sums * sizeof(float));
        memset(plan->parts[slice], 0, sizeof *plan->parts);
    }
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t count = end - first < BLOCK ? end - first : BLOCK;
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        gather(job, &block, first, count, padded);
        forward_block(plan, &block, padded, job->mode == ONLY_VALUE);
        if (job->mode == LEARN) {
            loss_block(job, &block, count, padded, sums, plan->parts[slice]);
            backward_block(plan, &block, padded, sums);
        } else {
            if (job->mode == ACT) act_block(job, &block, first, count, padded);
            write_value(job, &block, first, count);
        }
    }
}

/* Weights into the form that the products read; those of the step before are no longer true */
static void pack(const Plan *plan, int goes_back)
{
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        pack_transposed(p->layer.weight, outputs, inputs, p->forward);
        /* of the first layer nothing goes further back */
        if (goes_back && l % plan->hidden)
            pack_panels(p->layer.weight, outputs, inputs, p->backward);
        memcpy(p->bias, p->layer.bias, outputs * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        const Packed *p = &plan->heads[i];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        for (int64_t o = 0; o < outputs; o++)
            memcpy(p->forward + o * p->inputs_wide, p->layer.weight + o * inputs,
                   inputs * sizeof(float));
        memcpy(p->bias, p->layer.bias, outputs * sizeof(float));
    }
}

/* Add the slices' sums in order, then write them where the gradients belong */
static void write_gradients(const Plan *plan, int64_t slices)
{
    float *sums = plan->sums;
    for (int64_t slice = 1; slice < slices; slice++) {
        const float *more = sums + slice * plan->num_sums;
        for (int64_t i = 0; i < plan->num_sums; i += LANES)
            store(sums + i, load(sums + i) + load(more + i));
    }
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        transpose(sums + p->weight_sum, inputs, outputs, p->outputs_wide, p->layer.weight_gradient,
                  inputs);
        memcpy(p->layer.bias_gradient, sums + p->bias_sum, outputs * sizeof(float));
    }
    for (int i = 0; i < 2; i++) {
        const Packed *p = &plan->heads[i];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        for (int64_t o = 0; o < outputs; o++)
            memcpy(p->layer.weight_gradient + o * inputs,
                   sums + p->weight_sum + o * p->inputs_wide, inputs * sizeof(float));
        memcpy(p->layer.bias_gradient, sums + p->bias_sum, outputs * sizeof(float));
    }
}

/* 0, or 1 where there is no memory */
static int run_job(Job *job, int64_t threads)
{
    Plan *plan = job->plan;
    int64_t slices = slices_of(plan, job->rows);
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    for (int64_t thread = 0; thread < threads; thread++) {
        if (plan->scratch[thread]) continue;
        plan->scratch[thread] = new_floats(plan->scratch_floats);
        if (!plan->scratch[thread]) return 1;
    }
    pack(plan, job->mode == LEARN);
    run_slices(run_slice, job, slices, threads);
    if (job->mode == LEARN) write_gradients(plan, slices);
    return 0;
}

/* What the weights and the advantage of a minibatch are: 1 / count of its valid rows, and its own
   mean and spread if wanted */
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
    job->weight = (float)(1.0 / count);
    job->mean = 0.0f;
    job->scale = 1.0f;
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
    job->mean = (float)(sum / count);
    job->scale = (float)(1.0 / (sqrt(square / count) + 1e-8));
}

/* One minibatch: gradients of the loss, and its parts [PARTS] but the norm */
static int learn(Job *job, int64_t threads, double *parts)
{
    Plan *plan = job->plan;
    const Loss *loss = job->loss;
    int64_t outputs = plan->outputs;
    if (loss->head == GAUSSIAN)
        limit_log_std(job, loss->log_std, loss->min_log_std, loss->max_log_std, -1.0f);
    weigh(job);
    if (run_job(job, threads)) return 1;

    /* the loss and what is reported beside it */
    for (int part = 0; part < PARTS; part++) parts[part] = 0.0;
    for (int64_t slice = 0; slice < slices_of(plan, job->rows); slice++)
        for (int part = 0; part < PARTS; part++) parts[part] += plan->parts[slice][part];
    if (loss->head != GAUSSIAN) return 0;
    parts[ENTROPY] = job->log_std_total + 1.418938533 * (double)outputs; /* (1 + log 2 pi) / 2 */

    /* log_std's gradient; at a limit nothing moves it */
    const float *sums = plan->sums + plan->log_std_sum;
    for (int64_t a = 0; a < outputs; a++) {
        float log_std = loss->log_std[a];
        float is_free = log_std >= (float)loss->min_log_std && log_std <= (float)loss->max_log_std;
        float gradient = sums[a] - sums[outputs] - (float)loss->entropy_coef;
        loss->log_std_gradient[a] = gradient * is_free;
    }
    return 0;
}

/* ---- what Python calls; each returns 0, or 1 where there is no memory ---- */

EXPORT void plan_free(Plan *plan)
{
    if (!plan) return;
    for (int thread = 0; thread < MAX_THREADS; thread++) free(plan->scratch[thread]);
    free(plan->packed);
    free(plan->sums);
    free(plan->parts);
    free(plan->std);
    free(plan);
}

/* Sizes and places of one layer; the packed weights lie `at` floats into their memory, which comes
   later. Returns where the next layer's lie */
static int64_t place(Plan *plan, Packed *p, const Layer *layer, int is_head, int64_t at)
{
    p->layer = *layer;
    p->inputs_wide = whole_tiles(layer->inputs);
    p->outputs_wide = whole_tiles(layer->outputs);
    if (p->inputs_wide > plan->widest) plan->widest = p->inputs_wide;
    if (p->outputs_wide > plan->widest) plan->widest = p->outputs_wide;
    int64_t forward = is_head ? layer->outputs * p->inputs_wide : layer->inputs * p->outputs_wide;
    int64_t backward = is_head ? 0 : p->inputs_wide * layer->outputs;
    p->weight_sum = plan->num_sums;
    p->bias_sum = p->weight_sum + forward;
    plan->num_sums = p->bias_sum + p->outputs_wide;
    if (plan->packed) {
        p->forward = plan->packed + at;
        p->bias = p->forward + forward;
        p->backward = p->bias + p->outputs_wide;
    }
    return at + forward + p->outputs_wide + backward;
}

/* layers: [towers * hidden] tower by tower, then actor and critic. NULL where there is no memory */
EXPORT Plan *plan_make(const Layer *layers, int64_t towers, int64_t hidden, int64_t inputs,
                       int64_t activation)
{
    Plan *plan = calloc(1, sizeof *plan);
    if (!plan) return NULL;
    int64_t count = towers * hidden;
    plan->towers = towers;
    plan->hidden = hidden;
    plan->inputs = inputs;
    plan->inputs_wide = whole_tiles(inputs);
    plan->outputs = layers[count].outputs;
    plan->activation = activation;

    /* packed weights: the second pass knows how much memory the first one needed */
    for (int pass = 0; pass < 2; pass++) {
        int64_t used = 0;
        plan->num_sums = 0;
        for (int64_t l = 0; l < count; l++)
            used = place(plan, &plan->layers[l], &layers[l], 0, used);
        for (int i = 0; i < 2; i++)
            used = place(plan, &plan->heads[i], &layers[count + i], 1, used);
        if (!plan->packed && !(plan->packed = new_floats(used))) break;
        memset(plan->packed, 0, used * sizeof(float));
    }
    plan->log_std_sum = plan->num_sums;
    plan->num_sums += whole_tiles(plan->outputs + 1);

    /* a thread's scratch, as block_in divides it */
    int64_t widths = plan->inputs_wide + 2 * plan->widest;
    widths += 2 * (plan->outputs + 1) + plan->outputs + EXTRA_COLUMNS;
    for (int64_t l = 0; l < count; l++) widths += plan->layers[l].outputs_wide;
    plan->scratch_floats = BLOCK * widths;

    /* what slices sum up */
    plan->max_slices = MAX_SUMS / plan->num_sums;
    if (plan->max_slices < 1) plan->max_slices = 1;
    if (plan->max_slices > MAX_SLICES) plan->max_slices = MAX_SLICES;
    plan->sums = new_floats(plan->max_slices * plan->num_sums);
    plan->parts = malloc(plan->max_slices * sizeof *plan->parts);
    plan->std = new_floats(plan->outputs);
    if (plan->packed && plan->sums && plan->parts && plan->std) return plan;
    plan_free(plan);
    return NULL;
}

/* x: [rows, inputs], not normalised -> value [rows], not normalised */
EXPORT int values(Plan *plan, const Policy *policy, const float *x, int64_t rows, float *value,
                  int64_t threads)
{
    Job job = {.plan = plan, .mode = ONLY_VALUE, .policy = policy, .rows = rows,
               .row = plan->inputs, .used = plan->inputs, .x = x, .value = value};
    pthread_mutex_lock(&one_caller);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(&one_caller);
    return failed;
}

/* The same with an action [rows, outputs] of each row, or [rows] int64_t, its log_prob [rows] and
   env_action [rows, outputs]; counter: the word that each stream's numbers begin with */
EXPORT int act(Plan *plan, const Policy *policy, const float *x, int64_t rows, uint64_t counter,
               void *action, float *log_prob, float *env_action, float *value, int64_t threads)
{
    Job job = {.plan = plan, .mode = ACT, .policy = policy, .rows = rows, .row = plan->inputs,
               .used = plan->inputs, .x = x, .counter = counter, .action = action,
               .log_prob = log_prob, .env_action = env_action, .value = value, .std = plan->std};
    pthread_mutex_lock(&one_caller);
    if (policy->head == GAUSSIAN)
        limit_log_std(&job, policy->log_std, policy->min_log_std, policy->max_log_std, 1.0f);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(&one_caller);
    return failed;
}

/* Steps of PPO: rollout [.., row], of which what is behind the columns of a row is not read; order
   [minibatches * rows] -> parts [minibatches, PARTS] */
EXPORT int ppo_steps(Plan *plan, const Loss *loss, const Adam *adam, const float *rollout,
                     int64_t row, const int64_t *order, int64_t rows, int64_t minibatches,
                     double *parts, int64_t threads)
{
    int64_t columns = loss->has_valid ? EXTRA_COLUMNS : VALID;
    Job job = {.plan = plan, .mode = LEARN, .rows = rows, .row = row,
               .used = plan->inputs + loss->actions + columns, .x = rollout, .loss = loss,
               .std = plan->std};
    int failed = 0;
    pthread_mutex_lock(&one_caller);
    for (int64_t step = 0; step < minibatches && !failed; step++, parts += PARTS) {
        job.index = order + step * rows;
        failed = learn(&job, threads, parts);
        if (!failed) parts[NORM] = adam_step(adam, parts, NORM);
    }
    pthread_mutex_unlock(&one_caller);
    return failed;
}
