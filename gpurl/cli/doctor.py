"""Reports what this machine has, what it lacks and how to get it; starts the benchmarks."""

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
from types import ModuleType

from gpurl.cli.env_table import simulators
from gpurl.errors import GpurlError, UsageError, install_extra
from gpurl.run.display import counted

PACKAGES = (
    *("gpurl", "torch", "triton", "numpy", "gymnasium", "tyro", "rich", "safetensors"),
    *("tensorboard", "matplotlib"),
)
SIMULATORS = {  # module: (what it provides, how to get it)
    "envpool": ("gymnasium_cpu with --env.vectorization envpool", install_extra("envpool")),
    "mujoco": ("Gymnasium's MuJoCo tasks", "pip install 'gymnasium[mujoco]'"),
    "Box2D": ("Gymnasium's Box2D tasks", "pip install 'gymnasium[box2d]'"),
    "ale_py": ("Atari tasks", "pip install 'gymnasium[atari]'"),
    "minari": ("datasets for gpurl train bc --dataset minari:ID", install_extra("minari")),
}
# extra of gpurl: (its modules, what it provides); what simulators need stands with them
EXTRAS = {
    "export": (("onnx", "onnxscript", "onnxruntime"), "gpurl export RUN"),
    "video": (("PIL", "imageio_ffmpeg"), "gpurl play RUN --video out.mp4"),
    "viewer": (("mjviser", "viser"), "gpurl play RUN --viewer"),
    "plot": (("scipy",), "intervals over seeds"),
    "tune": (("optuna",), "gpurl tune ALGORITHM ENV"),
    "ray": (("ray",), "gpurl pbt, gpurl tournament"),
    "gpu": (("pynvml",), "memory and use of a GPU in the log"),
    "wandb": (("wandb",), "--track wandb"),
    "trackio": (("trackio",), "--track trackio"),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), "--track mlflow"),
    "sb3": (("stable_baselines3",), "gpurl.adapters.to_sb3"),
    "rsl-rl": (("rsl_rl", "tensordict"), "gpurl.adapters.to_rsl_rl"),
    "skrl": (("skrl",), "gpurl.adapters.to_skrl"),
    "torchrl": (("torchrl", "tensordict"), "gpurl.adapters.to_torchrl"),
    "rl-games": (("rl_games",), "gpurl.adapters.to_rl_games"),
}

# of gpurl bench; the rows in benchmarks/results are recorded on purpose
OWN_RESULTS = Path("runs/bench")


