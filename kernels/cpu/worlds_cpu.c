/* Steps many worlds of one MuJoCo model on threads. MuJoCo's library belongs to Python's package, so
   its functions come as addresses.

   A world is a row of doubles, MuJoCo's mjSTATE_INTEGRATION. Each thread has one mjData: it loads a
   row, steps, and copies what the task reads into tensors. Of the row's fields the tensors are
   float32 copies; where Python changed one of them the new value goes into the row, elsewhere the
   row keeps its doubles. */

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_threads.h"

#define EXPORT __attribute__((visibility("default")))
#define MESSAGE 256

enum { FLOAT, INTEGER, BYTE }; /* of a tensor: float32, int32, or one byte */
enum { FINE, FAILED, LACKS_ROOM };

typedef struct {
    int64_t offset, count, kind; /* of the row's doubles */
    void *tensor;                /* [worlds, count] */
} StateField;

typedef struct {
    int64_t count, kind;
    int64_t is_of_forces; /* mj_rnePostConstraint writes it: no forces after a restart */
    void *tensor;         /* [worlds, count] */
    const void **sources; /* [threads], in the mjData of each */
} DerivedField;

typedef struct {
    void (*step)(const void *model, void *data);
    void (*forward)(const void *model, void *data);
    void (*rne_post_constraint)(const void *model, void *data);
    void (*subtree_velocity)(const void *model, void *data);
    void (*reset)(const void *model, void *data);
    void (*set_state)(const void *model, void *data, const double *row, int fields);
    void (*get_state)(const void *model, const void *data, double *row, int fields);
} Mujoco;

typedef struct {
    const Mujoco *mujoco;
    const void *model;
    void **data;              /* [threads] mjData */
    int32_t **warnings;       /* [threads] counts in mjData, 2 ints apart */
    int64_t first_lacking, last_lacking, first_bad, last_bad; /* numbers of warnings */
    double *rows;             /* [worlds, width] */
    int64_t width, signature; /* of a row: doubles, and MuJoCo's name for its fields */
    const StateField *state;
    int64_t state_fields;
    const DerivedField *derived;
    int64_t derived_fields;
    int64_t frame_skip;       /* steps; 0: mj_forward only */
    int64_t contact_forces, subtree_velocities; /* whether the task reads them */
    const uint8_t *mask;      /* [worlds], NULL for all */
    uint8_t *outcome;         /* [worlds] FINE, FAILED or LACKS_ROOM */
    char *message;            /* [MESSAGE] MuJoCo's last error */
} Worlds;

/* ---- MuJoCo's errors end a world, not the process ---- */

static _Thread_local jmp_buf *after_error;
static _Thread_local char last_error[MESSAGE];
static void (*former_handler)(const char *);

static void handle_error(const char *text)
{
    if (after_error) {
        snprintf(last_error, MESSAGE, "%s", text);
        longjmp(*after_error, 1);
    }
    if (former_handler) {
        former_handler(text);
        return;
    }
    fprintf(stderr, "MuJoCo: %s\n", text);
    exit(EXIT_FAILURE);
}

/* handler: the address of mju_user_error */
EXPORT void catch_mujoco_errors(void (**handler)(const char *))
{
    if (*handler == handle_error) return;
    former_handler = *handler;
    *handler = handle_error;
}

/* ---- between rows, mjData and tensors ---- */

/* What Python wrote into the tensors goes into the row. Bits are compared: NaN equals itself */
static void take_changes(const Worlds *worlds, int64_t world, double *row)
{
    for (int64_t i = 0; i < worlds->state_fields; i++) {
        const StateField *field = &worlds->state[i];
        double *values = row + field->offset;
        if (field->kind == BYTE) {
            const uint8_t *tensor = (const uint8_t *)field->tensor + world * field->count;
            for (int64_t j = 0; j < field->count; j++) values[j] = tensor[j];
            continue;
        }
        const float *tensor = (const float *)field->tensor + world * field->count;
        for (int64_t j = 0; j < field->count; j++) {
            float rounded = (float)values[j];
            if (memcmp(&rounded, &tensor[j], sizeof(float))) values[j] = tensor[j];
        }
    }
}

