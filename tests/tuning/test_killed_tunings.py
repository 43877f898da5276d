"""Whole tunings that SIGKILL and Ctrl-C end at any moment: the same command goes on, and ends with
the trials, returns and weights of a tuning that nobody touched.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="gpurl tune needs Optuna: pip install -e '.[tune]'")

from gpurl.tuning.study import load_tuning
from tests.forked_runs import Forks
from tests.small_runs import assert_same, state_of

KILLS = int(os.environ.get("GPURL_KILLS", "4"))  # a soak takes more
NUM_ENVS, HORIZON, ITERATIONS, TRIALS = 4, 8, 12, 2
WORDS = [
    *("tune", "ppo", "tests.tiny_envs:RandomWalk", "--num-envs", str(NUM_ENVS)),
    *("--horizon", str(HORIZON), "--total-steps", str(NUM_ENVS * HORIZON * ITERATIONS)),
    *("--network.hidden", "4", "--save-every", "1i", "--log-every", "0", "--eval-episodes", "2"),
    *("--device", "cpu", "--minibatches", "1", "--no-prune"),
]
MODULES = ("gpurl.cli.tune", "optuna.storages._rdb.storage", "optuna.samplers._tpe.sampler")
BEFORE = "tests.tuning.near_processes:fork_trainings"


def result(storage: Path) -> list[Any]:
    rows = sorted(load_tuning(storage).rows(), key=lambda row: row.number)
    return [(row.number, row.state, row.value, row.run, row.params) for row in rows]


def iterations_saved(folder: Path) -> int:
    """Of all trials of a tuning."""
    steps: dict[Path, int] = {}
    for each in folder.glob("trial_*/checkpoints/step_*"):
        run = each.parent.parent
        steps[run] = max(steps.get(run, 0), int(each.name.removeprefix("step_")))
    return sum(steps.values()) // (NUM_ENVS * HORIZON)


@pytest.mark.soak
@pytest.mark.timeout(max(300, 30 * KILLS))
@pytest.mark.parametrize(
    "ending", ["journal", "db"] if "GPURL_KILLS" in os.environ else ["journal"]
)
def test_a_tuning_that_is_killed_ends_as_one_that_is_not(ending: str, tmp_path: Path) -> None:
    rng, output = random.Random(3), tmp_path / "output"
    space = tmp_path / "space.yaml"
    space.write_text("learning_rate: {}\ngamma: {low: 0.9, high: 0.99}\n")
    whole, broken = tmp_path / f"whole.{ending}", tmp_path / f"broken.{ending}"

    def words(storage: Path) -> list[str]:
        own = ["--storage", str(storage), "--space", str(space), "--trials", str(TRIALS)]
        return [*WORDS, *own]

    with Forks(*MODULES) as forks:
        assert forks.run(output, words=words(whole), before=BEFORE) == 0, output.read_text()
        codes = []
        for number in range(KILLS):
            process = forks.start(output, words=words(broken), before=BEFORE)
            # anywhere after so many of its iterations; the tuning may have ended until then
            share = (number + rng.random()) / (KILLS + 1)
            while iterations_saved(tmp_path / "broken") < share * TRIALS * ITERATIONS:
                time.sleep(0.002)
            sent = signal.SIGINT if number % 3 == 2 else signal.SIGKILL
            os.kill(process, sent)
            codes.append(forks.wait(process))
            assert codes[-1] in (-signal.SIGKILL, 128 + signal.SIGINT, -signal.SIGINT, 0)
        assert forks.run(output, words=words(broken), before=BEFORE) == 0, output.read_text()
    assert codes.count(0) < len(codes)
    assert result(broken) == result(whole)
    assert [each[1] for each in result(whole)] == ["finished"] * TRIALS
    for run in (each[3] for each in result(whole)):
        assert_same(state_of(tmp_path / "broken" / run), state_of(tmp_path / "whole" / run))
    for each in (tmp_path / "whole", tmp_path / "broken"):
        text = (each / "best.yaml").read_text()
        assert text.startswith("# trial ")
    assert "go on" in output.read_text()
