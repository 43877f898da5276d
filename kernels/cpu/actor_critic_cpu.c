/* The MLP actor-critic on a CPU: acting, values, and PPO's minibatch steps with Adam between them,
   over blocks of rows that stay in the cache.

A library computes each operation for the whole minibatch, which reads and writes all activations
once per operation. Here a block of BLOCK rows goes through all operations at once: gather, both
towers forward, loss, both towers backward; only its sums of gradients are stored.

Rows are split into slices, whose number depends only on the number of rows. Each slice has its own
sums, which are added in the order of the slices: the result is bit for bit the same on any number
of threads. Widths are padded to WIDE with zeros. NaN and infinity propagate, so this must not be
compiled with -ffast-math. */

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

/* Run a job on the blocks of one slice */
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
        memset(plan->metrics[slice], 0, sizeof *plan->metrics);
    }
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t count = end - first < BLOCK ? end - first : BLOCK;
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        gather(job, &block, first, count, padded);
        forward_block(plan, &block, padded, job->mode == ONLY_VALUE);
        if (job->mode == LEARN) {
            loss_block(job, &block, count, padded, sums, plan->metrics[slice]);
            backward_block(plan, &block, padded, sums);
        } else {
            if (job->mode == ACT) act_block(job, &block, first, count, padded);
            write_value(job, &block, first, count);
        }
    }
}

