"""Streams in which a chosen word has chosen bits: a test aims a draw at any number, the first and
the last included.
"""

import torch

from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.random import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

SPAN = 1 << 64


def unshifted(z: int, shift: int) -> int:
    """x of z = x ^ (x >> shift)."""
    x = z
    for _ in range(64 // shift):
        x = z ^ (x >> shift)
    return x


def unmixed(word: int) -> int:
    """The number that mix13 of gpurl.kernels.random makes `word` of."""
    z = unshifted(word, 31) * pow(MULTIPLIER_2, -1, SPAN) % SPAN
    return unshifted(unshifted(z, 27) * pow(MULTIPLIER_1, -1, SPAN) % SPAN, 30)


def aimed(uniform: float, number: int = 0) -> RandomStreams:
    """A stream whose word `number` of step 0 gives u = `uniform` in [0, 1), rounded down to 53
    bits.
    """
    key = (unmixed(int(uniform * 2.0**53) << 11) - number * GOLDEN) % SPAN
    return RandomStreams(
        torch.tensor([key - SPAN * (key >= SPAN // 2)]), torch.tensor([GOLDEN]), torch.tensor(0)
    )
