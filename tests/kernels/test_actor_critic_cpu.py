"""The C actor-critic against the torch path and float64, at odd sizes; NaN, threads, and PPO's
steps in one call.
"""

import itertools
import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.cpu_ppo import gaussian_of, kernel_of
from gpurl.kernels import c_library
from gpurl.kernels.actor_critic_cpu import ActInputs, PpoSteps
from gpurl.kernels.random import CounterRandom
from gpurl.losses import ppo_loss
from gpurl.nn.actor_critic import ActorCritic, NetworkConfig
from gpurl.nn.distributions import Categorical, Gaussian, Head
from gpurl.nn.mlp import weights_and_biases
from gpurl.nn.optimizer import FlatAdam

pytestmark = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)

SHAPES = [  # hidden, inputs, outputs
    ((64, 64), 8, 2),
    ((32,), 1, 1),
    ((), 3, 5),
    ((7, 13, 5), 17, 18),
    ((256, 128, 64), 17, 2),
]
ROWS = (1, 5, 97, 1000)


@pytest.fixture(autouse=True)
def _gradients_are_written_out() -> Iterator[None]:
    with torch.no_grad():
        yield


class Model(nn.Module):
    """A network and a head under one flat Adam, as PPO has them."""

    def __init__(self, config: NetworkConfig, inputs: int, head: Head, **adam: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head, self.network = head, ActorCritic(config, inputs, head.num_outputs)
        for parameter in self.network.parameters():
            parameter.data += 0.1 * torch.randn_like(
                parameter
            )  # biases of 0 and a small actor would hide mistakes
        self.optimizer = FlatAdam(self, 1e-2, **adam)
        self.host = kernel_of(self.network)
        self.inputs = ActInputs(self.host, CounterRandom(0, 1), gaussian_of(head))

    def value(self, x: Tensor) -> Tensor:
        return self.host.value(x, self.inputs)

    def steps(
        self,
        columns: dict[str, Tensor],
        order: Tensor | None = None,
        minibatches: int = 1,
        entropy_coef: float = 0.0,
        value_coef: float = 1.0,
        clip_range_value: float | None = None,
        normalizes: bool = False,
    ) -> dict[str, Tensor]:
        """PPO's steps in C, with a clip range of 0.2."""
        optimizer = self.optimizer
        adam = optimizer.state, optimizer.gradient, optimizer.learning_rate, optimizer.options
        gaussian = gaussian_of(self.head)
        steps = PpoSteps(self.host, gaussian, value_coef, clip_range_value, normalizes, adam)
        if order is None:
            order = torch.arange(len(columns["obs"]))
        has_valid = "valid" in columns
        return self.host.ppo_steps(
            steps, packed(columns), has_valid, order, minibatches, 0.2, entropy_coef
        )


def gaussian(outputs: int) -> Gaussian:
    return Gaussian(Box(-1.0, 1.0, (outputs,), np.float32))


def model_of(
    shape: tuple[tuple[int, ...], int, int], activation: str = "tanh", shared: bool = False
) -> Model:
    hidden, inputs, outputs = shape
    return Model(
        NetworkConfig(hidden=hidden, activation=activation, shared=shared and bool(hidden)),
        inputs,
        gaussian(outputs),
    )


@torch.enable_grad()
def in_float64(model: Model, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Value, and flat gradient of PPO's loss without entropy, in float64, by autograd and by the
    textbook's formulas.
    """
    network = model.network
    activation = {"tanh": torch.tanh, "elu": nn.functional.elu, "relu": torch.relu}
    flat = model.optimizer.flat.double().requires_grad_()
    begin = model.optimizer.flat.data_ptr()
    columns = {name: column.double() for name, column in columns.items()}

    def own(parameter: Tensor) -> Tensor:
        offset = (parameter.data_ptr() - begin) // 4
        return flat[offset : offset + parameter.numel()].view_as(parameter)

    h = columns["obs"].unsqueeze(0)
    for weight, bias in weights_and_biases(network.trunk):
        z = h @ own(weight).transpose(1, 2) + own(bias)
        h = activation[network.config.activation](z)
    output = h[0] @ own(network.actor.weight)[0].t() + own(network.actor.bias)[0]
    value = (h[-1] @ own(network.critic.weight)[0].t() + own(network.critic.bias)[0]).squeeze(1)
    log_std = own(model.head.log_std)
    z = (columns["action"] - output) / log_std.exp()
    log_prob = (-0.5 * z.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(1)
    ratio = (log_prob - columns["log_prob"]).exp()
    surrogate = torch.minimum(
        ratio * columns["advantage"], ratio.clamp(0.8, 1.2) * columns["advantage"]
    )
    loss = (value - columns["returns"]).square().mean() - surrogate.mean()
    (gradient,) = torch.autograd.grad(loss, flat)
    return value.detach(), gradient


def assert_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest number."""
    assert got.shape == expected.shape
    assert (
        float((got.double() - expected).abs().max())
        <= tolerance * float(expected.abs().max()) + 1e-6
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "shared"), list(itertools.product(("tanh", "elu", "relu"), (False, True)))
)
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[tuple[int, ...], int, int], activation: str, shared: bool
) -> None:
    for rows in ROWS[
        : 3 if activation == "relu" else 4
    ]:  # among more rows float64 finds a relu on the other side of 0
        model = model_of(shape, activation, shared)
        columns = rollout_of(model, rows, shape[1], has_valid=False, spread=0.0)
        value, gradient = in_float64(model, columns)
        model.optimizer.gradient.fill_(math.nan)  # everything must be written
        assert_near(model.value(columns["obs"]), value, 1e-6)
        model.steps(columns)
        written = ~model.optimizer.gradient.isnan()
        assert int(written.sum()) == sum(parameter.numel() for parameter in model.parameters())
        assert_near(model.optimizer.gradient.nan_to_num(0.0), gradient, 3e-6)


