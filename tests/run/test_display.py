"""What a training shows: nothing when quiet, whole lines in a file, a table in a terminal, and no
error when nobody reads.
"""

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gpurl.run import display as module
from gpurl.run.display import Display, counted, engineering

ROOT = Path(__file__).resolve().parent.parent.parent
VALUES = {
    "time/fps": 100_000.0,
    "time/collect_seconds": 0.5,
    "time/update_seconds": 1.5,
    "rollout/ep_rew_mean": 3.25,
    "rollout/ep_len_mean": 200.0,
    "eval/mean_reward": 2.5,
    "train/value_loss": 0.125,
    "train/learning_rate": 3e-4,
}
LINE = (
    "ppo on chasing\n"
    "524k/1.05M steps, 50.0 %, ETA 0:00:05 | env-steps/s 100k | rollout / update 25 % / 75 % | "
    "episode return 3.25 | episode length 200 | eval return 2.5 | value loss 0.125 | learning rate "
    "0.0003\n"
)


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.23456, "1.23"),
        (-12.5, "-12.5"),
        (100, "100"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (1000, "1.00k"),
        (12345, "12.3k"),
        (123456, "123k"),
        (999_499, "999k"),
        (999_600, "1.00M"),
        (1_234_567, "1.23M"),
        (-2.5e6, "-2.50M"),
        (2.5e9, "2.50G"),
        (1e-5, "1e-05"),
        (float("nan"), "nan"),
    ],
)
def test_engineering_has_three_digits_and_a_prefix(value: float, text: str) -> None:
    assert engineering(value) == text


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("ppo on chasing", 1 << 20, quiet=True, live=True) as display:
        display.update(1 << 19, VALUES)
        display.note("a note")
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_are_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("ppo on chasing", 1 << 20) as display:
        display.update(1 << 19, VALUES)
        display.note("a note")
    assert capsys.readouterr() == (LINE + "a note\n", "")


def test_lines_come_at_intervals_and_the_last_one_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with Display("t", 1000) as display:
        for step in range(1, 13):  # one a second
            now += 1.0
            display.update(step, {"eval/mean_reward": float(step)} if step == 1 else {})
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "t"
    assert [line.split()[0] for line in lines] == ["1/1.00k", "6/1.00k", "11/1.00k", "12/1.00k"]


def test_values_not_given_keep_their_last_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_PER_LINE", 0.0)
    with Display("t", None) as display:
        display.update(1, {"eval/mean_reward": 4.5})
        display.update(2, {"train/approx_kl": 0.25})
    assert capsys.readouterr().out.splitlines() == [
        "t",
        "1 steps | eval return 4.5",
        "2 steps | eval return 4.5 | KL 0.25",
    ]


def test_what_a_training_waits_for_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_PER_LINE", 0.0)
    with Display("t", None) as display:
        display.activity("video: frame 1 of 2")
        display.activity("")
        display.update(1, {"train/approx_kl": 0.25})
    assert capsys.readouterr().out.splitlines() == [
        "t",
        "video: frame 1 of 2",
        "1 steps | KL 0.25",
    ]


def test_what_a_training_waits_for_is_in_the_table_until_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Display("t", None, live=True) as display:
        monkeypatch.setattr(module, "SECONDS_PER_FRAME", 0.0)
        display.update(1, {"train/approx_kl": 0.25})
        monkeypatch.setattr(module, "SECONDS_PER_FRAME", 60.0)
        display.activity("video: frame 1 of 2")
        assert "frame 1 of 2" in capsys.readouterr().out
        display.activity("")
    last = capsys.readouterr().out
    assert "KL" in last
    assert "frame 1 of 2" not in last


@pytest.mark.parametrize(
    ("fps", "eta"), [(0.0, "-"), (float("nan"), "-"), (float("inf"), "-"), (0.1, "2:46:40")]
)
def test_time_left(capsys: pytest.CaptureFixture[str], fps: float, eta: str) -> None:
    with Display("t", 1100) as display:
        display.update(100, {"time/fps": fps})
    assert f"ETA {eta} |" in capsys.readouterr().out


