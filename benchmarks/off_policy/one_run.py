"""One measurement of one library in a fresh process: reads a Job, prints its result."""

import dataclasses
import importlib
import json
import sys
from typing import Any

import torch

from benchmarks.off_policy.job import Job, result
from benchmarks.processes import print_result
from gpurl.engine.threads import keep_large_blocks

FILES = {"replay": "replays", "sac": "sac_updates", "redq": "redq_critics"}  # of the cases


def job_of(words: str) -> Job:
    """A job from JSON, which has lists instead of tuples."""
    values: dict[str, Any] = json.loads(words)
    for field in dataclasses.fields(Job):
        if isinstance(values.get(field.name), list):
            values[field.name] = tuple(
                tuple(each) if isinstance(each, list) else each for each in values[field.name]
            )
    return Job(**values)


def main(words: list[str]) -> None:
    """Run the job given as JSON."""
    job = job_of(words[0])
    torch.manual_seed(job.seed)
    if job.trainer == "gpurl" and job.device == "cpu":
        keep_large_blocks()  # as in its training
    case = importlib.import_module(f"benchmarks.off_policy.{FILES[job.case]}")
    if job.only_compare:
        print_result({"message": case.compare(job)})
    else:
        print_result(result(job, case.measure(job)))


if __name__ == "__main__":
    main(sys.argv[1:])
