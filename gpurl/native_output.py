"""What C libraries write to standard error past Python: known lines can be dropped, all others
stay.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def dropped_lines(*beginnings: str) -> Iterator[None]:
    """A `with` block in which lines on standard error that begin with one of `beginnings` are
    dropped; the others follow at its end, also after an error. For short blocks: a process that is
    killed inside takes them with it.
    """
    try:
        saved = os.dup(2)
    except OSError:  # a process without one
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            file.seek(0)
            for line in file:
                if not line.startswith(tuple(map(str.encode, beginnings))):
                    os.write(saved, line)
            os.close(saved)
