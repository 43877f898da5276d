"""Iterations in graphs are iterations without: through a fake backend that records and replays on
the CPU, in the GPU's code paths.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gpurl.algorithms import algorithm_names, make_algorithm
from gpurl.algorithms.off_policy import OffPolicy
from gpurl.engine.graphs import WARM_UPS, Graphed
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import Timestep
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.evaluator import EVAL_SEED, Evaluations, Player, greedy
from gpurl.run.load import load_symmetry
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_engine
from gpurl.run.setup import make_trainer as api_trainer
from gpurl.run.trainer import Trainer
from tests.engines import graph_level, running_state
from tests.fake_graphs import FakeGraphs, Recorder
from tests.small_runs import OFF_POLICY, small_settings, some_demonstrations

ITERATIONS = (
    8  # learning begins in the third at the latest; one more without graphs, two to warm up
)
SMALL: dict[str, Any] = {
    "num_envs": 8,
    "horizon": 4,
    "minibatches": 2,
    "network": {"hidden": [8, 8]},
    "total_steps": 1000,
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu() -> Iterator[None]:
    with no_host_syncs():
        yield


def make_trainer(
    env: TorchEnv | str = "chasing", level: str = "full", algorithm: str = "ppo", **changes: Any
) -> Trainer:
    """A trainer with the fake backend; level off has none."""
    shape = SMALL | ({"minibatches": 1} if algorithm == "a2c" else {})
    if algorithm in OFF_POLICY or algorithm == "bc":
        shape = {
            name: value for name, value in SMALL.items() if name not in ("minibatches", "network")
        } | small_settings(algorithm)
    name = env if isinstance(env, str) else "chasing"
    settings = make_settings(algorithm, name, **{**shape, "graph": level, **changes})
    has_limit = env != "two_step_game" and not str(env).startswith("frame_stack")
    limit = {"max_episode_steps": 6} if has_limit else {}
    made = make_env(env, 8, "cpu", 0, **limit) if isinstance(env, str) else env
    spaces = made.single_observation_space, made.single_action_space
    model = make_algorithm(
        algorithm, settings.algorithm_config, *spaces, 8, state_space=made.single_state_space
    )
    load_symmetry(model, made)
    engine = make_engine(settings, model, made, None if level == "off" else FakeGraphs())
    trainer = Trainer(settings, engine, None, Path("unused"))
    trainer.start()
    return trainer


def results(trainer: Trainer, iterations: int = ITERATIONS) -> dict[str, Any]:
    """All that a run consists of after some iterations."""
    for _ in range(iterations):
        metrics = trainer.iterate()
    replay = (
        trainer.algorithm.replay.state_dict() if isinstance(trainer.algorithm, OffPolicy) else {}
    )
    return running_state(trainer.engine) | {
        "metrics": {name: value.clone() for name, value in metrics.items()},
        "replay": replay,
    }


def assert_equal(got: Any, expected: Any) -> None:
    for value, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert (
            torch.equal(value, other) or bool(value.isnan().all() & other.isnan().all())
            if isinstance(value, Tensor)
            else value == other
        )


# every algorithm, with the options that change what a graph holds
CASES: list[tuple[str, dict[str, Any]]] = [
    ("chasing", {}),
    ("cart_pole", {"schedule": "linear"}),
    ("cart_pole", {"schedule": "kl_minibatch", "network": {"hidden": [8], "init": "uniform"}}),
    ("pendulum", {"algorithm": "a2c"}),
    *(
        ("chasing", {"network": {"memory": memory, "hidden": [8]}, "schedule": "constant"})
        for memory in MEMORIES
    ),
    (
        "cart_pole",
        {"normalize_advantage": "minibatch", "clip_range_value": 0.2, "normalize_obs": False},
    ),
    ("catch", {"network": {"hidden": [8]}}),
    ("catch", {"network": {"hidden": [8], "body": "bro", "encoder": "impala"}}),
    ("chasing", {"network": {"hidden": [8, 8], "layer_norm": True}}),
    ("pendulum", {"algorithm": "sac", "critic_network": {"hidden": [8, 8], "body": "simba"}}),
    ("tests.picture_envs:Seen", {"network": {"hidden": [8], "shared": True}}),
    ("tests.picture_envs:Seen", {"network": {"hidden": [8], "memory": "gru"}}),
    ("catch", {"algorithm": "dqn", "learning_starts": 70}),
    ("frame_stack:catch", {"network": {"hidden": [8]}}),
    ("tests.picture_envs:Pointing", {"algorithm": "redq", "learning_starts": 70}),
    ("pendulum", {"squash": True, "entropy_coef": 0.01, "nan": "reset-envs"}),
    ("pendulum", {"distribution": "beta", "symmetry": "task", "symmetry_coef": 0.1}),
    ("pendulum", {"state_dependent_std": True, "std_type": "scalar", "bounds_coef": 0.1}),
    ("pendulum", {"algorithm": "sac", "learning_starts": 70, "symmetry": "task"}),
    (
        "pendulum",
        {"algorithm": "sac", "learning_starts": 70, "schedule": "linear", "nan": "reset-envs"},
    ),
    (
        "pendulum",
        {"algorithm": "td3", "noise": "ornstein_uhlenbeck", "normalize_obs": True, "n_step": 3},
    ),
    ("chasing", {"algorithm": "redq", "prioritized": True, "fit_returns": 0.1}),
    (
        "chasing",
        {"algorithm": "mod_sac", "storage": "bfloat16", "replay_size": 48},
    ),  # less than warming up writes
    ("chasing", {"algorithm": "fast_td3", "final_obs_fraction": 0.01}),
    ("cart_pole", {"algorithm": "rainbow", "target_interval": 3, "tau": 1.0}),
    ("cart_pole", {"algorithm": "discrete_sac", "n_step": 2}),
    ("cart_pole", {"algorithm": "dqn", "quantiles": 5, "num_critics": 2}),
    ("cart_pole", {"algorithm": "pqn"}),
    ("two_step_game", {"algorithm": "vdn", "epsilon_fraction": 1.0}),
    ("tests.tiny_envs:HiddenAlternating", {}),
    ("tests.tiny_envs:HiddenAlternating", {"algorithm": "sac", "normalize_obs": True}),
    ("pendulum", {"algorithm": "ddpg"}),
    ("pendulum", {"algorithm": "fast_sac"}),
    ("pendulum", {"algorithm": "flash_sac", "noise_span": 3}),
    ("pendulum", {"algorithm": "bc"}),
    ("pendulum", {"network": {"trunk": "tests.nn.test_own_network:Centred"}}),
]


@pytest.mark.parametrize(("env", "changes"), CASES, ids=str)
def test_graphs_do_what_the_loop_does(env: str, changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("algorithm") == "bc":
        changes = changes | {"dataset": some_demonstrations(tmp_path, make_env(env, 1, "cpu", 0))}
    expected = results(make_trainer(env, "off", **changes))
    for level in ("full", "policy"):
        trainer = make_trainer(env, level, **changes)
        got = results(trainer)
        assert graph_level(trainer.engine) == level
        assert trainer.engine.notes[-1] == f"engine eager, CUDA graphs {level}"
        assert_equal(got, expected)


def test_every_algorithm_is_held_against_the_loop() -> None:
    assert {changes.get("algorithm", "ppo") for _, changes in CASES} == set(algorithm_names())


@pytest.mark.parametrize("level", ["full", "policy"])
def test_making_graphs_changes_nothing_and_replays_run_no_python(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(level=level)
    for _ in range(1 + WARM_UPS):
        trainer.iterate()
    (optimizer,) = trainer.algorithm.optimizers.values()
    optimizer.skipped.counts.copy_(
        torch.tensor([8, 2, 0, 2, 3])
    )  # by the first iteration, of which a device has not told yet
    before, size = running_state(trainer.engine), trainer.engine.buffer.size
    stages = trainer.engine.stages
    assert isinstance(stages, Graphed)
    stages._advance()
    assert graph_level(trainer.engine) == level
    assert_equal(running_state(trainer.engine), before)
    assert optimizer.skipped.counts.tolist() == [8, 2, 0, 2, 3]
    assert trainer.engine.buffer.size == size == 0
    for owner, name in (
        (trainer.algorithm, "act"),
        (trainer.algorithm, "learn"),
        (trainer.algorithm, "prepare"),
        (trainer.engine.guards, "after_rollout"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("Python ran"))
    if level == "full":
        monkeypatch.setattr(trainer.env, "step", lambda *_: pytest.fail("Python ran"))
    trainer.iterate()


@pytest.mark.parametrize("level", ["full", "policy"])
def test_nothing_moves_between_iterations(level: str) -> None:
    trainer = make_trainer(level=level)
    for _ in range(2 + WARM_UPS):
        metrics = trainer.iterate()

    def places() -> list[int]:
        held = (
            trainer.engine.obs,
            trainer.engine.policy_state,
            trainer.engine.buffer.columns,
            metrics,
            trainer.env._state,
            trainer.algorithm.optimizer.flat,
        )
        return [leaf.data_ptr() for leaf in tree_leaves(held)]

    before, kinds = places(), set(metrics)
    for _ in range(3):
        metrics = trainer.iterate()
        assert places() == before
        assert set(metrics) == kinds


def _halve_the_rate(trainer: Trainer) -> None:
    optimizer = trainer.algorithm.optimizer
    optimizer.learning_rate = 0.5 * optimizer.learning_rate


def _clip_more(trainer: Trainer) -> None:
    trainer.algorithm.clip_range.fill_(1e-4)


def _want_entropy(trainer: Trainer) -> None:
    trainer.algorithm.entropy_coef.fill_(0.5)


@pytest.mark.parametrize("change", [_halve_the_rate, _clip_more, _want_entropy])
def test_what_a_schedule_changes_is_not_baked_in(change: Any) -> None:
    runs = {}
    for name, level, changes in (
        ("graph", "full", True),
        ("eager", "off", True),
        ("unchanged", "full", False),
    ):
        trainer = make_trainer(level=level, schedule="constant")
        results(trainer, 5)
        if changes:
            change(trainer)
        runs[name] = results(trainer, 2)
    assert_equal(runs["graph"], runs["eager"])
    assert not torch.equal(
        runs["graph"]["algorithm"]["training"]["optimizers"]["policy"]["exp_avg"],
        runs["unchanged"]["algorithm"]["training"]["optimizers"]["policy"]["exp_avg"],
    )


@pytest.mark.parametrize("schedule", ["linear", "kl", "kl_minibatch"])
def test_the_learning_rate_moves_inside_graphs(schedule: str) -> None:
    trainer = make_trainer(schedule=schedule, learning_rate=3e-2, target_kl=1e-3)
    rates = [float(trainer.iterate()["train/learning_rate"]) for _ in range(8)]
    assert graph_level(trainer.engine) == "full"
    assert len(set(rates)) > 3


def test_a_log_entry_and_a_checkpoint_in_between_change_nothing() -> None:
    trainer, other = make_trainer(), make_trainer()
    for _ in range(5):
        trainer.iterate()
        other.iterate()
        other.engine.statistics.read(
            {name: float(value) for name, value in other.engine.statistics.metrics().items()},
            other.engine.steps,
        )
        other.state()
    one, two = running_state(trainer.engine), running_state(other.engine)
    assert_equal(one["algorithm"]["model"], two["algorithm"]["model"])
    assert_equal(trainer.engine.statistics.newest, other.engine.statistics.newest)
    episodes = float(other.engine.statistics.newest[2].sum())
    assert other.engine.statistics.logged_episodes == episodes > 0


def test_a_restored_run_goes_on_in_the_same_graphs() -> None:
    """What a checkpoint brings is written into the places that the graphs know."""
    trainer = make_trainer()
    results(trainer, 5)
    assert graph_level(trainer.engine) == "full"
    saved = tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value, trainer.state()
    )
    expected = results(trainer, 2)
    trainer.restore(saved)
    got = results(trainer, 2)
    del got["guards"], expected["guards"]  # which count from the restored iteration on
    assert_equal(got, expected)


@pytest.mark.parametrize("level", ["full", "policy"])
@pytest.mark.parametrize("algorithm", ["ppo", "td3"])
def test_a_run_that_is_resumed_before_there_are_graphs_goes_on(algorithm: str, level: str) -> None:
    """As every resume on a GPU does, in a new process: the places of graphs come later."""
    changes = {"save_replay": True} if algorithm == "td3" else {}
    whole, first, again = (make_trainer("pendulum", level, algorithm, **changes) for _ in range(3))
    results(first, 5)
    again.engine.obs = torch.empty(0)  # as in a process that has played nothing yet
    again.restore(
        tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, first.state())
    )
    expected, got = results(whole, 5 + ITERATIONS), results(again, ITERATIONS)
    assert graph_level(again.engine) == level
    assert_equal(got["algorithm"], expected["algorithm"])


class NotSafe(TorchEnv):
    """An environment that counts its steps in Python."""

    graph_safe = False
    max_episode_steps = 5

    def __init__(self) -> None:
        inner = make_env("pendulum", 8, "cpu", 0)
        self.inner, self.steps = inner, 0
        self.single_observation_space, self.single_action_space = (
            inner.single_observation_space,
            inner.single_action_space,
        )
        super().__init__(8)

    def initial_state(self, rng: Any) -> Any:
        return self.inner.initial_state(rng)

    def transition(self, state: Any, action: Any, rng: Any) -> Any:
        self.steps += 1
        return self.inner.transition(state, action, rng)

    def observe(self, state: Any) -> Any:
        return self.inner.observe(state)


class Looking(NotSafe):
    """One that says it is safe, and asks for a value."""

    graph_safe = True

    def transition(self, state: Any, action: Any, rng: Any) -> Any:
        if float(action.sum()) > 1e9:
            raise RuntimeError
        return super().transition(state, action, rng)


class Numbers(NotSafe):
    """One that logs a Python number, or a tensor."""

    graph_safe = True
    log_tensor = False

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = super().step(actions)
        term = timestep.reward.mean()
        timestep.info["log"] = {"term": term if self.log_tensor else 3.0}
        return timestep


def test_an_env_that_is_not_safe_is_stepped_between_graphs() -> None:
    trainer = make_trainer(NotSafe(), "auto")
    results(trainer)
    assert graph_level(trainer.engine) == "policy"
    assert (
        trainer.engine.notes[1]
        == "CUDA graph level full is not possible: chasing is not graph_safe; it is stepped "
        "between graphs"
    )
    assert trainer.env.steps == 4 * ITERATIONS
    assert_equal(
        results(trainer, 1)["algorithm"]["model"],
        results(make_trainer(NotSafe(), "off"), ITERATIONS + 1)["algorithm"]["model"],
    )


def test_falling_back_names_the_line_that_waited() -> None:
    trainer = make_trainer(Looking(), "full")
    got = results(trainer)
    assert graph_level(trainer.engine) == "policy"
    _, note, _ = trainer.engine.notes
    assert "synchronizing operation: _local_scalar_dense" in note
    assert_equal(
        got["algorithm"]["model"], results(make_trainer(Looking(), "off"))["algorithm"]["model"]
    )


def test_python_numbers_in_a_log_keep_the_env_out_of_the_graph() -> None:
    trainer = make_trainer(Numbers(), "auto")
    results(trainer)
    assert graph_level(trainer.engine) == "policy"
    assert "info['log'] of chasing holds Python numbers (term)" in trainer.engine.notes[1]
    count = 4 * ITERATIONS
    assert trainer.engine.statistics.host_terms["term"] == [3.0 * count, count]
    logging = Numbers()
    logging.log_tensor = True
    trainer = make_trainer(logging, "auto")
    results(trainer)
    assert graph_level(trainer.engine) == "full"
    assert float(trainer.engine.statistics.terms["term"][1]) == 4 * ITERATIONS


class Keeping(NotSafe):
    """One that remembers the action it was given, and pays for a change of it in the next step."""

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = super().step(actions)
        before, self.last_action = getattr(self, "last_action", actions), actions
        return timestep._replace(reward=timestep.reward - (actions - before).abs().sum(1))


class Forgetful(NotSafe):
    """One that says a graph can hold it, but cannot restore a state."""

    graph_safe = True

    def state_dict(self) -> dict[str, Any]:
        return {}


class Remembering(NotSafe):
    """One that remembers the observations it gave, and pays for a change of them."""

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = super().step(actions)
        self.kept = [*getattr(self, "kept", []), timestep.obs][-3:]
        change = (timestep.obs - self.kept[0]).abs().sum(1)
        return timestep._replace(reward=timestep.reward - change)


class SamePlace(NotSafe):
    """One that writes its observations into the same tensor."""

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = super().step(actions)
        self.place = (
            timestep.obs.clone() if not hasattr(self, "place") else self.place.copy_(timestep.obs)
        )
        return timestep._replace(obs=self.place)


def test_an_action_that_is_kept_stays_what_it_was() -> None:
    trainer = make_trainer(Keeping(), "policy")
    assert_equal(
        results(trainer)["algorithm"]["model"],
        results(make_trainer(Keeping(), "off"))["algorithm"]["model"],
    )
    assert graph_level(trainer.engine) == "policy"


def test_an_observation_that_is_kept_stays_what_it_was() -> None:
    trainer = make_trainer(Remembering(), "policy")
    expected = results(make_trainer(Remembering(), "off"))
    assert_equal(results(trainer)["algorithm"]["model"], expected["algorithm"]["model"])
    assert graph_level(trainer.engine) == "policy"


def test_an_env_that_cannot_restore_its_state_goes_into_graphs_too() -> None:
    """Warming up is playing: nothing has to be undone."""
    trainer = make_trainer(Forgetful(), "auto")
    got = results(trainer)
    assert graph_level(trainer.engine) == "full"
    assert_equal(
        got["algorithm"]["model"], results(make_trainer(Forgetful(), "off"))["algorithm"]["model"]
    )


@pytest.mark.parametrize("level", ["off", "policy"])
def test_observations_written_over_are_refused(level: str) -> None:
    with pytest.raises(
        EnvError,
        match=r"SamePlace\.step: obs: wanted new memory in each step, got that of the "
        r"observations before",
    ):
        results(make_trainer(SamePlace(), level))


def test_a_state_that_passes_through_does_not_change_with_the_next_episode() -> None:
    """On a GPU the state stays in its place; `final_obs` must not be a view of it."""

    class Still(TorchEnv):
        single_observation_space, single_action_space, max_episode_steps = (
            Box(-9.0, 9.0, (2,)),
            Box(-1.0, 1.0, (1,)),
            3,
        )

        def initial_state(self, rng: Any) -> Any:
            return {"goal": rng.normal((2,))}

        def transition(self, state: Any, action: Any, rng: Any) -> Any:
            return state, action[:, 0], torch.zeros(8, dtype=torch.bool)

        def observe(self, state: Any) -> Any:
            return state["goal"]

    env = Still(8)
    first, _ = env.reset(seed=1)
    first = first.clone()
    for _ in range(3):
        timestep = env.step(torch.zeros(8, 1))
    assert torch.equal(timestep.info["final_obs"], first)
    assert not torch.equal(timestep.obs, first)


def test_terms_that_begin_in_a_warm_up_count_from_the_run_only() -> None:
    trainer = make_trainer()
    before = trainer.engine.statistics.state_dict()
    trainer.engine.statistics.add_log({"log": {"late": torch.ones(3)}})
    trainer.engine.statistics.load_state_dict(before, trainer.engine.steps)
    assert trainer.engine.statistics.terms["late"].tolist() == [0.0, 0.0]


class Late(NotSafe):
    """One that says it is safe and logs a name from its fourth rollout on: the one that is
    captured.
    """

    graph_safe = True

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = super().step(actions)
        timestep.info["log"] = {"late": timestep.reward.mean()} if self.steps > 12 else {}
        return timestep


def test_names_that_come_late_keep_the_env_out_of_the_graph() -> None:
    trainer = make_trainer(Late(), "auto")
    results(trainer)
    assert graph_level(trainer.engine) == "policy"
    assert (
        "info['log'] has new names late; all names must be there from the first rollout on"
        in trainer.engine.notes[1]
    )


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=r"graph policy steps .* rollout persistent plays"):
        make_settings("ppo", "chasing", graph="policy", rollout="persistent")


def test_without_a_gpu_there_are_none() -> None:
    settings = make_settings("ppo", "chasing", graph="full", **SMALL)
    trainer = api_trainer(settings, torch.device("cpu"))
    assert graph_level(trainer.engine) == "off"
    faster = "no fused update kernels, persistent rollout kernel, CUDA graphs: the device is cpu"
    assert faster in trainer.engine.notes[0]


def test_the_fake_backend_is_one() -> None:
    """Capturing changes nothing, replays do; Python's numbers are baked in; results stay in place;
    views follow.
    """
    x, number = torch.zeros(3), 1.0

    def function() -> Tensor:
        x.add_(number)
        y = x * 2.0
        return y.view(3, 1)[:2] + 1.0

    recorder = Recorder()
    with recorder:
        result = function()
    recorder.put_back()
    assert x.tolist() == [0.0] * 3
    number = 100.0
    recorder.replay()
    recorder.replay()
    assert x.tolist() == [2.0] * 3
    assert result.flatten().tolist() == [5.0] * 2
    with pytest.raises(RuntimeError, match="synchronizing operation: nonzero"), Recorder():
        x.nonzero()


# ---- evaluations between iterations ----


def test_evaluations_have_graphs_once_the_training_has() -> None:
    trainer = make_trainer()
    env = make_env("chasing", 4, "cpu", 0, max_episode_steps=50)
    evaluations = Evaluations(env, "chasing", trainer.settings.train)
    stages = trainer.engine.stages
    assert isinstance(stages, Graphed)
    had_graphs = []
    for iteration in range(ITERATIONS):
        trainer.iterate()
        values = evaluations.play((trainer.algorithm,), iteration, bool, stages.beside)
        assert evaluations._player is not None
        had_graphs.append(evaluations._player.graphs is not None)
        # as Python plays it, and the training does not notice
        plain = make_env("chasing", 4, "cpu", 0, max_episode_steps=50)
        player = Player(greedy(trainer.algorithm), plain, trainer.settings.train.eval_episodes)
        assert player.play(EVAL_SEED) == values
    assert had_graphs == sorted(had_graphs)
    assert had_graphs[-1]
    assert not had_graphs[0]
    assert evaluations.warnings == []
    assert_equal(running_state(trainer.engine), running_state_after(ITERATIONS))


def running_state_after(iterations: int) -> dict[str, Any]:
    trainer = make_trainer()
    for _ in range(iterations):
        trainer.iterate()
    return running_state(trainer.engine)


def test_a_member_that_was_lost_no_longer_plays_in_graphs() -> None:
    trainer = make_trainer()
    one, other = trainer.algorithm, make_trainer().algorithm
    env = make_env("chasing", 4, "cpu", 0)
    evaluations = Evaluations(env, "chasing", trainer.settings.train)
    player = evaluations._player_of((one, other), env, lambda: None)
    player.obstacle = "it is kept"
    assert evaluations._player_of((one, other), env, lambda: None) is player
    assert evaluations._player_of((one, None), env, lambda: None) is not player
