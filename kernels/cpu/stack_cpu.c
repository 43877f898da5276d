/* Stacks of dense layers on a CPU, with members of one shape: forward pass, and backward pass from
   the hidden outputs that the forward pass stored.

A block of BLOCK rows of a member goes through all layers at once, so that its activations stay in
the cache. Rows are split into slices, whose number depends only on the shapes. Each slice has its
own sums of gradients, which are added in the order of the slices: the result is bit for bit the
same on any number of threads. Widths are padded to WIDE, and rows by another WIDE: with a stride of
a power of two all rows of a column would share a few lines of the cache. The padding is never
read. */

#include "cpu_threads.h"
#include "products_cpu.h"

#define EXPORT __attribute__((visibility("default")))
/* multiplications of a member's layers: fewer are not worth another thread */
#define SLICE_WORK (8 << 20)

/* numbers of a call, then of each layer */
enum { MEMBERS, ROWS, X_MEMBER, KEEP_HIDDEN, NEEDS_INPUT, NEEDS_WEIGHTS, THREADS, LAYERS, SIZES };
enum { INPUTS, OUTPUTS, ACTIVATION, LAYER_SIZES };
/* tensors of a call, then of each layer */
enum { X, Y, HIDDEN, GRADIENT, INPUT_GRADIENT, TENSORS };
enum { WEIGHT, BIAS, WEIGHT_GRADIENT, BIAS_GRADIENT, LAYER_TENSORS };

typedef struct {
    int64_t inputs, outputs, activation, inputs_wide, outputs_wide;
    int64_t input_row, row; /* strides of the rows of its input and output, in floats */
    const float *weight, *bias; /* [members, outputs, inputs], [members, outputs] */
    float *weight_gradient, *bias_gradient; /* alike */
    float *hidden; /* [members, rows, row]: output of a hidden layer */
    float *panels; /* of each member: pack_transposed, in the backward pass pack_panels */
    float *padded; /* [members, outputs_wide]: the bias */
    /* offsets in the sums of a slice: [inputs, outputs_wide], [outputs_wide] */
    int64_t weight_sum, bias_sum;
} Layer;

typedef struct {
    int64_t members, rows, x_member, keep_hidden, needs_input, needs_weights, threads, count;
    int64_t widest, slices;
    const float *x;        /* [rows, inputs], x_member: stride of the members */
    const float *gradient; /* [members, rows, outputs] */
    float *y, *input_gradient;
    Layer layers[MAX_LAYERS];
    int64_t num_bias_sums, num_sums, scratch_floats;
    float *sums;    /* [members, slices, num_sums], those of biases first */
    float *scratch; /* [threads, scratch_floats] */
} Job;

/* ---- memory: of each caller, reused by the next call that takes it ---- */

/* volatile: a process may fork at any time, and its child reads them */
static struct {
    float *volatile floats;
    volatile int64_t count;
} arenas[CALLERS];

/* Locks a caller that is free; if none is, waits for the first */
static int take_caller(void)
{
    for (int caller = 0; caller < CALLERS; caller++)
        if (!pthread_mutex_trylock(&callers[caller])) return caller;
    pthread_mutex_lock(&callers[0]);
    return 0;
}

/* NULL if there is no memory */
static float *memory_of(int caller, int64_t floats)
{
    if (floats <= arenas[caller].count) return arenas[caller].floats;
    float *old = arenas[caller].floats;
    /* before it is freed: a forked process must not use it */
    arenas[caller].count = 0;
    arenas[caller].floats = NULL;
    free(old);
    float *memory = new_floats(floats);
    arenas[caller].floats = memory;
    if (memory) arenas[caller].count = floats;
    return memory;
}

