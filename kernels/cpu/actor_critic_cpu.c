/* The MLP actor-critic on a CPU: forward, acting, backward, and PPO's loss and Adam steps between
   them, over blocks of rows that stay in the cache.

A pass over a rollout's minibatch by one library call an operation reads and writes all activations once an operation. Here a block of
BLOCK rows goes through everything at once: gather, both towers forward, loss, both towers backward; only its sums of gradients leave it.

Rows are cut into slices whose number depends on the number of rows alone, each with sums of its own that are added in the slices' order:
the result is the same bit for bit on any number of threads. Widths are padded to WIDE with zeros. NaN and infinity go through everything,
which is why this is never compiled with -ffast-math. */

#include "adam_cpu.h"
#include "cpu_threads.h"
#include "ppo_loss_cpu.h"
#include "sample_cpu.h"

/* ---- slices ---- */

static int64_t slices_of(const Plan *plan, int64_t rows)
{
    int64_t slices = rows / SLICE_ROWS;
    return slices < 1 ? 1 : slices > plan->max_slices ? plan->max_slices : slices;
}

static int has_gradient(const Job *job) { return job->mode == BACKWARD || job->mode == LEARN; }

static void run_slice(void *pointer, int thread, int64_t slice)
{
    const Job *job = pointer;
    const Plan *plan = job->plan;
    Block block = block_in(plan, plan->scratch[thread]);
    int64_t blocks = (job->rows + BLOCK - 1) / BLOCK, slices = slices_of(job->plan, job->rows), outputs = plan->outputs;
    int64_t end = blocks * (slice + 1) / slices * BLOCK;
    float *sums = plan->sums + slice * plan->num_sums;
    if (end > job->rows) end = job->rows;
    int only_value = job->mode == FORWARD && !job->output;
    if (has_gradient(job)) {
        memset(sums, 0, plan->num_sums * sizeof(float));
        memset(plan->parts[slice], 0, sizeof *plan->parts);
    }
    for (int64_t first = blocks * slice / slices * BLOCK; first < end; first += BLOCK) {
        int64_t count = end - first < BLOCK ? end - first : BLOCK, padded = (count + LANES - 1) / LANES * LANES;
        gather(job, &block, first, count, padded);
        forward_block(plan, &block, padded, only_value);
        if (job->mode == ACT) act_block(job, &block, first, count, padded);
        if (!has_gradient(job)) {
            write_output(job, &block, first, count);
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
static void pack(const Plan *plan, int goes_back)
{
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        for (int64_t n = 0; n < outputs; n += WIDE)
            transpose(p->layer.weight + n * inputs, outputs - n < WIDE ? outputs - n : WIDE, inputs, inputs, p->forward + n * inputs, WIDE);
        for (int64_t k = 0; goes_back && l % plan->hidden && k < inputs; k += WIDE)
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
    pack(plan, has_gradient(job));
    run_slices(run_slice, job, slices_of(plan, job->rows), threads);
    if (has_gradient(job)) write_gradients(plan, slices_of(plan, job->rows));
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
    if (loss->head == GAUSSIAN)
        limit_log_std(job, loss->log_std, loss->min_log_std, loss->max_log_std, -1.0f);
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
    free(plan->packed), free(plan->sums), free(plan->parts), free(plan->std), free(plan);
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

/* x: [rows, inputs] -> output [rows, outputs], value [rows] */
EXPORT int forward(Plan *plan, const float *x, int64_t rows, float *output, float *value, int64_t threads)
{
    Job job = {.plan = plan, .mode = FORWARD, .rows = rows, .row = plan->inputs, .used = plan->inputs, .x = x, .output = output,
               .value = value};
    pthread_mutex_lock(&one_caller);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(&one_caller);
    return failed;
}

/* x: [rows, inputs], not normalised -> value [rows], not normalised */
EXPORT int values(Plan *plan, const Policy *policy, const float *x, int64_t rows, float *value,
                  int64_t threads)
{
    Job job = {.plan = plan, .mode = FORWARD, .policy = policy, .rows = rows, .row = plan->inputs,
               .used = plan->inputs, .x = x, .value = value};
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

/* Writes the gradients of a loss with the derivatives of_output [rows, outputs] and of_value [rows] */
EXPORT int backward(Plan *plan, const float *x, int64_t rows, const float *of_output, const float *of_value, int64_t threads)
{
    Job job = {.plan = plan, .mode = BACKWARD, .rows = rows, .row = plan->inputs, .used = plan->inputs, .x = x, .of_output = of_output,
               .of_value = of_value};
    pthread_mutex_lock(&one_caller);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(&one_caller);
    return failed;
}

/* Steps of PPO: rollout [.., row], what is behind the columns of a row is not read; order [minibatches * rows] -> parts [minibatches, PARTS] */
EXPORT int ppo_steps(Plan *plan, const Loss *loss, const Adam *adam, const float *rollout, int64_t row, const int64_t *order, int64_t rows,
                     int64_t minibatches, double *parts, int64_t threads)
{
    int64_t used = plan->inputs + loss->actions + (loss->has_valid ? EXTRA_COLUMNS : VALID);
    Job job = {.plan = plan, .mode = LEARN, .rows = rows, .row = row, .used = used, .x = rollout,
               .loss = loss, .std = plan->std};
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
