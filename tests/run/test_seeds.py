"""Trainings with several seeds, at once or one after another, and their mean."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpurl
from gpurl import seeds as module
from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from gpurl.cli.main import main
from gpurl.errors import EnvError, NonFiniteError, UsageError
from gpurl.run import memory_need
from gpurl.run.callbacks import RunView
from gpurl.run.comparison import compare_runs
from gpurl.run.run_folder import lock_run
from gpurl.run.settings import make_settings
from gpurl.seeds import compare_seeds, train_seeds
from tests.small_runs import ITERATION, SMALL, assert_same, start
from tests.tiny_envs import RandomWalk

SETTINGS: dict[str, Any] = SMALL | {"total_steps": 2 * ITERATION, "eval_every": ITERATION}
WORDS = [
    *("ppo", "pendulum", "num_envs=16", "horizon=8", "minibatches=2", "eval_episodes=4"),
    *("device=cpu", "network.hidden=16", f"total_steps={2 * ITERATION}", f"eval_every={ITERATION}"),
]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_seed_is_the_run_of_that_seed(tmp_path: Path) -> None:
    runs = train_seeds("ppo", "pendulum", 2, jobs=1, seed=3, root=str(tmp_path), **SETTINGS)
    assert [run.folder.name[-2:] for run in runs] == ["_3", "_4"]
    alone = gpurl.train("ppo", "pendulum", seed=4, run_dir=str(tmp_path / "alone"), **SETTINGS)
    model = load_checkpoint(alone.folder)[0]["model"]
    for run, is_equal in zip(runs, (False, True)):
        other = load_checkpoint(run.folder)[0]["model"]
        assert all(bool((other[name] == model[name]).all()) for name in model) == is_equal
    # their mean
    group, picture = compare_seeds(runs)
    assert [each.folder for each in group.runs] == [run.folder for run in runs]
    ends = [run.outcome.evaluation["eval/mean_reward"] for run in runs]
    assert group.last_return().value == pytest.approx(sum(ends) / 2)
    assert picture.parent == runs[0].folder.parent
    assert picture.stat().st_size > 10_000


def test_seeds_may_be_named(tmp_path: Path) -> None:
    settings = SETTINGS | {"run_dir": str(tmp_path / "all"), "eval_episodes": 0}
    settings["total_steps"] = ITERATION
    runs = gpurl.train_seeds("ppo", "pendulum", [9, 2], **settings)
    assert [run.folder for run in runs] == [tmp_path / "all" / f"seed_{seed}" for seed in (9, 2)]
    with pytest.raises(UsageError, match="seeds must be at least 1, got 0"):
        train_seeds("ppo", "pendulum", 0, **settings)
    with pytest.raises(UsageError, match="seeds are 1, 1: each must be there once"):
        train_seeds("ppo", "pendulum", [1, 1], **settings)


def test_a_seed_that_fails_costs_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = module.run

    def run(settings: Any, **others: Any) -> Any:
        if settings.train.seed == 1:
            raise NonFiniteError("reward: NaN")
        return original(settings, **others)

    monkeypatch.setattr(module, "run", run)
    settings = SETTINGS | {"root": str(tmp_path), "eval_episodes": 0, "total_steps": ITERATION}
    runs = train_seeds("ppo", "pendulum", 3, jobs=1, **settings)
    assert [each.folder.name[-1] for each in runs] == ["0", "2"]
    assert "seed 1 failed: reward: NaN" in caplog.text
    words = [*WORDS[:-1], "eval_episodes=0", f"root={tmp_path}", "--seeds", "2", "--jobs", "1"]
    assert main(["train", *words]) == NonFiniteError.exit_code
    # nothing is left
    monkeypatch.setattr(module, "run", lambda *_, **__: (_ for _ in ()).throw(EnvError("gone")))
    with pytest.raises(EnvError, match="gone"):
        train_seeds("ppo", "pendulum", 2, jobs=1, **settings)


def test_the_command_prints_each_run_and_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_turn = ["--seeds", "2", "--jobs", "1"]
    assert main(["train", *WORDS, f"root={tmp_path}", *in_turn]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^run folder ", out, re.MULTILINE)) == 2
    assert f"ppo: 2 seeds, {2 * ITERATION} steps, mean -" in out
    picture = Path(out.splitlines()[-1].removeprefix("picture "))
    assert picture.exists()
    # one evaluation of each is enough
    words = [*WORDS[:-2], f"total_steps={ITERATION}", f"root={tmp_path}", *in_turn]
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert f"ppo: 2 seeds, {ITERATION} steps, mean -" in out
    assert Path(out.splitlines()[-1].removeprefix("picture ")).exists()
    # without returns there is no mean
    words = [*WORDS[:-1], "eval_episodes=0", f"root={tmp_path}", "--quiet", *in_turn]
    assert main(["train", *words]) == 0
    assert capsys.readouterr().err.startswith("no mean over seeds: ")


@pytest.mark.parametrize(("algorithm", "env"), [("ppo", "pendulum"), ("ppo", "hopper")])
def test_as_a_population_they_are_the_same_runs(
    algorithm: str, env: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run of a population, and the same mean, interval and curves as of runs of their own."""
    if env == "hopper":
        pytest.importorskip("mujoco")
    words = [algorithm, env, *WORDS[2:], "--seeds", "3"]
    said = {}
    # two members at a time have a thread each, physics has both
    for kind, flags in (("in turn", ["--jobs", "1", "threads=1"]), ("at once", ["threads=2"])):
        assert main(["train", *words, *flags, f"run_dir={tmp_path / kind}"]) == 0
        *others, mean, _, picture = capsys.readouterr().out.splitlines()
        runs = sum(line.startswith("run folder ") for line in others)
        assert runs == (3 if kind == "in turn" else 1)
        assert Path(picture.removeprefix("picture ")).stat().st_size > 10_000
        said[kind] = mean
    assert said["at once"] == said["in turn"]
    assert said["at once"].startswith(f"ppo: 3 seeds, {2 * ITERATION} steps, mean ")
    (in_turn,) = compare_runs([tmp_path / "in turn" / f"seed_{seed}" for seed in range(3)])
    (at_once,) = compare_runs([tmp_path / "at once"])
    assert [run.by_steps for run in at_once.runs] == [run.by_steps for run in in_turn.runs]
    # a member has a seed of its own
    of_each = compare_runs([tmp_path / "at once"], by="seed")
    assert [group.label for group in of_each] == ["seed 0", "seed 1", "seed 2"]


