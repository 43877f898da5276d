"""Worker processes of a CPU vector environment that die, crash or hang: who it was, how it goes on,
and that nothing is left behind.
"""

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.api import train
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.envs.gymnasium_cpu import GymnasiumCpu
from gpurl.errors import EnvError, UsageError
from tests.numpy_envs import Tour

FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "exit": (lambda: os._exit(7), r"worker process of environment 1 \(exit code 7\) died in step$"),
    "kill": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        r"worker process of environment 1 \(signal SIGKILL\) died in step$",
    ),
    "crash": (
        lambda: ctypes.string_at(0),
        r"(?s)environment 1 \(signal SIGSEGV\) died in step; its last traceback:\nFatal Python "
        r"error: Segmentation fault\n"
        r".*in string_at\n.*test_worker_faults.py\", line \d+ in step\n[^\n]*vector.py\", "
        r"line \d+ in step$",
    ),
    "sys.exit": (
        lambda: sys.exit(3),
        r"(?s)environment 1 failed in step: SystemExit: 3 \(.*\)\nTraceback.*sys\.exit\(3\)",
    ),
    "hang": (
        lambda: time.sleep(60.0),
        r"environment 1 did not return from step within 0.5 s, .* worker_timeout",
    ),
}


class Faulty(Tour):
    """Never ends an episode by itself; an action of (k + 0.5) / 10 is the k-th fault."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if action[0] > 0.0:
            list(FAULTS.values())[int(10.0 * action[0])][0]()
        return *super().step(action)[:2], False, False, {}


def make(**options: Any) -> GymnasiumCpu:
    env = GymnasiumCpu(3, env=Faulty, vectorization="async", **options)
    env.reset(seed=0)
    env.step(torch.zeros(3, 1))
    return env


def actions(fault: str, *rows: int) -> Tensor:
    values = torch.zeros(3, 1)
    values[list(rows)] = (0.5 + list(FAULTS).index(fault)) / 10.0
    return values


def open_resources() -> tuple[list[str], list[str], list[Any]]:
    """(open file descriptors, files in shared memory, child processes)."""
    gc.collect()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return (
        sorted(str(link.readlink()) for link in links if link.is_symlink()),
        sorted(os.listdir("/dev/shm")),
        multiprocessing.active_children(),
    )


@pytest.fixture
def _nothing_left() -> Iterator[None]:
    make().close()  # Python keeps one block of shared memory for the next user
    before = open_resources()
    yield
    assert open_resources() == before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("_nothing_left")
def test_a_worker_that_fails_is_named_with_its_end(fault: str) -> None:
    env = make(worker_timeout=0.5 if fault == "hang" else None)
    with pytest.raises(EnvError, match=FAULTS[fault][1]):
        env.step(actions(fault, 1))
    env.close()


@pytest.mark.usefixtures("_nothing_left")
def test_workers_that_die_together_are_named_as_ranges() -> None:
    env = GymnasiumCpu(5, env=Faulty, vectorization="async")
    for index in (0, 1, 2, 4):
        env._env.processes[index].kill()  # type: ignore[attr-defined]
        env._env.processes[index].join()  # type: ignore[attr-defined]
    with pytest.raises(
        EnvError,
        match=r"the worker process of environments 0-2, 4 \(signal SIGKILL\) died in reset$",
    ):
        env.reset(seed=0)
    env.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fault", ["kill", "hang", "sys.exit"])
@pytest.mark.usefixtures("_nothing_left")
def test_workers_are_started_again_as_often_as_allowed(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = make(restart_workers=2, worker_timeout=0.5)
    good = env.step(torch.zeros(3, 1))
    assert good.info["valid"].all()
    assert good.info["episode"]["l"].tolist() == [2, 2, 2]
    seen = []
    for count in (1, 2):
        broken = env.step(actions(fault, 1))
        assert not broken.info["valid"].any()
        assert not (broken.terminated | broken.truncated | broken.info["_episode"]).any()
        assert torch.equal(broken.info["final_obs"], broken.obs)
        assert broken.obs[:, 1].tolist() == [0.0, 0.0, 0.0]  # the first of new episodes
        assert broken.reward.tolist() == [0.0, 0.0, 0.0]
        seen.append(broken.obs)
        (message,) = [record.getMessage() for record in caplog.records if record.name == "gpurl"][
            count - 1 :
        ]
        assert f"all 3 workers are restarted ({count} of 2 times)" in message
        after = env.step(torch.zeros(3, 1))
        assert after.info["valid"].all()
        assert after.info["episode"]["l"].tolist() == env.episode_length_buf.tolist() == [1, 1, 1]
    assert (
        len(torch.cat(seen)[:, 0].unique()) == 6
    )  # other episodes each time, and in each environment
    with pytest.raises(EnvError, match=FAULTS[fault][1]):
        env.step(actions(fault, 1))
    env.close()


@pytest.mark.usefixtures("_nothing_left")
def test_a_reset_starts_dead_workers_again_too() -> None:
    env = make(restart_workers=1)
    env._env.processes[2].kill()  # type: ignore[attr-defined]
    obs, _ = env.reset(seed=0)
    assert obs[:, 1].tolist() == [0.0, 0.0, 0.0]
    assert env.step(torch.zeros(3, 1)).info["valid"].all()
    env.close()


@pytest.mark.usefixtures("_nothing_left")
def test_a_reset_of_some_starts_dead_workers_again_and_the_others_break_off_in_the_next_step() -> (
    None
):
    env = make(restart_workers=1)
    before = env.step(torch.zeros(3, 1)).obs
    env._env.processes[2].kill()  # type: ignore[attr-defined]
    obs, _ = env.reset(options={"reset_mask": torch.tensor([True, False, False])})
    assert obs[0, 1] == 0.0
    assert torch.equal(obs[1:], before[1:])
    again, _ = env.reset(options={"reset_mask": torch.tensor([False, True, False])})
    assert torch.equal(again[[0, 2]], obs[[0, 2]])
    assert again[1, 1] == 0.0
    broken = env.step(torch.ones(3, 1))  # the action of no step
    assert not broken.info["valid"].any()
    assert not (broken.terminated | broken.truncated).any()
    assert torch.equal(broken.obs[:2], again[:2])
    assert broken.obs[:, 1].tolist() == [0.0, 0.0, 0.0]
    after = env.step(torch.zeros(3, 1))
    assert after.info["valid"].all()
    assert after.info["episode"]["l"].tolist() == env.episode_length_buf.tolist() == [1, 1, 1]
    env._env.processes[2].kill()  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match=r"environment 2 \(signal SIGKILL\) died in reset"):
        env.reset(options={"reset_mask": torch.tensor([True, False, False])})
    env.close()


@pytest.mark.usefixtures("_nothing_left")
def test_workers_outlive_the_thread_that_made_them() -> None:
    envs = list[GymnasiumCpu]()
    thread = threading.Thread(target=lambda: envs.append(make()))
    thread.start()
    thread.join()
    processes = envs[0]._env.processes  # type: ignore[attr-defined]
    assert not wait([process.sentinel for process in processes], timeout=0.2)
    assert envs[0].step(torch.zeros(3, 1)).obs[:, 1].tolist() == [2.0, 2.0, 2.0]
    envs[0].close()


def hang_in_a_thread_s_workers(pids: Any) -> None:
    envs = list[GymnasiumCpu]()
    thread = threading.Thread(target=lambda: envs.append(make()))
    thread.start()
    thread.join()
    pids.send([process.pid for process in envs[0]._env.processes])  # type: ignore[attr-defined]
    envs[0].step(actions("hang", 0, 1, 2))


def test_workers_that_a_thread_made_end_with_their_trainer() -> None:
    """The kernel's own signal would end them with the thread."""
    ours, theirs = multiprocessing.Pipe()
    trainer = multiprocessing.Process(target=hang_in_a_thread_s_workers, args=(theirs,))
    trainer.start()
    pids = ours.recv()
    trainer.kill()
    trainer.join()
    end = time.monotonic() + 300.0
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Whether it is there and no zombie, which whoever takes orphans may leave."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class MortalTour(GymnasiumCpu):
    """Three workers, of which the all die in the sixth step of the run."""

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        restart_workers: int = 0,
    ) -> None:
        super().__init__(
            num_envs,
            device,
            seed,
            vectorization="async",
            env=Faulty,
            restart_workers=restart_workers,
        )
        self.steps = 0

    def step(self, _: Tensor) -> Any:  # type: ignore[override]
        self.steps += 1
        return super().step(actions("kill", 0, 1, 2) if self.steps == 6 else torch.zeros(3, 1))


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
@pytest.mark.usefixtures("_nothing_left")
def test_a_run_goes_on_after_a_restart_and_never_learns_from_that_step(
    algorithm: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = {"ppo": "gpurl.algorithms.ppo:PPO", "sac": "gpurl.algorithms.sac:SAC"}[algorithm]
    module, name = kind.split(":")
    owner: Any = getattr(__import__(module, fromlist=[name]), name)
    valid, prepare = [], owner.prepare

    def watched(self: Any, buffer: Any) -> Any:
        valid.append(buffer["valid"].clone())
        return prepare(self, buffer)

    monkeypatch.setattr(owner, "prepare", watched)
    small: dict[str, Any] = {
        "num_envs": 3,
        "horizon": 4,
        "eval_episodes": 0,
        "quiet": True,
        "device": "cpu",
        "threads": 1,
        "log_every": 0.0,
    }
    small |= (
        {"minibatches": 1}
        if algorithm == "ppo"
        else {"batch_size": 8, "learning_starts": 8, "replay_size": 64, "save_replay": True}
    )
    env = "tests.envs.test_worker_faults:MortalTour"
    with caplog.at_level(logging.WARNING, "gpurl"):
        run = train(
            algorithm,
            env,
            run_dir=str(tmp_path / "run"),
            total_steps=36,
            env_options={"restart_workers": 1},
            **small,
        )
    assert run.outcome.steps == 36
    assert torch.cat(valid).all(1).tolist() == [step != 5 for step in range(12)]
    assert (
        len([message for message in caplog.messages if "restarted (1 of 1 times)" in message]) == 1
    )
    if algorithm == "sac":
        flags = load_checkpoint(run.folder)[0]["replay"]["flags"].view(-1, 3)[:12]
        assert ((flags & 4) > 0).all(1).tolist() == [step == 5 for step in range(12)]
    monkeypatch.setattr(owner, "prepare", prepare)
    with pytest.raises(
        EnvError,
        match=r"at env step 1[25]: the worker process of environments 0-2 \(signal SIGKILL\) died "
        r"in step",
    ):
        train(algorithm, env, run_dir=str(tmp_path / "other"), total_steps=36, **small)


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({"restart_workers": 1}, "are for vectorization async, which has workers; it is 'sync'"),
        ({"worker_timeout": 3.0}, "are for vectorization async"),
        ({"restart_workers": -1, "vectorization": "async"}, "restart_workers must be at least 0"),
        (
            {"worker_timeout": 0.0, "vectorization": "async"},
            "worker_timeout above 0, got 0 and 0.0",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            GymnasiumCpu(2, env=Tour, **options)  # type: ignore[arg-type]


def dies_when_made() -> Any:
    if multiprocessing.parent_process() is not None:
        os._exit(4)
    return Tour()


def lacks_its_model() -> Any:
    raise FileNotFoundError("no file of a model")


@pytest.mark.filterwarnings("error")  # of what Python would collect half made
def test_what_a_constructor_raises_is_told_as_it_is() -> None:
    with pytest.raises(UsageError, match="cannot be made: FileNotFoundError: no file of a model"):
        GymnasiumCpu(3, env=lacks_its_model, vectorization="async")
    gc.collect()


class WrongSize(Tour):
    observation_space = Box(-1.0, 1.0, (7,), np.float32)


@pytest.mark.usefixtures("_nothing_left")
def test_an_error_of_workers_only_leaves_none_behind() -> None:
    trainer = os.getpid()
    with pytest.raises(
        UsageError, match="cannot be made: "
    ) as kept:  # as long as it is, so is what it was raised in
        GymnasiumCpu(
            3,
            env=lambda: Tour() if os.getpid() == trainer else WrongSize(),
            vectorization="async",
        )
    assert multiprocessing.active_children() == []
    assert kept.value.__cause__ is not None


@pytest.mark.usefixtures("_nothing_left")
def test_a_worker_that_dies_when_it_is_made_is_named() -> None:
    with pytest.raises(
        UsageError,
        match=r"worker process of environments 0-2 \(exit code 4\) died in its constructor",
    ):
        GymnasiumCpu(3, env=dies_when_made, vectorization="async")
