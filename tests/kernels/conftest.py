"""These tests run kernels in Triton's interpreter, which must be chosen before Triton is imported: tests/test_kernels_interpreted.py starts them."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def slice_scan(handle: Any, axis: int, combine: Any, reverse: bool) -> Any:
    raise NotImplementedError


@pytest.fixture(autouse=True, params=["in order", "shuffled"])
def program_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test with programs in order and in random order: the interpreter is serial, so only this shows what depends on order."""
    from triton.runtime import interpreter

    if request.param == "shuffled":
        generator = np.random.default_rng(0)
        monkeypatch.setattr(interpreter, "range", lambda *bounds: [int(i) for i in generator.permutation(np.arange(*bounds))], raising=False)
    yield
