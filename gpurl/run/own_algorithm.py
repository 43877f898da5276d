"""Turns an exception inside an algorithm of the user's into an error that names its line."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpurl.algorithms.base import Algorithm
from gpurl.errors import GpurlError, OwnCodeError, users_fault
from gpurl.kernels.memory_errors import find_out_of_memory


@contextmanager
def explain_own_errors(algorithm: type[Algorithm]) -> Iterator[None]:
    """A `with` block, or a decorator, that turns what a class of the user's raised into an
    OwnCodeError, with the original error as its cause. Errors of gpurl itself pass unchanged.
    """
    try:
        yield
    except Exception as error:
        method, place = users_fault(error, algorithm)
        if not place or isinstance(error, GpurlError) or find_out_of_memory(error) is not None:
            raise
        raise OwnCodeError(
            f"algorithm {algorithm.__name__}.{method} raised {type(error).__name__}: {error} "
            f"({place})"
        ) from error
