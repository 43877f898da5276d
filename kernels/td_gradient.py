"""Targets of Q-learning, and the gradient of a TD loss by the outputs of the critics: one call of C
each on a CPU, in place of `gpurl.losses.td_loss` and autograd.

Q-learning: Sutton and Barto 2018, equation 6.8; double Q-learning: van Hasselt et al. 2016.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from gpurl.kernels import c_library


class TdGradient(NamedTuple):
    """The results of `td_gradient`, besides the gradient."""

    loss: Tensor  # 0-d, summed over members
    value: Tensor  # 0-d, mean over members and rows
    error: Tensor  # [B] mean over members of |value - target|; 0 where the weight is 0


# ---- torch ----


def q_target_reference(
    value: Tensor, chooser: Tensor | None, reward: Tensor, discount: Tensor
) -> Tensor:
    """The specification; arguments and result as in `q_target`."""
    # the best action, and its smallest value among the members
    score = value.amin(0) if chooser is None else chooser.mean(0)
    best = score.argmax(-1)[None, :, None].expand(len(value), -1, 1)
    return reward + discount * value.gather(2, best).squeeze(2).amin(0)


def td_gradient_reference(
    output: Tensor,
    action: Tensor | None,
    target: Tensor,
    weight: Tensor,
    is_huber: bool,
    gradient: Tensor,
) -> TdGradient:
    """The specification; arguments and result as in `td_gradient`."""
    rows, actions = output.shape[1:]
    # [E, B] the value of the action that was taken
    chosen = torch.zeros(rows) if action is None else action
    is_chosen = chosen.unsqueeze(1) == torch.arange(actions)
    value = (output * is_chosen).sum(2)
    difference = torch.where(weight != 0.0, value - target, 0.0)
    # loss and its derivative by the value
    size = difference.abs()
    if is_huber:
        loss = torch.where(size > 1.0, size - 0.5, 0.5 * difference.square())
        slope = difference.clamp(-1.0, 1.0)
    else:
        loss = difference.square()
        slope = 2.0 * difference
    # weighted mean over the rows, and its gradient by all outputs
    share = weight / (weight > 0.0).sum().clamp(min=1)
    gradient.copy_((slope * share).unsqueeze(2) * is_chosen)
    return TdGradient((loss * share).sum(), value.mean(), size.mean(0))


# ---- C ----

_Sizes = ctypes.c_int64 * 6
_Tensors = ctypes.c_void_p * 7


def q_target(value: Tensor, chooser: Tensor | None, reward: Tensor, discount: Tensor) -> Tensor:
    """[B] reward + discount * the minimum over members of `value` at the best action.

    value: [E, B, A] of the target networks. The best action maximises the mean over members of
    `chooser` [E, B, A], the values of the online networks; without it, the minimum over members of
    `value`. reward, discount: [B]. All are float32 on a CPU.
    """
    _check(value, reward, discount)
    if chooser is not None:
        _check(chooser)
        assert chooser.shape == value.shape, (chooser.shape, value.shape)
    target = torch.empty_like(reward)
    sizes = _Sizes(*value.shape, value.stride(0), 0 if chooser is None else chooser.stride(0))
    tensors = (value, chooser, reward, discount, target)
    c_library.functions().q_target(sizes, _addresses(tensors))
    return target


def td_gradient(
    output: Tensor,
    action: Tensor | None,
    target: Tensor,
    weight: Tensor,
    is_huber: bool,
    gradient: Tensor,
) -> TdGradient:
    """The loss sum_e sum_b w_b l(q_eb - target_b) / max(number of w > 0, 1), and into `gradient`
    its gradient by `output`.

    l(e) is e^2, or Huber's: 0.5 e^2 inside +-1, |e| - 0.5 outside. output, gradient: [E, B, A]
    with the same strides; action: [B] as floats, or None where A is 1; target, weight: [B]. A row
    with weight 0 may hold anything. All are float32 on a CPU.
    """
    _check(output, target, weight)
    assert action is None or action.dtype == torch.float32, action.dtype
    assert gradient.stride() == output.stride(), (gradient.stride(), output.stride())
    assert action is not None or output.shape[2] == 1, output.shape
    error = torch.empty_like(target)
    sums = torch.empty(2, dtype=torch.float32)
    sizes = _Sizes(
        *output.shape, output.stride(0), 0 if action is None else action.stride(0), is_huber
    )
    tensors = (output, action, target, weight, gradient, error, sums)
    c_library.functions().td_gradient(sizes, _addresses(tensors))
    loss, value = sums.unbind()
    return TdGradient(loss, value, error)


def _check(output: Tensor, *rows: Tensor) -> None:
    """AssertionError unless C can read output [E, B, A], members at any distance, and rows [B]."""
    _, num_rows, actions = output.shape
    is_dense = output.stride()[1:] == (actions, 1) and output.dtype == torch.float32
    assert is_dense, (output.dtype, output.shape, output.stride())
    for tensor in rows:
        got = tensor.shape, tensor.dtype, tensor.is_contiguous()
        assert got == ((num_rows,), torch.float32, True), (*got, num_rows)


def _addresses(tensors: tuple[Tensor | None, ...]) -> "ctypes.Array[ctypes.c_void_p]":
    return _Tensors(*c_library.addresses(tensors))
