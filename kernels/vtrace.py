"""V-trace: the targets of a rollout that an earlier policy played, with truncation bootstrap, and
the advantage's moments.

    ratio_t = pi(a_t | s_t) / mu(a_t | s_t)
    rho_t = min(max_rho, ratio_t),     c_t = min(max_c, ratio_t)
    delta_t = r_t + gamma b_t - V_t,   b_t = 0 where terminated, V(final_obs_t) where truncated,
                                       else V_{t+1}
    e_t = rho_t delta_t + (0 where the episode ended, else gamma lambda c_t e_{t+1})
    v_t = V_t + e_t                    the target of the critic
    A_t = delta_t + (0 where the episode ended, else gamma lambda e_{t+1})

mu is the policy that acted, pi and V are those of now. Espeholt et al. 2018 ("IMPALA"), equation 1
in the recursive form of remark 1, with the lambda of remark 2. With pi = mu it is their equation 2
for lambda 1, and generalised advantage estimation for any lambda. A_t leaves out the ratio of its
own action, by which the surrogate of PPO multiplies it. A row that is not valid is no transition:
its advantage is 0, its target is its value, and nothing later reaches earlier rows through it.
"""

import ctypes

import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import choose_kernel
from gpurl.kernels.gae import _merge, _moments, gae_moments_kernel, kernels_read
from gpurl.kernels.optional_triton import tl, triton