def report() -> str:
    """The whole report, with advice where something is missing."""
    from gpurl.engine.choose import machine_engines

    sections = {
        "versions": _versions(),
        "devices": _devices(),
        "engines": [f"{name}: {obstacle or 'yes'}" for name, obstacle in machine_engines()],
        "simulators and datasets": [
            "built in: torch-native tasks, Gymnasium's classic control",
            *_modules(),
            *simulators(),
            *_isaac_gym(),
            *_warp(),
        ],
        "extras": _extras(),
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def _versions() -> list[str]:
    lines = [f"python {platform.python_version()} on {platform.platform()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            how = "pip install -e . -c constraints.txt"
            if name == "triton" and sys.platform != "linux":
                how = "it exists for Linux only; kernels run in C or in torch"
            lines.append(f"{name} is missing: {how}")
    return lines


def _devices() -> list[str]:
    import torch

    from gpurl.kernels import c_library

    # the CPU
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    spins = f"with spin count {os.environ.get('GOMP_SPINCOUNT')}"
    waits = os.environ.get("OMP_WAIT_POLICY") or spins
    threads = torch.get_num_threads()
    library = c_library.load()
    kernels = library.why
    if library.functions is None:
        kernels = f"torch serves instead, which is slower: {library.why}"
    lines = [
        f"{counted(cpus or 1, 'CPU core')}, torch uses {counted(threads, 'thread')}, OpenMP waits "
        f"{waits}",
        f"CPU kernels: {kernels}",
    ]

    # the GPUs, or why there is none
    if driver := _driver():
        lines.append(f"NVIDIA driver {driver}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            memory = f"{gpu.total_memory / 2**30:.0f} GiB"
            lines.append(f"cuda:{index} {gpu.name}, {memory}, compute {gpu.major}.{gpu.minor}")
    elif torch.version.cuda is not None:
        lines.append(
            f"no CUDA device: torch is built for CUDA {torch.version.cuda}, but sees no device: "
            f"check the driver with nvidia-smi"
        )
    elif shutil.which("nvidia-smi"):
        lines.append(
            "no CUDA device: this torch is a CPU build: install torch 2.13.0 for CUDA to use a GPU"
        )
    else:
        lines.append("no CUDA device: no NVIDIA driver found; the CPU is used")
    return lines


def _driver() -> str:
    """Release of the NVIDIA driver and the newest CUDA that it supports; empty without a driver."""
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text() if path.is_file() else ""
    match = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    try:
        # 13000 is CUDA 13.0
        version = ctypes.c_int()
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return f"{match[1]}, whose libcuda.so.1 cannot be loaded" if match else ""
    cuda = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if code != 0:
        cuda = f"cuDriverGetVersion failed with {code}"
    return f"{match[1] if match else 'of unknown release'}, {cuda}"


def _modules() -> list[str]:
    lines = []
    for module, (purpose, how) in SIMULATORS.items():
        if importlib.util.find_spec(module) is not None:
            lines.append(f"{module}: there ({purpose})")
        else:
            lines.append(f"{module}: missing ({purpose}; get it by {how})")
    return lines


def _extras() -> list[str]:
    """Of each extra of gpurl whether all of its modules are there, and else which are not."""
    lines = []
    for name, (modules, purpose) in EXTRAS.items():
        missing = [each for each in modules if importlib.util.find_spec(each) is None]
        if missing:
            without = "" if missing == list(modules) else f" without {', '.join(missing)}"
            how = install_extra(name)
            lines.append(f"{name}: missing{without} ({purpose}; get it by {how})")
        else:
            lines.append(f"{name}: there ({purpose})")
    return lines


def _isaac_gym() -> list[str]:
    """Where its Python is named: the packages of that one, and whether both share tensors, which
    takes seconds.
    """
    from gpurl.envs.isaac_gym.check import describe
    from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE

    if not os.environ.get(PYTHON_VARIABLE):
        return []
    try:
        packages, sharing = describe()
    except GpurlError as error:
        return [f"Isaac Gym cannot run: {error}"]
    return [f"Isaac Gym has {packages}", f"Isaac Gym's process and this one: {sharing}"]


def _warp() -> list[str]:
    """Whether Warp, which steps MuJoCo tasks on a GPU, sees the devices that torch sees."""
    if importlib.util.find_spec("warp") is None:
        return []
    try:
        import torch

        from gpurl.envs.mujoco._warp_worlds import start_warp

        warp: ModuleType = importlib.import_module("warp")
        start_warp(warp)
    except Exception as error:  # a library that does not fit the driver raises errors of all types
        return [f"warp cannot be used: {type(error).__name__}: {error}"]
    # without a GPU its tasks run, but slowly; without a memory pool it captures no graphs
    devices = warp.get_devices()
    names = ", ".join(device.alias for device in devices)
    cache = warp.config.kernel_cache_dir
    lines = [f"warp {warp.__version__}: devices {names}; compiled kernels in {cache}"]
    gpus = [device for device in devices if device.is_cuda]
    if torch.cuda.is_available() and not gpus:
        lines.append(
            "warp sees no GPU though torch does: from 1.18 on it needs driver 580 or newer, for an "
            "older one: pip install 'warp-lang<1.18'"
        )
    for gpu in gpus:
        if not warp.is_mempool_enabled(gpu):
            lines.append(f"{gpu.alias} has no memory pool: MuJoCo steps without a CUDA graph")
    return lines


# ---- benchmarks ----


def run_benchmarks(words: list[str]) -> int:
    """Run benchmarks/throughput.py of the source tree with the arguments `words`, then
    benchmarks/kernels.py with those that it has, too; returns the exit code. Results go to
    OWN_RESULTS unless --out names another folder.
    """
    # benchmarks/ is no part of the installed package
    sys.path.insert(0, str(_source_tree()))
    throughput = importlib.import_module("benchmarks.throughput")
    kernels = importlib.import_module("benchmarks.kernels")
    options = throughput.parse(words, prog="gpurl bench", out=OWN_RESULTS)
    words = ["--out", str(options.out), *words]
    if code := throughput.main(words):
        return code
    if options.ladder:
        return 0
    seconds = ["--seconds", str(options.seconds)] if "--seconds" in words else []
    return kernels.main(["--device", options.device, "--out", str(options.out), *seconds])


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
