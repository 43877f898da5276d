"""Environments and algorithms given as classes, instances, functions and ids; presets by class."""

import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import gpurl
from gpurl.algorithms.ppo import PPO
from gpurl.api import check_spaces
from gpurl.cli.main import main
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.registry import class_of_env, env_options, make_env
from gpurl.envs.stacked_box import StackedBox
from gpurl.envs.torch_env import State
from gpurl.errors import EndlessEpisodeError, UsageError
from gpurl.run.evaluator import Player
from gpurl.run.given import name_of_env
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from tests.small_runs import ITERATION, assert_same, small_run, small_settings, state_of
from tests.tiny_envs import RandomWalk

SMALL: dict[str, Any] = {
    "num_envs": 2,
    "horizon": 8,
    "minibatches": 1,
    "epochs": 1,
    "schedule": "constant",
    "total_steps": 32,
    "eval_episodes": 2,
    "device": "cpu",
    "quiet": True,
    "threads": 1,
}


class MyGym(GymnasiumCpu):
    """As docs/environments.md shows it."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device, seed, env=lambda: gymnasium.make("CartPole-v1"))


class MyPPO(PPO):
    """Nothing of its own."""


def train(tmp_path: Path, env: Any, algorithm: Any = "ppo", **changes: Any) -> gpurl.Run:
    return gpurl.train(algorithm, env, run_dir=tmp_path / "run", **(SMALL | changes))


def test_a_class(tmp_path: Path) -> None:
    run = train(tmp_path, RandomWalk)
    assert run.outcome.steps == 32
    assert gpurl.resume(run.folder, total_steps=64, quiet=True).outcome.steps == 64
    assert run.policy().settings["env"] == "tests.tiny_envs:RandomWalk"


def test_a_class_that_was_defined_in_a_function(tmp_path: Path) -> None:
    class Local(RandomWalk):
        pass

    run = train(tmp_path, Local)
    assert "Local" in run.policy().settings["env"]
    assert gpurl.resume(run.folder, total_steps=64, quiet=True).outcome.steps == 64


def test_environments_that_exist_already_are_evaluated_after_the_training(tmp_path: Path) -> None:
    env = make_env("cart_pole", 4)
    run = train(tmp_path, env, num_envs=4)
    assert (run.outcome.steps, run.outcome.evaluation["at_step"]) == (32, 32)
    env.reset(seed=0)  # it was not closed
    with pytest.raises(UsageError, match=r"num_envs is 7, the given environment's is 4"):
        train(tmp_path / "other", env, num_envs=7)


def test_options_of_environments_that_exist_are_refused(tmp_path: Path) -> None:
    """Nothing reads them, and later commands would believe them."""
    run = train(tmp_path, "pendulum")
    env, options = make_env("pendulum", 2), {"max_episode_steps": 5}
    message = "for a name; the given environments are made"
    with pytest.raises(UsageError, match=message):
        gpurl.train("ppo", env, env_options=options, run_dir=str(tmp_path / "other"))
    with pytest.raises(UsageError, match=message):
        gpurl.evaluate_run(run.folder, 2, env=env, env_options=options)


def test_a_run_on_stacked_frames_is_evaluated(tmp_path: Path) -> None:
    """A checkpoint describes their space as a plain Box."""
    run = train(tmp_path, "frame_stack:catch")
    assert gpurl.evaluate_run(run.folder, 2)["eval/episodes"] == 2


def row(*names: str) -> GroupedBox:
    return GroupedBox.of({name: Box(-1.0, 1.0, (2,), np.float32) for name in names})


@pytest.mark.parametrize(
    ("trained", "offered", "fits"),
    [
        (Box(-1.0, 1.0, (2,)), Box(-1.0, 1.0, (2,)), True),
        (Box(-1.0, 1.0, (2,)), Box(-2.0, 2.0, (2,)), False),
        (Box(-1.0, 1.0, (2,)), Box(-1.0, 1.0, (3,)), False),
        (MultiDiscrete([3, 5]), MultiDiscrete([3, 5]), True),
        (MultiDiscrete([3, 5]), MultiDiscrete([5, 3]), False),
        (Discrete(3), Discrete(4), False),
        (Discrete(3), Box(-1.0, 1.0, (1,)), False),
    ],
    ids=str,
)
def test_a_policy_plays_tasks_with_its_own_actions_only(
    trained: Any, offered: Any, fits: bool
) -> None:
    space = Box(-1.0, 1.0, (4,))
    policy: Any = SimpleNamespace(observation_space=space, action_space=trained)
    env: Any = SimpleNamespace(single_observation_space=space, single_action_space=offered)
    with nullcontext() if fits else pytest.raises(UsageError, match="trained on actions"):
        check_spaces(policy, env, "task")


@pytest.mark.parametrize(
    ("trained", "offered", "fits"),
    [
        (Box(-1.0, 1.0, (2,)), Box(-9.0, 9.0, (2,)), True),
        (row("place", "speed"), row("place", "speed"), True),
        (row("place", "speed"), row("alpha", "beta"), False),
        (row("place", "speed"), Box(-1.0, 1.0, (4,)), False),
        (Box(0, 255, (2, 3), np.uint8), StackedBox(Box(0, 255, (3,), np.uint8), 2), True),
        (Box(0, 255, (2, 3), np.uint8), Box(0, 255, (2, 3), np.float32), False),
    ],
    ids=str,
)
def test_a_policy_plays_tasks_with_its_own_observations_only(
    trained: Any, offered: Any, fits: bool
) -> None:
    policy: Any = SimpleNamespace(observation_space=trained, action_space=Discrete(2))
    env: Any = SimpleNamespace(single_observation_space=offered, single_action_space=Discrete(2))
    with nullcontext() if fits else pytest.raises(UsageError, match="trained on observations"):
        check_spaces(policy, env, "task")


@pytest.mark.parametrize("ends", ["normally", "early"])
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_their_evaluation_leaves_no_trace_in_the_checkpoint(
    name: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It plays in the training environments; the run continues as if it had its own."""
    settings: dict[str, Any] = {
        **small_settings(name),
        "num_envs": 4,
        "horizon": 8,
        "total_steps": 64,
        "eval_episodes": 4,
        "eval_every": 10**9,
        "deterministic": True,
        "device": "cpu",
        "quiet": True,
    }
    if name == "sac":
        settings["save_replay"] = True

    def breaks(player: Player, *_: object, **__: object) -> None:
        player.env.reset(seed=0)
        raise EndlessEpisodeError("an evaluation that breaks off")

    if ends == "early":
        monkeypatch.setattr(Player, "play_each", breaks)
    states = []
    for folder, env in (("named", "pendulum"), ("given", make_env("pendulum", 4))):
        run = gpurl.train(name, env, run_dir=tmp_path / folder, **settings)
        assert bool(run.outcome.evaluation) == (ends == "normally")
        after_training = state_of(run.folder)
        gpurl.resume(run.folder, total_steps=96)
        states.append((after_training, state_of(run.folder)))
    named, given = states
    assert_same(given, named)


