"""What every form of the linear recurrence and of its gradient must do: the reference and C, in
tests/kernels/test_linear_scan.py, and Triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpurl.kernels.linear_scan import Gradients

Scan = Callable[[Tensor, Tensor, Tensor], Tensor]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor], Gradients]
# [T, ...]; more steps and columns than a tile of Triton in each of its forms
SHAPES = [(1, 1), (5, 3), (9, 4, 5), (300, 3), (70, 33), (17, 1030)]
MORE_THAN_A_BLOCK_OF_C = (3, 2100)


def inputs(shape: tuple[int, ...], share_of_starts: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """(a in [0, 1), 0 at starts of episodes; b; the initial state)."""
    generator = torch.Generator().manual_seed(shape[0])
    a = torch.rand(shape, generator=generator)
    starts = torch.rand(shape, generator=generator) < share_of_starts
    b, initial = (torch.randn(each, generator=generator) for each in (shape, shape[1:]))
    return a.masked_fill(starts, 0.0), b, initial


def states_are_those_of_a_loop(scan: Scan, shape: tuple[int, ...]) -> None:
    """In float64, one number at a time."""
    a, b, initial = inputs(shape)
    steps, columns = shape[0], initial.numel()
    rows = [each.double().reshape(-1, columns).tolist() for each in (a, b)]
    expected = []
    for n, state in enumerate(initial.double().flatten().tolist()):
        column = []
        for t in range(steps):
            state = rows[0][t][n] * state + rows[1][t][n]
            column.append(state)
        expected.append(column)
    got = scan(a, b, initial)
    assert got.shape == shape
    wanted = torch.tensor(expected, dtype=torch.float64).t().reshape(shape)
    torch.testing.assert_close(got.double().cpu(), wanted.cpu(), rtol=2e-6, atol=2e-6)


def gradients_are_those_of_autograd(scan: Scan, backward: Backward, shape: tuple[int, ...]) -> None:
    """Of a loop in float64 that multiplies where the kernels select."""
    arguments = inputs(shape)
    of_state = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    a, b, initial = (each.double().requires_grad_() for each in arguments)
    state, states = initial, []
    for t in range(shape[0]):
        state = a[t] * state + b[t]
        states.append(state)
    expected = torch.autograd.grad(torch.stack(states), (a, b, initial), of_state.double())
    got = backward(arguments[0], arguments[2], scan(*arguments), of_state)
    for mine, other in zip(got, expected, strict=True):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine.double(), other, rtol=5e-6, atol=5e-6)


def an_episode_that_is_not_finite_stays_in_itself(scan: Scan, backward: Backward) -> None:
    """Forward and backward, NaN and infinity pass no row where a is 0."""
    a, b, initial = inputs((12, 4), 0.0)
    a[5] = 0.0
    initial[0] = torch.nan
    b[2, 1] = torch.inf
    a[3, 2] = torch.nan
    a[9, 3] = torch.nan
    state = scan(a, b, initial)
    is_finite = state.isfinite().cpu()
    assert is_finite[5:, :3].all()
    assert not is_finite[0, 0]
    assert not is_finite[4, :3].any()
    assert not is_finite[9:, 3].any()
    assert is_finite[:9, 3].all()
    of_state = torch.ones_like(state)
    of_state[7, 0] = torch.nan
    _, b_gradient, initial_gradient = backward(a, initial, state, of_state)
    is_finite = b_gradient.isfinite().cpu()
    assert is_finite[:5, 0].all()
    assert not is_finite[5:8, 0].any()
    assert is_finite[8:, 0].all()
    assert bool(initial_gradient[0].isfinite())
    # nor does the gradient of the first step reach an initial state that does not count
    a[0] = 0.0
    of_state[0] = torch.nan
    initial_gradient = backward(a, initial, scan(a, b, initial), of_state)[2]
    assert initial_gradient.tolist() == [0.0] * 4


def by_hand(scan: Scan, backward: Backward) -> None:
    """Two steps, a start, two steps."""
    a = torch.tensor([[0.5], [2.0], [0.0], [3.0]])
    b = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    initial = torch.tensor([4.0])
    state = scan(a, b, initial)
    assert state.flatten().tolist() == [3.0, 8.0, 3.0, 13.0]
    gradients = backward(a, initial, state, torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
    a_gradient, b_gradient, initial_gradient = (each.flatten().tolist() for each in gradients)
    assert b_gradient == [21.0, 10.0, 3100.0, 1000.0]
    assert a_gradient == [84.0, 30.0, 24800.0, 3000.0]
    assert initial_gradient == [10.5]
