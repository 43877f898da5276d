"""The picture of the benchmarks: the right rows become the right curves, the newest commit counts,
limits fit the precision.
"""

import csv
import itertools
import re
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpurl.cli import doctor, plot_bench
from gpurl.cli import main as cli
from gpurl.cli.main import main
from gpurl.errors import UsageError

Row = dict[str, str]
MACHINE = {
    "device": "cpu",
    "cpu": "Some CPU",
    "threads": "2",
    "torch": "2.13.0",
    "date": "2026-11-21",
}


def row(case: str, num_envs: int | str, value: float, commit: str = "new", **more: str) -> Row:
    usual = {"horizon": "32", "precision": "float32", "unit": "env_steps/s", "commit": commit}
    return {
        "case": case,
        "num_envs": str(num_envs),
        "value": f"{value:g}",
        **usual,
        **MACHINE,
        **more,
    }


def write(path: Path, rows: list[Row]) -> None:
    columns = dict.fromkeys(name for each in rows for name in each)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two commits, two horizons, two peers and limits of two precisions."""
    old = [row("chasing training", size, size, "old", horizon="") for size in (64, 512)]
    new = [
        row(case, size, size * factor)
        for case, factor in (("chasing env", 9.0), ("chasing training", 2.0))
        for size in (4096, 64)
    ]
    new += [row("chasing training", 64, 100.0, horizon="128"), row("cart_pole env", 4096, 1e6)]
    limits = [
        row("chasing limit arithmetic", "-", 5e5 * n, precision=name)
        for n, name in enumerate(("float32", "bf16"), 1)
    ]
    write(tmp_path / "throughput_cpu.csv", [*old, *new, *limits])
    peers = [
        row("chasing tanh", 4096, 10.0 * n, trainer=name, version="1", note="default")
        for n, name in enumerate(("gpurl", "skrl"), 1)
    ]
    peers += [row("chasing tanh", 4096, 30.0, trainer="rl_games", version="1", note="max-autotune")]
    peers += [
        row("chasing tanh", 4096, 77.0, trainer="skrl", version="1", note="") | {"unit": "peak MiB"}
    ]
    peers += [row("pendulum tanh", 8, 99.0, trainer="sb3", version="1", note="")]
    write(tmp_path / "peers_cpu.csv", peers)
    return tmp_path


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes of the one picture of `folder`: curves, and bars where there are other trainers."""
    figures: list[Figure] = []
    monkeypatch.setattr(
        plot_bench, "save_figure", lambda figure, path: figures.append(figure) or path
    )
    plot_bench.plot_bench(folder)
    figures[0].draw_without_rendering()
    return figures[0].axes


def curves(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): [(float(x), float(y)) for x, y in zip(*line.get_data())]
        for line in axes.get_lines()
    }


