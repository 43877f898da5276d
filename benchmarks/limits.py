"""Upper limits of PPO on the hardware: measured rates of arithmetic and memory, divided by what an
environment step needs.

An environment step takes one forward pass in the rollout and, in every epoch, a forward and a
backward pass, which costs as much as two forward passes.
"""

import itertools
from collections.abc import Sequence

import torch

from benchmarks.timing import fastest_seconds

# columns beside obs and action
ROLLOUT_COLUMNS = 4  # reward, value, log_prob, final value
UPDATE_COLUMNS = 3  # log_prob, advantage, return
# how often hidden activations are read or written in a forward and a backward pass without fusion
PASSES = 11
SQUARE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the matrices whose product is timed
COPIED = 1 << 30  # bytes
# a CPU without matrix units is slower in bf16
PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "tf32", "bf16")}


def multiply_adds(obs_size: int, action_size: int, hidden: Sequence[int]) -> int:
    """Multiply-adds of one observation through a policy and a value network with `hidden`
    layers.
    """
    shapes = ([obs_size, *hidden, outputs] for outputs in (action_size, 1))
    return sum(
        inputs * outputs for sizes in shapes for inputs, outputs in itertools.pairwise(sizes)
    )


def flop_per_step(obs_size: int, action_size: int, hidden: Sequence[int], epochs: int) -> int:
    """Floating-point operations of an environment step in matrix products."""
    return 2 * multiply_adds(obs_size, action_size, hidden) * (1 + 3 * epochs)


def bytes_per_step(obs_size: int, action_size: int, hidden: Sequence[int], epochs: int) -> int:
    """Bytes that an environment step moves in float32: its row once; in every epoch the row twice,
    gathered and packed, and the hidden activations.
    """
    columns = obs_size + action_size
    epoch = 2 * (columns + UPDATE_COLUMNS) + PASSES * 2 * sum(hidden)
    return 4 * (columns + ROLLOUT_COLUMNS + epochs * epoch)


def arithmetic_rate(device: torch.device, precision: str, budget: float) -> float:
    """Floating-point operations a second in the product of two square matrices, in float32, tf32 or
    bf16.
    """
    size = SQUARE[device.type]
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    result = torch.empty_like(left)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        seconds = fastest_seconds(lambda: torch.mm(left, right, out=result), device, budget)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return 2 * size**3 / seconds


def memory_rate(device: torch.device, budget: float) -> float:
    """Bytes read and written a second by a large copy on the device."""
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
    """name -> environment steps a second that `device` cannot exceed: by arithmetic in each
    precision, and on a GPU by memory.

    The limit by memory holds if hidden activations are stored in memory: a kernel that keeps them
    on the chip may be faster.
    """
    flop = flop_per_step(obs_size, action_size, hidden, epochs)
    rates = {
        f"arithmetic {precision}": arithmetic_rate(device, precision, budget) / flop
        for precision in PRECISIONS[device.type]
    }
    if device.type == "cuda":
        step_bytes = bytes_per_step(obs_size, action_size, hidden, epochs)
        rates["memory float32"] = memory_rate(device, budget) / step_bytes
    return rates
