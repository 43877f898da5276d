"""Generalised advantage estimation with truncation bootstrap, and the advantage's moments in the
same pass.

    delta_t = r_t + gamma b_t - V_t,   b_t = 0 where terminated, V(final_obs_t) where truncated,
                                       else V_{t+1}
    A_t = delta_t + (0 where the episode ended, else gamma lambda A_{t+1}),   R_t = A_t + V_t

Schulman et al. 2016 ("High-dimensional continuous control using generalized advantage estimation"),
equations 11 to 16. A row that is not valid is no transition: its advantage is 0, its return is its
value, and no later advantage reaches earlier rows through it.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import (
    ForMembers,
    choose_kernel,
    dense,
    member_strides,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton


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
    # one-step errors
    bootstrap = torch.where(truncated, final_value, value[1:]).masked_fill_(terminated, 0.0)
    advantage = torch.add(reward, bootstrap, alpha=gamma).sub_(value[:-1])
    is_break = terminated | truncated
    if valid is not None:
        advantage.masked_fill_(~valid, 0.0)
        is_break |= ~valid
    # their discounted sums, from the last row back; selected, not multiplied: 0 * NaN would leak
    # across the end of an episode
    for t in range(reward.shape[0] - 2, -1, -1):
        later = advantage[t + 1].masked_fill(is_break[t], 0.0)
        advantage[t].add_(later, alpha=gamma * gae_lambda)
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
    """second(first(x)) of two maps x -> scale x + offset. Selected, because 0 * NaN would leak
    across the end of an episode.
    """
    return first_scale * second_scale, second_offset + tl.where(
        second_scale == 0.0, 0.0, second_scale * first_offset
    )


@triton.jit
def _merge(count, mean, square, other_count, other_mean, other_square):
    """Counts, means and sums of squared deviations of two sets merged into those of their union
    (Chan et al. 1979).
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
    T, N, reward_stride, value_stride, final_stride, terminated_stride, truncated_stride,
    valid_stride, gamma, gae_lambda,
    HAS_VALID: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N environments over all T steps, last rows first, a tile of BLOCK_T
    rows at a time; it writes count, mean and squared deviations to its row of `partial`. Strides
    are from member to member, whose results follow each other.

    Rows are reversed in the loads and scanned forward: `associative_scan(reverse=True)` is wrong on
    some GPUs (triton issue 4362).
    """
    member = tl.program_id(1).to(tl.int64)
    reward_ptr += member * reward_stride
    value_ptr += member * value_stride
    final_ptr += member * final_stride
    terminated_ptr += member * terminated_stride
    truncated_ptr += member * truncated_stride
    valid_ptr += member * valid_stride
    advantage_ptr += member * T * N
    returns_ptr += member * T * N
    partial_ptr += member * tl.num_programs(0) * 3
    # environments of this program; the advantage of the row after the tile; moments so far
    env = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = tl.cast(N, tl.int64)
    later_advantage = tl.zeros((BLOCK_N,), tl.float32)
    count = 0.0
    mean = 0.0
    square = 0.0
    for start in range(0, T, BLOCK_T):
        # a tile of rows
        row = T - 1 - start - tl.arange(0, BLOCK_T)
        inside = (row >= 0)[:, None] & (env < N)[None, :]
        offset = row.to(tl.int64)[:, None] * width + env.to(tl.int64)[None, :]
        terminated = tl.load(terminated_ptr + offset, mask=inside, other=0) != 0
        truncated = tl.load(truncated_ptr + offset, mask=inside, other=0) != 0
        used = inside
        if HAS_VALID:
            used = inside & (tl.load(valid_ptr + offset, mask=inside, other=0) != 0)
        # one-step errors, and how much of the next row's advantage each row adds
        value = tl.load(value_ptr + offset, mask=inside, other=0.0)
        bootstrap = tl.load(value_ptr + offset + width, mask=inside, other=0.0)
        final = tl.load(final_ptr + offset, mask=inside & truncated, other=0.0)
        bootstrap = tl.where(terminated, 0.0, tl.where(truncated, final, bootstrap))
        reward = tl.load(reward_ptr + offset, mask=inside, other=0.0)
        delta = tl.where(used, reward + gamma * bootstrap - value, 0.0)
        decay = tl.where(terminated | truncated | (inside & (used == 0)), 0.0, gamma * gae_lambda)
        decay = tl.where(inside, decay, 1.0)  # rows before the first step are the identity
        # discounted sums within the tile, then what the rows after it add
        scale, shift = tl.associative_scan((decay, delta), 0, _affine_compose)
        advantage = shift + tl.where(scale == 0.0, 0.0, scale * later_advantage[None, :])
        tl.store(advantage_ptr + offset, advantage, mask=inside)
        tl.store(returns_ptr + offset, advantage + value, mask=inside)
        later_advantage = tl.sum(
            tl.where((tl.arange(0, BLOCK_T) == BLOCK_T - 1)[:, None], advantage, 0.0), axis=0
        )
        # moments of the tile, merged into those of the program
        weight = used.to(tl.float32)
        tile_count = tl.sum(tl.sum(weight, axis=1), axis=0)
        tile_mean = tl.sum(tl.sum(advantage * weight, axis=1), axis=0) / tl.maximum(tile_count, 1.0)
        deviation = (advantage - tile_mean) * weight
        tile_square = tl.sum(tl.sum(deviation * deviation, axis=1), axis=0)
        count, mean, square = _merge(count, mean, square, tile_count, tile_mean, tile_square)
    tl.store(partial_ptr + tl.program_id(0) * 3, count)
    tl.store(partial_ptr + tl.program_id(0) * 3 + 1, mean)
    tl.store(partial_ptr + tl.program_id(0) * 3 + 2, square)


@triton.jit
def gae_moments_kernel(partial_ptr, moments_ptr, P, BLOCK_P: tl.constexpr):
    """One program merges the P partial moments of a member in a fixed order into mean, population
    variance and count.
    """
    partial_ptr += tl.program_id(0).to(tl.int64) * P * 3
    moments_ptr += tl.program_id(0).to(tl.int64) * 3
    # each lane merges every BLOCK_P-th row
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
    # then the lanes are merged
    total = tl.sum(counts, axis=0)
    mean_of_all = tl.sum(counts * means, axis=0) / tl.maximum(total, 1.0)
    deviation = means - mean_of_all
    square_of_all = tl.sum(squares + counts * deviation * deviation, axis=0)
    tl.store(moments_ptr, mean_of_all)
    tl.store(moments_ptr + 1, square_of_all / tl.maximum(total, 1.0))
    tl.store(moments_ptr + 2, total)


def _tile(num_steps: int, num_envs: int) -> tuple[int, int, int]:
    """(BLOCK_T, BLOCK_N, num_warps): wide and flat for many environments, tall for few environments
    with long rollouts.
    """
    if num_envs >= 1024:
        return 8, 32, 1
    if num_envs >= 32:
        return 64, 32, 8
    return min(256, triton.next_power_of_2(num_steps)), 1, 2


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
    """`gae_reference` in two launches. Also of M members, each tensor with a leading axis [M, ...],
    of any stride there.
    """
    members = reward.shape[:-2]
    flags = [terminated, truncated, terminated if valid is None else valid]
    given = [dense(x, bool(members)) for x in (reward, value, final_value, *flags)]
    # Triton loads bytes, not bools
    columns = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in given]
    num_steps, num_envs = reward.shape[-2:]
    block_t, block_n, num_warps = _tile(num_steps, num_envs)
    programs = triton.cdiv(num_envs, block_n)
    advantage = reward.new_empty(reward.shape)
    returns = reward.new_empty(reward.shape)
    # [programs, 3]: the moments of each program's environments
    partial = reward.new_empty(*members, programs, 3)
    moments = reward.new_empty(*members, 3)
    gae_kernel[(programs, members.numel())](
        *columns, advantage, returns, partial,
        num_steps, num_envs, *member_strides(columns, bool(members)),
        ctypes.c_float(gamma).value, ctypes.c_float(gae_lambda).value,
        HAS_VALID=valid is not None, BLOCK_T=block_t, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip
    gae_moments_kernel[(members.numel(),)](partial, moments, programs, BLOCK_P=128, num_warps=4)
    return advantage, returns, moments


class GaeOfMembers(ForMembers):
    """`gae_triton`, its arguments by position."""

    takes_strides = True
    forward = staticmethod(gae_triton)


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
    """`gae_reference` in one pass: calling torch once a step costs a CPU more than the arithmetic
    of a few environments.
    """
    inputs = [x.contiguous() for x in (reward, value, final_value, terminated, truncated)]
    valid = None if valid is None else valid.contiguous()
    advantage, returns, moments = (
        torch.empty(shape, dtype=torch.float32) for shape in (reward.shape, reward.shape, (3,))
    )
    c_library.functions().gae(
        *c_library.pointers(*inputs, valid),
        *c_library.integers(*reward.shape),
        ctypes.c_float(gamma),
        ctypes.c_float(gae_lambda),
        *c_library.pointers(advantage, returns, moments),
    )
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
    truncated, valid: [T, N] bool, valid None if all rows are. Other types are computed by torch.
    ValueError for other shapes: C and Triton would read beyond them.
    """
    function = gae_reference
    if kernels_read(reward, value, final_value, (terminated, truncated, valid)):
        # members may have discounts of their own, which no kernel reads
        has_numbers = not isinstance(gamma, Tensor) and not isinstance(gae_lambda, Tensor)
        if use_triton_for_members(reward) and has_numbers:
            numbers = gamma, gae_lambda, valid
            return GaeOfMembers.apply(reward, value, final_value, terminated, truncated, *numbers)  # type: ignore[no-any-return, no-untyped-call]
        function = choose_kernel(reward, triton=gae_triton, c=gae_c, reference=gae_reference)
    return function(reward, value, final_value, terminated, truncated, gamma, gae_lambda, valid)


def kernels_read(
    reward: Tensor, value: Tensor, final_value: Tensor, flags: Sequence[Tensor | None]
) -> bool:
    """Whether C and Triton can read the columns of a rollout: float32, and flags of one byte.
    ValueError unless value is [T + 1, N] and all others are [T, N].
    """
    given = [each for each in flags if each is not None]
    shapes = [tuple(each.shape) for each in (reward, value, final_value, *given)]
    shape = shapes[0]
    if len(shape) != 2 or shapes != [shape, (shape[0] + 1, shape[1]), *[shape] * (len(given) + 1)]:
        raise ValueError(
            f"value must be [T + 1, N], reward, final values and flags [T, N]; value is "
            f"{shapes[1]}, reward {shape}, the others {shapes[2:]}"
        )
    is_float32 = all(each.dtype == torch.float32 for each in (reward, value, final_value))
    return is_float32 and all(each.element_size() == 1 for each in given)
