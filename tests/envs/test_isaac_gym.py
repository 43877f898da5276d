"""Isaac Gym's contract in each place where tasks restart: real processes over fake simulators,
compared with single true episodes.
"""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import gpurl
from gpurl.cli.check_env import check_env
from gpurl.envs import env_names, make_env
from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE
from gpurl.errors import UsageError
from tests.envs.walker_oracle import (
    AGE,
    FAKE,
    NUM_ENVS,
    START,
    VARIANTS,
    WORLD,
    Variant,
    check_episodes,
    drifting_actions,
    state_of,
)

ENVS = Path(__file__).resolve().parents[2] / "envs"
OLD_PYTHON_FILES = [ENVS / "isaac_gym" / "server.py", *sorted(FAKE.rglob("*.py"))]


def old_python() -> str | None:
    """A Python of Isaac Gym's age that has torch, where there is one."""
    interpreter = os.environ.get(PYTHON_VARIABLE) or shutil.which("python3.8")
    if (
        interpreter is None
        or subprocess.run(
            [interpreter, "-c", "import torch, numpy"], capture_output=True, check=False
        ).returncode
    ):
        return None
    return interpreter


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)


PYTHONS = [sys.executable] + ([interpreter] if (interpreter := old_python()) else [])


@pytest.fixture(
    scope="module",
    params=[(python, variant) for python in PYTHONS for variant in VARIANTS],
    ids=lambda case: case[1].task,
)
def played(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Variant]]:
    """An environment of each kind, and what its kind is."""
    python, variant = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FAKE))
        patch.setenv(PYTHON_VARIABLE, python)
        env: Any = make_env(f"isaac_gym:{variant.task}", NUM_ENVS, seed=5)
        yield env, variant
        env.close()
    assert env._simulator.process.returncode == 0


def test_first_observations_are_real_and_of_the_constructors_seed(
    played: tuple[Any, Variant],
) -> None:
    """This test comes first: the first reset of the process is the one that takes the seed. The
    task's own reset() shows zeros.
    """
    env, variant = played
    obs, info = env.reset()
    assert set(obs[:, WORLD].tolist()) == {
        float(torch.randint(0, 100, (), generator=torch.Generator().manual_seed(5)))
    }
    assert bool((obs[:, START] >= torch.arange(NUM_ENVS)).all())
    assert len(set((obs[:, START] % 1).tolist())) > 1
    assert torch.equal(obs[:, START], env.reset(seed=5)[0][:, START])
    assert not torch.equal(obs[:, START], env.reset(seed=6)[0][:, START])
    assert not torch.equal(env.reset()[0][:, START], env.reset()[0][:, START])
    if variant.state_of:
        assert torch.equal(info["state"], state_of(variant, obs))
        assert env.single_state_space.shape == info["state"].shape[1:]
    else:
        assert info == {}
        assert env.single_state_space is None


def test_all_that_counts_are_true_transitions(played: tuple[Any, Variant]) -> None:
    env, variant = played
    assert env.max_episode_steps == variant.limit
    mode = (
        gymnasium.vector.AutoresetMode.NEXT_STEP
        if variant.shows_end
        else gymnasium.vector.AutoresetMode.SAME_STEP
    )
    assert env.autoreset_mode == env.metadata["autoreset_mode"] == mode
    for seed in (1, 2):  # the second time in the middle of episodes
        seen = check_episodes(env, variant, env.reset(seed=seed)[0])
        assert min(seen["terminated"], seen["truncated"], seen["both"]) > 0
        assert (seen["dead"] > 0) == variant.shows_end


def test_staggered_clocks_are_the_tasks_clocks(played: tuple[Any, Variant]) -> None:
    env, variant = played
    env.reset(seed=0)
    env.stagger(torch.arange(NUM_ENVS))
    still = torch.zeros(NUM_ENVS, 1)
    for step in range(1, variant.limit + 1):
        timestep = env.step(still)
        assert timestep.truncated.tolist() == [
            step + clock == variant.limit for clock in range(NUM_ENVS)
        ]
        assert torch.equal(
            timestep.info["_episode"], timestep.truncated & (torch.arange(NUM_ENVS) == 0)
        )


def test_a_masked_reset_takes_one_step_that_is_none(played: tuple[Any, Variant]) -> None:
    env, _ = played
    obs, _ = env.reset(seed=0)
    for step in range(3):
        obs = env.step(drifting_actions(step, env.device)).obs
    mask = torch.arange(NUM_ENVS) % 2 == 0
    shown, _ = env.reset(options={"reset_mask": mask})
    assert torch.equal(shown, obs)
    assert torch.equal(env.episode_length_buf, torch.where(mask, 0, 3))
    timestep = env.step(torch.zeros(NUM_ENVS, 1))
    assert torch.equal(timestep.info["valid"], ~mask)
    assert torch.equal(timestep.reward == 0.0, mask)
    assert torch.equal(timestep.obs[:, 3], obs[:, 3] + mask)
    assert torch.equal(env.episode_length_buf, torch.where(mask, 0, 4))
    assert bool(env.step(torch.zeros(NUM_ENVS, 1)).info["valid"].all())


