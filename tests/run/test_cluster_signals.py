"""What a scheduler or the end of a terminal sends: the run is saved, and ends or goes on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpurl.algorithms.base import Metrics
from gpurl.api import resume
from gpurl.checkpoints.folders import list_checkpoints
from gpurl.run.callbacks import Callback, RunView
from gpurl.run.interrupt import StopRequest
from tests.small_runs import ITERATION, small_run


class Caller(Exception):
    """What the caller's own handler raises."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Those of a caller, since the default ones would end the tests."""

    def on_signal(number: int, frame: object) -> None:
        raise Caller(number)

    numbers = (signal.SIGHUP, signal.SIGXCPU)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    before[signal.SIGUSR1] = signal.getsignal(signal.SIGUSR1)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Sends(Callback):
    """A signal in the second iteration, as often as systems send it."""

    def __init__(self, number: int, times: int = 1) -> None:
        self.number = number
        self.times = times

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        if run.iteration == 2:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU], ids=lambda each: each.name)
def test_the_end_of_a_terminal_or_of_the_processor_time_saves_and_ends(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Twice: a kernel and a shell both send SIGHUP, and SIGXCPU comes every second."""
    with pytest.raises(Caller, match=str(int(number))):
        small_run(tmp_path / "run", 4, callbacks=[Sends(number, times=2)], eval_episodes=0)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_000000000256"]
    assert resume(tmp_path / "run").outcome.steps == 4 * ITERATION


def test_sigusr1_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 4, callbacks=[Sends(signal.SIGUSR1)], eval_episodes=0)
    assert (run.outcome.reason, run.outcome.signal_number) == ("total_steps", None)
    names = [path.name for path in list_checkpoints(tmp_path / "run")]
    assert names == ["step_000000000256", "step_000000000512"]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_what_the_caller_ignores_or_handles_himself_stays() -> None:
    """`nohup` and a shell's `&` ignore signals; a caller's SIGUSR1 may requeue a job."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def own(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, own)
    try:
        with StopRequest() as stop:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert signal.getsignal(signal.SIGUSR1) is own
        assert (stop.signal_number, stop.wants_save) == (None, False)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_with_nobody_to_read_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = os.dup(2)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.dup2(saved, 2)
        os.close(full)
        os.close(saved)
    assert (stop.signal_number, stop.wants_save) == (signal.SIGTERM, True)


def test_workers_leave_signals_to_the_trainer_and_have_one_thread() -> None:
    from gpurl.envs.gymnasium_cpu import GymnasiumCpu
    from tests.numpy_envs import Tour

    class Asked(Tour):
        def reset(self, **kwargs: object) -> object:
            for number in (signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGINT):
                os.kill(os.getpid(), number)
            assert torch.ones(1 << 22).exp().sum() > 1.0  # with two threads a fork waits forever
            return super().reset(**kwargs)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.ones(1 << 22).exp().sum() > 1.0
    try:
        with StopRequest():
            env = GymnasiumCpu(2, vectorization="async", env=Asked, worker_timeout=30)
            env.reset()
            env.close()
    finally:
        torch.set_num_threads(before)
