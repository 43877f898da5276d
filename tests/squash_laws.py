"""What every form of the squashed draws and of their way back must do: the reference and C, in
tests/kernels/test_squash.py, and Triton.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpurl.kernels.squash import (
    LOG_STD_LIMITS,
    Squashed,
    squashed_backward_reference,
    squashed_sample_reference,
)

Sample, Backward = (
    Callable[[Tensor, Tensor], Squashed],
    Callable[[Squashed, Tensor, Tensor], Tensor],
)
SIZES = [(1, 1), (5, 3), (33, 8), (70, 21), (300, 1), (3, 300)]  # B, A
GUARD = 64  # numbers before and behind


class GuardedMemory:
    """Stands for `torch.empty`: gives memory with a band before and behind, and tells whether these
    are untouched.
    """

    def __init__(self) -> None:
        self.bands = list[Tensor]()

    def __call__(
        self, *size: Any, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> Tensor:
        shape = size if isinstance(size[0], int) else tuple(size[0])
        count, width = math.prod(shape), dtype.itemsize
        memory = torch.full(
            ((count + 2 * GUARD) * width,), 0xFF, dtype=torch.uint8, device=device
        )  # NaN, as floats
        start, end = memory[: GUARD * width], memory[(count + GUARD) * width :]
        self.bands += [start, end]
        return memory[GUARD * width : (count + GUARD) * width].view(dtype).view(shape)

    def assert_untouched(self) -> None:
        assert self.bands
        assert all(bool((band == 0xFF).all()) for band in self.bands)


def inputs(rows: int, actions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(output [B, 2A], noise [B, A]); log standard deviations within their limits, on them and
    beyond.
    """
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(rows, 2 * actions, generator=generator) * 3.0
    output[0, actions] = LOG_STD_LIMITS[rows % 2]
    return output, torch.randn(rows, actions, generator=generator)


def draws_are_those_of_float64(sample: Sample, rows: int, actions: int) -> None:
    output, noise = inputs(rows, actions)
    got, expected = (
        sample(output, noise),
        squashed_sample_reference(output.double(), noise.double()),
    )
    assert [tensor.dtype for tensor in got] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.bool,
    ]
    assert torch.equal(got.is_free, expected.is_free)
    assert bool(got.is_free[0, 0])
    torch.testing.assert_close(got.action.double(), expected.action, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(got.log_prob.double(), expected.log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.step.double(), expected.step, rtol=2e-6, atol=1e-7)


def the_way_back_is_that_of_float64(backward: Backward, rows: int, actions: int) -> None:
    """The slope by the action lies, as a critic's gradient by it does, between columns of a wider
    matrix; that by the log-probability is of each row, or one number for all.
    """
    drawn = squashed_sample_reference(*inputs(rows, actions))
    wide = torch.full((rows, actions + 7), torch.nan)
    slope, each = wide[:, 5 : 5 + actions], inputs(rows, 1, seed=2)[1].squeeze(1)
    slope.copy_(inputs(rows, actions, seed=1)[1])
    doubles = Squashed(drawn.action.double(), drawn.log_prob, drawn.step.double(), drawn.is_free)
    for of_log_prob in (each, torch.tensor(0.37).expand(rows)):
        expected = squashed_backward_reference(doubles, slope.double(), of_log_prob.double())
        for form in (slope, slope.t().contiguous().t()):
            got = backward(drawn, form, of_log_prob)
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def what_is_not_finite_goes_through(sample: Sample, backward: Backward) -> None:
    """As in the reference, every one with every other; and by name where that matters."""
    table = torch.tensor(
        list(itertools.product((math.nan, math.inf, -math.inf, 1e30, 0.5), repeat=3))
    )
    drawn, expected = (
        sample(table[:, :2], table[:, 2:]),
        squashed_sample_reference(table[:, :2], table[:, 2:]),
    )
    for got, want in zip(drawn, expected):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    slope = table.flip(0)[:, 1:2]
    for number in (math.nan, math.inf, -1.0):
        got, want = (
            way_back(expected, slope, torch.full((len(slope),), number))
            for way_back in (backward, squashed_backward_reference)
        )
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=1e-5, equal_nan=True
        )  # 1 - a^2 loses digits near 1
    far = sample(torch.tensor([[math.inf, 0.0], [-math.inf, 0.0]]), torch.zeros(2, 1))
    assert far.action.flatten().tolist() == [1.0, -1.0]
    assert far.log_prob.tolist() == [math.inf, math.inf]


def a_broken_row_stays_in_itself(sample: Sample, backward: Backward) -> None:
    for place in range(9):
        output, noise = inputs(11, 3)
        (output if place < 6 else noise)[4, place % 6] = math.nan
        drawn = sample(output, noise)
        gradient = backward(drawn, torch.ones(11, 3), torch.full((11,), 0.5))
        assert (
            drawn.log_prob.isnan().tolist()
            == gradient.isnan().any(1).tolist()
            == [row == 4 for row in range(11)]
        )
        assert int(drawn.action.isnan().sum()) == 1
        assert bool(drawn.action[4, place % 3].isnan())


def rows_do_not_depend_on_their_batch(
    sample: Sample, backward: Backward, tolerance: float = 0.0
) -> None:
    output, noise = inputs(29, 5)
    many, of_log_prob = sample(output, noise), noise[:, 0].clone()
    gradient = backward(many, noise, of_log_prob)
    for rows in (slice(0, 1), slice(3, 9), slice(7, 29)):
        few = sample(output[rows], noise[rows])
        of_few = backward(few, noise[rows], of_log_prob[rows])
        for one, other in zip((*few, of_few), (*many, gradient), strict=True):
            torch.testing.assert_close(one, other[rows], rtol=tolerance, atol=tolerance)


def other_limits_apply(sample: Callable[..., Squashed]) -> None:
    """Limits that are given take the place of LOG_STD_LIMITS."""
    log_std = torch.tensor([[-12.0], [-10.0], [-7.0], [1.0], [1.5], [3.0]])
    output, noise = torch.cat((torch.zeros(6, 1), log_std), 1), torch.ones(6, 1)
    got = sample(output, noise, (-10.0, 1.0))
    torch.testing.assert_close(got.step, log_std.clamp(-10.0, 1.0).exp())
    assert got.is_free.flatten().tolist() == [False, True, True, True, False, False]
