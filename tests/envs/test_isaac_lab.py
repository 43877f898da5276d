"""Isaac Lab's tasks behind the tensor contract: a stand-in with its traps against walks in plain
numbers, and a real one where it is.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import gpurl
from gpurl.cli.check_env import check_env
from gpurl.cli.main import main
from gpurl.cli.settings import parse_train
from gpurl.envs import isaac_lab, make_env
from gpurl.errors import UsageError
from tests.small_runs import small_settings
from tests.torch_walks import LENGTH, assert_some_can_restart, assert_true_transitions

TASKS = ("Isaac-Walks-Direct-v0", "Isaac-Walks-v0")
PACKAGES = ("isaaclab", "isaaclab_tasks")


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package isaaclab for one test; environments that it left open are closed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_isaac_lab"))
    monkeypatch.setattr(isaac_lab, "_launchers", [])
    yield
    for env in list(isaac_lab._living):
        env.close()
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    for task in TASKS:
        gymnasium.registry.pop(task, None)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(("task", "exact"), list(zip(TASKS, (True, False))))
def test_the_true_transitions(task: str, exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    env = make_env(f"isaac_lab:{task}", 4)
    assert env.max_episode_steps == LENGTH
    assert (env.single_state_space is not None) == exact
    assert env.single_action_space == Box(-np.inf, np.inf, (1,), np.float32)
    assert_true_transitions(env, exact=exact)
    assert_true_transitions(env, exact=exact, seed=8)
    assert_some_can_restart(env)
    assert ("the observation before the last step replaces" in caplog.text) == (not exact)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("task", TASKS)
def test_the_contract_holds(task: str) -> None:
    assert check_env(make_env(f"isaac_lab:{task}", 4, action_limit=1.0), steps=24) == []


@pytest.mark.usefixtures("_stand_in")
def test_the_seed_reaches_the_configuration_and_the_first_reset() -> None:
    env = make_env(f"isaac_lab:{TASKS[0]}", 4, seed=5)
    assert env._env.unwrapped.cfg.seed == 5
    first, _ = env.reset()
    assert first[:, 0].tolist() == pytest.approx(
        [((5 * number + 5) % 11 - 5) / 10 for number in range(4)]
    )
    assert not torch.equal(env.reset()[0], first)


@pytest.mark.usefixtures("_stand_in")
def test_critics_see_the_state_from_the_reset_on() -> None:
    env = make_env(f"isaac_lab:{TASKS[0]}", 4)
    obs, info = env.reset(seed=3)
    assert torch.allclose(info["state"][:, 0], 2.0 * obs[:, 0] + torch.arange(4))


@pytest.mark.usefixtures("_stand_in")
def test_clocks_and_logs_are_the_simulators() -> None:
    env = make_env(f"isaac_lab:{TASKS[1]}", 4)
    env.reset(seed=3)
    env.stagger(torch.tensor([0, 1, 2, 4]))
    logs = []
    for left in range(LENGTH, 0, -1):
        timestep = env.step(torch.zeros(4, 1))
        assert timestep.truncated.tolist() == [left == 1, left == 2, left == 3, left == 5]
        logs.append(timestep.info.get("log"))
    assert [log is not None for log in logs] == [
        True,
        False,
        True,
        True,
        True,
    ]  # in the steps in which an episode ended
    assert set(logs[0]) == {"Episode_Reward/forward", "Episode_Termination/fell"}


@pytest.mark.usefixtures("_stand_in")
def test_isaac_sim_is_started_once_and_without_our_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpurl", "train", "ppo", "--num-envs", "4"])
    for task in TASKS:
        make_env(f"isaac_lab:{task}", 2, cameras=True).close()
    launched = importlib.import_module("isaaclab.app").launched
    assert launched == [{"headless": True, "device": "cpu", "enable_cameras": True}]
    assert len(sys.argv) == 5


@pytest.mark.usefixtures("_stand_in")
def test_isaac_lab_3_starts_what_the_configuration_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, started = importlib.import_module("isaaclab.app"), list[Any]()

    @contextmanager
    def launch_simulation(config: Any, arguments: dict[str, Any]) -> Iterator[None]:
        started.append((config.selected, config.sim.dt, arguments["headless"]))
        yield

    monkeypatch.setattr(app, "launch_simulation", launch_simulation, raising=False)
    make_env(f"isaac_lab:{TASKS[0]}", 2, overrides="physics=newton_mjwarp env.sim.dt=0.01")
    assert started == [(["physics=newton_mjwarp"], 0.01, True)]
    assert not app.launched


LAUNCH_OF_3 = """
import contextlib, os, isaaclab.app
@contextlib.contextmanager
def launch(config, arguments):
    code = 0
    try:
        yield
    except SystemExit as error:
        code = error.code
        raise
    finally:
        os._exit(code)
