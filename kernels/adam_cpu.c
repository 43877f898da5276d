/* adam.py's step for Python; actor_critic_cpu.c takes it between its minibatches. */

#include "adam_cpu.h"

__attribute__((visibility("default"))) double adam(const Adam *step) { return adam_step(step); }
