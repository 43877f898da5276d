"""Measures and tests gpurl on a machine with a GPU and no network: `make gpu-check`. It has two
halves of at most nine minutes, each useful alone: `--half measure` and `--half tests`.

It needs a Python with torch and triton. Missing packages are installed from wheels/ (made by
`make gpu-check-wheels` on another machine) into the folder .gpu-check/, which is put on the path of
Python: that works in every Python, also in a virtual environment.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.installation import PEERS
from benchmarks.results_table import RESULTS, ROOT, out_parser, table
from tests.tools import wheels

SITE = ROOT / ".gpu-check"
SMALL_REPLAYS = '{"num_envs": [64]}'
MEASURE, TESTS = HALVES = ("measure", "tests")
# what a first run must not lack: graphs, the persistent rollout, no wait for the device, the seed
SMOKE = "captured_persistent or (never_waits_for and chasing) or same_seed"
ON_GPU = (("GPURL_KERNEL_DEVICE", "cuda"),)
# run under compute-sanitizer, which takes 10 times as long and more: those that launch the largest
SANITIZED = ("rollout", "ppo_update", "ppo_wide_update", "moments", "finite")
SANITIZER = "compute-sanitizer"
HALF_SECONDS, TO_SAVE = 540.0, 8.0
MOST_PROCESSES = 8  # of tests; each has a context in the GPU's memory
NO_GPU, WHEELS_MISSING = 2, 3  # exit codes; 1 if a part failed


@dataclass(frozen=True)
class Part:
    """A command that runs in a process of its own."""

    name: str
    half: str
    command: tuple[str, ...]  # arguments of `program`
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    needs: str = ""  # peers or physics: packages in addition to those of gpurl
    program: str = sys.executable


def parts(out: Path) -> list[Part]:
    """All parts of both halves, the most important first."""
    python = sys.executable

    def tests(name: str, words: str, seconds: float, half: str = TESTS, **options: Any) -> Part:
        command = f"-m pytest -p no:cacheprovider {words}"
        return Part(name, half, tuple(shlex.split(command)), seconds, **options)

    def bench(name: str, module: str, words: str, seconds: float, needs: str = "") -> Part:
        command = ("-m", f"benchmarks.{module}", "--device", "cuda", "--out", str(out))
        return Part(name, MEASURE, (*command, *shlex.split(words)), seconds, needs=needs)

    def sanitized(tool: str) -> Part:
        files = " ".join(f"tests/kernels/triton/test_{name}.py" for name in SANITIZED)
        run = tests(tool, f"--timeout 0 {files}", 120, environment=ON_GPU, program=SANITIZER)
        options = ("--tool", tool, "--error-exitcode", "1")
        return replace(run, command=(*options, python, *run.command))

    # most of their time is compilation, on one core each
    ways = ""
    if importlib.util.find_spec("xdist"):
        ways = f"-n {min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) // 2))} --dist worksteal"
    turns = f"--python {shlex.quote(python)} --rounds 1"
    return [
        tests("smoke", f"tests/gpu/test_training_on_a_gpu.py -k '{SMOKE}'", 60, MEASURE),
        Part("doctor", MEASURE, ("-m", "gpurl", "doctor"), 60),
        bench("ladder", "throughput", "--ladder --rounds 1 --seconds 0.2", 120),
        bench("profile", "profiles", "", 60),
        bench("trainings", "trainings", "", 60),
        bench("kernels", "kernels", "--seconds 0.1", 60),
        bench(
            "sweep",
            "throughput",
            "--num-envs 256 1024 4096 16384 65536 --horizon 32 128 --seconds 0.2",
            100,
        ),
        bench("peers", "peers", f"{turns} --iterations 10 --warm-up 4", 150, "peers"),
        bench(
            "large peers",
            "peers",
            f"--case pursuit {turns} --iterations 6 --warm-up 4",
            150,
            "peers",
        ),
        bench(
            "physics",
            "physics",
            "--tasks ant humanoid --num-envs 4096 --horizon 24 --seconds 2",
            90,
            "physics",
        ),
        bench(
            "off-policy",
            "off_policy",
            f"{turns} --sizes '{SMALL_REPLAYS}' --seconds 0.2",
            120,
            "peers",
        ),
        tests("GPU tests", f"-m gpu {ways} tests --ignore tests/gpu/test_mujoco_on_a_gpu.py", 240),
        tests("kernel tests", f"{ways} tests/kernels/triton", 300, environment=ON_GPU),
        sanitized("memcheck"),
        sanitized("racecheck"),
        tests("physics tests", "tests/gpu/test_mujoco_on_a_gpu.py", 90, needs="physics"),
    ]


# ---- the machine ----


def gpu() -> str:
    """The name of the GPU that torch sees; "" without one, after printing the reason."""
    code = (
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '', "
        "torch.__version__, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no GPU can be used: torch of {sys.executable} does not work:\n{done.stderr[-500:]}")
        return ""
    name, version = done.stdout.strip().split("|")
    if not name:
        has_driver = shutil.which("nvidia-smi")
        advice = "run nvidia-smi" if has_driver else "there is no nvidia-smi"
        print(
            f"no GPU can be used: torch {version} of {sys.executable} sees no CUDA device; {advice}"
        )
    return name


def needed(roots: list[str], folder: Path) -> tuple[list[Path], list[str]]:
    """(wheels of `folder` to install for `roots`; missing packages, neither installed nor in
    `folder`, as `name==version`).
    """
    find_wheel = wheels.finder(folder)
    distributions, missing = wheels.closure(
        roots, lambda requirement: wheels.installed(requirement) or find_wheel(requirement)
    )
    files = [each.wheel for each in distributions.values() if each.wheel]
    return files, sorted(map(wheels.pinned, missing.values()))


def install(files: list[Path], folder: Path, target: Path) -> bool:
    """Install wheels into the emptied folder `target`; whether pip succeeded."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if not files:
        return True
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--find-links", str(folder), "--target", str(target)]
    return subprocess.run([*pip, *map(str, files)], check=False).returncode == 0