@pytest.mark.parametrize("kind", ["maker", "class", "single", "vector", "id"])
def test_environments_of_gymnasium(kind: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "maker": lambda: gymnasium.make("CartPole-v1"),
        "class": CartPoleEnv,
        "single": gymnasium.make("CartPole-v1"),
        "vector": SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * 2, autoreset_mode=AutoresetMode.SAME_STEP
        ),
        "id": "CartPole-v1",
    }
    changes = {"num_envs": 1, "total_steps": 16} if kind == "single" else {}
    if kind == "class":
        changes = {"max_seconds": 5.0, "eval_episodes": 0}  # it has no time limit
    assert train(tmp_path, given[kind], **changes).outcome.steps == (16 if kind == "single" else 32)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (gymnasium.make("Pendulum-v1", g=3.7), "gymnasium:Pendulum-v1"),
        (
            gymnasium.wrappers.ClipReward(gymnasium.make("CartPole-v1"), 0, 1),
            "gymnasium:CartPole-v1",
        ),
        (gymnasium.make_vec("CartPole-v1", 2, "sync"), "gymnasium:CartPole-v1"),
        (SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")]), "gymnasium:CartPole-v1"),
        (GymnasiumCpu(1, task="CartPole-v1"), "gymnasium:CartPole-v1"),
        (make_env("CartPole-v1", 1), "gymnasium:CartPole-v1"),
        (gymnasium.wrappers.TimeLimit(CartPoleEnv(), 20), "gymnasium:CartPoleEnv"),
        (MyGym(1), f"{__name__}:MyGym"),
    ],
)
def test_an_instance_has_the_name_of_its_task(env: Any, name: str) -> None:
    assert name_of_env(env)[0] == name


