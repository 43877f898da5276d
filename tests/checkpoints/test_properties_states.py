"""Whatever a state is made of, a checkpoint gives it back: same types, same order, same bits."""

import math
import struct
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from gpurl.checkpoints.folders import FORMAT_VERSION, load_checkpoint, save_checkpoint
from gpurl.checkpoints.state_files import DTYPES
from tests.small_checkpoints import assert_same_bits

NAMES = st.sampled_from(
    [
        "a",
        "a.b",
        "a/b",
        "a~1b",
        "0",
        "",
        "!int",
        "!!",
        "!tensor",
        "__metadata__",
        "ü\n",
        "~__metadata__",
    ]
)
KEYS = NAMES | st.text(max_size=5)
NAN_PAYLOADS = st.binary(min_size=6, max_size=6).map(
    lambda rest: struct.unpack(">d", b"\x7f\xf8" + rest)[0]
)
NUMBERS = (
    st.integers()
    | st.integers(-(2**20_000), 2**20_000)
    | st.floats()
    | NAN_PAYLOADS
    | st.sampled_from([math.inf, -math.inf, -0.0])
)
LEAVES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.sampled_from(["", "ä\ud800\0", "!int"])
    | st.text(max_size=5)
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any type and shape: NaN payloads, subnormals, sometimes empty or 0-d."""
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7]), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    return torch.frombuffer(raw or bytearray(8), dtype=dtype)[: math.prod(shape)].reshape(shape)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=4)
    return items | items.map(tuple) | st.dictionaries(KEYS, inner, max_size=4)


STATES = st.dictionaries(
    KEYS, st.recursive(LEAVES | tensors() | tensors(), nest, max_leaves=20), max_size=5
)


# names that become one where they are not told apart by the letters that stand for / and ~, and the
# one that safetensors keeps for itself
ALIKE = {
    name: torch.tensor(place)
    for place, name in enumerate(["a/b", "a~1b", "a~b", "a~0b", "__metadata__", "~__metadata__"])
}
ALIKE |= {"a": {"b": torch.tensor(9)}}
BITS = torch.tensor(
    [-(2**63), 0x7FF0_0000_0000_0001, 0x7F80_0001_8000_0000, 0x7C01_7F81_8000_8000]
)  # -0.0 and NaN that arithmetic quiets
FLOATS = {str(dtype): BITS.view(dtype) for dtype in DTYPES if dtype.is_floating_point}


def saved_and_loaded(step: int, parts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without waiting for the disk, which is not to lose power here."""
    with tempfile.TemporaryDirectory() as folder, patch("gpurl.checkpoints.folders._fsync"):
        return load_checkpoint(save_checkpoint(Path(folder), step, parts))


@example(parts=dict.fromkeys(("model", "optim", "manifest"), ALIKE | FLOATS), step=0)
@given(
    parts=st.fixed_dictionaries({name: STATES for name in ("model", "optim", "manifest")}),
    step=st.integers(0, 10**12 - 1),
)
def test_any_state_comes_back_bit_for_bit(parts: dict[str, Any], step: int) -> None:
    loaded, manifest = saved_and_loaded(step, parts | {"empty": {}})
    assert_same_bits(dict(sorted(loaded.items())), dict(sorted((parts | {"empty": {}}).items())))
    assert (manifest["step"], manifest["format_version"]) == (step, FORMAT_VERSION)


@given(depth=st.integers(1, 55), leaf=LEAVES | tensors())
def test_any_depth_that_is_allowed_comes_back(depth: int, leaf: Any) -> None:
    state: Any = {"leaf": leaf}
    for number in range(depth):
        state = (
            {"down": state}
            if number % 2
            else {"a": [state]}
            if number % 3 == 0 and number < 20
            else {"b": state}
        )
    assert_same_bits(saved_and_loaded(1, {"model": state})[0]["model"], state)
