"""Hours in minutes: kills, random cases by the thousand, and trainings whose memory, file handles,
threads and processes must not grow.

A growth is the slope of a line through the means of ten blocks of samples, after a first third that
is not counted, with its 95 % interval.
More than a MiB a minute is a leak where the whole interval lies above it; where it only reaches
above, the time was too short to say.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.processes import host_environment, run_once
from benchmarks.results_table import RESULTS, ROOT, Row, machine, number, save, table
from gpurl.errors import GpurlError
from gpurl.run.setup import choose_device

MIB = 1 << 20
MAX_GROWTH = 1.0  # MiB a minute
BLOCKS, T_95 = 10, 2.306  # Student's t of eight degrees of freedom, two-sided
UNCOUNTED = 1 / 3  # of the time, at the start
SAMPLES_A_SECOND = 4
MIN_SECONDS = 120  # the allocator has its pools after some sixty short runs
KILLS, EXAMPLES = 200, 1000
COUNTED = ("handles", "threads", "children")
MAX_MORE = {
    "handles": 2,
    "threads": 0,
    "children": 0,
}  # a library opens and closes its files of fonts as it likes
SMALL: dict[str, Any] = {
    "num_envs": 64,
    "horizon": 8,
    "network": {"hidden": [16]},
    "eval_episodes": 8,
    "quiet": True,
    "threads": 1,
}
REPLAY: dict[str, Any] = {
    **{
        "num_envs": 16,
        "updates": 4,
        "batch_size": 64,
        "learning_starts": 64,
        "replay_size": 5000,
        "save_replay": True,
        "quiet": True,
    },
    **{
        "actor_network": {"hidden": [16]},
        "critic_network": {"hidden": [16]},
        "eval_episodes": 4,
        "threads": 1,
    },
}


@dataclasses.dataclass
class Sample:
    """What a process holds at a moment; bytes, and numbers of things."""

    seconds: float
    resident: int
    device: int
    handles: int
    threads: int
    children: int


@dataclasses.dataclass
class Growth:
    """MiB a minute, and half of its 95 % interval."""

    slope: float
    half: float

    def verdict(self) -> str:
        """grows, steady, or that it cannot be said."""
        if self.slope - self.half > MAX_GROWTH:
            return "grows"
        return "steady" if self.slope + self.half <= MAX_GROWTH else "too short to say"


class Sampler(threading.Thread):
    """Takes samples of its process until `stop`."""

    def __init__(self, began: float) -> None:
        super().__init__(daemon=True)
        self.began = began
        self.samples: list[Sample] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(1 / SAMPLES_A_SECOND):
            self.samples.append(sample(time.monotonic() - self.began))

    def stop(self) -> list[Sample]:
        """What was taken."""
        self._ended.set()
        self.join()
        return self.samples


def sample(seconds: float) -> Sample:
    """This process now."""
    import torch

    own = Path("/proc/self")
    resident = int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    tasks = list((own / "task").iterdir())
    children = 0
    for task in tasks:
        try:
            children += len((task / "children").read_text().split())
        except OSError:  # the thread has ended
            continue
    return Sample(
        seconds, resident, device, len(list((own / "fd").iterdir())), len(tasks), children
    )


def growth(times: list[float], values: list[float]) -> Growth:
    """Of `values`, bytes, at `times`, seconds; both after warm-up."""
    size = len(times) // BLOCKS
    if size < 1:
        return Growth(0.0, float("inf"))
    blocks = [slice(number * size, (number + 1) * size) for number in range(BLOCKS)]
    minutes = [statistics.fmean(times[block]) / 60 for block in blocks]
    means = [statistics.fmean(values[block]) / MIB for block in blocks]
    slope, intercept = statistics.linear_regression(minutes, means)
    left = sum((mean - intercept - slope * minute) ** 2 for minute, mean in zip(minutes, means))
    spread = sum((minute - statistics.fmean(minutes)) ** 2 for minute in minutes)
    return Growth(slope, T_95 * (left / (BLOCKS - 2) / spread) ** 0.5)


def judge(samples: list[Sample]) -> dict[str, Any]:
    """What grew: of memory by `growth`; of counted things the least in a quarter, the last against
    the second.
    """
    kept = samples[int(len(samples) * UNCOUNTED) :]
    times = [each.seconds for each in kept]
    found: dict[str, Any] = {}
    for name in ("resident", "device"):
        line = growth(times, [float(getattr(each, name)) for each in kept])
        found[name] = dataclasses.asdict(line) | {"verdict": line.verdict()}
    quarter = max(len(samples) // 4, 1)
    for name in COUNTED:
        early, late = (
            min(getattr(each, name) for each in part)
            for part in (samples[quarter : 2 * quarter], samples[-quarter:])
        )
        found[name] = {
            "early": early,
            "late": late,
            "verdict": "grows" if late - early > MAX_MORE[name] else "steady",
        }
    return found


# ---- what is run ----


def one_long_run(
    algorithm: str, env: str, settings: dict[str, Any], seconds: float, folder: Path
) -> int:
    """A training that logs every iteration, saves every second and evaluates often; returns its
    steps.
    """
    import gpurl

    often = {
        "log_every": 0.0,
        "save_every": "1s",
        "eval_every": 20_000,
        "total_steps": 10**12,
        "run_dir": str(folder / "run"),
    }
    return gpurl.train(algorithm, env, max_seconds=seconds, **{**settings, **often}).outcome.steps


def many_short_runs(
    algorithm: str, env: str, settings: dict[str, Any], seconds: float, folder: Path
) -> int:
    """Trainings of some iterations one after the other in this process; returns how many."""
    import gpurl

    began, runs = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        gpurl.train(algorithm, env, total_steps=1024, run_dir=str(folder / str(runs)), **settings)
        runs += 1
    return runs


def log_entries(
    algorithm: str, env: str, settings: dict[str, Any], seconds: float, folder: Path
) -> int:
    """Forty numbers an entry, as fast as the files take them; returns how many numbers."""
    from gpurl.run.logger import Logger

    began, entries = time.monotonic(), 0
    logger = Logger(folder, "sb3", 0)
    while time.monotonic() - began < seconds:
        logger.write(
            entries, {f"train/number_{index}": float(entries + index) for index in range(40)}
        )
        entries += 1
    logger.close()
    return entries * 40


QUICK = SMALL | {"eval_episodes": 0}  # the allocator's own pools are full after some sixty runs
WORKERS = SMALL | {"num_envs": 4, "horizon": 64, "env_options": {"vectorization": "async"}}
CASES: dict[str, tuple[Callable[..., int], str, str, dict[str, Any]]] = {
    "ppo chasing": (one_long_run, "ppo", "chasing", SMALL),
    "sac pendulum, replay saved": (one_long_run, "sac", "pendulum", REPLAY),
    "ppo gymnasium, worker processes": (one_long_run, "ppo", "gymnasium_cpu:Pendulum-v1", WORKERS),
    "many runs of ppo pendulum": (many_short_runs, "ppo", "pendulum", QUICK),
    "many runs of sac pendulum": (
        many_short_runs,
        "sac",
        "pendulum",
        REPLAY | {"eval_episodes": 0},
    ),
    "many runs of ppo gymnasium": (
        many_short_runs,
        "ppo",
        "gymnasium_cpu:CartPole-v1",
        WORKERS | {"eval_episodes": 0},
    ),
    "log entries": (log_entries, "", "", {}),
}


def measure(case: str, seconds: float) -> dict[str, Any]:
    """Run `case` in this process for so long; what grew, and how much was done."""
    function, algorithm, env, settings = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        function(
            algorithm, env, settings, 1.0, Path(folder) / "first"
        )  # imports and first uses are no growth
        sampler = Sampler(time.monotonic())
        sampler.start()
        done = function(algorithm, env, settings, seconds, Path(folder))
        samples = sampler.stop()
    return judge(samples) | {"done": done, "samples": len(samples)}


def verdict(found: dict[str, Any]) -> str:
    """In words: what grows, else what cannot be said, else steady."""
    for word in ("grows", "too short to say"):
        if names := [
            name
            for name, each in found.items()
            if isinstance(each, dict) and each["verdict"] == word
        ]:
            return f"{', '.join(names)} {word}" if word == "grows" else word
    return "steady"


def _row(case: str, found: dict[str, Any], seconds: float) -> Row:
    memory = found["resident"]
    counts = {name: f"{found[name]['early']}-{found[name]['late']}" for name in COUNTED}
    numbers = {
        "value": f"{memory['slope']:.3f}",
        "half": f"{memory['half']:.3f}",
        "unit": "MiB a minute",
        "device_mib": f"{found['device']['slope']:.3f}",
    }
    return {
        "case": case,
        **numbers,
        **counts,
        "done": str(found["done"]),
        "seconds": f"{seconds:.0f}",
        "verdict": verdict(found),
    }


def many_tests() -> bool:
    """The kills and the random cases, many times as many as in CI; whether they passed."""
    environment = {
        **os.environ,
        "GPURL_KILLS": str(KILLS),
        "GPURL_EXAMPLES": str(EXAMPLES),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "7200",
        "-m",
        "soak",
    ]
    print(f"tests marked soak: {KILLS} kills, {EXAMPLES} random cases each", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    """Run all; 1 where a test failed or something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="of all trainings together; the tests before take their own",
    )
    parser.add_argument("--only", default="", help="cases whose name holds this; without the tests")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the CSV file goes"
    )
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    if options.minutes * 60 < MIN_SECONDS * len(names):
        parser.error(
            f"{len(names)} trainings need {MIN_SECONDS} seconds each, {options.minutes} minutes "
            f"are too few"
        )
    if not names:
        parser.error(f"no case holds {options.only!r}; there are {', '.join(CASES)}")
    passed = bool(options.only) or many_tests()
    seconds, rows = options.minutes * 60 / len(names), list[Row]()
    for name in names:
        job = {"case": name, "seconds": seconds}
        try:
            found = run_once(
                Path(sys.executable), "tests.tools.soak", job, host_environment(1, "brief"), name
            )
        except GpurlError as error:
            print(error, file=sys.stderr)
            passed = False
            continue
        rows.append(machine(str(choose_device("auto"))) | _row(name, found, seconds))
        passed &= "grows" not in rows[-1]["verdict"]
        print(
            f"{name}: {number(found['resident']['slope'])} ± {number(found['resident']['half'])} "
            f"MiB a minute, {rows[-1]['verdict']}",
            flush=True,
        )
    header = ["", "MiB a minute", "±", *COUNTED, "done", "verdict"]
    print(
        table(
            header,
            [
                [row[name] for name in ("case", "value", "half", *COUNTED, "done", "verdict")]
                for row in rows
            ],
        )
    )
    if rows:
        print(save("soak", rows, options.out))
    return 0 if passed else 1


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print("RESULT " + json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
