"""Metrics of a task's own, numbers in Gymnasium's infos and the progress of the training: what is
logged of them, on every path, is what one counts by hand.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

import gpurl
from gpurl.adapters.transfer import log_of_all
from gpurl.cli.check_env import check_env
from gpurl.engine.persistent import persistent_obstacle
from gpurl.engine.statistics import EpisodeStatistics
from gpurl.envs.chasing import Chasing
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.numpy.infos import log_of_infos
from gpurl.envs.torch_env import State
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import EnvError
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.run.callbacks import RunView
from tests.small_runs import ITERATION, SMALL, small_run
from tests.tiny_envs import RandomWalk


class Measured(RandomWalk):
    """Logs its place in each step, and at the end of an episode whether it is on the right."""

    def metrics(self, state: State) -> dict[str, Tensor]:
        return {"place": state["x"][:, 0], "right_at_end": state["x"][:, 0] > 0.0}


def logged(env: VecEnv, steps: int, action: Tensor) -> tuple[dict[str, float], list[Any]]:
    """(what is logged of `steps` steps, the steps)."""
    statistics = EpisodeStatistics(env.num_envs, env.device)
    env.reset(seed=3)
    timesteps = []
    for _ in range(steps):
        timesteps.append(env.step(action))
        statistics.add(timesteps[-1])
    values = {name: float(value) for name, value in statistics.metrics().items()}
    return statistics.read(values | statistics.host_metrics(), 0), timesteps


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_a_tasks_metrics_are_means_over_steps_or_over_ended_episodes(as_on_a_gpu: bool) -> None:
    env = Measured(5)
    action = torch.zeros(5, 2)
    if as_on_a_gpu:
        with no_host_syncs():
            values, steps = logged(env, 40, action)
    else:
        values, steps = logged(env, 40, action)
    # the true last observation, not the first of the next episode
    places = torch.stack([step.info["final_obs"][:, 0] for step in steps])
    ended = torch.stack([step.terminated | step.truncated for step in steps])
    assert int(ended.sum()) > 20
    assert values["env/place"] == pytest.approx(float(places.mean()), rel=1e-5)
    assert values["env/right_at_end"] == pytest.approx(float((places[ended] > 0).float().mean()))
    assert set(values) & {"env/_right_at_end"} == set()


def test_without_an_ended_episode_there_is_no_mean_at_the_end() -> None:
    values, _ = logged(Measured(1), 1, torch.zeros(1, 2))
    assert "env/place" in values
    assert "env/right_at_end" not in values


class Wrong(RandomWalk):
    """Metrics of one number instead of one for each environment."""

    def metrics(self, state: State) -> dict[str, Tensor]:
        return {"speed": state["x"].mean()}


class Impure(RandomWalk):
    """Changes the state that it is given."""

    def metrics(self, state: State) -> dict[str, Tensor]:
        return {"place": state["x"].mul_(2.0)[:, 0]}


def test_wrong_metrics_are_named() -> None:
    env = Wrong(3)
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"Wrong.metrics: speed: wanted a tensor of shape \(3,\)"):
        env.step(torch.zeros(3, 2))
    assert any("Impure.metrics" in problem for problem in check_env(Impure(4)))
    assert check_env(Measured(4)) == []


class MeasuredChasing(Chasing):
    """Chasing with a metric, which its Triton functions do not compute."""

    def metrics(self, state: State) -> dict[str, Tensor]:
        return {"distance": state["distance"]}


def test_a_task_with_metrics_is_not_stepped_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.envs.torch_env.use_triton", lambda tensor: True)
    monkeypatch.setattr("gpurl.engine.obstacles.use_triton", lambda tensor: True)
    plain, measured = Chasing(4), MeasuredChasing(4)
    for env in (plain, measured):
        env.reset(seed=0)
    assert plain.in_triton() is not None
    assert measured.in_triton() is None
    algorithm = small_algorithm(measured)
    assert "MeasuredChasing.metrics is not in Triton" in persistent_obstacle(algorithm, measured)


def small_algorithm(env: VecEnv) -> Any:
    from gpurl.algorithms import config_class, make_algorithm, resolve_algorithm

    config = config_class(resolve_algorithm("ppo"))()
    spaces = env.single_observation_space, env.single_action_space
    return make_algorithm("ppo", config, *spaces, env.num_envs)


# ---- Gymnasium's infos ----


class Told(gymnasium.Env):
    """Episodes of three steps with numbers in their infos; `grade` in the last one only."""

    observation_space = Box(-1.0, 1.0, (1,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.clock = 0
        return np.zeros(1, np.float32), {"height": -100.0}

    def step(self, action: Any) -> Any:
        self.clock += 1
        is_last = self.clock == 3
        info = {"height": float(self.clock), "name": "text", "is_success": self.clock > 2}
        if is_last:
            info["grade"] = 7
        return np.zeros(1, np.float32), 1.0, is_last, False, info


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_numbers_of_gymnasiums_infos_are_logged(mode: AutoresetMode) -> None:
    env = GymnasiumCpu(2, env=SyncVectorEnv([Told, Told], autoreset_mode=mode))
    values, _ = logged(env, 12, torch.zeros(2, 1))
    names = {name for name in values if name.startswith("env/")}
    assert names == {"env/height", "env/grade", "env/is_success", "env/is_success_at_end"}
    assert values["env/height"] == 2.0  # of 1, 2, 3: infos of resets do not count
    assert values["env/grade"] == 7.0
    assert values["env/is_success"] == pytest.approx(1 / 3)
    assert values["env/is_success_at_end"] == 1.0


def test_host_terms_survive_a_resume() -> None:
    first, second = EpisodeStatistics(2, torch.device("cpu")), EpisodeStatistics(2, "cpu")
    mask = np.array([True, False])
    first.add_log({"log": {"x": np.array([4.0, 9.0]), "_x": mask, "y": 1.5}})
    second.load_state_dict(first.state_dict(), steps=2)
    second.add_log({"log": {"x": np.array([2.0, 9.0]), "_x": mask}})
    values = {name: float(value) for name, value in second.metrics().items()}
    entries = second.read(values | second.host_metrics(), 4)
    assert entries["env/x"] == 3.0
    assert entries["env/y"] == 1.5
    assert "env/x" not in second.read(values | second.host_metrics(), 4)


# ---- the progress of the training ----


class Growing(RandomWalk):
    """Its reward is the progress of the training."""

    max_episode_steps = 1

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, terminated = super().transition(state, action, rng)
        return next_state, self.training_progress.expand_as(reward).clone(), terminated

    def metrics(self, state: State) -> dict[str, Tensor]:
        return {"progress": self.training_progress.expand(len(state["x"]))}


def entries(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def test_a_task_reads_the_progress_and_so_do_evaluations(tmp_path: Path) -> None:
    env = f"{__name__}:Growing"
    changes: dict[str, Any] = {"env": env, "eval_every": 2 * ITERATION, "stagger": False}
    whole = small_run(tmp_path / "whole", 4, **changes)
    # an iteration trains at the progress with which it begins
    expected = [(n * ITERATION, pytest.approx((n - 1) / 4)) for n in (1, 2, 3, 4)]
    assert entries(whole.folder, "env/progress") == expected
    assert entries(whole.folder, "eval/mean_reward") == [(2 * ITERATION, 0.5), (4 * ITERATION, 1.0)]
    # outside of a training a task is what it is at its end
    assert float(gpurl.make_env(env, 2).training_progress) == 1.0
    # a resumed run goes on with the same numbers
    small_run(tmp_path / "parts", 4, **changes, callbacks=[StopAfterTwo()])
    gpurl.resume(tmp_path / "parts")
    for name in ("env/progress", "rollout/ep_rew_mean", "train/value_loss"):
        assert entries(tmp_path / "parts", name) == entries(whole.folder, name)


class StopAfterTwo(gpurl.Callback):
    def after_iteration(self, run: RunView, metrics: Any) -> None:
        if run.iteration == 2:
            run.stop()


class Graded(RandomWalk):
    """Notes the progress at which its episodes begin."""

    seen: ClassVar[list[tuple[int, float]]] = []  # number of environments, progress

    def initial_state(self, rng: CounterRandom) -> State:
        self.seen.append((rng.num_envs, round(float(self.training_progress), 3)))
        return super().initial_state(rng)


def test_the_first_episodes_begin_at_the_progress_of_the_run(tmp_path: Path) -> None:
    num_envs = int(SMALL["num_envs"])
    Graded.seen.clear()
    changes: dict[str, Any] = {"env": f"{__name__}:Graded", "eval_episodes": 0}
    small_run(tmp_path, 4, **changes, callbacks=[StopAfterTwo()])
    # those that look at its shapes have another number of environments
    assert next(seen for count, seen in Graded.seen if count == num_envs) == 0.0
    # other environments: their episodes start anew
    Graded.seen.clear()
    gpurl.resume(tmp_path, num_envs=2 * num_envs)
    assert next(seen for count, seen in Graded.seen if count == 2 * num_envs) == 0.5


def test_the_progress_keeps_its_address() -> None:
    env = Growing(2)
    address = env.training_progress.data_ptr()
    algorithm = small_algorithm(env)
    from gpurl.engine.eager import Eager
    from gpurl.guards.guards import Guards

    engine = Eager(algorithm, env, Guards("growing", algorithm, env, "raise"))
    engine.begin(0, False)
    engine.iterate(0.25)
    assert float(env.training_progress) == 0.25
    assert env.training_progress.data_ptr() == address


# ---- MuJoCo, and other trainers ----


def test_a_mujoco_task_has_metrics_of_its_fields() -> None:
    pytest.importorskip("mujoco")
    from gpurl.envs.mujoco.inverted_pendulum import InvertedPendulum

    class Measured(InvertedPendulum):
        def metrics(self, data: Any) -> dict[str, Tensor]:
            return {"place": data.qpos[:, 0], "place_at_end": data.qpos[:, 0]}

    values, steps = logged(Measured(3), 60, torch.ones(3, 1))
    places = torch.stack([step.info["final_obs"][:, 0] for step in steps])
    ended = torch.stack([step.terminated for step in steps])
    assert ended.any()
    assert values["env/place"] == pytest.approx(float(places.mean()), rel=1e-5)
    assert values["env/place_at_end"] == pytest.approx(float(places[ended].mean()), rel=1e-5)


def test_other_trainers_get_means_and_nothing_that_needs_a_mask() -> None:
    log = {"x": torch.tensor([1.0, 3.0]), "y": torch.ones(2), "_y": torch.tensor([True, False])}
    assert log_of_all(log | {"z": 2.0}) == {"x": 2.0, "z": 2.0}


def test_booleans_of_numpy_count_and_other_objects_do_not() -> None:
    """Gymnasium keeps them as objects, with None where an environment said nothing."""
    done, given = np.array([True, False, True]), np.array([True, True, False])
    info = {
        "success": np.array([np.True_, np.False_, None], object),
        "_success": given,
        "name": np.array(["a", "b", None], object),
        "_name": given,
        "mixed": np.array([1.0, "b", None], object),
        "_mixed": given,
    }
    log = log_of_infos(info, done, None)
    assert set(log) == {"success", "_success", "success_at_end", "_success_at_end"}
    assert log["success"][given].tolist() == [1.0, 0.0]
    assert log["_success"].tolist() == [True, True, False]
    assert log["_success_at_end"].tolist() == [True, False, False]
