/* vtrace.py's recursion and moments, backwards over the steps, a block of environments at a time. */

#include <math.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 64

/* As vtrace_reference; valid NULL: all rows are. moments [3] are summed in float64. */
EXPORT void vtrace(const float *reward, const float *value, const float *final_value,
                   const uint8_t *terminated, const uint8_t *truncated, const float *log_ratio,
                   const uint8_t *valid, int64_t num_steps, int64_t num_envs, float gamma,
                   float gae_lambda, float max_rho, float max_c, float *advantage, float *returns,
                   float *moments)
{
    float decay = gamma * gae_lambda, error[BLOCK]; /* of the row after: target minus value */
    double count = 0.0, sum = 0.0, square = 0.0;
    for (int64_t first = 0; first < num_envs; first += BLOCK) {
        int64_t width = num_envs - first < BLOCK ? num_envs - first : BLOCK;
        for (int64_t t = num_steps - 1; t >= 0; t--) {
            for (int64_t n = 0; n < width; n++) {
                int64_t i = t * num_envs + first + n;
                int is_valid = !valid || valid[i];
                float next_value = terminated[i]  ? 0.0f
                                   : truncated[i] ? final_value[i]
                                                  : value[i + num_envs];
                float ratio = is_valid ? expf(log_ratio[i]) : 0.0f;
                /* selected, not multiplied: 0 * NaN would leak across an episode's end */
                int ends = t + 1 == num_steps || terminated[i] || truncated[i];
                float later = ends || !is_valid ? 0.0f : decay * error[n];
                float delta = is_valid ? reward[i] + gamma * next_value - value[i] : 0.0f;
                advantage[i] = delta + later;
                /* a ratio of NaN stays one */
                error[n] = (ratio > max_rho ? max_rho : ratio) * delta +
                           (ratio > max_c ? max_c : ratio) * later;
                returns[i] = error[n] + value[i];
                count += is_valid, sum += advantage[i];
            }
        }
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