def test_as_a_population_each_run_stands_for_a_member(tmp_path: Path) -> None:
    settings = SETTINGS | {"threads": 1}
    runs = train_seeds("ppo", "pendulum", 2, seed=3, run_dir=str(tmp_path / "all"), **settings)
    alone = gpurl.train("ppo", "pendulum", seed=4, run_dir=str(tmp_path / "alone"), **settings)
    assert [run.folder for run in runs] == [tmp_path / "all"] * 2
    obs = torch.linspace(-1, 1, 12).reshape(4, 3)
    expected = gpurl.load(alone.folder, best=False).act(obs)
    found = [gpurl.load(run.folder, best=False, member=run.member).act(obs) for run in runs]
    assert [bool((each == expected).all()) for each in found] == [False, True]
    assert bool((runs[0].policy().act(obs) != runs[1].policy().act(obs)).any())
    # the evaluation is the member's, too
    ends = [run.outcome.evaluation["eval/mean_reward"] for run in runs]
    assert ends[1] != ends[0]
    assert runs[1].outcome.evaluation == alone.outcome.evaluation
    assert f"member 1, return {ends[1]:.2f} " in repr(runs[1])
    assert f"evaluated return {ends[0]:.2f} ± " in runs[0].summary()


@pytest.mark.parametrize(
    ("env", "seeds", "changes", "why"),
    [
        ("pendulum", (3, 5), {}, "seeds 3, 5 do not follow each other"),
        ("pendulum", (1, 0), {}, "seeds 1, 0 do not follow each other"),
        ("pendulum", (0, 1), {"max_seconds": 60.0}, "max_seconds is meant for a run of each seed"),
        ("pendulum", (0, 1), {"stop_return": 0.0}, "stop_return is meant for a run of each seed"),
        ("pendulum", (0, 1), {"video_every": 10**9}, "video_every is meant for a run of each seed"),
        (
            f"{__name__}:Slow",
            (0, 1),
            {},
            "what tests.run.test_seeds:Slow takes of memory is known only",
        ),
        ("pendulum", (0, 1), {"nan": "reset-envs"}, "takes nan raise or skip, got reset-envs"),
        ("CartPole-v1", (0, 1), {}, "as tensor tasks and MuJoCo tasks do, CartPole-v1 does not"),
        ("frame_stack:catch", (0, 1), {}, ""),
    ],
    ids=str,
)
def test_where_no_population_is_possible_they_train_one_after_another(
    env: str,
    seeds: tuple[int, ...],
    changes: dict[str, Any],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = SETTINGS | {"total_steps": ITERATION, "eval_every": None, "quiet": False} | changes
    runs = train_seeds("ppo", env, seeds, run_dir=str(tmp_path), **settings)
    folders = [tmp_path / f"seed_{seed}" for seed in seeds] if why else [tmp_path] * 2
    assert [run.folder for run in runs] == folders
    out = capsys.readouterr().out
    assert ("seeds one after another, not as a population: " in out) == bool(why)
    assert why in out


def test_seeds_that_fit_into_memory_alone_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_need, "available_bytes", lambda device: 1 << 29)
    words = ["sac", "pendulum", "num_envs=4", "replay_size=8000000", "total_steps=64"]
    words += ["eval_episodes=0", "device=cpu", "actor_network.hidden=8", "critic_network.hidden=8"]
    words += ["learning_starts=16", "batch_size=16", f"run_dir={tmp_path}", "--seeds", "2"]
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert "seeds one after another, not as a population: 4 environments of pendulum" in out
    assert len([*tmp_path.glob("seed_*/config.yaml")]) == 2


