"""One training for each of several seeds, and their mean."""

import re
from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl import seeds as module
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cli.main import main
from gpurl.errors import EnvError, NonFiniteError, UsageError
from gpurl.seeds import compare_seeds, train_seeds
from tests.small_runs import ITERATION, SMALL

SETTINGS: dict[str, Any] = SMALL | {"total_steps": 2 * ITERATION, "eval_every": ITERATION}
WORDS = [
    *("ppo", "pendulum", "num_envs=16", "horizon=8", "minibatches=2", "eval_episodes=4"),
    *("device=cpu", "network.hidden=16", f"total_steps={2 * ITERATION}", f"eval_every={ITERATION}"),
]


def test_each_seed_is_the_run_of_that_seed(tmp_path: Path) -> None:
    runs = train_seeds("ppo", "pendulum", 2, seed=3, root=str(tmp_path), **SETTINGS)
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
    runs = train_seeds("ppo", "pendulum", 3, **settings)
    assert [each.folder.name[-1] for each in runs] == ["0", "2"]
    assert "seed 1 failed: reward: NaN" in caplog.text
    words = [*WORDS[:-1], "eval_episodes=0", f"root={tmp_path}", "--seeds", "2"]
    assert main(["train", *words]) == NonFiniteError.exit_code
    # nothing is left
    monkeypatch.setattr(module, "run", lambda *_, **__: (_ for _ in ()).throw(EnvError("gone")))
    with pytest.raises(EnvError, match="gone"):
        train_seeds("ppo", "pendulum", 2, **settings)


def test_the_command_prints_each_run_and_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *WORDS, f"root={tmp_path}", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^run folder ", out, re.MULTILINE)) == 2
    assert f"ppo: 2 seeds, {2 * ITERATION} steps, mean -" in out
    picture = Path(out.splitlines()[-1].removeprefix("picture "))
    assert picture.exists()
    # one evaluation of each is enough
    words = [*WORDS[:-2], f"total_steps={ITERATION}", f"root={tmp_path}", "--seeds", "2"]
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert f"ppo: 2 seeds, {ITERATION} steps, mean -" in out
    assert Path(out.splitlines()[-1].removeprefix("picture ")).exists()
    # without returns there is no mean
    words = [*WORDS[:-1], "eval_episodes=0", f"root={tmp_path}", "--quiet", "--seeds", "2"]
    assert main(["train", *words]) == 0
    assert capsys.readouterr().err.startswith("no mean over seeds: ")


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--seeds", "2", "--resume", "x"]])
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *(WORDS if "--resume" not in words else []), *words]) == 2
    assert "--seeds" in capsys.readouterr().err
