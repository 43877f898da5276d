"""Triton where it is installed, else stand-ins: every file with a kernel can be imported, on macOS
too, and launching one says what is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["is_installed", "tl", "triton"]


class _Unavailable:
    """A kernel without Triton."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: object) -> Callable[..., object]:
        raise RuntimeError(
            f"kernel {self.__name__} needs Triton, which is not installed (pip install triton, on "
            f"Linux only); GPURL_BACKEND=torch computes the same without it"
        )


class _Triton:
    """What kernels use of `triton` outside of a kernel."""

    @staticmethod
    def jit(function: Callable[..., object] | None = None, **options: object) -> object:
        return _Triton.jit if function is None else _Unavailable(function)

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class _Constant:
    """A constant of kernels, which the host reads too."""

    value: object


class _Language:
    """What kernels use of `triton.language` outside of a kernel: annotations and constants."""

    constexpr = _Constant


try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    # one that is installed, but cannot be imported, is no reason to compute in another way
    if error.name != "triton":
        raise
    triton = _Triton
    tl = _Language
is_installed = triton is not _Triton
