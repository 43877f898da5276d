/* adam.py's step for Python; actor_critic_cpu.c takes it between its minibatches. */

#include "adam_cpu.h"

/* losses [num_losses <= 8] may be NULL */
__attribute__((visibility("default"))) void adam(const Adam *step, int64_t num_losses,
                                                 const float *losses, float *norm)
{
    double numbers[8];
    for (int64_t i = 0; i < num_losses; i++) numbers[i] = losses[i];
    *norm = (float)adam_step(step, numbers, num_losses);
}
