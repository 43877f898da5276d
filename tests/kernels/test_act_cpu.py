"""Acting in one call of C against the torch code, float64 and itself: every head, box and
normaliser that it serves, odd numbers of rows, NaN, threads, and what it refuses.
"""

import ctypes
import itertools
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.kernels import c_library
from gpurl.kernels.actor_critic_cpu import (
    Acted,
    ActInputs,
    ActorCriticCpu,
    GaussianPolicy,
    Scale,
)
from gpurl.kernels.random import CounterRandom
from gpurl.nn.actor_critic import ActorCritic, NetworkConfig
from gpurl.nn.distributions import Categorical, Gaussian
from gpurl.nn.mlp import weights_and_biases
from gpurl.nn.normalizer import Normalizer, ValueNormalizer
from gpurl.nn.optimizer import FlatAdam
from tests.aimed_streams import aimed

pytestmark = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)

ROWS = (1, 3, 8, 257, 4096)
BOXES = ("unit", "scaled", "unbounded", "partly")
SEED = 11


@pytest.fixture(autouse=True)
def _outputs_are_poisoned() -> Iterator[None]:
    """torch.empty gives NaN and the largest integer; gradients are off."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(1).isnan())
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def box_of(kind: str, size: int) -> Box:
    """Limits of each kind; "partly": in turn none, one on a side, two, and two far apart."""
    column = np.arange(size)
    high = {
        "unit": np.ones(size),
        "scaled": 0.5 + column,
        "unbounded": np.full(size, np.inf),
        "partly": np.choose(column % 4, (np.inf, 0.25, 2.0, 5e6)),
    }[kind]
    low = {
        "unit": -np.ones(size),
        "scaled": -2.0 - column,
        "unbounded": np.full(size, -np.inf),
        "partly": np.choose(column % 4, (-np.inf, -np.inf, -0.5, -0.125)),
    }[kind]
    return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)


class Policy(nn.Module):
    """A network, a head and two normalisers as PPO has them, and the same for C."""

    def __init__(
        self,
        head: Gaussian | Categorical,
        inputs: int = 6,
        network: NetworkConfig | None = None,
        normalizes: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.head = head
        self.network = ActorCritic(network or NetworkConfig(), inputs, head.num_outputs)
        for parameter in self.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        self.optimizer = FlatAdam(self, 1e-3)  # moves the parameters to their place
        self.normalizer = Normalizer(inputs, clip=1.5) if normalizes else None
        self.value_normalizer = ValueNormalizer() if normalizes else None
        if self.normalizer is not None and self.value_normalizer is not None:
            self.normalizer.update(2.0 + 3.0 * torch.randn(100, inputs))
            self.value_normalizer.update(-7.0 + 20.0 * torch.randn(100, 1))
        actor, critic = self.network.actor, self.network.critic
        self.c = ActorCriticCpu(
            weights_and_biases(self.network.trunk),
            (actor.weight, actor.bias),
            (critic.weight, critic.bias),
            self.network.config.activation,
        )

    def gaussian(self) -> GaussianPolicy | None:
        head = self.head
        if isinstance(head, Categorical):
            return None
        return GaussianPolicy(head.log_std, head.min_log_std, head.max_log_std, head.box.units)

    def inputs(self, random: CounterRandom) -> ActInputs:
        obs, value = self.normalizer, self.value_normalizer
        return ActInputs(
            self.c,
            random,
            self.gaussian(),
            obs and Scale(obs.shift, obs.inv_std, obs.clip),
            value and Scale(value.shift, value.inv_std),
        )

    def in_c(self, x: Tensor) -> Acted:
        return self.c.act(x, self.inputs(CounterRandom(SEED, len(x))))

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the network gives for x, and the value, by torch."""
        inputs = x if self.normalizer is None else self.normalizer(x)
        output, value = self.network(inputs)[:2]
        if self.value_normalizer is not None:
            value = self.value_normalizer.denormalized(value)
        return output, value

    def in_torch(self, x: Tensor) -> Acted:
        output, value = self.outputs(x)
        action, log_prob = self.head.sample(output, CounterRandom(SEED, len(x)))
        return Acted(action, log_prob, self.head.to_env(action), value)

    def output_in_float64(self, x: Tensor) -> Tensor:
        """[N, A], the layers and the normaliser by the textbook's formulas."""
        h, actor = x.double(), self.network.actor
        if self.normalizer is not None:
            shift, inv_std = self.normalizer.shift.double(), self.normalizer.inv_std.double()
            h = ((h - shift) * inv_std).clamp(-self.normalizer.clip, self.normalizer.clip)
        for weight, bias in weights_and_biases(self.network.trunk):
            h = torch.tanh(h @ weight[0].double().t() + bias[0].double())
        return h @ actor.weight[0].double().t() + actor.bias[0].double()


