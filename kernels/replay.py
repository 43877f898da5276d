"""The replay ring: blocks of steps are added, batches of transitions are sampled, with n-step
returns that never cross the end of an episode.

A ring holds T rows of N environments. The observation after a row is that of the next row, so none
is stored twice. Where an episode ended, the next observation is in a table of final observations;
that of the newest row is in the last N entries of the table.
For a row k of an environment, let m count the steps from k to the first that ended an episode, is
the newest, or is the n-th:
    reward = sum_{j<m} gamma^j r[k+j],   next_obs = the observation after the last of these steps,
    discount = gamma^m, or 0 where that step terminated
(Sutton and Barto 2018, equation 7.1; a truncated step is not terminated).
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import (
    ForMembers,
    choose_kernel,
    member_strides,
    use_c,
    use_triton,
    use_triton_for_members,
)
from gpurl.kernels.optional_triton import tl, triton
from gpurl.kernels.random import (
    WORDS_PER_STEP,
    RandomStreams,
    random_fraction_reference,
    splitmix_word,
    word_to_fraction,
)

# bits of a row's flags; an invalid row is not a real transition, and after a broken one the
# environment was not where the ring saw it last
TERMINATED, TRUNCATED, INVALID, BROKEN = 1, 2, 4, 8
DONE = TERMINATED | TRUNCATED
STORED_KINDS = (torch.float32, torch.bfloat16, torch.uint8)  # dtypes of stored observations
NUMPY_KINDS = {torch.float32: np.float32, torch.uint8: np.uint8, torch.int64: np.int64}
ELEMENTS = 1024  # of observations that a program of the kernel holds at a time
Pointers = ctypes.c_void_p * 7  # made once: to make a type costs more than to fill it


class RingTensors(NamedTuple):
    """The memory of a ring: contiguous tensors that are never moved."""

    obs: Tensor  # [T, N, D] float32, bfloat16 or uint8
    numbers: Tensor  # [T, N, W] float32: the reward, then the other columns of a step
    flags: Tensor  # [T, N] uint8
    slot: Tensor  # [T, N] int32: the entry of its final observation, where an episode ended
    final_obs: Tensor  # [F + N, D], dtype of obs
    # [F + 1] int64: the row, t N + n, of each final observation, as new ones overwrite old ones;
    # the last entry belongs to no row
    owner: Tensor
    # [3] int64: steps written, final observations written, the newest row (which saves a division)
    counts: Tensor


class Ring(RingTensors):
    """The tensors of a ring, with its description in C."""

    @functools.cached_property
    def in_c(self) -> "tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64]]":
        """(addresses, sizes), made once."""
        sizes = (
            *self.obs.shape,
            self.numbers.shape[2],
            self.owner.shape[0] - 1,
            STORED_KINDS.index(self.obs.dtype),
        )
        return _pointers(self), (ctypes.c_int64 * 6)(*sizes)


class Block(NamedTuple):
    """Steps to add: h <= T of them. Observations and columns may have any dtype."""

    obs: Tensor  # [h, N, ...]
    # [h, N, ...]: the observation after the step; read where an episode ended and in the last step
    final_obs: Tensor
    terminated: Tensor  # [h, N] bool
    truncated: Tensor  # [h, N] bool
    valid: Tensor | None  # [h, N] bool: whether the step is a real transition; None: all are
    columns: Sequence[Tensor]  # [h, N] or [h, N, n] each, the reward first; at most W numbers


class Batch(NamedTuple):
    """Sampled transitions."""

    index: Tensor  # [B] int64: t N + n
    obs: Tensor  # [B, D] float32, or uint8 where the ring's are
    numbers: Tensor  # [B, W] float32, as they were stored
    reward: Tensor  # [B] float32, of up to n steps
    discount: Tensor  # [B] float32: of the value of next_obs
    next_obs: Tensor  # [B, D]
    # [B] float32: 1, or 0 where there is nothing to learn from (no real transition, or its next
    # observation was overwritten)
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
    """An empty ring for num_rows T, num_envs N, obs_size D, num_numbers W, num_final F. ValueError
    for a kind that is not in STORED_KINDS.
    """
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
    """Bytes of the tensors of `new_ring`."""
    empty = new_ring(
        num_rows, num_envs, obs_size, num_numbers, num_final, kind, torch.device("meta")
    )
    return sum(tensor.nbytes for tensor in empty)


# ---- adding ----


def replay_add_reference(ring: Ring, block: Block) -> None:
    """The specification, arguments as in `replay_add`."""
    num_rows, num_envs = ring.flags.shape
    steps = block.terminated.shape[0]
    row = (ring.counts[0] + torch.arange(steps, device=ring.flags.device)) % num_rows

    # observations and numbers
    obs = block.obs.reshape(steps, num_envs, -1).to(ring.obs.dtype)
    final_obs = block.final_obs.reshape(steps, num_envs, -1).to(ring.obs.dtype)
    ring.obs.index_copy_(0, row, obs)
    first = 0
    for column, width in zip(block.columns, _widths(block)):
        numbers = column.reshape(steps, num_envs, width).float()
        ring.numbers[:, :, first : first + width].index_copy_(0, row, numbers)
        first += width

    # flags, and the observations after episodes and after the newest row
    flags = block.truncated.view(torch.uint8) * TRUNCATED + block.terminated.view(torch.uint8)
    if block.valid is not None:
        flags += block.valid.logical_not().view(torch.uint8) * INVALID
    ring.flags.index_copy_(0, row, flags)
    ring.slot.index_copy_(0, row, _keep_final(ring, row, (flags & DONE) != 0, final_obs))
    ring.final_obs[-num_envs:] = final_obs[-1]
    ring.counts[0] += steps
    ring.counts[2] = row[-1]


def _keep_final(ring: Ring, row: Tensor, ended: Tensor, final_obs: Tensor) -> Tensor:
    """Write the final observations [h, N, D] of the episodes that `ended` [h, N] in rows [h] into
    the table; returns their slots, [h, N] int32.
    """
    num_envs = ring.flags.shape[1]
    num_final = ring.owner.shape[0] - 1
    env = torch.arange(num_envs, device=row.device)

    # entries are numbered in the order of t N + n; of more than the table holds, the last are kept
    entry = (ended.flatten().cumsum(0) - 1 + ring.counts[1]).view_as(ended)
    ring.counts[1] += ended.sum()
    kept = ended & (entry >= ring.counts[1] - num_final)
    entry %= num_final

    # every step writes, as no shape may depend on the number of ends: the others write after the
    # table
    place = torch.where(kept, entry, num_final + env).flatten()
    ring.final_obs.index_copy_(0, place, final_obs.flatten(0, 1))
    # all that write to the last entry write the same, whatever their order
    owner = torch.where(kept, row.unsqueeze(1) * num_envs + env, -1).flatten()
    ring.owner.index_copy_(0, place.clamp(max=num_final), owner)
    return torch.where(ended, entry, 0).int()


def replay_mark_episode_break(ring: Ring, mask: Tensor) -> None:
    """Truncate the newest step where mask [N] bool, unless its episode ended already: the following
    steps belong to other episodes.
    """
    row = ring.counts[2:]
    flags = ring.flags.index_select(0, row)
    slot = ring.slot.index_select(0, row)
    breaks = mask & ((flags & DONE) == 0) & (ring.counts[0] > 0)
    newest = ring.final_obs[-ring.flags.shape[1] :].clone().unsqueeze(0)
    new_slot = _keep_final(ring, row, breaks, newest)
    ring.slot.index_copy_(0, row, torch.where(breaks, new_slot, slot))
    flags = flags | breaks.view(torch.uint8) * TRUNCATED
    flags = flags | (mask & (ring.counts[0] > 0)).view(torch.uint8) * BROKEN
    ring.flags.index_copy_(0, row, flags)


# ---- sampling ----


def uniform_index_reference(
    streams: RandomStreams, offset: int, batch_size: int, size: Tensor
) -> Tensor:
    """[B] int64 uniform in [0, size), of 53 bits each, from words offset .. offset + B - 1 of the
    one stream's step; size: 0-d int64.
    """
    fraction = random_fraction_reference(*streams, offset, batch_size)[0]
    return (fraction * size.double()).long().clamp_(max=size - 1)


def replay_walk_reference(
    ring: Ring, index: Tensor, gamma: float, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(reward [B], discount [B] before what terminated, row [B] of the last step) of the returns
    of up to `num_steps` steps that begin at `index` [B].
    """
    num_rows, num_envs = ring.flags.shape
    newest = ring.counts[2]
    flags = ring.flags.view(-1)
    rewards = ring.numbers.view(-1, ring.numbers.shape[2])[:, 0]
    env = index % num_envs
    here = last = index // num_envs
    reward = torch.zeros(len(index), device=index.device)
    discount = torch.ones(len(index), device=index.device)
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
    return reward, discount, last


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
    num_rows, num_envs = ring.flags.shape
    num_final = ring.owner.shape[0] - 1
    newest = ring.counts[2]
    flags = ring.flags.view(-1)
    obs = ring.obs.view(-1, ring.obs.shape[2])
    numbers = ring.numbers.view(-1, ring.numbers.shape[2])

    # which transitions
    if index is None:
        size = (ring.counts[0].clamp(max=num_rows) * num_envs).clamp(min=1)
        index = uniform_index_reference(streams, offset, batch_size, size)

    # walk up to n steps
    env = index % num_envs
    reward, discount, last = replay_walk_reference(ring, index, gamma, num_steps)

    # the observation after it: in the table, or of the next row
    end = last * num_envs + env
    bits = flags[end]
    entry = ring.slot.view(-1)[end].long()
    ended = (bits & DONE) != 0
    terminated = (bits & TERMINATED) != 0
    in_table = ended | (last == newest)
    final = ring.final_obs[torch.where(ended, entry, num_final + env)]
    after = (last + 1) % num_rows * num_envs + env
    next_obs = torch.where(in_table.unsqueeze(1), final, obs[after])

    # weight 0 if that observation was overwritten, or belongs to another episode
    overwritten = ended & ~terminated & (ring.owner[entry] != end)
    broken = ~in_table & ((flags[after] & INVALID) != 0)
    weight = ((flags[index] & INVALID) == 0) & ~overwritten & ~broken
    kind = torch.uint8 if obs.dtype == torch.uint8 else torch.float32
    return Batch(
        index,
        obs[index].to(kind),
        numbers[index],
        reward,
        discount.masked_fill(terminated, 0.0),
        next_obs.to(kind),
        weight.float(),
    )


