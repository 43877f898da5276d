/* td_gradient.py's targets and gradients: each in one pass, where torch makes a dozen. */

#include <math.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* The sizes and tensors of a call. Outputs are [members, rows, actions]; strides count floats. */
enum { MEMBERS, ROWS, ACTIONS, MEMBER_STRIDE, CHOOSER_STRIDE };
enum { VALUE, CHOOSER, REWARD, DISCOUNT, TARGET_OUT };
enum { ACTION_STRIDE = CHOOSER_STRIDE, IS_HUBER };
enum { OUTPUT, ACTION, TARGET, WEIGHT, GRADIENT, ERROR, SUMS };

/* NaN is both the smallest and the largest number, as in torch's amin and argmax */
static int is_less(float a, float b) { return a < b || (isnan(a) && !isnan(b)); }
static int is_greater(float a, float b) { return a > b || (isnan(a) && !isnan(b)); }

/* As q_target_reference; CHOOSER may be NULL */
EXPORT void q_target(const int64_t *sizes, float *const *tensors)
{
    const float *value = tensors[VALUE], *chooser = tensors[CHOOSER];
    int64_t members = sizes[MEMBERS], actions = sizes[ACTIONS];
    for (int64_t row = 0; row < sizes[ROWS]; row++) {
        int64_t first = row * actions, best = first;
        float greatest = 0.0f, lowest = 0.0f;
        for (int64_t a = first; a < first + actions; a++) {
            float score = chooser ? chooser[a] : value[a];
            for (int64_t m = 1; m < members; m++) {
                float other = value[m * sizes[MEMBER_STRIDE] + a];
                if (chooser) score += chooser[m * sizes[CHOOSER_STRIDE] + a];
                else if (is_less(other, score)) score = other;
            }
            if (a == first || is_greater(score, greatest)) greatest = score, best = a;
        }
        for (int64_t m = 0; m < members; m++) {
            float best_value = value[m * sizes[MEMBER_STRIDE] + best];
            if (m == 0 || is_less(best_value, lowest)) lowest = best_value;
        }
        tensors[TARGET_OUT][row] = tensors[REWARD][row] + tensors[DISCOUNT][row] * lowest;
    }
}

/* As td_gradient_reference; ACTION may be NULL. SUMS: the loss, and the mean value. */
EXPORT void td_gradient(const int64_t *sizes, float *const *tensors)
{
    const float *target = tensors[TARGET], *weight = tensors[WEIGHT], *action = tensors[ACTION];
    float *error = tensors[ERROR], count = 0.0f;
    int64_t members = sizes[MEMBERS], rows = sizes[ROWS], actions = sizes[ACTIONS];
    double loss = 0.0, value_sum = 0.0;
    for (int64_t row = 0; row < rows; row++) count += weight[row] > 0.0f, error[row] = 0.0f;
    if (count < 1.0f) count = 1.0f;
    for (int64_t item = 0; item < members * rows; item++) {
        int64_t row = item % rows, at = item / rows * sizes[MEMBER_STRIDE] + row * actions;
        const float *values = tensors[OUTPUT] + at;
        float *gradient = tensors[GRADIENT] + at, value = 0.0f, row_loss, slope;
        int64_t chosen = -1; /* an invalid action has the value 0 and no gradient */
        for (int64_t a = 0; a < actions; a++)
            if (!action || action[row * sizes[ACTION_STRIDE]] == (float)a)
                chosen = a, value = values[a];
        float difference = weight[row] != 0.0f ? value - target[row] : 0.0f;
        float size = fabsf(difference), row_weight = weight[row] / count;
        if (!sizes[IS_HUBER]) row_loss = difference * difference, slope = 2.0f * difference;
        else if (size > 1.0f) row_loss = size - 0.5f, slope = copysignf(1.0f, difference);
        else row_loss = 0.5f * difference * difference, slope = difference;
        for (int64_t a = 0; a < actions; a++)
            gradient[a] = slope * row_weight * (float)(a == chosen);
        loss += row_loss * row_weight, value_sum += value, error[row] += size / (float)members;
    }
    tensors[SUMS][0] = (float)loss;
    tensors[SUMS][1] = (float)(value_sum / (double)(members * rows));
}
