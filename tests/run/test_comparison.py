"""Runs of one task in one picture."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.run import comparison
from gpurl.run.comparison import EVALUATION, Group, compare_runs, comparison_table, plot_comparison
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
    first, second, explanation = comparison_table(groups).splitlines()
    assert first.startswith("ppo: 5 seeds, 300 steps, mean 12.00, IQM 3.00 [")
    assert second == "sac: 1 seed, 300 steps, return 7.00"  # one seed has no interval
    assert explanation.startswith("returns of the last evaluation; IQM: ")

    unfinished = compare_runs([*ppo, make_run(tmp_path / "u", [0.0, 1.0])])
    assert comparison_table(unfinished).startswith("ppo: 6 seeds, 200 to 300 steps")

    # what is drawn: faint lines of seeds, one line for each group
    figure = drawn(groups, tmp_path, monkeypatch)
    legend, by_steps, by_time = figure.axes
    line, other = [each for each in by_steps.get_lines() if each.get_linewidth() > 1]
    assert len(by_steps.get_lines()) == 5 + 2
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert (x[0], x[-1]) == (100.0, 300.0)
    middle, _, _ = band(np.asarray([[0.0, end / 2, end] for end in ends]))
    assert np.interp([100, 200, 300], x, y) == pytest.approx(middle)
    assert np.asarray(other.get_ydata())[-1] == 7.0
    # of wall clock: minutes
    slow = np.asarray(by_time.get_lines()[-1].get_xdata())
    assert (slow[0], slow[-1]) == (2.0, 6.0)
    texts = [text.get_text() for text in legend.get_legend().get_texts()]
    assert texts == ["ppo (5)", "sac (1)"]
    assert "interpolated at 41" in figure.get_supxlabel()
    assert "diamond" not in figure.get_supxlabel()


def drawn(groups: list[Group], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure of the groups, saved in `folder`."""
    figures: list[Figure] = []
    original = comparison.new_figure
    monkeypatch.setattr(
        comparison, "new_figure", lambda *args: figures.append(original(*args)) or figures[-1]
    )
    path = plot_comparison(groups, folder / "picture.png")
    assert path.stat().st_size > 10_000
    return figures[0]


def test_runs_of_one_evaluation_have_a_mean_and_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [-9.0, -2.0, -1.0, 0.0, 50.0]
    (group,) = compare_runs([make_run(tmp_path / f"p{i}", [end]) for i, end in enumerate(ends)])
    assert group.last_return() == iqm(ends)
    table = comparison_table([group])
    assert table.startswith("ppo: 5 seeds, 100 steps, mean 7.60, IQM -1.00 [")
    # a dot for each run, and the mean with its interval
    figure = drawn([group], tmp_path, monkeypatch)
    legend, by_steps, by_time = figure.axes
    assert [len(axes.get_lines()) for axes in (by_steps, by_time)] == [5 + 1 + 2, 5]
    (bars,) = by_steps.containers
    middle = np.asarray(bars.lines[0].get_xydata())
    assert middle.tolist() == [[100.0, -1.0]]
    ((low, high),) = bars.lines[2][0].get_segments()
    assert (low[1], high[1]) == (iqm(ends).low, iqm(ends).high)
    assert by_steps.get_xlim()[0] == 0
    assert [text.get_text() for text in legend.get_legend().get_texts()] == ["ppo (5)"]
    assert figure.get_supxlabel().startswith("diamond: interquartile mean over seeds")


def test_runs_evaluated_at_different_steps_are_interpolated_where_all_have_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_run(tmp_path / "a", [1.0, 2.0, 3.0])
    second = make_run(tmp_path / "b", [10.0] * 4)
    log = second / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(line | {"step": line["step"] + 50}) + "\n" for line in lines))
    (group,) = compare_runs([first, second])
    assert comparison_table([group]).startswith("ppo: 2 seeds, 300 to 450 steps, mean 6.50, ")
    by_steps = drawn([group], tmp_path, monkeypatch).axes[1]
    line = by_steps.get_lines()[-1]
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert (x[0], x[-1]) == (150.0, 300.0)
    assert np.interp([150, 250, 300], x, y) == pytest.approx([(v + 10) / 2 for v in (1.5, 2.5, 3)])


