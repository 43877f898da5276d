"""A whole rollout in one launch: T steps of policy and environment, for each block of environments
independently of the others.

The weights do not change during a rollout and random numbers are counter-based, so no block waits:
state and clocks stay in registers, weights come from the cache, the rollout is written once. For
tasks with Triton functions and small networks. The loop of `gpurl.engine.eager` is the reference,
with the same actions for the same random bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.env_step import (
    TritonEnv,
    advance,
    env_constants,
    load_states,
    step_limit,
    store_columns,
    store_states,
)
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import RandomStreams
from gpurl.kernels.rollout_policy import (
    ACTIVATIONS,
    PolicyTensors,
    categorical_sample,
    gaussian_sample,
    linear_columns,
    load_inputs,
    run_tower,
    to_env_columns,
    value_column,
)

# by ahead-of-time compilation 64x64 networks take 255 registers a thread and spill none; two
# programs fit a multiprocessor
BLOCK, NUM_WARPS = 16, 4
MIN_UNITS, MAX_UNITS = 16, 64  # of a layer: tl.dot needs 16, and registers hold 64
MAX_COLUMNS = 64  # of observations, of actions or logits
MAX_STATES = 24  # numbers of an environment's state


class RolloutTensors(NamedTuple):
    """The columns of a rollout: [T, N, ...] contiguous, float32 unless said otherwise."""

    obs: Tensor  # [T, N, D]
    action: Tensor  # [T, N, A], or [T, N] int64
    log_prob: Tensor
    value: Tensor
    reward: Tensor
    final_value: Tensor  # of final_obs where truncated and in the last row, else 0
    terminated: Tensor  # bool
    truncated: Tensor  # bool


class PolicyShape(NamedTuple):
    """Constants of the network."""

    sizes: tuple[int, ...]  # of the hidden layers
    activation: str
    num_outputs: int  # of the actor
    discrete: bool
    shared: bool
    obs_limit: float | None  # clip of normalised observations; None: they are not normalised
    # of the products: three of TF32, which equal float32 but for the last bit, or one of tf32;
    # products in float32 spill registers
    precision: str = "tf32x3"


@triton.jit(do_not_specialize=["T"])
def rollout_kernel(
    state_ptrs, length_ptr, start_ptr, return_ptr, env_key_ptr, env_gamma_ptr, env_step_ptr,
    key_ptr, gamma_ptr, step_ptr,
    weights, biases, actor_weight, actor_bias, critic_weight, critic_bias, obs_shift, obs_inv_std,
    value_shift, value_inv_std,
    log_std, units,
    obs_ptr, action_ptr, log_prob_ptr, value_ptr, reward_ptr, final_value_ptr, terminated_ptr,
    truncated_ptr, next_obs_ptr,
    final_obs_ptr, newest_ptr,
    T, N, max_steps,
    INITIAL: tl.constexpr, TRANSITION: tl.constexpr, OBSERVE: tl.constexpr, OPTIONS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTHS: tl.constexpr, STARTS: tl.constexpr, OBS_WIDTH: tl.constexpr, PADDED: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, DISCRETE: tl.constexpr,
    SIZES: tl.constexpr, LAST: tl.constexpr, CRITIC_TOWER: tl.constexpr, ACTIVATION: tl.constexpr,
    OBS_LIMIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program plays BLOCK environments for T steps. State and clocks are changed in place; the
    counters of the random streams are not.
    """
    # states, clocks and counters of this block
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = env < N
    state = load_states(state_ptrs, env, inside, WIDTHS)
    length = tl.load(length_ptr + env, mask=inside, other=0).to(tl.int32)
    start = tl.load(start_ptr + env, mask=inside, other=0).to(tl.int32)
    episode_return = tl.load(return_ptr + env, mask=inside, other=0.0)
    env_counter = tl.load(env_step_ptr) * 65536
    counter = tl.load(step_ptr) * 65536
    # row of the first environment in this step; more registers carried between steps would spill
    first_row = tl.zeros((), tl.int64)
    # the newest finished episodes
    newest_return = tl.load(newest_ptr + env, mask=inside, other=0.0)
    newest_length = tl.load(newest_ptr + N + env, mask=inside, other=0.0)
    count = tl.load(newest_ptr + N + N + env, mask=inside, other=0.0)
    left = T  # a tensor, while the loop variable is a Python number in the interpreter
    for _ in tl.range(0, T, num_stages=1):
        # observe: columns are stored and loaded again as a matrix, by other threads of the program
        row = first_row + env
        store_columns(obs_ptr, row, inside, OBSERVE(state, OPTIONS), 0, OBS_WIDTH)
        tl.debug_barrier()
        x = load_inputs(obs_ptr, row, inside, obs_shift, obs_inv_std, OBS_WIDTH, PADDED, OBS_LIMIT)

        # value, and the outputs of the actor
        value = value_column(
            x, weights, biases, critic_weight, critic_bias, value_shift, value_inv_std,
            CRITIC_TOWER, OBS_WIDTH, PADDED, SIZES, LAST, ACTIVATION, PRECISION,
        )  # fmt: skip
        hidden = run_tower(x, weights, biases, 0, OBS_WIDTH, PADDED, SIZES, ACTIVATION, PRECISION)
        output = linear_columns(hidden, actor_weight, actor_bias, LAST, NUM_OUTPUTS)

        # action; keys are loaded in each step, as in registers they would spill
        key = tl.load(key_ptr + env, mask=inside, other=0)
        gamma = tl.load(gamma_ptr + env, mask=inside, other=0)
        if DISCRETE:
            action, log_prob = categorical_sample(output, key, gamma, counter)
            env_action = action
            store_columns(action_ptr, row, inside, action, 0, 1)
        else:
            action, log_prob = gaussian_sample(output, log_std, key, gamma, counter)
            env_action = to_env_columns(action, units)
            store_columns(action_ptr, row, inside, action, 0, NUM_OUTPUTS)

        # step the environments
        key = tl.load(env_key_ptr + env, mask=inside, other=0)
        gamma = tl.load(env_gamma_ptr + env, mask=inside, other=0)
        length += 1
        left -= 1
        state, final_obs, reward, terminated, truncated = advance(
            state, env_action, length, max_steps, key, gamma, env_counter,
            INITIAL, TRANSITION, OBSERVE, OPTIONS, WORDS,
        )  # fmt: skip

        # value of final observations, if an environment of the block needs it
        wants_value = inside & (truncated | (left == 0))
        final_value = tl.zeros((BLOCK,), tl.float32)
        if tl.max(wants_value.to(tl.int32), axis=0) > 0:
            store_columns(final_obs_ptr, env, inside, final_obs, 0, OBS_WIDTH)
            tl.debug_barrier()
            x = load_inputs(
                final_obs_ptr, env, inside, obs_shift, obs_inv_std, OBS_WIDTH, PADDED, OBS_LIMIT
            )
            final_value = value_column(
                x, weights, biases, critic_weight, critic_bias, value_shift, value_inv_std,
                CRITIC_TOWER, OBS_WIDTH, PADDED, SIZES, LAST, ACTIVATION, PRECISION,
            )  # fmt: skip
            # selected here: if it is after the branch, Triton before 3.9 cannot compile some tasks
            final_value = tl.where(wants_value, final_value, 0.0)
            tl.debug_barrier()  # before the next step writes there again

        # episode statistics, as in kernels/newest_episodes.py
        done = terminated | truncated
        episode_return += reward
        counted = done & (start == 0) & (tl.abs(episode_return) < float("inf"))
        newest_return = tl.where(counted, episode_return, newest_return)
        newest_length = tl.where(counted, length.to(tl.float32), newest_length)
        count += tl.where(counted, 1.0, 0.0)

        # store the row
        tl.store(log_prob_ptr + row, log_prob, mask=inside)
        tl.store(value_ptr + row, value, mask=inside)
        tl.store(reward_ptr + row, reward, mask=inside)
        tl.store(final_value_ptr + row, final_value, mask=inside)
        tl.store(terminated_ptr + row, terminated.to(tl.uint8), mask=inside)
        tl.store(truncated_ptr + row, truncated.to(tl.uint8), mask=inside)

        # restart the clocks of ended episodes, and go to the next step
        length = tl.where(done, 0, length)
        start = tl.where(done, 0, start)
        episode_return = tl.where(done, 0.0, episode_return)
        env_counter += 65536
        counter += 65536
        first_row += N

    # store states, clocks, the observations after the rollout and the newest episodes
    store_states(state_ptrs, env, inside, state, WIDTHS, STARTS)
    store_columns(next_obs_ptr, env, inside, OBSERVE(state, OPTIONS), 0, OBS_WIDTH)
    tl.store(length_ptr + env, length.to(tl.int64), mask=inside)
    tl.store(start_ptr + env, start.to(tl.int64), mask=inside)
    tl.store(return_ptr + env, episode_return, mask=inside)
    tl.store(newest_ptr + env, newest_return, mask=inside)
    tl.store(newest_ptr + N + env, newest_length, mask=inside)
    tl.store(newest_ptr + N + N + env, count, mask=inside)


