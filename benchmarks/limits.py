"""What the hardware allows PPO at most: measured rates of arithmetic and memory over what an
environment step needs of them.

An environment step is one forward pass in the rollout and, in every epoch, one forward and one
backward pass, which costs two forward ones.
"""

import itertools
from collections.abc import Sequence

import torch

from benchmarks.timing import fastest_seconds

ROLLOUT_COLUMNS, UPDATE_COLUMNS = (
    4,
    3,
)  # beside obs and action: reward, value, log_prob, final value; log_prob, advantage, return
# how often the hidden numbers cross the memory in a forward and backward pass of which nothing is
# fused
PASSES = 11
SQUARE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrices whose product is timed
COPIED = 1 << 30  # bytes
PRECISIONS = {
    "cpu": ("float32",),
    "cuda": ("float32", "tf32", "bf16"),
}  # a CPU without matrix units is slower in bf16


def multiply_adds(obs_size: int, action_size: int, hidden: Sequence[int]) -> int:
    """Of one observation through a policy and a value network of `hidden` layers."""
    shapes = ([obs_size, *hidden, outputs] for outputs in (action_size, 1))
    return sum(
        inputs * outputs for sizes in shapes for inputs, outputs in itertools.pairwise(sizes)
    )


def flop_per_step(obs_size: int, action_size: int, hidden: Sequence[int], epochs: int) -> int:
    """Floating-point operations an environment step needs in the matrix products alone."""
    return 2 * multiply_adds(obs_size, action_size, hidden) * (1 + 3 * epochs)


def bytes_per_step(obs_size: int, action_size: int, hidden: Sequence[int], epochs: int) -> int:
    """Bytes an environment step moves in float32: its row, once; in every epoch the row gathered
    and packed, and the hidden numbers.
    """
    columns, hidden_numbers = obs_size + action_size, 2 * sum(hidden)
    return 4 * (
        columns
        + ROLLOUT_COLUMNS
        + epochs * (2 * (columns + UPDATE_COLUMNS) + PASSES * hidden_numbers)
    )


def arithmetic_rate(device: torch.device, precision: str, budget: float) -> float:
    """Floating-point operations a second in the product of two square matrices: float32, tf32 or
    bf16.
    """
    size = SQUARE[device.type]
    one, other = (
        torch.randn(
            size,
            size,
            device=device,
            dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        )
        for _ in range(2)
    )
    result, before = torch.empty_like(one), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        seconds = fastest_seconds(lambda: torch.mm(one, other, out=result), device, budget)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * size**3 / seconds


def memory_rate(device: torch.device, budget: float) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / fastest_seconds(lambda: target.copy_(source), device, budget)


def limits(
    device: torch.device,
    obs_size: int,
    action_size: int,
    hidden: Sequence[int],
    epochs: int,
    budget: float,
) -> dict[str, float]:
    """Environment steps a second that nothing on `device` can exceed: by arithmetic in each
    precision, and on a GPU by the memory.

    The memory's holds while hidden numbers go through it: a kernel that keeps them on the chip may
    be quicker.
    """
    flop = flop_per_step(obs_size, action_size, hidden, epochs)
    found = {
        f"arithmetic {precision}": arithmetic_rate(device, precision, budget) / flop
        for precision in PRECISIONS[device.type]
    }
    if device.type == "cuda":
        found["memory float32"] = memory_rate(device, budget) / bytes_per_step(
            obs_size, action_size, hidden, epochs
        )
    return found
