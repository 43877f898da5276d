"""Samples an action from the outputs of a policy in one launch: the action, its log-probability and
the environment's action.

The reference is `gpurl.nn.distributions`: `Gaussian.sample`, `Gaussian.to_env` and
`Categorical.sample`, with the same random bits.
"""

import torch
from torch import Tensor

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
    NUM_OUTPUTS: tl.constexpr, DISCRETE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program samples the actions of BLOCK environments."""
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
    within its limits, units [4, A] as ActionScaler.units.
    """
    mean = mean.contiguous()
    # one program samples a block of environments, with a column for each action
    num_envs, width = mean.shape
    action, env_action = (torch.empty_like(mean) for _ in range(2))
    log_prob = mean.new_empty(num_envs)
    sample_kernel[(triton.cdiv(num_envs, BLOCK),)](
        mean, log_std, units, *streams, action, env_action, log_prob, num_envs, offset,
        NUM_OUTPUTS=width, DISCRETE=False, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return action, log_prob, env_action


def categorical_sample_triton(
    logits: Tensor, streams: RandomStreams, offset: int
) -> tuple[Tensor, Tensor]:
    """(action [N] int64, log_prob [N]) for logits [N, n]."""
    logits = logits.contiguous()
    num_envs, width = logits.shape
    action = torch.empty(num_envs, dtype=torch.int64, device=logits.device)
    log_prob = logits.new_empty(num_envs)
    sample_kernel[(triton.cdiv(num_envs, BLOCK),)](
        logits, logits, logits, *streams, action, action, log_prob, num_envs, offset,
        NUM_OUTPUTS=width, DISCRETE=True, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return action, log_prob