def test_tasks_with_one_clock_for_all_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    env: Any = make_env("isaac_gym:FakeFactory", NUM_ENVS, seed=5)
    still, limit, bonus = torch.zeros(NUM_ENVS, 1), 8, 64.0
    env.reset()
    env.stagger(torch.arange(NUM_ENVS))
    for step in range(1, limit + 1):
        timestep = env.step(still)
        assert timestep.truncated.tolist() == [step == limit] * NUM_ENVS
        assert (timestep.reward > bonus).tolist() == [step == limit] * NUM_ENVS
    assert timestep.info["_episode"].all()
    with pytest.raises(
        UsageError,
        match=r"FakeFactory has one clock for all environments: wanted a reset of all 6, got a "
        r"reset_mask of 5",
    ):
        env.reset(options={"reset_mask": torch.arange(NUM_ENVS) > 0})
    assert not env.resets_late
    obs, _ = env.reset(options={"reset_mask": torch.ones(NUM_ENVS, dtype=torch.bool)})
    assert torch.equal(obs[:, AGE], torch.ones(NUM_ENVS))  # at once: the next step counts
    assert env.step(still).info["valid"].all()
    env.close()


def make_terrain(num_envs: int = NUM_ENVS) -> Any:
    return make_env("isaac_gym:FakeTerrain", num_envs, seed=5)


def test_numbers_that_a_task_logs_are_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    env = make_terrain()
    env.reset()
    always = {"frames", "scalars/late", "age"}
    for step in range(1, 10):
        timestep = env.step(torch.zeros(NUM_ENVS, 1))
        log = timestep.info["log"]
        # means over ended episodes only where some have ended, after the first step
        has_ended = bool(timestep.truncated.any())
        assert set(log) - {"episode/terrain_level"} == always
        assert ("episode/terrain_level" in log) == (has_ended or step == 1)
        assert float(log["scalars/late"]) == 0.25
        assert float(log["age"]) == (0 if has_ended else step)
        # the task is told the steps before this one
        assert float(log["frames"]) == (step - 1) * NUM_ENVS
    assert has_ended
    first = log["age"].clone()
    env.step(torch.zeros(NUM_ENVS, 1))
    assert torch.equal(log["age"], first), "the log of a step is the caller's own"
    env.close()


def test_a_curriculum_goes_on_in_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    env = make_terrain()
    env.reset()
    for _ in range(9):
        env.step(torch.zeros(NUM_ENVS, 1))
    state = env.curriculum_state()
    assert state["env_steps"] == 9 * NUM_ENVS
    env.close()
    # another number of environments
    other = make_terrain(2)
    other.reset()
    assert other.curriculum_state() != state
    other.load_curriculum_state(state)
    assert other.curriculum_state() == state
    assert float(other.step(torch.zeros(2, 1)).info["log"]["frames"]) == 9 * NUM_ENVS
    other.close()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("odd_key", "key 'ranges.7': int, wanted text"),
        ("odd_value", "key 'ranges.mass.0': set, which JSON does not hold"),
        ("no_state", "get_env_state failed: RuntimeError: the ranges are not there yet"),
    ],
)
def test_a_curriculum_that_cannot_be_saved_is_said_once_and_ends_nothing(
    fault: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    env: Any = make_env("isaac_gym:FakeTerrain", NUM_ENVS, overrides=f"env.fault={fault}")
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(NUM_ENVS, 1))
        state = env.curriculum_state()
    assert state == {"env_steps": 2 * NUM_ENVS, "task": "null"}
    env.load_curriculum_state(state)
    env.step(torch.zeros(NUM_ENVS, 1))
    env.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"what FakeTerrain keeps between its episodes (get_env_state) is not saved: {why}"
    ]


