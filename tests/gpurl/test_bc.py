"""Behaviour cloning: gradients against autograd, optima against closed forms, whole runs, and who goes on from a clone."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn import functional

import gpurl
from gpurl.algorithms import make_algorithm
from gpurl.algorithms.algorithm import episode_ends, restart_carry
from gpurl.algorithms.bc import BC, BCConfig
from gpurl.api import evaluate_run, resume, train
from gpurl.api import make_trainer as trainer_of
from gpurl.box_units import BoxUnits
from gpurl.cli import main
from gpurl.config import build, make_settings
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, UsageError
from gpurl.kernels.backend import no_host_looks
from gpurl.policy import Policy
from gpurl.trainer import Trainer
from tests.fake_graphs import FakeGraphs
from tests.gpurl.test_train import assert_same, state_of
from tests.small_runs import small_run, small_settings, some_demonstrations
from tests.test_graphs import assert_equal, results

ENVS, CPU = 8, torch.device("cpu")
SMALL: dict[str, Any] = small_settings("bc") | {"num_envs": ENVS, "horizon": 2, "device": "cpu", "quiet": True, "log_every": 0.0}
ITERATION = ENVS * 2
OBS, ACTIONS, ROWS = 5, 2, 64
OBS_SPACE, ACTION_SPACE = Box(-np.inf, np.inf, (OBS,), np.float32), Box(-1.0, 1.0, (ACTIONS,), np.float32)


@pytest.fixture
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(space: Any = ACTION_SPACE, num_obs: int = OBS, **settings: Any) -> BC:
    """By itself: no dataset is read, batches are given by hand."""
    obs_space = Box(-np.inf, np.inf, (num_obs,), np.float32)
    algorithm = make_algorithm("bc", build(BCConfig, settings), obs_space, space, 4, seed=3)
    assert isinstance(algorithm, BC)
    return algorithm


def fit(algorithm: BC, obs: Tensor, action: Tensor, steps: int, rate: float) -> float:
    """Steps over the whole of the data at a rate that falls to 0; returns the last loss."""
    batch = {"obs": obs, "action": action, "weight": torch.ones(len(obs))}
    with torch.inference_mode():
        for step in range(steps):
            algorithm.optimizers["actor"].learning_rate.fill_(rate * (1.0 - step / steps))
            parts, _ = algorithm.learn_from(batch, 0, wants_parts=True)
    return float(parts["actor_loss"])


# ---- gradients ----


def deterministic(output: Tensor, action: Tensor) -> Tensor:
    return functional.mse_loss(output.tanh(), action, reduction="none").mean(1)


def squashed(output: Tensor, action: Tensor) -> Tensor:
    mean, log_std = output.chunk(2, 1)
    return -TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform()).log_prob(action).sum(1)


def chosen(output: Tensor, action: Tensor) -> Tensor:
    return functional.cross_entropy(output, action.long(), reduction="none") + 0.3 * output.square().mean(1)


def chosen_each(output: Tensor, action: Tensor) -> Tensor:
    parts = zip(output.split((3, 2), 1), action.long().unbind(1))
    return sum(functional.cross_entropy(*part, reduction="none") for part in parts) + 0.3 * output.square().mean(1)


CASES = [
    (ACTION_SPACE, {"head": "deterministic"}, deterministic),
    (ACTION_SPACE, {"head": "squashed", "max_grad_norm": 0.5}, squashed),
    (Discrete(3), {"logit_penalty": 0.3}, chosen),
    (MultiDiscrete([3, 2]), {"logit_penalty": 0.3}, chosen_each),
]


@pytest.mark.parametrize(("space", "settings", "loss"), CASES, ids=["deterministic", "squashed", "discrete", "multi-discrete"])
@pytest.mark.usefixtures("_in_float64")
def test_updates_are_those_of_autograd(space: Any, settings: dict[str, Any], loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    algorithm = make(space, learning_rate=1e-2, actor_network={"hidden": [8, 8], "activation": "tanh"}, **settings)
    weights = [weight.detach().clone().requires_grad_() for weight in algorithm.actor.parameters()]
    optimizer, generator = torch.optim.Adam(weights, lr=1e-2), torch.Generator().manual_seed(0)
    for _ in range(8):
        obs = torch.randn(ROWS, OBS, generator=generator)
        weight = (torch.rand(ROWS, generator=generator) < 0.8).double()
        action = torch.rand(ROWS, ACTIONS, generator=generator) * 1.998 - 0.999
        if not isinstance(space, Box):
            action = (torch.rand(ROWS, ACTIONS, generator=generator) * torch.tensor([3.0, 2.0])).floor()
            action = action if isinstance(space, MultiDiscrete) else action[:, 0]
        with torch.inference_mode():
            parts, rows = algorithm.learn_from({"obs": obs, "action": action, "weight": weight}, 0, wants_parts=True)
        x = obs
        for layer, bias in zip(weights[0:-2:2], weights[1:-2:2]):
            x = functional.linear(x, layer[0], bias[0, 0]).tanh()
        wanted = loss(functional.linear(x, weights[-2][0], weights[-1][0, 0]), action)
        optimizer.zero_grad()
        mean = (wanted * weight).sum() / weight.sum()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, algorithm.config.max_grad_norm or 1e9)
        optimizer.step()
        torch.testing.assert_close(rows, wanted.detach())
        torch.testing.assert_close(torch.stack((parts["actor_loss"], parts["grad_norm"])), torch.stack((mean, norm)).detach())
    for ours, theirs in zip(algorithm.actor.parameters(), weights):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-10)


# ---- optima that are known ----


@pytest.mark.usefixtures("_in_float64")
def test_a_linear_expert_with_noise_is_found_by_least_squares() -> None:
    """u = Wx + b +- s with both signs at every x: most likely are the least-squares solution for atanh(a) and the deviation s."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, OBS, generator=generator)
    weight, bias, noise = torch.randn(OBS, ACTIONS, generator=generator) * 0.3, torch.tensor([0.2, -0.1]), torch.tensor([0.3, 0.1])
    u = torch.cat((x @ weight + bias + noise, x @ weight + bias - noise))
    obs = torch.cat((x, x))
    inputs = torch.cat((obs, torch.ones(len(obs), 1)), 1)
    solution = torch.linalg.lstsq(inputs, u).solution
    deviation = (u - inputs @ solution).square().mean(0).sqrt()
    algorithm = make(actor_network={"hidden": []}, head="squashed")
    fit(algorithm, obs, u.tanh(), 1500, 5e-2)
    output = algorithm.actor.forward(obs)[0].detach()
    torch.testing.assert_close(output[:, :ACTIONS], inputs @ solution, rtol=0, atol=1e-5)
    torch.testing.assert_close(output[:, ACTIONS:], deviation.log().expand(len(obs), ACTIONS), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("_in_float64")
def test_squared_error_goes_to_its_least() -> None:
    """tanh(Wx + b) against actions with noise: where Newton's method ends that knows nothing of this program."""
    generator = torch.Generator().manual_seed(2)
    obs = torch.randn(300, OBS, generator=generator)
    action = ((obs @ torch.randn(OBS, ACTIONS, generator=generator)).tanh() + 0.3 * torch.randn(300, ACTIONS, generator=generator)).clamp(
        -1, 1
    )
    algorithm = make(actor_network={"hidden": []}, head="deterministic")
    fit(algorithm, obs, action, 1500, 1e-1)
    weights = torch.zeros(OBS + 1, ACTIONS, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], lr=1.0, max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (((obs @ weights[:OBS] + weights[OBS]).tanh() - action) ** 2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    ours = algorithm.actor.forward(obs)[0].detach()
    torch.testing.assert_close(ours, (obs @ weights[:OBS] + weights[OBS]).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("space", [Discrete(4), MultiDiscrete([4, 3])], ids=str)
@pytest.mark.usefixtures("_in_float64")
def test_cross_entropy_ends_at_the_conditional_entropy_of_the_data(space: Any) -> None:
    """H(action | obs) by counting, of independent choices its sum; each obs is one of six, so every distribution can be said."""
    generator, sizes = torch.Generator().manual_seed(3), (4, 3)
    state = torch.randint(6, (600,), generator=generator)
    chances = [torch.randn(6, size, generator=generator).softmax(1) for size in sizes]
    columns = [torch.multinomial(chance[state], 1, generator=generator).squeeze(1) for chance in chances]
    columns = columns if isinstance(space, MultiDiscrete) else columns[:1]
    wanted = 0.0
    for column, size in zip(columns, sizes):
        counts = torch.zeros(6, size).index_put_((state, column), torch.ones(600), accumulate=True)
        wanted += float(torch.special.entr(counts / counts.sum(1, keepdim=True)).sum(1) @ counts.sum(1) / 600)
    algorithm = make(space, 6, actor_network={"hidden": []}, logit_penalty=0.0)
    action = torch.stack(columns, 1).double() if isinstance(space, MultiDiscrete) else columns[0].double()
    loss = fit(algorithm, functional.one_hot(state, 6).double(), action, 600, 5e-2)
    assert loss == pytest.approx(wanted, abs=1e-6)
    assert loss >= wanted - 1e-12


def test_units_go_to_the_environment_and_back() -> None:
    low, high = np.array([[-2.0, 0.0], [-1.0, 3.0]], np.float32), np.array([[2.0, 10.0], [1.0, 3.0]], np.float32)
    box = BoxUnits(Box(low, high))
    action = torch.rand(7, 4) * 2 - 1
    there = box.to_env(action)
    assert there.shape == (7, 2, 2)
    back = box.from_env(there)
    torch.testing.assert_close(back[:, :3], action[:, :3])
    assert back[:, 3].tolist() == [0.0] * 7  # of a dimension with one action only


# ---- whole runs ----


def balance(obs: Tensor) -> Tensor:
    """Pushes the cart to where the pole falls: 500 steps from every start."""
    return (obs @ torch.tensor([0.1, 0.5, 5.0, 1.0]) > 0).long()


def record(path: Path, env: Any, act: Callable[[Tensor], Tensor], steps: int) -> str:
    """A dataset of what `act` does."""
    obs, _ = env.reset(seed=1)
    seen, done = [], []
    for _ in range(steps):
        seen.append(obs)
        done.append(act(obs))
        obs = env.step(done[-1]).obs
    np.savez(path, obs=torch.cat(seen).numpy(), action=torch.cat(done).numpy())
    return str(path)


def clone(folder: Path, env: str, **changes: Any) -> gpurl.Run:
    shape = {"num_envs": 16, "threads": 1, "learning_rate": 3e-3, "schedule": "linear", "actor_network": {"hidden": [64, 64]}}
    fixed = {"device": "cpu", "quiet": True, "run_dir": str(folder), "eval_every": 10**9}
    return train("bc", env, **(shape | {"updates": 16, "total_steps": 16 * 60, "learning_starts": 256} | fixed | changes))


@pytest.fixture(scope="module")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that cloned ten episodes of `balance`."""
    folder = tmp_path_factory.mktemp("balancer")
    path = record(folder / "ten.npz", make_env("cart_pole", 2, "cpu", 0), balance, 2500)
    return clone(folder / "run", "cart_pole", dataset=path).folder


def test_ten_episodes_are_enough_to_balance(balancer: Path) -> None:
    assert evaluate_run(balancer, episodes=64, device="cpu", best=False)["eval/mean_reward"] >= 475


@pytest.mark.parametrize("head", ["squashed", "deterministic"])
def test_a_pursuer_is_cloned_to_within_its_standard_error(tmp_path: Path, head: str) -> None:
    env = make_env("chasing", 64, "cpu", 0)
    path = record(tmp_path / "pursuit.npz", env, env.scripted_action, 400)  # type: ignore[attr-defined]
    run = clone(tmp_path / "run", "chasing", dataset=path, head=head, total_steps=16 * 250, batch_size=512, learning_starts=512)
    ours, scripted = run.outcome.evaluation, run.baseline
    error = (ours["eval/std_reward"] ** 2 / 64 + scripted["eval/std_reward"] ** 2 / 64) ** 0.5
    assert abs(ours["eval/mean_reward"] - scripted["eval/mean_reward"]) <= error


def test_dagger_learns_from_a_teacher(tmp_path: Path, balancer: Path) -> None:
    run = clone(tmp_path / "run", "cart_pole", teacher=str(balancer), dagger=True, horizon=16, total_steps=16 * 16 * 60)
    assert run.outcome.evaluation["eval/mean_reward"] >= 475


# ---- who plays, and what is stored ----


def make_trainer(env: str = "cart_pole", level: str = "off", **changes: Any) -> Trainer:
    """A started trainer, with graphs that are recorded on the CPU where a level is wanted."""
    settings = make_settings("bc", env, **(SMALL | {"threads": 1, "graph": level} | changes))
    trainer = trainer_of(settings, CPU)
    trainer.graph_backend = None if level == "off" else FakeGraphs()
    trainer.start()
    return trainer


def watched(trainer: Trainer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(obs, action, what has ended after it) of every step from now on."""
    steps, step = [], trainer.env.step

    def watching(action: Tensor) -> Any:
        obs = trainer.obs.clone()
        timestep = step(action)
        steps.append((obs, action.clone(), episode_ends(timestep).clone()))
        return timestep

    trainer.env.step = watching  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("dagger", [False, True])
def test_the_teacher_labels_and_the_student_plays_once_it_has_learnt(balancer: Path, dagger: bool) -> None:
    trainer, teacher = make_trainer(teacher=str(balancer), dagger=dagger, learning_rate=1e-12), gpurl.load(balancer)
    assert isinstance(trainer.algorithm, BC)
    with torch.no_grad():
        list(trainer.algorithm.actor.parameters())[-1].copy_(torch.tensor([99.0, -99.0]))  # a student that goes left always
    steps = watched(trainer)
    for _ in range(4):
        trainer.iterate()
    for number, (obs, action, _) in enumerate(steps):
        assert torch.equal(action, torch.zeros_like(action) if dagger and number >= 2 else teacher.act(obs)), number
    batch = trainer.algorithm.replay.sample(500, 0.9)
    assert torch.equal(batch["action"].long(), teacher.act(batch["obs"]))
    assert 0 < int(batch["action"].sum()) < 500
    torch.testing.assert_close(torch.cat([obs for obs, _, _ in steps]).unique(dim=0), batch["obs"].unique(dim=0))


def test_with_a_dataset_the_student_plays_and_learns_nothing_of_it(tmp_path: Path) -> None:
    env = make_env("pendulum", 4, "cpu", 0)
    path = record(tmp_path / "some.npz", env, lambda obs: obs[:, :1] * 1.5, 30)
    trainer = make_trainer("pendulum", dataset=path, normalize_obs=True)
    algorithm, data = trainer.algorithm, np.load(path)
    assert isinstance(algorithm, BC)
    assert algorithm.normalizer is not None
    before = algorithm.replay.state_dict()["obs"].clone()
    for _ in range(4):
        trainer.iterate()
    algorithm.cut()  # as when environments were reset because they gave NaN
    algorithm.cut(torch.arange(ENVS) == 3)
    assert torch.equal(algorithm.replay.state_dict()["obs"], before)
    np.testing.assert_allclose(algorithm.normalizer.mean.numpy(), data["obs"].mean(0), atol=1e-6)
    batch = algorithm.replay.sample(3000, 0.99)
    assert bool((batch["weight"] == 1).all())
    assert len(batch["index"].unique()) == len(data["obs"]) == 120
    np.testing.assert_array_equal(batch["obs"], data["obs"][batch["index"]])
    np.testing.assert_allclose(batch["action"] * 2.0, data["action"][batch["index"]], atol=1e-6)  # torques go to 2


def test_images_stay_small(tmp_path: Path) -> None:
    algorithm = make_algorithm(
        "bc",
        build(BCConfig, {"dataset": str(tmp_path / "some.npz")}),
        Box(0, 255, (4, 4, 1), np.uint8),
        MultiDiscrete([2, 3]),
        ENVS,
    )
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 1), np.uint8)
    np.savez(tmp_path / "some.npz", obs=images, action=np.ones((9, 2), np.int64))
    algorithm.make_buffer()
    assert isinstance(algorithm, BC)
    batch = algorithm.replay.sample(20, 0.99)
    assert batch["obs"].dtype == torch.uint8
    np.testing.assert_array_equal(batch["obs"], images.reshape(9, 16)[batch["index"]])
    assert algorithm.learn({})["train/actor_loss"].isfinite()


def test_a_teacher_with_a_memory_keeps_it(tmp_path: Path) -> None:
    network = {"hidden": [8], "memory": "gru", "memory_size": 8}
    path = small_run(tmp_path / "teacher", 1, network=network).folder
    trainer, teacher = make_trainer("pendulum", teacher=str(path)), gpurl.load(path, num_envs=ENVS).algorithm
    steps, carry = watched(trainer), teacher.initial_carry(ENVS)
    for _ in range(20):
        trainer.iterate()
    for obs, action, ended in steps:
        wanted, carry, _ = teacher.act(obs, carry, explore=False)
        assert torch.equal(action, wanted)
        carry = restart_carry(carry, ended)
    assert any(bool(ended.any()) for _, _, ended in steps)
    assert not torch.equal(action, teacher.act(obs, teacher.initial_carry(ENVS), explore=False).action)  # which a memory changes


# ---- stopping, loading, graphs ----


def settings_of(kind: str, folder: Path, balancer: Path) -> dict[str, Any]:
    if kind == "dataset":
        return {"dataset": some_demonstrations(folder, make_env("cart_pole", 1, "cpu", 0)), "normalize_obs": True}
    return {"teacher": str(balancer), "dagger": kind == "dagger", "save_replay": True}


@pytest.mark.parametrize("kind", ["dataset", "teacher", "dagger"])
def test_resume_is_not_having_stopped(tmp_path: Path, balancer: Path, kind: str) -> None:
    shape = SMALL | settings_of(kind, tmp_path, balancer) | {"total_steps": 12 * ITERATION, "eval_episodes": 4}
    whole = train("bc", "cart_pole", run_dir=str(tmp_path / "whole"), **shape)
    stopped = shape | {"eval_every": 7 * ITERATION, "stop_return": -1e9}
    assert train("bc", "cart_pole", run_dir=str(tmp_path / "parts"), **stopped).outcome.steps == 7 * ITERATION
    assert_same(state_of(whole.folder), state_of(resume(tmp_path / "parts", stop_return=None).folder))


@pytest.mark.parametrize("kind", ["dataset", "teacher"])
def test_a_policy_needs_neither_dataset_nor_teacher(tmp_path: Path, balancer: Path, kind: str) -> None:
    (tmp_path / "source").mkdir()
    shutil.copytree(balancer, tmp_path / "source" / "run")
    shape = SMALL | settings_of(kind, tmp_path / "source", tmp_path / "source" / "run")
    folder = train("bc", "cart_pole", run_dir=str(tmp_path / "run"), total_steps=2 * ITERATION, eval_episodes=0, **shape).folder
    shutil.rmtree(tmp_path / "source")
    policy = gpurl.load(folder, num_envs=3)
    assert policy.act(torch.zeros(3, 4)).shape == policy.act(torch.zeros(3, 4), deterministic=False).shape == (3,)
    assert np.isnan(policy.value(np.zeros(4, np.float32)))
    with pytest.raises((UsageError, CheckpointError), match="source"):
        resume(folder, total_steps=3 * ITERATION)


@pytest.mark.parametrize("level", ["full", "policy"])
@pytest.mark.parametrize("kind", ["dataset", "teacher", "dagger"])
def test_graphs_do_what_the_loop_does(tmp_path: Path, balancer: Path, kind: str, level: str) -> None:
    settings = settings_of(kind, tmp_path, balancer)
    with no_host_looks():
        trainer = make_trainer(level=level, **settings)
        got, wanted = results(trainer), results(make_trainer(**settings))
    assert trainer.graph_level == level, trainer.notes
    assert_equal(got, wanted)


@pytest.mark.parametrize("env", ["chasing", "cart_pole"])
@pytest.mark.parametrize("dagger", [False, True])
def test_with_a_teacher_nothing_looks_at_a_tensor(monkeypatch: pytest.MonkeyPatch, env: str, dagger: bool) -> None:
    made = make_env(env, 1, "cpu", 0)
    settings = make_settings("ppo", env, network={"hidden": [8], "memory": "gru"})

    def load(path: str, device: str, num_envs: int) -> Policy:  # a checkpoint holds numbers, which these tensors have not
        spaces = made.single_observation_space, made.single_action_space
        return Policy(make_algorithm("ppo", settings.algorithm_config, *spaces, num_envs, device), {})

    monkeypatch.setattr("gpurl.policy.load", load)
    with FakeTensorMode(), no_host_looks():
        trainer = make_trainer(env, teacher="somebody", dagger=dagger)
        for _ in range(2):
            assert trainer.iterate()


# ---- what is refused ----

SPACES: dict[str, Any] = {"box": ACTION_SPACE, "unbounded": Box(-np.inf, np.inf, (2,)), "late": Discrete(3, start=1)}


@pytest.mark.parametrize(("space", "settings", "message"), [
    ("box", {}, "bc needs a dataset or a teacher, one of them; got dataset None and teacher None"),
    ("box", {"dataset": "a.npz", "teacher": "b"}, "one of them; got dataset a.npz and teacher b"),
    ("box", {"dataset": "a.npz", "dagger": True}, "dagger asks a teacher .* dataset a.npz cannot say"),
    ("box", {"dataset": "a.npz"}, "cannot read the dataset a.npz: .*No such file"),
    ("unbounded", {"dataset": "a.npz"}, "BC needs a bounded Box action space"),
    ("late", {"dataset": "a.npz"}, "BC numbers actions from 0"),
    ("box", {"n_step": 3}, "bc clones actions, whatever they led to: leave out n_step 3"),
    ("box", {"reward_scale": 0.1}, "leave out reward_scale 0.1"),
    ("box", {"prioritized": True}, "leave out prioritized True"),
    ("box", {"head": "gaussian"}, "head is 'gaussian'; it must be one of squashed, deterministic"),
    ("box", {"logit_penalty": -1.0}, "logit_penalty must be at least 0"),
], ids=str)  # fmt: skip
def test_settings_that_cannot_work(space: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(SPACES[space], **settings).make_buffer()


def test_a_teacher_of_another_environment(tmp_path: Path, balancer: Path) -> None:
    with pytest.raises(
        UsageError, match=r"the teacher .* is of another environment: its observation_space is Box.*\(4,\).*, this one's Box"
    ):
        make_trainer("pendulum", teacher=str(balancer))
    algorithm = make_algorithm(
        "bc", build(BCConfig, {"teacher": str(balancer)}), gpurl.load(balancer).algorithm.observation_space, Discrete(3), 4
    )
    with pytest.raises(UsageError, match=r"its action_space is Discrete\(2\), this one's Discrete\(3\)"):
        algorithm.make_buffer()
    with pytest.raises(CheckpointError, match="nowhere"):
        make_trainer(teacher=str(tmp_path / "nowhere"))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--num-envs", "4", "--total-steps", "8", "--eval-episodes", "0", "--device", "cpu"]
    assert main(["train", "bc", "pendulum", "--run-dir", str(tmp_path / "none"), *small]) == 2
    assert "bc needs a dataset or a teacher, one of them" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    path = some_demonstrations(tmp_path, make_env("pendulum", 1, "cpu", 0))
    assert main(["train", "bc", "pendulum", "--dataset", path, "--run-dir", str(tmp_path / "run"), *small]) == 0
    assert main(["train", "bc", "pendulum", "--teacher", str(tmp_path / "run"), "--dagger", f"--root={tmp_path}", *small]) == 0


# ---- the actor of another run ----


def weights_of(algorithm: Any, name: str = "actor") -> dict[str, Tensor]:
    return {key: value.clone() for key, value in getattr(algorithm, name).state_dict().items()}


def cloned(folder: Path, env: str = "pendulum", **changes: Any) -> Path:
    path = some_demonstrations(folder, make_env(env, 1, "cpu", 0))
    shape = SMALL | {"dataset": path, "total_steps": 2 * ITERATION, "eval_episodes": 0, "run_dir": str(folder / "bc"), "seed": 5}
    return train("bc", env, **(shape | changes)).folder


def successor(name: str, env: str, folder: Path, **changes: Any) -> Trainer:
    settings = make_settings(name, env, **(small_settings(name) | {"num_envs": 4, "actor_from": str(folder), "threads": 1} | changes))
    return trainer_of(settings, CPU)


@pytest.mark.parametrize(
    ("name", "env", "head", "normalize"),
    [
        ("sac", "pendulum", "squashed", True),
        ("mod_sac", "pendulum", "squashed", False),
        ("td3", "pendulum", "deterministic", False),
        ("fast_td3", "pendulum", "deterministic", True),
        ("sac", "cart_pole", "squashed", False),
    ],
)
def test_others_go_on_from_a_clone(tmp_path: Path, name: str, env: str, head: str, normalize: bool) -> None:
    shape = {"normalize_obs": normalize, "actor_network": {"hidden": [8], "layer_norm": name == "fast_td3"}}
    folder = cloned(tmp_path, env, head=head, **shape)
    wanted = gpurl.load(folder).algorithm
    trainer = successor(name, env, folder, critic_network={"hidden": [8]}, **shape)
    learner: Any = trainer.algorithm
    drawn, critic = weights_of(learner), weights_of(learner, "critic")
    trainer.start()
    assert not any(torch.equal(value, drawn[key]) for key, value in weights_of(learner).items() if "weight" in key)
    assert_same(weights_of(learner), weights_of(wanted))
    assert_same(weights_of(learner, "critic"), critic)
    if learner.target_actor is not None:
        assert_same(weights_of(learner, "target_actor"), weights_of(wanted))
    assert torch.equal(learner.act(trainer.obs, explore=False).action, wanted.act(trainer.obs, explore=False).action)
    for _ in range(3):
        trainer.iterate()
    assert not torch.equal(next(iter(weights_of(learner).values())), next(iter(weights_of(wanted).values())))


def test_the_first_run_is_needed_at_the_start_only(tmp_path: Path, balancer: Path) -> None:
    folder = tmp_path / "clone"
    shutil.copytree(balancer, folder)
    shape = small_settings("sac") | {"actor_network": {"hidden": [64, 64]}, "quiet": True, "device": "cpu", "num_envs": 16}
    shape |= {"learning_starts": 10**6, "total_steps": 16, "actor_from": str(folder)}
    run = train("sac", "cart_pole", run_dir=str(tmp_path / "run"), **shape)
    assert run.outcome.evaluation["eval/mean_reward"] >= 475  # nothing was learnt yet
    shutil.rmtree(folder)
    assert_same(weights_of(gpurl.load(run.folder).algorithm), weights_of(gpurl.load(balancer).algorithm))
    assert resume(run.folder, total_steps=32).outcome.evaluation["eval/mean_reward"] >= 475
    with pytest.raises(CheckpointError, match="actor_from"):
        resume(run.folder, total_steps=48, actor_from="another")
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        train("sac", "cart_pole", run_dir=str(tmp_path / "again"), **shape)


@pytest.mark.parametrize(("name", "env", "changes", "message"), [
    ("sac", "pendulum", {"actor_network": {"hidden": [9]}}, r"its actor_network is .*\(8,\).* wanted .*\(9,\)"),
    ("sac", "pendulum", {"actor_network": {"activation": "tanh"}}, "its actor_network is .*relu.* wanted .*tanh"),
    ("sac", "chasing", {}, r"its action shape is \(1,\), wanted \(2,\)"),
    ("td3", "pendulum", {}, r"its actor\.steps\.1\.weight is \(1, 2, 8\), wanted \(1, 1, 8\)"),
    ("sac", "mountain_car_continuous", {}, r"its actor\.steps\.0\.weight is \(1, 8, 3\), wanted \(1, 8, 2\)"),
    ("sac", "pendulum", {"normalize_obs": True}, r"its normalizer\.mean is None, wanted \(3,\)"),
], ids=str)  # fmt: skip
def test_an_actor_of_another_form_is_refused(tmp_path: Path, name: str, env: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"actor_from .*bc does not fit: {message}"):
        successor(name, env, cloned(tmp_path), **changes).start()


def test_what_has_no_such_actor_is_refused(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", 1).folder
    with pytest.raises(UsageError, match=r"does not fit: its actor_network is None, wanted BodyConfig"):
        successor("sac", "pendulum", folder).start()