def test_rows_become_curves_in_order_of_size(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes, _ = drawn(results, monkeypatch)
    lines = curves(axes)
    assert lines["training, horizon 32"] == [(64, 128), (4096, 8192)]
    assert lines["training, horizon 128"] == [(64, 100)]
    assert lines["environment alone, horizon 32"] == [(64, 576), (4096, 36864)]
    assert lines["training, earlier commits"] == [(64, 64), (512, 512)]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.parametrize("height", [64, 8192])  # at the bottom, and in the middle
def test_lines_are_labelled_at_their_ends_without_overlaps(
    results: Path, monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    # four lines that end at nearly the same height
    with (results / "throughput_cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    close = [row("chasing training", 4096, height + n, horizon=str(200 + n)) for n in range(4)]
    write(results / "throughput_cpu.csv", [*rows, *close])
    axes, bars = drawn(results, monkeypatch)
    assert axes.get_legend() is None
    texts = {text.get_text(): text for text in axes.texts}
    assert "training, horizon 32 8.19k" in texts
    assert "limit of training: arithmetic, float32 500k" in texts
    boxes = sorted(
        (text.get_window_extent() for text in texts.values()), key=lambda box: float(box.y0)
    )
    assert all(one.y1 <= other.y0 for one, other in itertools.pairwise(boxes))
    assert axes.bbox.y0 - 5 < boxes[0].y0
    assert boxes[-1].y1 < axes.bbox.y1 + 10
    # neither over the curves nor over the other panel
    assert min(box.x0 for box in boxes) > axes.bbox.x1
    assert max(box.x1 for box in boxes) < bars.get_tightbbox().x0
    # unless two lines end together, a label is at the height of its line
    end = axes.transData.transform((64.0, 5e5))[1]
    box = texts["limit of training: arithmetic, float32 500k"].get_window_extent()
    assert box.y0 < end < box.y1


@pytest.mark.parametrize("factor", [1.3, 8.0, 60.0, 5000.0])
def test_one_axis_has_one_kind_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    rows = [row("chasing training", 64, 6e4), row("chasing training", 512, 6e4 * factor)]
    write(tmp_path / "throughput_cpu.csv", rows)
    (axes,) = drawn(tmp_path, monkeypatch)
    low, high = axes.get_ylim()
    labels = axes.get_yticklabels() + axes.get_yticklabels(minor=True)
    shown = [text.get_text() for text in labels if low <= text.get_position()[1] <= high]
    numbers = [text for text in shown if text]
    assert all(re.fullmatch(r"[0-9.]+[kMG]?", text) for text in numbers)
    assert len(numbers) >= 1


def test_trainers_are_bars_in_order_of_speed(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, axes = drawn(results, monkeypatch)
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["gpurl", "skrl 1", "rl_games 1\n(max-autotune)"]  # Pendulum is another case
    assert [bar.get_width() for bar in axes.patches] == [10, 20, 30]
    assert [text.get_text() for text in axes.texts] == [
        "10",
        "20  (gpurl: 0.5×)",
        "30  (gpurl: 0.3×)",
    ]
    assert axes.get_xlabel().endswith("with 4,096 environments")
    # texts stay inside the axes
    assert max(text.get_window_extent().x1 for text in axes.texts) < axes.bbox.x1


def test_sizes_of_trainers_are_named_where_they_differ(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [
        row("chasing tanh", size, 10.0, trainer="skrl", version="1", note="default")
        for size in (64, 4096)
    ]
    write(results / "peers_cpu.csv", peers)
    _, axes = drawn(results, monkeypatch)
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["skrl 1, 64", "skrl 1, 4,096"]
    assert "gpurl" not in axes.texts[0].get_text()


def test_a_trainer_that_is_no_package_has_no_version(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = row("chasing tanh", 64, 10.0, trainer="leanrl_style", version=MACHINE["torch"])
    write(results / "peers_cpu.csv", [script | {"note": "default"}])
    _, axes = drawn(results, monkeypatch)
    assert [text.get_text() for text in axes.get_yticklabels()] == ["leanrl_style"]


def test_the_limit_is_that_of_the_precision_of_the_training(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = curves(drawn(results, monkeypatch)[0])
    limits = {name: points[0][1] for name, points in lines.items() if name.startswith("limit")}
    assert limits == {"limit of training: arithmetic, float32": 5e5}


def test_the_command_writes_beside_the_numbers_or_elsewhere(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", "--bench", str(results)]) == 0
    assert main(["plot", "--bench", str(results), "--by", "seed"]) == 2
    assert main(["plot", "--bench", str(results), "--out", str(results / "deep" / "pictures")]) == 0
    pictures = [
        results / "throughput_cpu.png",
        results / "deep" / "pictures" / "throughput_cpu.png",
    ]
    assert capsys.readouterr().out.split() == [str(path) for path in pictures]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_without_numbers_it_says_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", "--bench", str(tmp_path)]) == 2
    assert "gpurl bench writes one" in capsys.readouterr().err
    write(tmp_path / "throughput_cpu.csv", [row("chasing env", 64, 1.0) | {"unit": "us"}])
    with pytest.raises(UsageError, match="no rows of env_steps/s"):
        plot_bench.plot_bench(tmp_path)


def test_a_file_that_is_too_long_or_no_table_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot_bench, "MAX_TABLE_BYTES", 1000)
    for content in (b"x" * 1001, b"\xff"):
        (tmp_path / "throughput_cpu.csv").write_bytes(content)
        with pytest.raises(UsageError, match=r"cannot read .*throughput_cpu\.csv: "):
            plot_bench._read(tmp_path / "throughput_cpu.csv")


def test_the_folder_is_that_of_gpurl_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        plot_bench, "plot_bench", lambda folder, out: seen.append((folder, out)) or []
    )
    assert cli.plot(bench=True) == 0
    assert seen == [(doctor.OWN_RESULTS, None)]