def test_a_member_that_diverges_is_a_seed_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["ppo", f"{__name__}:FailsInSecondShare", *WORDS[2:-1], "eval_episodes=0", "nan=raise"]
    words += ["threads=1", "--seeds", "3", "seed=10"]
    assert main(["train", *words, f"run_dir={tmp_path / 'words'}"]) == NonFiniteError.exit_code
    assert "1 of 3 seeds failed, see above" in capsys.readouterr().err
    assert "seed 11 failed, member 1 of " in caplog.text
    assert "A new run with --nan skip leaves such steps out" in caplog.text
    assert "--resume" not in caplog.text
    settings = SETTINGS | {"eval_episodes": 0, "nan": "raise", "run_dir": str(tmp_path / "call")}
    runs = train_seeds("ppo", f"{__name__}:FailsInSecondShare", 3, **settings)
    assert [run.member for run in runs] == [0, 2]


def test_a_callback_of_ones_own_has_a_run_of_each_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"run_dir={tmp_path}", "--callback", "tests.run.test_seeds:Marks"]
    assert main(["train", *words, "--seeds", "2"]) == 0
    assert (
        "not as a population: callback is meant for a run of each seed" in capsys.readouterr().out
    )
    assert all((tmp_path / f"seed_{seed}" / "marked").exists() for seed in (0, 1))


