"""Flat Adam in Triton against the reference, torch.optim and float64; clip, decay, target update,
and a gradient that is not finite.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import adam as module
from gpurl.kernels import c_library
from gpurl.kernels.adam import (
    LARGEST_NORM,
    MAX_LOSSES,
    AdamOptions,
    AdamState,
    SkippedSteps,
    adam_step,
    adam_step_c,
    adam_step_reference,
    adam_step_triton,
)
from tests.kernels.triton.conftest import COMPILED_ON, Counted

# C computes on the CPU, where there is a library, and not once more beside a GPU
IN_C = pytest.param(
    adam_step_c,
    marks=[
        pytest.mark.host,
        pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why),
        pytest.mark.skipif(COMPILED_ON is not None, reason="GPURL_KERNEL_DEVICE"),
    ],
)
FUNCTIONS = [adam_step_reference, adam_step_triton, IN_C]
SIZES = [1, 5, 1024, 2500]
GUARD = 64


class Flat:
    """The arrays of one optimiser, each between NaN on both sides."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.memory = torch.full((4, size + 2 * GUARD), torch.nan)
        self.parameters, self.exp_avg, self.exp_avg_sq, self.target = self.memory[
            :, GUARD : GUARD + size
        ]
        self.memory[:, GUARD : GUARD + size] = 0.0
        self.parameters.copy_(torch.randn(size, generator=generator))
        self.target.copy_(torch.randn(size, generator=generator))
        self.step = torch.tensor(0)
        self.skipped = SkippedSteps(
            torch.zeros(5, dtype=torch.int64),
            torch.full((size,), 9.0),
            torch.full((MAX_LOSSES,), 9.0),
        )

    def apply(
        self,
        function: Any,
        gradient: Tensor,
        learning_rate: float = 1e-2,
        losses: Tensor | None = None,
        notes: bool = True,
        **options: Any,
    ) -> Tensor:
        target = self.target if "tau" in options else None
        state = AdamState(
            self.parameters,
            self.exp_avg,
            self.exp_avg_sq,
            self.step,
            target,
            self.skipped if notes else None,
        )
        return function(
            state, gradient, torch.tensor(learning_rate), AdamOptions(**options), losses
        )

    def assert_guarded(self) -> None:
        assert bool(self.memory[:, :GUARD].isnan().all())
        assert bool(self.memory[:, -GUARD:].isnan().all())