static void show_state(const Worlds *worlds, int64_t world, const double *row)
{
    for (int64_t i = 0; i < worlds->state_fields; i++) {
        const StateField *field = &worlds->state[i];
        const double *values = row + field->offset;
        if (field->kind == BYTE) {
            uint8_t *tensor = (uint8_t *)field->tensor + world * field->count;
            for (int64_t j = 0; j < field->count; j++) tensor[j] = values[j] != 0.0;
            continue;
        }
        float *tensor = (float *)field->tensor + world * field->count;
        for (int64_t j = 0; j < field->count; j++) tensor[j] = (float)values[j];
    }
}

static void show_derived(const Worlds *worlds, int64_t world, int thread)
{
    for (int64_t i = 0; i < worlds->derived_fields; i++) {
        const DerivedField *field = &worlds->derived[i];
        if (field->is_of_forces && worlds->frame_skip == 0) continue;
        const void *source = field->sources[thread];
        int64_t start = world * field->count;
        if (field->kind == FLOAT) {
            float *tensor = (float *)field->tensor + start;
            const double *values = source;
            for (int64_t j = 0; j < field->count; j++) tensor[j] = (float)values[j];
        } else {
            int64_t size = field->kind == INTEGER ? sizeof(int32_t) : 1;
            memcpy((char *)field->tensor + start * size, source, field->count * size);
        }
    }
}

/* ---- one world ---- */

static int64_t count_warnings(const int32_t *counts, int64_t first, int64_t last)
{
    int64_t total = 0;
    for (int64_t kind = first; kind <= last; kind++) total += counts[2 * kind];
    return total;
}

/* Step or mj_forward; FAILED if MuJoCo raised an error or met a state that is not finite */
static uint8_t advance(const Worlds *worlds, void *data, int32_t *warnings)
{
    const Mujoco *mujoco = worlds->mujoco;
    int64_t lacking = count_warnings(warnings, worlds->first_lacking, worlds->last_lacking);
    jmp_buf target;
    after_error = &target;
    if (setjmp(target)) {
        after_error = NULL;
        mujoco->reset(worlds->model, data); /* the stack of the call that failed */
        memcpy(worlds->message, last_error, MESSAGE);
        return FAILED;
    }
    for (int64_t step = 0; step < worlds->frame_skip; step++) mujoco->step(worlds->model, data);
    if (worlds->frame_skip == 0) mujoco->forward(worlds->model, data);
    if (worlds->frame_skip && worlds->contact_forces)
        mujoco->rne_post_constraint(worlds->model, data);
    if (worlds->subtree_velocities) mujoco->subtree_velocity(worlds->model, data);
    after_error = NULL;
    if (count_warnings(warnings, worlds->first_bad, worlds->last_bad)) {
        /* a second failure would leave the counts as they are: MuJoCo's reset clears them first */
        for (int64_t kind = worlds->first_bad; kind <= worlds->last_bad; kind++)
            warnings[2 * kind] = 0;
        return FAILED;
    }
    int64_t lacked = count_warnings(warnings, worlds->first_lacking, worlds->last_lacking);
    return lacked != lacking ? LACKS_ROOM : FINE;
}

static void run_world(void *job, int thread, int64_t world)
{
    const Worlds *worlds = job;
    if (worlds->mask && !worlds->mask[world]) return;
    double *row = worlds->rows + world * worlds->width;
    void *data = worlds->data[thread];
    take_changes(worlds, world, row);
    worlds->mujoco->set_state(worlds->model, data, row, (int)worlds->signature);
    worlds->outcome[world] = advance(worlds, data, worlds->warnings[thread]);
    /* MuJoCo has put a world that failed back to its first state: Python sets it */
    if (worlds->outcome[world] == FAILED) return;
    worlds->mujoco->get_state(worlds->model, data, row, (int)worlds->signature);
    show_state(worlds, world, row);
    show_derived(worlds, world, thread);
}

EXPORT void run_worlds(Worlds *worlds, int64_t count, int64_t threads)
{
    run_slices(run_world, worlds, count, threads);
}
