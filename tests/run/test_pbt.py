"""Runs with population based training: their settings, their log, and going on after a kill."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl.algorithms.ppo import PPOConfig
from gpurl.checkpoints.folders import list_checkpoints
from gpurl.checkpoints.leaderboard import Leaderboard
from gpurl.cli.config_template import config_template
from gpurl.cli.settings import parse_train
from gpurl.errors import UsageError
from gpurl.run.config_file import read_config
from gpurl.run.pbt import explored_ranges, explored_spans, interval
from gpurl.run.settings import make_settings
from gpurl.selection import Span
from tests.small_runs import ITERATION, assert_same, exit_code, small_run, state_of

SETTINGS: dict[str, Any] = {
    "population": 4,
    "threads": 1,
    "pbt": True,
    "pbt_every": 2 * ITERATION,
    "env": "tests.tiny_envs:RandomWalk",
}


# ---- settings ----


def test_ranges_become_spans() -> None:
    config = PPOConfig()
    own = explored_spans(config, {})
    assert own == {
        "learning_rate": Span(1e-5, 1e-2, is_log=True),
        "entropy_coef": Span(1e-5, 0.1, is_log=True),
        "clip_range": Span(0.05, 0.4, is_log=True),
    }
    given = {"gamma": (0.9, 0.999), "gae_lambda": (0.5, 1.0), "entropy_coef": (0.0, 0.1)}
    found = explored_spans(config, given | {"epochs": (1.0, 8.0)})
    assert found == {
        "gamma": Span(0.9, 0.999, is_log=True, from_one=True),
        "gae_lambda": Span(0.5, 1.0, from_one=True),
        "entropy_coef": Span(0.0, 0.1),
        "epochs": Span(1.0, 8.0, is_log=True, is_whole=True),
    }


def test_the_interval_is_a_part_of_the_run() -> None:
    assert interval(None, 1_000_000, 16, 8) == 50_000
    assert interval(None, 1_000, 16, 8) == 128
    assert interval(128, 1_000, 16, 8) == 128
    with pytest.raises(UsageError, match=r"pbt_every 1,000 is less than one iteration, 2,048 steps "
                       r"\(num_envs 64 x horizon 32\)"):  # fmt: skip
        interval(1_000, 10_000, 64, 32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"horizon": [1, 2]}, r"'horizon' cannot change in a run; These can: learning_rate, gamma"),
        ({"clip_rang": [1, 2]}, "'clip_rang' cannot change in a run; did you mean clip_range"),
        ({"gamma": 0.9}, "explore.gamma is 0.9; it must be two numbers, low and high"),
        ({"gamma": ["a", "b"]}, "it must be two numbers"),
        ({"gamma": [True, 1]}, "it must be two numbers"),
        ({"gamma": [0.9, float("inf")]}, "it must be two numbers"),
        ({"gamma": [0.9]}, "explore.gamma must be a low and a high number, got 0.9"),
        ({"gamma": [0.9, 0.8]}, "explore.gamma must be a low and a high number, got 0.9 0.8"),
        ([1.0], r"explore is \[1.0\]; it must be `setting: \[low, high\]` pairs"),
    ],
    ids=str,
)
def test_wrong_ranges(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explored_ranges(PPOConfig, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 1}, "pbt selects among members, population is 1: take --population 8"),
        ({"pbt": False}, "pbt_every 256 goes with --pbt"),
        (
            {"pbt": False, "pbt_every": None, "explore": {"gamma": [0.9, 0.99]}},
            "explore.gamma goes",
        ),
        (
            {"pbt_fraction": 0.6},
            "pbt_fraction must be at most 0.5, as the worst take over the best",
        ),
        ({"pbt_fraction": 0.0}, "pbt_fraction must be above 0, got 0"),
        ({"pbt_resample": 1.5}, "pbt_resample must be from 0 to 1, got 1.5"),
        ({"pbt_rule": "truncate"}, "pbt_rule is 'truncate'; did you mean truncation"),
        (
            {"pbt_leaderboard": "/dev/null/x"},
            "leaderboard /dev/null/x cannot be written: Not a",
        ),
        ({"pbt": False, "pbt_every": None, "pbt_leaderboard": "b"}, "pbt_leaderboard b goes with"),
        ({"pbt_every": 100}, "pbt_every 100 is less than one iteration, 128 steps"),
        ({"explore": {"gamma": [0.9, 1.5]}}, "explore.gamma 0.9 1.5: gamma must be from 0 to 1"),
        ({"explore": {"epochs": [0, 4]}}, "explore.epochs 0 4: epochs must be at least 1, got 0"),
    ],
    ids=str,
)
def test_what_pbt_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small_run(tmp_path / "run", 1, **(SETTINGS | changes))
    assert not (tmp_path / "run").exists()


def test_the_command_line_takes_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ppo", "cart_pole", "--population", "4", "--pbt"]
    settings, _ = parse_train([*words, "--explore.learning-rate", "1e-5", "1e-2"])
    assert settings.explore == {"learning_rate": (1e-5, 1e-2)}
    settings, _ = parse_train([*words, "explore.gamma=0.9,0.99", "--pbt-every", "1e6"])
    options = settings.pbt_options()
    assert options is not None
    assert (options.every, [*options.spans]) == (1_000_000, ["gamma"])
    # a file, and flags over it
    file = tmp_path / "settings.yaml"
    file.write_text(config_template(settings))
    assert read_config(file)["explore"] == {"gamma": [0.9, 0.99]}
    again, _ = parse_train(["--config", str(file), "--explore.epochs", "2", "6"])
    assert again.explore == {"gamma": (0.9, 0.99), "epochs": (2.0, 6.0)}
    assert make_settings(**again.to_dict()).explore == again.explore  # type: ignore[arg-type]
    plain, _ = parse_train(words)
    assert "# explore:\n#   learning_rate:" in config_template(plain)
    # what is wrong is said before anything is made
    assert exit_code(["train", "ppo", "cart_pole", "--pbt"]) == 2
    assert "pbt selects among members" in capsys.readouterr().err
    assert exit_code(["train", *words, "--explore.horizon", "1", "2"]) == 2


# ---- runs ----


def test_every_take_over_is_logged_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the interval of the log is; and settings are those of the log."""
    run = small_run(tmp_path / "run", 12, **SETTINGS, quiet=False, log_every=1e9)
    lines = [line for line in capsys.readouterr().out.splitlines() if " took over member " in line]
    assert len(lines) >= 4
    entries = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    events = [entry for entry in entries if "members/take_overs" in entry]
    assert [entry["step"] for entry in events] == [2 * k * ITERATION for k in range(1, 7)]
    sources = [
        (int(tag.split("/")[1]), int(value))
        for entry in events
        for tag, value in entry.items()
        if tag.endswith("/source")
    ]
    assert len(sources) == len(lines) == sum(entry["members/take_overs"] for entry in events)
    for line, (member, source) in zip(lines, sources):
        assert f"member {member} took over member {source} (return " in line
        assert ", learning_rate " in line
    # the newest settings are those that the checkpoint goes on with
    saved = state_of(run.folder)["training"]
    changed = {k: state["changed_settings"] for k, state in saved.items()}
    assert sum(map(bool, changed.values())) >= 2
    for k, own in changed.items():
        for name, value in own.items():
            assert events[-1][f"members/{k}/{name}"] == value


