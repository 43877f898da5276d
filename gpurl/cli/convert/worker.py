"""Reads one file of another trainer in a process of its own, tensors only, and leaves them as
safetensors; stand-alone, run by convert.py.

torch.load with weights_only=True calls nothing that the file names but what rebuilds tensors. It is
C++ reading hostile bytes all the same:
hence the process, its limits, and no pickle on the way back. What the file's zip says of itself is
checked before anything is unpacked.
"""

import os
import sys
from typing import Any

MAX_DEPTH, MAX_ITEMS, MAX_MEMBERS = 64, 1_000_000, 100_000
SPARE_BYTES = 64 << 20  # what a small file may unpack to
# times its size that a file may unpack to: weights hardly shrink, a bomb does by the thousand
GROWTH = 4


class Refused(Exception):
    """What the trainer's process is told."""


class StandIn:
    """In place of numpy's scalars and arrays, which trainers keep beside the weights: takes what it
    is given and makes nothing of it.
    """

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


NUMPY = (
    "dtype",
    "ndarray",
    *(
        f"{core}.multiarray.{name}"
        for core in ("core", "_core")
        for name in ("scalar", "_reconstruct")
    ),
)


def limit_process(size: int) -> None:
    """Memory, processor time and files written, for a file of so many bytes; beyond what torch
    itself has taken by now.
    """
    import resource

    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    allowed = GROWTH * size + SPARE_BYTES
    seconds = 60 + size // (10 << 20)
    for kind, limit in (
        (resource.RLIMIT_AS, used + 3 * allowed),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 2 * allowed),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def check_archive(archive: Any, size: int) -> None:
    """Refused where a member of the zip leaves its folder, is a link, comes twice, or all are
    together absurdly large.
    """
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(names) > MAX_MEMBERS or len(set(names)) != len(names):
        raise Refused(
            f"its zip has {len(names)} members, {len(set(names))} of them of different names"
        )
    for member, name in zip(members, names):
        if name.startswith("/") or "\\" in name or ":" in name or ".." in name.split("/"):
            raise Refused(
                f"its zip has the member {name!r}, which leaves the folder it is unpacked in"
            )
        if (member.external_attr >> 16) & 0o170000 == 0o120000:
            raise Refused(f"its zip has the link {name!r}")
    unpacked = sum(member.file_size for member in members)
    if unpacked > GROWTH * size + SPARE_BYTES:
        raise Refused(
            f"its zip has {size} bytes and unpacks to {unpacked}: no file of weights does"
        )


def read(source: str) -> dict[str, Any]:
    """What the file holds, by the names that torch.save was given; of stable-baselines3's zip its
    .pth members.
    """
    import io
    import zipfile

    if not zipfile.is_zipfile(source):
        return load(source)
    size, found = os.path.getsize(source), {}
    with zipfile.ZipFile(source) as archive:
        check_archive(archive, size)
        inner = [name for name in archive.namelist() if name.endswith(".pth")]
        if not inner:
            return load(source)
        for name in inner:
            content = archive.read(name)
            if zipfile.is_zipfile(io.BytesIO(content)):
                with zipfile.ZipFile(io.BytesIO(content)) as nested:
                    check_archive(nested, len(content))
            found[name[: -len(".pth")]] = load(io.BytesIO(content))
    return found


def load(source: Any) -> Any:
    """Never with weights_only=False: who wrote the file decides which error comes, and must not
    decide what follows it.
    """
    import re

    import torch

    stand_ins: list[Any] = [(StandIn, f"numpy.{name}") for name in NUMPY]
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            if "weights_only" in str(error):  # torch's advice to execute it
                raise Refused("torch.save did not write it so, or long ago") from None
            raise
        if named := re.search(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.[\w.]+)", str(error)):
            raise Refused(
                f"it names {named[1]}, which loading it would call, and files are never executed"
            ) from None
        detail = re.search(
            r"WeightsUnpickler error: ([^\n]*)", str(error)
        )  # the rest is advice to execute it
        raise Refused(
            f"torch.save did not write it so "
            f"({(detail and detail[1][:200]) or 'a pickle of another kind'})"
        ) from None


def flatten(
    value: Any, path: str, tensors: dict[str, Any], skipped: list[str], depth: int = 0
) -> None:
    """Nested dicts, lists and tuples into names joined by dots; what is no tensor goes into
    skipped.
    """
    import torch

    if depth > MAX_DEPTH or len(tensors) + len(skipped) > MAX_ITEMS:
        raise Refused(
            f"it nests deeper than {MAX_DEPTH} or holds more than {MAX_ITEMS} values at "
            f"{path[:80]!r}"
        )
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise Refused(f"it has two tensors called {path!r}")
        tensors[path] = value
    elif isinstance(value, dict):
        for name, item in value.items():
            flatten(item, f"{path}.{name}" if path else str(name), tensors, skipped, depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            flatten(item, f"{path}.{number}" if path else str(number), tensors, skipped, depth + 1)
    else:
        skipped.append(path)


def packed(tensors: dict[str, Any], size: int) -> dict[str, Any]:
    """Copies that share nothing, as safetensors wants them; Refused for what it cannot hold and for
    views larger than the file.
    """
    import torch

    wanted = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if wanted > GROWTH * size + SPARE_BYTES:
        raise Refused(
            f"it has {size} bytes and its tensors would take {wanted}: no file of weights does"
        )
    for name, tensor in tensors.items():
        if (
            tensor.layout != torch.strided
            or tensor.is_complex()
            or tensor.is_quantized
            or name == "__metadata__"
        ):
            raise Refused(
                f"its tensor {name!r} is {tensor.dtype} of layout {tensor.layout}, which "
                f"safetensors does not hold"
            )
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def main(source: str, target: str) -> int:
    """Write `target` and tell on stdout, as JSON, what was left out, or why the file is refused."""
    import json

    import torch
    from safetensors.torch import save_file

    size = os.path.getsize(source)
    limit_process(size)
    tensors: dict[str, Any] = {}
    skipped: list[str] = []
    try:
        content = read(source)
        flatten(
            content, "" if isinstance(content, (dict, list, tuple)) else "tensor", tensors, skipped
        )
        save_file(packed(tensors, size), target)
        answer = {"names": list(tensors), "skipped": skipped[:50], "count": len(skipped)}
    except Refused as refusal:
        answer = {"refused": str(refusal)}
    except (MemoryError, torch.OutOfMemoryError):
        answer = {"refused": "it takes more memory than a file of its size should"}
    except Exception as error:  # of what damage brings about, whatever its type
        answer = {
            "refused": f"it is damaged or of another kind ({type(error).__name__}: "
            f"{str(error)[:200]})"
        }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    # run as a script, whose folder Python puts first: profile.py and statistics.py there would hide
    # the standard library's
    sys.path[:] = [
        entry
        for entry in sys.path
        if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))
    ]
    sys.exit(main(*sys.argv[1:]))
