"""`gpurl report`: one page that needs nothing beside it, holds what the run's files say, shows it
in a real browser, and lets a stranger's texts do nothing.
"""

import errno
import json
import os
import re
import shutil
import subprocess
from base64 import b64encode
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from gpurl.cli.main import main
from gpurl.errors import GpurlError, UsageError
from gpurl.run.records import RECORDS
from gpurl.run.report import MAX_PANELS, POLICY, write_report
from gpurl.run.run_folder import EPISODE
from tests.small_runs import ITERATION, small_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# ffmpeg is not needed: a GIF of one blue pixel
GIF = bytes.fromhex("4749463839610100010080000024 63c2ffffff2c00000000010001000002024401003b")
ATTACK = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpurl.api.plot_curve", lambda folder: folder)
        small_run(folder, 3, eval_every=ITERATION, log_every=0.0)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def text_of(page: Path) -> str:
    """The page without tags and pictures, as a reader sees it."""
    text = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def tags_of(content: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The tags of a page with their attributes, as a browser reads them."""
    tags = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, [(name, value or "") for name, value in attrs]))

    Parser().feed(content)
    return tags


def test_the_page_says_what_the_files_say(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    page = run / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    text = text_of(page)
    lines = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    returns = [line["eval/mean_reward"] for line in lines if "eval/mean_reward" in line]
    assert f"environment steps {3 * ITERATION:,}" in text
    assert f"best evaluation {max(returns):,.4g}" in text
    assert f"last evaluation {returns[-1]:,.4g} ±" in text
    assert "state finished (total_steps)" in text
    versions = json.loads((run / RECORDS / "0" / "versions.json").read_text())
    assert f"torch {versions['packages']['torch']}" in text
    assert f"platform {versions['platform']}" in text
    assert "learning_rate 0.0" in text
    # nothing beside the page, and nothing that runs in it
    content = page.read_text()
    assert POLICY in content
    tags = tags_of(content)
    assert not {name for name, _ in tags} & {"script", "link", "iframe", "object", "base", "form"}
    sources = [value for _, attributes in tags for name, value in attributes if name == "src"]
    assert len(sources) == 2  # the curve and the metrics
    assert all(source.startswith("data:") for source in sources)
    assert not {name for _, attributes in tags for name, _ in attributes} & {"href", "style"}
    style = re.search(r"<style>(.*?)</style>", content, re.DOTALL)
    assert style is not None
    assert not re.search(r"@import|url\(", style[1])


def test_phases_are_summed_over_the_log(run: Path) -> None:
    lines = [
        {"step": 1, "time": 50, "time/collect_seconds": 30.0, "time/update_seconds": 15.0},
        {"step": 2, "time": 90, "time/collect_seconds": 30.5, "time/update_seconds": None},
        {"step": 3, "time": 99, "time/collect_seconds": 1.5, "time/update_seconds": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "collect 62.0 s 79% update 16.0 s 21%" in text_of(write_report(run))


def test_time_in_no_phase_is_told(run: Path) -> None:
    line = {"step": 1, "time/collect_seconds": 4.0, "time/update_seconds": 2.0}
    for elapsed, expected in (
        (10.0, "collect 4.0 s 40% update 2.0 s 20% evaluations, files and the rest 4.0 s 40%"),
        (6.01, "collect 4.0 s 67% update 2.0 s 33% All metrics"),
    ):
        log = json.dumps(line | {"train/loss": 1.0, "time/time_elapsed": elapsed})
        (run / "metrics.jsonl").write_text(f"{log}\n")
        assert expected in text_of(write_report(run))


def test_the_picture_of_an_episode_is_shown_where_there_is_one(run: Path) -> None:
    assert "<h2>One episode</h2>" not in write_report(run).read_text()
    (run / EPISODE).write_bytes(b"a picture")
    content = write_report(run).read_text()
    assert "<h2>One episode</h2>" in content
    assert f'src="data:image/png;base64,{b64encode(b"a picture").decode()}"' in content


def test_the_machine_is_described_in_words(run: Path) -> None:
    machine = {"cuda": None, "devices": ["cpu", "card"], "cpus": 2}
    (run / RECORDS / "0" / "versions.json").write_text(json.dumps(machine))
    assert "cuda none devices cpu, card cpus 2" in text_of(write_report(run))


def test_texts_of_a_stranger_do_nothing(run: Path) -> None:
    config = (run / "config.yaml").read_text()
    config = re.sub(r"^project:.*$", f'project: "{ATTACK}"', config, flags=re.MULTILINE)
    (run / "config.yaml").write_text(config.replace("env: pendulum", f'env: "{ATTACK}"'))
    (run / "command.txt").write_text(ATTACK)
    record = run / RECORDS / "0"
    (record / "git.diff").write_text(ATTACK)
    (record / "versions.json").write_text(json.dumps({"packages": {ATTACK: ATTACK}, ATTACK: 1}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "time": 1, f"env/{ATTACK}": 1.0, "env/$\\frac{$": 2.0}))
        file.write("\n")
    (run / "videos").mkdir()
    (run / "videos" / f"{ATTACK.replace('/', '')}.gif").write_bytes(GIF)
    content = write_report(run).read_text()
    assert content.count("&lt;script&gt;") >= 8
    tags = tags_of(content)
    assert "script" not in {name for name, _ in tags}
    assert not any(name.startswith("on") for _, attributes in tags for name, _ in attributes)


@pytest.mark.parametrize("name", ["config.yaml", "command.txt", RECORDS, "ended.json"])
def test_what_is_missing_or_damaged_is_left_out(run: Path, name: str) -> None:
    path = run / name
    if path.is_dir():
        for each in path.rglob("*.json"):
            each.write_text("[[[")
    else:
        path.unlink()
    assert "Learning curve" in text_of(write_report(run))


def test_a_folder_without_a_run_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UsageError, match="is not a run folder"):
        write_report(tmp_path / "nothing")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match=r"cannot read its metrics\.jsonl"):
        write_report(run)


def test_the_newest_video_is_shown_and_a_wrong_one_is_refused(run: Path, tmp_path: Path) -> None:
    assert "None yet: gpurl play" in text_of(write_report(run))
    (run / "videos").mkdir()
    (run / "videos" / "step_000000001000.gif").write_bytes(GIF)
    assert "data:image/gif;base64,R0lGOD" in write_report(run).read_text()
    film = tmp_path / "film.mp4"
    film.write_bytes(b"not decoded here")
    content = write_report(run, video=film).read_text()
    assert '<video controls loop muted autoplay src="data:video/mp4;base64,' in content
    for path, message in (
        (tmp_path / "film.avi", "a video is a file .mp4 or .gif"),
        (tmp_path / "missing.mp4", "No such file"),
    ):
        with pytest.raises(UsageError, match=message):
            write_report(run, video=path)


@pytest.mark.timeout(60)
def test_a_video_that_is_too_large_or_has_no_end_is_not_shown(run: Path, tmp_path: Path) -> None:
    large, pipe = tmp_path / "large.mp4", tmp_path / "pipe.mp4"
    with large.open("wb") as file:
        file.truncate((32 << 20) + 1)
    os.mkfifo(pipe)
    for path, reason in (
        (large, "it has more than 33554432 bytes"),
        (pipe, "it is no regular file"),
    ):
        with pytest.raises(UsageError, match=f"cannot show .*{path.name}: {reason}"):
            write_report(run, video=path)
    # those of the run
    (run / "videos").mkdir()
    pipe.rename(run / "videos" / "pipe.mp4")
    assert "None yet: gpurl play" in text_of(write_report(run))
    large.rename(run / "videos" / "large.mp4")
    reason = "large.mp4 is not shown: it has more than 33554432 bytes"
    assert reason in text_of(write_report(run))


def test_many_metrics_are_cut_with_a_note_and_nan_is_no_error(run: Path) -> None:
    values = {f"env/number_{index:03}": float(index) for index in range(MAX_PANELS)}
    with (run / "metrics.jsonl").open("a") as file:
        for step in (10**6, 10**6 + 1):
            file.write(json.dumps({"step": step, "time": 1, **values, "env/never": None}) + "\n")
    text = text_of(write_report(run))
    assert re.search(rf"The first {MAX_PANELS} of \d+\.", text)


def test_a_page_is_not_written_through_a_link(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / "report.html").symlink_to(victim)
    write_report(run)
    assert victim.read_text() == "mine"
    assert "Learning curve" in text_of(run / "report.html")


def test_a_pipe_is_not_replaced_by_a_page(run: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(GpurlError, match="it is no regular file"):
        write_report(run, out=pipe)
    assert pipe.is_fifo()


def test_a_folder_that_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere; make it, or choose"):
        write_report(run, out=tmp_path / "nowhere" / "report.html")


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_report(run).read_bytes()

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpurl.checkpoints.plain_files.write_regular", full)
    with pytest.raises(GpurlError, match=r"cannot write .*report\.html: No space left"):
        write_report(run)
    assert (run / "report.html").read_bytes() == before
    assert not list(run.glob(".report*"))


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_draws_the_curve_and_the_video(run: Path, tmp_path: Path) -> None:
    from PIL import Image

    (run / "it.gif").write_bytes(GIF)
    page = write_report(run)
    picture = tmp_path / "page.png"
    assert CHROMIUM is not None
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words += [f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1100,2600"]
    words += [f"--screenshot={picture}", page.as_uri()]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    pixels = np.asarray(Image.open(picture).convert("RGB"), np.float64)
    # evaluations and training
    for color in ((224, 123, 0), (36, 99, 194)):
        assert (np.linalg.norm(pixels - color, axis=2) < 30.0).sum() > 50
