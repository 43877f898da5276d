"""The line of a network at which an export failed: of the code that the user wrote, not of torch's
or an exporter's.
"""

import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TORCH = str(Path(torch.__file__).parent)
READS = torch.ops.aten._local_scalar_dense.default  # behind `if`, float(), .item(), ...
STACK_LINE = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in \w+')


class Place(NamedTuple):
    """A line of a network."""

    owner: str  # class of the module
    file: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{self.owner}, {self.file}:{self.line}" + (f" `{code}`" if code else "")


def place_of_error(error: BaseException) -> Place | None:
    """Where a network raised `error`, or made its exporter raise it; None if no code of a module
    outside torch is among the frames.
    """
    return _innermost(traceback.walk_tb(error.__traceback__))


def place_of_node(error: BaseException) -> Place | None:
    """Where a network called the operation at which torch's ONNX exporter stopped; None if the
    exporter does not tell.
    """
    each: BaseException | None = error
    while each is not None:
        for frame, _ in traceback.walk_tb(each.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node):
                return _place_in_graph(node)
        each = each.__cause__
    return None


def first_value_read(module: nn.Module, arguments: tuple[Tensor, ...]) -> Place | None:
    """Where a module first reads in Python a number that depends on its arguments, as `if`,
    float(), .item() and .numpy() do; None if it never does.
    """
    reads = _ValueReads(arguments)
    with torch.no_grad(), _ArrayReads(reads), reads:
        module(*arguments)
    return reads.first


class _ArrayReads(TorchFunctionMode):
    """Tells `reads` of tensors that are turned into arrays and lists, which no operation shows."""

    def __init__(self, reads: "_ValueReads") -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist):
            self.reads.note(args)
        return func(*args, **(kwargs or {}))


class _ValueReads(TorchDispatchMode):
    """Follows what is computed from some tensors, to its first read."""

    def __init__(self, sources: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.first: Place | None = None
        # the tensors themselves: an id alone could come again
        self._dependent: dict[int, Tensor] = {id(each): each for each in sources}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        depends = self._depends((args, kwargs))
        if func is READS:
            self.note((args, kwargs))
        result = func(*args, **kwargs)
        if depends:
            tensors = (each for each in tree_leaves(result) if isinstance(each, Tensor))
            self._dependent |= {id(each): each for each in tensors}
        return result

    def note(self, arguments: Any) -> None:
        """A read of `arguments`: its place, if it is the first that depends on the sources."""
        if self.first is None and self._depends(arguments):
            self.first = _innermost(reversed(list(traceback.walk_stack(sys._getframe()))))

    def _depends(self, arguments: Any) -> bool:
        return any(id(each) in self._dependent for each in tree_leaves(arguments))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> Place | None:
    """Of frames, outermost first: the last one outside torch in or below a module's method."""
    place = None
    owner = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(TORCH) or file == __file__:
            continue
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module):
            owner = type(caller).__name__
        if owner:
            place = Place(owner, file, line)
    return place


def _place_in_graph(node: torch.fx.Node) -> Place | None:
    """From what torch.export notes at each operation of a graph."""
    lines = [
        line
        for line in STACK_LINE.finditer(node.meta.get("stack_trace") or "")
        if not line["file"].startswith(TORCH)
    ]
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    if not lines or not modules:
        return None
    _, kind = modules[-1]  # a class, or its name with its module's
    owner = kind if isinstance(kind, str) else kind.__name__
    return Place(owner.rpartition(".")[2], lines[-1]["file"], int(lines[-1]["line"]))
