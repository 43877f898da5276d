"""Generalised advantage estimation with truncation bootstrap, and the advantage's moments in the
same pass.

    delta_t = r_t + gamma b_t - V_t,   b_t = 0 where terminated, V(final_obs_t) where truncated,
                                       else V_{t+1}
    A_t = delta_t + (0 where the episode ended, else gamma lambda A_{t+1}),   R_t = A_t + V_t

Schulman et al. 2016 ("High-dimensional continuous control using generalized advantage estimation"),
equations 11 to 16. A row that is
not valid is no transition: its advantage is 0, its return is its value, and nothing flows through
it.
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import use_c, use_triton


def gae_reference(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification; arguments and results as in `gae`."""
    bootstrap = torch.where(truncated, final_value, value[1:]).masked_fill_(terminated, 0.0)
    advantage = torch.add(reward, bootstrap, alpha=gamma).sub_(value[:-1])
    cut = terminated | truncated
    if valid is not None:
        advantage.masked_fill_(~valid, 0.0)
        cut |= ~valid
    for t in range(
        reward.shape[0] - 2, -1, -1
    ):  # selected, not multiplied: 0 * NaN would leak across an episode's end
        advantage[t].add_(advantage[t + 1].masked_fill(cut[t], 0.0), alpha=gamma * gae_lambda)
    return advantage, advantage + value[:-1], _moments(advantage, valid)


def _moments(advantage: Tensor, valid: Tensor | None) -> Tensor:
    """[3]: mean, population variance, count over valid entries."""
    if valid is None:
        variance, mean = torch.var_mean(advantage, correction=0)
        return torch.stack((mean, variance, torch.full_like(mean, advantage.numel())))
    count = valid.sum().to(advantage.dtype)
    mean = advantage.sum() / count.clamp(min=1)
    variance = ((advantage - mean).square() * valid).sum() / count.clamp(min=1)
    return torch.stack((mean, variance, count))


@triton.jit
def _affine_compose(first_scale, first_offset, second_scale, second_offset):
    """x -> second(first(x)) of two maps x -> scale x + offset; selected, because 0 * NaN would leak
    across an episode's end.
    """
    return first_scale * second_scale, second_offset + tl.where(
        second_scale == 0.0, 0.0, second_scale * first_offset
    )


@triton.jit
def _merge(count, mean, square, other_count, other_mean, other_square):
    """Chan et al. 1979: counts, means and sums of squared deviations of two sets into those of
    both.
    """
    total = count + other_count
    share = tl.where(total > 0, other_count / tl.maximum(total, 1.0), 0.0)
    difference = other_mean - mean
    return (
        total,
        mean + difference * share,
        square + other_square + difference * difference * count * share,
    )