isaaclab.app.launch_simulation = launch
"""


@pytest.mark.parametrize("prelude", ["", LAUNCH_OF_3], ids=["Isaac Lab 2", "Isaac Lab 3"])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("main.main = lambda: 0; main.run()", 0),
        ("main.main = lambda: 4; main.run()", 4),
        ("raise ValueError('of a script')", 1),
        ("", 0),
    ],
)
def test_the_process_ends_with_its_own_exit_code(prelude: str, end: str, code: int) -> None:
    """Isaac Sim ends the process when it closes, with 0 unless it is told another code."""
    make = f"from gpurl.envs import make_env; make_env('isaac_lab:{TASKS[0]}', 2)"
    text = f"{prelude}\n{make}\nfrom gpurl.cli import main\nprint('made')\n{end}"
    paths = [str(Path(__file__).parent / "fake_isaac_lab"), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "FAKE_ISAAC_SIM_ENDS_THE_PROCESS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "made\n", done.stderr
    assert done.returncode == code


@pytest.mark.usefixtures("_stand_in")
def test_overrides_are_paths_in_the_configuration() -> None:
    words = (
        "env.sim.dt=0.01 decimation=4 rewards.forward.weight=2 sim.gravity='[0.0, 0.0, -1.6]' "
        "is_finite_horizon=true"
    )
    env = make_env(f"isaac_lab:{TASKS[0]}", 2, overrides=words)
    config = env._env.unwrapped.cfg
    assert (config.sim.dt, config.decimation, config.rewards["forward"].weight) == (0.01, 4, 2.0)
    assert isinstance(config.rewards["forward"].weight, float)
    assert config.sim.gravity == (0.0, 0.0, -1.6)
    assert env._is_finite_horizon
    env.close()
    for overrides, message in (
        ("sim.dtt=0.01", "no sim.dtt: there is no 'dtt' among dt"),
        ("rewards.forwards.weight=1", "there is no 'forwards' among forward"),
        ("decimation=often", "decimation is the int 2, it cannot be set to 'often'"),
        ("sim.gravity.3=1", "there is no '3' among 0, 1, 2"),
    ):
        with pytest.raises(UsageError, match=message):
            make_env(f"isaac_lab:{TASKS[0]}", 2, overrides=overrides)


def test_overrides_pass_the_command_line() -> None:
    settings, _ = parse_train(
        [
            "ppo",
            f"isaac_lab:{TASKS[0]}",
            "env.overrides=sim.dt=0.01 decimation=4",
            "--env.action-limit",
            "2",
        ]
    )
    assert settings.env_options == {"overrides": "sim.dt=0.01 decimation=4", "action_limit": 2.0}


@pytest.mark.usefixtures("_stand_in")
def test_there_is_one_simulation_in_a_process() -> None:
    env = make_env(f"isaac_lab:{TASKS[0]}", 2)
    with pytest.raises(
        UsageError,
        match="one simulation per process, and Isaac-Walks-Direct-v0 is open: close it first",
    ):
        make_env(f"isaac_lab:{TASKS[1]}", 2)
    env.close()
    make_env(f"isaac_lab:{TASKS[1]}", 2).close()


@pytest.mark.usefixtures("_stand_in")
def test_misuse_is_named() -> None:
    with pytest.raises(UsageError, match="needs a task, as in isaac_lab:"):
        make_env("isaac_lab", 2)
    with pytest.raises(UsageError, match="did you mean Isaac-Walks-v0"):
        make_env("isaac_lab:Isaac-Walk-v0", 2)
    with pytest.raises(UsageError, match="CartPole-v1 is no task of Isaac Lab"):
        make_env("isaac_lab:CartPole-v1", 2)


@pytest.mark.skipif(
    importlib.util.find_spec("isaaclab") is not None, reason="Isaac Lab is installed"
)
def test_without_isaac_lab_it_says_what_to_install_into_which_python() -> None:
    with pytest.raises(
        UsageError,
        match=r"which this Python \(3\.\d+\.\d+\) does not have. Isaac Lab 3 needs Python 3.12: "
        r"pip install",
    ):
        make_env("isaac_lab:Isaac-Ant-v0", 2)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("task", TASKS)
def test_ppo_trains_is_evaluated_at_the_end_and_goes_on(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"num_envs": 4, "total_steps": 96, "eval_every": 32, "eval_episodes": 2, "horizon": 8}
    run = gpurl.train(
        "ppo",
        f"isaac_lab:{task}",
        run_dir=str(tmp_path / "run"),
        **(small_settings("ppo") | sizes | {"quiet": False}),
    )
    assert run.outcome.evaluation["at_step"] == 96
    assert run.outcome.evaluation["eval/episodes"] == 2
    assert "its only evaluation follows the training" in capsys.readouterr().out
    entries = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum("eval/mean_reward" in entry for entry in entries) == 1
    assert any("env/Episode_Termination/fell" in entry for entry in entries)
    assert main(["train", "--resume", str(tmp_path / "run"), "total_steps=128"]) == 0
    assert main(["eval", str(tmp_path / "run"), "--episodes", "4"]) == 0


@pytest.mark.usefixtures("_stand_in")
def test_stopping_at_a_return_is_refused() -> None:
    with pytest.raises(UsageError, match="stop_return needs evaluations during training"):
        gpurl.train("ppo", f"isaac_lab:{TASKS[0]}", stop_return=1.0, **small_settings("ppo"))


@pytest.mark.skipif(
    importlib.util.find_spec("isaaclab") is None, reason="Isaac Lab is not installed"
)
def test_a_real_task() -> None:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    env = make_env("isaac_lab:Isaac-Cartpole-Direct", 16, device)
    obs, _ = env.reset(seed=0)
    for _ in range(8):
        obs = env.step(torch.zeros(16, *env.single_action_space.shape, device=device)).obs
    assert obs.isfinite().all()
    assert env.episode_length_buf.max() <= 8
    env.close()


@pytest.mark.usefixtures("_stand_in")
def test_all_begin_at_clock_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all restart some of Isaac Lab's tasks begin at random clocks: the first episodes of an
    evaluation would end too early.
    """
    env = make_env(f"isaac_lab:{TASKS[0]}", 4)
    inner = env._env.unwrapped
    restart = inner._reset_idx

    def restart_at_random_clocks(env_ids: torch.Tensor) -> None:
        restart(env_ids)
        if len(env_ids) == 4:
            inner.episode_length_buf[:] = torch.tensor([3, 1, 2, 4])

    monkeypatch.setattr(inner, "_reset_idx", restart_at_random_clocks)
    env.reset()
    assert inner.episode_length_buf.tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("_stand_in")
