"""Says what this machine has, what it lacks and how to get it; starts the benchmarks."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from gpurl.cli.env_table import simulators
from gpurl.errors import GpurlError, UsageError

PACKAGES = (
    "gpurl",
    "torch",
    "triton",
    "numpy",
    "gymnasium",
    "tyro",
    "rich",
    "safetensors",
    "tensorboard",
    "matplotlib",
)
SIMULATORS = {  # module: (what it brings, how to get it)
    "envpool": ("gymnasium_cpu with --env.vectorization envpool", "pip install 'gpurl[envpool]'"),
    "mujoco": ("Gymnasium's MuJoCo tasks", "pip install 'gymnasium[mujoco]'"),
    "Box2D": ("Gymnasium's Box2D tasks", "pip install 'gymnasium[box2d]'"),
    "ale_py": ("Atari tasks", "pip install 'gymnasium[atari]'"),
    "minari": ("datasets for gpurl train bc --dataset minari:ID", "pip install 'gpurl[minari]'"),
}


def report() -> str:
    """The whole report, ending with what to do where something is missing."""
    return "\n".join(
        [
            "versions",
            *_versions(),
            "",
            "devices",
            *_devices(),
            "",
            "engines",
            *_engines(),
            "",
            "simulators and datasets",
            *_simulators(),
        ]
    )


def _engines() -> list[str]:
    """Which of the ways to run an iteration this machine has."""
    from gpurl.engine.choose import machine_engines

    return [f"  {name}: {obstacle or 'yes'}" for name, obstacle in machine_engines()]


def _versions() -> list[str]:
    lines = [f"  python {platform.python_version()} on {platform.platform()}"]
    for name in PACKAGES:
        try:
            lines.append(f"  {name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"  {name} is missing: pip install -e . -c constraints.txt")
    return lines


def _devices() -> list[str]:
    import torch

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waits = (
        os.environ.get("OMP_WAIT_POLICY") or f"with spin count {os.environ.get('GOMP_SPINCOUNT')}"
    )
    lines = [
        f"  {cpus} CPU cores, torch uses {torch.get_num_threads()} threads, OpenMP waits {waits}",
        _cpu_kernels(),
    ]
    if driver := _driver():
        lines.append(f"  NVIDIA driver {driver}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            lines.append(
                f"  cuda:{index} {properties.name}, {memory}, compute "
                f"{properties.major}.{properties.minor}"
            )
        return lines
    if torch.version.cuda is None:
        advice = (
            "this torch is a CPU build: install torch 2.13.0 for CUDA to use a GPU"
            if shutil.which("nvidia-smi")
            else "no NVIDIA driver found; the CPU is used"
        )
    else:
        advice = (
            f"torch is built for CUDA {torch.version.cuda}, but sees no device: check the driver "
            f"with nvidia-smi"
        )
    return [*lines, f"  no CUDA device: {advice}"]


def _driver() -> str:
    """Release of the NVIDIA driver and the newest CUDA that it serves, or nothing where there is
    none.
    """
    release = Path("/proc/driver/nvidia/version")
    number = (
        re.search(r"Kernel Module.*?(\d+\.[\d.]+)", release.read_text())
        if release.is_file()
        else None
    )
    try:
        version = ctypes.c_int()
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return f"{number[1]}, whose libcuda.so.1 cannot be loaded" if number else ""
    cuda = (
        f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
        if code == 0
        else f"cuDriverGetVersion failed with {code}"
    )
    return f"{number[1] if number else 'of unknown release'}, {cuda}"


def _warp() -> list[str]:
    """Whether Warp, which steps the tasks of mujoco_warp, sees the devices that torch sees."""
    if importlib.util.find_spec("warp") is None:
        return []
    try:
        import torch

        warp: Any = importlib.import_module("warp")
        warp.config.log_level = getattr(warp, "LOG_ERROR", 40)
        warp.init()
    except Exception as error:  # a library that does not fit the driver fails in its own ways
        return [f"  warp cannot be used: {type(error).__name__}: {error}"]
    devices = [device.alias for device in warp.get_devices()]
    lines = [
        f"  warp {warp.__version__}: devices {', '.join(devices)}; compiled kernels in "
        f"{warp.config.kernel_cache_dir}"
    ]
    gpus = [device for device in warp.get_devices() if device.is_cuda]
    if torch.cuda.is_available() and not gpus:
        advice = (
            "from 1.18 on it needs driver 580 or newer, for an older one: pip install "
            "'warp-lang<1.18'"
        )
        lines.append(f"  warp sees no GPU though torch does: {advice}")
    lines += [
        f"  {gpu.alias} has no memory pool: MuJoCo's steps go without a graph"
        for gpu in gpus
        if not warp.is_mempool_enabled(gpu)
    ]
    return lines


def _cpu_kernels() -> str:
    from gpurl.kernels import c_library

    functions, why = c_library.load()
    return (
        f"  CPU kernels: "
        f"{why if functions is not None else f'torch serves instead, which is slower: {why}'}"
    )


def _simulators() -> list[str]:
    lines = ["  built in: torch-native tasks, Gymnasium's classic control"]
    for module, (brings, how) in SIMULATORS.items():
        found = importlib.util.find_spec(module) is not None
        lines.append(
            f"  {module}: {'there' if found else 'missing'} "
            f"({brings}{'' if found else '; get it by ' + how})"
        )
    return [*lines, *(f"  {line}" for line in simulators()), *_isaac_gym(), *_warp()]


def _isaac_gym() -> list[str]:
    """Where its Python is named, what that one says of itself and whether both share tensors, which
    takes seconds.
    """
    from gpurl.envs.isaac_gym.check import describe
    from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE

    if not os.environ.get(PYTHON_VARIABLE):
        return []
    try:
        found, sharing = describe("")
        return [f"  Isaac Gym has {found}", f"  Isaac Gym's process and this one: {sharing}"]
    except GpurlError as error:
        return [f"  Isaac Gym cannot run: {error}"]


def run_benchmarks(words: list[str]) -> int:
    """Run benchmarks/throughput.py and benchmarks/kernels.py of the source tree; `words` go to
    both.
    """
    sys.path.insert(0, str(_source_tree()))
    for name in ("throughput", "kernels"):
        code = importlib.import_module(f"benchmarks.{name}").main(words)
        if code:
            return code
    return 0


def results_folder() -> Path:
    """Where the benchmarks of the source tree write."""
    return _source_tree() / "benchmarks" / "results"


def _source_tree() -> Path:
    """The folder that holds benchmarks/; UsageError for an installation without it."""
    root = Path(__file__).resolve().parents[2]
    script = root / "benchmarks" / "throughput.py"
    if not script.is_file():
        raise UsageError(
            f"the benchmarks are in the source tree only, there is no {script}; clone the project "
            f"and run make bench"
        )
    return root