def test_a_run_on_an_instance_goes_by_its_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command pretends that it makes the instance again; a new one it makes when asked to."""
    monkeypatch.chdir(tmp_path)
    env = gymnasium.make("Pendulum-v1", g=3.7)
    run = gpurl.train("ppo", env, **{**SMALL, "num_envs": 1, "total_steps": 16})
    assert run.folder.parent.parts[-2:] == ("gymnasium_Pendulum-v1", "ppo")
    assert run.needs_env
    message = "no name makes again: give them again, as gpurl.evaluate_run(RUN, env=...), or name "
    for command in (["eval"], ["play"], ["train", "--resume"]):
        assert main([*command, str(run.folder), "--device", "cpu"]) == 2
        assert f"{message}Pendulum-v1, which makes new ones" in capsys.readouterr().err
    assert main(["eval", str(run.folder), "--env", "Pendulum-v1", "--episodes", "2"]) == 0
    assert gpurl.evaluate_run(run.folder, 2, env=env)["eval/episodes"] == 2
    resumed = gpurl.resume(run.folder, env=env, total_steps=32, quiet=True)
    assert resumed.outcome.steps == 32
    assert resumed.policy().settings["env"] == "gymnasium:Pendulum-v1"


def make_cart_pole() -> gymnasium.Env:
    """Another process finds the function, but no environment class of its name."""
    return gymnasium.make("CartPole-v1")


def forget_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process begins."""
    monkeypatch.setattr("gpurl.discovery.GIVEN_CLASSES", {})


def advised(text: str) -> tuple[list[str], list[str]]:
    """(commands of gpurl, Python calls) in a summary."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    commands = [line for line in lines if line.startswith("gpurl ")]
    calls = [line for line in lines if line.startswith("gpurl.")]
    assert len(commands) + len(calls) == len(lines) - 1  # and tensorboard
    return commands, calls


@pytest.mark.parametrize("is_known_here", [True, False])
@pytest.mark.parametrize(
    "env", [make_cart_pole, lambda: make_cart_pole(), CartPoleEnv, RandomWalk, "instance"]
)
def test_all_that_a_summary_advises_works(
    env: Any,
    is_known_here: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, and in another that knows what this one was given only if it is given
    again."""
    given = make_env("cart_pole", 2) if env == "instance" else env
    # CartPoleEnv has no time limit
    settings = {"eval_episodes": 0} if env is CartPoleEnv else {}
    run = train(tmp_path, given, max_seconds=20.0, **settings, quiet=False)
    commands, calls = advised(capsys.readouterr().out)
    is_module_class = env in (RandomWalk, CartPoleEnv)
    assert [command.split()[1] for command in commands] == (
        ["eval", "play"] if is_module_class else ["plot"]
    )
    if not is_known_here:
        forget_given(monkeypatch)
    for command in commands:
        assert main(command.split()[1:]) == 0
    assert [call.partition("(")[0] for call in calls] == (
        [] if is_module_class else ["gpurl.load", "gpurl.evaluate_run", "gpurl.resume"]
    )
    obs = run.policy().algorithm.observation_space.sample()
    if env is CartPoleEnv:
        given = lambda: gymnasium.wrappers.TimeLimit(CartPoleEnv(), 20)  # noqa: E731
    names = {"gpurl": gpurl, "obs": obs[None], "given": given}
    for call in calls:
        text = call.replace("env=...", "env=given").replace("total_steps=...", "total_steps=48")
        eval(text, names)
    if calls:
        assert gpurl.resume(run.folder, env=given, total_steps=64).outcome.steps == 64


def test_a_command_that_cannot_make_the_environment_says_what_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, env in (("one", gymnasium.make("CartPole-v1")), ("two", make_cart_pole)):
        changes = {"num_envs": 1} if name == "one" else {}
        run = train(tmp_path / name, env, **changes)
        forget_given(monkeypatch)
        assert main(["eval", str(run.folder)]) == 2
        assert "gpurl.evaluate_run(RUN, env=...)" in capsys.readouterr().err


