"""A run that stops and goes on in a new process leaves the same bits as one that never stopped, for
every algorithm that there is.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurl.algorithms import algorithm_names, config_class, resolve_algorithm
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.envs.registry import make_env
from gpurl.nn.actor_critic import MEMORIES
from tests.forked_runs import ROOT, Forks
from tests.small_runs import assert_same, small_settings, some_demonstrations, takes

ENVS, HORIZON, WHOLE = 8, 2, 20
ITERATION = ENVS * HORIZON
WALK, PLACES, AGENTS = "tests.tiny_envs:RandomWalk", "cart_pole", "two_step_game"
SEEN, POINTING = "tests.picture_envs:Seen", "tests.picture_envs:Pointing"
COMMON: dict[str, Any] = {
    "num_envs": ENVS,
    "horizon": HORIZON,
    "total_steps": WHOLE * ITERATION,
    "eval_every": 10**9,
    "eval_episodes": 0,
    "save_every": "1000i",
    "log_every": 0.0,
    "device": "cpu",
    "threads": 1,
    "seed": 3,
    "quiet": True,
}
VARIANTS: dict[
    str, tuple[str, str, dict[str, Any]]
] = {  # what an algorithm's own settings do not reach
    **{
        f"ppo {memory}": (
            "ppo",
            PLACES,
            {
                "network": {"hidden": [8], "memory": memory, "memory_size": 8},
                "env_options": {"velocities": False},
            },
        )
        for memory in MEMORIES
    },
    "ppo with a state": ("ppo", "tests.tiny_envs:HiddenAlternating", {"normalize_obs": True}),
    "ppo discrete": (
        "ppo",
        "chasing",
        {"eval_episodes": 2, "env_options": {"discrete": True, "max_episode_steps": 12}},
    ),
    "ppo asynchronous": ("ppo", WALK, {"asynchronous": True, "normalize_obs": True}),
    "own ppo asynchronous, killed": (
        "tests.engine.test_asynchronous:OwnLoss",
        PLACES,
        {"asynchronous": True, "save_every": "1i"},
    ),
    "ppo of joint agents": ("tests.joint_ppo:JointPPO", "tests.tiny_envs:Walkers", {}),
    "ppo of pictures": ("ppo", "catch", {}),
    "ppo of residual layers": (
        "ppo",
        "catch",
        {"network": {"hidden": [8], "body": "bro", "encoder": "impala"}},
    ),
    "ppo of layer norms": ("ppo", WALK, {"network": {"hidden": [8, 8], "layer_norm": True}}),
    "ppo of pictures and numbers": ("ppo", SEEN, {"network": {"hidden": [8], "memory": "gru"}}),
    "ppo of stacked frames": ("ppo", "frame_stack:catch", {}),
    "dqn of pictures and numbers": ("dqn", SEEN, {"normalize_obs": True}),
    "sac of pictures and numbers": ("sac", POINTING, {"normalize_obs": True}),
    "sac discrete": ("sac", PLACES, {"schedule": "linear"}),
    "a2c that logs once": (
        "a2c",
        WALK,
        {"log_every": 1e9, "save_every": "1i"},
    ),  # killed: what is counted until then goes through the checkpoint
    "td3 by priority": ("td3", WALK, {"prioritized": True, "normalize_obs": True, "n_step": 3}),
    "bc of a teacher": ("bc", PLACES, {"teacher": ""}),
    "bc dagger": ("bc", PLACES, {"teacher": "", "dagger": True}),
    "bc of a student with a memory": (
        "bc",
        PLACES,
        {
            "teacher": "",
            "dagger": True,
            "actor_network": {"hidden": [8], "memory": "gru", "memory_size": 4},
        },
    ),
    "ppo that warms its critic": ("ppo", WALK, {"critic_warmup": 9}),
    "sac that warms its critics": ("sac", WALK, {"critic_warmup": 6}),
}


def env_of(algorithm: str) -> str:
    """An environment that it takes."""
    for name in (WALK, PLACES, AGENTS):
        env = make_env(name, 1)
        if takes(algorithm, env.single_action_space, env.num_agents):
            return name
    raise AssertionError(f"{algorithm} takes none of the environments here: add one")


CASES = {
    name: (name, env_of(name), {"normalize_obs": True}) for name in algorithm_names()
} | VARIANTS


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as started:
        yield started


@pytest.fixture(scope="module")
def teacher(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    settings = COMMON | {"total_steps": ITERATION, "minibatches": 1, "run_dir": str(folder / "run")}
    assert forks.run(folder / "output", algorithm="ppo", env=PLACES, **settings) == 0
    return folder / "run"


def settings_of(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `gpurl.train` is given, with all that is to be saved in the checkpoint."""
    algorithm, env, changes = CASES[case]
    fields = config_class(resolve_algorithm(algorithm)).__dataclass_fields__
    settings = COMMON | small_settings(algorithm) | changes
    settings |= {
        name: value
        for name, value in {"save_replay": True, "learning_starts": 3 * ITERATION - 1}.items()
        if name in fields
    }
    if algorithm == "bc" and "teacher" not in changes:
        settings["dataset"] = some_demonstrations(tmp_path, make_env(env, 1))
    elif algorithm == "bc":
        settings["teacher"] = str(request.getfixturevalue("teacher"))
    return settings | {"algorithm": algorithm, "env": env}


