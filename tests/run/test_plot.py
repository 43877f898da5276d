"""Pictures: the right numbers land in the right axes, damaged logs are survived, and a full disk
leaves the old picture.
"""

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpurl.errors import GpurlError, UsageError
from gpurl.run import plot
from gpurl.run.plot import TRAINING_LABEL, note_references, plot_curve, read_metrics


def write_log(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def usual_log(folder: Path) -> Path:
    training = [
        {
            "step": 1000 * n,
            "rollout/ep_rew_mean": -10.0 / n,
            "train/value_loss": 10.0**-n,
            "train/approx_kl": 0.01,
            "time/fps": 5e4,
        }
        for n in range(1, 5)
    ]
    evaluation = [
        {"step": 1000 * n, "eval/mean_reward": -1.0 * n, "eval/std_reward": 0.5}
        | {"eval/episodes": 4}
        for n in (2, 4)
    ]
    return write_log(folder, *training, *evaluation)


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would have been saved."""
    figures: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return path

    monkeypatch.setattr(plot, "save_figure", keep)
    return figures


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    (found,) = (line for line in axes.get_lines() if line.get_label() == label)
    return list(found.get_xdata()), list(found.get_ydata())


# ---- the learning curve ----


def test_a_long_title_has_lines(tmp_path: Path, drawn: list[Figure]) -> None:
    folder = usual_log(tmp_path / ("long " * 40).strip().replace(" ", "-"))
    plot_curve(folder)
    drawn[0].draw_without_rendering()
    title = drawn[0]._suptitle
    assert title is not None
    box = title.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= drawn[0].bbox.x1
    assert drawn[0].get_suptitle().replace("\n", "") == folder.name


def test_the_learning_curve_is_a_picture_of_its_size(tmp_path: Path) -> None:
    picture = plot_curve(usual_log(tmp_path))
    assert picture == tmp_path / "learning_curve.png"
    assert size_of(picture) == (1575, 690)  # 10.5 x 4.6 inches, 150 dots each
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "learning_curve.png"}


def test_returns_stand_left_and_what_explains_them_right(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    plot_curve(usual_log(tmp_path))
    returns, loss, kl, speed = drawn[0].axes
    assert line(returns, TRAINING_LABEL) == (
        [1000, 2000, 3000, 4000],
        pytest.approx([-10, -5, -10 / 3, -2.5]),
    )
    assert line(returns, "evaluation") == ([2000, 4000], [-2, -4])
    (band,) = returns.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    # the standard error of 4 episodes is half of their standard deviation
    assert {(2000, -2.25), (2000, -1.75), (4000, -4.25), (4000, -3.75)} <= corners
    assert [text.get_text() for text in returns.texts] == ["-4"]  # the last evaluation
    assert returns.get_xlabel() == "env steps"
    assert returns.get_ylabel() == "episode return"
    assert [axes.get_ylabel() for axes in (loss, kl, speed)] == ["value loss", "KL", "env steps/s"]
    assert list(loss.get_lines()[0].get_ydata()) == pytest.approx([1e-1, 1e-2, 1e-3, 1e-4])
    assert loss.get_yscale() == "log"  # over a hundredfold
    assert kl.get_yscale() == "linear"
    assert speed.get_ylim()[0] == 0
    assert speed.get_xlim() == returns.get_xlim()
    assert returns.get_xlim()[0] == 0


def test_the_loss_of_an_actor_stands_where_there_is_no_other(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    losses = {"train/actor_loss": 0.5, "train/critic_loss": 0.25}
    for number, (names, expected) in enumerate(
        ((["train/actor_loss"], "actor loss"), (list(losses), "critic loss"))
    ):
        plot_curve(
            write_log(
                tmp_path / str(number),
                *(
                    {"step": n, "rollout/ep_rew_mean": 1.0} | {name: losses[name] for name in names}
                    for n in (1, 2)
                ),
            )
        )
        assert drawn[number].axes[1].get_ylabel() == expected


def test_nan_is_a_gap(tmp_path: Path, drawn: list[Figure]) -> None:
    values = [1.0, None, 3.0]
    plot_curve(
        write_log(
            tmp_path, *({"step": n, "rollout/ep_rew_mean": value} for n, value in enumerate(values))
        )
    )
    _, drawn_values = line(drawn[0].axes[0], TRAINING_LABEL)
    assert drawn_values[::2] == [1.0, 3.0]
    assert math.isnan(drawn_values[1])


def test_a_single_evaluation_has_an_error_bar(tmp_path: Path, drawn: list[Figure]) -> None:
    numbers = {"eval/mean_reward": -2.0, "eval/std_reward": 1.0, "eval/episodes": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1000, **numbers}) + "\n")
    plot_curve(tmp_path)
    (bar,) = drawn[0].axes[0].collections
    assert bar.get_paths()[0].vertices.tolist() == [[1000, -2.5], [1000, -1.5]]


def hints(figure: Figure) -> list[str]:
    """What the axes of returns say in words, besides the last value."""
    return [text.get_text() for text in figure.axes[0].texts if "\n" in text.get_text()]


def test_a_single_evaluation_says_how_to_get_more(tmp_path: Path, drawn: list[Figure]) -> None:
    evaluation = {"eval/mean_reward": -2.0}
    plot_curve(write_log(tmp_path / "one", {"step": 212_992, **evaluation}))
    (hint,) = hints(drawn[0])
    assert hint.endswith("training has no return yet. --eval-every 20000 evaluates on the way")
    # with a curve of either kind there is nothing to say
    training = {"step": 1000, "rollout/ep_rew_mean": 1.0}
    plot_curve(write_log(tmp_path / "both", training, {"step": 2000, **evaluation}))
    more = [{"step": step, **evaluation} for step in (1000, 2000)]
    plot_curve(write_log(tmp_path / "two", *more))
    assert hints(drawn[1]) == hints(drawn[2]) == []


def test_reference_returns_are_dashed_lines_with_their_value(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    folder = usual_log(tmp_path)
    note_references(folder, {"random": -12.345678, "scripted policy": 7.0})
    plot_curve(folder)
    axes = drawn[0].axes[0]
    for label, value, dashes in (
        ("random (-12.35)", -12.345678, "--"),
        ("scripted policy (7)", 7.0, ":"),
    ):
        (found,) = (line for line in axes.get_lines() if line.get_label() == label)
        assert list(found.get_ydata()) == [value, value]
        assert found.get_linestyle() == dashes
    legend = axes.get_legend()
    assert legend is not None
    names = [
        TRAINING_LABEL,
        "evaluation",
        "± standard error of the evaluation",
        "random (-12.35)",
        "scripted policy (7)",
    ]
    assert [text.get_text() for text in legend.get_texts()] == names


@pytest.mark.parametrize(
    "records",
    [[], [{"step": 10, "train/value_loss": 1.0}], [{"step": 10, "rollout/ep_rew_mean": None}]],
)
def test_before_the_first_episode_the_picture_says_so(
    tmp_path: Path, drawn: list[Figure], records: list[dict[str, Any]]
) -> None:
    plot_curve(write_log(tmp_path, *records))
    assert "not every environment has finished an episode" in drawn[0].axes[0].texts[0].get_text()
    assert not drawn[0].axes[0].get_lines()


def test_few_points_are_dots(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_curve(write_log(tmp_path, {"step": 10, "rollout/ep_rew_mean": 1.0}))
    assert drawn[0].axes[0].get_lines()[0].get_marker() == "o"


def test_the_title_says_task_algorithm_and_seed(tmp_path: Path, drawn: list[Figure]) -> None:
    folder = usual_log(tmp_path / "mine")
    plot_curve(folder)
    assert drawn[0].get_suptitle() == "mine"  # nothing else is known
    (folder / "config.yaml").write_text("env: chasing\nalgorithm: ppo\nseed: 3\n")
    plot_curve(folder)
    assert drawn[1].get_suptitle() == "chasing · ppo · seed 3"


def test_many_points_of_training_are_thin_under_their_moving_mean(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    values = [float(n % 2) for n in range(81)]
    values[40] = math.nan
    records = [
        {"step": n, "rollout/ep_rew_mean": value if math.isfinite(value) else None}
        for n, value in enumerate(values)
    ]
    plot_curve(write_log(tmp_path, *records))
    raw, smooth = drawn[0].axes[0].get_lines()
    assert list(raw.get_ydata())[:40] == values[:40]
    assert raw.get_linewidth() < smooth.get_linewidth()
    assert smooth.get_label() == TRAINING_LABEL
    means = list(smooth.get_ydata())
    # two neighbours on either side: 2 or 3 of 5 are ones; the ends have none, the gap stays
    assert (means[0], means[-1]) == (values[0], values[-1])
    assert means[10] == pytest.approx(2 / 5)
    assert means[11] == pytest.approx(3 / 5)
    assert math.isnan(means[40])
    assert means[39] == pytest.approx(3 / 4)  # without the gap


def test_the_picture_says_how_long_it_took(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [
        {"step": 1_000_000 * n, "rollout/ep_rew_mean": 1.0, "time/time_elapsed": 1861.5 * n}
        for n in (1, 2)
    ]
    plot_curve(write_log(tmp_path, *records))
    assert drawn[0].axes[0].get_xlabel() == "env steps (2.00M in 1:02:03)"


def test_labels_of_ticks_do_not_collide(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [
        {"step": 2500 * n, "rollout/ep_rew_mean": 1.0, "train/value_loss": 1.0} for n in range(9)
    ]
    plot_curve(write_log(tmp_path, *records))
    figure = drawn[0]
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [
            label.get_window_extent() for label in axes.get_xticklabels() if label.get_visible()
        ]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_a_logarithmic_axis_has_numbers(tmp_path: Path, drawn: list[Figure]) -> None:
    """No formulas as text: a `$` in the name of a run is one."""
    losses = [100.0, 10.0, 1.0, 0.1, 0.01]
    log = [{"step": 1000 * k, "train/value_loss": loss} for k, loss in enumerate(losses)]
    plot_curve(write_log(tmp_path, *log))
    (axes,) = [each for each in drawn[0].axes if each.get_ylabel() == "value loss"]
    assert axes.get_yscale() == "log"
    labels = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert {"0.01", "1", "100"} <= {*labels}
    assert not any("$" in label for label in labels)


def test_a_logarithmic_axis_within_a_decade_has_numbers_too() -> None:
    axes = Figure().add_subplot()
    axes.plot([0, 1], [2e-4, 8e-4])
    axes.set_yscale("log")
    plot.plain_labels(axes)
    low, high = axes.get_ylim()
    labels = [each for each in axes.yaxis.get_majorticklocs() if low <= each <= high]
    assert labels == pytest.approx([2e-4, 5e-4])


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    good = b'{"step": 1, "a": 1.5, "b": null}\n'
    damaged = b'{"a": 1}\n{"step": null, "a": 9}\n{"step": 2, "a": "x"}\n'
    damaged += b'{"step": 2, "a": [1]}\n[1]\n7\n\0\0\0\n\xff\xfe\n\n'
    (tmp_path / "metrics.jsonl").write_bytes(
        good + damaged + b'{"step": 3, "a": 2}\n{"step": 4, "a": 3'
    )
    series = read_metrics(tmp_path)
    assert series["a"] == ([1, 3], [1.5, 2])
    assert series["b"][0] == [1]
    assert math.isnan(series["b"][1][0])


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run folder: cannot read its metrics\.jsonl"):
        plot_curve(tmp_path)


def test_a_full_disk_leaves_the_old_picture_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: bytes) -> None:
        path.write_bytes(content[:100])
        raise OSError(28, "No space left on device")

    (usual_log(tmp_path) / "learning_curve.png").write_bytes(b"old")
    monkeypatch.setattr("gpurl.checkpoints.plain_files.write_regular", fail)
    with pytest.raises(
        GpurlError, match=r"cannot write .*learning_curve\.png: No space left on device"
    ):
        plot_curve(tmp_path)
    assert (tmp_path / "learning_curve.png").read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "learning_curve.png"}
