"""What goes wrong in Isaac Gym's process or on the way to it: each is told, and no process is
left.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gpurl
from gpurl.cli import doctor
from gpurl.envs import make_env
from gpurl.envs.isaac_gym import check as _isaac_gym_check
from gpurl.envs.isaac_gym import process as process_module
from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE
from gpurl.envs.isaac_gym.server import HostTensors
from gpurl.errors import EnvError, UsageError
from tests.envs.walker_oracle import FAKE

ACTION = torch.zeros(2, 1)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)


def make(task: str = "FakeCartpole", **options: Any) -> Any:
    return make_env(f"isaac_gym:{task}", 2, **options)


def fault(kind: str, at: int = 4) -> str:
    return f"env.fault={kind} env.faultStep={at}"


def is_gone(pid: int) -> bool:
    """Not even a zombie."""
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": ""}, r"isaac_gym needs a task: isaac_gym:Ant"),
        (
            {"task": "Ant", "family": "isaac"},
            r"family must be one of auto, isaacgymenvs, legged_gym, got 'isaac'",
        ),
        (
            {"task": "Ant", "pipeline": "gpu"},
            r"pipeline gpu needs a CUDA device, this run is on cpu",
        ),
        ({"task": "Ant", "max_episode_steps": 0}, r"max_episode_steps must be at least 1, got 0"),
        ({"task": "Ant", "step_timeout": 0.0}, r"above 0, got 0"),
    ],
    ids=str,
)
def test_what_is_seen_before_a_process_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_env("isaac_gym", 2, **options)


def test_no_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE)
    with pytest.raises(UsageError, match=rf"export {PYTHON_VARIABLE}="):
        make()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("/nowhere/python", r"/nowhere/python is no program"),
        (sys.prefix, r"is no program; perhaps .*bin/python"),
        (__file__, r"is no program"),
    ],
)
def test_what_is_named_is_no_program(
    named: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, named)
    with pytest.raises(UsageError, match=message):
        make()


def test_a_program_that_is_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, code in (("/bin/false", r" \(exit code 1\)"), ("/bin/true", "")):
        monkeypatch.setenv(PYTHON_VARIABLE, program)
        with pytest.raises(
            EnvError,
            match=rf"\({program}\) ended in make{code}; it printed nothing: is it a Python\?",
        ):
            make()


def test_nothing_can_be_done_after_the_end() -> None:
    env = make()
    env.reset()
    env.close()
    uses: list[Callable[[], Any]] = [
        lambda: env.step(ACTION),
        env.reset,
        lambda: env.reset(options={"reset_mask": torch.tensor([True, False])}),
        lambda: env.stagger(torch.arange(2)),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="has ended: make a new environment"):
            use()


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(
        UsageError,
        match=r"Python \S+ at \S+ cannot import isaacgym: ModuleNotFoundError.*Preview 4",
    ):
        make()
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{FAKE}")
    searched_first = rf"PYTHONPATH, which is searched first, is {tmp_path}:{FAKE}"
    with pytest.raises(
        UsageError,
        match=rf"cannot import torch: ImportError: libcudart is missing; .*{searched_first}",
    ):
        make()


def test_doctor_asks_the_python_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.report()
    (line,) = [line for line in report.splitlines() if "Isaac Gym has" in line]
    assert line.endswith(
        f"torch {torch.__version__}, CUDA {torch.cuda.is_available()}, isaacgymenvs with 9 tasks, "
        f"legged_gym with 1 tasks"
    )
    how = "CUDA IPC" if torch.cuda.is_available() else "shared memory"
    assert f"  Isaac Gym's process and this one: {how} works\n" in report
    monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    expected = rf"isaac_gym: missing: {PYTHON_VARIABLE} must be .*; /nowhere/python is no program"
    assert re.search(expected, doctor.report())
    monkeypatch.setenv(PYTHON_VARIABLE, "/bin/false")
    assert (
        "Isaac Gym cannot run: Isaac Gym's process (/bin/false) ended in describe (exit code 1)"
        in doctor.report()
    )
    monkeypatch.delenv(PYTHON_VARIABLE)
    assert (
        f"isaac_gym: missing: the Python 3.6 to 3.8 that has it; name it in {PYTHON_VARIABLE}"
        in doctor.report()
    )


def test_doctor_tells_what_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherMemory(HostTensors):
        def __init__(self, layout: Any, memory_file: int) -> None:
            super().__init__(layout, os.memfd_create("another"))

    monkeypatch.setattr(_isaac_gym_check, "HostTensors", OtherMemory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.match(
        r"shared memory does not work: wanted \[2\.0, 4\.0, .*\] .*, got \[0\.0, 0\.0,",
        _isaac_gym_check.describe()[1],
    )

    def refused(*_: Any) -> None:
        raise RuntimeError("cudaIpcGetMemHandle failed: operation not supported")

    monkeypatch.setattr(_isaac_gym_check, "HostTensors", refused)
    message = _isaac_gym_check.describe()[1]
    assert (
        message
        == "shared memory does not work: cudaIpcGetMemHandle failed: operation not supported"
    )


@pytest.mark.parametrize(
    ("task", "options", "kind", "message"),
    [
        (
            "FakeCartpol",
            {},
            UsageError,
            r"no Isaac Gym task 'FakeCartpol'; did you mean FakeCartpole or .*Known: "
            r".*walker_rough",
        ),
        (
            "FakeCartpole",
            {"overrides": "env.episodeLenght=5"},
            UsageError,
            r"episodeLenght=5.*is not in struct",
        ),
        (
            "walker_rough",
            {"overrides": "env.lenght=5"},
            UsageError,
            r"no 'env.lenght'; known there: episode_length, fault",
        ),
        ("FakeAmp", {}, UsageError, r"FakeAmp: tasks of AMP"),
        (
            "FakeDextreme",
            {},
            UsageError,
            r"FakeDextreme: tasks with a dict of observations.*: dof_pos, goal_pose",
        ),
        ("FakeBase", {}, UsageError, r"no Isaac Gym task 'FakeBase'"),
        (
            "FakeKuka",
            {"overrides": "env.subtask=throw"},
            EnvError,
            r"failed in make: ValueError: Unknown subtask=throw in \['lift'\]; its last lines:",
        ),
        (
            "FakeAssets",
            {},
            EnvError,
            r"failed in make: OSError: asset not found: walkers.urdf; its last lines:\n  Traceback",
        ),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_made(
    task: str, options: dict[str, Any], kind: type, message: str
) -> None:
    with pytest.raises(kind, match=message):
        make(task, **options)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raise",
            r"failed in step: RuntimeError: the walkers stumbled; its last "
            r"lines:(?s:.*)simulated_walkers.py",
        ),
        ("segfault", r"ended in step \(signal SIGSEGV\); its last lines:(?s:.*)Segmentation fault"),
        (
            "hang",
            r"did not return from step within 1 seconds(?s:.*)about to "
            r"hang(?s:.*)simulated_walkers.py",
        ),
    ],
)
def test_a_task_that_breaks_in_a_step(how: str, message: str) -> None:
    env = make(overrides=fault(how), step_timeout=1.0)
    env.reset()
    env.step(ACTION)
    with pytest.raises(EnvError, match=message):
        env.step(ACTION)
    assert is_gone(env._simulator.process.pid)
    with pytest.raises(UsageError, match="has ended"):
        env.step(ACTION)
    env.close()


def test_a_task_that_prints_for_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "LOG_BYTES", 1 << 20)
    monkeypatch.setattr(process_module, "CALLS_BETWEEN_LOG_CHECKS", 2)
    env = make(overrides=fault("print", at=1))
    env.reset()
    sizes = []
    for _ in range(20):  # 300 kB each
        env.step(ACTION)
        sizes.append(os.fstat(env._simulator._log.fileno()).st_size)
    assert 300_000 < max(sizes) < 2_000_000
    os.kill(env._simulator.process.pid, signal.SIGKILL)
    with pytest.raises(
        EnvError, match=r"ended in step \(signal SIGKILL\); its last lines:\n.*noise"
    ):
        env.step(ACTION)


def test_a_simulator_that_is_killed_leaves_no_memory_and_no_descriptors() -> None:
    def open_resources() -> tuple[list[str], list[str]]:
        gc.collect()
        links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sorted(str(link.readlink()) for link in links if link.is_symlink()), sorted(
            os.listdir("/dev/shm")
        )

    before = open_resources()
    env = make()
    env.reset()
    env._simulator.process.kill()
    with pytest.raises(EnvError, match=r"signal SIGKILL"):
        env.step(ACTION)
    env.close()
    del env
    assert open_resources() == before


def test_a_trainer_that_is_killed_takes_a_stuck_simulator_with_it() -> None:
    code = (
        "import torch\nfrom gpurl.envs import make_env\n"
        f"env = make_env('isaac_gym:FakeCartpole', 2, "
        f"overrides='{fault('hang')}')\nenv.reset()\nenv.step(torch.zeros(2, 1))\n"
        "print(env._simulator.process.pid, flush=True)\nenv.step(torch.zeros(2, 1))\n"
    )
    root = Path(gpurl.__file__).resolve().parent.parent
    variables = {**os.environ, "PYTHONPATH": f"{root}:{FAKE}"}
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=variables
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    time.sleep(0.5)
    assert not is_gone(pid)
    trainer.kill()
    trainer.communicate()
    deadline = time.monotonic() + 10.0
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(pid)


def test_a_run_whose_simulator_is_killed_is_saved_and_goes_on(tmp_path: Path) -> None:
    small = {
        "num_envs": 8,
        "horizon": 8,
        "minibatches": 2,
        "eval_episodes": 0,
        "quiet": True,
        "threads": 1,
    }
    options = {"max_episode_steps": 6, "overrides": fault("kill", at=100)}
    with pytest.raises(
        EnvError, match=r"'isaac_gym:FakeHand' at env step \d+: .* ended in step \(signal SIGKILL\)"
    ) as broken:
        gpurl.train(
            "ppo",
            "isaac_gym:FakeHand",
            run_dir=str(tmp_path / "run"),
            total_steps=1600,
            env_options=options,
            **small,
        )
    assert broken.value.exit_code == 3
    run = gpurl.resume(tmp_path / "run", env_options={"overrides": ""}, eval_episodes=8)
    assert run.outcome.reason == "total_steps"
    assert run.outcome.evaluation["eval/mean_ep_length"] <= 6
    assert run.outcome.steps == 1600


def test_settings_of_this_torch_do_not_reach_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch before 2.1 ends with "Unrecognized CachingAllocator option: expandable_segments"."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    monkeypatch.setenv("ANOTHER", "1")
    variables = process_module._environment(sys.executable, None)
    assert not [name for name in variables if "ALLOC_CONF" in name]
    assert variables["ANOTHER"] == "1"
