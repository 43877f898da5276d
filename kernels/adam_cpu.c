/* adam.py's step for Python; actor_critic_cpu.c takes it between its minibatches. */

#include "adam_cpu.h"

__attribute__((visibility("default"))) void adam(const Adam *step, float *norm) { *norm = (float)adam_step(step); }
