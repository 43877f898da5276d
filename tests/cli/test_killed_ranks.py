"""SIGKILL ends one of two ranks at any moment, again and again: all start again at the last
checkpoint, and the run ends with the bits of one that nobody killed. Part of a soak: each kill
takes the seconds of a start.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from gpurl.checkpoints.folders import latest_checkpoint
from tests.cli.test_processes import WORDS, children
from tests.run.test_killed_runs import steps_saved
from tests.run.test_resume import left_by
from tests.small_runs import assert_same, start

KILLS = min(int(os.environ.get("GPURL_KILLS", "0")), 20)
MORE = 5 * 32  # steps after the last kill
ALL_AT_ONCE = 60.0  # seconds


def ranks_of(launcher: int, but: dict[str, int]) -> dict[str, int]:
    """The processes of both ranks of an attempt, none of which is in `but`."""
    deadline = time.monotonic() + ALL_AT_ONCE
    while time.monotonic() < deadline:
        found = children(launcher)
        if len(found) == 2 and not {*found.values()} & {*but.values()}:
            return found
        time.sleep(0.02)
    raise AssertionError("the ranks did not start again")


@pytest.mark.soak
@pytest.mark.timeout(max(300, 30 * KILLS))
@pytest.mark.skipif(not KILLS, reason="for a soak: GPURL_KILLS says how many")
def test_a_run_whose_ranks_are_killed_ends_as_one_that_nobody_killed(tmp_path: Path) -> None:
    """A kill falls into a start, an iteration, a save or an evaluation of any attempt."""
    run, rng = tmp_path / "run", random.Random(3)
    words = [*WORDS, "--eval-episodes", "2", "--eval-every", "64", "--log-every", "0"]
    words += ["--processes", "2"]
    in_a_start, in_a_save = 0, 0

    launcher = start([*words, "--max-restarts", str(KILLS), "--run-dir", str(run)])
    ranks, saved, began = dict[str, int](), 0, time.monotonic()
    first: float | None = None  # seconds of a start
    for _ in range(KILLS):
        ranks, began = ranks_of(launcher.pid, ranks), time.monotonic()
        if first is None:
            while steps_saved(run) == 0 and launcher.poll() is None:
                time.sleep(0.02)
            first = time.monotonic() - began
        time.sleep(rng.uniform(0.0, 1.5 * first))
        os.kill(ranks[rng.choice("01")], signal.SIGKILL)
        in_a_save += any((run / "checkpoints").glob(".tmp-*"))
        # nothing that was saved is lost
        before, saved = saved, steps_saved(run)
        assert saved >= before
        in_a_start += saved == before
    ranks_of(launcher.pid, ranks)
    while steps_saved(run) < saved + MORE and launcher.poll() is None:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM, errors
    end = int(str(latest_checkpoint(run)).rpartition("_")[2])

    whole = start([*words, "--run-dir", str(tmp_path / "whole"), "--total-steps", str(end)])
    _, errors = whole.communicate(timeout=300)
    assert whole.returncode == 0, errors
    left, wanted = left_by(run), left_by(tmp_path / "whole")
    assert_same(left["training"], wanted["training"])
    iterations = [line for line in left["logged"] if "train/loss" in line]
    assert_same(iterations, [line for line in wanted["logged"] if "train/loss" in line])
    print(f"{KILLS} kills: {in_a_start} in a start, {in_a_save} in a save")