def test_a_killed_run_selects_the_same(tmp_path: Path) -> None:
    settings = SETTINGS | {"save_every": "1i", "keep_checkpoints": 99, "eval_episodes": 0}
    plain = small_run(tmp_path / "plain", 8, **settings)
    killed = small_run(tmp_path / "killed", 8, **settings)
    # what a kill after the fifth iteration leaves
    for path in list_checkpoints(killed.folder)[5:]:
        shutil.rmtree(path)
    fifth = list_checkpoints(killed.folder)[-1].name
    (killed.folder / "checkpoints" / "LATEST").write_text(fifth + "\n")
    before = state_of(killed.folder)["training"]
    gpurl.resume(killed.folder, quiet=True)
    after = state_of(killed.folder)
    assert_same(after, state_of(plain.folder))
    changed = [
        {k: state["changed_settings"] for k, state in training.items()}
        for training in (before, after["training"])
    ]
    assert changed[0] != changed[1]
    assert any(changed[0].values())


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_two_runs_share_a_leaderboard(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{scheme}{tmp_path / 'board'}"
    settings = SETTINGS | {"pbt_leaderboard": place, "eval_episodes": 0}
    small_run(tmp_path / "one", 4, **settings)
    first = Leaderboard(tmp_path / "board", 8).entries()
    assert 4 <= len(first) <= 8
    assert all(each.step > 0 and each.step % ITERATION == 0 for each in first)
    small_run(tmp_path / "two", 4, **(settings | {"seed": 100, "quiet": False}))
    both = Leaderboard(tmp_path / "board", 8).entries()
    assert len({each.name.split("-")[0] for each in both}) == 2
    assert "took over entry " in capsys.readouterr().out
    # what one of them ended with is the run's own
    gpurl.resume(tmp_path / "one", total_steps=6 * ITERATION, quiet=True)


def test_selection_may_begin_and_end_with_a_resume(tmp_path: Path) -> None:
    plain = {name: SETTINGS[name] for name in ("population", "threads", "env")}
    run = small_run(tmp_path / "run", 2, **plain)
    assert not any(each["changed_settings"] for each in state_of(run.folder)["training"].values())
    gpurl.resume(run.folder, pbt=True, pbt_every=ITERATION, total_steps=6 * ITERATION, quiet=True)
    changed = [each["changed_settings"] for each in state_of(run.folder)["training"].values()]
    assert any(changed)
    # members keep what they came to
    gpurl.resume(run.folder, pbt=False, pbt_every=None, total_steps=7 * ITERATION, quiet=True)
    after = [each["changed_settings"] for each in state_of(run.folder)["training"].values()]
    assert after == changed
