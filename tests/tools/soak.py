"""Soak tests: hundreds of kills, thousands of random cases, and trainings whose memory, file
handles, threads and processes must not grow.

The growth of memory is the slope of a line through the means of ten blocks of samples, without the
first third of the time, with its 95 % interval. Memory grows if the whole interval is above 1 MiB a
minute; if only a part of it is, the time was too short to decide.
"""

import dataclasses
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

from benchmarks.processes import host_environment, run_once, run_script
from benchmarks.results_table import ROOT, Row, machine, number, out_parser, save, table
from gpurl.errors import GpurlError
from gpurl.run.setup import choose_device

MIB = 1 << 20
MAX_GROWTH = 1.0  # MiB a minute
BLOCKS, T_95 = 10, 2.306  # Student's t of eight degrees of freedom, two-sided
UNCOUNTED = 1 / 3  # of the time, at the start
SAMPLES_A_SECOND = 4
MIN_SECONDS = 120  # the pools of the allocator are full after about sixty short runs
KILLS, EXAMPLES = 200, 1000
COUNTED = ("handles", "threads", "children")
MAX_MORE = {"handles": 2, "threads": 0, "children": 0}  # a library may open files of fonts
SMALL: dict[str, Any] = {
    "num_envs": 64,
    "horizon": 8,
    "network": {"hidden": [16]},
    "eval_episodes": 8,
    "quiet": True,
    "threads": 1,
}
REPLAY: dict[str, Any] = {
    "num_envs": 16,
    "updates": 4,
    "batch_size": 64,
    "learning_starts": 64,
    "replay_size": 5000,
    "save_replay": True,
    "actor_network": {"hidden": [16]},
    "critic_network": {"hidden": [16]},
    "eval_episodes": 4,
    "quiet": True,
    "threads": 1,
}


@dataclasses.dataclass
class Sample:
    """The resources of a process at one time."""

    seconds: float
    resident: int  # bytes
    device: int  # bytes
    handles: int
    threads: int
    children: int


@dataclasses.dataclass
class Growth:
    """The growth of memory and its 95 % interval, slope - half to slope + half."""

    slope: float  # MiB a minute
    half: float

    def verdict(self) -> str:
        """ "grows", "steady" or "too short to say"."""
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
        """End the thread; returns its samples."""
        self._ended.set()
        self.join()
        return self.samples


def sample(seconds: float) -> Sample:
    """A sample of this process."""
    import torch

    process = Path("/proc/self")
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    tasks = list((process / "task").iterdir())
    children = 0
    for task in tasks:
        try:
            children += len((task / "children").read_text().split())
        except OSError:  # the thread has ended
            continue
    handles = len(list((process / "fd").iterdir()))
    return Sample(seconds, resident, device, handles, len(tasks), children)


def growth(times: list[float], values: list[float]) -> Growth:
    """The growth of `values`, in bytes, at `times`, in seconds; both after warm-up."""
    # means of blocks
    size = len(times) // BLOCKS
    if size < 1:
        return Growth(0.0, float("inf"))
    blocks = [slice(number * size, (number + 1) * size) for number in range(BLOCKS)]
    minutes = [statistics.fmean(times[block]) / 60 for block in blocks]
    means = [statistics.fmean(values[block]) / MIB for block in blocks]

    # a line through them, with the standard error of its slope
    slope, intercept = statistics.linear_regression(minutes, means)
    residual = sum((mean - intercept - slope * minute) ** 2 for minute, mean in zip(minutes, means))
    spread = sum((minute - statistics.fmean(minutes)) ** 2 for minute in minutes)
    return Growth(slope, T_95 * (residual / (BLOCKS - 2) / spread) ** 0.5)


