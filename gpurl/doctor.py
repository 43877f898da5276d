"""Says what this machine has, what it lacks and how to get it; lists the environments; starts the benchmarks."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path

from gpurl.errors import UsageError

PACKAGES = ("gpurl", "torch", "triton", "numpy", "gymnasium", "tyro", "rich", "safetensors", "tensorboard", "matplotlib")
SIMULATORS = {  # module: (what it brings, how to get it)
    "envpool": ("gymnasium_cpu with --env.vectorization envpool", "pip install 'gpurl[envpool]'"),
    "mujoco": ("Gymnasium's MuJoCo tasks", "pip install 'gymnasium[mujoco]'"),
    "Box2D": ("Gymnasium's Box2D tasks", "pip install 'gymnasium[box2d]'"),
    "ale_py": ("Atari tasks", "pip install 'gymnasium[atari]'"),
    "minari": ("datasets for gpurl train bc --dataset minari:ID", "pip install 'gpurl[minari]'"),
}


def report() -> str:
    """The whole report, ending with what to do where something is missing."""
    return "\n".join(["versions", *_versions(), "", "devices", *_devices(), "", "simulators and datasets", *_simulators()])


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
    waits = os.environ.get("OMP_WAIT_POLICY") or f"with spin count {os.environ.get('GOMP_SPINCOUNT')}"
    lines = [f"  {cpus} CPU cores, torch uses {torch.get_num_threads()} threads, OpenMP waits {waits}", _cpu_kernels()]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            lines.append(f"  cuda:{index} {properties.name}, {memory}, compute {properties.major}.{properties.minor}")
        return lines
    if torch.version.cuda is None:
        advice = (
            "this torch is a CPU build: install torch 2.13.0 for CUDA to use a GPU"
            if shutil.which("nvidia-smi")
            else "no NVIDIA driver found; the CPU is used"
        )
    else:
        advice = f"torch is built for CUDA {torch.version.cuda}, but sees no device: check the driver with nvidia-smi"
    return [*lines, f"  no CUDA device: {advice}"]


def _cpu_kernels() -> str:
    from gpurl.kernels import c_library

    functions, why = c_library.load()
    return f"  CPU kernels: {why if functions is not None else f'torch serves instead, which is slower: {why}'}"


def _simulators() -> list[str]:
    lines = ["  built in: torch-native tasks, Gymnasium's classic control"]
    for module, (brings, how) in SIMULATORS.items():
        found = importlib.util.find_spec(module) is not None
        lines.append(f"  {module}: {'there' if found else 'missing'} ({brings}{'' if found else '; get it by ' + how})")
    return lines


def env_table() -> str:
    """One line an environment: spaces, time limit, options."""
    from gpurl.envs.registry import env_names, env_options, make_env, resolve_env

    lines = []
    for name in env_names():
        env_class, _ = resolve_env(name)
        options = env_options(env_class)
        if "task" in options:
            lines.append(f"{name}:TASK\n    {(env_class.__doc__ or '').splitlines()[0]}")
            continue
        try:
            env = make_env(name, 1)
        except UsageError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            lines.append(f"{name}\n    {error}")
            continue
        own = ", ".join(f"{key}={option.default}" for key, option in options.items() if key != "max_episode_steps")
        agents = f"{env.num_agents} agents, " if env.num_agents > 1 else ""
        limit = "no time limit" if env.max_episode_steps is None else f"{env.max_episode_steps} steps"
        lines.append(
            f"{name}\n    {agents}observation {env.single_observation_space.shape}, action {env.single_action_space}, "
            f"{limit}{', options: ' + own if own else ''}"
        )
    lines.append("or the module path of your own (README: an environment of your own)")
    return "\n".join(lines)


def run_benchmarks(words: list[str]) -> int:
    """Run benchmarks/throughput.py and benchmarks/kernels.py of the source tree; `words` go to both."""
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
    root = Path(__file__).resolve().parent.parent
    script = root / "benchmarks" / "throughput.py"
    if not script.is_file():
        raise UsageError(f"the benchmarks are in the source tree only, there is no {script}; clone the project and run make bench")
    return root
