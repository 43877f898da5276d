"""Running out of memory, wherever it happens, is told with what helps, and costs no more than
the iteration it happened in.
"""

import importlib
import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpurl.algorithms.ppo import PPO, PPOConfig
from gpurl.algorithms.sac import SAC
from gpurl.api import resume, train
from gpurl.buffers.replay import Replay
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.engine.cpu_ppo import PpoInC
from gpurl.engine.graphs import WARM_UPS
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.envs.pendulum import Pendulum
from gpurl.envs.registry import make_env
from gpurl.errors import CheckpointError, EnvError, UsageError
from gpurl.guards.contract import reset_env, step_env
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.memory_errors import is_out_of_memory
from gpurl.run import out_of_memory
from gpurl.run.out_of_memory import (
    explain_out_of_memory,
    explanation,
    requested_bytes,
)
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer
from gpurl.run.trainer import Trainer
from tests.fake_graphs import FakeGraphs
from tests.numpy_envs import Tour
from tests.small_runs import ITERATION, SMALL, exit_code, small_run, small_settings

TOLD_BY_TORCH = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.72 GiB of "
    "which 1.25 GiB is free.\n"
    "Including non-PyTorch memory, this process has 137.50 GiB memory in use."
)
CPU = torch.device("cpu")
CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 64 bytes."
)
WARP_SAYS = "Failed to allocate 4096 bytes on device 'cuda:0'"
ITS_OWN = "robot arm: out of memory of motor driver"


class Failing:
    """A function's stand-in that runs out of memory when it is called for the n-th time."""

    def __init__(
        self, function: Any, at: int, error: type[Exception] = torch.OutOfMemoryError
    ) -> None:
        self.function, self.left, self.error = function, at, error

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error(TOLD_BY_TORCH)
        return self.function(*arguments, **named)

    def __get__(self, owner: Any, kind: Any) -> Any:
        return (
            self if owner is None else lambda *arguments, **named: self(owner, *arguments, **named)
        )


def fail(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    at: int = 1,
    error: type[Exception] = torch.OutOfMemoryError,
) -> None:
    patch.setattr(owner, name, Failing(getattr(owner, name), at, error))


def test_the_bytes_of_a_request_by_hand() -> None:
    assert requested_bytes(TOLD_BY_TORCH) == int(2.5 * 2**30)
    assert requested_bytes("Tried to allocate 512 bytes.") == 512
    assert requested_bytes("DefaultCPUAllocator: can't allocate memory") == 0
    assert (requested_bytes(CPU_SAYS), requested_bytes(WARP_SAYS)) == (64, 4096)
    assert (
        requested_bytes(
            "Unable to allocate 2.00 TiB for an array with shape (549755813888,) and data type "
            "float32"
        )
        == 2 << 40
    )