def gaussian(size: int, box: str = "partly") -> Gaussian:
    return Gaussian(box_of(box, size), 0.7)


def observations(rows: int, inputs: int = 6) -> Tensor:
    """[rows, inputs], the first rows the same however many there are; some beyond the limit."""
    generator = torch.Generator().manual_seed(1)
    return 2.0 + 3.0 * torch.randn(4096, inputs, generator=generator)[:rows]


def assert_near(got: Tensor, expected: Tensor) -> None:
    """To float32 rounding of the largest number; NaN at the same places."""
    assert (got.shape, got.is_floating_point()) == (expected.shape, expected.is_floating_point())
    assert torch.equal(got.isnan(), expected.isnan())
    largest = float(expected.double().nan_to_num(0.0).abs().max())
    error = (got.double() - expected.double()).nan_to_num(0.0).abs().max()
    assert float(error) <= 1e-6 * largest + 5e-6, (float(error), largest)


def assert_all_near(got: Acted, expected: Acted) -> None:
    for tensor, reference in zip(got, expected):
        assert tensor.dtype == reference.dtype
        assert_near(tensor, reference)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("actions", [1, 3, 17])
def test_a_gaussian_acts_as_in_torch(actions: int, box: str, normalizes: bool) -> None:
    policy = Policy(gaussian(actions, box), normalizes=normalizes)
    for rows in ROWS:
        x = observations(rows)
        got = policy.in_c(x)
        assert_all_near(got, policy.in_torch(x))
        space = policy.head.box.space
        assert bool((got.env_action >= torch.from_numpy(space.low)).all())
        assert bool((got.env_action <= torch.from_numpy(space.high)).all())


@pytest.mark.parametrize(
    ("activation", "shared"), list(itertools.product(("tanh", "elu", "relu"), (False, True)))
)
@pytest.mark.parametrize("hidden", [(), (7,), (64, 64)], ids=str)
def test_every_network_acts_as_in_torch(
    hidden: tuple[int, ...], activation: str, shared: bool
) -> None:
    config = NetworkConfig(hidden=hidden, activation=activation, shared=shared and bool(hidden))
    policy = Policy(gaussian(3), 5, config)
    for rows in ROWS:
        x = observations(rows, 5)
        assert_all_near(policy.in_c(x), policy.in_torch(x))
        random = CounterRandom(SEED, 1)
        assert torch.equal(policy.c.value(x, policy.inputs(random)), policy.in_c(x).value)


def gumbel(uniform: Tensor) -> Tensor:
    """Float64, of what the head makes of a float32 uniform in float32."""
    inside = uniform * (1.0 - 2.0**-24) + 2.0**-25
    return -(-inside.double().log()).log()


def perturbed_in_float64(policy: Policy, x: Tensor) -> Tensor:
    """[N, n] logits with their Gumbel noise."""
    uniform = CounterRandom(SEED, len(x)).uniform(0.0, 1.0, (policy.head.num_outputs,))
    return policy.output_in_float64(x) + gumbel(uniform)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("actions", [1, 2, 3, 17])
