"""Who writes when in the tensors that two processes share: seen by the order of calls, as on a CPU
nothing could go wrong.
"""

import contextlib
import ctypes
import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpurl.envs import make_env
from gpurl.envs.isaac_gym import server as isaac_gym_server
from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE
from tests.envs.walker_oracle import FAKE

ORDERED = ("reset", "restart", "set_clocks", "step")


class Recorder:
    """Takes any call and keeps its name; as `shared`, too."""

    def __init__(self, calls: list[str]) -> None:
        self._calls, self.shared = calls, self

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self._calls.append(name)


def test_the_simulator_waits_before_and_tells_after_all_that_touches_the_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after calls that only read: the trainer may write there again."""
    calls: list[str] = []
    monkeypatch.setattr(isaac_gym_server, "Simulation", lambda: Recorder(calls))
    ours, theirs = socket.socketpair()
    ours.sendall(
        b"".join(json.dumps({"call": name}).encode() + b"\n" for name in (*ORDERED, "close"))
    )
    isaac_gym_server.serve(theirs)
    assert calls == [call for name in ORDERED for call in ("take_over", name, "hand_over")]
    assert ours.recv(1000).count(b"result") == 4


def test_the_trainer_waits_before_it_writes_and_tells_before_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    env: Any = make_env("isaac_gym:FakeCartpole", 2)
    calls: list[str] = []
    shared, original_call = env._shared, env._simulator.call

    def recorded_call(name: str, *rest: Any, **arguments: Any) -> Any:
        calls.append(name)
        return original_call(name, *rest, **arguments)

    env._simulator.call, env._shared = recorded_call, Recorder(calls)
    env.reset()
    env.reset(options={"reset_mask": torch.tensor([True, False])})
    env.stagger(torch.arange(2))
    env.step(torch.zeros(2, 1))
    reads = {"reset": ["take_over"], "step": ["take_over"]}
    assert calls == [
        call for name in ORDERED for call in ("take_over", "hand_over", name, *reads.get(name, []))
    ]
    env._shared = shared
    env.close()


class FakeRuntime(Recorder):
    """CUDA's runtime, which must be called under the right device."""

    def __init__(self, calls: list[str], current: list[int]) -> None:
        super().__init__(calls)
        self._current = current

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> int:
            assert self._current[-1] == 1, name
            self._calls.append(name)
            if name == "cudaMalloc":
                arguments[0]._obj.value = 1 << 12
            return 0

        return called


def test_shared_gpu_memory_is_zero_before_the_other_side_has_it_and_streams_are_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, current = [], [0]  # type: list[str], list[int]

    @contextlib.contextmanager
    def device(expected: torch.device) -> Iterator[None]:
        current.append(expected.index)
        yield
        current.pop()

    class Stream:
        cuda_stream = 0
        synchronize = staticmethod(lambda: None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeRuntime(calls, current))
    shared = isaac_gym_server.CudaTensors(isaac_gym_server.layout_of(2, 3, 0, 1), "cuda:1")
    assert calls[:3] == ["cudaMalloc", "cudaMemset", "synchronize"]
    shared.hand_over()
    shared.take_over()
    assert calls[-2:] == ["cudaEventRecord", "cudaStreamWaitEvent"]
    shared.close()
    assert calls[-3:] == ["cudaFree", "cudaEventDestroy", "cudaEventDestroy"]
    assert current == [0]
