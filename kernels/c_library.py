"""C kernels of kernels/cpu, built by the machine's own compiler at first use and kept in the user's
cache.

Where that does not work, there is a line that says why, and torch does the work.
`GPURL_CPU_KERNEL=0` turns them off.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "cpu"
# not -ffast-math: NaN and infinity are to be seen
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
FLAGS += ["-fvisibility=hidden", "-pthread", "-shared", "-fPIC"]
BUILD_SECONDS = 120


class Library(NamedTuple):
    """`functions` is None where there is no library; `why` is then the reason, else where it
    lies.
    """

    functions: ctypes.CDLL | None
    why: str


@functools.cache
def load() -> Library:
    """The library, built if this machine has none of this source yet."""
    if os.environ.get("GPURL_CPU_KERNEL") == "0":
        return Library(None, "GPURL_CPU_KERNEL is 0")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Library(None, "there is no C compiler (cc, gcc or clang)")
    try:
        target = _cache_folder() / f"cpu_{_fingerprint(compiler)}.so"
        if not target.is_file():
            _build(compiler, target)
        return Library(ctypes.CDLL(str(target)), str(target))
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or b""
        last = output.decode(errors="replace").strip().splitlines()[:1]
        return Library(None, f"{compiler} failed: {last[0] if last else error}")
    except OSError as error:
        return Library(None, str(error))


def functions() -> Any:
    """The library's functions; only where `load` found them."""
    found, why = load()
    assert found is not None, why
    return found


def _cache_folder() -> Path:
    """The user's own folder for built libraries; OSError unless nobody else can write there: what
    lies in it is executed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpurl"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} must belong to you alone: chmod 700 {folder}")
    return folder


def _sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def _fingerprint(compiler: str) -> str:
    """Of all that the library depends on: source, flags, compiler, processor."""
    version = subprocess.run(  # noqa: S603 - no shell
        [compiler, "--version"], capture_output=True, check=True, timeout=BUILD_SECONDS
    ).stdout
    parts = [path.read_bytes() for path in (*_sources(), *sorted(FOLDER.glob("*.h")))]
    parts += [" ".join(FLAGS).encode(), compiler.encode(), version, _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Model and features, which -march=native goes by: a cache may be shared by several
    machines.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.system()}"
    return platform.machine() + "".join(
        sorted({line for line in lines if line.startswith(("model", "flags", "Features", "CPU p"))})
    )


def _build(compiler: str, target: Path) -> None:
    """Into a folder of its own, then moved into place whole: two processes may build at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, *FLAGS, *map(str, _sources()), "-o", str(built), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=BUILD_SECONDS)  # noqa: S603 - no shell
        os.replace(built, target)