def test_a_categorical_acts_as_in_torch(actions: int, normalizes: bool) -> None:
    policy = Policy(Categorical(actions), normalizes=normalizes)
    for rows in ROWS:
        x = observations(rows)
        got, expected = policy.in_c(x), policy.in_torch(x)
        assert got.action.dtype == torch.int64
        assert got.env_action is got.action
        best = perturbed_in_float64(policy, x).topk(min(actions, 2), -1)
        is_clear = (
            (best.values[:, 0] - best.values[:, -1] > 1e-5) if actions > 1 else torch.ones(rows) > 0
        )
        assert float(is_clear.float().mean()) > 0.99
        assert torch.equal(got.action[is_clear], expected.action[is_clear])
        assert torch.equal(got.action[is_clear], best.indices[is_clear, 0])
        log_probs = policy.output_in_float64(x).log_softmax(-1)
        picked = log_probs.gather(1, got.action.unsqueeze(1)).squeeze(1)
        assert_near(got.log_prob, picked)
        assert_near(got.value, expected.value)


@pytest.mark.parametrize("logit", [0.0, 1e4])
def test_categorical_frequencies_are_the_probabilities(logit: float) -> None:
    """Of 4096 rows with the same logits, whatever all of them have in common."""
    policy = Policy(Categorical(4), normalizes=False)
    policy.network.actor.weight.zero_()
    policy.network.actor.bias.copy_(logit + torch.tensor([0.5, 0.2, 0.05, 0.25]).log())
    got = policy.in_c(observations(4096))
    probability = policy.network.actor.bias[0, 0].double().softmax(0)
    share = torch.bincount(got.action, minlength=4) / 4096
    assert float((share - probability).abs().max()) < 4.0 * 0.5 / math.sqrt(4096)
    torch.testing.assert_close(
        got.log_prob.double(), probability.log()[got.action], rtol=0, atol=3e-7
    )


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1.0 - 2.0**-23, 1.0 - 2.0**-24])
def test_the_ends_of_the_uniform(uniform: float) -> None:
    """Of action 1, the high half of a word; that of action 0 is 0. There a rounding more or less
    moves the noise by whole units.
    """
    policy, random = Policy(Categorical(2), normalizes=False), CounterRandom(SEED, 1)
    random.key, random.gamma, _ = aimed(uniform)
    assert random.uniform(shape=(2,)).tolist() == [[0.0, uniform]]
    random.offset = 0
    noise = gumbel(torch.tensor([0.0, uniform]))
    policy.network.actor.weight.zero_()
    for margin in (-1e-5, 1e-5):
        policy.network.actor.bias.copy_(torch.tensor([margin, 0.0]) - noise)
        random.offset = 0
        action = policy.c.act(observations(1), policy.inputs(random)).action
        assert int(action) == int(margin < 0)


def test_the_noise_is_that_of_the_random_stream() -> None:
    """Bit for bit: with a mean of 0 and a deviation of 1 the action is the noise."""
    policy = Policy(gaussian(3, "unbounded"))
    policy.head.log_std.zero_()
    policy.network.actor.weight.zero_()
    policy.network.actor.bias.zero_()
    for rows in (8, 4096):
        mine, other = CounterRandom(SEED, rows), CounterRandom(SEED, rows)
        inputs, x = policy.inputs(mine), observations(rows)
        for _ in range(2):  # two steps, each with two draws and another by torch
            for _ in range(2):
                got = policy.c.act(x, inputs)
                assert torch.equal(got.action, other.normal((3,)))
                assert torch.equal(got.env_action, got.action)
            assert torch.equal(mine.uniform(), other.uniform())
            mine.advance()
            other.advance()
        other.load_state_dict(mine.state_dict())
        mine.load_state_dict(CounterRandom(SEED + 1, rows).state_dict())
        mine.advance(by=70000)
        expected = CounterRandom(SEED + 1, rows)
        expected.advance(by=70000)
        assert torch.equal(policy.c.act(x, inputs).action, expected.normal((3,)))


