"""One training of one case in a process of its own: begin or resume it, read its curve, evaluate
its policy, and write the rows; the run folder is then deleted.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning import results
from benchmarks.learning.case import Case, Settings
from benchmarks.learning.results import Point
from benchmarks.learning.suite import case_named
from benchmarks.results_table import commit
from gpurl.api import Run, evaluate_run, resume, train
from gpurl.checkpoints.folders import list_checkpoints
from gpurl.errors import CheckpointError

# of a run, not of what it learns
RUN_SETTINGS: Settings = {
    "save_every": "300s",
    "keep_checkpoints": 1,
    "log_every": 10.0,
    "quiet": True,
}


def job_parser() -> argparse.ArgumentParser:
    """What the process of one training is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("seed", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    return parser


def train_seed(case: Case, seed: int, work: Path) -> tuple[list[Point], Point]:
    """(curve, end) of a training in the folder `work`, where a stopped one goes on."""
    folder = work / case.name / f"seed_{seed}"
    note = folder.with_suffix(".json")
    settings = case.resolved_settings()
    if folder.exists() and not (note.exists() and note.read_text() == settings):
        shutil.rmtree(folder)  # of a case that was changed since
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(settings)
    note_commit(folder)
    run = _run(case, seed, folder)
    if run.outcome.unsaved:  # an earlier policy would be evaluated in place of the last
        raise CheckpointError(f"the last policy is in no checkpoint: {run.outcome.unsaved}")
    # the final policy, on other episodes than those of the curve
    values = evaluate_run(run.folder, results.END_EPISODES, case.device, best=False)
    curve, seconds = read_curve(run.folder)
    return curve, Point(run.outcome.steps, seconds, values["eval/mean_reward"])


def note_commit(folder: Path) -> None:
    """Add this commit to those at which the training in `folder` was begun and went on, in a file
    beside it.
    """
    path = folder.with_suffix(".commits")
    known = path.read_text().split() if folder.exists() and path.exists() else []
    path.write_text(" ".join(dict.fromkeys([*known, commit()])))


def _run(case: Case, seed: int, folder: Path) -> Run:
    """Begin the training, or go on from its last checkpoint."""
    if list_checkpoints(folder):
        return resume(folder, **_seconds_left(case, folder))
    settings = RUN_SETTINGS | {"threads": case.threads, "device": case.device} | case.settings
    if hasattr(_config(case), "save_replay"):
        settings["save_replay"] = True
    return train(
        case.algorithm,
        case.env,
        seed=seed,
        run_dir=str(folder),
        total_steps=case.steps,
        eval_every=case.eval_every,
        eval_episodes=case.curve_episodes,
        **settings,
    )


def _config(case: Case) -> type:
    """The class of the algorithm's settings."""
    from gpurl.algorithms import config_class, resolve_algorithm

    return config_class(resolve_algorithm(case.algorithm))


def _seconds_left(case: Case, folder: Path) -> Settings:
    """The time limit of a resumed run, whose clock begins anew."""
    limit = case.settings.get("max_seconds")
    if not isinstance(limit, int | float):
        return {}
    return {"max_seconds": max(limit - read_curve(folder)[1], 1e-3)}


def read_curve(folder: Path) -> tuple[list[Point], float]:
    """(the evaluations in metrics.jsonl of a run, its seconds of wall clock over all resumes)."""
    curve = []
    seconds = 0.0
    path = folder / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        values = json.loads(line)
        seconds = values["time"]
        mean = values.get("eval/mean_reward")
        if mean is not None and math.isfinite(mean):
            curve.append(Point(values["step"], seconds, mean))
    return curve, seconds


def main(words: Sequence[str]) -> None:
    """Train a seed of a case and write its rows."""
    job = job_parser().parse_args(words)
    case = case_named(job.case).scaled(job.scale)
    folder = job.work / case.name / f"seed_{job.seed}"
    columns = results.provenance(case.resolved_settings(), case.device)
    curve, end = train_seed(case, job.seed, job.work)
    columns["commit"] = folder.with_suffix(".commits").read_text()
    results.add(case, job.seed, curve, end, columns, job.out)
    shutil.rmtree(folder)
    folder.with_suffix(".commits").unlink()
    print(f"return {end.mean_return:.1f} after {end.steps:,} steps, {end.seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
