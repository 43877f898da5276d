"""The distribution of a return after a Bellman update, projected back onto the fixed atoms of a
categorical critic.

    z_i = v_min + i width,   width = (v_max - v_min) / (Z - 1)
    z'_j = clip(reward + discount (z_j + shift), v_min, v_max)
    out_i = sum_j p_j max(0, 1 - |z'_j - z_i| / width)

Bellemare, Dabney and Munos 2017 ("A distributional perspective on reinforcement learning"),
equation 7 and algorithm 1: mass between two atoms is split between them. Positions are counted in
atoms,

    (z'_j - v_min) / width = discount j + (reward + discount shift - (1 - discount) v_min) / width

so that an atom that does not move keeps all of its mass. There is no C form: it was only two to
three times as fast as torch.
"""

import ctypes

import torch
from torch import Tensor

from gpurl.kernels.backend import choose_kernel
from gpurl.kernels.optional_triton import tl, triton

TILE = 256  # numbers of a program: few, so that a batch of 256 rows occupies a whole GPU
NUM_WARPS = 2


def categorical_projection_reference(
    pmf: Tensor,
    reward: Tensor,
    discount: Tensor,
    v_min: float,
    v_max: float,
    shift: Tensor | None = None,
) -> Tensor:
    """The specification; arguments and result as in `categorical_projection`, but float64 stays
    float64.
    """
    last = pmf.shape[-1] - 1
    # bfloat16 cannot distinguish atom 257 from 256
    pmf = pmf.to(torch.promote_types(pmf.dtype, torch.float32))
    reward, discount = reward.to(pmf.dtype), discount.to(pmf.dtype)
    # where each atom moves to, counted in atoms
    start = reward - (1.0 - discount) * v_min
    if shift is not None:
        start = start + discount * shift.to(pmf.dtype)
    start = start * (last / (v_max - v_min))
    atom = torch.arange(last + 1, dtype=pmf.dtype, device=pmf.device)
    position = torch.addcmul(start.unsqueeze(1), discount.unsqueeze(1), atom).clamp_(0, last)
    # its mass is split between the atoms below and above; an index must be valid even where the
    # position is NaN, and then the mass of the upper atom is NaN
    lower = position.nan_to_num(0.0).long()
    upper = (lower + 1).clamp_(max=last)
    above = pmf * (position - lower)
    out = torch.zeros_like(pmf).scatter_add_(-1, lower.expand_as(pmf), pmf - above)
    return out.scatter_add_(-1, upper.expand_as(pmf), above)


@triton.jit(do_not_specialize=["R", "B"])
def categorical_projection_kernel(
    pmf_ptr, reward_ptr, discount_ptr, shift_ptr, out_ptr, R, B, Z, v_min, per_width,
    HAS_SHIFT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """A program computes BLOCK_R of the R rows. It adds the mass of one atom after the other, so
    the order of the sums is fixed.

    Row r belongs to transition r % B. Positions are clipped by selection: tl.maximum turns NaN into
    a number.
    """
    # the position of atom 0 of each row after the update, counted in atoms
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < R
    transition = row % B
    discount = tl.load(discount_ptr + transition, mask=inside, other=0.0)
    start = tl.load(reward_ptr + transition, mask=inside, other=0.0) - (1.0 - discount) * v_min
    if HAS_SHIFT:
        start += discount * tl.load(shift_ptr + transition, mask=inside, other=0.0)
    start = start * per_width
    # each atom's mass goes to the atoms around its new position
    atom = tl.arange(0, BLOCK_Z)
    last = tl.cast(Z - 1, tl.float32)
    first = row.to(tl.int64) * Z
    total = tl.zeros((BLOCK_R, BLOCK_Z), tl.float32)
    for j in range(0, Z):
        position = start + discount * j
        position = tl.where(position < 0.0, 0.0, tl.where(position > last, last, position))
        mass = tl.load(pmf_ptr + first + j, mask=inside, other=0.0)
        share = 1.0 - tl.abs(position[:, None] - atom[None, :])
        total += mass[:, None] * tl.where(share < 0.0, 0.0, share)
    tl.store(
        out_ptr + first[:, None] + atom[None, :], total, mask=inside[:, None] & (atom < Z)[None, :]
    )


def _tile(num_atoms: int) -> tuple[int, int]:
    """(BLOCK_R, BLOCK_Z)."""
    block_z = triton.next_power_of_2(num_atoms)
    return max(TILE // block_z, 1), block_z


def categorical_projection_triton(
    pmf: Tensor,
    reward: Tensor,
    discount: Tensor,
    v_min: float,
    v_max: float,
    shift: Tensor | None = None,
) -> Tensor:
    """`categorical_projection_reference` in one launch."""
    inputs = (pmf, reward, discount, reward if shift is None else shift)
    tensors = [tensor.float().contiguous() for tensor in inputs]
    num_atoms = pmf.shape[-1]
    rows = pmf.numel() // num_atoms
    block_r, block_z = _tile(num_atoms)
    out = torch.empty(pmf.shape, dtype=torch.float32, device=pmf.device)
    # rounded to float32, as a GPU takes them
    per_width = (num_atoms - 1) / (v_max - v_min)
    scalars = [ctypes.c_float(number).value for number in (v_min, per_width)]
    categorical_projection_kernel[(triton.cdiv(rows, block_r),)](
        *tensors, out, rows, reward.shape[0], num_atoms, *scalars,
        HAS_SHIFT=shift is not None, BLOCK_R=block_r, BLOCK_Z=block_z, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def categorical_projection(
    pmf: Tensor,
    reward: Tensor,
    discount: Tensor,
    v_min: float,
    v_max: float,
    shift: Tensor | None = None,
) -> Tensor:
    """[..., B, Z]: the distribution of reward + discount (value + shift), where each row of pmf
    [..., B, Z] float32 is the distribution of a next value.

    reward, discount, shift: [B] float32, the same for all members of an ensemble; discount is
    gamma^n, and 0 where the episode terminated.
    shift: the entropy bonus -alpha log pi of soft critics; None: 0. A row of the result has the sum
    of its row of pmf. It holds NaN if its distribution or its reward does.
    """
    function = choose_kernel(
        pmf, triton=categorical_projection_triton, reference=categorical_projection_reference
    )
    return function(pmf, reward, discount, v_min, v_max, shift)