def test_a_time_limit_is_the_end_if_it_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with Display("t", 1_000_000, max_seconds=100.0) as display:
        now += 25.0
        display.update(1000, {"time/fps": 40.0})
    assert "1.00k/1.00M steps, 25.0 %, ETA 0:01:15 |" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "text"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs")])
def test_numbers_have_their_plural(number: int, text: str) -> None:
    assert counted(number, "run") == text


# ---- the live table ----


def table(step: int) -> list[str]:
    """The lines of the table, 80 letters wide, without its frame."""
    display = Display("ppo on chasing", 1 << 20, quiet=True)
    display.update(step, VALUES)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(display._table())
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {80}
    return [" ".join(line.strip("╭╮│╰╯ ").split()) for line in lines]


def test_the_table_shows_progress_and_numbers() -> None:
    title, progress, *rows = table(1 << 19)
    assert title.strip("─ ") == "ppo on chasing"
    assert progress.endswith("━ 524k/1.05M steps, 50.0 %, ETA 0:00:05")
    assert rows[:-1] == [
        "",
        "env-steps/s 100k eval return 2.5",
        "rollout / update 25 % / 75 % value loss 0.125",
        "episode return 3.25 learning rate 0.0003",
        "episode length 200",
    ]
    assert table(1 << 20)[1].count("━") == pytest.approx(2 * progress.count("━"), abs=2)


def test_a_narrow_terminal_gets_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = table(1 << 19)[3:]
    assert rows[:2] == ["env-steps/s 100k", "rollout / update 25 % / 75 %"]
    assert rows[-2] == "learning rate 0.0003"


def test_a_terminal_gets_the_table_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with Display("ppo on chasing", 1 << 20) as display:
        display.update(1 << 19, VALUES)
        display.note("saved [at] step 7")
        assert sys.stdout is not terminal  # prints of others go above the table
    assert sys.stdout is terminal
    text = terminal.getvalue()
    assert "╭" in text
    assert "episode return" in text
    assert "saved [at] step 7\n" in text  # no markup
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_an_error_in_training_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())

    def train() -> None:
        with Display("t", 100, live=True) as display:
            display.update(1, VALUES)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert sys.stdout is terminal
    assert "\x1b[?25h" in terminal.getvalue()


@pytest.mark.parametrize("name", ["dumb", "unknown", None])
def test_a_terminal_that_cannot_draw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    if name is not None:
        monkeypatch.setenv("TERM", name)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with Display("ppo on chasing", 1 << 20) as display:
        display.update(1 << 19, VALUES)
    assert terminal.getvalue() == LINE


# ---- output that nobody reads ----

TRAINING = """
import sys
from gpurl.run import display
display.SECONDS_PER_LINE = display.SECONDS_PER_FRAME = 0.0
with display.Display("ppo on ch\\xe4sing", 1000, live={live}) as shown:
    for step in range(200):
        shown.update(step, {{"time/fps": 100.0}})
        shown.note("a note")
print("summary")  # of the command line, which knows nothing of the pipe
print("trained on", file=sys.stderr)
"""


@pytest.mark.parametrize("live", [False, True])
def test_a_closed_pipe_ends_nothing(live: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = TRAINING.format(live=live)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "trained on\n")


def test_a_letter_the_stream_cannot_encode_ends_nothing() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    code = TRAINING.format(live=False)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "trained on\n")


def test_the_table_shows_the_time_and_an_earlier_better_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for evaluations, shown in (
        ((2.0, 5.0, 3.5), "eval return 3.5 (best 5)"),
        ((2.0, 5.0), "eval return 5 |"),
        ((math.nan, 4.0), "eval return 4 |"),
    ):
        with Display("a run", 100) as display:
            for value in evaluations:
                display.update(1, {"eval/mean_reward": value, "time/time_elapsed": 3723.9})
        last = capsys.readouterr().out.splitlines()[-1]
        assert shown in last
        assert last.endswith("elapsed 1:02:03")
