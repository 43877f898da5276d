"""Batch norms of stacked members against torch's own of one member, in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gpurl.nn.batch_norm import EPSILON, MOMENTUM, BatchNorm, batch_statistics
from gpurl.nn.ranks import Alone
from tests.thread_ranks import together

MEMBERS, ROWS, SIZE = 3, 6, 4
pytestmark = pytest.mark.usefixtures("_in_float64")


def make(activation: str = "none") -> BatchNorm:
    torch.manual_seed(0)
    norm = BatchNorm(MEMBERS, SIZE, activation)
    for parameter in norm.parameters():
        parameter.data += torch.randn_like(parameter)
    return norm


def inputs(seed: int = 1, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (MEMBERS, ROWS, SIZE)
    return torch.randn(*shape, generator=generator) * torch.linspace(0.1, 30.0, SIZE) + 5.0


def torchs(norm: BatchNorm, x: Tensor, running: tuple[Tensor, Tensor], batch: bool) -> Tensor:
    """[E, B, D] by torch, one member after the other; moves `running`, each [E, D]."""
    outputs = [
        functional.batch_norm(rows, mean, variance, gain[0], shift[0], batch, MOMENTUM, EPSILON)
        for rows, mean, variance, gain, shift in zip(
            x.expand(MEMBERS, -1, -1), *running, norm.gain, norm.shift
        )
    ]
    return torch.stack(outputs)


@pytest.mark.parametrize("shared", [False, True])
def test_outputs_gradients_and_running_statistics_are_torchs(shared: bool) -> None:
    norm = make()
    running = torch.zeros(MEMBERS, SIZE), torch.ones(MEMBERS, SIZE)
    for step in range(3):
        x = inputs(step, ROWS, SIZE) if shared else inputs(step)
        x.requires_grad_()
        with batch_statistics(norm):
            y = norm(x)
        expected = torchs(norm, x, running, batch=True)
        torch.testing.assert_close(y, expected)
        of = (x, norm.gain, norm.shift)
        weight = inputs(step + 9)
        got = torch.autograd.grad((y * weight).sum(), of)
        for each, wanted in zip(got, torch.autograd.grad((expected * weight).sum(), of)):
            torch.testing.assert_close(each, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norm.running_mean.squeeze(1), running[0])
    torch.testing.assert_close(norm.running_variance.squeeze(1), running[1])
    # acting
    torch.testing.assert_close(norm(x), torchs(norm, x, running, batch=False))


def test_a_batch_is_normalised_by_its_mean_and_variance() -> None:
    """By the formula, with autograd's own derivatives: one process computes in torch."""
    norm, x, weight = make(), inputs().requires_grad_(), inputs(9)
    of = (x, norm.gain, norm.shift)
    with batch_statistics(norm):
        y = norm(x)
    deviation = x - x.mean(1, keepdim=True)
    variance = deviation.square().mean(1, keepdim=True)
    expected = norm.gain * deviation / (variance + 1e-5).sqrt() + norm.shift
    torch.testing.assert_close(y, expected)
    got = torch.autograd.grad((y * weight).sum(), of)
    for each, wanted in zip(got, torch.autograd.grad((expected * weight).sum(), of)):
        torch.testing.assert_close(each, wanted, rtol=1e-9, atol=1e-9)
    unbiased = variance * (ROWS / (ROWS - 1))
    torch.testing.assert_close(norm.running_mean, 0.01 * x.mean(1, keepdim=True))
    torch.testing.assert_close(norm.running_variance, 0.99 + 0.01 * unbiased)


