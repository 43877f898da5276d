"""Reads one file of another trainer in a separate process, tensors only, and writes them as
safetensors; a stand-alone script, run by tensors.py.

torch.load with weights_only=True calls nothing that the file names, except what rebuilds tensors.
It is still C++ that reads hostile bytes: hence the process, its limits, and no pickle on the way
back. The zip's own directory is checked before anything is unpacked.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BytesIO
    from zipfile import ZipFile

    from torch import Tensor

MAX_DEPTH = 64
MAX_ITEMS = 1_000_000
MAX_MEMBERS = 100_000
# weights hardly shrink in a zip, a bomb does a thousand times: a file may unpack to
# GROWTH * size + SPARE_BYTES
GROWTH = 4
SPARE_BYTES = 64 << 20


class Refused(Exception):
    """The reason is shown to the user."""


class StandIn:
    """Replaces numpy's scalars and arrays, which trainers keep beside the weights; ignores its
    contents.
    """

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


STAND_INS = (
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
)


def limit_process(size: int) -> None:
    """Limit memory, processor time and written files, for a file of `size` bytes; memory beyond
    what torch uses already.
    """
    import resource

    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    allowed = GROWTH * size + SPARE_BYTES
    for kind, limit in (
        (resource.RLIMIT_AS, used + 3 * allowed),
        (resource.RLIMIT_CPU, 60 + size // (10 << 20)),
        (resource.RLIMIT_FSIZE, 2 * allowed),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def check_archive(archive: "ZipFile", size: int) -> None:
    """Refused where a member of the zip leaves its folder, is a link, comes twice, or where all
    together are much larger than `size`, the bytes of the zip.
    """
    # two members of one name: what is checked may not be what is unpacked
    members = archive.infolist()
    num_names = len({member.filename for member in members})
    if len(members) > MAX_MEMBERS or num_names != len(members):
        raise Refused(f"its zip has {len(members)} members, {num_names} of them of different names")
    for member in members:
        name = member.filename
        if name.startswith("/") or "\\" in name or ":" in name or ".." in name.split("/"):
            raise Refused(
                f"its zip has the member {name!r}, which leaves the folder it is unpacked in"
            )
        # the type of a file in the upper half, as Unix has it
        if (member.external_attr >> 16) & 0o170000 == 0o120000:
            raise Refused(f"its zip has the link {name!r}")
    unpacked = sum(member.file_size for member in members)
    if unpacked > GROWTH * size + SPARE_BYTES:
        raise Refused(
            f"its zip has {size} bytes and unpacks to {unpacked}: no file of weights does"
        )


def read(path: str) -> object:
    """The contents of a file of torch.save; of stable-baselines3's zip {name: contents} of its .pth
    members.
    """
    import io
    import zipfile

    if not zipfile.is_zipfile(path):
        return load(path)
    with zipfile.ZipFile(path) as archive:
        check_archive(archive, os.path.getsize(path))
        # torch.save writes a zip too, stable-baselines3 puts several of them into one
        names = [name for name in archive.namelist() if name.endswith(".pth")]
        if not names:
            return load(path)
        contents = {}
        for name in names:
            member = archive.read(name)
            if zipfile.is_zipfile(io.BytesIO(member)):
                with zipfile.ZipFile(io.BytesIO(member)) as nested:
                    check_archive(nested, len(member))
            contents[name.removesuffix(".pth")] = load(io.BytesIO(member))
    return contents


def load(source: "str | BytesIO") -> object:
    """Never retried with weights_only=False: the author of the file decides which error is raised,
    and must not decide what follows it.
    """
    import re

    import torch

    try:
        with torch.serialization.safe_globals([(StandIn, name) for name in STAND_INS]):
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        message = str(error)
        # torch's messages advise to execute the file: only their facts are passed on
        if type(error).__name__ != "UnpicklingError":
            if "weights_only" in message:
                raise Refused("torch.save did not write it so, or long ago") from None
            raise
        if named := re.search(r"(?:GLOBAL|global|class) ([A-Za-z_][\w.]*\.[\w.]+)", message):
            raise Refused(
                f"it names {named[1]}, which loading it would call, and files are never executed"
            ) from None
        detail = re.search(r"WeightsUnpickler error: ([^\n]*)", message)
        reason = detail[1][:200] if detail else ""
        raise Refused(
            f"torch.save did not write it so ({reason or 'a pickle of another kind'})"
        ) from None


def flatten(
    value: object, path: str, tensors: "dict[str, Tensor]", skipped: list[str], depth: int = 0
) -> None:
    """Add the tensors in nested dicts, lists and tuples to `tensors`, by their keys joined with
    dots, and the names of all other values to `skipped`.
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
    # empty ones count below, as lists that share them stand for any number of values
    elif isinstance(value, (dict, list, tuple)) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            flatten(item, f"{path}.{name}" if path else str(name), tensors, skipped, depth + 1)
    else:
        skipped.append(path)


def contiguous_copies(tensors: "dict[str, Tensor]", size: int) -> "dict[str, Tensor]":
    """Copies that share no memory, as safetensors needs them; Refused for kinds of tensors that it
    cannot hold and for views much larger than the file of `size` bytes.
    """
    import torch

    # an expanded view of one number can stand for a tensor of any size
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if num_bytes > GROWTH * size + SPARE_BYTES:
        raise Refused(
            f"it has {size} bytes and its tensors would take {num_bytes}: no file of weights does"
        )
    copies = {}
    for name, tensor in tensors.items():
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_complex() or name == "__metadata__":
            raise Refused(
                f"its tensor {name!r} is {tensor.dtype} of layout {tensor.layout}, which "
                f"safetensors does not hold"
            )
        copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copies


def main(source: str, target: str) -> int:
    """Write `target`, and to stdout, as JSON, what was skipped or why the file is refused."""
    import json

    import torch
    from safetensors.torch import save_file

    # before the first byte of the file is read
    size = os.path.getsize(source)
    limit_process(size)
    tensors: dict[str, Tensor] = {}
    skipped: list[str] = []
    result: dict[str, object]
    try:
        contents = read(source)
        is_nested = isinstance(contents, (dict, list, tuple))
        flatten(contents, "" if is_nested else "tensor", tensors, skipped)
        save_file(contiguous_copies(tensors, size), target)
        result = {"names": list(tensors), "skipped": skipped[:50], "count": len(skipped)}
    except Refused as refusal:
        result = {"refused": str(refusal)}
    except (MemoryError, torch.OutOfMemoryError):
        result = {"refused": "it takes more memory than a file of its size should"}
    except Exception as error:  # damage causes errors of many types
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        result = {"refused": f"it is damaged or of another kind ({reason})"}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    # Python puts the folder of a script first: no file in it may hide a module of the standard
    # library
    own_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own_folder]
    sys.exit(main(*sys.argv[1:]))