def test_an_algorithm_of_a_session_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Local(PPO):
        pass

    run = train(tmp_path, "cart_pole", Local, quiet=False)
    text = capsys.readouterr().out
    assert advised(text)[0] == [f"gpurl plot {run.folder}"]
    assert f"gpurl.evaluate_run({str(run.folder)!r})" in text
    assert "only this session knows its algorithm" in text


def test_an_algorithm_as_a_class(tmp_path: Path) -> None:
    run = train(tmp_path, "cart_pole", MyPPO)
    assert run.policy().settings["algorithm"] == f"{__name__}:MyPPO"
    with pytest.raises(UsageError, match="an algorithm is a name or a class"):
        train(tmp_path, "cart_pole", 3)


def test_what_is_no_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"an environment is a name, .*, got 3"):
        train(tmp_path, 3)


def test_presets_go_by_class() -> None:
    """A subclass of an adapter is no task of 4096 tensor environments, nor is that of an algorithm
    without a preset."""
    mine = make_settings("ppo", f"{__name__}:MyGym")
    theirs = make_settings("ppo", "gymnasium_cpu:CartPole-v1")
    assert mine.train == theirs.train
    assert mine.algorithm_config == theirs.algorithm_config
    assert mine.train.num_envs == 8
    assert make_settings("ppo", "CartPole-v1").train == theirs.train
    own = make_settings(f"{__name__}:MyPPO", "pendulum")
    assert own.algorithm_config == make_settings("ppo", "pendulum").algorithm_config
    assert make_settings("a2c", "chasing").algorithm_config.horizon == 16


def test_an_iteration_larger_than_the_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_run(tmp_path / "run", 1, total_steps=ITERATION - 1)
    assert f"one iteration is {ITERATION} steps" in capsys.readouterr().err


SINGLE = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box


