"""C kernels of kernels/cpu, built by the machine's own compiler at first use and kept in the user's
cache.

Where they cannot be built, the library records the reason and torch computes instead.
`GPURL_CPU_KERNEL=0` turns them off.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

FOLDER = Path(__file__).resolve().parent / "cpu"
# not -ffast-math: NaN and infinity must be detected
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
FLAGS += ["-fvisibility=hidden", "-pthread", "-shared", "-fPIC"]
BUILD_SECONDS = 120


class Library(NamedTuple):
    """`functions` is None where there is no library. `why` is then the reason, otherwise the path
    of the library.
    """

    functions: ctypes.CDLL | None
    why: str


@functools.cache
def load() -> Library:
    """The library, built first if the cache does not hold this version of it."""
    if os.environ.get("GPURL_CPU_KERNEL") == "0":
        return Library(None, "GPURL_CPU_KERNEL is 0")
    # build it unless this version of it is in the cache
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Library(None, "there is no C compiler (cc, gcc or clang)")
    try:
        folder, version = _cache_folder(), _fingerprint(compiler)
        target = _intact(folder, version) or _built(compiler, folder, version)
        return Library(ctypes.CDLL(str(target)), str(target))
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or b""
        first_line = output.decode(errors="replace").strip().splitlines()[:1]
        return Library(None, f"{compiler} failed: {first_line[0] if first_line else error}")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return Library(None, str(error))


def functions() -> ctypes.CDLL:
    """The library's functions; call it only where `load` succeeded."""
    library, why = load()
    assert library is not None, why
    return library


def address(tensor: Tensor) -> int:
    """Where C finds the data of `tensor`. ValueError unless it is in CPU memory: C would read an
    address of another device as one of its own.
    """
    if not tensor.is_cpu:
        raise ValueError(
            f"C computes on tensors in CPU memory, got one of shape {list(tensor.shape)} on "
            f"{tensor.device}"
        )
    return tensor.data_ptr()


def addresses(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """`address` of each tensor, None for None."""
    return [None if tensor is None else address(tensor) for tensor in tensors]


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """Addresses of contiguous tensors as C takes them, NULL for None. The tensors must outlive the
    call. ValueError unless they are in CPU memory.
    """
    return list(map(ctypes.c_void_p, addresses(tensors)))


def integers(*numbers: int) -> list[ctypes.c_int64]:
    """Whole numbers as C takes them."""
    return [ctypes.c_int64(number) for number in numbers]


def _cache_folder() -> Path:
    """The user's folder for built libraries. PermissionError if anybody else could write there,
    because the libraries in it are executed.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is to be ignored
    folder = (given if given.is_absolute() else Path.home() / ".cache") / "gpurl"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{folder} must belong to you alone: chmod 700 {folder}")
    return folder


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def _fingerprint(compiler: str) -> str:
    """A hash of everything that the library depends on: sources, flags, compiler, processor."""
    # an update of the compiler keeps its path
    version = subprocess.run(  # noqa: S603 - no shell
        [compiler, "--version"], capture_output=True, check=True, timeout=BUILD_SECONDS
    ).stdout
    inputs = [path.read_bytes() for path in (*_sources(), *sorted(FOLDER.glob("*.h")))]
    inputs += [" ".join(FLAGS).encode(), compiler.encode(), version, _processor().encode()]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]


def _processor() -> str:
    """Model and features of the processor, which -march=native depends on. Several machines may
    share one cache.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.system()}"
    # the other lines, such as the clock rate, differ between processors and change with time
    prefixes = ("model", "flags", "Features", "CPU p")
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(prefixes)})
    )


def _intact(folder: Path, version: str) -> Path | None:
    """The library of this version whose content has the checksum in its name. Damaged ones, which
    would compute other numbers or end the process, are removed.
    """
    for path in sorted(folder.glob(f"cpu_{version}_*.so")):
        if path.is_file() and path.name == _name(version, path.read_bytes()):
            return path
        logging.getLogger("gpurl").warning("%s is damaged, the C kernels are built again", path)
        path.unlink(missing_ok=True)  # another process may have done so
    return None


def _name(version: str, content: bytes) -> str:
    return f"cpu_{version}_{hashlib.sha256(content).hexdigest()[:16]}.so"


def _built(compiler: str, folder: Path, version: str) -> Path:
    """The library, compiled; where that fails or takes too long, that of another process which has
    succeeded meanwhile.
    """
    try:
        return _build(compiler, folder, version)
    except (OSError, subprocess.SubprocessError):
        if other := _intact(folder, version):
            return other
        raise


def _build(compiler: str, parent: Path, version: str) -> Path:
    """Compile into a temporary folder, then move the library into place in one step, once every
    byte is on the disk: two processes may build at the same time.
    """
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        built = Path(folder) / f"cpu_{version}.so"
        command = [compiler, *FLAGS, *map(str, _sources()), "-o", str(built), "-lm"]
        subprocess.run(  # noqa: S603 - no shell
            command, capture_output=True, check=True, timeout=BUILD_SECONDS
        )
        if _fingerprint(compiler) != version:
            raise OSError(f"sources in {FOLDER} changed while they were compiled: start again")
        target = parent / _name(version, built.read_bytes())
        with built.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(built, target)
    return target