/* Set sizes, and addresses in the memory of the caller; 1 if there is no memory */
static int prepare(Job *job, int caller, int is_backward)
{
    /* widths and strides of each layer, offsets of its panels and of the sums of its bias */
    int64_t weights = 0, at[MAX_LAYERS], used = 0, gathered = 0;
    for (int64_t l = 0; l < job->count; l++) {
        Layer *p = &job->layers[l];
        p->inputs_wide = whole_tiles(p->inputs);
        p->outputs_wide = whole_tiles(p->outputs);
        p->row = p->outputs_wide + WIDE;
        p->input_row = l ? job->layers[l - 1].row : p->inputs;
        int64_t width = p->inputs_wide > p->outputs_wide ? p->inputs_wide : p->outputs_wide;
        if (width + WIDE > job->widest) job->widest = width + WIDE;
        int64_t forward = (p->inputs + 1) * p->outputs_wide;
        at[l] = used;
        used += job->members * (is_backward ? p->inputs_wide * p->outputs : forward);
        p->bias_sum = job->num_bias_sums;
        job->num_bias_sums += p->outputs_wide;
        weights += p->inputs * p->outputs;
        gathered += p->input_row;
    }
    job->num_sums = job->num_bias_sums;
    for (int64_t l = 0; l < job->count; l++) {
        job->layers[l].weight_sum = job->num_sums;
        job->num_sums += job->layers[l].inputs * job->layers[l].outputs_wide;
    }

    /* slices and threads */
    int64_t max_slices = MAX_SUMS / (job->members * job->num_sums);
    job->slices = job->rows * weights / SLICE_WORK;
    if (job->slices > MAX_SLICES) job->slices = MAX_SLICES;
    if (job->slices > max_slices) job->slices = max_slices;
    if (job->slices < 1) job->slices = 1;
    if (job->threads < 1) job->threads = 1;
    if (job->threads > MAX_THREADS) job->threads = MAX_THREADS;

    /* memory: panels, sums, scratch */
    job->scratch_floats = BLOCK * (3 * job->widest + (is_backward ? gathered : 0));
    int64_t sums = is_backward ? job->members * job->slices * job->num_sums : 0;
    float *memory = memory_of(caller, used + sums + job->threads * job->scratch_floats);
    if (!memory) return 1;
    for (int64_t l = 0; l < job->count; l++) {
        Layer *p = &job->layers[l];
        p->panels = memory + at[l];
        p->padded = p->panels + job->members * p->inputs * p->outputs_wide;
    }
    job->sums = memory + used;
    job->scratch = job->sums + sums;
    return 0;
}

/* ---- forward ---- */

static void pack_forward(void *pointer, int thread, int64_t item)
{
    const Job *job = pointer;
    const Layer *p = &job->layers[item % job->count];
    int64_t member = item / job->count, inputs = p->inputs, outputs = p->outputs;
    float *bias = p->padded + member * p->outputs_wide;
    (void)thread;
    pack_transposed(p->weight + member * outputs * inputs, outputs, inputs,
                    p->panels + member * inputs * p->outputs_wide);
    memset(bias + p->outputs_wide - WIDE, 0, WIDE * sizeof(float));
    memcpy(bias, p->bias + member * outputs, outputs * sizeof(float));
}

static void run_forward(void *pointer, int thread, int64_t item)
{
    const Job *job = pointer;
    const Layer *last = &job->layers[job->count - 1];
    int64_t member = item / job->slices, slice = item % job->slices;
    int64_t begin = job->rows * slice / job->slices, end = job->rows * (slice + 1) / job->slices;
    float *scratch = job->scratch + thread * job->scratch_floats;
    for (int64_t first = begin, count; first < end; first += count) {
        count = end - first < BLOCK ? end - first : BLOCK;
        int64_t row = member * job->rows + first;
        const float *input = job->x + member * job->x_member + first * job->layers[0].inputs;
        for (const Layer *p = job->layers; p <= last; p++) {
            /* two buffers in turn, unless hidden outputs are stored */
            float *to = scratch + (p - job->layers) % 2 * BLOCK * job->widest;
            if (job->keep_hidden && p < last) to = p->hidden + row * p->row;
            product_of_rows(count, p->outputs_wide, p->inputs, input, p->input_row,
                            p->panels + member * p->inputs * p->outputs_wide, p->inputs, WIDE,
                            p->padded + member * p->outputs_wide, 0, to, p->row);
            for (int64_t r = 0; r < count; r++)
                activate(p->activation, to + r * p->row, p->outputs_wide);
            input = to;
        }
        float *y = job->y + row * last->outputs;
        for (int64_t r = 0; r < count; r++)
            memcpy(y + r * last->outputs, input + r * last->row, last->outputs * sizeof(float));
    }
}

/* ---- backward ---- */

static void pack_backward(void *pointer, int thread, int64_t item)
{
    const Job *job = pointer;
    const Layer *p = &job->layers[item % job->count];
    int64_t member = item / job->count, inputs = p->inputs, outputs = p->outputs;
    (void)thread;
    if (p == job->layers && !job->needs_input) return;
    pack_panels(p->weight + member * outputs * inputs, outputs, inputs,
                p->panels + member * p->inputs_wide * outputs);
}