@pytest.mark.parametrize("shape", [(MEMBERS, ROWS, SIZE), (ROWS, SIZE)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_inputs_may_be_views(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Transposed, or some rows and columns of a larger tensor: as a copy of them."""
    norm = make().to(torch.float64 if dtype == torch.float64 else torch.float32)
    large = torch.randn(*shape[:-2], 2 * ROWS, 2 * SIZE).to(dtype)
    views = inputs(1, *shape).to(dtype).mT.contiguous().mT, large[..., 1 : ROWS + 1, 1 : SIZE + 1]
    weight = inputs(9).to(dtype)
    for view in views:
        assert not view.is_contiguous()
        results = []
        for x in (view.clone(memory_format=torch.contiguous_format), view):
            x = x.detach().requires_grad_()
            norm.running_mean.zero_()
            with batch_statistics(norm):
                y = norm(x)
            gradients = torch.autograd.grad((y * weight).sum(), (x, norm.gain, norm.shift))
            results.append((y, *gradients, norm.running_mean.clone()))
        for copied, viewed in zip(*results):
            assert torch.equal(copied, viewed)


def test_a_column_far_from_zero_keeps_its_digits() -> None:
    """In float32; the second column is constant."""
    norm = BatchNorm(MEMBERS, 2).float()
    exact = BatchNorm(MEMBERS, 2).double()
    x = 1e4 + torch.randn(512, 2)
    x[:, 1] = 1000.3
    x = x.float()
    with batch_statistics(norm, exact):
        y, expected = norm(x), exact(x.double())
    assert (y - expected).abs().max() < 1e-5
    torch.testing.assert_close(norm.running_mean.double(), exact.running_mean)


def test_rows_in_bf16_are_rounded_once() -> None:
    """The result is that of float32, of the same numbers, to the nearest of bf16."""
    norm = BatchNorm(1, SIZE).float()
    x = (torch.randn(512, SIZE) + 5.0).bfloat16()
    with batch_statistics(norm):
        torch.testing.assert_close(
            norm(x).double(), norm(x.float()).double(), rtol=2**-8, atol=2**-12
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_compute_in_the_precision_of_one_process(dtype: torch.dtype) -> None:
    norms = [make().float() for _ in range(3)]
    x = inputs().to(dtype)

    def results(ranks: Alone) -> list[Tensor]:
        norm = norms.pop()
        norm.ranks = ranks
        mine = x.chunk(ranks.count, 1)[ranks.index].clone().requires_grad_()
        with batch_statistics(norm):
            y = norm(mine)
        assert y.dtype == dtype
        (gradient,) = torch.autograd.grad(y.float().square().mean(), mine)
        assert gradient.dtype == dtype
        return [y.detach().float(), norm.running_mean, norm.running_variance]

    y, *running = results(Alone())
    of_ranks = together(2, results)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    got = torch.cat([each[0] for each in of_ranks], 1)
    torch.testing.assert_close(got, y, rtol=tolerance, atol=tolerance)
    for index, expected in enumerate(running, start=1):
        torch.testing.assert_close(of_ranks[0][index], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_of_ranks_is_the_rows_of_all(shared: bool) -> None:
    """Each has the gradient of its own loss, and the mean over ranks is that of the whole."""
    x = inputs(1, ROWS, SIZE) if shared else inputs()
    weight = inputs(9)
    norms = [make() for _ in range(4)]  # not by the threads, which share torch's generator

    def results(ranks: Alone) -> list[Tensor]:
        norm = norms.pop()
        norm.ranks = ranks
        mine, factor = (each.chunk(ranks.count, -2)[ranks.index] for each in (x, weight))
        mine = mine.clone().requires_grad_()
        with batch_statistics(norm):
            y = norm(mine)
        loss = (y * factor).mean()
        gradients = torch.autograd.grad(loss, (mine, norm.gain, norm.shift))
        return [y.detach(), *gradients, norm.running_mean, norm.running_variance]

    y, of_x, *others = results(Alone())
    of_ranks = together(3, results)
    torch.testing.assert_close(torch.cat([each[0] for each in of_ranks], 1), y)
    torch.testing.assert_close(torch.cat([each[1] for each in of_ranks], -2) / 3, of_x)
    for index, expected in enumerate(others, start=2):
        parts = torch.stack([each[index] for each in of_ranks])
        torch.testing.assert_close(parts.mean(0), expected)
        if index >= 4:  # the running ones, of the same bits
            assert (parts == parts[0]).all()


def test_parameters_have_a_gradient_where_the_input_needs_none() -> None:
    norm = make()
    with batch_statistics(norm):
        of_gain, of_shift = torch.autograd.grad(norm(inputs()).sum(), list(norm.parameters()))
    torch.testing.assert_close(of_gain, torch.zeros_like(of_gain), atol=1e-12, rtol=0)
    assert (of_shift == ROWS).all()


def test_acting_rows_do_not_depend_on_each_other_and_change_nothing() -> None:
    norm, x = make("relu"), inputs()
    with batch_statistics(norm):
        norm(x)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    together = norm(x)
    assert (together >= 0).all()
    torch.testing.assert_close(norm(x[:, 2:3]), together[:, 2:3])
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_the_statistics_are_the_batchs_inside_the_block_only() -> None:
    norm, other = make(), make()

    def stop() -> None:
        with batch_statistics(norm):
            assert norm.uses_batch
            assert not other.uses_batch
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop()
    assert not norm.uses_batch


def test_nan_and_infinity_do_not_stay_in_running_statistics() -> None:
    norm, x = make(), inputs()
    x[:, 1, 0], x[0, 2, 1] = torch.nan, torch.inf
    with batch_statistics(norm):
        norm(x)
    moved = norm.running_mean.squeeze(1) != 0.0
    assert moved.tolist() == [[False, False, True, True], *[[False, True, True, True]] * 2]
    assert norm.running_variance.isfinite().all()
    assert ((norm.running_variance.squeeze(1) != 1.0) == moved).all()


def test_a_batch_of_one_row_is_its_shift() -> None:
    norm = make()
    with batch_statistics(norm):
        y = norm(inputs(0, MEMBERS, 1, SIZE))
    torch.testing.assert_close(y, norm.shift)
    # a variance takes two rows
    assert (norm.running_variance == 1.0).all()
    assert (norm.running_mean != 0.0).all()


def test_a_block_may_leave_the_running_statistics_alone() -> None:
    norm = make()
    with batch_statistics(norm):
        expected = norm(inputs())
    moved = norm.running_mean.clone()
    with batch_statistics(norm, tracks=False):
        torch.testing.assert_close(norm(inputs()), expected)
    assert torch.equal(norm.running_mean, moved)


def test_a_second_derivative_is_refused() -> None:
    norm = make()
    x = inputs().requires_grad_()
    with batch_statistics(norm), pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(norm(x).sum(), x, create_graph=True)