def test_a_simulator_that_ends_when_it_is_asked_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint is written, as what was before counts."""
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    env = make_terrain()
    env.reset()
    before = env.curriculum_state()
    os.kill(env._simulator.process.pid, signal.SIGKILL)
    assert env.curriculum_state() == env.curriculum_state() == before
    (record,) = caplog.records
    assert "ended in get_curriculum (signal SIGKILL)" in record.getMessage()
    env.close()


def test_numbers_of_numpy_are_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    envs: list[Any] = [
        make_env("isaac_gym:FakeTerrain", NUM_ENVS, seed=kind(5)) for kind in (int, np.int64)
    ]
    plain, of_numpy = [env.reset()[0] for env in envs]
    assert torch.equal(plain, of_numpy)
    plain, of_numpy = envs[0].reset(seed=7)[0], envs[1].reset(seed=np.int64(7))[0]
    assert torch.equal(plain, of_numpy)
    for env in envs:
        env.close()


def test_a_resumed_run_keeps_the_curriculum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    settings: dict[str, Any] = {"num_envs": NUM_ENVS, "horizon": 8, "minibatches": 1}
    settings |= {"eval_episodes": 0, "device": "cpu", "quiet": True}
    run = gpurl.train(
        "ppo",
        "isaac_gym:FakeTerrain",
        total_steps=16 * NUM_ENVS,
        run_dir=tmp_path / "run",
        **settings,
    )
    gpurl.resume(run.folder, total_steps=32 * NUM_ENVS, quiet=True)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    frames = [row["env/frames"] for row in map(json.loads, lines) if "env/frames" in row]
    # means over iterations of 8 steps; they would fall to 3.5 environments' steps again
    assert frames == sorted(frames)
    assert frames[-1] > 16 * NUM_ENVS


def test_actions_are_limited_as_in_the_tasks_own_training(
    played: tuple[Any, Variant],
) -> None:
    env, variant = played
    limit = 1.0 if variant.task in ("FakeCartpole", "FakeHand") else float("inf")
    assert float(env.single_action_space.high[0]) == limit


def test_states_that_a_task_never_writes_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """AllegroKuka declares states and leaves them zero: a critic would be blind. Its LSTM
    configuration has the name of the one that it extends.
    """
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    env: Any = make_env("isaac_gym:FakeKukaLSTM", NUM_ENVS, seed=5)
    assert env.single_state_space is None
    obs, info = env.reset()
    assert info == {}
    variant = Variant("FakeKukaLSTM", shows_end=True, first_age=1, limit=8)
    assert check_episodes(env, variant, obs)["truncated"] > 0
    env.close()


def test_what_a_task_writes_is_not_in_the_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(FAKE))
    env: Any = make_env("isaac_gym:FakeHand", 2)
    folder = Path(f"/proc/{env._simulator.process.pid}/cwd").resolve()
    assert [file.name for file in folder.iterdir()] == ["walkers.xml"]
    env.close()
    assert list(tmp_path.iterdir()) == []
    assert not folder.exists()


def test_one_environment_that_ends_while_its_way_to_restart_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    for task, clock in (("FakeTerrain", 8), ("FakeHand", 0)):
        env: Any = make_env(f"isaac_gym:{task}", 1, overrides=f"+env.firstClock={clock}")
        assert (env.autoreset_mode == gymnasium.vector.AutoresetMode.SAME_STEP) == (
            task == "FakeTerrain"
        )
        env.close()


def test_a_terminals_signals_are_left_to_the_trainer(played: tuple[Any, Variant]) -> None:
    env, _ = played
    process = env._simulator.process
    assert os.getsid(process.pid) == process.pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    env.reset()
    assert process.poll() is None


def test_the_contract_of_all_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    # clipped so that the number of the episode is not seen, which a reset does not turn back
    env: Any = make_env(
        "isaac_gym:FakeCartpole",
        4,
        max_episode_steps=5,
        overrides="env.clipObservations=1.0",
    )
    assert (env.max_episode_steps, float(env.single_observation_space.high[0])) == (
        5,
        1.0,
    )
    assert check_env(env, steps=24) == []
    env.close()
    env.close()
    with pytest.raises(UsageError, match="has ended"):
        env.reset()


def test_overrides_of_legged_gym_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    overrides = "env.send_timeouts=False env.num_privileged_obs=None env.episode_length=4"
    env: Any = make_env(
        "isaac_gym:walker_rough",
        NUM_ENVS,
        overrides=overrides,
        family="legged_gym",
    )
    variant = Variant("walker_rough", shows_end=False, first_age=0, limit=5)
    assert check_episodes(env, variant, env.reset()[0], steps=20)["truncated"] > 0
    env.close()


def test_discovery_knows_the_adapter_and_not_its_server() -> None:
    assert "isaac_gym" in env_names()
    assert not {"isaac_gym_server"} & set(env_names())


@pytest.mark.parametrize(
    "path", OLD_PYTHON_FILES, ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_what_the_old_python_runs_is_written_for_it(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 6))
    if path.parent != ENVS:
        return
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    later = {"torch", "numpy", "isaacgymenvs", "hydra"}
    assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) <= later
    first = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    assert not first & later, "isaacgym must come before torch"