def left_by(folder: Path) -> dict[str, Any]:
    """Every part of the newest checkpoint and every line of metrics.jsonl, without seconds and the
    run's place.
    """
    parts, manifest = load_checkpoint(folder)
    parts["trainer"].pop("elapsed")
    parts["meta"]["settings"].pop("root")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "time/fps", "time/time_elapsed", "time/collect_seconds", "time/update_seconds")
    timed += ("time/collect_wait_seconds", "time/update_wait_seconds")
    return parts | {
        "step": manifest["step"],
        "logged": [{key: line[key] for key in line if key not in timed} for line in lines],
    }


@pytest.mark.parametrize("case", CASES)
def test_twenty_iterations_are_ten_and_ten_and_seven_and_thirteen(
    case: str, tmp_path: Path, forks: Forks, request: pytest.FixtureRequest
) -> None:
    """Each leg in a process of its own; the first legs show as well that a seed gives the same bits
    in every process. A run that saves every iteration is killed, within the next one; the others
    get a signal, after which they log and save.
    """
    settings, output = settings_of(case, tmp_path, request), tmp_path / "output"
    kills = settings["save_every"] == "1i"
    number = signal.SIGKILL if kills else signal.SIGTERM

    def play(name: str, *stops: int) -> dict[str, Any]:
        arguments = settings | {"run_dir": str(tmp_path / name)}
        for stop in stops:
            stops_at = {"stop_after": stop + kills, "stop_signal": number}
            assert forks.run(output, **arguments, **stops_at) == -number, output.read_text()
            iterations = load_checkpoint(tmp_path / name)[0]["trainer"]["iteration"]
            assert iterations == stop
            arguments = {"path": str(tmp_path / name)}
        assert forks.run(output, **arguments) == 0, output.read_text()
        return left_by(tmp_path / name)

    whole = play("whole")
    assert (whole["step"], whole["trainer"]["iteration"]) == (WHOLE * ITERATION, WHOLE)
    expected = (
        [ITERATION * number for number in range(1, WHOLE + 1)]
        if not settings["log_every"]
        else [WHOLE * ITERATION]
    )
    assert [line["step"] for line in whole["logged"]][: len(expected)] == expected
    assert any(key.startswith("train/") for line in whole["logged"] for key in line)
    for first in (10, 7):
        assert_same(whole, play(f"stopped at {first}", first))


def test_new_interpreters_leave_the_same_bits_too(
    tmp_path: Path, forks: Forks, request: pytest.FixtureRequest
) -> None:
    """They have other hashes and addresses than the process that the others are forked from."""
    settings, output = settings_of("rainbow", tmp_path, request), tmp_path / "output"
    assert forks.run(output, **settings, run_dir=str(tmp_path / "whole")) == 0, output.read_text()
    code = "import json, sys\nfrom tests.forked_runs import play\nplay(**json.loads(sys.argv[1]))"
    parts = str(tmp_path / "parts")
    for arguments, expected in (
        (settings | {"run_dir": parts, "stop_after": 9}, -signal.SIGTERM),
        ({"path": parts}, 0),
    ):
        command = [sys.executable, "-c", code, json.dumps(arguments)]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == expected, done.stderr
    assert_same(left_by(tmp_path / "whole"), left_by(tmp_path / "parts"))
