"""`gpurl convert`: weights of another trainer become a safetensors file, or a run; the file itself
is read in a process of its own.
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
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpurl.errors import CheckpointError, UsageError, visible

# parts of names that torch.compile and DistributedDataParallel put in front of a module's own
WRAPPERS = ("_orig_mod", "module")
WORKER = Path(__file__).with_name("worker.py")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".zip", ".safetensors")
OWNER = (
    "who has the program that wrote it can give its weights alone: "
    "safetensors.torch.save_file(model.state_dict(), FILE)"
)
ORDER = "gpurl.order"  # in the metadata of what is written: the names, as they came
SHOWN = 8  # names of what was left out


class Answer(NamedTuple):
    """How the worker ended and what it said."""

    code: int
    told: bytes
    errors: bytes


@dataclass
class Converted:
    """The tensors of a file by name, on the CPU, and what there is to tell; ordered: as their owner
    had them, not by name.
    """

    tensors: dict[str, Tensor]
    notes: list[str]
    ordered: bool = True

    def table(self) -> str:
        """A line a tensor: name, shape, dtype."""
        names = {name: visible(name) for name in self.tensors}
        width = max(map(len, names.values()))
        rows = [
            f"  {names[name]:{width}s}  {_shape(tensor):14s} {str(tensor.dtype)[6:]}"
            for name, tensor in self.tensors.items()
        ]
        return "\n".join([*rows, *self.notes])


def read_foreign(path: Path) -> Converted:
    """The tensors of `path`: torch.save's .pt, .pth, .bin or .ckpt, stable-baselines3's .zip, or
    .safetensors.

    CheckpointError for a file that is damaged, too large for what it is, or would have to be
    executed; UsageError for one of another kind.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"gpurl convert reads {', '.join(SUFFIXES)}, got {str(path)!r}")
    if not path.is_file():
        raise CheckpointError(
            f"{path} is a {'folder' if path.is_dir() else 'device'}, wanted a file"
            if path.exists()
            else f"there is no file {path}"
        )
    notes, ordered = list[str](), True
    if path.suffix == ".safetensors":
        found, ordered = _tensors_of(path)
    else:
        found, notes = _through_worker(path)
    if not found:
        raise CheckpointError(f"{path} holds no tensors")
    tensors = without_wrappers(found, str(path))
    if renamed := [name for name in found if name not in tensors]:
        notes.append(
            f"without the prefixes of wrappers (_orig_mod., module.): {len(renamed)} names, as "
            f"{visible(renamed[0])}"
        )
    return Converted(tensors, notes, ordered)


def write_safetensors(converted: Converted, target: Path) -> Path:
    """`target`, whole or not at all; UsageError where it is there already, CheckpointError where
    the disk refuses.
    """
    if target.exists():
        raise UsageError(f"{target} is there already; give another name with --out")
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file(
            converted.tensors,
            part,
            {ORDER: json.dumps(list(converted.tensors))} if converted.ordered else None,
        )
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # safetensors writes 0600
        part.replace(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def in_order(name: str) -> tuple[list[Any], str]:
    """Key that sorts names with their numbers as numbers: actor.2 before actor.10."""
    parts: list[Any] = re.split(r"([0-9]+)", name)
    parts[1::2] = [
        (len(digits.lstrip("0")), digits.lstrip("0")) for digits in parts[1::2]
    ]  # int() refuses very long ones
    return parts, name


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _tensors_of(path: Path) -> tuple[dict[str, Tensor], bool]:
    """(the tensors, whether they are in the order of who had them): safetensors sorts names,
    `write_safetensors` notes the order.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = sorted(file.keys(), key=in_order)
            noted = json.loads((file.metadata() or {}).get(ORDER, "[]"))
            ordered = (
                isinstance(noted, list)
                and all(isinstance(name, str) for name in noted)
                and sorted(noted, key=in_order) == names
            )
            return {
                name: file.get_tensor(name).clone() for name in (noted if ordered else names)
            }, ordered
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of what damage brings about, whatever its type
        raise CheckpointError(
            f"{path} is no safetensors file: {type(error).__name__}: {error}"
        ) from None


def _through_worker(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors, notes) by `worker.py`, which may be killed by its limits but takes nobody with
    it.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpurl_convert_"))
    try:
        answer = _ask_worker(path, folder)
        if "refused" in answer:
            raise CheckpointError(f"{path} is refused: {answer['refused']}; {OWNER}")
        names = [visible(str(name)) for name in answer["skipped"][:SHOWN]]
        more = ", …" if answer["count"] > len(names) else ""
        notes = [f"left out, being no tensors: {', '.join(names)}{more}"] if names else []
        found, _ = _tensors_of(folder / "tensors.safetensors")
        return {
            name: found[name] for name in answer["names"]
        }, notes  # safetensors sorts them; the order tells which layer comes first
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ask_worker(path: Path, folder: Path) -> dict[str, Any]:
    """What the worker told; CheckpointError where it did not come to that."""
    try:
        answer = run_worker(path, folder)
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(
            f"{path} is refused: reading it took more than {error.timeout:.0f} seconds"
        ) from None
    if answer.code:
        told = " ".join(answer.errors.decode(errors="replace").split())[-300:]
        why = (
            f"signal {-answer.code}, as of a process that goes over its limits"
            if answer.code < 0
            else told
        )
        raise CheckpointError(f"{path} is refused: the process that read it was ended by {why}")
    return json.loads(answer.told.splitlines()[-1])


def run_worker(path: Path, folder: Path) -> Answer:
    """`worker.py` on `path`, in the empty `folder`, so that no module of the user's folder is found
    there.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        str(WORKER),
        str(path.absolute()),
        str(folder / "tensors.safetensors"),
    ]
    seconds = 120 + path.stat().st_size // (5 << 20)
    options: dict[str, Any] = {
        "cwd": folder,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "capture_output": True,
        "timeout": seconds,
    }
    done = subprocess.run(command, check=False, **options)  # noqa: S603 - this interpreter, a file of this package, no shell
    return Answer(done.returncode, done.stdout, done.stderr)


def without_wrappers(named: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """`named` by the names that it had before torch.compile or DistributedDataParallel;
    CheckpointError where two become one.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        own = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if own in found:
            raise CheckpointError(
                f"{where} has {visible(own)} twice: once by itself, once inside "
                f"{' or '.join(WRAPPERS)}"
            )
        found[own] = tensor
    return found
