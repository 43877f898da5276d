"""Triton functions of a small actor-critic for a block of environments: normalise, two towers,
value, and sample an action.

`gpurl.kernels.rollout` is built from them. They compute the same as
`gpurl.nn.actor_critic.ActorCritic`, `gpurl.nn.distributions` and `gpurl.nn.normalizer`. Actions are
tuples of columns, with one number of each environment of the block.
"""

from typing import NamedTuple

from torch import Tensor

from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import normal_columns, uniform_columns

ACTIVATIONS = {"tanh": 0, "elu": 1, "relu": 2}


class PolicyTensors(NamedTuple):
    """The tensors that the functions read, all float32 on the device, in this order."""

    # of the hidden layers, [E, out, in]; tower 0 is the actor's, the last one the critic's
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]  # [E, 1, out]
    actor_weight: Tensor  # [A, in]
    actor_bias: Tensor  # [A]
    critic_weight: Tensor  # [1, in]
    critic_bias: Tensor  # [1]
    obs_shift: Tensor  # [D] of the observation normaliser; without one, any numbers
    obs_inv_std: Tensor
    value_shift: Tensor  # [1] of the value normaliser
    value_inv_std: Tensor
    log_std: Tensor  # [A] of a Gaussian, within its limits; of a categorical policy, any numbers
    units: Tensor  # [4, A] as ActionScaler.units


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """tanh (0), elu (1) or relu (2); NaN stays NaN."""
    if ACTIVATION == 0:
        return 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
    elif ACTIVATION == 1:
        return tl.where(z > 0.0, z, tl.exp(z) - 1.0)
    else:
        return tl.where(z < 0.0, 0.0, z)


@triton.jit
def clipped(x, low, high):
    """x limited to [low, high]; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def load_inputs(
    obs_ptr, row, inside, shift_ptr, inv_std_ptr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """[BLOCK, PADDED] rows of obs_ptr [., WIDTH], 0 beyond WIDTH; normalised and clipped to LIMIT
    if that is above 0.
    """
    k = tl.arange(0, PADDED)
    used = inside[:, None] & (k < WIDTH)[None, :]
    x = tl.load(obs_ptr + row[:, None] * WIDTH + k[None, :], mask=used, other=0.0)
    if LIMIT > 0.0:
        shift = tl.load(shift_ptr + k, mask=k < WIDTH, other=0.0)
        x = x - shift[None, :]
        inv_std = tl.load(inv_std_ptr + k, mask=k < WIDTH, other=0.0)
        x = clipped(x * inv_std[None, :], -LIMIT, LIMIT)
    return x


@triton.jit
def run_layer(
    x, weight_ptr, bias_ptr, tower, WIDTH: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK, IN], of which WIDTH columns are used -> [BLOCK, OUT]."""
    unit = tower * OUT + tl.arange(0, OUT)
    k = tl.arange(0, IN)
    weight_ptrs = weight_ptr + unit[None, :] * WIDTH + k[:, None]
    weight = tl.load(weight_ptrs, mask=(k < WIDTH)[:, None], other=0.0)
    z = tl.dot(x, weight, input_precision=PRECISION) + tl.load(bias_ptr + unit)[None, :]
    return activated(z, ACTIVATION)


@triton.jit
def run_tower(
    x, weights, biases, tower, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZES: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BLOCK, SIZES[-1]] of tower number `tower`."""
    hidden = run_layer(
        x, weights[0], biases[0], tower, WIDTH, PADDED, SIZES[0], ACTIVATION, PRECISION
    )
    # the hidden layers have no padding
    for layer in tl.static_range(1, len(SIZES)):
        hidden = run_layer(
            hidden, weights[layer], biases[layer], tower, SIZES[layer - 1], SIZES[layer - 1],
            SIZES[layer], ACTIVATION, PRECISION,
        )  # fmt: skip
    return hidden


@triton.jit
def linear_columns(hidden, weight_ptr, bias_ptr, IN: tl.constexpr, COUNT: tl.constexpr):
    """A linear layer: [BLOCK, IN] -> COUNT columns."""
    columns = ()
    for a in tl.static_range(COUNT):
        weight = tl.load(weight_ptr + a * IN + tl.arange(0, IN))
        columns = columns + (tl.sum(hidden * weight[None, :], axis=1) + tl.load(bias_ptr + a),)
    return columns


@triton.jit
def value_column(
    x, weights, biases, critic_weight, critic_bias, shift_ptr, inv_std_ptr,
    TOWER: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZES: tl.constexpr,
    LAST: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The value, in units of returns, of the inputs [BLOCK, PADDED]."""
    hidden = run_tower(x, weights, biases, TOWER, WIDTH, PADDED, SIZES, ACTIVATION, PRECISION)
    value = linear_columns(hidden, critic_weight, critic_bias, LAST, 1)
    return value[0] / tl.load(inv_std_ptr) + tl.load(shift_ptr)


@triton.jit
def gaussian_sample(mean, log_std_ptr, key, gamma, counter):
    """(action columns, log-probability) as `Gaussian.sample`."""
    # log p = -0.5 sum noise^2 - sum log_std - 0.5 A log(2 pi)
    noise = normal_columns(key, gamma, counter, len(mean))
    columns = ()
    square = tl.zeros_like(mean[0])
    total = 0.9189385332046727 * len(mean)
    for a in tl.static_range(len(mean)):
        log_std = tl.load(log_std_ptr + a)
        columns = columns + (mean[a] + noise[a] * tl.exp(log_std),)
        square += noise[a] * noise[a]
        total += log_std
    return columns, square * -0.5 - total


@triton.jit
def to_env_columns(action, units_ptr):
    """The environment's action for a Gaussian action, as `Gaussian.to_env`."""
    columns = ()
    for a in tl.static_range(len(action)):
        at = units_ptr + a
        inside = clipped(action[a], tl.load(at), tl.load(at + len(action)))
        columns = columns + (
            inside * tl.load(at + 2 * len(action)) + tl.load(at + 3 * len(action)),
        )
    return columns


@triton.jit
def categorical_sample(logits, key, gamma, counter):
    """(one column of int64 actions, log-probability) as `Categorical.sample`: the first maximum of
    the logits with Gumbel noise.
    """
    uniform = uniform_columns(key, gamma, counter, len(logits))
    # the largest logit, so that no exponential overflows
    highest = logits[0]
    for n in tl.static_range(1, len(logits)):
        highest = tl.maximum(highest, logits[n])
    # one pass over the logits: the maximum with noise, and the sum of exponentials
    action = tl.zeros(logits[0].shape, tl.int64)
    chosen = logits[0]
    total = tl.exp(logits[0] - highest)
    best = logits[0] - tl.log(-tl.log(uniform[0] * 0.99999994039535522 + 2.9802322387695312e-8))
    for n in tl.static_range(1, len(logits)):
        score = logits[n] - tl.log(
            -tl.log(uniform[n] * 0.99999994039535522 + 2.9802322387695312e-8)
        )
        total += tl.exp(logits[n] - highest)
        action = tl.where(score > best, n, action)
        chosen = tl.where(score > best, logits[n], chosen)
        best = tl.where(score > best, score, best)
    return (action,), chosen - highest - tl.log(total)
