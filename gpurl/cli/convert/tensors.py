"""The tensors of another trainer's file, read by a worker process, and written as a safetensors
file.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpurl.errors import CheckpointError, UsageError, visible

# parts of names that torch.compile and DistributedDataParallel put in front of a module's own
WRAPPERS = ("_orig_mod", "module")
WORKER = Path(__file__).with_name("worker.py")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".zip", ".safetensors")
ADVICE = (
    "the program that wrote it can write the weights alone: "
    "safetensors.torch.save_file(model.state_dict(), FILE)"
)
ORDER = "gpurl.order"  # in the metadata of a written file: the names in their original order
NUM_SHOWN = 8  # names of skipped values


class WorkerResult(TypedDict, total=False):
    """The JSON that `worker.py` prints: either `refused`, or all others."""

    refused: str  # the reason
    names: list[str]  # of the tensors, in the order of the file
    skipped: list[str]  # names of some values that are no tensors
    count: int  # of all of these


@dataclass
class Converted:
    """The tensors of a file by name, on the CPU, and notes for the user; ordered: in the order of
    the module they come from, not sorted by name.
    """

    tensors: dict[str, Tensor]
    notes: list[str]
    ordered: bool = True

    def table(self) -> str:
        """A line for each tensor, name, shape and dtype, and the notes."""
        names = [visible(name) for name in self.tensors]
        width = max(map(len, names))
        rows = []
        for name, tensor in zip(names, self.tensors.values()):
            shape = str(list(tensor.shape))
            rows.append(f"  {name:{width}s}  {shape:14s} {str(tensor.dtype)[6:]}")
        return "\n".join([*rows, *self.notes])


def read_foreign(path: Path) -> Converted:
    """The tensors of `path`: torch.save's .pt, .pth, .bin or .ckpt, stable-baselines3's .zip, or
    .safetensors.

    CheckpointError for a file that is damaged, too large for its contents, or would have to be
    executed; UsageError for another kind of file, or none.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"gpurl convert reads {', '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    if not path.is_file():
        kind = "folder" if path.is_dir() else "device"
        raise UsageError(f"{path} is a {kind}, wanted a file")
    # safetensors holds no code and is read here, all other files by a worker process
    if path.suffix == ".safetensors":
        tensors, ordered = _read_safetensors(path)
        notes: list[str] = []
    else:
        tensors, notes = _read_by_worker(path)
        ordered = True
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    unwrapped = _without_wrappers(tensors, path)
    if renamed := [name for name in tensors if name not in unwrapped]:
        notes.append(
            f"without the prefixes of wrappers (_orig_mod., module.): {len(renamed)} names, as "
            f"{visible(renamed[0])}"
        )
    return Converted(unwrapped, notes, ordered)


def write_safetensors(converted: Converted, target: Path) -> None:
    """Write `target` completely or not at all; UsageError where it exists already, CheckpointError
    where the disk refuses.
    """
    if target.exists():
        raise UsageError(f"{target} is there already; give another name with --out")
    # written beside the target and renamed, so that the target is never a part
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    metadata = {ORDER: json.dumps(list(converted.tensors))} if converted.ordered else None
    try:
        save_file(converted.tensors, part, metadata)
        # safetensors writes mode 0600: give the file the mode of any other new file
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)
        part.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def natural_order(name: str) -> tuple[str, str]:
    """Key that sorts names with their numbers as numbers: actor.2 before actor.10."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].lstrip("0").zfill(20), name), name


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], bool]:
    """(the tensors, whether they are in their original order): safetensors sorts names, and
    `write_safetensors` notes the order.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = sorted(file.keys(), key=natural_order)
            # the noted order counts only where it has exactly the names of the file
            noted = json.loads((file.metadata() or {}).get(ORDER, "[]"))
            ordered = (
                isinstance(noted, list)
                and all(isinstance(name, str) for name in noted)
                and sorted(noted, key=natural_order) == names
            )
            if ordered:
                names = noted
            return {name: file.get_tensor(name).clone() for name in names}, ordered
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damage causes errors of many types
        raise CheckpointError(
            f"{path} is no safetensors file: {type(error).__name__}: {error}"
        ) from None


def _read_by_worker(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors, notes) by `worker.py`, a process that its limits may kill."""
    folder = Path(tempfile.mkdtemp(prefix="gpurl_convert_"))
    # the worker starts in a new folder and writes there
    try:
        result = _worker_result(path, folder)
        if "refused" in result:
            raise CheckpointError(f"{path} is refused: {result['refused']}; {ADVICE}")
        tensors, _ = _read_safetensors(folder / "tensors.safetensors")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    notes = []
    if result["skipped"]:
        names = [visible(name) for name in result["skipped"][:NUM_SHOWN]]
        more = ", …" if result["count"] > len(names) else ""
        notes = [f"skipped, not tensors: {', '.join(names)}{more}"]
    # safetensors sorted them; the order shows which layer comes first
    return {name: tensors[name] for name in result["names"]}, notes


def _worker_result(path: Path, folder: Path) -> WorkerResult:
    """What the worker printed; CheckpointError where it did not finish."""
    try:
        done = run_worker(path, folder)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"{path} is refused: reading it took more than {error.timeout:.0f} seconds"
        ) from None
    if done.returncode:
        # the end of its traceback, in one line
        reason = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        if done.returncode < 0:
            reason = f"signal {-done.returncode}, as of a process that goes over its limits"
        raise CheckpointError(f"{path} is refused: the process that read it was ended by {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def run_worker(path: Path, folder: Path) -> "subprocess.CompletedProcess[bytes]":
    """`worker.py` on `path`, in the empty `folder`, so that no module of the user's folder is
    imported.
    """
    return subprocess.run(  # noqa: S603 - this interpreter, a file of this package, no shell
        [sys.executable, str(WORKER), str(path.absolute()), str(folder / "tensors.safetensors")],
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120 + path.stat().st_size // (5 << 20),
    )


def _without_wrappers(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors by the names they had before torch.compile or DistributedDataParallel;
    CheckpointError where two become one.
    """
    unwrapped: dict[str, Tensor] = {}
    for wrapped_name, tensor in tensors.items():
        name = ".".join(part for part in wrapped_name.split(".") if part not in WRAPPERS)
        if name in unwrapped:
            raise CheckpointError(
                f"{path} has {visible(name)} twice: once by itself, once inside "
                f"{' or '.join(WRAPPERS)}"
            )
        unwrapped[name] = tensor
    return unwrapped
