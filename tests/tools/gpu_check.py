"""One command for a machine with a GPU and no network: installs from wheels/, tests on the GPU,
measures; ten minutes at most.

`make gpu-check`. It needs a Python that has torch and triton. What else is missing comes from
wheels/ (`make gpu-check-wheels`, elsewhere) and goes into a folder of its own, .gpu-check/, that is
put on Python's path: that works in every Python, a virtual environment included.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.installation import PEERS
from benchmarks.results_table import RESULTS, ROOT, table
from tests.tools import wheels

SITE = ROOT / ".gpu-check"
TOTAL_SECONDS, TO_SAVE = 580.0, 8.0
NO_GPU, WHEELS_MISSING = 2, 3  # exit codes; 1 where a part failed


@dataclass(frozen=True)
class Part:
    """Something that is run in a process of its own."""

    name: str
    command: tuple[str, ...]  # behind the Python
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()
    needs: str = ""  # peers or physics: beside what gpurl itself needs


def parts(out: Path) -> list[Part]:
    """What is run, the most important first."""
    bench = ("--device", "cuda", "--out", str(out))
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist")
    sizes = ("--num-envs", "256", "1024", "4096", "16384", "65536", "--horizon", "32", "128")
    crowds = ("--tasks", "ant", "humanoid", "--num-envs", "4096", "--horizon", "24")
    peers = ("--python", sys.executable, "--rounds", "1", "--iterations", "10", "--warm-up", "4")
    replays = ("--python", sys.executable, "--rounds", "1", "--sizes", '{"num_envs": [64]}')
    return [
        Part("doctor", ("-m", "gpurl", "doctor"), 60),
        Part("GPU tests", (*pytest, "-m", "gpu", "tests"), 180),
        Part(
            "kernel tests",
            (*pytest, "tests/kernels/triton"),
            120,
            (("GPURL_KERNEL_DEVICE", "cuda"),),
        ),
        Part(
            "physics tests",
            (*pytest, "-m", "gpu", "tests/gpu/test_mujoco_warp_on_a_gpu.py"),
            90,
            needs="physics",
        ),
        Part(
            "physics",
            ("-m", "benchmarks.physics", *bench, *crowds, "--seconds", "2"),
            90,
            needs="physics",
        ),
        Part("kernels", ("-m", "benchmarks.kernels", *bench, "--seconds", "0.2"), 60),
        Part("peers", ("-m", "benchmarks.peers", *bench, *peers), 150, needs="peers"),
        Part("sweep", ("-m", "benchmarks.throughput", *bench, *sizes, "--seconds", "0.2"), 90),
        Part(
            "ladder",
            (
                "-m",
                "benchmarks.throughput",
                *bench,
                "--ladder",
                "--rounds",
                "2",
                "--seconds",
                "0.2",
            ),
            120,
        ),
        Part("profile", ("-m", "gpurl", "profile", "ppo", "chasing", "--device", "cuda"), 60),
        Part(
            "off-policy",
            ("-m", "benchmarks.off_policy", *bench, *replays, "--seconds", "0.2"),
            120,
            needs="peers",
        ),
    ]


# ---- what is there ----


def gpu() -> str:
    """The name of the GPU that torch sees; "" without one, and the reason is printed."""
    code = (
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '', "
        "torch.__version__, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        print(
            f"no GPU can be used: {sys.executable} has no torch that works:\n{done.stderr[-500:]}"
        )
        return ""
    name, version = done.stdout.strip().split("|")
    if not name:
        driver = (
            "nvidia-smi is there, see what it says"
            if shutil.which("nvidia-smi")
            else "there is no nvidia-smi"
        )
        print(
            f"no GPU can be used: torch {version} of {sys.executable} sees no CUDA device; {driver}"
        )
    return name


def needed(roots: list[str], folder: Path) -> tuple[list[Path], list[str]]:
    """(wheels of `folder` to install for `roots`, what is neither installed nor there as
    `name==version`).
    """
    lying = wheels.classes_defined_in(folder)
    found, missing = wheels.closure(
        roots, lambda requirement: wheels.installed(requirement) or lying(requirement)
    )
    return [each.wheel for each in found.values() if each.wheel], sorted(
        wheels.pinned(requirement) for requirement in missing.values()
    )


def install(files: list[Path], folder: Path, target: Path) -> bool:
    """Unpack wheels into `target`, anew; whether pip managed."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if not files:
        return True
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--find-links",
        str(folder),
        "--no-deps",
        "--target",
        str(target),
    ]
    return subprocess.run([*pip, *map(str, files)], check=False).returncode == 0