@triton.jit(do_not_specialize=["T"])
def gae_kernel(
    reward_ptr, value_ptr, final_ptr, terminated_ptr, truncated_ptr, valid_ptr, advantage_ptr,
    returns_ptr, partial_ptr,
    T, N, gamma, gae_lambda, HAS_VALID: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes BLOCK_N environments through all T steps, last rows first, a tile of BLOCK_T
    rows at a time.

    Rows are reversed in the loads and scanned forward: `associative_scan(reverse=True)` is wrong on
    some GPUs (triton issue 4362).
    """
    env = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.cast(N, tl.int64)
    policy_state = tl.zeros((BLOCK_N,), tl.float32)
    count = 0.0
    mean = 0.0
    square = 0.0
    for start in range(0, T, BLOCK_T):
        row = T - 1 - start - tl.arange(0, BLOCK_T)
        inside = (row >= 0)[:, None] & (env < N)[None, :]
        offset = row.to(tl.int64)[:, None] * width + env.to(tl.int64)[None, :]
        terminated = tl.load(terminated_ptr + offset, mask=inside, other=0) != 0
        truncated = tl.load(truncated_ptr + offset, mask=inside, other=0) != 0
        used = inside
        if HAS_VALID:
            used = inside & (tl.load(valid_ptr + offset, mask=inside, other=0) != 0)
        value = tl.load(value_ptr + offset, mask=inside, other=0.0)
        bootstrap = tl.load(value_ptr + offset + width, mask=inside, other=0.0)
        final = tl.load(final_ptr + offset, mask=inside & truncated, other=0.0)
        bootstrap = tl.where(terminated, 0.0, tl.where(truncated, final, bootstrap))
        reward = tl.load(reward_ptr + offset, mask=inside, other=0.0)
        delta = tl.where(used, reward + gamma * bootstrap - value, 0.0)
        decay = tl.where(terminated | truncated | (inside & (used == 0)), 0.0, gamma * gae_lambda)
        decay = tl.where(inside, decay, 1.0)  # rows before the first step are the identity
        scale, shift = tl.associative_scan((decay, delta), 0, _affine_compose)
        advantage = shift + tl.where(scale == 0.0, 0.0, scale * policy_state[None, :])
        tl.store(advantage_ptr + offset, advantage, mask=inside)
        tl.store(returns_ptr + offset, advantage + value, mask=inside)
        policy_state = tl.sum(
            tl.where((tl.arange(0, BLOCK_T) == BLOCK_T - 1)[:, None], advantage, 0.0), axis=0
        )
        weight = used.to(tl.float32)
        tile_count = tl.sum(tl.sum(weight, axis=1), axis=0)
        tile_mean = tl.sum(tl.sum(advantage * weight, axis=1), axis=0) / tl.maximum(tile_count, 1.0)
        deviation = (advantage - tile_mean) * weight
        count, mean, square = _merge(
            count,
            mean,
            square,
            tile_count,
            tile_mean,
            tl.sum(tl.sum(deviation * deviation, axis=1), axis=0),
        )
    tl.store(partial_ptr + tl.program_id(0) * 3, count)
    tl.store(partial_ptr + tl.program_id(0) * 3 + 1, mean)
    tl.store(partial_ptr + tl.program_id(0) * 3 + 2, square)


@triton.jit
def gae_moments_kernel(partial_ptr, moments_ptr, P, BLOCK_P: tl.constexpr):
    """One program merges the P partial moments in a fixed order: mean, population variance,
    count.
    """
    lane = tl.arange(0, BLOCK_P)
    counts = tl.zeros((BLOCK_P,), tl.float32)
    means = tl.zeros((BLOCK_P,), tl.float32)
    squares = tl.zeros((BLOCK_P,), tl.float32)
    for start in range(0, P, BLOCK_P):
        index = start + lane
        inside = index < P
        count = tl.load(partial_ptr + index * 3, mask=inside, other=0.0)
        mean = tl.load(partial_ptr + index * 3 + 1, mask=inside, other=0.0)
        square = tl.load(partial_ptr + index * 3 + 2, mask=inside, other=0.0)
        counts, means, squares = _merge(counts, means, squares, count, mean, square)
    total = tl.sum(counts, axis=0)
    mean_of_all = tl.sum(counts * means, axis=0) / tl.maximum(total, 1.0)
    deviation = means - mean_of_all
    square_of_all = tl.sum(squares + counts * deviation * deviation, axis=0)
    tl.store(moments_ptr, mean_of_all)
    tl.store(moments_ptr + 1, square_of_all / tl.maximum(total, 1.0))
    tl.store(moments_ptr + 2, total)


def _tile(num_steps: int, num_envs: int) -> tuple[int, int, int]:
    """(BLOCK_T, BLOCK_N, num_warps): wide and flat for many environments, tall for few with long
    rollouts.
    """
    if num_envs >= 1024:
        return 8, 32, 1
    return (64, 32, 8) if num_envs >= 32 else (min(256, triton.next_power_of_2(num_steps)), 1, 2)


def gae_triton(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gae_reference` in two launches."""
    tensors = [
        reward,
        value,
        final_value,
        terminated,
        truncated,
        *([] if valid is None else [valid]),
    ]
    reward, value, final_value, terminated, truncated, *rest = (
        tensor.contiguous() for tensor in tensors
    )
    num_steps, num_envs = reward.shape
    block_t, block_n, num_warps = _tile(num_steps, num_envs)
    programs = triton.cdiv(num_envs, block_n)
    advantage, returns = torch.empty_like(reward), torch.empty_like(reward)
    partial, moments = reward.new_empty(programs, 3), reward.new_empty(3)
    flags = [flag.view(torch.uint8) for flag in (terminated, truncated, *rest)]
    gae_kernel[(programs,)](
        reward, value, final_value, flags[0], flags[1], flags[-1], advantage, returns, partial,
        num_steps, num_envs,
        ctypes.c_float(gamma).value, ctypes.c_float(gae_lambda).value,
        HAS_VALID=valid is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    gae_moments_kernel[(1,)](partial, moments, programs, BLOCK_P=128, num_warps=4)
    return advantage, returns, moments


def gae_c(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gae_reference` in one pass: a step of torch costs a CPU more than the arithmetic of a few
    environments.
    """
    tensors = [
        tensor if tensor is None else tensor.contiguous()
        for tensor in (reward, value, final_value, terminated, truncated, valid)
    ]
    advantage, returns, moments = (
        torch.empty(shape, dtype=torch.float32) for shape in (reward.shape, reward.shape, (3,))
    )
    pointers = [
        ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
        for tensor in (*tensors, advantage, returns, moments)
    ]
    sizes = [ctypes.c_int64(size) for size in reward.shape]
    factors = ctypes.c_float(gamma), ctypes.c_float(gae_lambda)
    c_library.functions().gae(*pointers[:6], *sizes, *factors, *pointers[6:])
    return advantage, returns, moments


def gae(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantage [T, N], returns [T, N], moments [3]: mean, population variance and count of the
    advantage over valid entries).

    reward: [T, N] float32; value: [T+1, N], row T after the last step; final_value: [T, N], the
    value of final_obs, read only where truncated (it may hold anything elsewhere); terminated,
    truncated, valid: [T, N] bool, valid None for all.
    """
    if reward.dim() != 2 or value.shape != (
        reward.shape[0] + 1,
        reward.shape[1],
    ):  # C and Triton would read what lies beside
        raise ValueError(
            f"reward must be [T, N] and value [T + 1, N], got {tuple(reward.shape)} and "
            f"{tuple(value.shape)}"
        )
    function = gae_triton if use_triton(reward) else gae_c if use_c(reward) else gae_reference
    return function(reward, value, final_value, terminated, truncated, gamma, gae_lambda, valid)