# ---- running ----


def shown(part: Part) -> str:
    """Its command, as in a shell."""
    program = () if part.program == sys.executable else (part.program,)
    return shlex.join((*program, *part.command))


def run_part(part: Part, path: list[Path], seconds: float) -> tuple[str, float]:
    """("passed", "failed ..." or "stopped ...", seconds). After `seconds` the process is
    interrupted, then killed, with all of its children.
    """
    environment = {
        **os.environ,
        **dict(part.environment),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    process = subprocess.Popen(
        [part.program, *part.command], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        code = process.wait(timeout=seconds)
        verdict = "passed" if code == 0 else f"failed with code {code}"
    except subprocess.TimeoutExpired:
        verdict = f"stopped after {seconds:.0f} s"
        os.killpg(process.pid, signal.SIGINT)  # benchmarks save their results
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TO_SAVE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return verdict, time.monotonic() - began


def run_all(chosen: list[Part], paths: dict[str, list[Path]], deadlines: dict[str, float]) -> int:
    """Run one part after the other, each within its own time and the time until the deadline of its
    half; 1 if one did not pass. paths: the Python path for each `needs`.
    """
    lines, failed = [], False
    for part in chosen:
        left = deadlines[part.half] - time.monotonic()
        duration = 0.0
        if part.needs not in paths:
            verdict = "skipped: wheels are missing"
        elif shutil.which(part.program) is None:
            verdict = f"skipped: there is no {part.program}"
        elif left < 2 * TO_SAVE:
            verdict = "not run: no time is left"
        else:
            print(f"\n==== {part.name}: {shown(part)}", flush=True)
            verdict, duration = run_part(part, paths[part.needs], min(part.seconds, left - TO_SAVE))
        failed |= not verdict.startswith(("passed", "skipped"))
        lines.append([part.name, f"{duration:.0f} s", verdict])
    print(f"\n{table(['part', 'time', 'result'], lines)}")
    return 1 if failed else 0


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    names = [part.name for part in parts(RESULTS)]
    parser = out_parser(__doc__)
    parser.add_argument(
        "--wheels", type=Path, default=wheels.WHEELS, metavar="FOLDER", help="default wheels/"
    )
    parser.add_argument(
        "--half", nargs="+", choices=HALVES, default=HALVES, help="only this half; default both"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, help="only these; default all"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=HALF_SECONDS,
        help=f"time of each half; default {HALF_SECONDS:.0f}",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what it would install and run"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Install, run and print the results."""
    began = time.monotonic()
    options = parse(words)

    # what is there, and what is missing
    name = gpu()
    extras = {"": [], "peers": [*PEERS], "physics": wheels.physics_requirements()}
    packages = {
        needs: needed([*wheels.own_requirements(), *roots], options.wheels)
        for needs, roots in extras.items()
    }
    for needs, (files, missing) in packages.items():
        label = needs or "gpurl"
        names = f": {', '.join(file.name for file in files)}" if files else ""
        print(f"{label}: {len(files)} wheels to install{names}")
        if missing:
            print(
                f"{label}: neither installed nor in {options.wheels}: {' '.join(missing)}\n  (and "
                f"their requirements; make gpu-check-wheels)"
            )
    chosen = [
        part
        for part in parts(options.out.resolve())
        if part.name in options.parts and part.half in options.half
    ]
    if options.dry_run:
        for part in chosen:
            print(f"{part.half}: {part.name}, at most {part.seconds:.0f} s: {shown(part)}")
    if not name:
        return NO_GPU
    if packages[""][1]:
        return WHEELS_MISSING
    if options.dry_run:
        return 0

    # install and run
    print(f"on {name}")
    paths = {}
    for needs, (files, missing) in packages.items():
        folder = SITE / (needs or "gpurl")
        if not missing and install(files, options.wheels, folder):
            paths[needs] = [folder, ROOT]
    if "" not in paths:
        return WHEELS_MISSING
    # the second half has its time after the first one's, if both run
    ends = [began + options.seconds * (number + 1) for number in range(len(options.half))]
    return run_all(chosen, paths, dict(zip(sorted(options.half, key=HALVES.index), ends)))


if __name__ == "__main__":
    sys.exit(main())
