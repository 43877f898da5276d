"""Stacked layers in C against the same layers one by one in float64, at odd sizes; rows of zeros,
NaN, threads.
"""

import copy
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.stack_cpu import Kept, StackCpu
from gpurl.nn.ensemble import BodyConfig, Dense, Run, Stack, Tape, make_network, set_dtype
from gpurl.nn.optimizer import flatten
from gpurl.nn.q_networks import QNetworkConfig, make_q_network

pytestmark = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)

SIZES = [
    (3, 1),
    (1, 16, 1),
    (17, 33, 5),
    (68, 64, 64, 18),
    (7, 13, 29, 101),
]  # inputs, then outputs of each layer
ROWS = (1, 5, 97, 700)


@pytest.fixture(autouse=True)
def _gradients_are_written_out() -> Iterator[None]:
    with torch.no_grad():
        yield


def stack_of(
    sizes: tuple[int, ...], members: int, activation: str = "relu", last: str = "none"
) -> Stack:
    """With gradients of NaN."""
    torch.manual_seed(len(sizes) + members)
    names = [activation] * (len(sizes) - 2) + [last]
    stack = Stack(
        [Dense(members, *pair, name) for pair, name in zip(itertools.pairwise(sizes), names)]
    )
    flatten(stack)[1].fill_(math.nan)
    return stack


def twin_in_float64(stack: Stack) -> Stack:
    """The same numbers, which go through the layers one by one."""
    twin = copy.deepcopy(stack).double()
    for parameter in twin.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    return twin


def assert_near(got: Tensor, wanted: Tensor, tolerance: float = 3e-6) -> None:
    """Within `tolerance` of the largest number."""
    assert got.shape == wanted.shape
    assert got.dtype == torch.float32
    assert float((got.double() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("activation", "last"), [("relu", "none"), ("tanh", "tanh"), ("elu", "elu"), ("relu", "relu")]
)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_layers_one_by_one_in_float64(
    sizes: tuple[int, ...], members: int, activation: str, last: str
) -> None:
    for rows, own_input in itertools.product(ROWS, (False, True)):
        stack = stack_of(sizes, members, activation, last)
        twin, tape, twin_tape = twin_in_float64(stack), Tape(), Tape()
        x = torch.randn(*((members,) if own_input else ()), rows, sizes[0])
        gradient = torch.randn(members, rows, sizes[-1])
        gradient[:, 1::3] = 0.0
        y, wanted = stack.forward(x, tape), twin.forward(x.double(), twin_tape)
        assert_near(y, wanted)
        assert torch.equal(stack.forward(x), y)  # nothing kept
        before = gradient.clone()
        assert_near(stack.backward(gradient, tape), twin.backward(gradient.double(), twin_tape))
        assert torch.equal(gradient, before)
        assert not tape
        for parameter, other in zip(stack.parameters(), twin.parameters()):
            assert parameter.grad is not None
            assert other.grad is not None
            assert_near(parameter.grad, other.grad, 1e-5)


def test_what_is_not_needed_is_not_written_and_the_rest_is_the_same() -> None:
    stack, x, gradient = stack_of((17, 33, 29, 5), 2), torch.randn(200, 17), torch.randn(2, 200, 5)
    tape = Tape()
    stack.forward(x, tape)
    entry = tape[0]
    of_input = stack.backward(gradient, tape, needs_weights=False)
    assert all(
        bool(parameter.grad.isnan().all())
        for parameter in stack.parameters()
        if parameter.grad is not None
    )
    stack.backward(gradient, [entry], needs_input=False)
    kept = [
        parameter.grad.clone() for parameter in stack.parameters() if parameter.grad is not None
    ]
    assert torch.equal(stack.backward(gradient, [entry]), of_input)
    for parameter, wanted in zip(stack.parameters(), kept):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, wanted)


def test_rows_without_a_gradient_add_nothing_whatever_they_hold() -> None:
    """A member's rows that are left out, all of another's, and NaN in them."""
    stack, x, gradient = stack_of((6, 20, 20, 3), 3), torch.randn(300, 6), torch.randn(3, 300, 3)
    gradient[0, ::2], gradient[1] = 0.0, 0.0
    x[100] = math.nan
    gradient[:, 100] = 0.0
    tape = Tape()
    assert bool(stack.forward(x, tape)[:, 100].isnan().all())
    of_input = stack.backward(gradient, tape)
    assert float(of_input[gradient.abs().sum(2) == 0.0].abs().max()) == 0.0
    twin, twin_tape = twin_in_float64(stack), Tape()
    clean = x.nan_to_num(0.0).double()
    twin.forward(clean, twin_tape)
    assert_near(of_input, twin.backward(gradient.double(), twin_tape))
    for parameter, other in zip(stack.parameters(), twin.parameters()):
        assert parameter.grad is not None
        assert other.grad is not None
        assert_near(parameter.grad, other.grad)
        assert float(parameter.grad[1].abs().max()) == 0.0


def test_nan_where_there_is_a_gradient_goes_through() -> None:
    stack, x = stack_of((6, 20, 3), 2), torch.randn(50, 6)
    x[7, 3] = math.nan
    tape = Tape()
    assert torch.equal(
        stack.forward(x, tape).isnan().any(2).nonzero(), torch.tensor([[0, 7], [1, 7]])
    )
    stack.backward(torch.ones(2, 50, 3), tape)
    for layer in stack.steps:
        assert bool(layer.weight.grad.isnan().any())


