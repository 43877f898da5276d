"""CUDA graphs on a CPU: capturing records every operation with the tensors it works on, a replay
does them again and runs no Python.

As with CUDA, capturing changes nothing (what was written is put back), what Python knew is baked
in, results stand where they stood at capture, and an operation whose answer the host needs cannot
be captured.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}

EXCHANGES = "c10d"  # the namespace of torch.distributed's operations


class FakeGraphs:
    """A `gpurl.engine.graphs.Backend`."""

    def __init__(self) -> None:
        self.captured: list[Recorder] = []

    def another(self) -> "FakeGraphs":
        return FakeGraphs()

    def warm_up(self, function: Callable[[], Any]) -> tuple[Any, str]:
        with Watch() as watch:
            result = function()
        return result, watch.waited

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        recorder = Recorder()
        with recorder:
            result = function()
        recorder.put_back()
        self.captured.append(recorder)
        recorder.results = {storage(tensor) for tensor in tensors(result)}
        return lambda: self._replay(recorder), result

    def _replay(self, recorder: "Recorder") -> None:
        """Graphs that share a pool write over what others left behind: only what a function
        returned or another one reads stays.
        """
        read = {
            storage(tensor)
            for each in self.captured
            for _, *given, _ in each.operations
            for tensor in tensors(given)
        }
        for other in self.captured:
            if other is not recorder:
                other.spoil(read | other.results)
        recorder.replay()


class Watch(TorchDispatchMode):
    """Notes where a GPU would have to be waited for first."""

    waited = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING and not self.waited:
            self.waited = f"called a synchronizing operation: {name}"
        return function(*args, **(kwargs or {}))


class Refusal(TorchDispatchMode):
    """Raises where a GPU would have to be waited for."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING:
            raise RuntimeError(f"called a synchronizing operation: {name}")
        return function(*args, **(kwargs or {}))


class Recorder(Refusal):
    """What a captured function does, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()  # storages that began during the capture
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what others held
        self.results: set[int] = set()  # storages of what the function returned

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        writes = [
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in function._schema.arguments
        ]
        given = {
            argument.name: value for argument, value in zip(function._schema.arguments, args)
        } | kwargs
        written = [
            tensor
            for argument, is_written in zip(function._schema.arguments, writes)
            if is_written
            for tensor in tensors(given.get(argument.name))
        ]
        # an exchange between processes writes into what it is given, though its schema has no word
        # of that
        if function.namespace == EXCHANGES:
            written = tensors((args, kwargs))
        self._keep(written)
        given_as = tree_map(alias, (args, kwargs))
        result = super().__torch_dispatch__(function, types, args, kwargs)
        read = {storage(tensor) for tensor in tensors((args, kwargs))}
        new = [tensor for tensor in tensors(result) if storage(tensor) not in read]
        self.made |= {storage(tensor) for tensor in new}
        if new or written:  # else a view
            self.operations.append((function, *given_as, [] if written else list(map(alias, new))))
        return result

    def record_launch(self, launch: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Note a kernel, which may write whatever it is given."""
        self._keep(tensors((args, kwargs)))
        self.operations.append((launch, *tree_map(alias, (args, kwargs)), []))

    def _keep(self, written: list[Tensor]) -> None:
        """Remember what others hold and the capture overwrites."""
        for tensor in written:
            key = storage(tensor)
            if key not in self.made and key not in self.before:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self.before[key] = whole, whole.clone()

    def put_back(self) -> None:
        with torch.inference_mode():
            for tensor, value in self.before.values():
                tensor.copy_(value)
        self.before.clear()

    def spoil(self, kept: set[int]) -> None:
        """Fill with rubbish what was made by the way."""
        with torch.inference_mode():
            for *_, results in self.operations:
                for tensor in results:
                    if storage(tensor) not in kept:
                        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        with torch.inference_mode():
            for function, args, kwargs, results in self.operations:
                given = function(*args, **kwargs)
                if getattr(function, "namespace", "") == EXCHANGES:
                    given[1].wait()
                for place, value in zip(results, tensors(given)):
                    place.copy_(value)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of nested tuples, lists and dicts; torch's own walk takes ten times as long."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for branch in tree for tensor in tensors(branch)]


def alias(leaf: Any) -> Any:
    """The same memory under a tensor of its own, whose shape nobody changes."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
