/* gae.py's recursion and moments, backwards over the steps, all environments of a step at once. */

#include <math.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* As gae_reference; valid NULL: all rows are. moments [3] are summed in float64. */
EXPORT void gae(const float *reward, const float *value, const float *final_value,
                const uint8_t *terminated, const uint8_t *truncated, const uint8_t *valid,
                int64_t num_steps, int64_t num_envs, float gamma, float gae_lambda,
                float *advantage, float *returns, float *moments)
{
    float decay = gamma * gae_lambda;
    double count = 0.0, sum = 0.0, square = 0.0;
    for (int64_t t = num_steps - 1; t >= 0; t--) {
        int64_t row = t * num_envs;
        double row_count = 0.0, row_sum = 0.0;
        for (int64_t n = 0; n < num_envs; n++) {
            int64_t i = row + n;
            int is_valid = !valid || valid[i];
            float next_value = terminated[i]  ? 0.0f
                               : truncated[i] ? final_value[i]
                                              : value[i + num_envs];
            /* selected, not multiplied: 0 * NaN would leak across an episode's end */
            float later = t + 1 == num_steps || terminated[i] || truncated[i]
                              ? 0.0f
                              : decay * advantage[i + num_envs];
            float delta = reward[i] + gamma * next_value - value[i];
            advantage[i] = is_valid ? delta + later : 0.0f;
            returns[i] = advantage[i] + value[i];
            row_count += is_valid, row_sum += advantage[i];
        }
        count += row_count, sum += row_sum;
    }
    /* moments, in a second pass around the mean */
    double mean = sum / (count < 1.0 ? 1.0 : count);
    for (int64_t i = 0; i < num_steps * num_envs; i++) {
        double centred = advantage[i] - mean;
        square += !valid || valid[i] ? centred * centred : 0.0;
    }
    moments[0] = (float)mean, moments[1] = (float)(square / (count < 1.0 ? 1.0 : count)),
    moments[2] = (float)count;
}