@pytest.mark.parametrize("words", [WARP_SAYS, CPU_SAYS, ITS_OWN])
@pytest.mark.parametrize("call", ["__init__", "reset", "step"])
def test_an_environment_s_words_are_memory_where_an_allocator_says_them(
    call: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise RuntimeError(words)

    def play() -> None:
        with explain_out_of_memory(make_settings("ppo", "pendulum", **SMALL), CPU):
            env = make_env("pendulum", 16)
            reset_env(env)
            step_env(env, torch.zeros(16, 1))

    monkeypatch.setattr(Pendulum, call, runs_out)
    expected, text = (
        (EnvError, rf"Pendulum\.{call} raised RuntimeError: {ITS_OWN} \(")
        if words == ITS_OWN
        else (UsageError, "^out of memory")
    )
    with pytest.raises(expected, match=text):
        play()


def test_a_resume_that_does_not_fit_in_memory_is_told_apart_from_a_checkpoint_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_run(tmp_path / "run", 1, eval_episodes=0)
    with monkeypatch.context() as patch:
        fail(patch, PPO, "load_state_dict")
        with pytest.raises(UsageError, match=r"^out of memory on cpu"):
            resume(tmp_path / "run", total_steps=2 * ITERATION)
    fail(monkeypatch, Pendulum, "load_state_dict", error=ZeroDivisionError)
    with pytest.raises(
        CheckpointError,
        match=r"(?s)does not fit this run: Pendulum\.load_state_dict raised ZeroDivisionError: "
        r".*\.py:\d+: ",
    ):
        resume(tmp_path / "run", total_steps=2 * ITERATION)


def test_what_counts_as_running_out() -> None:
    for words in (
        CPU_SAYS,
        WARP_SAYS,
        "CUDA error: out of memory\nCUDA kernel errors might ...",
        "Triton Error [CUDA]: out of memory",
    ):
        assert is_out_of_memory(RuntimeError(words))
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError(ITS_OWN))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(UsageError("no"))
    for words in ("memory", ""):  # Python's own says nothing
        assert "What failed: MemoryError: " in explanation(
            MemoryError(words), 4096, PPOConfig(), CPU, None
        )
    dealt_with = ValueError("a typo")
    dealt_with.__context__ = MemoryError()
    assert not is_out_of_memory(dealt_with)
    dealt_with.__cause__ = MemoryError()
    assert is_out_of_memory(dealt_with)
    round_about = RuntimeError("a")
    round_about.__cause__ = RuntimeError("b")
    round_about.__cause__.__cause__ = round_about
    assert not is_out_of_memory(round_about)
    broken = RuntimeError("capture failed")
    broken.__context__ = torch.OutOfMemoryError(TOLD_BY_TORCH)
    assert is_out_of_memory(broken)
    broken.__suppress_context__ = True  # raised from None: it was dealt with
    assert not is_out_of_memory(broken)
    broken.__suppress_context__ = False
    message = r"2\.5 GiB requested.*What failed: OutOfMemoryError: CUDA"
    with (
        pytest.raises(UsageError, match=message),
        explain_out_of_memory(make_settings("ppo", "pendulum"), CPU),
    ):
        raise broken
    with (
        pytest.raises(RuntimeError, match="shapes"),
        explain_out_of_memory(make_settings("ppo", "pendulum"), CPU),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


class Large(Tour):
    """A numpy environment that wants more than there is."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.want("__init__")

    def want(self, place: str) -> None:
        if self.where == place:
            np.empty((1 << 40, 1 << 10))

    def reset(self, **options: Any) -> Any:
        self.want("reset")
        return super().reset(**options)

    def step(self, action: np.ndarray) -> Any:
        self.want("step")
        return super().step(action)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_a_numpy_environment_that_is_too_large_is_no_broken_one(
    where: str, vectorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Large, "where", where)

    def play() -> None:
        with explain_out_of_memory(make_settings("ppo", "pendulum", **SMALL), CPU):
            env = GymnasiumCpu(2, env=Large, vectorization=vectorization)
            reset_env(env)
            step_env(env, torch.zeros(2, 1))

    with pytest.raises(
        UsageError,
        match=r"^out of memory on cpu, 8,388,608\.0 GiB requested.*Unable to allocate "
        r"8\.00 PiB",
    ):
        play()
    assert multiprocessing.active_children() == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_workers_that_may_be_started_again_are_where_memory_ran_out_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Large, "where", "step")
    env = GymnasiumCpu(2, env=Large, vectorization="async", restart_workers=1)
    env.reset(seed=0)
    assert not env.step(torch.zeros(2, 1)).info["valid"].any()
    with pytest.raises(MemoryError, match=r"environment \d in step: Unable to allocate"):
        env.step(torch.zeros(2, 1))
    assert multiprocessing.active_children() == []


PLACES = {
    "environment": (
        "gpurl.run.setup.make_env",
        2,
    ),  # the one that trains: the first is of an evaluation
    "algorithm": ("gpurl.run.setup.make_algorithm", 1),
    "buffer": (PPO, "make_buffer", 1),
    "reset": (Pendulum, "reset", 2),
    "step": (Pendulum, "step", 3),
    "first update": (PpoInC, "learn", 1),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_wrong_use_that_says_what_would_fit(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(out_of_memory, "used_and_free", lambda device, known: (6 * 2**30, 2**30))
    where = PLACES[place]
    if isinstance(where[0], str):
        module, name = where[0].rsplit(".", 1)
        fail(monkeypatch, importlib.import_module(module), name, where[1])
    else:
        fail(monkeypatch, *where)
    words = [
        "num_envs=4096",
        "horizon=4",
        "eval_episodes=1",
        "device=cpu",
        "threads=1",
        "network.hidden=8",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert exit_code(["train", "ppo", "pendulum", *words]) == 2
    message = capsys.readouterr().err
    assert re.search(
        r"gpurl: out of memory on cpu, 2\.5 GiB requested, 1\.0 GiB free besides 6\.0 GiB "
        r"used by this run",
        message,
    )
    assert "num_envs less than 4,096; horizon" in message
    assert "horizon less than 4 or minibatches more than" in message
    assert (
        "What failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB." in message
    )
    assert "Traceback" not in message


def test_the_parts_of_a_run_are_told_and_the_error_is_chained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, SAC, "critic_target")
    settings = (
        SMALL
        | small_settings("sac")
        | {
            "horizon": 2,
            "total_steps": 10**4,
            "run_dir": str(tmp_path / "run"),
            "replay_size": 2**20,
        }
    )
    settings.pop("minibatches"), settings.pop("network")
    with pytest.raises(
        UsageError,
        match=r"replay 0\.\d GiB.*replay_size less than 1,048,576 \(or storage bfloat16\); "
        r"batch_size less than 8",
    ) as message:
        train("sac", "pendulum", **settings)
    assert isinstance(message.value.__cause__, torch.OutOfMemoryError)


def test_a_capture_that_does_not_fit_is_no_reason_to_go_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = make_settings("ppo", "pendulum", **SMALL, threads=1)
    with no_host_syncs():
        trainer = make_trainer(settings, CPU, backend=FakeGraphs())
        trainer.start()
        for _ in range(1 + WARM_UPS):
            trainer.iterate()
        fail(monkeypatch, FakeGraphs, "capture", at=2)

        def play() -> None:
            with explain_out_of_memory(settings, CPU) as memory:
                memory.engine = trainer.engine
                trainer.iterate()

        with pytest.raises(UsageError, match="--graph off"):
            play()


def test_in_the_middle_of_training_the_state_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, PpoInC, "learn", at=4)
        with pytest.raises(UsageError, match="out of memory on cpu"):
            small_run(tmp_path / "run", 6, eval_episodes=0)
    assert load_checkpoint(tmp_path / "run")[0]["trainer"]["steps"] == 3 * ITERATION
    assert resume(tmp_path / "run").outcome.steps == 6 * ITERATION


@pytest.mark.parametrize(("owner", "name"), [(Trainer, "state"), (Replay, "mark_episode_break")])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ZeroDivisionError])
def test_what_fails_while_saving_does_not_hide_why_it_is_saved(
    owner: Any,
    name: str,
    error: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = (
        SMALL
        | small_settings("sac")
        | {"horizon": 2, "total_steps": 10**4, "run_dir": str(tmp_path / "run"), "eval_episodes": 0}
    )
    settings.pop("minibatches"), settings.pop("network")
    fail(monkeypatch, Pendulum, "step", at=6)  # in the middle of a rollout
    fail(monkeypatch, owner, name, error=error)
    with pytest.raises(UsageError, match="out of memory on cpu") as message:
        train("sac", "pendulum", **settings)
    assert isinstance(message.value.__cause__, torch.OutOfMemoryError)
    assert "warning: no checkpoint at step 64: " in capsys.readouterr().err


def test_a_checkpoint_that_finds_no_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(monkeypatch, Trainer, "state", at=2)
    run = small_run(tmp_path / "run", 4, save_every="1i", eval_episodes=0)
    assert run.outcome.steps == 4 * ITERATION
    assert (
        f"warning: no checkpoint at step {2 * ITERATION}: CUDA out of memory"
        in capsys.readouterr().err
    )
