"""P equal objects, such as the engines of a population's members, whose tensors lie side by side in
memory: [P, ...]. A function of one object then computes for all of them at once, by
torch.func.vmap, in as many launches as it takes for one.

The objects stay what they are, and can be used one by one: their tensors become views. A call makes
a copy of the first object that has batched tensors, so the function may write in place into what
was there before, and does not know of the others.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from gymnasium.spaces import Space
from torch import Tensor
from torch.utils import _pytree as pytree

from gpurl.engine.vmap_rules import VmapRules

ALIGNMENT = 16  # bytes, at which the tensors of each object begin, as those of an allocation do
# what a copy shares with its original
ATOMS = (type(None), bool, int, float, str, bytes, Enum, torch.device, torch.dtype, torch.Size)
SHARED = (type, FunctionType, ModuleType, Space)
Kind = TypeVar("Kind")


class Difference(NamedTuple):
    """What the objects do not have in common."""

    path: str  # of attributes and keys, as `.algorithm.seed`
    values: tuple[Any, ...]  # of each object


class Place(NamedTuple):
    """Where a tensor of the first object lies."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Stack:
    """The tensors of `objects`, which becomes views of one storage for all.

    Objects are equal if they have the same attributes and keys, with tensors of the same shapes.
    What else they differ in is in `differences`; a call takes it from the first object.
    """

    def __init__(
        self, objects: Sequence[Any], exceptions: Mapping[type, Collection[str]] | None = None
    ) -> None:
        """exceptions: the attributes of a class that calls neither read nor write."""
        self.count = len(objects)
        self.differences: list[Difference] = []
        self._exceptions = exceptions or {}
        # of each memory of the first object those of all
        self._memories: dict[int, tuple[int, ...]] = {}
        # the objects that correspond to each other, [P] each, by the id of the first
        self._equals: dict[int, tuple[Any, ...]] = {}
        self._tensors: list[tuple[Tensor, ...]] = []
        self._visit("", tuple(objects))
        self._first = objects[0]
        self._places: dict[int, Place] = {}
        self._storages: list[Tensor] = []  # [P, S] each

    # ---- what corresponds ----

    def _visit(self, path: str, objects: tuple[Any, ...]) -> None:
        """Note the tensors and objects that can be reached, in `differences` what is not equal."""
        first = objects[0]
        if id(first) in self._equals or isinstance(first, SHARED):
            return
        if isinstance(first, ATOMS):
            if any(each != first for each in objects):
                self.differences.append(Difference(path, objects))
            return
        if any(type(each) is not type(first) for each in objects):
            self.differences.append(Difference(path, tuple(type(each) for each in objects)))
            return
        self._equals[id(first)] = objects
        if all(each is first for each in objects):
            return
        if isinstance(first, Tensor):
            memories = tuple(each.untyped_storage().data_ptr() for each in objects)
            if any(each.shape != first.shape or each.dtype != first.dtype for each in objects):
                self.differences.append(Difference(path, tuple(each.shape for each in objects)))
            elif self._memories.setdefault(memories[0], memories) != memories:
                self.differences.append(Difference(path, ("shares memory",)))
            else:
                self._tensors.append(objects)
            return
        contents = [dict(_contents(each)) for each in objects]
        for name in dict.fromkeys(name for each in contents for name in each):
            if self._is_exception(first, name):
                continue
            if all(name in each for each in contents):
                self._visit(f"{path}.{name}", tuple(each[name] for each in contents))
            else:
                self.differences.append(Difference(f"{path}.{name}", ()))

    def _is_exception(self, owner: Any, name: str) -> bool:
        return any(
            isinstance(owner, kind) and name in names for kind, names in self._exceptions.items()
        )

    def of_kind(self, kind: type[Kind], number: int) -> Iterator[Kind]:
        """What object `number` consists of that is of this class."""
        for objects in self._equals.values():
            if isinstance(objects[number], kind):
                yield objects[number]

    # ---- memory ----

    @torch.no_grad()
    def join(self) -> None:
        """Move the tensors side by side, one storage after the other."""
        # those that share memory stay together; what all objects share is left alone
        groups: dict[int, list[tuple[Tensor, ...]]] = {}
        for tensors in self._tensors:
            memory = tensors[0].untyped_storage().data_ptr()
            if tensors[0].numel() and len({*self._memories[memory]}) == self.count:
                groups.setdefault(memory, []).append(tensors)
        for number, group in enumerate(groups.values()):
            storage = _joined_storages(group[0])
            width = storage.shape[1]
            self._storages.append(storage)
            for tensors in group:
                first = tensors[0]
                place = Place(number, first.shape, first.stride(), int(first.storage_offset()))
                self._places[id(first)] = place
                for k, tensor in enumerate(tensors):
                    tensor.data = storage.as_strided(
                        place.size, place.stride, place.offset + k * width
                    )

    # ---- calls ----

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(object, *arguments)` for all objects. The tensors in arguments and result,
        which may be nested, have a leading axis [P, ...]; what else the result holds is the same
        for all. Numbers that the function changes in its object change in all of them.
        """
        given, form = pytree.tree_flatten(arguments)
        result: list[Any] = []

        def compute(storages: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
            memo = self._memo(storages)
            one = self._copied(self._first, memo)
            left = iter(tensors)
            own = [next(left) if isinstance(each, Tensor) else each for each in given]
            with VmapRules():
                returned = function(one, *pytree.tree_unflatten(own, form))
            self._keep_numbers(memo)
            leaves, shape = pytree.tree_flatten(returned)
            result[:] = leaves, shape
            return [each for each in leaves if isinstance(each, Tensor)]

        tensors = [each for each in given if isinstance(each, Tensor)]
        batched = iter(torch.func.vmap(compute)(self._storages, tensors))
        leaves, shape = result
        stacked = [next(batched) if isinstance(each, Tensor) else each for each in leaves]
        return pytree.tree_unflatten(stacked, shape)

    def _memo(self, storages: Sequence[Tensor]) -> dict[int, Any]:
        """For `_copied`: batched views of the tensors, and what the objects share."""
        memo: dict[int, Any] = {}
        for number, objects in self._equals.items():
            place = self._places.get(number)
            if place is not None:
                memo[number] = storages[place.storage].as_strided(*place[1:])
            elif all(each is objects[0] for each in objects):
                memo[number] = objects[0]
        return memo

    def _copied(self, value: Any, memo: dict[int, Any]) -> Any:
        """A copy of `value`, and of all that it consists of, except tensors and what is in `memo`:
        {id of the original: copy}.
        """
        if id(value) in memo:
            return memo[id(value)]
        own: Any = value
        if isinstance(value, (*ATOMS, *SHARED, Tensor)):
            pass
        elif isinstance(value, dict):
            memo[id(value)] = own = copy.copy(value)
            own.update({name: self._copied(each, memo) for name, each in value.items()})
        elif isinstance(value, list):
            memo[id(value)] = own = []
            own += [self._copied(each, memo) for each in value]
        elif isinstance(value, tuple):
            contents = [self._copied(each, memo) for each in value]
            own = type(value)(*contents) if hasattr(value, "_fields") else tuple(contents)
        elif isinstance(value, MethodType):
            own = MethodType(value.__func__, self._copied(value.__self__, memo))
        elif hasattr(value, "__dict__"):
            memo[id(value)] = own = object.__new__(type(value))
            for name, each in vars(value).items():
                is_shared = self._is_exception(value, name)
                own.__dict__[name] = each if is_shared else self._copied(each, memo)
        memo[id(value)] = own
        return own

    def _keep_numbers(self, memo: Mapping[int, Any]) -> None:
        """Write the numbers that a call has changed into all objects, and objects without tensors
        that it has put in the place of others.
        """
        copies = {id(each) for each in memo.values()}
        for number, objects in self._equals.items():
            own = memo.get(number)
            if own is None or own is objects[0] or not hasattr(own, "__dict__"):
                continue
            if isinstance(own, Tensor | MethodType):
                continue
            before = objects[0].__dict__
            for name, value in own.__dict__.items():
                if name not in before:
                    continue
                if isinstance(value, ATOMS):
                    is_new = value != before[name]
                else:
                    is_new = id(value) not in copies and not isinstance(value, SHARED)
                    is_new = is_new and hasattr(value, "__dict__") and not _has_tensors(value)
                if is_new:
                    for each in objects:
                        each.__dict__[name] = value


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, content) of what `value` consists of."""
    if isinstance(value, dict):
        yield from ((str(name), each) for name, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(k), each) for k, each in enumerate(value))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif hasattr(value, "__dict__") and not isinstance(value, SHARED):
        yield from vars(value).items()


def _has_tensors(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether `value` is a tensor or consists of some; seen: the ids of what it is a part of."""
    if isinstance(value, Tensor):
        return True
    seen |= {id(value)}
    return any(_has_tensors(each, seen) for _, each in _contents(value) if id(each) not in seen)


def _joined_storages(tensors: Sequence[Tensor]) -> Tensor:
    """[P, S] all of the memory of which these are views, each from an aligned address on."""
    rows = [_whole_storage(each) for each in tensors]
    unit = ALIGNMENT // rows[0].element_size()
    width = -(-max(map(len, rows)) // unit) * unit
    storage = rows[0].new_zeros(len(rows), width)
    for row, joined in zip(rows, storage):
        joined[: len(row)].copy_(row)
    return storage


def _whole_storage(tensor: Tensor) -> Tensor:
    """[S] all of the memory of which `tensor` is a view, in its dtype."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))
