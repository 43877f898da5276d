/* Threads that share the slices of a job. They sleep between jobs: other processes may need the
   cores on which they would spin. */

#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>

#define MAX_THREADS 64
#define CALLERS 16

/* one of them is locked during a whole call: memory that calls share serves one caller at a time */
static pthread_mutex_t callers[CALLERS];

static struct {
    pthread_mutex_t owner; /* of the threads; a call beside the owner's has its caller only */
    pthread_mutex_t lock;
    pthread_cond_t wake, finished;
    int started, max_helpers, busy; /* threads; those that may help with this job; that do */
    void (*run)(void *job, int thread, int64_t slice);
    void *job;
    int64_t slices;
    atomic_llong next; /* the next slice */
} pool;

static void take_slices(int thread)
{
    for (int64_t slice; (slice = atomic_fetch_add(&pool.next, 1)) < pool.slices;)
        pool.run(pool.job, thread, slice);
}

static void *helper(void *number)
{
    int thread = (int)(intptr_t)number;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (thread > pool.max_helpers || atomic_load(&pool.next) >= pool.slices)
            pthread_cond_wait(&pool.wake, &pool.lock);
        pool.busy++;
        pthread_mutex_unlock(&pool.lock);
        take_slices(thread);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0) pthread_cond_signal(&pool.finished);
    }
    return NULL;
}

/* A forked process does not inherit the threads */
static void forget_threads(void)
{
    for (int caller = 0; caller < CALLERS; caller++) pthread_mutex_init(&callers[caller], NULL);
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.finished, NULL);
    pool.started = pool.max_helpers = pool.busy = 0;
}

/* Runs when the library is loaded: another thread may be in a call when the process forks */
__attribute__((constructor)) static void be_ready_for_forks(void)
{
    forget_threads();
    pthread_atfork(NULL, NULL, forget_threads);
}

static void start_threads(int count)
{
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before); /* signals are for the caller's threads */
    for (pthread_t thread; pool.started < count; pool.started++) {
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* run(job, thread, slice) for all slices, on up to `threads` threads; the caller is number 0. Waits
 * neither for threads that have not begun nor for those that serve another caller. */
static void run_slices(void (*run)(void *, int, int64_t), void *job, int64_t slices,
                       int64_t threads)
{
    if (threads > slices) threads = slices;
    if (threads <= 1 || pthread_mutex_trylock(&pool.owner)) {
        for (int64_t slice = 0; slice < slices; slice++) run(job, 0, slice);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    start_threads((int)threads - 1);
    pool.run = run, pool.job = job, pool.slices = slices, pool.max_helpers = (int)threads - 1;
    atomic_store(&pool.next, 0);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_slices(0);
    pthread_mutex_lock(&pool.lock);
    pool.max_helpers = 0;
    while (pool.busy) pthread_cond_wait(&pool.finished, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.owner);
}
