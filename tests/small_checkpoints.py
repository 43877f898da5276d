"""Checkpoints of a few numbers: made, read back with every bit compared, and looked at from
outside.
"""

import logging
import math
import struct
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from gpurl.checkpoints.folders import load_checkpoint
from gpurl.errors import CheckpointError


def small_parts(step: int = 0) -> dict:
    return {
        "model": {"weight": torch.full((3, 5), float(step)), "step": step},
        "optim": {"m": [torch.arange(4), (1, math.inf)]},
    }


def assert_same_bits(got: object, expected: object) -> None:
    """Same types, same order, same bits."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert bytes(got.flatten().view(torch.uint8).tolist()) == bytes(
            expected.flatten().view(torch.uint8).tolist()
        )
    elif isinstance(expected, float):
        assert struct.pack(">d", got) == struct.pack(">d", expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        assert_same_bits(list(got.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_same_bits(one, other)
    else:
        assert got == expected


def step_of(folder: Path) -> int:
    """The step that a load gives, its tensors checked; a warning is an error here."""
    with patch.object(logging.getLogger("gpurl"), "warning", side_effect=AssertionError):
        parts, manifest = load_checkpoint(folder)
    assert_same_bits(parts, small_parts(manifest["step"]))
    return manifest["step"]


def verify_checkpoint(path: Path) -> str | None:
    """Why the checkpoint cannot be loaded; None if it can."""
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return None


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