def test_a_large_batch_in_slices() -> None:
    model = model_of(SHAPES[0])
    columns = rollout_of(model, 32768, 8, has_valid=False, spread=0.0)
    value, gradient = in_float64(model, columns)
    assert_near(model.value(columns["obs"]), value, 1e-6)
    model.steps(columns)
    assert_near(model.optimizer.gradient, gradient, 1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    model, x = model_of(SHAPES[3]), torch.randn(1000, 17)
    value = model.value(x)
    for rows in (slice(0, 1), slice(5, 12), slice(300, 999)):
        assert torch.equal(model.value(x[rows]), value[rows])


@pytest.mark.parametrize("activation", ["tanh", "elu", "relu"])
def test_nan_and_infinity_go_through(activation: str) -> None:
    model = model_of(((64, 64), 8, 2), activation)
    columns = rollout_of(model, 50, 8, has_valid=False)
    x = columns["obs"]
    x[7, 3] = math.nan
    value = model.value(x)
    assert torch.equal(torch.isnan(value).nonzero().flatten(), torch.tensor([7]))
    x[7, 3] = math.inf
    expected = model.network(x)[1]
    torch.testing.assert_close(model.value(x), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    x[7, 3] = math.nan
    model.steps(columns)
    assert not bool(torch.isfinite(model.optimizer.gradient.sum()))


@pytest.mark.parametrize("activation", ["tanh", "elu", "relu"])
def test_the_activation_over_its_whole_range(activation: str) -> None:
    """One unit with weight 1 between x and the value: the activation itself."""
    model = model_of(((1,), 1, 1), activation, shared=True)
    network = model.network
    for parameter in network.parameters():
        parameter.data.zero_()
    network.trunk.layers[0].weight.data.fill_(1.0)
    network.critic.weight.data.fill_(1.0)
    x = torch.cat(
        (
            torch.linspace(-30.0, 30.0, 20001),
            torch.tensor([0.0, -200.0, 200.0, math.inf, -math.inf]),
        )
    ).unsqueeze(1)
    expected = {"tanh": torch.tanh, "elu": nn.functional.elu, "relu": torch.relu}[activation](
        x.double()
    ).squeeze(1)
    value = model.value(x).double()
    assert (
        float(((value - expected).nan_to_num(0.0).abs() / expected.abs().clamp(1.0, 1e30)).max())
        < 2e-7
    )
    assert torch.equal(value.isinf(), expected.isinf())
    assert float(value[20001]) == 0.0


# ---- PPO's steps ----


def rollout_of(
    model: Model, rows: int, inputs: int, has_valid: bool, spread: float = 0.2
) -> dict[str, Tensor]:
    """Columns near what the policy itself would have recorded."""
    generator = torch.Generator().manual_seed(rows)
    obs = torch.randn(rows, inputs, generator=generator)
    output, value = model.network(obs)
    noise = torch.randn(output.shape, generator=generator)
    is_gaussian = isinstance(model.head, Gaussian)
    action = output + noise if is_gaussian else (output + noise).argmax(-1)
    log_prob = model.head.log_prob(output, action) + spread * torch.randn(rows, generator=generator)
    columns = {
        "obs": obs,
        "action": action,
        "log_prob": log_prob,
        "value": value + spread * torch.randn(rows, generator=generator),
    }
    columns |= {
        "advantage": torch.randn(rows, generator=generator),
        "returns": value + torch.randn(rows, generator=generator),
    }
    if has_valid:
        columns["valid"] = torch.rand(rows, generator=generator) < 0.7
    return {name: column.detach() for name, column in columns.items()}


def packed(columns: dict[str, Tensor]) -> Tensor:
    rows = torch.cat([column.reshape(len(column), -1).float() for column in columns.values()], 1)
    return torch.nn.functional.pad(rows, (0, 40), value=math.nan)  # what is behind is not read


@torch.enable_grad()
def torch_step(
    model: Model, columns: dict[str, Tensor], options: dict[str, object], normalizes: bool
) -> dict[str, Tensor]:
    """A step by actor_critic.py, distributions.py, losses.py and adam.py."""
    weight, advantage = None, columns["advantage"]
    if "valid" in columns:
        weight = columns["valid"] / columns["valid"].sum()
    if normalizes:
        share = torch.full_like(advantage, 1.0 / len(advantage)) if weight is None else weight
        centred = advantage - (advantage * share).sum()
        advantage = centred / ((centred.square() * share).sum().sqrt() + 1e-8)
    columns = {name: column for name, column in columns.items() if name != "valid"}
    batch = Minibatch(**columns | {"advantage": advantage}, weight=weight)
    output, value = model.network(batch.obs)
    log_prob, entropy = model.head.log_prob_and_entropy(output, batch.action)
    numbers = 0.2, options["entropy_coef"], options["value_coef"], options["clip_range_value"]
    loss, metrics = ppo_loss(log_prob, value, entropy, batch, *numbers)
    return metrics | {"grad_norm": model.optimizer.step(loss)}


@pytest.mark.parametrize("has_valid", [False, True])
@pytest.mark.parametrize(("normalizes", "clip_range_value"), [(False, None), (True, 0.15)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("kind", "outputs"), [("gaussian", 1), ("gaussian", 5), ("categorical", 2), ("categorical", 18)]
)
def test_steps_are_those_of_the_torch_path(
    kind: str,
    outputs: int,
    shared: bool,
    normalizes: bool,
    clip_range_value: float | None,
    has_valid: bool,
) -> None:
    """Three steps on a shuffled rollout: parts, gradients and weights; a log standard deviation at
    its limit stays there.
    """
    adam = {"max_grad_norm": 0.5, "weight_decay": 0.01}
    config = NetworkConfig(hidden=(24, 16), activation="elu", shared=shared)
    options = {"value_coef": 0.7, "clip_range_value": clip_range_value, "entropy_coef": 0.3}
    for rows in (1, 5, 97, 1000):
        models = []
        for _ in range(2):
            models.append(
                Model(
                    config,
                    3,
                    gaussian(outputs) if kind == "gaussian" else Categorical(outputs),
                    **adam,
                )
            )
            if kind == "gaussian":
                models[-1].head.log_std.data[0] = 2.5
        mine, other = models
        columns = rollout_of(mine, 3 * rows, 3, has_valid and rows > 1)
        columns["log_prob"][: rows // 40 : 2] -= 21.0  # ratios beyond their bound
        columns["log_prob"][1 : rows // 40 : 2] -= 1e3
        order = torch.randperm(3 * rows, generator=torch.Generator().manual_seed(1))
        got = mine.steps(columns, order, 3, 0.3, 0.7, clip_range_value, normalizes)
        for number, index in enumerate(order.split(rows)):
            expected = torch_step(
                other,
                {name: column[index] for name, column in columns.items()},
                options,
                normalizes,
            )
            for name, part in expected.items():
                assert float(got[name][number]) == pytest.approx(
                    float(part.detach()), rel=2e-4, abs=2e-6
                ), (rows, number, name)
        torch.testing.assert_close(mine.optimizer.flat, other.optimizer.flat, rtol=1e-3, atol=2e-5)
        assert int(mine.optimizer.state.step) == 3


def test_adam_is_the_reference() -> None:
    """On the gradient that the step left behind."""
    model = Model(NetworkConfig(), 3, gaussian(2), max_grad_norm=0.01, weight_decay=0.1)
    from gpurl.kernels.adam import adam_step_reference

    columns = rollout_of(model, 64, 3, False)
    state = model.optimizer.state
    for _ in range(5):
        twin = state._replace(
            **{
                name: getattr(state, name).clone()
                for name in ("parameters", "exp_avg", "exp_avg_sq", "step")
            }
        )
        norm = model.steps(columns)["grad_norm"]
        expected = adam_step_reference(
            twin, model.optimizer.gradient, model.optimizer.learning_rate, model.optimizer.options
        )
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        for name in ("parameters", "exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                getattr(state, name), getattr(twin, name), rtol=1e-5, atol=1e-8
            )


@pytest.mark.parametrize("name", ["obs", "action", "advantage", "returns", "log_prob"])
def test_a_step_with_nan_changes_nothing_and_says_so(name: str) -> None:
    model = Model(NetworkConfig(), 3, gaussian(2), max_grad_norm=1.0)
    columns = rollout_of(model, 700, 3, False)
    columns[name].view(700, -1)[300, 0] = math.nan
    before = model.optimizer.flat.clone()
    metrics = model.steps(columns)
    assert not math.isfinite(float(metrics["grad_norm"]))
    assert torch.equal(before, model.optimizer.flat)
    assert int(model.optimizer.state.step) == 0


def test_the_number_of_threads_changes_nothing() -> None:
    """Bit for bit, and again in a second run."""

    columns = rollout_of(Model(NetworkConfig(), 8, gaussian(2)), 20000, 8, True)

    def run(threads: int) -> tuple[Tensor, ...]:
        before, model = (
            torch.get_num_threads(),
            Model(NetworkConfig(), 8, gaussian(2), max_grad_norm=1.0),
        )
        torch.set_num_threads(threads)
        try:
            metrics = model.steps(columns, minibatches=2, entropy_coef=0.01, normalizes=True)
            return (
                model.optimizer.flat.clone(),
                model.optimizer.gradient.clone(),
                model.value(columns["obs"]),
                torch.stack(list(metrics.values())),
            )
        finally:
            torch.set_num_threads(before)

    first = run(1)
    for threads in (1, 2, 3, 7):
        for got, expected in zip(run(threads), first):
            assert torch.equal(got, expected), threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    """Those of the parent are not there, and nothing waits for them."""
    before, model, x = torch.get_num_threads(), model_of(SHAPES[0]), torch.randn(4096, 8)
    torch.set_num_threads(3)
    try:
        expected = model.value(x)
        child = os.fork()
        if not child:
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # a handler in Python would wait for the kernel to return
            signal.alarm(20)
            os._exit(0 if torch.equal(model.value(x), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(model.value(x), expected)
    finally:
        torch.set_num_threads(before)


def test_several_python_threads_share_one_network() -> None:
    model, x = model_of(SHAPES[0]), torch.randn(3000, 8)
    expected = model.value(x)
    with ThreadPoolExecutor(4) as pool:
        for value in pool.map(lambda _: model.value(x), range(40)):
            assert torch.equal(value, expected)


def test_networks_do_not_wait_for_each_other() -> None:
    """One thread acts while another one learns: a short call ends within a long one, also while
    that has all helping threads.
    """

    def seconds_of(model: Model, x: Tensor) -> float:
        start = time.perf_counter()
        model.value(x)
        return time.perf_counter() - start

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    long, short = model_of(SHAPES[0]), model_of(SHAPES[0])
    rows, row = torch.randn(400_000, 8), torch.randn(1000, 8)
    expected, seconds = short.value(row), list[float]()
    try:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(seconds_of, long, rows)
            while not ended.done():
                seconds.append(seconds_of(short, row))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(short.value(row), expected)
    assert max(seconds) < 0.5 * ended.result()
