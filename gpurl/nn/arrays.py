"""What tensors and numpy arrays name differently, so that a formula is written once for both.

On a CPU a call of torch takes 4 us and up, one of numpy half a microsecond: batches of a few
hundred rows go through numpy, all others through torch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any  # a Tensor or a numpy array, of one kind throughout a call


def namespace(x: Array) -> Any:
    """The module, torch or numpy, whose functions take `x`."""
    return torch if isinstance(x, Tensor) else np


def of_kind(tensor: Tensor, x: Array) -> Array:
    """`tensor`, which needs no gradient, as what `x` is; a numpy array shares its memory."""
    return tensor if isinstance(x, Tensor) else tensor.numpy()


def as_tensor(x: Array) -> Tensor:
    """`x` as a tensor on the same memory."""
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


def joined(numbers: list[Array]) -> Tensor:
    """[n] float32 of 0-d ones."""
    return (
        torch.stack(numbers).float()
        if isinstance(numbers[0], Tensor)
        else torch.from_numpy(np.array(numbers, np.float32))
    )


def as_whole(x: Array) -> Array:
    """`x` as int64."""
    return x.long() if isinstance(x, Tensor) else x.astype(np.int64)


def clip(x: Array, low: Array, high: Array) -> Array:
    """Into [low, high]; np.clip takes five times as long as its two halves."""
    return x.clamp(low, high) if isinstance(x, Tensor) else np.minimum(np.maximum(x, low), high)


def at_most(x: Array, high: float) -> Array:
    """The lesser of x and `high`; NaN stays NaN."""
    return x.clamp(max=high) if isinstance(x, Tensor) else np.minimum(x, np.float32(high))


def log_softmax(x: Array) -> Array:
    """log of the softmax over the last axis."""
    if isinstance(x, Tensor):
        return x.log_softmax(-1)
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def softplus(x: Array) -> Array:
    """log(1 + e^x)."""
    return (
        torch.nn.functional.softplus(x)
        if isinstance(x, Tensor)
        else np.logaddexp(x, np.float32(0.0))
    )


def pick(rows: Array, index: Array) -> Array:
    """rows [..., n] at index [...] of each -> [...]; numpy: [B, n] only."""
    return (
        rows.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        if isinstance(rows, Tensor)
        else rows[np.arange(len(rows)), index]
    )


def add_at(rows: Array, index: Array, values: Array) -> Array:
    """rows [B, n] with values [B] added at index [B] of each, in place."""
    if isinstance(rows, Tensor):
        return rows.scatter_add_(-1, index.unsqueeze(-1), values.unsqueeze(-1))
    rows[np.arange(len(rows)), index] += values
    return rows
