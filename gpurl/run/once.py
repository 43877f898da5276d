"""Each warning once a run: the environments of training and of evaluation give the same ones."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warn_once() -> Iterator[None]:
    """Within the block gpurl's logger drops a message whose text it has given there before."""
    given: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_first = text not in given
        given.add(text)
        return is_first

    logger = logging.getLogger("gpurl")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)