def test_one_evaluation_ends_the_curves_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_run(tmp_path / f"r{i}", [i, i], "rollout/ep_rew_mean") for i in range(2)]
    for number, folder in enumerate(folders):
        with (folder / "metrics.jsonl").open("a") as file:
            line = {"step": 250, "time": 99.0, "eval/mean_reward": 7.0 + number}
            file.write(f"{json.dumps(line)}\n")
    (group,) = compare_runs(folders)
    assert [run.by_steps for run in group.runs] == [[(100.0, i), (200.0, i)] for i in range(2)]
    assert group.last_returns() == [7.0, 8.0]
    figure = drawn([group], tmp_path, monkeypatch)
    by_steps = figure.axes[1]
    assert np.asarray(by_steps.containers[0].lines[0].get_xydata()).tolist() == [[250.0, 7.5]]
    assert "of the training" in figure.get_supxlabel()
    assert "last evaluation" in figure.get_supxlabel()


def test_groups_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rates = (0.001, 1e-05, 0.0003, 10, 9)
    runs = [make_run(tmp_path / f"r{i}", [1.0], rate=rate) for i, rate in enumerate(rates)]
    labels = [group.label for group in compare_runs(runs, by="rate")]
    assert labels == [f"rate {rate}" for rate in sorted(rates)]


def test_long_labels_and_many_groups_stay_inside_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / f"r{i}", [1.0, i], name=f"{i:02d}" + 200 * "x") for i in range(11)]
    figure = drawn(compare_runs(runs, by="name"), tmp_path, monkeypatch)
    legend, by_steps, _ = figure.axes
    box = legend.get_legend().get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert box.y0 > by_steps.get_window_extent().y1
    assert box.y1 < figure._suptitle.get_window_extent().y0
    # more groups than colours differ by their dashes
    kinds = {(line.get_color(), line.get_linestyle()) for line in by_steps.get_lines()}
    assert len(kinds) == 11


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
    with pytest.raises(
        UsageError, match=r"to group by; there are algorithm, env, .*gamma, network$"
    ):
        compare_runs(runs, by="nothing")


def test_runs_that_differ_by_more_than_their_seed_are_no_seeds(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"r{i}", [1.0 * i], gamma=0.9 + 0.09 * i, seed=i, run_dir=f"r{i}")
        for i in range(2)
    ]
    table = comparison_table(compare_runs([*runs, runs[0], tmp_path / "." / "r1"]))
    assert table.startswith("ppo: 2 runs, ")
    assert table.endswith(
        "ppo: these are no seeds of one training, they differ in gamma: --by gamma groups them"
    )
    wide = make_run(tmp_path / "wide", [1.0], network={"hidden": [8], "shared": True})
    narrow = make_run(tmp_path / "narrow", [1.0], network={"hidden": [4], "shared": True})
    (group,) = compare_runs([wide, narrow])
    assert group.differing() == ["network.hidden"]
    # a setting that only one version of gpurl has
    newer = make_run(tmp_path / "newer", [1.0], network={"hidden": [4], "shared": True}, novel=3)
    for runs in ([narrow, newer], [newer, narrow]):
        (group,) = compare_runs(runs)
        assert group.differing() == []


