"""Learning beside collecting: a fixed schedule with a lag of one iteration, whose numbers depend on
no thread, no stream and no graph.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gpurl
from gpurl.algorithms import make_algorithm
from gpurl.algorithms.base import Metrics
from gpurl.algorithms.ppo import PPO
from gpurl.buffers.minibatches import Minibatch
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.engine.asynchronous import Asynchronous, LearningStream, LearningThread
from gpurl.engine.eager import Eager
from gpurl.envs.registry import make_env
from gpurl.envs.vec_env import Timestep
from gpurl.errors import DivergedError, EnvError, UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.vtrace import vtrace_reference
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_engine
from tests.engines import graph_level, running_state
from tests.fake_graphs import FakeGraphs
from tests.small_runs import SMALL, assert_same, exit_code, small_run
from tests.tiny_envs import Endless, RandomWalk

ENVS, HORIZON = 8, 6
ITERATION = ENVS * HORIZON
WAIT = 20.0  # seconds until a thread that should have answered counts as stuck


class OwnLoss(PPO):
    """Does not run in C."""

    def loss(self, batch: Minibatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(batch)
        return 2.0 * loss, metrics


class InTurn:
    """The schedule in one thread."""

    def __init__(self, learns_first: bool) -> None:
        self.learns_first = learns_first

    def run(self, learn: Callable[[], Any], collect: Callable[[], None]) -> Any:
        if self.learns_first:
            result = learn()
            collect()
            return result
        collect()
        return learn()


def make(
    algorithm: str = "ppo",
    env: Any = "tests.tiny_envs:RandomWalk",
    beside: Any = None,
    backend: FakeGraphs | None = None,
    is_asynchronous: bool = True,
    **changes: Any,
) -> Eager:
    """An engine at its start."""
    minibatches = 1 if algorithm == "a2c" else 2
    shape = {"num_envs": ENVS, "horizon": HORIZON, "minibatches": minibatches}
    shape |= {"network": {"hidden": [8, 8]}, "asynchronous": is_asynchronous}
    name = env if isinstance(env, str) else "tests.tiny_envs:RandomWalk"
    settings = make_settings(algorithm, name, **(shape | changes))
    made = make_env(env, ENVS, "cpu", 0) if isinstance(env, str) else env
    spaces = made.single_observation_space, made.single_action_space
    model = make_algorithm(
        algorithm, settings.algorithm_config, *spaces, ENVS, state_space=made.single_state_space
    )
    engine = make_engine(settings, model, made, backend)
    if beside is not None:
        assert isinstance(engine, Asynchronous)
        engine.beside = beside
    engine.begin(0, staggered=True)
    return engine


def make_asynchronous(*arguments: Any, **changes: Any) -> Asynchronous:
    engine = make(*arguments, **changes)
    assert isinstance(engine, Asynchronous)
    return engine


def results(engine: Eager, iterations: int = 6) -> dict[str, Any]:
    """All that a run consists of after some iterations, and what each of them logged."""
    logged = []
    for number in range(iterations):
        metrics = engine.iterate(number / iterations)
        logged.append({name: value.clone() for name, value in metrics.items()})
    return running_state(engine) | {"logged": logged}


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("ppo", "tests.tiny_envs:RandomWalk", {}),
    ("ppo", "cart_pole", {"schedule": "linear", "normalize_advantage": "minibatch"}),
    ("ppo", "pendulum", {"squash": True, "entropy_coef": 0.01, "clip_range_value": 0.2}),
    ("ppo", "tests.tiny_envs:HiddenAlternating", {"normalize_value": False}),
    ("a2c", "pendulum", {}),
    ("tests.engine.test_asynchronous:OwnLoss", "chasing", {}),
    ("ppo", "pendulum", {"network": {"trunk": "tests.nn.test_own_network:Centred"}}),
    ("tests.joint_ppo:JointPPO", "tests.tiny_envs:Walkers", {}),
]


@pytest.mark.parametrize(("algorithm", "env", "changes"), CASES, ids=str)
def test_no_number_depends_on_which_side_is_first(
    algorithm: str, env: str, changes: dict[str, Any]
) -> None:
    """Neither side reads what the other one writes."""
    expected = results(make(algorithm, env, InTurn(learns_first=True), **changes))
    assert_same(results(make(algorithm, env, InTurn(learns_first=False), **changes)), expected)
    for _ in range(3):
        assert_same(results(make(algorithm, env, **changes)), expected)


def test_both_sides_run_at_the_same_time() -> None:
    """Each waits until the other one has begun, which would be for ever if they took turns."""
    learns, steps = threading.Event(), threading.Event()
    engine = make_asynchronous()
    engine.iterate(0.0)
    learn, step = engine.stages.learn, engine.env.step

    def learn_after_a_step(data: dict[str, Tensor]) -> Metrics:
        learns.set()
        assert steps.wait(WAIT)
        return learn(data)

    def step_after_learning_began(actions: Tensor) -> Timestep:
        steps.set()
        assert learns.wait(WAIT)
        assert threading.current_thread() is threading.main_thread()
        return step(actions)

    engine.learn = learn_after_a_step  # type: ignore[method-assign]
    engine.env.step = step_after_learning_began  # type: ignore[method-assign]
    engine.iterate(0.1)


@pytest.mark.parametrize("algorithm", ["ppo", "tests.engine.test_asynchronous:OwnLoss"])
def test_a_rollout_is_of_the_policy_before_the_last_learning(algorithm: str) -> None:
    """The lag is one; and its values and ratios, by which targets are corrected, are those of the
    policy at the start of learning.
    """
    engine = make_asynchronous(algorithm, learning_rate=0.01, schedule="constant")
    model = engine.algorithm
    assert engine.in_c == (algorithm == "ppo")
    seen = list[tuple[Tensor, ...]]()
    targets_of = PPO.targets

    def targets(self: PPO, buffer: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(tuple(buffer[name].clone() for name in ("obs", "value", "log_ratio")))
        return targets_of(self, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPO, "targets", targets)
        for number in range(4):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            metrics = engine.iterate(0.0)
            assert float(metrics["train/lag"]) == min(number, 1)
            acted = {name: value.clone() for name, value in engine.actor.state_dict().items()}
            assert_same(acted, before)
            changed = {name for name, value in model.state_dict().items() if name.startswith("net")}
            assert any(not torch.equal(before[name], model.state_dict()[name]) for name in changed)
            # what was recorded beside that learning is of this policy
            rollout = engine.rollout
            output, value = engine.actor._forward(engine.actor.inputs(rollout["obs"].flatten(0, 1)))
            log_prob = engine.actor.head.log_prob(output, rollout["action"].flatten(0, 1))
            torch.testing.assert_close(
                log_prob.detach().view(HORIZON, ENVS), rollout["log_prob"], rtol=1e-4, atol=1e-4
            )
            # and what was learned from was valued by it
            obs, value, log_ratio = seen[-1]
            expected = engine.actor.value(obs.flatten(0, 1)).view(HORIZON, ENVS)
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
            assert bool((log_ratio.abs() > 1e-4).any()) == (number > 0)


def test_the_acting_copy_shares_no_memory_and_lacks_nothing() -> None:
    engine = make_asynchronous()
    ours, theirs = engine.algorithm.state_dict(), engine.actor.state_dict()
    assert ours.keys() == theirs.keys() > {"head.log_std", "normalizer.shift"}
    assert "value_normalizer.inv_std" in ours
    addresses = {value.untyped_storage().data_ptr() for value in ours.values()}
    assert addresses.isdisjoint(value.untyped_storage().data_ptr() for value in theirs.values())
    random = engine.algorithm.random_streams
    assert random["action"] is engine.actor.action_random
    assert random["order"] is not engine.actor.random_streams["order"]


@pytest.mark.parametrize("env", ["pendulum", "cart_pole", "tests.tiny_envs:RandomWalk"])
def test_without_a_lag_it_learns_what_the_other_engines_learn(env: str) -> None:
    """The first rollout is of the policy that learns: V-trace is GAE."""
    one, other = make(env=env), make(env=env, is_asynchronous=False)
    metrics, expected = one.iterate(0.0), other.iterate(0.0)
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-3, atol=1e-4)
    for name, weight in other.algorithm.state_dict().items():
        torch.testing.assert_close(one.algorithm.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def test_targets_are_those_of_vtrace() -> None:
    """From what was recorded: ratios, values and final values of the policy that learns."""
    changes = {"normalize_value": False, "normalize_advantage": "none", "learning_rate": 0.02}
    engine = make_asynchronous(schedule="constant", **changes)
    for _ in range(3):
        engine.iterate(0.0)
    rollout, model = engine.rollout, engine.algorithm
    assert bool(rollout["truncated"].any())
    assert bool(rollout["terminated"].any())
    # by the algorithm's own methods, every row
    obs, final_obs = (rollout[name].flatten(0, 1) for name in ("obs", "final_obs"))
    output, value = model.network(model.inputs(obs))
    log_prob = model.head.log_prob(output, rollout["action"].flatten(0, 1))
    steps = [
        rollout["reward"],
        torch.cat((value, model.value(final_obs)[-ENVS:])).view(HORIZON + 1, ENVS),
        model.value(final_obs).view(HORIZON, ENVS),
        rollout["terminated"],
        rollout["truncated"],
        log_prob.view(HORIZON, ENVS) - rollout["log_prob"],
    ]
    assert float(steps[-1].detach().abs().max()) > 0.01
    steps = [x.detach().double() if x.is_floating_point() else x for x in steps]
    advantage, returns, _ = vtrace_reference(*steps, 0.99, 0.95)
    rows = model.minibatches.rows.unpack(engine.prepare()[0]["packed"])
    for name, expected in (("advantage", advantage), ("returns", returns)):
        torch.testing.assert_close(
            rows[name].view(HORIZON, ENVS).double(), expected, rtol=1e-4, atol=1e-4
        )
    # the surrogate's ratio is to the policy that acted
    assert torch.equal(rows["log_prob"].view(HORIZON, ENVS), rollout["log_prob"])


@pytest.mark.parametrize("nan", ["skip", "reset-envs"])
def test_nan_is_not_trained_on(nan: str) -> None:
    engine = make_asynchronous(env=BreaksAt(9), nan=nan)
    for _ in range(4):
        engine.iterate(0.0)
        assert all(bool(value.isfinite().all()) for value in engine.algorithm.state_dict().values())
    # it stays until the environment is reset; beside the learning that finds it one more rollout
    # of it is played
    assert isinstance(engine.env, BreaksAt)
    assert engine.env._state is not None
    assert bool(engine.env._state["x"][3].isfinite().all()) == (nan == "reset-envs")
    bad_rollouts = 1 if nan == "reset-envs" else 2
    assert engine.guards.finite.total == HORIZON - 2 + bad_rollouts * HORIZON


class BreaksAt(Endless):
    """Environment 3 gives NaN from this step on, until it is reset."""

    def __init__(self, step: int) -> None:
        super().__init__(ENVS, "cpu", 0)
        self.breaks_at, self.played = step, 0

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        self.played += 1
        if self.played == self.breaks_at:
            assert self._state is not None
            x = self._state["x"].clone()
            x[3] = torch.nan
            self._state = self._state | {"x": x}
        return super().step(actions)


class Fails(RandomWalk):
    """Raises in this step."""

    fails_at = 9
    played = 0

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        self.played += 1
        if self.played == self.fails_at:
            raise ValueError("the arm is off")
        return super().step(actions)


def test_an_error_of_the_environment_names_its_step_and_keeps_what_was_learned() -> None:
    engine = make_asynchronous(env=Fails(ENVS, "cpu", 0))
    at = f"at env step {(Fails.fails_at - 1) * ENVS}: Fails.step raised ValueError: the arm is off"
    with pytest.raises(EnvError, match=at):
        engine.iterate(0.0)
    assert (engine.iteration, engine.steps) == (1, ITERATION)
    engine.abandon()
    assert engine.state_dict()["rollout"] == {}
    expected = make_asynchronous()
    expected.iterate(0.0)
    assert_same(engine.algorithm.state_dict(), expected.algorithm.state_dict())
    engine.iterate(0.0)
    assert (engine.iteration, engine.steps) == (2, 2 * ITERATION)


def test_an_error_in_learning_waits_for_the_rollout() -> None:
    engine = make_asynchronous()
    engine.iterate(0.0)
    played = engine.env.episode_length_buf.clone()
    engine.learn = lambda data: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        engine.iterate(0.0)
    assert not torch.equal(engine.env.episode_length_buf, played)
    engine.abandon()
    # neither is learned from again
    assert (engine.iteration, engine.state_dict()["rollout"]) == (1, {})
    del engine.learn
    engine.iterate(0.0)
    assert engine.iteration == 2


def test_a_diverged_policy_ends_the_run() -> None:
    engine = make_asynchronous(env="pendulum")
    engine.iterate(0.0)
    with torch.no_grad():
        next(engine.algorithm.network.parameters()).fill_(torch.nan)
    with pytest.raises(DivergedError):
        results(engine, 3)


# ---- as on a GPU ----


@pytest.mark.parametrize("nan", ["raise", "skip", "reset-envs"])
@pytest.mark.parametrize("env", ["pendulum", "cart_pole", "tests.tiny_envs:HiddenAlternating"])
def test_the_host_reads_no_tensor(env: str, nan: str) -> None:
    with FakeTensorMode(), no_host_syncs():
        engine = make(env=env, beside=InTurn(learns_first=True), nan=nan)
        for _ in range(3):
            assert engine.iterate(0.0)
        assert engine.steps == 3 * ITERATION


@pytest.mark.parametrize(("algorithm", "env", "changes"), CASES[:6], ids=str)
@pytest.mark.parametrize("learns_first", [True, False])
def test_graphs_of_both_sides_change_nothing(
    algorithm: str, env: str, changes: dict[str, Any], learns_first: bool
) -> None:
    """At level policy, each side in memory of its own."""
    with no_host_syncs():
        beside = InTurn(learns_first)
        expected = results(make(algorithm, env, beside, **changes), 8)
        backend = FakeGraphs()
        engine = make(algorithm, env, beside, backend, **changes)
        assert_same(results(engine, 8), expected)
    assert graph_level(engine) == "policy"
    assert len(backend.captured) == 2  # act and record; prepare and learn are another backend's


@pytest.mark.parametrize("rollout", range(6))
def test_graphs_captured_beside_bad_rows_are_the_same(rollout: int) -> None:
    """`prepare` is captured on a rollout that was prepared before: its flags of bad rows too."""
    with no_host_syncs():
        of_run = []
        for backend in (None, FakeGraphs()):
            env = BreaksAt(rollout * HORIZON + 2)
            made = make(env=env, beside=InTurn(True), backend=backend, nan="reset-envs")
            of_run.append(results(made, 8))
    assert_same(*of_run)


class Recorded:
    """torch.cuda, as far as `LearningStream` uses it; notes what happens in order."""

    def __init__(self) -> None:
        self.events = list[str]()
        self.current = Recorded.Stream(self, "collecting")

    class Stream:
        def __init__(self, cuda: "Recorded", name: str) -> None:
            self.cuda, self.name = cuda, name

        def wait_stream(self, other: "Recorded.Stream") -> None:
            self.cuda.events.append(f"{self.name} waits for {other.name}")

    def current_stream(self, device: torch.device) -> "Recorded.Stream":
        return self.current

    @contextmanager
    def stream(self, stream: "Recorded.Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.mark.parametrize("fails", [False, True])
def test_each_stream_waits_for_the_other(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else of torch.cuda is called: no synchronize."""
    cuda = Recorded()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(cuda, "Stream", lambda device: Recorded.Stream(cuda, "learning"))
    beside = LearningStream(torch.device("cuda", 0))

    def learn() -> int:
        cuda.events.append(f"learn on {cuda.current.name}")
        return 1 // (not fails)

    with pytest.raises(ZeroDivisionError) if fails else monkeypatch.context():
        assert beside.run(learn, lambda: cuda.events.append(f"collect on {cuda.current.name}"))
    played = [] if fails else ["collect on collecting"]
    expected = ["learning waits for collecting", "learn on learning", *played]
    assert cuda.events == [*expected, "collecting waits for learning"]