class Single(gymnasium.Env):
    observation_space = Box(-np.inf, np.inf, (1,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, speed: float = 1.0, render_mode: str | None = None) -> None:
        self.speed = speed
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.x.copy(), {}

    def step(self, action):
        self.x += self.speed
        return self.x.copy(), self.speed, False, False, {}

    def render(self):
        return np.zeros((8, 8, 3), np.uint8)
"""


def test_a_module_with_an_environment_of_gymnasium(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its constructor's parameters are options, and every command makes it again."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_single.py").write_text(SINGLE)
    options: dict[str, Any] = {"speed": 2.0, "max_episode_steps": 3}
    run = train(tmp_path, "own_single", env_options=options)
    assert run.outcome.evaluation["eval/mean_reward"] == 6.0  # three steps of 2
    forget_given(monkeypatch)
    folder = str(run.folder)
    assert gpurl.resume(folder, total_steps=64, quiet=True).outcome.steps == 64
    half = ("speed=0.5", "max_episode_steps=3")
    assert main(["eval", folder, "--env-options", *half, "--episodes", "2"]) == 0
    assert "return 1.500 " in capsys.readouterr().out
    picture = next(iter(gpurl.film(folder, episodes=1, height=16)))
    assert picture.shape[0] == 16
    # the help and the sizes are those of its class
    assert main(["envs", "own_single:Single"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("own_single:Single\n\nobservation Box (1,)")
    assert "--env.speed\n      (default 1.0)" in text
    assert "vectorization" not in text
    assert make_settings("ppo", "own_single").train.num_envs == 8
    with pytest.raises(UsageError, match=r"has no option sped; did you mean speed\?"):
        make_env("own_single", 2, sped=1.0)


def test_of_several_environments_of_gymnasium_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    other = "\n\nclass Fast(Single):\n    pass\n"
    (tmp_path / "own_two.py").write_text(SINGLE + other)
    with pytest.raises(UsageError, match=r"classes are Single, Fast: own_two:CLASS names one"):
        make_env("own_two", 2)
    assert type(make_env("own_two:Fast", 2)).__name__ == "Fast"
    # beside an environment of gpurl they are parts of it
    adapter = "\n\nfrom tests.run.test_given import MyGym\nclass Mine(MyGym):\n    pass\n"
    (tmp_path / "own_three.py").write_text(SINGLE + adapter)
    assert type(make_env("own_three", 2)).__name__ == "Mine"
    # it has no docstring, and that of its base does not stand for one
    assert main(["envs", "own_three"]) == 0
    assert capsys.readouterr().out.startswith("own_three\n\nobservation Box (4,)")


def test_annotations_that_are_no_flags_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a module with types that only type checkers import, and of functions."""
    monkeypatch.syspath_prepend(tmp_path)
    head = (
        "from __future__ import annotations\n"
        "from collections.abc import Callable\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from fractions import Fraction\n"
    )
    parameters = {
        "own_text": "share: Fraction | None = None",
        "own_function": "f: Callable[[int], float] = abs",
        "own_bare": "mode=None",
    }
    for name, parameter in parameters.items():
        source = SINGLE.replace("speed: float = 1.0", f"speed: float = 1.0, {parameter}")
        (tmp_path / f"{name}.py").write_text(f"{head}{source}")
        words = ["num_envs=4", "horizon=8", "minibatches=1", "total_steps=32", "eval_episodes=0"]
        words += ["device=cpu", f"run_dir={tmp_path / name}_run", "quiet=true", "--env.speed", "3"]
        assert main(["train", "ppo", name, *words]) == 0, capsys.readouterr().err
        option = parameter.partition(":")[0].partition("=")[0]
        assert main(["train", "ppo", name, f"--env.{option}", "1"]) == 2  # no flag, not a box
        assert "╭" not in capsys.readouterr().err
        assert "speed: 3.0" in (tmp_path / f"{name}_run" / "config.yaml").read_text()


def test_a_class_of_gymnasium_has_the_options_of_its_constructor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_class.py").write_text(SINGLE)
    kind = importlib.import_module("own_class").Single
    options: dict[str, Any] = {"speed": 2.0, "max_episode_steps": 3}
    run = train(tmp_path, kind, env_options=options)
    assert run.outcome.evaluation["eval/mean_reward"] == 6.0
    assert f"gpurl eval {run.folder}" in run.summary()  # a command can make it
    forget_given(monkeypatch)
    assert gpurl.evaluate_run(run.folder, episodes=2)["eval/mean_reward"] == 6.0

    # what a constructor passes on is an option of the next base
    class Passing(kind):  # type: ignore[misc, valid-type]
        def __init__(self, bonus: float = 0.0, **options: Any) -> None:
            super().__init__(**options)

    class Sized(Passing):
        def __init__(self, size: int, **options: Any) -> None:
            super().__init__(**options)

    class Giving(Sized):
        def __init__(self, **options: Any) -> None:
            super().__init__(3, **options)

    names = {"bonus", "speed", "render_mode", "max_episode_steps"}
    for each in (Passing, Giving):  # a base's size is given
        assert env_options(class_of_env(each)).keys() == names
    assert env_options(class_of_env(Sized)).keys() == names | {"size"}
    passed = train(tmp_path / "passed", Passing, env_options=options)
    assert passed.outcome.evaluation["eval/mean_reward"] == 6.0

    class Local(kind):  # type: ignore[misc, valid-type]
        pass

    here = train(tmp_path / "here", Local, env_options=options)
    assert here.outcome.evaluation["eval/mean_reward"] == 6.0
    assert "gpurl eval" not in here.summary()


class Pictures(RandomWalk):
    """Shows pictures."""

    single_observation_space = Box(0, 255, (4, 4, 3), np.uint8)

    def observe(self, state: State) -> torch.Tensor:
        rows = super().observe(state)
        return torch.zeros(len(rows), 4, 4, 3, dtype=torch.uint8)


def test_pictures_are_flattened_and_it_is_said(tmp_path: Path) -> None:
    settings = make_settings("ppo", f"{__name__}:Pictures", **SMALL, network={"encoder": "none"})
    notes = make_trainer(settings, torch.device("cpu")).engine.notes
    (said,) = (note for note in notes if "images" in note)
    assert "(4, 4, 3) look like images; they are flattened into rows of 48 numbers" in said
    assert train(tmp_path, Pictures).outcome.steps == 32
