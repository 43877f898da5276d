"""The newest finished episode of each environment: its return and length, and how many episodes the
environment has finished, where the returns are finite.

One episode of each environment is no selection. All episodes that ended in a window are one: short
episodes end more often, and long ones have not ended yet. While the policy stays the same and no
episode is longer than t steps, the newest finished episode after t or more steps is distributed as
an episode is: those of kind k, which takes l_k steps and comes with probability p_k, are the newest
at step t with probability p_k sum_s u(s - l_k) P(length > t - s) = p_k, where u(s) is the
probability that an episode begins at step s (Feller, An introduction to probability theory, vol. 1,
ch. XIII: the sum without the shift is 1, since exactly one episode is under way).
"""

import torch
from torch import Tensor

from gpurl.kernels.backend import (
    ForMembers,
    check_written,
    choose_kernel,
    dense,
    member_strides,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton

BLOCK = 256


def keep_newest_reference(
    newest: Tensor, ended: Tensor, episode_return: Tensor, length: Tensor
) -> None:
    """The specification; arguments as in `keep_newest`."""
    episode_return = episode_return.float()
    mask = ended & torch.isfinite(episode_return)
    rows = torch.stack((episode_return, length.float(), newest[2] + 1.0))
    newest.copy_(torch.where(mask, rows, newest))


@triton.jit(do_not_specialize=["N"])
def keep_newest_kernel(
    newest_ptr, ended_ptr, return_ptr, length_ptr, N,
    newest_stride, ended_stride, return_stride, length_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK environments, and writes those whose episode ended. Strides are from
    member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    newest_ptr += member * newest_stride
    ended_ptr += member * ended_stride
    return_ptr += member * return_stride
    length_ptr += member * length_stride
    env = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ended = tl.load(ended_ptr + env, mask=env < N, other=0) != 0
    episode_return = tl.load(return_ptr + env, mask=ended, other=0.0).to(tl.float32)
    counted = ended & (tl.abs(episode_return) < float("inf"))
    length = tl.load(length_ptr + env, mask=counted, other=0).to(tl.float32)
    # rows of return, length and count
    tl.store(newest_ptr + env, episode_return, mask=counted)
    tl.store(newest_ptr + N + env, length, mask=counted)
    count = tl.load(newest_ptr + N + N + env, mask=counted, other=0.0)
    tl.store(newest_ptr + N + N + env, count + 1.0, mask=counted)


def keep_newest_triton(
    newest: Tensor, ended: Tensor, episode_return: Tensor, length: Tensor
) -> None:
    """`keep_newest_reference` in one launch. Also of M members, each tensor with a leading axis
    [M, ...], of any stride there.
    """
    members, num_envs = ended.shape[:-1], ended.shape[-1]
    have_members = bool(members)
    given = [dense(each, have_members) for each in (ended, episode_return, length)]
    flags = given[0].view(torch.uint8)
    keep_newest_kernel[(triton.cdiv(num_envs, BLOCK), members.numel())](
        newest, flags, *given[1:], num_envs, *member_strides((newest, *given), have_members),
        BLOCK=BLOCK,
    )  # fmt: skip


class KeepOfMembers(ForMembers):
    """`keep_newest_triton`; returns nothing of use."""

    takes_strides = True

    @staticmethod
    def forward(newest: Tensor, *given: Tensor) -> Tensor:
        if newest.dim() > 2:
            check_written(newest)
        keep_newest_triton(newest, *given)
        return newest.new_empty(len(newest), 0)


def keep_newest(newest: Tensor, ended: Tensor, episode_return: Tensor, length: Tensor) -> None:
    """Write the episodes that ended to newest [3, N] float32, in place: return, length, and the
    number of episodes so far, which is exact up to 2^24; 0 where none has ended.

    ended: [N] bool, episode_return: [N] float32 or another float, length: [N] int64 or another
    number, of each environment.
    """
    if use_triton_for_members(newest):
        KeepOfMembers.apply(newest, ended, episode_return, length)  # type: ignore[no-untyped-call]
        return
    function = choose_kernel(newest, triton=keep_newest_triton, reference=keep_newest_reference)
    function(newest, ended, episode_return, length)