def judge(samples: list[Sample]) -> dict[str, Any]:
    """A verdict for each resource: memory by `growth`; counts by the minimum in the last quarter
    of the samples against that in the second one.
    """
    # memory
    counted = samples[int(len(samples) * UNCOUNTED) :]
    times = [each.seconds for each in counted]
    results: dict[str, Any] = {}
    for name in ("resident", "device"):
        line = growth(times, [float(getattr(each, name)) for each in counted])
        results[name] = dataclasses.asdict(line) | {"verdict": line.verdict()}

    # counts
    quarter = max(len(samples) // 4, 1)
    for name in COUNTED:
        early = min(getattr(each, name) for each in samples[quarter : 2 * quarter])
        late = min(getattr(each, name) for each in samples[-quarter:])
        grows = late - early > MAX_MORE[name]
        results[name] = {"early": early, "late": late, "verdict": "grows" if grows else "steady"}
    return results


# ---- the cases ----


def one_long_run(
    algorithm: str, env: str, settings: dict[str, Any], seconds: float, folder: Path
) -> int:
    """A training that logs every iteration, saves every second and evaluates often; returns its
    steps.
    """
    import gpurl

    often = {"log_every": 0.0, "save_every": "1s", "eval_every": 20_000}
    settings = settings | often | {"total_steps": 10**12, "run_dir": str(folder / "run")}
    return gpurl.train(algorithm, env, max_seconds=seconds, **settings).outcome.steps


def many_short_runs(
    algorithm: str, env: str, settings: dict[str, Any], seconds: float, folder: Path
) -> int:
    """Short trainings one after the other in this process; returns their number."""
    import gpurl

    began = time.monotonic()
    runs = 0
    while time.monotonic() - began < seconds:
        gpurl.train(algorithm, env, total_steps=1024, run_dir=str(folder / str(runs)), **settings)
        runs += 1
    return runs


def log_entries(
    algorithm: str, env: str, settings: dict[str, Any], seconds: float, folder: Path
) -> int:
    """Log entries of forty numbers as fast as possible; returns the number of numbers."""
    from gpurl.run.logger import Logger

    began = time.monotonic()
    entries = 0
    logger = Logger(folder, "sb3", 0)
    while time.monotonic() - began < seconds:
        numbers = {f"train/number_{index}": float(entries + index) for index in range(40)}
        logger.write(entries, numbers)
        entries += 1
    logger.close()
    return entries * 40


QUICK = SMALL | {"eval_episodes": 0}
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
    """Run `case` in this process for `seconds`; returns the verdicts of `judge` and the work
    done.
    """
    function, algorithm, env, settings = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        # imports and first uses do not count as growth
        function(algorithm, env, settings, 1.0, Path(folder) / "first")
        sampler = Sampler(time.monotonic())
        sampler.start()
        done = function(algorithm, env, settings, seconds, Path(folder))
        samples = sampler.stop()
    return judge(samples) | {"done": done, "samples": len(samples)}


def verdict(results: dict[str, Any]) -> str:
    """The verdict of a case: "... grows", "too short to say" or "steady"."""
    verdicts = {name: each["verdict"] for name, each in results.items() if isinstance(each, dict)}
    growing = [name for name, word in verdicts.items() if word == "grows"]
    if growing:
        return f"{', '.join(growing)} grows"
    return "too short to say" if "too short to say" in verdicts.values() else "steady"


def _row(case: str, results: dict[str, Any], seconds: float) -> Row:
    memory = results["resident"]
    return {
        "case": case,
        "value": f"{memory['slope']:.3f}",
        "half": f"{memory['half']:.3f}",
        "unit": "MiB a minute",
        "device_mib": f"{results['device']['slope']:.3f}",
        **{name: f"{results[name]['early']}-{results[name]['late']}" for name in COUNTED},
        "done": str(results["done"]),
        "seconds": f"{seconds:.0f}",
        "verdict": verdict(results),
    }


def many_tests() -> bool:
    """Run the tests of kills and random cases, with many more of them than in CI; whether they
    passed.
    """
    environment = {
        **os.environ,
        "GPURL_KILLS": str(KILLS),
        "GPURL_EXAMPLES": str(EXAMPLES),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--timeout", "7200", "-m", "soak"]
    print(f"tests marked soak: {KILLS} kills, {EXAMPLES} random cases each", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    """Run all; 1 if a test failed or something grows."""
    parser = out_parser(__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="time of all trainings together, without the tests before them; default 60",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases with TEXT in their name, without tests"
    )
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    if options.minutes * 60 < MIN_SECONDS * len(names):
        parser.error(
            f"{len(names)} trainings need {MIN_SECONDS} seconds each, {options.minutes} minutes "
            f"are too few"
        )
    if not names:
        parser.error(f"no case has {options.only!r} in its name: {', '.join(CASES)}")

    # tests, then a fresh process for each training
    passed = bool(options.only) or many_tests()
    seconds = options.minutes * 60 / len(names)
    rows = list[Row]()
    environment = host_environment(1, "brief")
    for name in names:
        job = {"case": name, "seconds": seconds}
        try:
            results = run_once(Path(sys.executable), "tests.tools.soak", job, environment, name)
        except GpurlError as error:
            print(error, file=sys.stderr)
            passed = False
            continue
        row = machine(str(choose_device("auto"))) | _row(name, results, seconds)
        rows.append(row)
        passed &= "grows" not in row["verdict"]
        memory = results["resident"]
        print(
            f"{name}: {number(memory['slope'])} ± {number(memory['half'])} MiB a minute, "
            f"{row['verdict']}",
            flush=True,
        )

    # the table of all
    header = ["", "MiB a minute", "±", *COUNTED, "done", "verdict"]
    columns = ("case", "value", "half", *COUNTED, "done", "verdict")
    print(table(header, [[row[name] for name in columns] for row in rows]))
    if rows:
        print(save("soak", rows, options.out))
    return 0 if passed else 1


if __name__ == "__main__":
    run_script(main, measure)
