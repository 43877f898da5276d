"""`gpurl train --processes`: torchrun's launcher starts the ranks, starts them again after a kill,
and passes on how they end.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from gpurl.cli.processes import _report, train_on
from gpurl.run.settings import make_settings
from tests.small_runs import exit_code, start

WORDS = [
    *("train", "ppo", "pendulum", "--num-envs", "4", "--horizon", "8", "--minibatches", "1"),
    *("--epochs", "2", "--network.hidden", "4", "--eval-episodes", "0", "--device", "cpu"),
    *("--threads", "1", "--save-every", "1i", "--total-steps", "1000000"),
]


def children(process: int) -> dict[str, int]:
    """The processes of the ranks that `process` has started, by rank."""
    found = {}
    for each in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        try:
            words = Path(f"/proc/{each}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        found |= {word[5:].decode(): int(each) for word in words if word.startswith(b"RANK=")}
    return found


def listening(processes: list[int]) -> list[str]:
    """The addresses of /proc/net/tcp and tcp6, in hexadecimal, at which `processes` listen."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor))
            except OSError:  # closed by now
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.append(words[1].partition(":")[0])
    return found


def wait_until_saved(launcher: "subprocess.Popen[str]", run: Path, steps: int) -> int:
    """The steps of the first checkpoint with at least so many."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and launcher.poll() is None:
        if (latest := latest_checkpoint(run)) and int(latest.name.split("_")[1]) >= steps:
            return int(latest.name.split("_")[1])
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of {steps} steps")


def test_after_a_signal_ranks_have_time_to_finish_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[LaunchConfig] = []

    def launch(config: LaunchConfig, entry: str) -> Callable[..., None]:
        launched.append(config)
        return lambda *words: None

    monkeypatch.setattr("gpurl.cli.processes.elastic_launch", launch)
    settings = make_settings("ppo", "pendulum", device="cpu", rank_timeout=700.0)
    assert train_on(2, 0, settings, None, []) == 0
    assert launched[0].shutdown_timeout == 700


def test_a_killed_rank_is_started_again_and_a_signal_ends_all(tmp_path: Path) -> None:
    """Both attempts are one run: it continues at its last checkpoint, saves, and ends with 143."""
    run = tmp_path / "run"
    words = [*WORDS, "--processes", "2", "--max-restarts", "1", "--run-dir", str(run)]
    launcher = start(words)
    first = wait_until_saved(launcher, run, 64)
    before = children(launcher.pid)
    # nobody else's machine can reach them
    assert {*listening([launcher.pid, *before.values()])} == {"0100007F"}
    os.kill(before["1"], signal.SIGKILL)
    after = before
    deadline = time.monotonic() + 120
    while len(after) < 2 or {*before.values()} & {*after.values()}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        after = children(launcher.pid)
    saved = int(str(latest_checkpoint(run)).rpartition("_")[2])
    later = wait_until_saved(launcher, run, max(first, saved) + 64)
    launcher.send_signal(signal.SIGTERM)
    output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 143, errors
    assert "rank 0 of 2: rank 1 does not answer" in errors
    assert "continues at step" in output
    assert "interrupted after" in output
    assert output.count("interrupted after") == 1
    assert load_checkpoint(run)[0]["trainer"]["steps"] >= later


def test_what_no_process_should_start_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = ["--run-dir", str(tmp_path / "run")]
    for words, text in (
        (["--processes", "0"], "--processes must be at least 1, got 0"),
        (["--processes", "2", "--seeds", "2"], "--processes 2 trains one agent, --seeds 2"),
        (["--max-restarts", "2"], "--max-restarts 2 goes with --processes"),
        (["--processes", "2", "--max-restarts", "2"], "needs --run-dir FOLDER"),
        (
            ["--processes", "3", *run_dir],
            "num_envs 4 does not divide into 3 processes: take 3 or 6",
        ),
        (
            ["--processes", "99", *run_dir],
            "num_envs 4 is less than one for each of 99 processes: take fewer processes, or "
            "num_envs 99",
        ),
    ):
        assert exit_code([*WORDS, *words]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_exit_code_is_that_of_the_rank_at_fault(tmp_path: Path) -> None:
    words = [*WORDS, "--processes", "2", "--run-dir", str(tmp_path / "run")]
    words[2] = "tests.run.test_ranks:LeavingSlowly"
    launcher = start(words)
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 3, errors
    assert "rank 1 of 2: environment" in errors
    assert "the third environment breaks" in errors


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ({0: 6, 1: 3}, 3, ""),
        ({1: -9, 0: 6}, 137, "rank 1 was ended by signal 9 (SIGKILL)"),
        # the launcher has ended a rank that hung
        ({0: 6, 1: -15}, 6, ""),
        ({1: -15, 0: -15}, 143, "rank 1 was ended by signal 15 (SIGTERM)"),
        ({0: 6}, 6, ""),
    ],
    ids=str,
)
def test_which_exit_code_counts(
    codes: dict[int, int], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report(codes) == code
    assert said in capsys.readouterr().err