def test_choices_are_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Isaac Lab has them."""
    make, actions = isaac_lab._make, []

    def make_with_choices(*arguments: Any) -> gymnasium.Env:
        env = make(*arguments)
        inner: Any = env.unwrapped
        inner.single_action_space, step = Discrete(3), inner.step

        def record(action: torch.Tensor) -> Any:
            actions.append(action)
            return step(action.float())

        inner.step = record
        return env

    monkeypatch.setattr(isaac_lab, "_make", make_with_choices)
    env = make_env(f"isaac_lab:{TASKS[0]}", 4)
    env.reset()
    env.step(torch.tensor([0, 1, 2, 1]))
    assert actions[0].tolist() == [[0], [1], [2], [1]]
    assert actions[0].dtype == torch.int64


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("version", [2, 3])
def test_cameras_see_what_begins_in_a_reset_of_some(version: int) -> None:
    env = make_env(f"isaac_lab:{TASKS[0]}", 4)
    env.reset()
    inner, calls = env._env.unwrapped, []
    inner.sim.render = lambda: calls.append("render")
    if version == 2:
        inner.sim.has_rtx_sensors = lambda: True
    else:
        inner.has_rtx_sensors = True
    some = {"reset_mask": torch.tensor([True, False, False, False])}
    env.reset(options=some)
    assert not calls  # without the setting
    inner.cfg.num_rerenders_on_reset = 2
    env.reset(options=some)
    assert calls == ["render"] * 2