def test_a_row_does_not_depend_on_the_others() -> None:
    stack, x = stack_of((17, 33, 29, 5), 2), torch.randn(1000, 17)
    y = stack.forward(x)
    for rows in (slice(0, 1), slice(5, 12), slice(300, 999)):
        assert torch.equal(stack.forward(x[rows]), y[:, rows])


def test_the_same_bits_on_any_number_of_threads() -> None:
    """Enough rows for several slices of a member."""
    stack, x, gradient = (
        stack_of((60, 256, 256, 2), 2),
        torch.randn(1000, 60),
        torch.randn(2, 1000, 2),
    )
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            tape = Tape()
            found.append([stack.forward(x, tape), stack.backward(gradient, tape)])
            found[-1] += [
                parameter.grad.clone()
                for parameter in stack.parameters()
                if parameter.grad is not None
            ]
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others))
    twin, twin_tape = twin_in_float64(stack), Tape()
    twin.forward(x.double(), twin_tape)
    twin.backward(gradient.double(), twin_tape)
    for got, parameter in zip(found[0][2:], twin.parameters()):
        assert parameter.grad is not None
        assert_near(got, parameter.grad, 1e-5)


def test_parameters_that_c_cannot_read_or_write_are_refused() -> None:
    stack, x = make_network(2, 4, 3, BodyConfig((8, 8))), torch.randn(9, 4)
    tape = Tape()
    y = stack.forward(x, tape)
    with pytest.raises(AssertionError, match=r"no \.grad"):
        stack.backward(torch.ones_like(y), tape)
    for change in ("double", "transposed", "meta"):
        stack = make_network(2, 4, 8, BodyConfig((8, 8)))
        data = stack.steps[1].weight.data
        data = {
            "double": data.double(),
            "transposed": data.transpose(1, 2),
            "meta": data.to("meta"),
        }[change]
        stack.steps[1].weight = torch.nn.Parameter(data)
        with pytest.raises(AssertionError):
            stack.forward(x)


def ended_well(process: int, seconds: float) -> bool:
    """Whether the child process returned 0 in time; it is gone then, or killed."""
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def test_a_forked_process_is_not_stuck_in_what_another_thread_was_doing() -> None:
    """On one thread, and so without any that C would have started."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    stack, x, ends = stack_of((60, 256, 256, 2), 2), torch.randn(4096, 60), threading.Event()

    def work() -> None:
        while not ends.is_set():
            with torch.no_grad():
                stack.forward(x)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                stack.forward(x[:10])
                os._exit(0)
            assert ended_well(child, seconds=20.0)
    finally:
        ends.set()
        thread.join()
        torch.set_num_threads(before)


# ---- which layers go through it ----


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the number of layers of each forward call."""
    calls, forward = list[int](), StackCpu.forward
    monkeypatch.setattr(
        StackCpu,
        "forward",
        lambda self, x, keeps: (calls.append(len(self._parameters)), forward(self, x, keeps))[1],
    )
    return calls


def test_runs_are_of_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = calls_of(monkeypatch), torch.randn(9, 4)
    make_network(2, 4, 3, BodyConfig((8, 8))).forward(x)
    assert calls == [3]
    make_network(2, 4, 3, BodyConfig((8, 8), layer_norm=True)).forward(x)
    assert calls == [3, 1]
    make_q_network(2, 4, 3, 5, QNetworkConfig((8, 8))).forward(x)
    assert calls[2:] == [3]  # the head's layers are those of a stack in the stack
    make_q_network(1, 4, 3, 5, QNetworkConfig((8, 8), heads=6)).forward(x)
    assert calls[3:] == [1, 2]
    make_q_network(2, 4, 3, 5, QNetworkConfig((8, 8), dueling=True)).forward(x)
    assert calls[5:] == [1, 2, 2]


def test_where_it_does_not_serve_the_layers_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = calls_of(monkeypatch), torch.randn(9, 4)
    network = make_network(2, 4, 3, BodyConfig((8, 8)))
    wanted = network.forward(x)
    with torch.enable_grad():
        y = network.forward(x)
    assert y.requires_grad
    assert_near(y.detach(), wanted.double())
    assert calls == [3]
    assert network.double().forward(x.double()).dtype == torch.float64
    rounded = make_network(2, 4, 3, BodyConfig((8, 8)))
    set_dtype(rounded, torch.bfloat16)
    rounded.forward(x)
    assert calls == [3]


def test_heads_on_one_trunk_read_its_rows_once() -> None:
    """The features of a Fan are the same memory for all members."""
    network = make_q_network(1, 4, 3, 1, QNetworkConfig((8, 8), heads=5))
    flatten(network)
    twin, x = twin_in_float64(network), torch.randn(30, 4)
    tape, twin_tape = Tape(), Tape()
    assert_near(network.forward(x, tape), twin.forward(x.double(), twin_tape))
    runs = [entry for entry in tape if isinstance(entry, Kept)]
    assert runs[1].x.dim() == 2
    gradient = torch.randn(5, 30, 3)
    assert_near(network.backward(gradient, tape), twin.backward(gradient.double(), twin_tape))
    assert sum(isinstance(step, Run) for step in network._steps) == 2
