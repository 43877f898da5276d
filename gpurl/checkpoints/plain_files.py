"""Files of a folder that somebody gave: regular ones only, and no more of them in memory than a
limit.

A device or a pipe has no end, and a pipe that nobody else has open would wait for ever; what is
written through a link lands elsewhere.
"""

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
    """`path` for reading; OSError where it is not there or no regular file."""
    return open(path, "rb", opener=_regular)


def append_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """`path` for appending, made where it is not there; OSError where it is no regular file, or a
    link. buffering: as `open` has it.
    """
    return open(path, "ab", buffering, opener=_regular)


def write_regular(path: Path, content: bytes) -> None:
    """`content` as the whole of `path`, made where it is not there; OSError where it is no regular
    file, or a link.
    """
    with open(path, "wb", opener=_regular) as stream:
        stream.write(content)


def _regular(path: str, flags: int) -> int:
    is_read = flags & os.O_ACCMODE == os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | (0 if is_read else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and not is_read:
            raise OSError(
                errno.ELOOP, "it is a link, which is not written through", str(path)
            ) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_at_most(path: Path, limit: int) -> bytes:
    """All of the regular file `path`; ValueError where that is more than `limit` bytes."""
    with open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content
