"""Sums over the episodes that ended in a step: their number, returns and lengths, where the returns
are finite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels.backend import choose_kernel

BLOCK = 2048


def add_episodes_reference(
    sums: Tensor, ended: Tensor, episode_return: Tensor, length: Tensor
) -> None:
    """The specification; arguments as in `add_episodes`."""
    mask = ended & torch.isfinite(episode_return)
    rows = torch.stack((torch.ones_like(episode_return), episode_return, length.float()))
    sums += torch.where(mask, rows, 0.0).sum(1)


@triton.jit(do_not_specialize=["N"])
def add_episodes_kernel(sums_ptr, ended_ptr, return_ptr, length_ptr, N, BLOCK: tl.constexpr):
    """One program adds block after block, so the order of the sum is fixed."""
    # sums of each lane
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.float32)
    returns = tl.zeros((BLOCK,), tl.float32)
    lengths = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        env = start + lane
        ended = tl.load(ended_ptr + env, mask=env < N, other=0) != 0
        episode_return = tl.load(return_ptr + env, mask=ended, other=0.0).to(tl.float32)
        ended = ended & (tl.abs(episode_return) < float("inf"))
        count += tl.where(ended, 1.0, 0.0)
        returns += tl.where(ended, episode_return, 0.0)
        lengths += tl.load(length_ptr + env, mask=ended, other=0).to(tl.float32)
    # their totals, added to what was there
    tl.store(sums_ptr, tl.load(sums_ptr) + tl.sum(count, axis=0))
    tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.sum(returns, axis=0))
    tl.store(sums_ptr + 2, tl.load(sums_ptr + 2) + tl.sum(lengths, axis=0))


def add_episodes_triton(
    sums: Tensor, ended: Tensor, episode_return: Tensor, length: Tensor
) -> None:
    """`add_episodes_reference` in one launch."""
    flags = ended.contiguous().view(torch.uint8)
    add_episodes_kernel[(1,)](
        sums, flags, episode_return.contiguous(), length.contiguous(), ended.shape[0],
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def add_episodes(sums: Tensor, ended: Tensor, episode_return: Tensor, length: Tensor) -> None:
    """Add number, returns and lengths of the episodes that ended to sums [3] float32, in place.

    ended: [N] bool, episode_return: [N] float32 or another float, length: [N] int64 or another
    number, of each environment.
    """
    function = choose_kernel(sums, triton=add_episodes_triton, reference=add_episodes_reference)
    function(sums, ended, episode_return, length)
