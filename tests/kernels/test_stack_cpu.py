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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import c_library
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.stack_cpu import StackCpu
from gpurl.nn.mlp import BodyConfig, Dense, Sequential, make_network, set_dtype
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


def stack_of(
    sizes: tuple[int, ...], members: int, activation: str = "relu", last: str = "none"
) -> Sequential:
    torch.manual_seed(len(sizes) + members)
    names = [activation] * (len(sizes) - 2) + [last]
    return Sequential(
        [Dense(members, *pair, name) for pair, name in zip(itertools.pairwise(sizes), names)]
    )


def twin_in_float64(stack: Sequential) -> Sequential:
    """The same numbers, which go through the layers one by one."""
    return copy.deepcopy(stack).double()


def differentiated(stack: Sequential, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """(y, the gradient by x, those by the parameters) from that by y."""
    leaf = x.detach().to(gradient.dtype).requires_grad_()
    y = stack(leaf)
    return y.detach(), *torch.autograd.grad(y, [leaf, *stack.parameters()], gradient)


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    """Within `tolerance` of the largest number."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert float((got.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


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
        x = torch.randn(*((members,) if own_input else ()), rows, sizes[0])
        gradient = torch.randn(members, rows, sizes[-1])
        gradient[:, 1::3] = 0.0
        before = gradient.clone()
        y, of_input, *gradients = differentiated(stack, x, gradient)
        expected, expected_input, *others = differentiated(
            twin_in_float64(stack), x, gradient.double()
        )
        assert torch.equal(gradient, before)
        assert_near(y, expected)
        assert_near(of_input, expected_input, 5e-6)
        with torch.no_grad():
            assert torch.equal(stack(x), y)  # nothing kept
        for got, other in zip(gradients, others):
            assert_near(got, other, 1e-5)


def test_what_is_not_needed_is_not_computed_and_the_rest_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack, x, gradient = stack_of((17, 33, 29, 5), 2), torch.randn(200, 17), torch.randn(2, 200, 5)
    _, of_input, *gradients = differentiated(stack, x, gradient)
    real, needs = StackCpu.backward, list[tuple[bool, bool]]()

    def backward(self: StackCpu, *arguments: Any) -> Any:
        needs.append(arguments[-2:])
        return real(self, *arguments)

    monkeypatch.setattr(StackCpu, "backward", backward)
    for got, expected in zip(
        torch.autograd.grad(stack(x), list(stack.parameters()), gradient), gradients
    ):
        assert torch.equal(got, expected)
    leaf = x.clone().requires_grad_()
    for parameter in stack.parameters():
        parameter.requires_grad = False
    assert torch.equal(torch.autograd.grad(stack(leaf), leaf, gradient)[0], of_input)
    assert needs == [(False, True), (True, False)]
    assert not stack(x).requires_grad
    last = list(stack.parameters())[-1].requires_grad_()
    assert torch.equal(torch.autograd.grad(stack(x), last, gradient)[0], gradients[-1])


def test_a_stack_may_be_used_twice_in_a_loss() -> None:
    stack, x = stack_of((5, 20, 5), 1), torch.randn(40, 5)
    twin = twin_in_float64(stack)
    both = [
        torch.autograd.grad(each(each(rows)).sum() + each(rows).sum(), list(each.parameters()))
        for each, rows in ((stack, x), (twin, x.double()))
    ]
    for got, expected in zip(*both):
        assert_near(got, expected, 1e-5)


def test_rows_without_a_gradient_add_nothing_whatever_they_hold() -> None:
    """A member's rows that are left out, all of another's, and NaN in them."""
    stack, x, gradient = stack_of((6, 20, 20, 3), 3), torch.randn(300, 6), torch.randn(3, 300, 3)
    gradient[0, ::2], gradient[1] = 0.0, 0.0
    x[100] = math.nan
    gradient[:, 100] = 0.0
    each = x.expand(3, -1, -1).contiguous()  # of each member its own
    y, of_input, *gradients = differentiated(stack, each, gradient)
    assert bool(y[:, 100].isnan().all())
    assert float(of_input[gradient.abs().sum(2) == 0.0].abs().max()) == 0.0
    _, expected, *others = differentiated(
        twin_in_float64(stack), each.nan_to_num(0.0), gradient.double()
    )
    assert_near(of_input, expected)
    for got, other in zip(gradients, others):
        assert_near(got, other)
        assert float(got[1].abs().max()) == 0.0


def test_nan_where_there_is_a_gradient_goes_through() -> None:
    stack, x = stack_of((6, 20, 3), 2), torch.randn(50, 6)
    x[7, 3] = math.nan
    y, _, *gradients = differentiated(stack, x, torch.ones(2, 50, 3))
    assert torch.equal(y.isnan().any(2).nonzero(), torch.tensor([[0, 7], [1, 7]]))
    for of_weight in gradients[::2]:
        assert bool(of_weight.isnan().any())


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
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(differentiated(stack, x, gradient))
    finally:
        torch.set_num_threads(before)
    for others in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], others))
    expected = differentiated(twin_in_float64(stack), x, gradient.double())
    for got, other in zip(results[0][2:], expected[2:]):
        assert_near(got, other, 1e-5)


def test_threads_of_python_have_memory_of_their_own() -> None:
    """As members of a population, which compute beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def results(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(300, 20, generator=generator)
        network = networks[seed]
        y = network(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(network.parameters()))]

    torch.manual_seed(0)
    networks = [make_network(2, 20, 3, BodyConfig((32 + 16 * n,) * 2)) for n in range(4)]
    try:
        expected = [results(seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(20):
                for got, alone in zip(threads.map(results, range(4)), expected):
                    for one, other in zip(got, alone):
                        assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


def test_parameters_that_c_cannot_read_are_refused() -> None:
    x = torch.randn(9, 4)
    for change in ("double", "transposed", "meta"):
        stack = make_network(2, 4, 8, BodyConfig((8, 8)))
        data = stack.layers[1].weight.data
        data = {
            "double": data.double(),
            "transposed": data.transpose(1, 2),
            "meta": data.to("meta"),
        }[change]
        stack.layers[1].weight = torch.nn.Parameter(data)
        with pytest.raises(ValueError if change == "meta" else AssertionError):
            stack.forward(x)


def test_layers_that_do_not_fit_are_refused() -> None:
    """C would read and write beyond them, where torch raises."""

    def layer(members: int, inputs: int, outputs: int, biases: int | None = None) -> Any:
        weight = torch.nn.Parameter(torch.zeros(members, outputs, inputs))
        bias = torch.nn.Parameter(torch.zeros(members, 1, outputs if biases is None else biases))
        return weight, bias, "tanh"

    StackCpu([layer(2, 4, 8), layer(2, 8, 3)])
    for second in (layer(1, 8, 3), layer(2, 64, 3), layer(2, 8, 3, 1)):
        with pytest.raises(ValueError, match="layers do not fit each other"):
            StackCpu([layer(2, 4, 8), second])
    stack = StackCpu([layer(2, 4, 8)])
    stack.parameters[0].data = torch.zeros(2, 4, 4)
    with pytest.raises(AssertionError):
        stack.forward(torch.zeros(9, 4), keep_hidden=False)


def test_results_are_float32_whatever_torchs_default_is() -> None:
    network = make_network(2, 4, 3, BodyConfig((8,)))
    x = torch.randn(9, 4)
    expected = network(x).detach()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(network(x).detach(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def exits_cleanly(process: int, seconds: float) -> bool:
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
            assert exits_cleanly(child, seconds=20.0)
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
        lambda self, x, keep_hidden: (
            calls.append(len(self.parameters) // 2),
            forward(self, x, keep_hidden),
        )[1],
    )
    return calls


def test_runs_are_of_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = calls_of(monkeypatch), torch.randn(9, 4)
    make_network(2, 4, 3, BodyConfig((8, 8)))(x)
    assert calls == [3]
    make_network(2, 4, 3, BodyConfig((8, 8), layer_norm=True))(x)
    assert calls == [3, 1]
    make_q_network(2, 4, 3, 5, QNetworkConfig((8, 8)))(x)
    assert calls[2:] == [3]  # the head's layers are those of a network in the network
    make_q_network(1, 4, 3, 5, QNetworkConfig((8, 8), heads=6))(x)
    assert calls[3:] == [1, 2]
    make_q_network(2, 4, 3, 5, QNetworkConfig((8, 8), dueling=True))(x)
    assert calls[5:] == [1, 2, 2]


def test_where_it_does_not_serve_the_layers_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = calls_of(monkeypatch), torch.randn(9, 4)
    network = make_network(2, 4, 3, BodyConfig((8, 8)))
    expected = network(x).detach()
    with no_host_syncs():
        assert_near(network(x).detach(), expected.double())
    assert calls == [3]
    assert network.double()(x.double()).dtype == torch.float64
    rounded = make_network(2, 4, 3, BodyConfig((8, 8)))
    set_dtype(rounded, torch.bfloat16)
    rounded(x)
    assert calls == [3]


def test_heads_on_one_trunk_read_its_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The features of one trunk are the same memory for all members."""
    network = make_q_network(1, 4, 3, 1, QNetworkConfig((8, 8), heads=5))
    real, dimensions = StackCpu.forward, list[int]()

    def forward(self: StackCpu, x: Tensor, keep_hidden: bool) -> Any:
        dimensions.append(x.dim())
        return real(self, x, keep_hidden)

    monkeypatch.setattr(StackCpu, "forward", forward)
    x, gradient = torch.randn(30, 4), torch.randn(5, 30, 3)
    results = differentiated(network, x, gradient)
    assert dimensions == [2, 2]
    expected = differentiated(twin_in_float64(network), x, gradient.double())
    for got, other in zip(results, expected):
        assert_near(got, other, 1e-5)
