"""The formats of an exported policy: how each is written, and how the file is played again."""

import importlib
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gpurl.checkpoints.plain_files import Json
from gpurl.errors import UsageError, first_line, install_extra
from gpurl.export.blame import Place, first_value_read, place_of_error, place_of_node
from gpurl.export.parity import Observations, Play, arrays_of
from gpurl.nn.acting import GroupedPolicyModule, PolicyModule

ONNX_MODULES = ("onnx", "onnxscript")
# in what torch says of an operation that ONNX lacks: "No ONNX function found for <OpOverload(op='..
LACKING = re.compile(r"No ONNX function found for .*?op='([^']+)'")
# of torch.export: what its message and the line that we name say already
LOGGERS = ("torch.onnx", "torch.fx.experimental.symbolic_shapes")

Arguments = tuple[Tensor, ...]  # an observation [2, *obs] or groups, and with memory [2, S]


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
    metadata_props too, nested values as JSON; what it says of the robot also value by value,
    separated by commas, where controllers of mjlab and Isaac Lab read it.
    """
    onnx = _need("onnx")
    _need("onnxscript")
    if "" in _names(description, "inputs"):
        raise UsageError(
            "a group of observations is called '', and ONNX has no inputs without a name: give it "
            "one in single_observation_space, or take --format pt2"
        )
    program = _program(module, arguments)
    try:
        written = torch.onnx.export(
            program,
            input_names=_names(description, "inputs"),
            output_names=_names(description, "outputs"),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        assert written is not None
        model = written.model_proto
        onnx.checker.check_model(model)
    except Exception as error:  # torch's own errors are many
        raise UsageError(_onnx_failure(error)) from error
    for name, value in description.items():
        text = value if isinstance(value, str) else json.dumps(value)
        model.metadata_props.add(key=name, value=text)
    robot = cast(dict[str, list[Json]], description["robot"])
    for name, values in robot.items():
        model.metadata_props.add(key=name, value=",".join(map(str, values)))
    content: bytes = model.SerializeToString()
    return content


def _onnx_failure(error: BaseException) -> str:
    """Names the operation, and the line that calls it. torch.export has read the network already,
    so --format pt2 works.
    """
    cause = _cause(error)
    place = place_of_node(error)
    called = "" if place is None else f" (in {place})"
    lacking = LACKING.search(cause)
    problem = (
        f"ONNX has no operator for {lacking[1]}{called}"
        if lacking
        else f"this network has no form in ONNX{called}: {cause}"
    )
    return f"{problem}; compute it in another way, or take --format pt2"


def _play_onnx(path: Path) -> Play | None:
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        return None
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def play(obs: Observations, memory: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        names = [each.name for each in session.get_inputs()]
        action, *rest = session.run(None, dict(zip(names, arrays_of(obs, memory))))
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
    stream = io.BytesIO()
    torch.export.save(_program(module, arguments), stream)
    return stream.getvalue()


def _play_pt2(path: Path) -> Play | None:
    return _torch_play(torch.export.load(path).module())


def _torchscript(module: PolicyModule, arguments: Arguments, description: dict[str, Json]) -> bytes:
    """By a trace, which would hold a number that Python reads, or numpy computes, as a constant."""
    if place := first_value_read(module, arguments):
        raise UsageError(_value_is_read(place, "torchscript"))
    try:
        with warnings.catch_warnings():
            # else of sizes, for which the comparison at several numbers of rows is there
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            traced = torch.jit.trace(module, arguments, check_trace=False)
    except Exception as error:
        raise UsageError(_failure("torch.jit.trace", error)) from error
    stream = io.BytesIO()
    torch.jit.save(traced, stream)
    return stream.getvalue()


def _play_torchscript(path: Path) -> Play | None:
    return _torch_play(torch.jit.load(path))


def _torch_play(module: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Play:
    @torch.no_grad()
    def play(obs: Observations, memory: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        inputs = [torch.from_numpy(each) for each in arrays_of(obs, memory)]
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


def _program(module: PolicyModule, arguments: Arguments) -> torch.export.ExportedProgram:
    """torch.export's, as torch runs the module; where that fails, as torch reads its bytecode."""
    shapes = _free_batch(module, arguments)
    first: Exception | None = None
    for strict in (False, True):
        said = io.StringIO()
        try:
            # of a failure torch prints all operations up to it
            with redirect_stderr(said):
                program = torch.export.export(
                    module, arguments, dynamic_shapes=shapes, strict=strict
                )
        except Exception as error:
            first = first or error
            continue
        sys.stderr.write(said.getvalue())
        return program
    assert first is not None
    if isinstance(first, GuardOnDataDependentSymNode):
        raise UsageError(_value_is_read(place_of_error(first), "onnx or pt2")) from first
    raise UsageError(_failure("torch.export", first)) from first


def _value_is_read(place: Place | None, formats: str) -> str:
    """What is wrong where Python computes with the value of a tensor, and what to do."""
    where = "it" if place is None else str(place)
    return (
        f"this network has no form in {formats}: {where} takes numbers out of a tensor into "
        f"Python, which the file cannot do with other observations; compute with tensors only, "
        f"for example torch.where(condition, a, b) in place of an if"
    )


def _failure(exporter: str, error: BaseException) -> str:
    place = place_of_error(error)
    where = "" if place is None else f" (in {place})"
    return f"{exporter} cannot read this network{where}: {_cause(error)}; leave that operation out"


def _free_batch(module: PolicyModule, arguments: Arguments) -> Any:
    """The rows of each input are free; those of all inputs follow from those of the first."""
    first: dict[int, Any] = {0: torch.export.Dim("batch")}
    shapes = (first, *({0: torch.export.Dim.AUTO} for _ in arguments[1:]))
    return {"tensors": shapes} if isinstance(module, GroupedPolicyModule) else shapes


def _names(description: dict[str, Json], which: str) -> list[str]:
    tensors = description[which]
    assert isinstance(tensors, list)
    return [str(tensor["name"]) for tensor in tensors if isinstance(tensor, dict)]


def _cause(error: BaseException) -> str:
    """The first line of the innermost error: exporters wrap it in pages of their own."""
    error = _innermost(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """A `with` block without what exporters say of themselves: that torch.jit is deprecated, and
    which optional packages ONNX does without. What they say of the network passes.
    """
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