@pytest.mark.parametrize("actions", [1, 3, 17])
def test_the_log_probability_is_the_normal_density(actions: int) -> None:
    """In float64, of the action that was drawn."""
    policy = Policy(gaussian(actions))
    policy.head.log_std.copy_(torch.linspace(-1.0, 1.0, actions))
    x = observations(4096)
    got, log_std = policy.in_c(x), policy.head.log_std.double()
    z = (got.action.double() - policy.output_in_float64(x)) / log_std.exp()
    log_prob = (-0.5 * z.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(1)
    assert_near(got.log_prob, log_prob)


def test_log_std_stays_inside_its_limits() -> None:
    policy = Policy(gaussian(3))
    policy.head.log_std.copy_(torch.tensor([-9.0, 0.3, 5.0]))
    x = observations(257)
    assert_all_near(policy.in_c(x), policy.in_torch(x))
    policy.head.log_std[1] = math.nan
    got = policy.in_c(x)
    assert bool(got.log_prob.isnan().all())
    assert torch.equal(got.action.isnan(), torch.tensor([False, True, False]).expand(257, 3))


@pytest.mark.parametrize("head", [gaussian(3), Categorical(5)], ids=("gaussian", "categorical"))
def test_what_it_reads_is_read_at_each_call(head: Gaussian | Categorical) -> None:
    policy, x = Policy(head), observations(257)
    inputs = policy.inputs(CounterRandom(SEED, 257))
    policy.c.act(x, inputs)
    for parameter in policy.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    assert policy.normalizer is not None
    assert policy.value_normalizer is not None
    policy.normalizer.update(5.0 * torch.randn(300, 6))
    policy.value_normalizer.update(9.0 * torch.randn(300, 1))
    inputs.random.offset = 0
    got, expected = policy.c.act(x, inputs), policy.in_torch(x)
    assert_all_near(got, expected)


@pytest.mark.parametrize("head", [gaussian(3), Categorical(5)], ids=("gaussian", "categorical"))
def test_a_row_depends_on_no_other_and_on_no_thread(head: Gaussian | Categorical) -> None:
    policy, threads = Policy(head), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = policy.in_c(observations(4096))
        for count, rows in itertools.product((1, 2, 3), ROWS):
            torch.set_num_threads(count)
            for got, reference in zip(policy.in_c(observations(rows)), expected):
                assert torch.equal(got, reference[:rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("head", [gaussian(2), Categorical(5)], ids=("gaussian", "categorical"))
def test_nan_goes_through(head: Gaussian | Categorical) -> None:
    policy, x = Policy(head), observations(50)
    x[7, 3] = math.nan
    got, expected = policy.in_c(x), policy.in_torch(x)
    is_nan = torch.arange(50) == 7
    assert torch.equal(got.value.isnan(), is_nan)
    assert_all_near(got, expected)
    x[7, 3] = math.inf  # is clipped
    assert_all_near(policy.in_c(x), policy.in_torch(x))


def test_one_logit_of_nan_is_taken_as_in_torch() -> None:
    policy, x = Policy(Categorical(5)), observations(50)
    policy.network.actor.bias[..., 3] = math.nan
    got = policy.in_c(x)
    assert torch.equal(got.action, policy.in_torch(x).action)
    assert got.action.tolist() == [3] * 50
    assert bool(got.log_prob.isnan().all())


def test_the_logarithm_of_cpu_vectors(tmp_path: Path) -> None:
    """Over all positive numbers that are not denormal, closely about 1, and where it is none."""
    source, library = tmp_path / "log.c", tmp_path / "log.so"
    source.write_text(
        '#include "cpu_vectors.h"\n'
        '__attribute__((visibility("default"))) void logs(float *x, int64_t count)\n'
        "{ for (int64_t i = 0; i < count; i += LANES) store(x + i, logarithm(load(x + i))); }\n"
    )
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    command = [compiler, *c_library.FLAGS, f"-I{c_library.FOLDER}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    x = torch.cat(
        (
            2.0 ** torch.linspace(-126.0, 127.99, 200_000, dtype=torch.float64),
            torch.linspace(0.6, 1.6, 199_992, dtype=torch.float64),
            torch.tensor([1.0 - 2.0**-24, 1.0 + 2.0**-23, 1.0, 3e38], dtype=torch.float64),
        )
    ).float()
    got = torch.cat((x, torch.tensor([math.nan, math.inf, -math.nan, math.inf])))
    ctypes.CDLL(str(library)).logs(ctypes.c_void_p(got.data_ptr()), ctypes.c_int64(len(got)))
    assert got[-4:].isnan().tolist() == [True, False, True, False]
    assert got[-3] == got[-1] == math.inf
    expected = x.double().log()
    error = (got[:-4].double() - expected).abs() / expected.abs().clamp(min=1e-30)
    assert float(error.max()) < 1e-7


def test_rows_that_do_not_lie_together_and_a_wider_dtype_by_default() -> None:
    policy, x = Policy(gaussian(2)), observations(8)
    spread = torch.stack((x, x), 1).view(8, 12)[:, :6]
    expected = policy.in_c(spread.clone())
    torch.set_default_dtype(torch.float64)
    try:
        for got, reference in zip(policy.in_c(spread), expected):
            assert torch.equal(got, reference)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_it_refuses() -> None:
    policy, other = Policy(gaussian(2)), Policy(gaussian(2))
    inputs, x = policy.inputs(CounterRandom(SEED, 8)), observations(8)
    for wrong in (x.double(), x[:, :5], x[0], x.unsqueeze(0), x.to("meta")):
        with pytest.raises(ValueError, match=r"x must be \[N, 6\] float32 in CPU memory, got"):
            policy.c.act(wrong, inputs)
        with pytest.raises(ValueError, match=r"x must be \[N, 6\] float32 in CPU memory, got"):
            policy.c.value(wrong, inputs)
    with pytest.raises(ValueError, match="a row for each of 8 streams, got 7"):
        policy.c.act(x[:7], inputs)
    with pytest.raises(ValueError, match="belong to another network"):
        other.c.act(x, inputs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_it_cannot_read_are_refused(device: str) -> None:
    """Of another size, or not in CPU memory."""
    policy, size = Policy(gaussian(2)), 3 if device == "cpu" else 2
    own, random = policy.gaussian(), CounterRandom(SEED, 8)
    assert own is not None
    log_std, units = torch.zeros(size, device=device), torch.zeros(4, size, device=device)
    wide = torch.zeros(5 if device == "cpu" else 6, device=device)
    pair = torch.zeros(2 if device == "cpu" else 1, device=device)
    right = torch.zeros(6), torch.zeros(1)
    cases = {
        "log_std": (own._replace(log_std=log_std), None, None),
        "units": (own._replace(units=units), None, None),
        "obs.shift": (own, Scale(wide, right[0]), None),
        "obs.inv_std": (own, Scale(right[0], wide), None),
        "value.shift": (own, None, Scale(pair, right[1])),
        "value.inv_std": (own, None, Scale(right[1], pair)),
    }
    for name, (gaussian_actions, obs, value) in cases.items():
        with pytest.raises(ValueError, match=f"^{name} must be .* in CPU memory, got .* {device}"):
            ActInputs(policy.c, random, gaussian_actions, obs, value)
    with pytest.raises(ValueError, match="units must be"):
        ActInputs(policy.c, random, own._replace(units=own.units.t().contiguous().t()))
    random.key = random.key.to("meta")
    with pytest.raises(ValueError, match="key must be"):
        ActInputs(policy.c, random, own)