# ---- runs ----


def logged(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


class SavesOften(Callback):
    """Notes every iteration that a callback sees, and looks into the environments."""

    def __init__(self) -> None:
        self.steps = list[int]()

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        self.steps.append(run.steps)
        assert run.env.num_envs == SMALL["num_envs"]


def test_a_run_logs_the_lag_and_who_waited(tmp_path: Path) -> None:
    seen = SavesOften()
    run = small_run(tmp_path / "run", 5, asynchronous=True, callbacks=[seen], save_every="2i")
    assert seen.steps == [128 * number for number in range(1, 6)]
    assert logged(run.folder, "train/lag") == [0.0, 1.0, 1.0, 1.0, 1.0]
    divergence = logged(run.folder, "train/lag_kl")
    assert divergence[0] == pytest.approx(0.0, abs=1e-6)
    assert all(value > 1e-6 for value in divergence[1:])
    for name in ("collect", "update", "collect_wait", "update_wait"):
        assert all(value >= 0.0 for value in logged(run.folder, f"time/{name}_seconds"))
    collect, update = (sum(logged(run.folder, f"time/{x}_seconds")) for x in ("collect", "update"))
    assert collect > 0.0
    assert update > 0.0


def test_evaluations_and_saves_change_nothing(tmp_path: Path) -> None:
    parts = []
    for name, changes in (("one", {"eval_every": 128, "save_every": "1i"}), ("two", {})):
        small_run(tmp_path / name, 4, asynchronous=True, **changes)
        found = load_checkpoint(tmp_path / name)[0]
        parts.append({key: found[key] for key in ("model", "training", "env")})
        parts[-1]["rollout"] = found["trainer"]["rollout"]
    assert_same(*parts)


@pytest.mark.parametrize("first", [True, False])
def test_a_resume_may_change_the_engine(first: bool, tmp_path: Path) -> None:
    small_run(tmp_path / "run", 3, asynchronous=first)
    rollout = load_checkpoint(tmp_path / "run")[0]["trainer"].get("rollout")
    assert bool(rollout) == first
    gpurl.resume(tmp_path / "run", total_steps=6 * 128, asynchronous=not first)
    assert logged(tmp_path / "run", "train/lag") == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("change", [{"num_envs": 8}, {"horizon": 16}])
def test_a_rollout_of_another_size_is_played_again(change: dict[str, int], tmp_path: Path) -> None:
    small_run(tmp_path / "run", 2, asynchronous=True)
    gpurl.resume(tmp_path / "run", total_steps=4 * 128, **change)
    assert logged(tmp_path / "run", "train/lag")[2] == 0.0


def test_workers_of_gymnasium_from_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", "ppo", "gymnasium_cpu:Pendulum-v1", "--asynchronous", "--num-envs", "2"]
    words += ["--horizon", "8", "--minibatches", "2", "--total-steps", "64", "--device", "cpu"]
    words += ["--env.vectorization", "async", "--eval-episodes", "0", "--log-every", "0"]
    assert exit_code([*words, "--run-dir", str(folder)]) == 0
    assert logged(folder, "train/lag") == [0.0, 1.0, 1.0, 1.0]
    # a simulator without a state: its episodes start anew, the rollout is learned from
    assert exit_code(["train", "--resume", str(folder), "--total-steps", "96"]) == 0
    assert logged(folder, "train/lag") == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


# ---- where it is not possible ----


class OwnAct(PPO):
    """What acts is not what the engine copies."""

    def act(self, *arguments: Any, **options: Any) -> Any:
        return super().act(*arguments, **options)


@pytest.mark.parametrize(
    ("algorithm", "env", "changes", "why"),
    [
        ("sac", "pendulum", {}, "V-trace corrects the lag of ppo and a2c, not of SAC"),
        ("pqn", "cart_pole", {}, "not of PQN"),
        ("ppo", "cart_pole", {"network": {"memory": "gru", "hidden": [8]}}, "a hidden state"),
        ("tests.engine.test_asynchronous:OwnAct", "pendulum", {}, "OwnAct overrides act"),
    ],
)
def test_what_cannot_learn_beside_collecting_is_refused(
    algorithm: str, env: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    settings = {"num_envs": 4, "total_steps": 64, "device": "cpu", "quiet": True} | changes
    with pytest.raises(UsageError, match=f"asynchronous is not possible: .*{why}"):
        gpurl.train(algorithm, env, asynchronous=True, run_dir=tmp_path / "run", **settings)


def test_one_kernel_for_a_rollout_leaves_nothing_to_run_beside() -> None:
    with pytest.raises(UsageError, match=r"rollout persistent .* choose one of them"):
        make_settings("ppo", "chasing", asynchronous=True, rollout="persistent")


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert not isinstance(make(is_asynchronous=False), Asynchronous)
    engine = make_asynchronous()
    assert isinstance(engine.beside, LearningThread)
    assert engine.notes[0].startswith("engine asynchronous C; ")
    assert (
        make("tests.engine.test_asynchronous:OwnLoss")
        .notes[0]
        .startswith("engine asynchronous; no C: OwnLoss overrides loss")
    )
