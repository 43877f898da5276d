"""Exports the policy of a run: one file that acts by itself, and its description beside it. Both
appear complete and checked, or not at all.
"""

import errno
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gpurl.checkpoints.plain_files import write_regular
from gpurl.errors import UsageError, did_you_mean, install_extra
from gpurl.export.description import as_json, describe
from gpurl.export.formats import FORMATS, quiet_exporters
from gpurl.export.parity import arrays_of, check_parity, random_observations
from gpurl.policy import load
from gpurl.run.run_folder import run_of


class Exported(NamedTuple):
    """What `export_run` wrote."""

    file: Path
    description: Path  # the JSON beside it
    difference: float | None  # the largest one of an action; None: nothing here can play the file
    note: str  # what the user should know; empty if nothing


def export_run(
    path: str | Path,
    export_format: str = "auto",
    out: str | Path | None = None,
    best: bool = True,
    member: int | None = None,
) -> Exported:
    """Write the policy of a run or checkpoint folder, by default into the run folder, as
    policy.onnx, policy.pt2 or policy.torchscript.pt; best=False: of the latest checkpoint. member:
    of a population, by default the best one. export_format: auto is that of out's suffix, else
    onnx.

    The file is loaded again and compared with `gpurl.load(path).act`. UsageError if they differ,
    for an unknown format or another one's suffix, a missing package, an operation that the format
    lacks, and a file that cannot be written, and without a checkpoint.
    """
    export_format = _format_of(export_format, out)
    kind, path = FORMATS[export_format], Path(path)
    policy = load(path, best=best, member=member)
    file = Path(out).expanduser() if out else run_of(path) / f"policy{kind.suffix}"
    beside = file.with_name(f"{file.name}.json")
    _check_target(file)
    # the module, and the two rows that exporters need to see
    module = policy.module()
    space = policy.algorithm.observation_space
    normalizer = policy.algorithm.normalizer
    rows = random_observations(space, normalizer, 2, np.random.default_rng(1))
    arguments = tuple(torch.from_numpy(each) for each in arrays_of(rows))
    if module.memory_size:
        arguments += (torch.zeros(2, module.memory_size),)
    description = describe(policy, module, path, file.name, export_format)
    with quiet_exporters(), torch.no_grad():
        content = kind.write(module, arguments, description)
    # written under another name, checked, renamed
    temporary = [file.with_name(f".tmp-{uuid.uuid4()}{kind.suffix}") for _ in range(2)]
    try:
        _write(temporary[0], content, file)
        _write(temporary[1], as_json(description), beside)
        difference = None
        with quiet_exporters():
            play = kind.load(temporary[0])
            if play is not None:
                title = f"the exported {file.name}"
                policy.reset()
                difference = check_parity(policy, play, module, space, normalizer, title)
        _rename(temporary[1], beside)
        _rename(temporary[0], file)
    finally:
        for each in temporary:
            with suppress(OSError):
                each.unlink(missing_ok=True)
    note = ""
    if difference is None:
        note = "it was not compared with the policy: onnxruntime is not installed, "
        note += install_extra("export")
    return Exported(file, beside, difference, note)


def _format_of(name: str, out: str | Path | None) -> str:
    """The format called `name`, auto is that of out's suffix; UsageError for an unknown one, and
    for a file with the suffix of another.
    """
    if name != "auto" and name not in FORMATS:
        raise UsageError(
            f"there is no format {name!r}; {did_you_mean(name, FORMATS)}Known: auto, "
            f"{', '.join(FORMATS)}"
        )
    # the last part of .torchscript.pt is enough
    known = {Path(f"policy{kind.suffix}").suffix: each for each, kind in FORMATS.items()}
    of_suffix = known.get(Path(out).suffix if out else "", "")
    if name == "auto":
        return of_suffix or "onnx"
    if of_suffix not in ("", name):
        raise UsageError(
            f"--out {out} has the suffix of {of_suffix}, the format is {name}: leave out --format, "
            f"or name the file policy{FORMATS[name].suffix}"
        )
    return name


def _check_target(file: Path) -> None:
    """UsageError for a place where no file of the user belongs."""
    if file.is_dir():
        raise UsageError(f"--out {file} is a folder: name a file in it")
    if not file.parent.is_dir():
        raise UsageError(
            f"cannot write {file}: there is no folder {file.parent}; make it, or choose another "
            f"place with --out"
        )
    if file.exists() and not file.is_file():
        raise UsageError(f"--out {file} is no regular file")
    if (file.parent / "manifest.json").exists():
        raise UsageError(
            f"--out {file} is inside a checkpoint, which would no longer be intact: choose another "
            f"folder"
        )


def _write(temporary: Path, content: bytes, file: Path) -> None:
    try:
        write_regular(temporary, content)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
    except OSError as error:
        room = ""
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(file.parent).free
            room = f" ({len(content)} bytes are needed, {free} are free)"
        raise UsageError(
            f"cannot write {file}: {error.strerror}{room}; choose another place with --out"
        ) from error


def _rename(temporary: Path, file: Path) -> None:
    try:
        temporary.replace(file)
    except OSError as error:
        raise UsageError(
            f"cannot write {file}: {error.strerror}; choose another place with --out"
        ) from error
