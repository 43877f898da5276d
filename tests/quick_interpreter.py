"""Triton's interpreter without work whose result it throws away: every operation on every block is
the same, in a third of the time.

What it computes is left alone, and so are its errors: a test of a wrong kernel fails as before.
"""

from typing import Any

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def quicken() -> None:
    """Replace what is slow, once a process."""
    if getattr(interpreter, "is_quick", False):
        return
    interpreter.is_quick = True
    _drop_unread_checks()
    _patch_the_language_once()
    _remember_numpy_types()
    _remember_shapes()
    _look_before_comparing()
    _scan_by_slices()


def _drop_unread_checks() -> None:
    """Integers are computed in int64 too, to see whether they overflow: for an assertion that is
    made only where `debug` is on.
    """
    check = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_read(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_if_read


def _patch_the_language_once() -> None:
    """The functions of Triton's language are replaced by the interpreter's at every launch and at
    every call of a function inside a kernel; once is enough where all kernels are interpreted.
    """
    patch = interpreter._patch_lang
    seen = set[Any]()
    languages = set[tuple[bool, bool]]()

    def patch_once(function: Any) -> Any:
        scope = interpreter._LangPatchScope()  # restores nothing
        if function in seen:
            return scope
        seen.add(function)
        visible = function.__globals__.values()
        key = (
            any(value is language for value in visible),
            any(value is core for value in visible),
        )
        if key not in languages:
            languages.add(key)
            patch(function)
        return scope

    interpreter._patch_lang = patch_once


def _remember_numpy_types() -> None:
    """A table of all types is made anew for every question."""
    answer = interpreter._get_np_dtype
    known = dict[str, Any]()

    def remembered(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if isinstance(element, language.pointer_type):
            return answer(dtype)
        if element.name not in known:
            known[element.name] = answer(element)
        return known[element.name]

    interpreter._get_np_dtype = remembered


def _remember_shapes() -> None:
    """The types of blocks and the shapes of tensors are few, and made anew for every result. Equal
    shapes become one object, so that most comparisons end at a look.
    """
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    shapes = dict[tuple[int, ...], Any]()
    types = dict[Any, dict[str, Any]]()
    tensors = dict[Any, dict[str, Any]]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        key = type(element_ty), element_ty.name, getattr(element_ty, "address_space", 0), sizes
        if key not in types:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = id(type.shape) if type.is_block() else None  # `shapes` keeps them at their addresses
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {name: vars(self)[name] for name in ("shape", "numel")}
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def broadcast_if_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        is_alike = getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None)
        return (lhs, rhs) if is_alike else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_unlike


def _look_before_comparing() -> None:
    """Most arguments are no constants, and most types that are compared are the same object."""
    unwrap, is_equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}

    def unwrap_if_wrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def is_same_or_equal(self: Any, other: Any) -> bool:
        return self is other or is_equal(self, other)

    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrap_if_wrapped, is_same_or_equal


def _scan_by_slices() -> None:
    """The interpreter's own scan walks element by element, a hundred times slower."""

    def generic_scan(self: Any, inputs: Any) -> list[Any]:
        columns = [np.moveaxis(item.handle.data, self.axis, 0) for item in inputs]
        total = [self.to_tensor(column[0], item.dtype) for column, item in zip(columns, inputs)]
        rows = [[item.handle.data for item in total]]
        for i in range(1, len(columns[0])):
            now = [self.to_tensor(column[i], item.dtype) for column, item in zip(columns, inputs)]
            combined = self.combine_fn.fn(*total, *now)
            total = list(combined) if isinstance(combined, tuple) else [combined]
            rows.append([item.handle.data for item in total])
        stacked = (np.moveaxis(np.stack(column), 0, self.axis) for column in zip(*rows))
        return [self.to_tensor(column, item.dtype) for column, item in zip(stacked, inputs)]

    interpreter.ScanOps.generic_scan = generic_scan
