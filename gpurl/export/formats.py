"""The formats of an exported policy: how each is written, and how the file is played again."""

import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.checkpoints.plain_files import Json
from gpurl.errors import UsageError, first_line, install_extra
from gpurl.export.parity import Play
from gpurl.nn.acting import PolicyModule

ONNX_MODULES = ("onnx", "onnxscript")

Arguments = tuple[Tensor, ...]  # an observation [2, *obs], and with memory [2, H]


@dataclass(frozen=True)
class Format:
    """One kind of file."""

    suffix: str
    write: Callable[[PolicyModule, Arguments, dict[str, Json]], bytes]
    # what plays the file; None where a library for it is missing
    load: Callable[[Path], Play | None]


# ---- ONNX ----


def _onnx(module: PolicyModule, arguments: Arguments, description: dict[str, Json]) -> bytes:
    """Through torch.export, whose batch dimension is free. The description is in the model's
    metadata_props too, nested values as JSON.
    """
    onnx = _need("onnx")
    _need("onnxscript")
    try:
        program = torch.onnx.export(
            module,
            arguments,
            input_names=_names(description, "inputs"),
            output_names=_names(description, "outputs"),
            dynamic_shapes=_free_batch(arguments),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
        onnx.checker.check_model(model)
    except Exception as error:  # torch's own errors are many
        raise UsageError(
            f"this network has no form in ONNX ({_cause(error)}): leave that operation out, or "
            f"take --format pt2"
        ) from error
    for name, value in description.items():
        text = value if isinstance(value, str) else json.dumps(value)
        model.metadata_props.add(key=name, value=text)
    content: bytes = model.SerializeToString()
    return content


def _play_onnx(path: Path) -> Play | None:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def play(obs: np.ndarray, memory: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        inputs = {"obs": obs} if memory is None else {"obs": obs, "memory": memory}
        action, *rest = session.run(None, inputs)
        return action, rest[0] if rest else None

    return play


def _need(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"--format onnx needs {name}, which is missing ({error}): "
            f"{install_extra('export')}, or take --format pt2"
        ) from None


# ---- torch's own files ----


def _pt2(module: PolicyModule, arguments: Arguments, description: dict[str, Json]) -> bytes:
    try:
        shapes = _free_batch(arguments)
        program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    except Exception as error:
        raise UsageError(
            f"torch.export cannot read this network ({_cause(error)}): leave that operation out, "
            f"or take --format torchscript"
        ) from error
    stream = io.BytesIO()
    torch.export.save(program, stream)
    return stream.getvalue()


def _play_pt2(path: Path) -> Play | None:
    return _torch_play(torch.export.load(path).module())


def _torchscript(module: PolicyModule, arguments: Arguments, description: dict[str, Json]) -> bytes:
    try:
        traced = torch.jit.trace(module, arguments, check_trace=False)
    except Exception as error:
        raise UsageError(
            f"torch.jit.trace cannot read this network ({_cause(error)}): leave that operation "
            f"out, or take --format pt2"
        ) from error
    stream = io.BytesIO()
    torch.jit.save(traced, stream)
    return stream.getvalue()


def _play_torchscript(path: Path) -> Play | None:
    return _torch_play(torch.jit.load(path))


def _torch_play(module: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Play:
    @torch.no_grad()
    def play(obs: np.ndarray, memory: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        inputs = [torch.from_numpy(each) for each in (obs, memory) if each is not None]
        outputs = module(*inputs)
        if isinstance(outputs, Tensor):
            return outputs.numpy(), None
        return outputs[0].numpy(), outputs[1].numpy()

    return play


FORMATS = {
    "onnx": Format(".onnx", _onnx, _play_onnx),
    "pt2": Format(".pt2", _pt2, _play_pt2),
    "torchscript": Format(".torchscript.pt", _torchscript, _play_torchscript),
}


# ---- shared ----


def _free_batch(arguments: Arguments) -> tuple[dict[int, Any], ...]:
    """The rows of each input are free; those of the memory follow from those of obs."""
    first: dict[int, Any] = {0: torch.export.Dim("batch")}
    return (first, *({0: torch.export.Dim.AUTO} for _ in arguments[1:]))


def _names(description: dict[str, Json], which: str) -> list[str]:
    tensors = description[which]
    assert isinstance(tensors, list)
    return [str(tensor["name"]) for tensor in tensors if isinstance(tensor, dict)]


def _cause(error: BaseException) -> str:
    """The first line of the innermost error: exporters wrap it in pages of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """A `with` block without what exporters say of themselves: that torch.jit is deprecated, and
    which optional packages ONNX does without. What they say of the network passes.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logger.setLevel(level)
