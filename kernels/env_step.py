"""A whole environment step in one launch: transition, time limit, episode statistics, final
observation and autoreset.

For tasks that give their mathematics as Triton functions too (`TritonTask`);
`gpurl.envs.torch_env.TorchEnv.step` is the reference. A state is a tuple of columns, a block of
environments each, in the order in which the task's state tensors hold them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
NO_LIMIT = 1 << 62


class TritonTask(NamedTuple):
    """A task's three functions in Triton. `counter` is the number of the first random word that a
    function may draw.

    They get `options` as a constexpr; what they draw, and in which order, is what the torch
    functions of the task draw.
    """

    initial_state: Any  # (key, gamma, counter, OPTIONS) -> state
    transition: (
        Any  # (state, action columns, key, gamma, counter, OPTIONS) -> (state, reward, terminated)
    )
    observe: Any  # (state, OPTIONS) -> obs columns
    options: tuple[Any, ...]  # numbers
    words: int  # random words of 64 bits that `transition` draws


class Clocks(NamedTuple):
    """Of each environment: steps of its episode, the clock at which the episode really began, [N]
    int64, and return so far, [N] float32.
    """

    length: Tensor
    start: Tensor
    episode_return: Tensor


class RandomStreams(NamedTuple):
    """As in CounterRandom: key, gamma [N] int64, step 0-d int64."""

    key: Tensor
    gamma: Tensor
    step: Tensor


class TritonEnv(NamedTuple):
    """Environments as the kernels take them: states [N] or [N, D] each and clocks are changed in
    place, the streams' step is not.
    """

    task: TritonTask
    states: tuple[Tensor, ...]
    clocks: Clocks
    streams: RandomStreams
    obs_width: int
    max_steps: int | None  # None: no time limit


class StepResult(NamedTuple):
    """What a step tells of [N] environments; flags are bool."""

    obs: Tensor  # [N, D]
    final_obs: Tensor  # [N, D]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    done: Tensor
    episode_return: Tensor  # so far, the last reward included
    episode_length: Tensor  # int64
    counted: Tensor  # where the episode is over and was played from its beginning


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
    """The reverse of `load_states`; STARTS: the number of each tensor's first column."""
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
    length: with this step.
    """
    next_state, reward, terminated = TRANSITION(state, action, key, gamma, counter, OPTIONS)
    truncated = (length >= max_steps) & (terminated == 0)
    final_obs = OBSERVE(next_state, OPTIONS)
    fresh = INITIAL(key, gamma, counter + WORDS, OPTIONS)
    return (
        select_columns(terminated | truncated, fresh, next_state),
        final_obs,
        reward,
        terminated,
        truncated,
    )


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
    """A program takes BLOCK environments one step further; state and clocks are changed in
    place.
    """
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = env < N
    state = load_states(state_ptrs, env, inside, WIDTHS)
    action = load_columns(action_ptr, env, inside, ACTION_WIDTH)
    length = tl.load(length_ptr + env, mask=inside, other=0) + 1
    start = tl.load(start_ptr + env, mask=inside, other=0)
    key = tl.load(key_ptr + env, mask=inside, other=0)
    gamma = tl.load(gamma_ptr + env, mask=inside, other=0)
    state, final_obs, reward, terminated, truncated = advance(
        state,
        action,
        length,
        max_steps,
        key,
        gamma,
        tl.load(step_ptr) * 65536,
        INITIAL,
        TRANSITION,
        OBSERVE,
        OPTIONS,
        WORDS,
    )
    done = terminated | truncated
    episode_return = tl.load(return_ptr + env, mask=inside, other=0.0) + reward
    store_columns(obs_ptr, env, inside, OBSERVE(state, OPTIONS), 0, OBS_WIDTH)
    store_columns(final_obs_ptr, env, inside, final_obs, 0, OBS_WIDTH)
    tl.store(reward_ptr + env, reward, mask=inside)
    tl.store(terminated_ptr + env, terminated.to(tl.uint8), mask=inside)
    tl.store(truncated_ptr + env, truncated.to(tl.uint8), mask=inside)
    tl.store(done_ptr + env, done.to(tl.uint8), mask=inside)
    tl.store(episode_return_ptr + env, episode_return, mask=inside)
    tl.store(episode_length_ptr + env, length - start, mask=inside)
    tl.store(counted_ptr + env, (done & (start == 0)).to(tl.uint8), mask=inside)
    store_states(state_ptrs, env, inside, state, WIDTHS, STARTS)
    tl.store(length_ptr + env, tl.where(done, 0, length), mask=inside)
    tl.store(start_ptr + env, tl.where(done, 0, start), mask=inside)
    tl.store(return_ptr + env, tl.where(done, 0.0, episode_return), mask=inside)


def step_limit(env: TritonEnv) -> int:
    """The greatest clock."""
    return NO_LIMIT if env.max_steps is None else env.max_steps


def env_constants(env: TritonEnv) -> dict[str, Any]:
    """The constexprs that every kernel around `env` takes."""
    task, widths = (
        env.task,
        tuple(1 if state.dim() == 1 else state.shape[1] for state in env.states),
    )
    functions = {
        "INITIAL": task.initial_state,
        "TRANSITION": task.transition,
        "OBSERVE": task.observe,
    }
    starts = tuple(sum(widths[:i]) for i in range(len(widths)))
    return {
        **functions,
        "OPTIONS": task.options,
        "WORDS": task.words,
        "WIDTHS": widths,
        "STARTS": starts,
        "OBS_WIDTH": env.obs_width,
    }


def env_step_triton(env: TritonEnv, action: Tensor) -> StepResult:
    """One step of all environments; action: [N, A] float32, or [N] int64."""
    num_envs, device = env.clocks.length.shape[0], action.device
    action = action.contiguous()
    obs, final_obs = (
        torch.empty(num_envs, env.obs_width, dtype=torch.float32, device=device) for _ in range(2)
    )
    reward, episode_return = (
        torch.empty(num_envs, dtype=torch.float32, device=device) for _ in range(2)
    )
    terminated, truncated, done, counted = (
        torch.empty(num_envs, dtype=torch.bool, device=device) for _ in range(4)
    )
    episode_length = torch.empty(num_envs, dtype=torch.int64, device=device)
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
