"""A whole environment step in one launch: transition, time limit, episode statistics, final
observation and autoreset.

For tasks with Triton functions beside their torch functions (`TritonTask`);
`gpurl.envs.torch_env.TorchEnv.step` is the reference. In a kernel a state is a tuple of columns,
one number of each environment of a block, in the order of the task's state tensors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import RandomStreams

BLOCK = 64
NO_LIMIT = 1 << 62  # steps of an episode without a time limit
JitFunction = Callable[..., object]


class TritonTask(NamedTuple):
    """A task's three functions in Triton. `counter` is the number of the first random word that a
    function may draw.

    They get `options` as a constexpr, and draw the same numbers in the same order as the torch
    functions of the task.
    """

    initial_state: JitFunction  # (key, gamma, counter, OPTIONS) -> state
    # (state, action columns, key, gamma, counter, OPTIONS) -> (state, reward, terminated)
    transition: JitFunction
    observe: JitFunction  # (state, OPTIONS) -> obs columns
    options: tuple[float, ...]
    words: int  # random words of 64 bits that `transition` draws


class Clocks(NamedTuple):
    """The episode clocks of N environments. A staggered episode starts with a clock above 0."""

    length: Tensor  # [N] int64: the clock
    start: Tensor  # [N] int64: the clock at which the episode began
    episode_return: Tensor  # [N] float32: so far


class TritonEnv(NamedTuple):
    """Environments as the kernels take them. States [N] or [N, D] and clocks are changed in place;
    the step of the random streams is not.
    """

    task: TritonTask
    states: tuple[Tensor, ...]
    clocks: Clocks
    streams: RandomStreams
    obs_width: int
    max_steps: int | None  # None: no time limit


class StepResult(NamedTuple):
    """The results of a step, [N] unless said otherwise; flags are bool."""

    obs: Tensor  # [N, D]
    final_obs: Tensor  # [N, D]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    done: Tensor
    episode_return: Tensor  # so far, with the last reward
    episode_length: Tensor  # int64
    counted: Tensor  # where an episode ended that was played from its beginning


@triton.jit
def load_columns(ptr, env, inside, WIDTH: tl.constexpr):
    """The WIDTH columns of ptr [N, WIDTH] at the environments `env`."""
    columns = ()
    for k in tl.static_range(WIDTH):
        columns = columns + (tl.load(ptr + env * WIDTH + k, mask=inside, other=0),)
    return columns


@triton.jit
def load_states(ptrs, env, inside, WIDTHS: tl.constexpr):
    """All columns of the state tensors, in order."""
    columns = ()
    for i in tl.static_range(len(WIDTHS)):
        columns = columns + load_columns(ptrs[i], env, inside, WIDTHS[i])
    return columns


@triton.jit
def store_columns(ptr, row, inside, columns, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Write columns FIRST, ..., FIRST + WIDTH - 1 into the rows of ptr [., WIDTH]."""
    for k in tl.static_range(WIDTH):
        tl.store(ptr + row * WIDTH + k, columns[FIRST + k], mask=inside)


@triton.jit
def store_states(ptrs, env, inside, columns, WIDTHS: tl.constexpr, STARTS: tl.constexpr):
    """The inverse of `load_states`; STARTS: the index of each tensor's first column."""
    for i in tl.static_range(len(WIDTHS)):
        store_columns(ptrs[i], env, inside, columns, STARTS[i], WIDTHS[i])


@triton.jit
def select_columns(mask, yes, no):
    """Columns of `yes` where mask, else of `no`."""
    columns = ()
    for k in tl.static_range(len(yes)):
        columns = columns + (tl.where(mask, yes[k], no[k]),)
    return columns