@pytest.mark.parametrize(
    ("changes", "variables", "why"),
    [
        ({"track": ("wandb",)}, {}, "track is meant for a run of each seed"),
        ({"device": "cuda"}, {}, "on a GPU a run of its own has kernels"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "several processes train one agent together"),
        ({}, {}, ""),
    ],
    ids=str,
)
def test_what_keeps_seeds_apart(
    changes: dict[str, Any],
    variables: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "choose_device", torch.device)
    monkeypatch.setattr(module, "check_memory", lambda *_: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = make_settings("ppo", "pendulum", **(SETTINGS | changes))
    found = module._population_obstacle(settings, (0, 1), ())
    assert found.startswith(why) if why else not found


def test_a_look_at_the_environment_leaves_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = SETTINGS | {"total_steps": ITERATION, "eval_episodes": 0, "run_dir": "here"}
    runs = train_seeds("ppo", f"{__name__}:Wanders", 2, **settings)
    assert [run.member for run in runs] == [0, 1]
    assert (tmp_path / "here" / "config.yaml").exists()
    assert Path.cwd() == tmp_path


def test_an_error_of_the_environment_ends_all_and_says_how_to_part_them(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"broken.*; by jobs 1 each seed has a run of its own"):
        train_seeds("ppo", f"{__name__}:Breaks", 2, run_dir=str(tmp_path), **SETTINGS)


def test_seeds_go_without_a_population() -> None:
    with pytest.raises(UsageError, match="and so does population, which is 3: leave out seeds"):
        train_seeds("ppo", "pendulum", 2, **(SETTINGS | {"population": 3}))


def test_beside_each_other_they_are_the_same_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"run_dir={tmp_path}", "--seeds", "2", "--jobs", "2"]
    assert main(["train", *words, "--callback", "tests.run.test_seeds:Marks"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^run folder ", out, re.MULTILINE)) == 2
    assert f"ppo: 2 seeds, {2 * ITERATION} steps, mean -" in out
    for seed in (0, 1):
        folder = tmp_path / f"seed_{seed}"
        assert (folder / "marked").exists()
        alone = gpurl.train(
            "ppo", "pendulum", seed=seed, run_dir=str(tmp_path / f"{seed}"), threads=1, **SETTINGS
        )
        models = [load_checkpoint(each)[0]["model"] for each in (folder, alone.folder)]
        assert_same(*models)


def test_warnings_of_a_process_are_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is learned before `learning_starts`."""
    words = ["sac", "pendulum", "num_envs=4", "total_steps=64", "eval_episodes=0", "threads=1"]
    words += ["device=cpu", f"run_dir={tmp_path}", "--seeds", "2", "--jobs", "2"]
    assert main(["train", *words]) == 0
    assert capfd.readouterr().err.count("warning: ") >= 2
    assert "quiet: false" in (tmp_path / "seed_0" / "config.yaml").read_text()


class Marks(gpurl.Callback):
    """Leaves a file in the run's folder."""

    def on_end(self, run: RunView) -> None:
        (run.folder / "marked").touch()


class FailsInSecondShare(RandomWalk):
    """Rewards of the second of three shares of the environments are not finite."""

    def transition(self, state: Any, action: Tensor, rng: Any) -> Any:
        state, reward, terminated = super().transition(state, action, rng)
        share = torch.arange(reward.shape[0], device=reward.device) * 3 // reward.shape[0]
        return state, torch.where(share == 1, torch.inf, reward), terminated


class Slow(RandomWalk):
    """To make a few takes long."""

    @classmethod
    def is_quick_to_make(cls, options: Any) -> bool:
        return False


class Wanders(RandomWalk):
    """Changes the working directory."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0, **options: Any) -> None:
        super().__init__(num_envs, device, seed, **options)
        os.chdir("/")


class Breaks(RandomWalk):
    def transition(self, state: Any, action: Tensor, rng: Any) -> Any:
        raise ValueError("broken")


class FailsWithOddSeeds(RandomWalk):
    """Rewards are not finite."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0, **options: Any) -> None:
        super().__init__(num_envs, device, seed, **options)
        self.is_odd = seed % 2 == 1

    def transition(self, state: Any, action: Tensor, rng: Any) -> Any:
        state, reward, terminated = super().transition(state, action, rng)
        return state, reward / (0.0 if self.is_odd else 1.0), terminated


def test_a_process_that_fails_costs_its_seed_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS | {"eval_episodes": 0, "nan": "raise", "run_dir": str(tmp_path)}
    runs = train_seeds("ppo", f"{__name__}:FailsWithOddSeeds", 3, jobs=3, **settings)
    assert [run.folder.name for run in runs] == ["seed_0", "seed_2"]
    assert "seed 1 failed: " in caplog.text
    # what is wrong with all of them is one error
    with pytest.raises(UsageError, match="already holds files") as raised:
        train_seeds("ppo", "pendulum", 2, jobs=2, **settings)
    assert str(tmp_path / "seed_") in str(raised.value)


def test_ctrl_c_saves_the_runs_beside_each_other(tmp_path: Path) -> None:
    words = [*WORDS[:-2], "eval_episodes=0", "total_steps=1000000000", "save_every=1i"]
    command = ["train", *words, f"run_dir={tmp_path}", "--seeds", "3", "--jobs", "2"]
    parent = start(command, start_new_session=True)
    folders = [tmp_path / "seed_0", tmp_path / "seed_1"]
    wait_until(lambda: all(map(latest_checkpoint, folders)) or parent.poll() is not None)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 128 + signal.SIGINT, errors
    for folder in folders:
        steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
        assert load_checkpoint(folder)[0]["trainer"]["steps"] >= max(steps)
    assert not (tmp_path / "seed_2").exists()


class Interrupts(gpurl.Callback):
    def after_iteration(self, run: RunView, metrics: object) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_names_the_seeds_that_have_not_begun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, f"run_dir={tmp_path}", "--seeds", "3", "--callback", f"{__name__}:Interrupts"]
    assert main(["train", *words, "--jobs", "1"]) == 128 + signal.SIGINT
    text = capfd.readouterr().out
    assert f"gpurl train --resume {tmp_path / 'seed_0'}" in text
    assert "not begun: seed 1, 2; --seed 1 --seeds 2 in place of --seeds 3 trains the rest" in text


def test_they_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    words = [*WORDS[:-2], "eval_episodes=0", "total_steps=1000000000", "save_every=1i"]
    parent = start(["train", *words, f"run_dir={tmp_path}", "--seeds", "2", "--jobs", "2"])
    folders = [tmp_path / "seed_0", tmp_path / "seed_1"]
    wait_until(lambda: all(map(latest_checkpoint, folders)) or parent.poll() is not None)
    parent.kill()
    parent.communicate(timeout=60)
    for folder in folders:
        with lock_run(folder, seconds=60.0):  # free once the training has ended
            pass


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--seeds", "2", "--resume", "x"], "--seeds"),
        (["--seeds", "2", "--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--jobs", "2"], "--jobs 2 goes with --seeds"),
        (["--jobs", "1"], "--jobs 1 goes with --seeds"),
        (["--seeds", "2", "--population", "2"], "which is 2: leave out seeds"),
    ],
)
def test_wrong_words(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *(WORDS if "--resume" not in words else []), *words]) == 2
    assert named in capsys.readouterr().err