# the strides of observations and numbers are not among these: pointers keep their alignment
@triton.jit(
    do_not_specialize=[
        *("offset", "flags_stride", "slot_stride", "owner_stride", "counts_stride"),
        *("key_stride", "gamma_stride", "step_stride"),
    ]
)
def replay_sample_kernel(
    obs_ptr, numbers_ptr, flags_ptr, slot_ptr, final_ptr, owner_ptr, counts_ptr, key_ptr, gamma_ptr,
    step_ptr,
    index_ptr, out_obs_ptr, out_numbers_ptr, reward_ptr, discount_ptr, next_obs_ptr, weight_ptr,
    offset, T, N, F, B, discount_factor,
    obs_stride, numbers_stride, flags_stride, slot_stride, final_stride, owner_stride,
    counts_stride, key_stride, gamma_stride, step_stride,
    D: tl.constexpr, W: tl.constexpr, NUM_STEPS: tl.constexpr, DRAWS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A program draws or reads the indices of BLOCK_B transitions, walks up to NUM_STEPS rows from
    each, and copies them. Bits of flags: 1 terminated, 2 truncated, 4 invalid. Strides are from
    member to member.
    """
    member = tl.program_id(1).to(tl.int64)
    obs_ptr += member * obs_stride
    numbers_ptr += member * numbers_stride
    flags_ptr += member * flags_stride
    slot_ptr += member * slot_stride
    final_ptr += member * final_stride
    owner_ptr += member * owner_stride
    counts_ptr += member * counts_stride
    key_ptr += member * key_stride
    gamma_ptr += member * gamma_stride
    step_ptr += member * step_stride
    # the batches of all members follow each other
    rows = member * B
    index_ptr += rows
    out_obs_ptr += rows * D
    out_numbers_ptr += rows * W
    reward_ptr += rows
    discount_ptr += rows
    next_obs_ptr += rows * D
    weight_ptr += rows
    # which transitions
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
    # walk up to n steps; `last` is the row of the last step of the return
    here = index // N
    env = index - here * N  # instead of a second division of 64 bits, which is slow
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
    # whether the observation after it is in the table, and whether there is something to learn
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
    # store the return and the numbers of the step
    tl.store(reward_ptr + lane, reward, mask=inside)
    tl.store(discount_ptr + lane, tl.where(terminated, 0.0, discount), mask=inside)
    tl.store(weight_ptr + lane, is_valid.to(tl.float32), mask=inside)
    which = tl.arange(0, BLOCK_W)
    numbers_mask = inside[:, None] & (which < W)[None, :]
    numbers = tl.load(
        numbers_ptr + index[:, None] * W + which[None, :], mask=numbers_mask, other=0.0
    )
    tl.store(out_numbers_ptr + lane[:, None] * W + which[None, :], numbers, mask=numbers_mask)
    # copy both observations, BLOCK_D columns at a time
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
    """Empty tensors for a batch, with `index` if it is given; [M, B, ...] of the rings of M members
    [M, ...].
    """
    device = ring.obs.device
    on_cpu = device.type == "cpu"
    leading = (*ring.obs.shape[:-3], batch_size)

    def empty(kind: torch.dtype, *size: int) -> Tensor:
        if on_cpu:  # numpy allocates in half the time
            return torch.from_numpy(np.empty((*leading, *size), NUMPY_KINDS[kind]))
        return torch.empty((*leading, *size), dtype=kind, device=device)

    kind = torch.uint8 if ring.obs.dtype == torch.uint8 else torch.float32
    return Batch(
        index=empty(torch.int64) if index is None else index,
        obs=empty(kind, ring.obs.shape[-1]),
        numbers=empty(torch.float32, ring.numbers.shape[-1]),
        reward=empty(torch.float32),
        discount=empty(torch.float32),
        next_obs=empty(kind, ring.obs.shape[-1]),
        weight=empty(torch.float32),
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
    """`replay_sample_reference` in one launch, into the contiguous `out`; it draws the index or
    reads it. Also for M members, each tensor with a leading axis [M, ...], of any stride there in
    ring and streams.
    """
    *members, num_rows, num_envs, obs_size = ring.obs.shape
    num_final = ring.owner.shape[-1] - 1
    width = ring.numbers.shape[-1]
    batch_size = out.weight.shape[-1]
    block_d = min(triton.next_power_of_2(obs_size), 256)
    block_b = max(min(ELEMENTS // block_d, 32), 1)
    strides = member_strides((*ring, *streams), bool(members))
    grid = (triton.cdiv(batch_size, block_b), *(members or (1,)))
    replay_sample_kernel[grid](
        *ring, *streams, *out, offset, num_rows, num_envs, num_final, batch_size, gamma, *strides,
        D=obs_size, W=width, NUM_STEPS=num_steps, DRAWS=draws,
        BLOCK_B=block_b, BLOCK_D=block_d, BLOCK_W=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


class SampleOfMembers(ForMembers):
    """`replay_sample_triton` into new memory, of the tensors of ring and streams, the index or
    None, and batch_size, gamma, num_steps, offset.
    """

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:
        ring, streams = Ring(*given[:7]), RandomStreams(*given[7:10])
        index, batch_size, gamma, num_steps, offset = given[10:]
        out = batch_memory(ring, batch_size, index)
        replay_sample_triton(ring, out, gamma, num_steps, streams, offset, index is None)
        return tuple(out)


# ---- C ----


def _pointers(tensors: tuple[Tensor, ...]) -> "ctypes.Array[ctypes.c_void_p]":
    """Addresses of at most seven tensors."""
    return Pointers(*c_library.addresses(tensors))


def replay_add_c(ring: Ring, block: Block) -> None:
    """`replay_add_reference` in one call, of a block from `_prepare`."""
    tensors = c_library.pointers(*block[:5], *block.columns)
    widths = c_library.integers(*_widths(block))
    c_library.functions().replay_add(
        *ring.in_c,
        (ctypes.c_void_p * len(tensors))(*tensors),
        *c_library.integers(block.terminated.shape[0]),
        (ctypes.c_int64 * len(widths))(*widths),
        *c_library.integers(len(widths)),
    )


def replay_sample_c(
    ring: Ring,
    out: Batch,
    gamma: float,
    num_steps: int,
    streams: RandomStreams,
    offset: int,
    draws: bool,
) -> None:
    """`replay_sample_reference` in one call, into `out`; it draws the index or reads it."""
    c_library.functions().replay_sample(
        *ring.in_c,
        _pointers(streams),
        _pointers(out),
        *c_library.integers(offset, len(out.weight), num_steps, draws),
        ctypes.c_float(gamma),
    )


# ---- dispatch ----


def replay_add(ring: Ring, block: Block) -> None:
    """Add a block of steps after the newest row, over the oldest ones. ValueError if it does not
    fit the ring.
    """
    add = choose_kernel(
        ring.obs, triton=replay_add_reference, c=replay_add_c, reference=replay_add_reference
    )
    add(ring, _prepare(ring, block))


def _prepare(ring: Ring, block: Block) -> Block:
    """The block contiguous and of the dtypes that C reads; ValueError if it does not fit the
    ring.
    """
    num_rows, num_envs, obs_size = ring.obs.shape
    steps = block.terminated.shape[0]
    widths = _widths(block)
    if not 0 < steps <= num_rows:
        raise ValueError(f"a block of {steps} steps does not fit a ring of {num_rows}")
    if sum(widths) > ring.numbers.shape[2]:
        raise ValueError(
            f"a step has {sum(widths)} numbers, the ring keeps {ring.numbers.shape[2]}"
        )

    def prepare(tensor: Tensor, kind: torch.dtype, size: int) -> Tensor:
        if tensor.numel() != steps * num_envs * size:
            raise ValueError(
                f"{tuple(tensor.shape)} is not {size} numbers of {steps} steps of {num_envs} "
                f"environments"
            )
        return tensor.to(kind).contiguous()

    kind = torch.uint8 if ring.obs.dtype == torch.uint8 else torch.float32
    return Block(
        obs=prepare(block.obs, kind, obs_size),
        final_obs=prepare(block.final_obs, kind, obs_size),
        terminated=prepare(block.terminated, torch.bool, 1),
        truncated=prepare(block.truncated, torch.bool, 1),
        valid=None if block.valid is None else prepare(block.valid, torch.bool, 1),
        columns=[
            prepare(column, torch.float32, width) for column, width in zip(block.columns, widths)
        ],
    )


def _widths(block: Block) -> list[int]:
    """The number of numbers in each column."""
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

    The values of `index` are not checked: one outside the range reads other memory. streams: one
    stream, of whose step the words offset .. offset + B - 1 are taken. Do not sample from an empty
    ring: it gives zeros, with weight 1. out: a batch of B transitions of this ring to overwrite; C
    and Triton use its memory again. ValueError for a batch_size, index or out of another form.
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
            raise ValueError(
                f"index must be [{batch_size}] int64 on {ring.obs.device}, got {index.dtype} "
                f"{tuple(index.shape)} on {index.device}"
            )
        index = index.contiguous()
    # members may have a gamma of their own, which no kernel reads
    if use_triton_for_members(ring.obs) and not isinstance(gamma, Tensor):
        sizes = (batch_size, gamma, num_steps, offset)
        return Batch(*SampleOfMembers.apply(*ring, *streams, index, *sizes))  # type: ignore[no-untyped-call]
    in_triton = use_triton(ring.obs)
    if not in_triton and not use_c(ring.obs):
        return replay_sample_reference(ring, batch_size, gamma, num_steps, streams, offset, index)
    if out is None:
        out = batch_memory(ring, batch_size, index)
    elif len(out.weight) != batch_size:
        raise ValueError(f"out has {len(out.weight)} transitions, not {batch_size}")
    out = out if index is None else out._replace(index=index)
    sample = replay_sample_triton if in_triton else replay_sample_c
    sample(ring, out, gamma, num_steps, streams, offset, index is None)
    return out
