"""What --deterministic switches on and puts back, what it refuses, and that no algorithm's GPU path
holds what it would refuse.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.engine.determinism import WORKSPACE, deterministic, nondeterminism_warning
from gpurl.envs.registry import make_env
from gpurl.errors import UsageError
from tests.small_runs import assert_same, small_run, state_of
from tests.tools.counters import CASES, recorded


def test_no_operation_on_a_gpu_depends_on_the_order_of_threads() -> None:
    """Of any algorithm, as tests/tools/test_counters.py counts them."""
    record = recorded()
    # by default members train in turn with it
    alone = [case for case, (_, _, changes) in CASES.items() if "population" not in changes]
    assert [record[f"gpu {case}"]["unordered"] for case in alone] == [0] * len(alone)


def state() -> list[Any]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    ]


def test_everything_is_as_it_was_afterwards() -> None:
    before = state()
    with deterministic(True):
        assert state() == [True, False, False, False]
    assert state() == before
    with pytest.raises(ZeroDivisionError), deterministic(True):
        raise ZeroDivisionError
    assert state() == before
    with deterministic(False):
        assert state() == before


def test_two_runs_have_the_same_bits_and_threads_are_not_chosen_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "gpurl.run.setup._fastest_threads", lambda model: seen.append("measured") or 1
    )
    folders = [
        small_run(tmp_path / name, 3, deterministic=True, threads=None).folder for name in "ab"
    ]
    assert not seen
    assert_same(*(state_of(folder) for folder in folders))
    small_run(tmp_path / "c", 1, threads=None)
    assert seen == ["measured"]


def test_an_operation_without_a_deterministic_form_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self: Any) -> Any:
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError(
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set ..."
        )

    monkeypatch.setattr("gpurl.engine.eager.Eager.prepare", prepare)
    with pytest.raises(
        UsageError,
        match="--deterministic: cumsum_cuda_kernel does not have a deterministic implementation; "
        "train without --deterministic, or without the setting",
    ):
        small_run(tmp_path / "run", 1, deterministic=True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_cublas_gets_its_workspace_before_it_starts_or_the_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with deterministic(True):
        assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with deterministic(True):  # what cuBLAS was started with serves the next run of the process too
        assert os.environ[WORKSPACE] == ":4096:8"
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with (
        pytest.raises(
            UsageError, match=f"needs {WORKSPACE}=:4096:8 .*got :0:0: set it before Python starts"
        ),
        deterministic(True),
    ):
        raise AssertionError


def test_a_simulator_on_a_gpu_may_differ() -> None:
    ours, simulator = make_env("chasing", 2), make_env("gymnasium_cpu:CartPole-v1", 2)
    assert not nondeterminism_warning(simulator)
    ours.device = simulator.device = torch.device("cuda", 0)
    assert not nondeterminism_warning(ours)
    assert "GymnasiumCpu simulates on the GPU" in nondeterminism_warning(simulator)
    simulator.close()
