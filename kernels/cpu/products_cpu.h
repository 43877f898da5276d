/* Parts of dense layers: activations and their derivatives, and products of blocks of rows with
   packed weights. */

#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_vectors.h"

#define TILE 6   /* rows of a product's tile: 6 x 16 sums fill twelve of sixteen vector registers */
#define WIDE 16  /* columns of a tile */
#define BLOCK 96 /* rows that go through all layers at once: a multiple of TILE and LANES; their
                    activations take half of a core's L2 cache */
#define MAX_LAYERS 64
#define MAX_SLICES 32
#define MAX_SUMS (1 << 23) /* floats of all slices' sums: large networks have fewer slices */

enum { TANH, ELU, RELU, NONE };

static float *new_floats(int64_t count)
{
    return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
}

/* The width padded to whole tiles */
static int64_t whole_tiles(int64_t width) { return (width + WIDE - 1) / WIDE * WIDE; }

/* ---- activations ---- */

static void activate(int64_t activation, float *z, int64_t count)
{
    if (activation == TANH)
        for (int64_t i = 0; i < count; i += LANES) store(z + i, hyperbolic_tangent(load(z + i)));
    else if (activation == RELU)
        for (int64_t i = 0; i < count; i += LANES) store(z + i, at_least(load(z + i), all(0.0f)));
    else if (activation == ELU)
        for (int64_t i = 0; i < count; i += LANES) {
            v8 x = load(z + i);
            store(z + i, choose(x > all(0.0f), x, exponential(x) - all(1.0f)));
        }
}

INLINE void slope_pass(int activation, float *gradient, const float *h, int64_t rows, int64_t wide,
                       int64_t row, float *bias_sum)
{
    for (int64_t column = 0; column < wide; column += LANES) {
        v8 sum = load(bias_sum + column);
        for (int64_t at = column; at < rows * row; at += row) {
            v8 value = activation == NONE ? all(0.0f) : load(h + at), slope;
            if (activation == NONE) slope = all(1.0f);
            else if (activation == TANH) slope = all(1.0f) - value * value;
            else if (activation == ELU) slope = at_most(value, all(0.0f)) + all(1.0f);
            else slope = share(value > all(0.0f));
            v8 changed = load(gradient + at) * slope;
            store(gradient + at, changed);
            sum += changed;
        }
        store(bias_sum + column, sum);
    }
}

/* Multiply gradient [rows, wide] by the derivative of the activation, from its output h, which NONE
   does not read; row: stride of both in floats; column sums are added to bias_sum [wide] */
static void slope(int64_t activation, float *gradient, const float *h, int64_t rows, int64_t wide,
                  int64_t row, float *bias_sum)
{
    if (activation == TANH) slope_pass(TANH, gradient, h, rows, wide, row, bias_sum);
    else if (activation == ELU) slope_pass(ELU, gradient, h, rows, wide, row, bias_sum);
    else if (activation == RELU) slope_pass(RELU, gradient, h, rows, wide, row, bias_sum);
    else slope_pass(NONE, gradient, h, rows, wide, row, bias_sum);
}

/* ---- weights packed for the products, padded with 0 ---- */

/* weight [outputs, inputs] -> for x W^T: panels [outputs / WIDE, inputs, WIDE] */
static void pack_transposed(const float *weight, int64_t outputs, int64_t inputs, float *panels)
{
    for (int64_t n = 0; n < outputs; n += WIDE) {
        int64_t columns = outputs - n < WIDE ? outputs - n : WIDE;
        float *panel = panels + n * inputs;
        if (columns < WIDE) memset(panel, 0, inputs * WIDE * sizeof(float));
        transpose(weight + n * inputs, columns, inputs, inputs, panel, WIDE);
    }
}

/* weight [outputs, inputs] -> for gradient W: panels [inputs / WIDE, outputs, WIDE] */
static void pack_panels(const float *weight, int64_t outputs, int64_t inputs, float *panels)
{
    for (int64_t k = 0; k < inputs; k += WIDE)
        for (int64_t n = 0; n < outputs; n++) {
            float *to = panels + k * outputs + n * WIDE;
            const float *from = weight + n * inputs + k;
            if (inputs - k >= WIDE) {
                store(to, load(from));
                store(to + LANES, load(from + LANES));
            } else {
                memset(to, 0, WIDE * sizeof(float));
                memcpy(to, from, (inputs - k) * sizeof(float));
            }
        }
}

/* ---- matrix products ---- */

/* c [rows, WIDE] = start + a b over `depth` steps; rows is a constant, so that the sums stay in
   registers */
INLINE void tile(const int rows, int64_t depth, const float *a, int64_t a_row, int64_t a_step,
                 const float *b, int64_t b_step, const float *start, int64_t start_row, float *c,
                 int64_t c_row)
{
    v8 sum[TILE][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        sum[i][0] = load(start + i * start_row);
        sum[i][1] = load(start + i * start_row + LANES);
    }
    for (int64_t k = 0; k < depth; k++, a += a_step, b += b_step) {
        v8 left = load(b), right = load(b + LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            v8 factor = all(a[i * a_row]);
            sum[i][0] += factor * left;
            sum[i][1] += factor * right;
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
        store(c + i * c_row, sum[i][0]);
        store(c + i * c_row + LANES, sum[i][1]);
    }
}

/* c [rows, columns] = start + a [rows, depth] b [depth, columns]; columns: a multiple of WIDE;
   b_panel: floats from one panel of WIDE columns to the next, over WIDE; start_row 0 repeats one
   row */
INLINE void product(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row,
                    int64_t a_step, const float *b, int64_t b_panel, int64_t b_step,
                    const float *start, int64_t start_row, float *c, int64_t c_row)
{
    for (int64_t n = 0; n < columns; n += WIDE)
        for (int64_t m = 0; m < rows; m += TILE) {
#define PART(count)                                                                       \
    tile(count, depth, a + m * a_row, a_row, a_step, b + n * b_panel, b_step,             \
         start + m * start_row + n, start_row, c + m * c_row + n, c_row)
            switch (rows - m) {
            case 1: PART(1); break;
            case 2: PART(2); break;
            case 3: PART(3); break;
            case 4: PART(4); break;
            case 5: PART(5); break;
            default: PART(TILE);
            }
        }
}

/* a is stored by rows. These two functions are not inlined: the callers have too few registers for
   the addresses */
static NOINLINE void product_of_rows(int64_t rows, int64_t columns, int64_t depth, const float *a,
                                     int64_t a_row, const float *b, int64_t b_panel,
                                     int64_t b_step, const float *start, int64_t start_row,
                                     float *c, int64_t c_row)
{
    product(rows, columns, depth, a, a_row, 1, b, b_panel, b_step, start, start_row, c, c_row);
}

/* a is stored by columns */
static NOINLINE void product_of_columns(int64_t rows, int64_t columns, int64_t depth,
                                        const float *a, int64_t a_step, const float *b,
                                        int64_t b_step, const float *start, int64_t start_row,
                                        float *c, int64_t c_row)
{
    product(rows, columns, depth, a, 1, a_step, b, 1, b_step, start, start_row, c, c_row);
}
