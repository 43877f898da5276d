/* linear_scan.py's recurrence and its gradient, step by step, a block of columns at a time. */

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 2048 /* columns whose last state stays in the nearest cache */

/* As linear_scan_reference, of num_steps rows of num_columns numbers. Selected, not multiplied:
   0 * NaN would leak across an episode's end. */
EXPORT void linear_scan(const float *a, const float *b, const float *initial, int64_t num_steps,
                        int64_t num_columns, float *state)
{
    for (int64_t first = 0; first < num_columns; first += BLOCK) {
        int64_t width = num_columns - first < BLOCK ? num_columns - first : BLOCK;
        const float *before = initial + first;
        for (int64_t t = 0; t < num_steps; t++) {
            int64_t row = t * num_columns + first;
            const float *a_now = a + row, *b_now = b + row;
            float *now = state + row;
            for (int64_t i = 0; i < width; i++)
                now[i] = b_now[i] + (a_now[i] == 0.0f ? 0.0f : a_now[i] * before[i]);
            before = now;
        }
    }
}

/* As linear_scan_backward_reference. */
EXPORT void linear_scan_backward(const float *a, const float *initial, const float *state,
                                 const float *gradient, int64_t num_steps, int64_t num_columns,
                                 float *a_gradient, float *b_gradient, float *initial_gradient)
{
    for (int64_t first = 0; first < num_columns; first += BLOCK) {
        int64_t width = num_columns - first < BLOCK ? num_columns - first : BLOCK;
        for (int64_t t = num_steps - 1; t >= 0; t--) {
            int64_t row = t * num_columns + first;
            const float *before = t ? state + row - num_columns : initial + first;
            const float *of_state = gradient + row;
            float *of_a = a_gradient + row, *of_b = b_gradient + row;
            if (t + 1 == num_steps)
                for (int64_t i = 0; i < width; i++) of_b[i] = of_state[i];
            else {
                const float *a_after = a + row + num_columns, *after = of_b + num_columns;
                for (int64_t i = 0; i < width; i++)
                    of_b[i] = of_state[i] + (a_after[i] == 0.0f ? 0.0f : a_after[i] * after[i]);
            }
            for (int64_t i = 0; i < width; i++) of_a[i] = before[i] * of_b[i];
        }
        for (int64_t i = first; i < first + width; i++)
            initial_gradient[i] = a[i] == 0.0f ? 0.0f : a[i] * b_gradient[i];
    }
}