/* Pack the weights for the products; every step changes them */
static void pack(const Plan *plan, int goes_back)
{
    for (int64_t l = 0; l < plan->towers * plan->hidden; l++) {
        const Packed *p = &plan->layers[l];
        int64_t inputs = p->layer.inputs, outputs = p->layer.outputs;
        pack_transposed(p->layer.weight, outputs, inputs, p->forward);
        /* the first layer needs no gradient by its input */
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

/* Add the sums of the slices in order, then write them into the gradients */
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

/* Returns 0, or 1 if there is no memory */
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

/* Set the weight of a valid row of the minibatch, 1 / number of valid rows, and mean and scale that
   normalise its advantages */
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

/* One minibatch: gradients of the loss, and its metrics [NUM_METRICS] except the norm */
static int learn(Job *job, int64_t threads, double *metrics)
{
    Plan *plan = job->plan;
    const Loss *loss = job->loss;
    int64_t outputs = plan->outputs;
    if (loss->head == GAUSSIAN)
        limit_log_std(job, loss->log_std, loss->min_log_std, loss->max_log_std, -1.0f);
    weigh(job);
    if (run_job(job, threads)) return 1;

    /* metrics, summed over the slices in order */
    for (int metric = 0; metric < NUM_METRICS; metric++) metrics[metric] = 0.0;
    for (int64_t slice = 0; slice < slices_of(plan, job->rows); slice++)
        for (int metric = 0; metric < NUM_METRICS; metric++)
            metrics[metric] += plan->metrics[slice][metric];
    if (loss->head != GAUSSIAN) return 0;
    metrics[ENTROPY] = job->log_std_total + 1.418938533 * (double)outputs; /* (1 + log 2 pi) / 2 */

    /* gradient by log_std, 0 outside its limits */
    const float *sums = plan->sums + plan->log_std_sum;
    for (int64_t a = 0; a < outputs; a++) {
        float log_std = loss->log_std[a];
        float is_free = log_std >= (float)loss->min_log_std && log_std <= (float)loss->max_log_std;
        float gradient = sums[a] - sums[outputs] - (float)loss->entropy_coef;
        loss->log_std_gradient[a] = gradient * is_free;
    }
    return 0;
}

/* ---- called from Python; each returns 0, or 1 if there is no memory ---- */

EXPORT void plan_free(Plan *plan)
{
    if (!plan) return;
    for (int thread = 0; thread < MAX_THREADS; thread++) free(plan->scratch[thread]);
    free(plan->packed);
    free(plan->sums);
    free(plan->metrics);
    free(plan->std);
    free(plan);
}

/* Set sizes and addresses of one layer, whose packed weights begin `at` floats into plan->packed,
   if it is allocated. Returns where those of the next layer begin */
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

/* layers: [towers * hidden] tower by tower, then actor and critic. NULL if there is no memory */
EXPORT Plan *plan_make(const Layer *layers, int64_t towers, int64_t hidden, int64_t inputs,
                       int64_t activation)
{
    static atomic_uint made;
    Plan *plan = calloc(1, sizeof *plan);
    if (!plan) return NULL;
    plan->caller = &callers[atomic_fetch_add(&made, 1) % CALLERS];
    int64_t count = towers * hidden;
    plan->towers = towers;
    plan->hidden = hidden;
    plan->inputs = inputs;
    plan->inputs_wide = whole_tiles(inputs);
    plan->outputs = layers[count].outputs;
    plan->activation = activation;

    /* packed weights: the first pass computes the size of their memory, the second one uses it */
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

    /* sums of the slices */
    plan->max_slices = MAX_SUMS / plan->num_sums;
    if (plan->max_slices < 1) plan->max_slices = 1;
    if (plan->max_slices > MAX_SLICES) plan->max_slices = MAX_SLICES;
    plan->sums = new_floats(plan->max_slices * plan->num_sums);
    plan->metrics = malloc(plan->max_slices * sizeof *plan->metrics);
    plan->std = new_floats(plan->outputs);
    if (plan->packed && plan->sums && plan->metrics && plan->std) return plan;
    plan_free(plan);
    return NULL;
}

/* x: [rows, inputs], not normalised -> value [rows] in units of returns */
EXPORT int values(Plan *plan, const Policy *policy, const float *x, int64_t rows, float *value,
                  int64_t threads)
{
    Job job = {.plan = plan, .mode = ONLY_VALUE, .policy = policy, .rows = rows,
               .row = plan->inputs, .used = plan->inputs, .x = x, .value = value};
    pthread_mutex_lock(plan->caller);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(plan->caller);
    return failed;
}

/* The same, and an action [rows, outputs] for each row, or [rows] int64_t, its log_prob [rows] and
   env_action [rows, outputs]; counter: the first random word of each stream */
EXPORT int act(Plan *plan, const Policy *policy, const float *x, int64_t rows, uint64_t counter,
               void *action, float *log_prob, float *env_action, float *value, int64_t threads)
{
    Job job = {.plan = plan, .mode = ACT, .policy = policy, .rows = rows, .row = plan->inputs,
               .used = plan->inputs, .x = x, .counter = counter, .action = action,
               .log_prob = log_prob, .env_action = env_action, .value = value, .std = plan->std};
    pthread_mutex_lock(plan->caller);
    if (policy->head == GAUSSIAN)
        limit_log_std(&job, policy->log_std, policy->min_log_std, policy->max_log_std, 1.0f);
    int failed = run_job(&job, threads);
    pthread_mutex_unlock(plan->caller);
    return failed;
}

/* Steps of PPO: rollout [.., row], of which only the first columns are read; order
   [minibatches * rows] -> metrics [minibatches, NUM_METRICS] */
EXPORT int ppo_steps(Plan *plan, const Loss *loss, const Adam *adam, const float *rollout,
                     int64_t row, const int64_t *order, int64_t rows, int64_t minibatches,
                     double *metrics, int64_t threads)
{
    int64_t columns = loss->has_valid ? EXTRA_COLUMNS : VALID;
    Job job = {.plan = plan, .mode = LEARN, .rows = rows, .row = row,
               .used = plan->inputs + loss->actions + columns, .x = rollout, .loss = loss,
               .std = plan->std};
    int failed = 0;
    pthread_mutex_lock(plan->caller);
    for (int64_t step = 0; step < minibatches && !failed; step++, metrics += NUM_METRICS) {
        job.index = order + step * rows;
        failed = learn(&job, threads, metrics);
        if (!failed) metrics[NORM] = adam_step(adam, metrics, NORM);
    }
    pthread_mutex_unlock(plan->caller);
    return failed;
}
