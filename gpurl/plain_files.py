"""Files that somebody gave: regular ones only, and no more of them in memory than a limit; a device or a pipe has no end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 20  # of a log
MAX_TABLE_BYTES = 64 << 20


def open_regular(path: Path) -> BinaryIO:
    """`path` for reading; OSError where it is not there or no regular file."""
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # a pipe nobody writes to would wait for ever
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return stream


def read_at_most(path: Path, limit: int) -> bytes:
    """All of the regular file `path`; ValueError where that is more than `limit` bytes."""
    with open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content
