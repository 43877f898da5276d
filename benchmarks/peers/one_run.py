"""One measurement of one trainer in a fresh process: reads a Job, prints its result.

Every trainer steps the same environments with the same hyper-parameters; options that only some
trainers have keep their defaults.
"""

import importlib
import json
import sys

import torch

from benchmarks.peers.job import Job, result
from benchmarks.processes import print_result

LOOPS = {  # trainer: the file that runs it, which imports the library
    "gpurl": "gpurl_loops",
    "rsl_rl": "rsl_rl_loop",
    "skrl": "skrl_loop",
    "sb3": "sb3_loops",
    "rl_games": "rl_games_loop",
    "leanrl_style": "leanrl_style",
}


def main(words: list[str]) -> None:
    """Run the job given as JSON."""
    job = Job(**json.loads(words[0]))
    torch.manual_seed(job.seed)
    name = "pendulum" if job.case == "pendulum" else "tensor_task"
    loop = getattr(importlib.import_module(f"benchmarks.peers.{LOOPS[job.trainer]}"), name)
    print_result(result(job, loop(job)))


if __name__ == "__main__":
    main(sys.argv[1:])
