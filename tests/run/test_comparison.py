"""Runs of one task in one picture."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.run import comparison
from gpurl.run.comparison import compare_runs, comparison_table, plot_comparison
from gpurl.run.config_file import as_yaml
from gpurl.run.plot import finish_axes
from gpurl.run.scores import band, iqm


def make_run(
    folder: Path,
    returns: list[float],
    tag: str = "eval/mean_reward",
    seconds: float = 60.0,
    **settings: Any,
) -> Path:
    """A run folder with one return in every 100 steps, `seconds` apart."""
    folder.mkdir()
    values = {"algorithm": "ppo", "env": "pendulum", "env_options": {}, "gamma": 0.9} | settings
    (folder / "config.yaml").write_bytes(as_yaml(values))
    lines = [
        {"step": 100 * i, "time": seconds * i, tag: value} for i, value in enumerate(returns, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_runs_are_grouped_and_averaged_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [1.0, 2.0, 3.0, 4.0, 50.0]
    ppo = [make_run(tmp_path / f"p{i}", [0.0, end / 2, end]) for i, end in enumerate(ends)]
    sac = make_run(tmp_path / "s", [5.0, 6.0, 7.0], seconds=120.0, algorithm="sac")
    groups = compare_runs([*ppo, sac])
    assert [(group.label, len(group.runs)) for group in groups] == [("ppo", 5), ("sac", 1)]
    assert groups[0].last_return() == iqm(ends)
    assert groups[0].last_return().value == 3.0
    assert groups[1].last_return() == iqm([7.0])
    first, second = comparison_table(groups).splitlines()
    assert first.startswith("ppo: 5 seeds, 300 steps, IQM 3.00 [")
    assert second == "sac: 1 seed, 300 steps, IQM 7.00 [7.00, 7.00]"

    unfinished = compare_runs([*ppo, make_run(tmp_path / "u", [0.0, 1.0])])
    assert comparison_table(unfinished).startswith("ppo: 6 seeds, 200 to 300 steps")

    # what is drawn
    figures: list[Figure] = []
    original = comparison.new_figure
    monkeypatch.setattr(
        comparison, "new_figure", lambda *args: figures.append(original(*args)) or figures[-1]
    )
    path = plot_comparison(groups, tmp_path / "picture.png")
    assert path.stat().st_size > 10_000
    by_steps, by_time = figures[0].axes
    line, other = by_steps.get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert (x[0], x[-1]) == (100.0, 300.0)
    middle, _, _ = band(np.asarray([[0.0, end / 2, end] for end in ends]))
    assert np.interp([100, 200, 300], x, y) == pytest.approx(middle)
    assert np.asarray(other.get_ydata())[-1] == 7.0
    # of wall clock: minutes
    slow = np.asarray(by_time.get_lines()[1].get_xdata())
    assert (slow[0], slow[-1]) == (2.0, 6.0)
    texts = [text.get_text() for text in by_steps.get_legend().get_texts()]
    assert texts == ["ppo (5)", "sac (1)"]


def test_a_setting_groups(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"r{i}", [0.0, 1.0], gamma=gamma, network={"hidden": [8 * (1 + i % 2)]})
        for i, gamma in enumerate((0.9, 0.99, 0.9))
    ]
    labels = {group.label: len(group.runs) for group in compare_runs(runs, by="gamma")}
    assert labels == {"gamma 0.9": 2, "gamma 0.99": 1}
    labels = {group.label: len(group.runs) for group in compare_runs(runs, by="network.hidden")}
    assert labels == {"network.hidden [8]": 2, "network.hidden [16]": 1}
    with pytest.raises(UsageError, match=r"no setting 'gama' to group by; did you mean gamma\?"):
        compare_runs(runs, by="gama")


def test_without_evaluations_the_training_is_drawn(tmp_path: Path) -> None:
    evaluated = make_run(tmp_path / "a", [1.0, 2.0])
    with (evaluated / "metrics.jsonl").open("a") as file:
        for step, value in ((150, 3.0), (250, 4.0)):
            file.write(json.dumps({"step": step, "time": 1.0, "rollout/ep_rew_mean": value}) + "\n")
    trained = make_run(tmp_path / "b", [5.0, 6.0], "rollout/ep_rew_mean")
    (group,) = compare_runs([evaluated, trained])
    assert [run.by_steps[-1] for run in group.runs] == [(250.0, 4.0), (200.0, 6.0)]
    (group,) = compare_runs([evaluated])
    assert group.runs[0].by_steps == [(100.0, 1.0), (200.0, 2.0)]


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", [1.0, 2.0])
    other = make_run(tmp_path / "b", [1.0, 2.0], env="chasing")
    harder = make_run(tmp_path / "c", [1.0, 2.0], env_options={"gravity": 3.0})
    with pytest.raises(UsageError, match="different tasks cannot be compared: chasing, pendulum;"):
        compare_runs([run, other])
    with pytest.raises(UsageError, match=r"pendulum, pendulum \{'gravity': 3.0\}"):
        compare_runs([run, harder])
    empty = make_run(tmp_path / "d", [1.0, math.nan])
    with pytest.raises(UsageError, match="fewer than two returns"):
        compare_runs([run, empty])
    with pytest.raises(UsageError, match="config"):
        compare_runs([run, tmp_path])


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        make_run(tmp_path / name, [1.0, 2.0])
    assert main(["plot", "a", "b"]) == 0
    assert capsys.readouterr().out.endswith("comparison.png\n")
    assert main(["plot", "a", "b", "--by", "gamma", "--out", "by_gamma.png"]) == 0
    assert capsys.readouterr().out.startswith("gamma 0.9: 2 seeds")
    assert (tmp_path / "by_gamma.png").exists()
    for words in (["plot"], ["plot", "a", "--out", "x.png"], ["plot", "--bench", "a", "b"]):
        assert main(words) == UsageError.exit_code
    assert main(["plot", "a", "b", "--out", "nowhere/x.png"]) != 0
    assert "cannot write" in capsys.readouterr().err


def test_without_scipy_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    groups = compare_runs([make_run(tmp_path / "a", [1.0, 2.0])])
    with pytest.raises(UsageError, match=r"pip install -e '.*\[plot\]'"):
        comparison_table(groups)


@pytest.mark.parametrize(("end", "unit"), [(0.09, ""), (20e6, "M")])
def test_minutes_have_no_thousandths(end: float, unit: str) -> None:
    axes = Figure().subplots()
    axes.plot([0.0, end], [0.0, 1.0])
    finish_axes(axes, "x")
    axes.figure.draw_without_rendering()
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert texts[-1].endswith(unit)
    assert not any("m" in text for text in texts)
