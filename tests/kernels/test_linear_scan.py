"""The linear recurrence and its gradient: the reference and C, autograd in float64, and which form
is called.
"""

import pytest
import torch

from gpurl.kernels import backend, c_library
from gpurl.kernels import linear_scan as module
from gpurl.kernels.linear_scan import (
    linear_scan,
    linear_scan_backward_c,
    linear_scan_backward_reference,
    linear_scan_c,
    linear_scan_reference,
)
from tests import scan_laws
from tests.scan_laws import Backward, Scan, inputs
from tests.squash_laws import GuardedMemory

needs_c = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)
SHAPES = [*scan_laws.SHAPES, scan_laws.MORE_THAN_A_BLOCK_OF_C]
FORMS = pytest.mark.parametrize(
    ("scan", "backward"),
    [
        pytest.param(linear_scan_reference, linear_scan_backward_reference, id="torch"),
        pytest.param(linear_scan_c, linear_scan_backward_c, id="C", marks=needs_c),
    ],
)


@FORMS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_float64(shape: tuple[int, ...], scan: Scan, backward: Backward) -> None:
    scan_laws.states_are_those_of_a_loop(scan, shape)
    scan_laws.gradients_are_those_of_autograd(scan, backward, shape)


@FORMS
def test_an_episode_that_is_not_finite_stays_in_itself(scan: Scan, backward: Backward) -> None:
    scan_laws.an_episode_that_is_not_finite_stays_in_itself(scan, backward)
    scan_laws.by_hand(scan, backward)


@needs_c
def test_c_writes_only_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GuardedMemory()
    monkeypatch.setattr(torch, "empty", memory)
    for shape in SHAPES:
        scan_laws.gradients_are_those_of_autograd(linear_scan_c, linear_scan_backward_c, shape)
    memory.assert_untouched()


def test_gradients_in_float64_are_those_of_differences() -> None:
    """By all arguments, also where a is 0; and the second ones."""
    arguments = [each.double().requires_grad_() for each in inputs((5, 2, 3))]
    assert bool((arguments[0] == 0.0).any())
    assert torch.autograd.gradcheck(linear_scan, arguments)
    # the gradient by the initial state is 0 on both sides of a = 0 only where another a is 0 too
    smooth = [each.detach().clone() for each in arguments]
    smooth[0].clamp_(min=0.1)
    assert torch.autograd.gradgradcheck(linear_scan, [each.requires_grad_() for each in smooth])


@needs_c
def test_float32_goes_to_c_and_all_else_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    for name in ("linear_scan_c", "linear_scan_backward_c"):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, name=name, real=real: called.append(name) or real(*given)
        )
    for dtype in (torch.float64, torch.float32):
        a, b, initial = (each.to(dtype).requires_grad_() for each in inputs((6, 4)))
        called.clear()
        state = linear_scan(a, b, initial)
        torch.autograd.grad(state.sum(), (a, b, initial))
        wanted = ["linear_scan_c", "linear_scan_backward_c"]
        assert called == (wanted if dtype == torch.float32 else [])
        with backend.no_host_syncs():
            torch.testing.assert_close(linear_scan(a, b, initial), state)
        assert len(called) == (2 if dtype == torch.float32 else 0)


@needs_c
def test_the_function_is_the_kernel_with_its_gradient() -> None:
    torch.manual_seed(0)
    arguments = [torch.randn(5, 3, 2), torch.randn(5, 3, 2), torch.randn(3, 2)]
    leaves = [each.clone().requires_grad_() for each in arguments]
    wanted = [each.double().requires_grad_() for each in arguments]
    result, reference = linear_scan(*leaves), linear_scan_reference(*wanted)
    torch.testing.assert_close(result.double(), reference)
    weight = torch.randn_like(result)
    found = torch.autograd.grad((result * weight).sum(), leaves)
    for got, expected in zip(found, torch.autograd.grad((reference * weight).sum(), wanted)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_of_a_kernel_is_refused() -> None:
    a, b, initial = (each.requires_grad_() for each in inputs((6, 4)))
    with pytest.raises(RuntimeError, match=r"no second derivative \(create_graph=True\)"):
        torch.autograd.grad(linear_scan(a, b, initial).sum(), a, create_graph=True)


@pytest.mark.parametrize(
    "shapes",
    [((3, 2), (3, 2), (3,)), ((3, 2), (4, 2), (2,)), ((0, 2), (0, 2), (2,)), ((), (), ())],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"a and b must be \[T, ...\] and initial \[...\], T at"):
        linear_scan(*map(torch.zeros, shapes))


def test_dtypes_that_differ_are_refused() -> None:
    a, b, initial = inputs((3, 2))
    with pytest.raises(ValueError, match=r"of one dtype, got .*float32, .*float64 and .*float32"):
        linear_scan(a, b.double(), initial)
