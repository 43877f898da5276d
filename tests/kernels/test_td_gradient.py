"""Targets and gradients of TD losses in C against float64 by autograd and against their references:
odd sizes, members apart in memory, rows that do not count, NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.stack_batch_cpu import StackBatch
from gpurl.kernels.stack_cpu import StackCpu
from gpurl.kernels.td_gradient import (
    q_target,
    q_target_reference,
    td_gradient,
    td_gradient_reference,
)
from gpurl.losses import td_loss
from gpurl.nn.mlp import BodyConfig, Dense, make_network
from gpurl.nn.optimizer import FlatAdam

pytestmark = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
SHAPES = [(1, 1, 1), (2, 5, 1), (1, 64, 2), (3, 37, 5)]


def with_member_stride(values: Tensor) -> Tensor:
    """The same [E, B, A] in the upper rows of a larger tensor, whose others are NaN."""
    members, rows, actions = values.shape
    larger = torch.full((members, rows + 3, actions), torch.nan)
    larger[:, :rows] = values
    return larger[:, :rows]


def batch(rows: int, actions: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(action, target, weight) [B], the action one column of a wider tensor, as a replay has it."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, actions, (rows, 3), generator=generator).float()
    target = 2.0 * torch.randn(rows, generator=generator)
    weight = torch.rand(rows, generator=generator)
    weight[1::4] = 0.0
    target[1::4] = torch.nan  # which does not count
    return numbers[:, 1], target, weight


def autograd(
    output: Tensor, action: Tensor, target: Tensor, weight: Tensor, is_huber: bool
) -> tuple[Tensor, ...]:
    """(loss, mean value, error, gradient) in float64 of the loss that algorithms have."""
    leaf = output.double().requires_grad_()
    index = action.long()[None, :, None].expand(len(output), -1, 1)
    value = leaf.gather(2, index).squeeze(2)
    loss, error = td_loss(value, target.double(), weight.double(), 1.0 if is_huber else None)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), value.detach().mean(), error, gradient


@pytest.mark.parametrize("is_huber", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_that_of_autograd_in_float64(
    shape: tuple[int, int, int], is_huber: bool
) -> None:
    torch.manual_seed(0)
    output = with_member_stride(2.0 * torch.randn(shape))
    action, target, weight = batch(shape[1], shape[2], seed=1)
    expected = autograd(output, action, target, weight, is_huber)
    for function in (td_gradient, td_gradient_reference):
        gradient = with_member_stride(torch.full(shape, torch.nan))
        got = function(output, action, target, weight, is_huber, gradient)
        for number, wide in zip((*got, gradient), expected):
            torch.testing.assert_close(number.double(), wide, rtol=1e-6, atol=1e-7)


def test_critics_of_one_number_need_no_action() -> None:
    output, gradient = torch.randn(2, 6, 1), torch.full((2, 6, 1), torch.nan)
    _, target, weight = batch(6, 1, seed=0)
    other = torch.full_like(gradient, torch.nan)
    td = td_gradient(output, None, target, weight, False, gradient)
    expected = td_gradient(output, torch.zeros(6), target, weight, False, other)
    assert torch.equal(gradient, other)
    for got, number in zip(td, expected):
        assert torch.equal(got, number)


def test_by_hand() -> None:
    """Errors 2, -0.5 and one that does not count: Huber gives 1.5, 0.125, and slopes 1, -0.5."""
    output = torch.tensor([[[3.0, 7.0], [7.0, 0.5], [9.0, 9.0]]])
    action, target = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, torch.inf])
    weight, gradient = torch.tensor([1.0, 0.5, 0.0]), torch.empty_like(output)
    td = td_gradient(output, action, target, weight, True, gradient)
    assert float(td.loss) == pytest.approx((1.5 + 0.5 * 0.125) / 2)
    assert td.error.tolist() == [2.0, 0.5, 0.0]
    assert float(td.value) == pytest.approx((3.0 + 0.5 + 9.0) / 3)
    assert gradient.tolist() == [[[0.5, 0.0], [0.0, -0.125], [0.0, 0.0]]]


@pytest.mark.parametrize("action", [-1.0, 2.0, 0.5, torch.nan])
def test_what_is_no_action_reads_nothing(action: float) -> None:
    output, gradient = torch.ones(1, 1, 2), torch.full((1, 1, 2), torch.nan)
    arguments = torch.tensor([action]), torch.tensor([3.0]), torch.ones(1), False, gradient
    td = td_gradient(output, *arguments)
    assert (float(td.loss), float(td.value), gradient.tolist()) == (9.0, 0.0, [[[0.0, 0.0]]])


def test_a_batch_in_which_no_row_counts_has_the_loss_and_the_gradient_0() -> None:
    output, target = torch.ones(2, 3, 2), torch.full((3,), torch.nan)
    for function in (td_gradient, td_gradient_reference):
        gradient = torch.full_like(output, torch.nan)
        td = function(output, torch.zeros(3), target, torch.zeros(3), False, gradient)
        assert float(td.loss) == 0.0
        assert not td.error.any()
        assert not gradient.any()


def test_nan_reaches_the_loss_and_the_gradient() -> None:
    for is_huber in (False, True):
        output, gradient = torch.ones(1, 2, 2), torch.zeros(1, 2, 2)
        target = torch.tensor([torch.nan, 0.0])
        td = td_gradient(output, torch.zeros(2), target, torch.ones(2), is_huber, gradient)
        assert bool(td.loss.isnan())
        assert gradient.isnan().tolist() == [[[True, True], [False, False]]]


@pytest.mark.parametrize("has_chooser", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_target_is_the_reference(shape: tuple[int, int, int], has_chooser: bool) -> None:
    torch.manual_seed(3)
    value = with_member_stride(torch.randn(shape).round(decimals=1))  # some are equal
    chooser = with_member_stride(torch.randn(shape).round(decimals=1)) if has_chooser else None
    for tensor in (value, chooser):
        if tensor is not None and shape[1] > 3:
            tensor[0, 2, -1] = torch.nan
            tensor[-1, 3, 0] = torch.nan
    reward, discount = torch.randn(shape[1]), torch.rand(shape[1])
    got = q_target(value, chooser, reward, discount)
    expected = q_target_reference(value, chooser, reward, discount)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_what_c_cannot_read_is_refused() -> None:
    output, rows = torch.zeros(2, 4, 3), torch.zeros(4)
    cases: list[tuple[Any, ...]] = [
        (output.double(), rows, rows),
        (output.transpose(1, 2), rows, rows),
        (output, rows[:3], rows),
        (output, rows, rows.double()),
        (output, torch.zeros(4, 2)[:, 0], rows),
    ]
    for values, target, weight in cases:
        with pytest.raises(AssertionError):
            td_gradient(values, rows, target, weight, True, torch.empty_like(values))
        with pytest.raises(AssertionError):
            q_target(values, None, target, weight)
    with pytest.raises(AssertionError):
        q_target(output, output[:1], rows, rows)
    with pytest.raises(AssertionError):
        td_gradient(output, None, rows, rows, True, torch.empty_like(output))
    with pytest.raises(AssertionError):
        td_gradient(output, rows.long(), rows, rows, True, torch.empty_like(output))


@pytest.mark.parametrize("members", [1, 3])
def test_a_stack_with_a_batch_gives_what_the_stack_gives(members: int) -> None:
    torch.manual_seed(0)
    network = make_network(members, 5, 2, BodyConfig(hidden=(9, 17)))
    FlatAdam(network, 1e-3)  # gradients have their place now
    layers = [
        (each.weight, each.bias, each.activation)
        for each in network.modules()
        if isinstance(each, Dense)
    ]
    stack, bound = StackCpu(layers), StackBatch(layers, torch.zeros(11, 5))
    for _ in range(2):
        x, gradient = torch.randn(11, 5), torch.randn(members, 11, 2)
        y, hidden = stack.forward(x, keep_hidden=True)
        assert hidden is not None
        by_input, by_weights = stack.backward(gradient, x, y, hidden, True, True)
        assert by_input is not None
        bound.x.copy_(x)
        assert torch.equal(bound.run(), y)
        bound.gradient.copy_(gradient)
        bound.differentiate(by_input=True)
        assert torch.equal(bound.input_gradient, by_input)
        assert not torch.equal(network.layers[0].weight.grad, by_weights[0])  # type: ignore[arg-type]
        bound.differentiate(by_weights=True)
        for parameter, other in zip(stack.parameters, by_weights, strict=True):
            assert other is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, other)
        network.share_memory()  # moves weights and gradients; the stack follows them