@triton.jit
def advance(
    state, action, length, max_steps, key, gamma, counter,
    INITIAL: tl.constexpr, TRANSITION: tl.constexpr, OBSERVE: tl.constexpr, OPTIONS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One step of a block -> (state after autoreset, final_obs, reward, terminated, truncated);
    length: the clock after this step.
    """
    next_state, reward, terminated = TRANSITION(state, action, key, gamma, counter, OPTIONS)
    truncated = (length >= max_steps) & (terminated == 0)
    final_obs = OBSERVE(next_state, OPTIONS)
    # autoreset by selection: where an episode of the block ended, each environment draws an initial
    # state, and the running ones drop it
    done = terminated | truncated
    if tl.max(done.to(tl.int32), axis=0) > 0:
        next_state = select_columns(done, INITIAL(key, gamma, counter + WORDS, OPTIONS), next_state)
    return next_state, final_obs, reward, terminated, truncated


@triton.jit
def env_step_kernel(
    state_ptrs, length_ptr, start_ptr, return_ptr, action_ptr, key_ptr, gamma_ptr, step_ptr,
    obs_ptr, final_obs_ptr, reward_ptr, terminated_ptr, truncated_ptr, done_ptr, episode_return_ptr,
    episode_length_ptr, counted_ptr,
    N, max_steps,
    INITIAL: tl.constexpr, TRANSITION: tl.constexpr, OBSERVE: tl.constexpr, OPTIONS: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTHS: tl.constexpr, STARTS: tl.constexpr, OBS_WIDTH: tl.constexpr, ACTION_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program steps BLOCK environments; state and clocks are changed in place."""
    # load states, actions, clocks and random streams
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = env < N
    state = load_states(state_ptrs, env, inside, WIDTHS)
    action = load_columns(action_ptr, env, inside, ACTION_WIDTH)
    length = tl.load(length_ptr + env, mask=inside, other=0) + 1
    start = tl.load(start_ptr + env, mask=inside, other=0)
    key = tl.load(key_ptr + env, mask=inside, other=0)
    gamma = tl.load(gamma_ptr + env, mask=inside, other=0)
    # step and reset
    state, final_obs, reward, terminated, truncated = advance(
        state, action, length, max_steps, key, gamma, tl.load(step_ptr) * 65536,
        INITIAL, TRANSITION, OBSERVE, OPTIONS, WORDS,
    )  # fmt: skip
    done = terminated | truncated
    episode_return = tl.load(return_ptr + env, mask=inside, other=0.0) + reward
    # store the results of the step
    store_columns(obs_ptr, env, inside, OBSERVE(state, OPTIONS), 0, OBS_WIDTH)
    store_columns(final_obs_ptr, env, inside, final_obs, 0, OBS_WIDTH)
    tl.store(reward_ptr + env, reward, mask=inside)
    tl.store(terminated_ptr + env, terminated.to(tl.uint8), mask=inside)
    tl.store(truncated_ptr + env, truncated.to(tl.uint8), mask=inside)
    tl.store(done_ptr + env, done.to(tl.uint8), mask=inside)
    tl.store(episode_return_ptr + env, episode_return, mask=inside)
    tl.store(episode_length_ptr + env, length - start, mask=inside)
    tl.store(counted_ptr + env, (done & (start == 0)).to(tl.uint8), mask=inside)
    # store what the next step starts from
    store_states(state_ptrs, env, inside, state, WIDTHS, STARTS)
    tl.store(length_ptr + env, tl.where(done, 0, length), mask=inside)
    tl.store(start_ptr + env, tl.where(done, 0, start), mask=inside)
    tl.store(return_ptr + env, tl.where(done, 0.0, episode_return), mask=inside)


def step_limit(env: TritonEnv) -> int:
    """The clock at which an episode is truncated."""
    return NO_LIMIT if env.max_steps is None else env.max_steps


def env_constants(env: TritonEnv) -> dict[str, Any]:
    """The constexprs of every kernel that steps `env`."""
    task = env.task
    # numbers of an environment in each state tensor
    widths = tuple(1 if state.dim() == 1 else state.shape[1] for state in env.states)
    return {
        "INITIAL": task.initial_state,
        "TRANSITION": task.transition,
        "OBSERVE": task.observe,
        "OPTIONS": task.options,
        "WORDS": task.words,
        "WIDTHS": widths,
        "STARTS": tuple(sum(widths[:i]) for i in range(len(widths))),
        "OBS_WIDTH": env.obs_width,
    }


def env_step_triton(env: TritonEnv, action: Tensor) -> StepResult:
    """One step of all environments; action: [N, A] float32, or [N] int64."""
    num_envs = env.clocks.length.shape[0]
    device = action.device
    action = action.contiguous()

    # tensors for the results
    make = functools.partial(torch.empty, dtype=torch.float32, device=device)
    obs, final_obs = (make(num_envs, env.obs_width) for _ in range(2))
    reward, episode_return = (make(num_envs) for _ in range(2))
    terminated, truncated, done, counted = (make(num_envs, dtype=torch.bool) for _ in range(4))
    episode_length = make(num_envs, dtype=torch.int64)
    flags = [flag.view(torch.uint8) for flag in (terminated, truncated, done, counted)]

    env_step_kernel[(triton.cdiv(num_envs, BLOCK),)](
        env.states, *env.clocks, action, *env.streams,
        obs, final_obs, reward, *flags[:3], episode_return, episode_length, flags[3],
        num_envs, step_limit(env), **env_constants(env),
        ACTION_WIDTH=1 if action.dim() == 1 else action.shape[1], BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return StepResult(
        obs, final_obs, reward, terminated, truncated, done, episode_return, episode_length, counted
    )
