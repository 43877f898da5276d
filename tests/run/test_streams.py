"""A run whose standard streams are closed, full or of another alphabet trains as any other, and
writes nothing into files that are not its log.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpurl.algorithms.base import Metrics
from gpurl.checkpoints.folders import latest_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.terminal import say
from tests.small_runs import ROOT

FLAGS = (
    "num_envs=4 horizon=4 minibatches=1 total_steps=64 eval_episodes=1 device=cpu threads=1 "
    "network.hidden=8"
)


def train_in_shell(folder: Path, redirections: str, **variables: str) -> int:
    """The exit code of `gpurl train`, with the redirections of a shell."""
    words = f"-m gpurl train ppo pendulum {FLAGS} 'run_dir={folder}'"
    return subprocess.run(
        ["sh", "-c", f"exec '{sys.executable}' {words} {redirections}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables,
        check=False,
        timeout=200,
    ).returncode


class NoRoom(Callback):
    """No checkpoint can be written."""

    def on_start(self, run: RunView) -> None:
        (run.folder / "checkpoints").write_text("")


class Signal(Callback):
    """A signal arrives in the second iteration, whose handler writes to standard error."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        if run.iteration == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("options", ["", "--quiet"])
def test_a_full_disk_under_the_log_and_the_checkpoints_ends_no_run(
    options: str, tmp_path: Path
) -> None:
    options += f" --save-every 1i --callback {__name__}:NoRoom"
    assert train_in_shell(tmp_path / "run", f"{options} >/dev/full 2>&1") == 5
    last = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["step"] == 64


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_stream_that_is_closed(closed: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train_in_shell(folder, f"--callback {__name__}:Signal {closed}") == 143
    assert (latest_checkpoint(folder) or tmp_path).name == "step_000000000032"
    assert (folder / "run.lock").read_bytes() == b""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)
    for path in folder.glob("*"):
        assert path.is_dir() or b"stopping" not in path.read_bytes(), path


@pytest.mark.parametrize("coerced", ["1", "0"])  # whether Python takes C to mean UTF-8
def test_an_ascii_terminal_and_signs_of_mathematics_in_a_name(coerced: str, tmp_path: Path) -> None:
    folder = tmp_path / "a$b\\frac{$_ü"
    variables = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    variables |= {"PYTHONCOERCECLOCALE": coerced, "PYTHONUTF8": coerced}
    assert train_in_shell(folder, f">'{tmp_path}/log' 2>&1", **variables) == 0
    log = (tmp_path / "log").read_text("ascii")
    assert "evaluated return" in log
    assert "\\xb1" in log  # ±
    assert "Traceback" not in log
    assert "warning" not in log
    assert (folder / "learning_curve.png").exists()
    assert (folder / "command.txt").read_text("utf-8").endswith(f"'run_dir={folder}'\n")
    assert latest_checkpoint(folder) is not None


def test_a_warning_that_cannot_be_printed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpurl.run.display import Display

    for stream in ("stdout", "stderr"):
        full = open("/dev/full", "w")  # noqa: SIM115
        monkeypatch.setattr(sys, stream, full)
        with Display("a title", 1, quiet=stream == "stderr") as display:
            display.warn("no checkpoint")
            display.warn("no checkpoint")
        assert (
            not say("x", is_error=stream == "stderr")
            or os.readlink(f"/proc/self/fd/{full.fileno()}") == os.devnull
        )
        full.close()


# ---- the handler of disk errors ----


@pytest.mark.parametrize("problem", ["closed", "gone"])
def test_a_disk_error_is_told_where_nothing_can_be_asked(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that may not be looked into, and a working directory that was deleted."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    folder = Path("run/checkpoints")
    if problem == "gone":
        place.rmdir()
    else:
        refuse = PermissionError(13, "Permission denied")

        def refused(*_: object, **__: object) -> None:
            raise refuse

        for name in ("is_dir", "mkdir", "absolute"):
            monkeypatch.setattr(Path, name, refused)
        monkeypatch.setattr("shutil.disk_usage", refused)
    with pytest.raises(CheckpointError, match=r"cannot save run/checkpoints/step_.*older"):
        save_checkpoint(folder, 1, {"model": {}})
    monkeypatch.undo()