/* Rows `index` [count], in ascending order, of a matrix: in place if they are consecutive, else as
   copies in `scratch` */
static const float *rows_of(const float *matrix, int64_t row, const int64_t *index, int64_t count,
                            float *scratch)
{
    if (index[count - 1] - index[0] == count - 1) return matrix + index[0] * row;
    for (int64_t r = 0; r < count; r++)
        memcpy(scratch + r * row, matrix + index[r] * row, row * sizeof(float));
    return scratch;
}

static void backward_block(const Job *job, int64_t member, const int64_t *index, int64_t count,
                           float *scratch, float *sums)
{
    static const float zeros[WIDE];
    const Layer *last = &job->layers[job->count - 1];
    float *gradient = scratch, *next = gradient + BLOCK * job->widest;
    float *value = next + BLOCK * job->widest, *gathered = value + BLOCK * job->widest;
    const float *reached = value; /* output of the current layer */
    int64_t of_member = member * job->rows, padding = last->outputs_wide - WIDE;

    /* the gradient by y, and y where the last layer's slope needs it */
    for (int64_t r = 0; r < count; r++) {
        int64_t at = (of_member + index[r]) * last->outputs;
        float *to_gradient = gradient + r * last->row, *to_value = value + r * last->row;
        memset(to_gradient + padding, 0, WIDE * sizeof(float));
        memset(to_value + padding, 0, WIDE * sizeof(float));
        memcpy(to_gradient, job->gradient + at, last->outputs * sizeof(float));
        if (last->activation != NONE) memcpy(to_value, job->y + at, last->outputs * sizeof(float));
    }

    /* from the last layer to the first: sums of its gradients, then the gradient by its inputs */
    int64_t next_row = 0;
    for (const Layer *p = last; p >= job->layers; p--) {
        const float *inputs = job->x + member * job->x_member;
        if (p > job->layers) inputs = p[-1].hidden + of_member * p->input_row;
        slope(p->activation, gradient, reached, count, p->outputs_wide, p->row, sums + p->bias_sum);
        if (p > job->layers || job->needs_weights)
            inputs = rows_of(inputs, p->input_row, index, count, gathered);
        float *sum = sums + p->weight_sum;
        if (job->needs_weights)
            product_of_columns(p->inputs, p->outputs_wide, count, inputs, p->input_row, gradient,
                               p->row, sum, p->outputs_wide, sum, p->outputs_wide);
        if (p == job->layers && !job->needs_input) return;
        const float *panels = p->panels + member * p->inputs_wide * p->outputs;
        next_row = p->inputs_wide + WIDE; /* the row of the layer before */
        for (int64_t n = 0; n < p->inputs_wide; n += WIDE)
            product_of_rows(count, WIDE, p->outputs, gradient, p->row, panels + n * p->outputs, 1,
                            WIDE, zeros, 0, next + n, next_row);
        float *used = gradient;
        gradient = next;
        next = used;
        reached = inputs;
        gathered += BLOCK * p->input_row;
    }
    int64_t size = job->layers[0].inputs;
    for (int64_t r = 0; r < count; r++)
        memcpy(job->input_gradient + (of_member + index[r]) * size, gradient + r * next_row,
               size * sizeof(float));
}

/* Rows whose gradient is 0 are skipped: with the minimum of several critics, each row has a
   gradient in one member only */
static void run_backward(void *pointer, int thread, int64_t item)
{
    const Job *job = pointer;
    int64_t outputs = job->layers[job->count - 1].outputs, inputs = job->layers[0].inputs;
    int64_t member = item / job->slices, slice = item % job->slices;
    int64_t first = job->rows * slice / job->slices, end = job->rows * (slice + 1) / job->slices;
    float *scratch = job->scratch + thread * job->scratch_floats;
    float *sums = job->sums + item * job->num_sums;
    int64_t num_sums = job->needs_weights ? job->num_sums : job->num_bias_sums;
    memset(sums, 0, num_sums * sizeof(float));
    if (job->needs_input)
        memset(job->input_gradient + (member * job->rows + first) * inputs, 0,
               (end - first) * inputs * sizeof(float));

    /* rows with a gradient are collected until they fill a block */
    int64_t index[BLOCK], count = 0;
    for (int64_t row = first; row < end; row++) {
        const float *gradient = job->gradient + (member * job->rows + row) * outputs;
        for (int64_t o = 0; o < outputs; o++)
            if (gradient[o] != 0.0f) {
                index[count++] = row;
                break;
            }
        if (count == BLOCK) {
            backward_block(job, member, index, count, scratch, sums);
            count = 0;
        }
    }
    if (count) backward_block(job, member, index, count, scratch, sums);
}

