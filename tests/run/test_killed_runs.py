"""Whole training processes that SIGKILL ends at any moment, in a resume too: each run goes on and
ends as if nothing had happened.
"""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gpurl.checkpoints.folders import latest_checkpoint, load_checkpoint
from tests.forked_runs import Forks
from tests.run.test_resume import left_by
from tests.small_runs import assert_same

KILLS = int(os.environ.get("GPURL_KILLS", "40"))  # a soak takes more
IN_A_ROW = 4  # on each run
NUM_ENVS, HORIZON, MORE = 4, 8, 3
ITERATION = NUM_ENVS * HORIZON
WORDS = [
    *(
        "train",
        "ppo",
        "tests.tiny_envs:RandomWalk",
        "--num-envs",
        str(NUM_ENVS),
        "--horizon",
        str(HORIZON),
        "--minibatches",
        "1",
    ),
    *(
        "--network.hidden",
        "4",
        "--save-every",
        "1i",
        "--log-every",
        "0",
        "--eval-episodes",
        "0",
        "--device",
        "cpu",
        "--threads",
        "1",
    ),
]


def steps_saved(folder: Path) -> int:
    """Of LATEST, whose checkpoint is whole; 0 where there is none yet."""
    latest = latest_checkpoint(folder)
    if latest is None:
        return 0
    parts, manifest = load_checkpoint(latest)
    assert (
        parts["trainer"]["steps"] == manifest["step"] == parts["trainer"]["iteration"] * ITERATION
    )
    return manifest["step"]


def steps_logged(folder: Path) -> int:
    """Of the last whole line."""
    file = folder / "metrics.jsonl"
    whole, _, _ = file.read_text().rpartition("\n") if file.exists() else ("", "", "")
    return json.loads(whole.splitlines()[-1])["step"] if whole else 0


@pytest.mark.soak
@pytest.mark.timeout(max(300, 10 * KILLS))
def test_runs_that_are_killed_lose_one_interval_at_most_and_end_as_others_do(
    tmp_path: Path,
) -> None:
    """A kill falls anywhere from the first line of the program to the ninth iteration."""
    rng, ends, output = random.Random(5), dict[Path, int](), tmp_path / "output"
    kills = before_any_save = in_a_save = in_a_start = 0
    with Forks() as forks:

        def start(folder: Path, total: int) -> int:
            resumes = any(
                folder.glob("checkpoints/step_*")
            )  # as its words tell who starts it anew, with LATEST or killed before it
            words = (
                ["train", "--resume", str(folder)]
                if resumes
                else [*WORDS, "--run-dir", str(folder)]
            )
            return forks.start(output, words=[*words, "--total-steps", str(total)])

        process, began = start(tmp_path / "timed", 10**9), time.monotonic()
        while latest_checkpoint(tmp_path / "timed") is None and time.monotonic() < began + 60:
            time.sleep(0.002)
        seconds = 1.7 * (time.monotonic() - began)
        os.kill(process, signal.SIGKILL)
        forks.wait(process)

        while kills < KILLS:
            folder, saved = tmp_path / f"run {len(ends)}", 0
            for _ in range(IN_A_ROW):
                process = start(folder, 10**9)
                time.sleep(rng.uniform(0.0, seconds))
                os.kill(process, signal.SIGKILL)
                assert forks.wait(process) == -signal.SIGKILL, output.read_text()
                kills, before = kills + 1, saved
                saved = steps_saved(folder)
                assert saved >= max(before, steps_logged(folder) - ITERATION)
                before_any_save += saved == 0
                in_a_start += saved == before
                in_a_save += any((folder / "checkpoints").glob(".tmp-*"))
            ends[folder] = saved + MORE * ITERATION
            assert forks.wait(start(folder, ends[folder])) == 0, output.read_text()
            assert not list((folder / "checkpoints").glob(".tmp-*"))
        most = max(ends.values())
        assert forks.wait(start(tmp_path / "whole", most)) == 0
    whole = left_by(tmp_path / "whole")
    for folder, end in ends.items():
        left = left_by(folder)
        assert (
            left["step"]
            == left["trainer"]["steps"]
            == left["trainer"]["iteration"] * ITERATION
            == end
        )
        assert_same(
            left["logged"], whole["logged"][: end // ITERATION]
        )  # every step once, in order, episodes and losses too
        if end == most:
            for parts in (whole, left):
                parts.pop("meta", None)  # which says where the run lies; several may be the longest
            assert_same(left, whole)
    print(
        f"{kills} kills: {before_any_save} before a first checkpoint, {in_a_start} in which none "
        f"was added, {in_a_save} in a save"
    )
    assert in_a_save >= 1  # else the kills missed what they were to hit
    assert before_any_save >= 1
    assert KILLS / 10 <= in_a_start <= 0.9 * KILLS


def test_a_folder_whose_run_was_killed_before_its_first_checkpoint_is_taken_again(
    tmp_path: Path,
) -> None:
    """So that a scheduler may repeat its command; files of anything else are not written over."""
    from gpurl.errors import UsageError
    from tests.small_runs import small_run

    def forget(folder: Path) -> None:
        for pointer in (folder / "checkpoints").iterdir():
            if pointer.is_dir():
                pointer.rename(tmp_path / f"{folder.name} {pointer.name}")
            else:
                pointer.unlink()

    whole = small_run(tmp_path / "whole", 3, eval_episodes=0).folder
    killed = small_run(tmp_path / "killed", 2, eval_episodes=0).folder
    with pytest.raises(UsageError, match="--resume"):
        small_run(killed, 3, eval_episodes=0)
    forget(killed)
    (killed / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already holds files"):
        small_run(killed, 3, eval_episodes=0)
    (killed / "notes.txt").unlink()
    assert (
        small_run(killed, 3, eval_episodes=0).outcome.steps
        == small_run(tmp_path / "other", 3, eval_episodes=0).outcome.steps
    )
    lines: list[list[Any]] = [left_by(folder)["logged"] for folder in (whole, killed)]
    assert_same(*lines)
