"""These tests run kernels in Triton's interpreter; tests/kernels/test_triton_interpreted.py starts
them with that choice made.

Programs of a grid run in random order, never in theirs: the interpreter is serial, so only this
shows what depends on order.
Memory that a launcher allocates starts as NaN, and so does a masked load that names no `other`: on
a GPU both hold anything. An address outside of a launch's tensors is an error (bounds.py).

A test's tensors lie on DEVICE: what it makes without naming a device is moved there, and where it
must name one it takes this. GPURL_KERNEL_DEVICE=cuda runs the tests on a GPU, compiled, once each.
Interpreted they run on the GPU of tests/fake_cuda.py, where a tensor of another device is an error
as on a real one. Tests marked `host` stay on the CPU.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.fake_cuda import FakeCuda, place
from tests.kernels.triton.bounds import check_bounds
from tests.quick_interpreter import quicken

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED_ON = os.environ.get("GPURL_KERNEL_DEVICE")
DEVICE = "cuda:0" if COMPILED_ON in (None, "cuda") else COMPILED_ON  # as tensors name it
FACTORIES = (
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.tensor,
    torch.zeros,
)
RANDOM_FACTORIES = (torch.rand, torch.randint, torch.randn, torch.randperm)

collect_ignore_glob = [] if INTERPRETED or COMPILED_ON else ["test_*.py"]
if INTERPRETED:
    quicken()


class OnDevice(TorchFunctionMode):
    """Tensors made without a device are moved to `device`: made on the CPU first, random ones are
    the same numbers everywhere.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        is_new = function in FACTORIES + RANDOM_FACTORIES and options.get("device") is None
        return result.to(self.device) if is_new else result


class Counted:
    """A kernel that notes its grids."""

    def __init__(self, kernel: Any, grids: list[Any]) -> None:
        self.kernel = kernel
        self.grids = grids

    def __getitem__(self, grid: Any) -> Any:
        self.grids.append(grid)
        return self.kernel[grid]


def file_of_holes(path: Path, size: int) -> torch.Tensor:
    """[size] float32 zeros of the interpreter's GPU, of which only what is written takes memory."""
    with path.open("wb") as file:
        file.truncate(size * 4)
    return place(torch.from_file(str(path), shared=True, size=size), torch.device(DEVICE))


@pytest.fixture(autouse=True)
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not INTERPRETED and not COMPILED_ON:  # a file named on the command line is collected
        pytest.fail("set TRITON_INTERPRET=1, or on a GPU GPURL_KERNEL_DEVICE=cuda", pytrace=False)
    if request.node.get_closest_marker("host"):
        yield
        return
    with nullcontext() if COMPILED_ON else FakeCuda(), OnDevice(DEVICE):
        yield


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN, what it must not read is NaN."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(
            torch,
            name,
            lambda *size, real=real, **options: _filled_with_poison(real(*size, **options)),
        )
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    masked_load = builder.create_masked_load

    def poisoned(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        loaded = masked_load(self, pointers, mask, other, *rest)
        if other is None and np.issubdtype(loaded.data.dtype, np.floating):
            loaded.data = np.where(mask.data, loaded.data, np.nan)
        return loaded

    monkeypatch.setattr(builder, "create_masked_load", poisoned)


def _filled_with_poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(77)


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        check_bounds(monkeypatch)


@pytest.fixture(autouse=True)
def _program_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the programs of a grid their numbers in another order, backwards where the dice say the
    same one.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    generator, order = np.random.default_rng(0), np.zeros(0, int)

    def shuffle(self: Any, *grid: int) -> None:
        nonlocal order
        order = generator.permutation(int(np.prod(grid)))
        order = order if (np.diff(order) < 0).any() else order[::-1]
        set_dim(self, *grid)

    def renumbered(self: Any, *index: int) -> None:
        grid = self.grid_dim
        set_idx(
            self,
            *(int(i) for i in np.unravel_index(order[np.ravel_multi_index(index, grid)], grid)),
        )

    monkeypatch.setattr(builder, "set_grid_dim", shuffle)
    monkeypatch.setattr(builder, "set_grid_idx", renumbered)