def rollout_obstacle(env: TritonEnv, shape: PolicyShape) -> str:
    """The reason why the kernel cannot play `env` with a policy of this shape, or ""."""
    if not shape.sizes:
        return "it needs a hidden layer"
    for size in shape.sizes:
        if not MIN_UNITS <= size <= MAX_UNITS or size & (size - 1):
            return (
                f"it takes layers of powers of two from {MIN_UNITS} to {MAX_UNITS} units, not "
                f"of {size}"
            )
    if (states := sum(env_constants(env)["WIDTHS"])) > MAX_STATES:
        return f"it takes environments of {MAX_STATES} numbers, not of {states}"
    if (columns := max(env.obs_width, shape.num_outputs)) > MAX_COLUMNS:
        return f"it takes {MAX_COLUMNS} observations or outputs, not {columns}"
    return ""


def rollout_constants(env: TritonEnv, shape: PolicyShape) -> dict[str, Any]:
    """The constexprs of the kernel."""
    return {
        **env_constants(env),
        "SIZES": shape.sizes,
        "LAST": shape.sizes[-1],
        "CRITIC_TOWER": 0 if shape.shared else 1,
        "ACTIVATION": ACTIVATIONS[shape.activation],
        "OBS_LIMIT": shape.obs_limit or 0.0,
        "PRECISION": shape.precision,
        "NUM_OUTPUTS": shape.num_outputs,
        "DISCRETE": shape.discrete,
        "PADDED": max(triton.next_power_of_2(env.obs_width), MIN_UNITS),
        "BLOCK": BLOCK,
    }


def rollout_triton(
    env: TritonEnv,
    streams: RandomStreams,
    policy: PolicyTensors,
    shape: PolicyShape,
    rollout: RolloutTensors,
    next_obs: Tensor,
    newest: Tensor,
) -> None:
    """Play a rollout.

    streams: of the actions. It writes the environments' states and clocks, the rollout, next_obs
    [N, D], the observations after the rollout, and the episodes that ended into newest [3, N], as
    `keep_newest` does. It does not advance the random streams.
    """
    num_steps, num_envs = rollout.reward.shape
    programs = triton.cdiv(num_envs, BLOCK)
    flags = [flag.view(torch.uint8) for flag in (rollout.terminated, rollout.truncated)]
    rollout_kernel[(programs,)](
        env.states, *env.clocks, *env.streams, *streams, *policy, *rollout[:6], *flags, next_obs,
        torch.empty_like(next_obs), newest,
        num_steps, num_envs, step_limit(env), **rollout_constants(env, shape), num_warps=NUM_WARPS,
    )  # fmt: skip