def test_members_of_a_population_are_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But where selection made them one, and those that were lost."""
    ends = [5.0, 1.0, 9.0]
    settings: dict[str, Any] = {"population": 3, "member": {"gamma": [0.9, 0.9, 0.99]}}
    run = make_run(tmp_path / "all", [0.0, 9.0], **settings)
    lines = (run / "metrics.jsonl").read_text().splitlines()

    def write(lost: set[int]) -> None:
        entries = [json.loads(line) for line in lines]
        for i, entry in enumerate(entries):
            for k, end in enumerate(ends):
                if k not in lost or i == 0:
                    entry[f"members/{k}/eval_reward"] = end * i
                    entry[f"members/{k}/ep_rew_mean"] = -end
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in entries))

    write(lost=set())
    (group,) = compare_runs([run])
    assert [each.by_steps for each in group.runs] == [[(100, 0), (200, end)] for end in ends]
    assert group.last_return() == iqm(ends)
    # a setting that members have of their own; one run is enough
    capsys.readouterr()
    out = tmp_path / "picture.png"
    assert main(["plot", str(run), "--by", "gamma", "--out", str(out)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("gamma 0.9: 2 seeds, 200 steps, mean 3.00, IQM 3.00 [")
    assert second == "gamma 0.99: 1 seed, 200 steps, return 9.00"
    assert out.exists()
    # without evaluations
    without = {EVALUATION: None} | {f"members/{k}/eval_reward": None for k in range(3)}
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    text = [json.dumps({k: v for k, v in each.items() if k not in without}) for each in entries]
    (run / "metrics.jsonl").write_text("\n".join(text) + "\n")
    (group,) = compare_runs([run])
    assert group.last_returns() == [-end for end in ends]
    # a member that was lost; a run of one agent beside them
    write(lost={2})
    (group,) = compare_runs([run, make_run(tmp_path / "alone", [0.0, 3.0])])
    assert group.last_returns() == [5.0, 1.0, 3.0]
    # nothing of members
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (group,) = compare_runs([run])
    assert group.last_returns() == [9.0]
    # a stranger's settings
    (run / "config.yaml").write_bytes(
        as_yaml({"algorithm": "ppo", "env": "pendulum", "population": 10**15, "member": [1]})
    )
    write(lost=set())
    (group,) = compare_runs([run])
    assert group.last_returns() == ends
    # members that went on from each other are one run
    write(lost=set())
    (run / "config.yaml").write_bytes(
        as_yaml({"algorithm": "ppo", "env": "pendulum", "env_options": {}, "pbt": True} | settings)
    )
    (group,) = compare_runs([run])
    assert group.last_returns() == [9.0]


def test_without_evaluations_the_training_is_drawn(tmp_path: Path) -> None:
    evaluated = make_run(tmp_path / "a", [1.0, 2.0])
    with (evaluated / "metrics.jsonl").open("a") as file:
        for step, value in ((150, 3.0), (250, 4.0)):
            file.write(json.dumps({"step": step, "time": 1.0, "rollout/ep_rew_mean": value}) + "\n")
    trained = make_run(tmp_path / "b", [5.0, 6.0], "rollout/ep_rew_mean")
    (group,) = compare_runs([evaluated, trained])
    assert "returns of training" in comparison_table([group])
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
    empty = make_run(tmp_path / "d", [math.nan])
    with pytest.raises(UsageError, match="d has no return: it was not evaluated"):
        compare_runs([run, empty])
    trained = make_run(tmp_path / "e", [1.0], "rollout/ep_rew_mean")
    with pytest.raises(UsageError, match=r"e was not evaluated and .*a logged no return"):
        compare_runs([run, trained])
    with pytest.raises(UsageError, match="config"):
        compare_runs([run, tmp_path])
    for wrong in (tmp_path / "nowhere", run / "metrics.jsonl"):
        with pytest.raises(UsageError, match=f"{wrong.name} is not a run folder"):
            compare_runs([run, wrong])


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
    # a shell's * names the pictures beside the runs too
    assert main(["plot", "a", "b", "comparison.png", "--out", "again.png"]) == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "comparison.png").read_bytes()
    capsys.readouterr()
    assert (tmp_path / "by_gamma.png").exists()
    for words in (["plot"], ["plot", "--bench", "a", "b"]):
        assert main(words) == UsageError.exit_code
    assert main(["plot", "a", "b", "--out", "nowhere/x.png"]) != 0
    assert re.search("cannot write .*; choose another place with --out", capsys.readouterr().err)


def test_without_scipy_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    groups = compare_runs([make_run(tmp_path / name, [1.0, 2.0]) for name in "ab"])
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
