"""Stacked frames in a replay buffer: the ring keeps each frame once, and a batch is stacked when it
is sampled.

The frames before row t of an environment are those of rows t - 1, t - 2, ... back to the first row
of its episode, whose frame fills the rest (Mnih et al. 2015, Methods). Where they reach back before
the oldest row, or across a break or a skipped row, they are lost: such a transition has weight 0.
"""

import torch
from torch import Tensor

from gpurl.kernels.replay import (
    BROKEN,
    DONE,
    INVALID,
    Batch,
    Block,
    Ring,
    replay_add,
    replay_walk_reference,
)


def newest_frame(obs: Tensor) -> Tensor:
    """[h, N, K, *frame] -> [h, N, *frame], what the ring stores."""
    return obs[:, :, -1]


def add_block(ring: Ring, block: Block) -> None:
    """`replay_add` of single frames, which marks a break after each row that was skipped.

    A row that is not valid may also be the reset of an environment that resets a step late: it
    holds the final observation of the row before, and an episode begins after it.
    """
    if block.valid is None:
        replay_add(ring, block)
        return
    num_rows, num_envs = ring.flags.shape
    steps = len(block.terminated)
    row = (ring.counts[0] + torch.arange(steps, device=ring.flags.device)) % num_rows
    # the row before each row: whether its episode ended, and its final observation
    ended = (block.terminated | block.truncated)[:-1]
    newest_ended = (ring.flags.index_select(0, ring.counts[2:]) & DONE) != 0
    ended = torch.cat((newest_ended, ended))
    obs, final_obs = (
        each.reshape(steps, num_envs, -1).to(ring.obs.dtype)
        for each in (block.obs, block.final_obs)
    )
    before = torch.cat((ring.final_obs[-num_envs:].unsqueeze(0), final_obs[:-1]))
    resets = ended & (obs == before).all(2)
    skipped = ~block.valid & ~resets
    replay_add(ring, block)
    flags = ring.flags.index_select(0, row) | skipped.view(torch.uint8) * BROKEN
    ring.flags.index_copy_(0, row, flags)


def stack_batch(ring: Ring, batch: Batch, frames: int, gamma: float, num_steps: int) -> Batch:
    """`batch`, sampled from a ring of single frames with this gamma and number of steps, with
    observations [B, K D] of K = `frames` frames.
    """
    num_envs = ring.flags.shape[1]
    env = batch.index % num_envs
    obs, lost = _frames_at(ring, batch.index // num_envs, env, batch.obs, frames)
    # the observation after the last step: the frames of that step move by one
    _, _, last = replay_walk_reference(ring, batch.index, gamma, num_steps)
    at_last = ring.obs[last, env].to(batch.obs.dtype)
    before, before_lost = _frames_at(ring, last, env, at_last, frames - 1)
    weight = batch.weight.masked_fill(lost | before_lost, 0.0)
    return batch._replace(
        obs=torch.cat(obs, dim=1),
        next_obs=torch.cat((*before, batch.next_obs), dim=1),
        weight=weight,
    )


def _frames_at(
    ring: Ring, row: Tensor, env: Tensor, frame: Tensor, frames: int
) -> tuple[list[Tensor], Tensor]:
    """(the last `frames` frames [B, D] at `row` [B], the oldest first; lost [B] bool). frame: that
    of `row` itself.
    """
    num_rows = ring.flags.shape[0]
    oldest = torch.where(ring.counts[0] > num_rows, (ring.counts[2] + 1) % num_rows, 0)
    stack = [frame]
    # the episode's first row is reached
    begun = torch.zeros_like(row, dtype=torch.bool)
    lost = torch.zeros_like(begun)
    for _ in range(frames - 1):
        before = (row - 1) % num_rows
        flags = ring.flags[before, env]
        is_cut = (row == oldest) | ((flags & BROKEN) != 0)
        lost = lost | (is_cut & ~begun)
        begun = begun | is_cut | ((flags & (DONE | INVALID)) != 0)
        row = torch.where(begun, row, before)
        stack.append(ring.obs[row, env].to(frame.dtype))
    return stack[::-1], lost
