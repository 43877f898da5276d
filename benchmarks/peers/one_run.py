"""One measurement of one trainer, in a process of its own in the peers' environment: reads a Job,
prints what `result` makes of it.

Every trainer steps the same environments and learns by the same hyper-parameters; what a trainer
cannot be told is left as it comes.
"""

import importlib
import json
import sys

import torch

from benchmarks.peers.job import Job, result

LOOPS = {  # trainer: the file that runs it, imported only where it is wanted
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
    loop = getattr(importlib.import_module(f"benchmarks.peers.{LOOPS[job.trainer]}"), job.case)
    print("RESULT " + json.dumps(result(job, loop(job))))


if __name__ == "__main__":
    main(sys.argv[1:])