# ---- running ----


def run_part(part: Part, path: list[Path], seconds: float) -> tuple[str, float]:
    """("passed", "failed ..." or "stopped ...", how long it took). What takes too long is
    interrupted, then ended, with all it began.
    """
    environment = {
        **os.environ,
        **dict(part.environment),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command], cwd=ROOT, env=environment, start_new_session=True
    )
    try:
        code = process.wait(timeout=seconds)
        verdict = "passed" if code == 0 else f"failed with code {code}"
    except subprocess.TimeoutExpired:
        verdict = f"stopped after {seconds:.0f} s"
        os.killpg(process.pid, signal.SIGINT)  # benchmarks save what they have measured
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=TO_SAVE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return verdict, time.monotonic() - began


def run_all(wanted: list[Part], paths: dict[str, list[Path]], deadline: float) -> int:
    """Run one part after the other, each within its own time and what is left of all; 1 when one
    did not pass. paths: by `needs`.
    """
    lines, failed = [], False
    for part in wanted:
        left = deadline - time.monotonic()
        if part.needs not in paths:
            verdict, lasted = "left out: not all wheels are there", 0.0
        elif left < 2 * TO_SAVE:
            verdict, lasted = "not run: no time is left", 0.0
        else:
            print(f"\n==== {part.name}: {' '.join(part.command)}", flush=True)
            verdict, lasted = run_part(part, paths[part.needs], min(part.seconds, left - TO_SAVE))
        failed |= not verdict.startswith(("passed", "left out"))
        lines.append([part.name, f"{lasted:.0f} s", verdict])
    print(f"\n{table(['part', 'time', 'result'], lines)}")
    return 1 if failed else 0


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    names = [part.name for part in parts(RESULTS)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where the CSV files go; default benchmarks/results",
    )
    parser.add_argument(
        "--wheels", type=Path, default=wheels.WHEELS, metavar="FOLDER", help="default wheels/"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, help="only these; default all"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_SECONDS,
        help=f"for everything; default {TOTAL_SECONDS:.0f}",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be installed and run, on any machine"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Look, install, run, sum up."""
    deadline_from = time.monotonic()
    options = parse(words)
    name = gpu()
    more = {"": [], "peers": [*PEERS], "physics": wheels.physics_requirements()}
    found = {
        what: needed([*wheels.own_requirements(), *roots], options.wheels)
        for what, roots in more.items()
    }
    wanted = [part for part in parts(options.out.resolve()) if part.name in options.parts]
    for what, (files, missing) in found.items():
        label = what or "gpurl"
        print(
            f"{label}: {len(files)} wheels to "
            f"install{': ' if files else ''}{', '.join(file.name for file in files)}"
        )
        if missing:
            print(
                f"{label}: neither installed nor in {options.wheels}: {' '.join(missing)}\n  (and "
                f"what these need; make gpu-check-wheels)"
            )
    if options.dry_run:
        print(
            "\n".join(
                f"{part.name}, at most {part.seconds:.0f} s: {' '.join(part.command)}"
                for part in wanted
            )
        )
    if not name:
        return NO_GPU
    if found[""][1]:
        return WHEELS_MISSING
    if options.dry_run:
        return 0
    print(f"on {name}")
    paths = {}
    for what, (files, missing) in found.items():
        folder = SITE / (what or "gpurl")
        if not missing and install(files, options.wheels, folder):
            paths[what] = [folder, ROOT]
    return (
        run_all(wanted, paths, deadline_from + options.seconds) if "" in paths else WHEELS_MISSING
    )


if __name__ == "__main__":
    sys.exit(main())
