"""Files whose path or content a user gave: only regular files are opened, and at most a limit is
read into memory.

A device or a pipe has no end, and opening a pipe without a writer waits forever; a link leads to
another file, which would be changed or shown. Who means the file behind a link resolves it first.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, TypeAlias

# a value of a JSON or YAML file
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
MAX_LINE_BYTES = 1 << 20  # of a log
MAX_TABLE_BYTES = 64 << 20


def open_regular(path: Path) -> BinaryIO:
    """`path` for reading; OSError if it does not exist, is no regular file, or a link."""
    return open(path, "rb", opener=_open)


def append_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """`path` for appending, created if needed; OSError if it is no regular file, or a link.
    buffering: as in `open`.
    """
    return open(path, "ab", buffering, opener=_open)


def edit_regular(path: Path) -> BinaryIO:
    """`path` for reading and writing; OSError as `open_regular`."""
    return open(path, "rb+", opener=_open)


def make_folder(path: Path) -> None:
    """Make the folder `path` if needed; OSError if a file or a link is in its place."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, gpurl writes into folders only", path)


def write_regular(path: Path, content: bytes) -> None:
    """Make `content` the content of `path`, created if needed; OSError if it is no regular file, or
    a link.
    """
    with open(path, "wb", opener=_open) as stream:
        stream.write(content)


def replace_file(path: Path, content: bytes) -> None:
    """Make `content` the content of `path`, completely or not at all, also where the machine loses
    its power; a link is replaced, the file that it leads to stays. OSError if that is not possible,
    also for a device or a pipe.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = os.lstat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
            raise OSError(errno.EINVAL, "it is no regular file", path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_regular(temporary, content)
        with open_regular(temporary) as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _open(path: str, flags: int) -> int:
    # never wait for the other end of a pipe, never go through a link
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, not a regular file", path) from None
        raise
    # checked on the open file: the path may name another one by now
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def read_at_most(path: Path, limit: int) -> bytes:
    """The content of the regular file `path`; ValueError if it has more than `limit` bytes."""
    with open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content