def vtrace_reference(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratio: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification; arguments and results as in `vtrace`."""
    # one-step errors, and their weights
    bootstrap = torch.where(truncated, final_value, value[1:]).masked_fill_(terminated, 0.0)
    advantage = torch.add(reward, bootstrap, alpha=gamma).sub_(value[:-1])
    is_break = terminated | truncated
    if valid is not None:
        advantage.masked_fill_(~valid, 0.0)
        log_ratio = log_ratio.masked_fill(~valid, 0.0)
        is_break |= ~valid
    ratio = log_ratio.exp()
    rho, c = ratio.clamp(max=max_rho), ratio.clamp(max=max_c)
    # from the last row back; selected, not multiplied: 0 * NaN would leak across the end of an
    # episode
    error = rho * advantage
    for t in range(reward.shape[0] - 2, -1, -1):
        later = error[t + 1].masked_fill(is_break[t], 0.0).mul_(gamma * gae_lambda)
        advantage[t].add_(later)
        error[t].addcmul_(c[t], later)
    return advantage, error.add_(value[:-1]), _moments(advantage, valid)


@triton.jit(do_not_specialize=["T"])
def vtrace_kernel(
    reward_ptr, value_ptr, final_ptr, terminated_ptr, truncated_ptr, log_ratio_ptr, valid_ptr,
    advantage_ptr, returns_ptr, partial_ptr,
    T, N, gamma, gae_lambda, max_rho, max_c, HAS_VALID: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_N environments, the last row first; it writes count, mean and
    squared deviations to its row of `partial`.
    """
    env = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = env < N
    width = tl.cast(N, tl.int64)
    # of the row after: its error e, its value; moments of each environment so far
    error = tl.zeros((BLOCK_N,), tl.float32)
    after = tl.load(value_ptr + T * width + env, mask=inside, other=0.0)
    count = tl.zeros((BLOCK_N,), tl.float32)
    mean = tl.zeros((BLOCK_N,), tl.float32)
    square = tl.zeros((BLOCK_N,), tl.float32)
    for step in range(0, T):
        # a row
        offset = (T - 1 - step) * width + env.to(tl.int64)
        terminated = tl.load(terminated_ptr + offset, mask=inside, other=0) != 0
        truncated = tl.load(truncated_ptr + offset, mask=inside, other=0) != 0
        used = inside
        if HAS_VALID:
            used = inside & (tl.load(valid_ptr + offset, mask=inside, other=0) != 0)
        value = tl.load(value_ptr + offset, mask=inside, other=0.0)
        final = tl.load(final_ptr + offset, mask=inside & truncated, other=0.0)
        reward = tl.load(reward_ptr + offset, mask=inside, other=0.0)
        ratio = tl.exp(tl.load(log_ratio_ptr + offset, mask=used, other=0.0))
        # the one-step error, and what the later rows add
        bootstrap = tl.where(terminated, 0.0, tl.where(truncated, final, after))
        delta = tl.where(used, reward + gamma * bootstrap - value, 0.0)
        goes_on = used & (terminated == 0) & (truncated == 0)
        later = tl.where(goes_on, gamma * gae_lambda * error, 0.0)
        advantage = delta + later
        # selected, so that NaN stays NaN
        rho = tl.where(ratio > max_rho, max_rho, ratio)
        c = tl.where(ratio > max_c, max_c, ratio)
        error = rho * delta + c * later
        after = value
        tl.store(advantage_ptr + offset, advantage, mask=inside)
        tl.store(returns_ptr + offset, error + value, mask=inside)
        count, mean, square = _merge(
            count, mean, square, used.to(tl.float32), tl.where(used, advantage, 0.0), 0.0
        )
    # the moments of the program
    total = tl.sum(count, axis=0)
    mean_of_all = tl.sum(count * mean, axis=0) / tl.maximum(total, 1.0)
    deviation = mean - mean_of_all
    square_of_all = tl.sum(square + count * deviation * deviation, axis=0)
    tl.store(partial_ptr + tl.program_id(0) * 3, total)
    tl.store(partial_ptr + tl.program_id(0) * 3 + 1, mean_of_all)
    tl.store(partial_ptr + tl.program_id(0) * 3 + 2, square_of_all)


def vtrace_triton(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratio: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`vtrace_reference` in two launches."""
    numbers = (reward, value, final_value, log_ratio)
    reward, value, final_value, log_ratio = (x.contiguous() for x in numbers)
    flags = [terminated, truncated] if valid is None else [terminated, truncated, valid]
    # Triton loads bytes, not bools
    flags = [flag.contiguous().view(torch.uint8) for flag in flags]
    num_steps, num_envs = reward.shape
    programs = triton.cdiv(num_envs, 32)
    advantage = torch.empty_like(reward)
    returns = torch.empty_like(reward)
    # [programs, 3]: the moments of each program's environments
    partial = reward.new_empty(programs, 3)
    moments = reward.new_empty(3)
    vtrace_kernel[(programs,)](
        reward, value, final_value, flags[0], flags[1], log_ratio, flags[-1],
        advantage, returns, partial, num_steps, num_envs,
        *(ctypes.c_float(number).value for number in (gamma, gae_lambda, max_rho, max_c)),
        HAS_VALID=valid is not None, BLOCK_N=32, num_warps=1,
    )  # fmt: skip
    gae_moments_kernel[(1,)](partial, moments, programs, BLOCK_P=128, num_warps=4)
    return advantage, returns, moments


def vtrace_c(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratio: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`vtrace_reference` in one call: for each operation of torch a thread that learns would wait
    until one that steps environments gives Python's lock away.
    """
    steps = (reward, value, final_value, terminated, truncated, log_ratio)
    inputs = [x.contiguous() for x in steps]
    valid = None if valid is None else valid.contiguous()
    advantage, returns, moments = (
        torch.empty(shape, dtype=torch.float32) for shape in (reward.shape, reward.shape, (3,))
    )
    c_library.functions().vtrace(
        *c_library.pointers(*inputs, valid),
        *c_library.integers(*reward.shape),
        *(ctypes.c_float(number) for number in (gamma, gae_lambda, max_rho, max_c)),
        *c_library.pointers(advantage, returns, moments),
    )
    return advantage, returns, moments


def vtrace(
    reward: Tensor,
    value: Tensor,
    final_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    log_ratio: Tensor,
    gamma: float,
    gae_lambda: float,
    valid: Tensor | None = None,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantage [T, N], returns [T, N], moments [3]: mean, population variance and count of the
    advantage over valid entries).

    log_ratio: [T, N] float32, the log-probability of each action now minus that when it was taken;
    value: [T+1, N] of the critic as it is now. The other arguments and the errors are those of
    `gae`.
    """
    if log_ratio.shape != reward.shape:
        raise ValueError(
            f"log_ratio must be [T, N] as reward is, got {tuple(log_ratio.shape)} and "
            f"{tuple(reward.shape)}"
        )
    function = vtrace_reference
    is_read = kernels_read(reward, value, final_value, (terminated, truncated, valid))
    if is_read and log_ratio.dtype == torch.float32:
        function = choose_kernel(
            reward, triton=vtrace_triton, c=vtrace_c, reference=vtrace_reference
        )
    steps = reward, value, final_value, terminated, truncated, log_ratio
    return function(*steps, gamma, gae_lambda, valid, max_rho, max_c)
