"""The replay ring: blocks of steps go in, batches of transitions come out, with n-step returns that
never cross the end of an episode.

A ring holds T rows of N environments. The observation after a row is that of the next row, so none
is stored twice; where an episode ended the true successor lies in a table of final observations,
and that of the newest row in the table's last N entries.
For a row k of an environment and m = the steps up to the first that ended an episode, is the
newest, or is n steps from k:
    reward = sum_{j<m} gamma^j r[k+j],   discount = gamma^m where the last of them did not
                                         terminate, else 0,
    next_obs = what followed that last step                          (Sutton and Barto 2018,
    equation 7.1; truncation is no termination)
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import use_c, use_triton
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.random import (
    WORDS_PER_STEP,
    random_fraction_reference,
    splitmix_word,
    word_to_fraction,
)

TERMINATED, TRUNCATED, INVALID = (
    1,
    2,
    4,
)  # bits of a row's flags; an invalid row is no real transition
DONE = TERMINATED | TRUNCATED
STORED_KINDS = (torch.float32, torch.bfloat16, torch.uint8)  # of observations
ELEMENTS = 1024  # of observations that a program of the kernel holds at a time


class RingTensors(NamedTuple):
    """Contiguous tensors, which stay where they are."""

    obs: Tensor  # [T, N, D] float32, bfloat16 or uint8
    numbers: Tensor  # [T, N, W] float32: the reward, then whatever else belongs to a step
    flags: Tensor  # [T, N] uint8
    slot: Tensor  # [T, N] int32: the entry of its final observation, where an episode ended
    final_obs: Tensor  # [F + N, D], of the kind of obs
    # [F + 1] int64: the row, t N + n, whose final observation this is; older ones are overwritten,
    # the last is nobody's
    owner: Tensor
    # [3] int64: steps written, final observations written, the newest row: a division less for
    # whoever reads
    counts: Tensor


class Ring(RingTensors):
    """The tensors, and what C is told of them, made once."""

    @functools.cached_property
    def in_c(self) -> tuple[Any, Any]:
        """(addresses, sizes)."""
        rows, envs, obs_size = self.obs.shape
        sizes = (
            rows,
            envs,
            obs_size,
            self.numbers.shape[2],
            self.owner.shape[0] - 1,
            STORED_KINDS.index(self.obs.dtype),
        )
        return _pointers(self), (ctypes.c_int64 * 6)(*sizes)


class Block(NamedTuple):
    """Steps that go in: h <= T of them. Observations and columns may be of any dtype."""

    obs: Tensor  # [h, N, ...]
    final_obs: (
        Tensor  # [h, N, ...]: the true successor; read where an episode ended and in the last step
    )
    terminated: Tensor  # [h, N] bool
    truncated: Tensor  # [h, N] bool
    valid: Tensor | None  # [h, N] bool: whether the step is a real transition; None: all are
    columns: Sequence[
        Tensor
        # [h, N] or [h, N, n] each: a step's numbers in their order, the reward first; at most W in
        # all
    ]


class Batch(NamedTuple):
    """Transitions that come out."""

    index: Tensor  # [B] int64: t N + n
    obs: Tensor  # [B, D] float32, or uint8 where the ring's are
    numbers: Tensor  # [B, W] float32, as they were stored
    reward: Tensor  # [B] float32, of up to n steps
    discount: Tensor  # [B] float32: of the value of next_obs
    next_obs: Tensor  # [B, D]
    # [B] float32: 0 where there is nothing to learn from (no transition, or its successor is gone),
    # else 1
    weight: Tensor


def new_ring(
    num_rows: int,
    num_envs: int,
    obs_size: int,
    num_numbers: int,
    num_final: int,
    kind: torch.dtype,
    device: torch.device,
) -> Ring:
    """An empty ring."""
    if kind not in STORED_KINDS:
        raise ValueError(f"observations are stored as float32, bfloat16 or uint8, not {kind}")
    shape = (num_rows, num_envs)
    return Ring(
        torch.zeros(*shape, obs_size, dtype=kind, device=device),
        torch.zeros(*shape, num_numbers, dtype=torch.float32, device=device),
        torch.zeros(shape, dtype=torch.uint8, device=device),
        torch.zeros(shape, dtype=torch.int32, device=device),
        torch.zeros(num_final + num_envs, obs_size, dtype=kind, device=device),
        torch.full((num_final + 1,), -1, dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )


def ring_bytes(
    num_rows: int, num_envs: int, obs_size: int, num_numbers: int, num_final: int, kind: torch.dtype
) -> int:
    """What `new_ring` takes."""
    empty = new_ring(
        num_rows, num_envs, obs_size, num_numbers, num_final, kind, torch.device("meta")
    )
    return sum(tensor.nbytes for tensor in empty)


# ---- going in ----


def replay_add_reference(ring: Ring, block: Block) -> None:
    """The specification, arguments as in `replay_add`."""
    (num_rows, num_envs), steps = ring.flags.shape, block.terminated.shape[0]
    row = (ring.counts[0] + torch.arange(steps, device=ring.flags.device)) % num_rows
    obs, final_obs = (
        each.reshape(steps, num_envs, -1).to(ring.obs.dtype)
        for each in (block.obs, block.final_obs)
    )
    ring.obs.index_copy_(0, row, obs)
    first = 0
    for column, width in zip(block.columns, _widths(block)):
        ring.numbers[:, :, first : first + width].index_copy_(
            0, row, column.reshape(steps, num_envs, width).float()
        )
        first += width
    flags = block.truncated.view(torch.uint8) * TRUNCATED + block.terminated.view(torch.uint8)
    if block.valid is not None:
        flags += block.valid.logical_not().view(torch.uint8) * INVALID
    ring.flags.index_copy_(0, row, flags)
    ring.slot.index_copy_(0, row, _keep_final(ring, row, (flags & DONE) != 0, final_obs))
    ring.final_obs[-num_envs:] = final_obs[-1]
    ring.counts[0] += steps
    ring.counts[2] = row[-1]


def _keep_final(ring: Ring, row: Tensor, ended: Tensor, final_obs: Tensor) -> Tensor:
    """[h, N] int32, the slots of rows [h] in which episodes `ended` [h, N]; their final
    observations [h, N, D] go into the table.
    """
    num_envs, num_final = ring.flags.shape[1], ring.owner.shape[0] - 1
    env = torch.arange(num_envs, device=row.device)
    entry = (ended.flatten().cumsum(0) - 1 + ring.counts[1]).view_as(
        ended
    )  # they are numbered in the order of t N + n
    ring.counts[1] += ended.sum()
    kept = ended & (entry >= ring.counts[1] - num_final)  # of more than the table holds, the last
    entry %= num_final
    place = torch.where(
        kept, entry, num_final + env
    ).flatten()  # all others behind it, for no shape may depend on how many ended
    ring.final_obs.index_copy_(0, place, final_obs.flatten(0, 1))
    ring.owner.index_copy_(
        0, place.clamp(max=num_final), (row.unsqueeze(1) * num_envs + env).flatten()
    )
    return torch.where(ended, entry, 0).int()


def replay_mark_break(ring: Ring, mask: Tensor) -> None:
    """Truncate the newest step where mask [N] bool, unless it ended already: what follows belongs
    to other episodes.
    """
    row = ring.counts[2:]
    flags, slot = (each.index_select(0, row) for each in (ring.flags, ring.slot))
    cut = mask & ((flags & DONE) == 0) & (ring.counts[0] > 0)
    newest = ring.final_obs[-ring.flags.shape[1] :].clone().unsqueeze(0)
    ring.slot.index_copy_(0, row, torch.where(cut, _keep_final(ring, row, cut, newest), slot))
    ring.flags.index_copy_(0, row, flags + cut.view(torch.uint8) * TRUNCATED)


# ---- coming out ----


def uniform_index_reference(
    streams: RandomStreams, offset: int, batch_size: int, size: Tensor
) -> Tensor:
    """[B] int64 uniform in [0, size), of 53 bits each: word number offset + i of the one stream's
    step; size: 0-d int64.
    """
    fraction = random_fraction_reference(*streams, offset, batch_size)[0]
    return (fraction * size.double()).long().clamp_(max=size - 1)


def replay_sample_reference(
    ring: Ring,
    batch_size: int,
    gamma: float,
    num_steps: int,
    streams: RandomStreams,
    offset: int = 0,
    index: Tensor | None = None,
) -> Batch:
    """The specification, arguments and result as in `replay_sample`."""
    (num_rows, num_envs), num_final = ring.flags.shape, ring.owner.shape[0] - 1
    written = ring.counts[0]
    if index is None:
        index = uniform_index_reference(
            streams, offset, batch_size, (written.clamp(max=num_rows) * num_envs).clamp(min=1)
        )
    flags, rewards, newest = (
        ring.flags.view(-1),
        ring.numbers.view(-1, ring.numbers.shape[2])[:, 0],
        ring.counts[2],
    )
    env = index % num_envs
    here = last = index // num_envs
    reward, discount = (
        torch.zeros(len(index), device=index.device),
        torch.ones(len(index), device=index.device),
    )
    going = torch.ones_like(index, dtype=torch.bool)
    for step in range(num_steps):
        at = here * num_envs + env
        bits = flags[at]
        if step:
            going = going & ((bits & INVALID) == 0)
        reward = torch.where(going, reward + discount * rewards[at], reward)
        discount = torch.where(going, discount * gamma, discount)
        last = torch.where(going, here, last)
        going = going & ((bits & DONE) == 0) & (here != newest)
        here = (here + 1) % num_rows
    end = last * num_envs + env
    bits, entry = flags[end], ring.slot.view(-1)[end].long()
    ended, terminated = (bits & DONE) != 0, (bits & TERMINATED) != 0
    in_table = ended | (last == newest)
    obs = ring.obs.view(-1, ring.obs.shape[2])
    final = ring.final_obs[torch.where(ended, entry, num_final + env)]
    after = (last + 1) % num_rows * num_envs + env
    next_obs = torch.where(in_table.unsqueeze(1), final, obs[after])
    overwritten = ended & ~terminated & (ring.owner[entry] != end)
    broken = ~in_table & (
        (flags[after] & INVALID) != 0
    )  # what follows is no observation of this episode
    weight = ((flags[index] & INVALID) == 0) & ~overwritten & ~broken
    kind = torch.uint8 if obs.dtype == torch.uint8 else torch.float32
    numbers = ring.numbers.view(-1, ring.numbers.shape[2])[index]
    return Batch(
        index,
        obs[index].to(kind),
        numbers,
        reward,
        discount.masked_fill(terminated, 0.0),
        next_obs.to(kind),
        weight.float(),
    )


@triton.jit(do_not_specialize=["offset"])
def replay_sample_kernel(
    obs_ptr, numbers_ptr, flags_ptr, slot_ptr, final_ptr, owner_ptr, counts_ptr, key_ptr, gamma_ptr,
    step_ptr,
    index_ptr, out_obs_ptr, out_numbers_ptr, reward_ptr, discount_ptr, next_obs_ptr, weight_ptr,
    offset, T, N, F, B, discount_factor,
    D: tl.constexpr, W: tl.constexpr, NUM_STEPS: tl.constexpr, DRAWS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A program draws or reads BLOCK_B rows, walks them up to NUM_STEPS further, and copies what
    belongs to them.
    """
    lane = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = lane < B
    written = tl.load(counts_ptr)
    newest = tl.load(counts_ptr + 2)
    if DRAWS:
        size = tl.maximum(tl.minimum(written, T) * N, 1)
        word = splitmix_word(
            tl.load(key_ptr), tl.load(gamma_ptr), tl.load(step_ptr) * 65536 + offset + lane
        )
        index = tl.minimum((word_to_fraction(word) * size.to(tl.float64)).to(tl.int64), size - 1)
        tl.store(index_ptr + lane, index, mask=inside)
    else:
        index = tl.load(index_ptr + lane, mask=inside, other=0)
    here = index // N
    env = index - here * N  # a division of 64 bits is slow, two are two calls
    last = here
    going = lane >= 0
    reward = tl.zeros([BLOCK_B], tl.float32)
    discount = reward + 1.0
    for step in tl.static_range(NUM_STEPS):
        at = here * N + env
        bits = tl.load(flags_ptr + at)
        if step > 0:
            going = going & ((bits & 4) == 0)
        reward = tl.where(going, reward + discount * tl.load(numbers_ptr + at * W), reward)
        discount = tl.where(going, discount * discount_factor, discount)
        last = tl.where(going, here, last)
        going = going & ((bits & 3) == 0) & (here != newest)
        here = tl.where(here + 1 == T, 0, here + 1)
    end = last * N + env
    bits = tl.load(flags_ptr + end)
    entry = tl.load(slot_ptr + end).to(tl.int64)
    ended = (bits & 3) != 0
    terminated = (bits & 1) != 0
    lost = ended & (terminated == 0) & (tl.load(owner_ptr + entry) != end)
    after = tl.where(last + 1 == T, 0, last + 1) * N + env
    in_table = ended | (last == newest)
    lost = lost | ((in_table == 0) & ((tl.load(flags_ptr + after) & 4) != 0))
    is_valid = ((tl.load(flags_ptr + index) & 4) == 0) & (lost == 0)
    tl.store(reward_ptr + lane, reward, mask=inside)
    tl.store(discount_ptr + lane, tl.where(terminated, 0.0, discount), mask=inside)
    tl.store(weight_ptr + lane, is_valid.to(tl.float32), mask=inside)
    which = tl.arange(0, BLOCK_W)
    numbers_mask = inside[:, None] & (which < W)[None, :]
    numbers = tl.load(
        numbers_ptr + index[:, None] * W + which[None, :], mask=numbers_mask, other=0.0
    )
    tl.store(out_numbers_ptr + lane[:, None] * W + which[None, :], numbers, mask=numbers_mask)
    entry = tl.where(ended, entry, F + env)
    source = tl.where(
        in_table[:, None], final_ptr + entry[:, None] * D, obs_ptr + after[:, None] * D
    )
    for first in range(0, D, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (column < D)[None, :]
        place = lane[:, None] * D + column[None, :]
        obs = tl.load(obs_ptr + index[:, None] * D + column[None, :], mask=mask, other=0)
        tl.store(out_obs_ptr + place, obs.to(out_obs_ptr.dtype.element_ty), mask=mask)
        next_obs = tl.load(source + column[None, :], mask=mask, other=0)
        tl.store(next_obs_ptr + place, next_obs.to(next_obs_ptr.dtype.element_ty), mask=mask)


def batch_memory(ring: Ring, batch_size: int, index: Tensor | None) -> Batch:
    """What a batch is written into; `index` is its own. On a CPU it is numpy's, which takes half as
    long.
    """
    device, obs_size, width = ring.obs.device, ring.obs.shape[2], ring.numbers.shape[2]
    is_bytes, on_cpu = ring.obs.dtype == torch.uint8, device.type == "cpu"

    def empty(shape: tuple[int, ...], kind: torch.dtype, of_numpy: type[np.generic]) -> Tensor:
        return (
            torch.from_numpy(np.empty(shape, of_numpy))
            if on_cpu
            else torch.empty(shape, dtype=kind, device=device)
        )

    of_obs = (torch.uint8, np.uint8) if is_bytes else (torch.float32, np.float32)
    obs, next_obs = (empty((batch_size, obs_size), *of_obs) for _ in range(2))
    reward, discount, weight = (empty((batch_size,), torch.float32, np.float32) for _ in range(3))
    index = empty((batch_size,), torch.int64, np.int64) if index is None else index
    return Batch(
        index,
        obs,
        empty((batch_size, width), torch.float32, np.float32),
        reward,
        discount,
        next_obs,
        weight,
    )


def replay_sample_triton(
    ring: Ring,
    out: Batch,
    gamma: float,
    num_steps: int,
    streams: RandomStreams,
    offset: int,
    draws: bool,
) -> None:
    """`replay_sample_reference` in one launch, into `out`, whose index is drawn or read."""
    (num_rows, num_envs), num_final, batch_size = (
        ring.flags.shape,
        ring.owner.shape[0] - 1,
        len(out.weight),
    )
    obs_size, width = ring.obs.shape[2], ring.numbers.shape[2]
    block_d = min(triton.next_power_of_2(obs_size), 256)
    block_b = max(min(ELEMENTS // block_d, 32), 1)
    replay_sample_kernel[(triton.cdiv(batch_size, block_b),)](
        *ring, *streams, *out, offset, num_rows, num_envs, num_final, batch_size, gamma, D=obs_size,
        W=width, NUM_STEPS=num_steps,
        DRAWS=draws, BLOCK_B=block_b, BLOCK_D=block_d, BLOCK_W=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip


# ---- C ----


_Seven = ctypes.c_void_p * 7  # made here: a type costs more than its values


def _pointers(tensors: tuple[Tensor, ...]) -> "ctypes.Array[ctypes.c_void_p]":
    """At most seven."""
    return _Seven(*map(Tensor.data_ptr, tensors))


def _replay_add_c(ring: Ring, block: Block) -> None:
    """`replay_add_reference` in one call, of what `_checked` gives."""
    tensors, widths = (*block[:5], *block.columns), _widths(block)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    addresses_c, widths_c = (
        (ctypes.c_void_p * len(addresses))(*addresses),
        (ctypes.c_int64 * len(widths))(*widths),
    )
    numbers = ctypes.c_int64(block.terminated.shape[0]), widths_c, ctypes.c_int64(len(widths))
    c_library.functions().replay_add(*ring.in_c, addresses_c, *numbers)


def _replay_sample_c(
    ring: Ring,
    out: Batch,
    gamma: float,
    num_steps: int,
    streams: RandomStreams,
    offset: int,
    draws: bool,
) -> None:
    numbers = [ctypes.c_int64(number) for number in (offset, len(out.weight), num_steps, draws)]
    c_library.functions().replay_sample(
        *ring.in_c, _pointers(streams), _pointers(out), *numbers, ctypes.c_float(gamma)
    )


# ---- dispatch ----


def replay_add(ring: Ring, block: Block) -> None:
    """Write a block of steps behind the newest, over the oldest."""
    add = _replay_add_c if use_c(ring.obs) and not use_triton(ring.obs) else replay_add_reference
    add(ring, _checked(ring, block))


def _checked(ring: Ring, block: Block) -> Block:
    """The block contiguous and of the dtypes that C reads; ValueError where it does not fit the
    ring.
    """
    (num_rows, num_envs, obs_size), steps, widths = (
        ring.obs.shape,
        block.terminated.shape[0],
        _widths(block),
    )
    if not 0 < steps <= num_rows:
        raise ValueError(f"a block of {steps} steps does not fit a ring of {num_rows}")
    if sum(widths) > ring.numbers.shape[2]:
        raise ValueError(
            f"a step has {sum(widths)} numbers, the ring keeps {ring.numbers.shape[2]}"
        )

    def checked(tensor: Tensor, kind: torch.dtype, size: int) -> Tensor:
        if tensor.numel() != steps * num_envs * size:
            raise ValueError(
                f"{tuple(tensor.shape)} is not {size} numbers of {steps} steps of {num_envs} "
                f"environments"
            )
        return (
            tensor
            if tensor.dtype == kind and tensor.is_contiguous()
            else tensor.to(kind).contiguous()
        )

    kind = torch.uint8 if ring.obs.dtype == torch.uint8 else torch.float32
    obs, final_obs = (checked(tensor, kind, obs_size) for tensor in (block.obs, block.final_obs))
    terminated, truncated = (
        checked(tensor, torch.bool, 1) for tensor in (block.terminated, block.truncated)
    )
    valid = None if block.valid is None else checked(block.valid, torch.bool, 1)
    columns = [
        checked(column, torch.float32, width) for column, width in zip(block.columns, widths)
    ]
    return Block(obs, final_obs, terminated, truncated, valid, columns)


def _widths(block: Block) -> list[int]:
    """How many numbers each column has."""
    return [column.shape[2] if column.dim() == 3 else 1 for column in block.columns]


def replay_sample(
    ring: Ring,
    batch_size: int,
    gamma: float,
    num_steps: int,
    streams: RandomStreams,
    offset: int = 0,
    index: Tensor | None = None,
    out: Batch | None = None,
) -> Batch:
    """A batch of transitions of up to `num_steps` steps: uniform over all rows, or the rows `index`
    [B] int64 (t N + n) in [0, T N).

    The values of `index` are not looked at: what lies outside reads memory that is not the ring's.
    streams: one, of which the words offset .. offset + B - 1 of its step are taken. An empty ring
    gives batches of zeros, all of which
    count as written: ask for none. out: a batch that may be overwritten, of as many transitions of
    this ring; its memory is used again where a kernel serves.
    """
    if not 0 < batch_size <= WORDS_PER_STEP - offset:
        raise ValueError(
            f"a batch has 1 to {WORDS_PER_STEP - offset} transitions, not {batch_size}"
        )
    if index is not None:
        if (
            index.dtype != torch.int64
            or index.shape != (batch_size,)
            or index.device != ring.obs.device
        ):
            wanted, got = (
                f"[{batch_size}] int64 on {ring.obs.device}",
                f"{index.dtype} {tuple(index.shape)} on {index.device}",
            )
            raise ValueError(f"index must be {wanted}, got {got}")
        index = index.contiguous()
    in_triton = use_triton(ring.obs)
    if not in_triton and not use_c(ring.obs):
        return replay_sample_reference(ring, batch_size, gamma, num_steps, streams, offset, index)
    if out is None:
        out = batch_memory(ring, batch_size, index)
    elif len(out.weight) != batch_size:
        raise ValueError(f"out has {len(out.weight)} transitions, not {batch_size}")
    out = out if index is None else out._replace(index=index)
    (replay_sample_triton if in_triton else _replay_sample_c)(
        ring, out, gamma, num_steps, streams, offset, index is None
    )
    return out