/* Add the slices' sums of a member's layer in order, then write them into the gradients */
static void write_gradients(void *pointer, int thread, int64_t item)
{
    const Job *job = pointer;
    const Layer *p = &job->layers[item % job->count];
    int64_t member = item / job->count, weights = p->inputs * p->outputs_wide;
    float *sums = job->sums + member * job->slices * job->num_sums;
    float *weight = sums + p->weight_sum, *bias = sums + p->bias_sum;
    (void)thread;
    for (int64_t slice = 1; slice < job->slices; slice++) {
        const float *more = sums + slice * job->num_sums;
        for (int64_t i = 0; i < weights; i += LANES)
            store(weight + i, load(weight + i) + load(more + p->weight_sum + i));
        for (int64_t i = 0; i < p->outputs_wide; i += LANES)
            store(bias + i, load(bias + i) + load(more + p->bias_sum + i));
    }
    transpose(weight, p->inputs, p->outputs, p->outputs_wide,
              p->weight_gradient + member * p->inputs * p->outputs, p->inputs);
    memcpy(p->bias_gradient + member * p->outputs, bias, p->outputs * sizeof(float));
}

/* ---- called from Python; each returns 0, or 1 if there is no memory ---- */

static Job job_of(const int64_t *sizes, void *const *tensors)
{
    Job job = {.members = sizes[MEMBERS],
               .rows = sizes[ROWS],
               .x_member = sizes[X_MEMBER],
               .keep_hidden = sizes[KEEP_HIDDEN],
               .needs_input = sizes[NEEDS_INPUT],
               .needs_weights = sizes[NEEDS_WEIGHTS],
               .threads = sizes[THREADS],
               .count = sizes[LAYERS],
               .x = tensors[X],
               .y = tensors[Y],
               .gradient = tensors[GRADIENT],
               .input_gradient = tensors[INPUT_GRADIENT]};
    float *hidden = tensors[HIDDEN];
    for (int64_t l = 0; l < job.count; l++) {
        const int64_t *size = sizes + SIZES + l * LAYER_SIZES;
        void *const *tensor = tensors + TENSORS + l * LAYER_TENSORS;
        job.layers[l] = (Layer){.inputs = size[INPUTS],
                                .outputs = size[OUTPUTS],
                                .activation = size[ACTIVATION],
                                .hidden = hidden,
                                .weight = tensor[WEIGHT],
                                .bias = tensor[BIAS],
                                .weight_gradient = tensor[WEIGHT_GRADIENT],
                                .bias_gradient = tensor[BIAS_GRADIENT]};
        if (hidden) hidden += job.members * job.rows * (whole_tiles(size[OUTPUTS]) + WIDE);
    }
    return job;
}

/* x -> y, and the outputs of the hidden layers into `hidden` */
EXPORT int stack_forward(const int64_t *sizes, void *const *tensors)
{
    Job job = job_of(sizes, tensors);
    int caller = take_caller();
    int failed = prepare(&job, caller, 0);
    if (!failed) {
        run_slices(pack_forward, &job, job.members * job.count, job.threads);
        run_slices(run_forward, &job, job.members * job.slices, job.threads);
    }
    pthread_mutex_unlock(&callers[caller]);
    return failed;
}

/* gradient by y -> gradients by input, weights and biases, as far as needed */
EXPORT int stack_backward(const int64_t *sizes, void *const *tensors)
{
    Job job = job_of(sizes, tensors);
    int caller = take_caller();
    int failed = prepare(&job, caller, 1);
    if (!failed) {
        run_slices(pack_backward, &job, job.members * job.count, job.threads);
        run_slices(run_backward, &job, job.members * job.slices, job.threads);
        if (job.needs_weights)
            run_slices(write_gradients, &job, job.members * job.count, job.threads);
    }
    pthread_mutex_unlock(&callers[caller]);
    return failed;
}