def gradients(size: int, count: int) -> list[Tensor]:
    """Magnitudes from 1e-3 to 10."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(size, generator=generator) * 10.0 ** (k % 5 - 3) for k in range(count)]


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_torch_optim_in_float64(
    function: Any, size: int, weight_decay: float, decoupled: bool, max_grad_norm: float | None
) -> None:
    flat = Flat(size)
    peer = torch.nn.Parameter(flat.parameters.double())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([peer], lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=weight_decay)
    for gradient in gradients(size, 6):
        options = {
            "betas": (0.8, 0.99),
            "eps": 1e-6,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
            "max_grad_norm": max_grad_norm,
        }
        norm = flat.apply(function, gradient.clone(), **options)
        peer.grad = gradient.double()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([peer], max_grad_norm)
        optimizer.step()
        torch.testing.assert_close(norm.double(), gradient.double().norm(), rtol=1e-6, atol=0.0)
        torch.testing.assert_close(flat.parameters.double(), peer.detach(), rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(
            flat.exp_avg_sq.double(), optimizer.state[peer]["exp_avg_sq"], rtol=3e-6, atol=1e-12
        )
    assert int(flat.step) == 6
    flat.assert_guarded()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_by_hand(function: Any) -> None:
    flat = Flat(1)
    flat.parameters.fill_(1.0)
    flat.target.fill_(3.0)
    norm = flat.apply(
        function,
        torch.tensor([4.0]),
        learning_rate=0.5,
        betas=(0.5, 0.75),
        eps=0.0,
        max_grad_norm=2.0,
        tau=0.25,
    )
    # clipped to 2; m = 1, corrected 2; v = 1, corrected 4; step 0.5 * 2 / 2; target 3 + 0.25 (0.5 -
    # 3)
    assert float(norm) == 4.0
    assert float(flat.parameters) == pytest.approx(0.5, abs=1e-6)
    assert (float(flat.exp_avg), float(flat.exp_avg_sq)) == pytest.approx((1.0, 1.0), abs=1e-6)
    assert float(flat.target) == pytest.approx(2.375, abs=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_late_steps_have_exact_bias_corrections(function: Any) -> None:
    for start in (0, 1000, 10**7):
        flat = Flat(3)
        flat.parameters.zero_()
        flat.step.fill_(start)
        flat.apply(function, torch.tensor([1.0, 2.0, -3.0]), learning_rate=1.0, eps=0.0)
        count = start + 1
        expected = (1 - 0.9) / (1 - 0.9**count) / ((1 - 0.999) / (1 - 0.999**count)) ** 0.5
        torch.testing.assert_close(
            flat.parameters, torch.tensor([-1.0, -1.0, 1.0]) * expected, rtol=1e-6, atol=0.0
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_that_is_not_finite_changes_nothing(function: Any, bad: float) -> None:
    flat = Flat(1500)
    for gradient in gradients(1500, 2):
        flat.apply(function, gradient, tau=0.1, max_grad_norm=1.0)
    before = flat.memory.clone()
    gradient = torch.ones(1500)
    gradient[1200] = bad
    assert not bool(
        flat.apply(function, gradient, tau=0.1, max_grad_norm=1.0, weight_decay=0.1).isfinite()
    )
    assert torch.equal(flat.memory.nan_to_num(), before.nan_to_num())
    assert int(flat.step) == 2
    assert flat.skipped.counts.tolist() == [3, 1, 1, 1, 3]
    torch.testing.assert_close(flat.skipped.gradient, gradient, equal_nan=True)
    flat.apply(function, gradient, notes=False)
    assert flat.skipped.counts.tolist() == [3, 1, 1, 1, 3]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_loss_that_is_not_finite_changes_nothing_and_the_first_is_kept(function: Any) -> None:
    """Of what is left out the first is kept, and how many there were in a row at most."""
    flat = Flat(1100)
    given = {"tau": 0.1, "max_grad_norm": 1.0}
    flat.apply(function, torch.ones(1100), losses=torch.tensor([1.0, 2.0]), **given)
    before = flat.memory.clone()
    first, second = torch.tensor([3.0, torch.inf]), torch.tensor([torch.nan, 4.0])
    assert not bool(
        flat.apply(function, torch.full((1100,), 5.0), losses=first, **given).isfinite()
    )
    flat.apply(function, torch.full((1100,), 6.0), losses=second, **given)
    assert torch.equal(flat.memory.nan_to_num(), before.nan_to_num())
    assert flat.skipped.counts.tolist() == [3, 2, 2, 2, 2]
    flat.apply(function, torch.ones(1100), losses=torch.ones(2), **given)
    flat.apply(function, torch.full((1100,), torch.nan), **given)
    assert flat.skipped.counts.tolist() == [5, 3, 1, 2, 2]
    assert int(flat.step) == 2
    assert torch.equal(flat.skipped.gradient, torch.full((1100,), 5.0))
    assert flat.skipped.losses.tolist() == [3.0, torch.inf, *[9.0] * 6]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_gradient_whose_squares_overflow_is_left_out_unless_it_is_clipped(function: Any) -> None:
    """An infinite second moment would hold its parameter still for good."""
    huge = torch.full((1100,), 2e19)
    for options, steps in (({}, 0), ({"max_grad_norm": 1.0}, 1)):
        flat = Flat(1100)
        norm = flat.apply(function, huge, **options)
        assert (int(flat.step), bool(norm.isfinite())) == (steps, bool(steps))
        flat.apply(function, torch.full((1100,), LARGEST_NORM / 40.0), **options)
        assert bool(flat.exp_avg_sq.isfinite().all())
        assert int(flat.step) == steps + 1


def test_the_largest_norm_is_taken_in() -> None:
    """These float32 numbers have a norm of exactly that in float64."""
    gradient = torch.zeros(70)
    gradient[:4] = torch.tensor(
        [9.999999843067494e17, 177162351017984.0, 47492128768.0, 14680043.0]
    )
    assert float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) == LARGEST_NORM
    flat = Flat(70)
    flat.apply(adam_step_reference, gradient)
    assert int(flat.step) == 1


@pytest.mark.parametrize(
    "losses",
    [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(MAX_LOSSES + 1), torch.zeros(4)[::2]],
    ids=["bf16", "too many", "strided"],
)
def test_losses_that_the_kernels_would_misread_are_refused(losses: Tensor) -> None:
    """Of bf16 a NaN reads as a finite float, and more than MAX_LOSSES have no place."""
    flat = Flat(70)
    before = flat.memory.clone()
    with pytest.raises(AssertionError, match=str(losses.dtype)):
        flat.apply(adam_step, torch.ones(70), losses=losses)
    assert torch.equal(flat.memory.nan_to_num(), before.nan_to_num())


def test_as_many_losses_as_there_is_room_for() -> None:
    losses = torch.ones(MAX_LOSSES)
    losses[-1] = torch.nan
    flat = Flat(70)
    assert not bool(flat.apply(adam_step, torch.ones(70), losses=losses).isfinite())
    assert flat.skipped.losses.isfinite().tolist() == [True] * (MAX_LOSSES - 1) + [False]


def test_no_target_without_tau() -> None:
    flat = Flat(70)
    before = flat.target.clone()
    flat.apply(adam_step_triton, torch.ones(70))
    assert torch.equal(flat.target, before)


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(
        module,
        "adam_step_triton",
        lambda *arguments: launched.append(1) or adam_step_triton(*arguments),
    )
    for backend in ("torch", "triton"):
        monkeypatch.setattr("gpurl.kernels.backend.choice", backend)
        flat, expected = Flat(100), Flat(100)
        flat.apply(adam_step, torch.ones(100), tau=0.5)
        expected.apply(adam_step_reference, torch.ones(100), tau=0.5)
        torch.testing.assert_close(
            flat.memory, expected.memory, rtol=1e-6, atol=1e-6, equal_nan=True
        )
        assert len(launched) == (backend == "triton")


@pytest.mark.parametrize("has_target", [True, False])
def test_members_of_a_stack_step_in_the_same_two_launches(
    has_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as alone, to the bit, though the memory of one member lies between the others'."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    size, options = 1100, AdamOptions(max_grad_norm=1.0, weight_decay=0.1, tau=0.1)
    alone = [Flat(size) for _ in range(3)]
    for k, flat in enumerate(alone):
        flat.parameters.add_(k)
    ticket = torch.zeros(3, 1, dtype=torch.int32)

    def states(flats: list[Flat]) -> list[AdamState]:
        return [
            AdamState(
                each.parameters,
                each.exp_avg,
                each.exp_avg_sq,
                each.step,
                each.target if has_target else None,
                each.skipped,
                ticket[k],
            )
            for k, each in enumerate(flats)
        ]

    # [3, ...] of all their tensors, with the guards of each
    memory = torch.stack([flat.memory for flat in alone])
    arrays = memory[:, :, GUARD : GUARD + size].unbind(1)
    step = torch.zeros(3, 7, dtype=torch.int64)[:, 4]
    counts, first, losses_kept = (
        torch.stack([flat.skipped[n] for flat in alone]) for n in range(3)
    )
    rates = torch.tensor([1e-2, 1e-3, 1e-1])

    def stepped(parameters, exp_avg, exp_avg_sq, target, step, counts, first, kept, ticket, *given):  # type: ignore[no-untyped-def]
        skipped = SkippedSteps(counts, first, kept)
        target = target if has_target else None
        state = AdamState(parameters, exp_avg, exp_avg_sq, step, target, skipped, ticket)
        gradient, rate, losses = given
        return adam_step(state, gradient, rate, options, losses)

    launched = []
    for name in ("norm_kernel", "adam_kernel"):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, Counted(kernel, launched))
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        gradient = torch.randn(3, size, generator=generator)
        losses = torch.ones(3, 2)
        if number == 1:
            gradient[0, 700] = torch.nan
            losses[2, 1] = torch.inf
        del launched[:]
        tensors = (*arrays, step, counts, first, losses_kept, ticket)
        # the same rate for all in the last step
        is_last = number == 2
        rates = torch.tensor(1e-2).expand(3) if is_last else rates
        dims = (*[0] * len(tensors), 0, None if is_last else 0, 0)
        given = (gradient, rates[0] if is_last else rates, losses)
        norms = torch.func.vmap(stepped, in_dims=dims)(*tensors, *given)
        assert launched == [(2, 3), (2, 3)]
        for k, state in enumerate(states(alone)):
            norm = adam_step_triton(state, gradient[k], rates[k], options, losses[k])
            torch.testing.assert_close(norms[k], norm, rtol=0.0, atol=0.0, equal_nan=True)
    for k, flat in enumerate(alone):
        torch.testing.assert_close(memory[k], flat.memory, rtol=0.0, atol=0.0, equal_nan=True)
        assert int(step[k]) == int(flat.step)
        for got, expected in zip((counts, first, losses_kept), flat.skipped):
            torch.testing.assert_close(got[k], expected, rtol=0.0, atol=0.0, equal_nan=True)
    assert counts[:, 1].tolist() == [1, 0, 1]
    assert not ticket.any()
