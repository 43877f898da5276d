"""Samples an action from the outputs of a policy in one launch: the action, its log-probability and
the environment's action.

The reference is `gpurl.nn.distributions`: `Gaussian.sample`, `Gaussian.to_env` and
`Categorical.sample`, with the same random bits.
"""

from typing import Any

import torch
from torch import Tensor

from gpurl.kernels.backend import ForMembers, dense, member_strides, transforms_are_active
from gpurl.kernels.env_step import load_columns, store_columns
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import RandomStreams
from gpurl.kernels.rollout_policy import categorical_sample, gaussian_sample, to_env_columns

BLOCK = 128
MAX_COLUMNS = 64  # of actions or logits


@triton.jit(do_not_specialize=["offset"])
def sample_kernel(
    output_ptr, log_std_ptr, units_ptr, key_ptr, gamma_ptr, step_ptr, action_ptr, env_action_ptr,
    log_prob_ptr, N, offset,
    output_stride, log_std_stride, units_stride, key_stride, gamma_stride, step_stride,
    NUM_OUTPUTS: tl.constexpr, DISCRETE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program samples the actions of BLOCK environments. Strides are from member to member, whose
    actions follow each other.
    """
    member = tl.program_id(1).to(tl.int64)
    output_ptr += member * output_stride
    log_std_ptr += member * log_std_stride
    units_ptr += member * units_stride
    key_ptr += member * key_stride
    gamma_ptr += member * gamma_stride
    step_ptr += member * step_stride
    first = member * N
    action_ptr += first if DISCRETE else first * NUM_OUTPUTS
    env_action_ptr += first if DISCRETE else first * NUM_OUTPUTS
    log_prob_ptr += first
    # outputs of the policy and random streams
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = env < N
    output = load_columns(output_ptr, env, inside, NUM_OUTPUTS)
    key = tl.load(key_ptr + env, mask=inside, other=0)
    gamma = tl.load(gamma_ptr + env, mask=inside, other=0)
    counter = tl.load(step_ptr) * 65536 + offset
    # sample and store
    if DISCRETE:
        action, log_prob = categorical_sample(output, key, gamma, counter)
        store_columns(action_ptr, env, inside, action, 0, 1)
    else:
        action, log_prob = gaussian_sample(output, log_std_ptr, key, gamma, counter)
        store_columns(action_ptr, env, inside, action, 0, NUM_OUTPUTS)
        store_columns(
            env_action_ptr, env, inside, to_env_columns(action, units_ptr), 0, NUM_OUTPUTS
        )
    tl.store(log_prob_ptr + env, log_prob, mask=inside)


def gaussian_sample_triton(
    mean: Tensor, log_std: Tensor, units: Tensor, streams: RandomStreams, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(action [N, A], log_prob [N], the environment's action [N, A]) for mean [N, A], log_std [A]
    within its limits, units [4, A] as ActionScaler.units. Also of M members, each tensor with a
    leading axis [M, ...], of any stride there.
    """
    members = mean.shape[:-2]
    num_envs, width = mean.shape[-2:]
    mean, log_std, units = (dense(x, bool(members)) for x in (mean, log_std, units))
    streams = RandomStreams(*(dense(x, bool(members)) for x in streams))
    # one program samples a block of environments, with a column for each action
    action, env_action = (mean.new_empty(mean.shape) for _ in range(2))
    log_prob = mean.new_empty(mean.shape[:-1])
    sample_kernel[(triton.cdiv(num_envs, BLOCK), members.numel())](
        mean, log_std, units, *streams, action, env_action, log_prob, num_envs, offset,
        *member_strides((mean, log_std, units, *streams), bool(members)),
        NUM_OUTPUTS=width, DISCRETE=False, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return action, log_prob, env_action


def categorical_sample_triton(
    logits: Tensor, streams: RandomStreams, offset: int
) -> tuple[Tensor, Tensor]:
    """(action [N] int64, log_prob [N]) for logits [N, n]. Also of M members, each tensor with a
    leading axis [M, ...], of any stride there.
    """
    members = logits.shape[:-2]
    num_envs, width = logits.shape[-2:]
    logits = dense(logits, bool(members))
    streams = RandomStreams(*(dense(x, bool(members)) for x in streams))
    action = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    log_prob = logits.new_empty(logits.shape[:-1])
    sample_kernel[(triton.cdiv(num_envs, BLOCK), members.numel())](
        logits, logits, logits, *streams, action, action, log_prob, num_envs, offset,
        *member_strides((logits, logits, logits, *streams), bool(members)),
        NUM_OUTPUTS=width, DISCRETE=True, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return action, log_prob


class _GaussianOfMembers(ForMembers):
    """`gaussian_sample_triton`, its tensors and the offset by position."""

    takes_strides = True

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        mean, log_std, units, *streams, offset = given
        return gaussian_sample_triton(mean, log_std, units, RandomStreams(*streams), offset)


class _CategoricalOfMembers(ForMembers):
    """`categorical_sample_triton`, its tensors and the offset by position."""

    takes_strides = True

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        logits, *streams, offset = given
        return categorical_sample_triton(logits, RandomStreams(*streams), offset)


def sample_gaussian(
    mean: Tensor, log_std: Tensor, units: Tensor, streams: RandomStreams, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`gaussian_sample_triton`, also inside torch.func.vmap."""
    if transforms_are_active():
        return _GaussianOfMembers.apply(mean, log_std, units, *streams, offset)  # type: ignore[no-any-return, no-untyped-call]
    return gaussian_sample_triton(mean, log_std, units, streams, offset)


def sample_categorical(
    logits: Tensor, streams: RandomStreams, offset: int
) -> tuple[Tensor, Tensor]:
    """`categorical_sample_triton`, also inside torch.func.vmap."""
    if transforms_are_active():
        return _CategoricalOfMembers.apply(logits, *streams, offset)  # type: ignore[no-any-return, no-untyped-call]
    return categorical_sample_triton(logits, streams, offset)
