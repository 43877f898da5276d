"""What torch.func.vmap cannot batch, or only one member after the other, in operations it can."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


def foreach_copy_(targets: Iterable[Tensor], sources: Iterable[Tensor], *_: Any) -> None:
    """torch._foreach_copy_, one tensor after the other."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def written_in_place(function: Function) -> Function:
    """The in-place form of `function`, whose first argument it changes."""

    def compute(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.copy_(function(tensor, *args, **kwargs))

    return compute


def add(tensor: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """torch.add, whose `alpha` may be a tensor."""
    if isinstance(alpha, Tensor):
        return tensor + alpha * other
    return torch.add(tensor, other, alpha=alpha)


def add_(tensor: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
    """Tensor.add_, whose `alpha` may be a tensor."""
    if isinstance(alpha, Tensor):
        return tensor.add_(alpha * other)
    return tensor.add_(other, alpha=alpha)


def index_copy_(tensor: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Tensor.index_copy_ of rows."""
    assert dim == 0, dim
    return tensor.index_put_((index,), source)


def gru_cell(
    x: Tensor, hidden: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor
) -> Tensor:
    """torch.gru_cell: [B, H] of x [B, D] and hidden [B, H]."""
    reset_x, update_x, new_x = functional.linear(x, w_x, b_x).chunk(3, 1)
    reset_h, update_h, new_h = functional.linear(hidden, w_h, b_h).chunk(3, 1)
    new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (hidden - new) * (update_x + update_h).sigmoid() + new


def lstm_cell(
    x: Tensor, state: Sequence[Tensor], w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor
) -> tuple[Tensor, Tensor]:
    """torch.lstm_cell: (hidden [B, H], cell [B, H]) of x [B, D] and both before."""
    hidden, cell = state
    gates = functional.linear(x, w_x, b_x) + functional.linear(hidden, w_h, b_h)
    enter, forget, new, leave = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


class ViewAs(torch.autograd.Function):
    """Tensor.view(dtype), which torch 2.11 cannot batch."""

    @staticmethod
    def forward(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, dims: Any, tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return ViewAs.apply(tensor.movedim(dims[0], 0), dtype), 0


def view(tensor: Tensor, *shape: Any, **named: Any) -> Tensor:
    """Tensor.view, of a shape or as another type."""
    if shape and isinstance(shape[0], torch.dtype):
        return ViewAs.apply(tensor, shape[0])
    return tensor.view(*shape, **named)


RULES: dict[Function, Function] = {
    torch._foreach_copy_: foreach_copy_,
    Tensor.clamp_: written_in_place(torch.clamp),
    Tensor.lerp_: written_in_place(torch.lerp),
    Tensor.remainder_: written_in_place(torch.remainder),
    Tensor.__imod__: written_in_place(torch.remainder),
    Tensor.index_copy_: index_copy_,
    torch.add: add,
    Tensor.add_: add_,
    Tensor.view: view,
    torch.gru_cell: gru_cell,
    torch.lstm_cell: lstm_cell,
}


class VmapRules(TorchFunctionMode):
    """A `with` block inside a function of torch.func.vmap, in which RULES apply, and in which
    `out=` may be given.
    """

    def __torch_function__(
        self, func: Function, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        out = kwargs.pop("out", None)
        result = RULES.get(func, func)(*args, **kwargs)
        if out is None:
            return result
        for target, source in zip(as_list(out), as_list(result), strict=True):
            target.copy_(source)
        return out


def as_list(value: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """One tensor or several."""
    return [value] if isinstance(value, Tensor) else list(value)
