"""gpurl profile: every phase gets its own time, operators and launches, and no other's; the trace
can be opened.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpurl.algorithms.sac import SAC
from gpurl.cli import profile as module
from gpurl.cli.main import main
from gpurl.cli.profile import Longest, Phase, Profile, Spans, profile
from gpurl.cli.profile_report import report
from gpurl.errors import UsageError
from gpurl.run.settings import make_settings
from tests.small_runs import exit_code, small_settings

SMALL = [
    "num_envs=16",
    "horizon=4",
    "minibatches=2",
    "epochs=3",
    "network.hidden=8",
    "device=cpu",
    "--iterations",
    "2",
    "--warm-up",
    "1",
]
CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def small_profile(folder: Path, algorithm: str = "ppo", **changes: Any) -> Profile:
    shape = {
        "num_envs": 16,
        "horizon": 4,
        "network": {"hidden": [8]},
        "device": "cpu",
        "root": str(folder),
    }
    return profile(
        make_settings(algorithm, "chasing", **(shape | {"minibatches": 1} | changes)),
        iterations=2,
        warm_up=1,
    )


# ---- the command ----


def test_the_command_prints_the_phases_and_writes_a_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    assert main(["profile", "ppo", "chasing", *SMALL, "--out", str(tmp_path / "deep" / "out")]) == 0
    assert torch.get_num_threads() == threads
    output, errors = capfd.readouterr()
    # torch's own profiler says on standard error that it starts and stops
    assert errors == ""
    shares = {
        name: float(share)
        for name, share in re.findall(r"^(\w+) +[\d.]+ +([\d.]+)% +\d+$", output, re.MULTILINE)
    }
    assert list(shares) == ["env", "policy", "store", "rollout", "post", "update", "other"]
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.4)
    assert min(shares["update"], shares["post"], shares["env"]) > 0
    trace = json.loads((tmp_path / "deep" / "out" / "trace.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert names.count("gpurl/env") == 2 * 4
    assert names.count("gpurl/update") == 2
    assert str(tmp_path / "deep" / "out" / "trace.json") in output


def test_every_algorithm_can_be_profiled_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for algorithm in ("ppo", "a2c"):
        result = small_profile(tmp_path, algorithm)
        assert result.trace.parent.parent == tmp_path / "profile" / "chasing" / algorithm
        assert result.trace.is_file()
        for name in ("env", "policy", "store", "post", "update"):
            assert result.phases[name].host > 0
            assert result.phases[name].operators > 0


def test_what_replays_is_profiled_as_it_runs_once_it_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acting by the policy and updating in every iteration, however far off learning_starts is."""
    drawn = []
    monkeypatch.setattr(
        SAC, "random_action", lambda self: drawn.append(1) or torch.zeros(self.num_envs, 2)
    )
    settings = small_settings("sac") | {
        "learning_starts": 10_000,
        "num_envs": 16,
        "horizon": 2,
        "device": "cpu",
        "root": str(tmp_path),
    }
    result = profile(make_settings("sac", "chasing", **settings), iterations=2, warm_up=1)
    assert not drawn
    assert (result.horizon, result.minibatches) == (2, 4)
    assert result.phases["update"].operators > 4 * result.phases["policy"].operators / 2


def test_the_profiled_steps_are_counted_and_no_others(tmp_path: Path) -> None:
    """Twice the horizon, about twice the operators of the environment, which draws random numbers
    for several steps at once.
    """
    short, long = (
        small_profile(tmp_path, horizon=horizon).phases["env"].operators for horizon in (8, 16)
    )
    assert 1.8 * short < long < 2.2 * short
    settings = make_settings(
        "ppo", "chasing", num_envs=16, horizon=8, minibatches=1, device="cpu", root=str(tmp_path)
    )
    warmed = profile(settings, iterations=2, warm_up=9).phases["env"].operators
    assert 0.8 * short < warmed < 1.2 * short


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pp", "chasing"], "did you mean ppo"),
        (["ppo", "chasin"], "did you mean chasing"),
        (["ppo"], "an algorithm and an environment are needed"),
        (["ppo", "chasing", "--iterations", "few"], "--iterations must be a whole number"),
        (["ppo", "chasing", "--iterations"], "--iterations needs a value"),
        (["ppo", "chasing", "--iterations=0"], "iterations must be at least 1, got 0"),
        (["ppo", "chasing", "--asynchronous"], "leave out asynchronous"),
        (["ppo", "chasing", "--warm-up", "-1"], "warm_up must be at least 0, got -1"),
        (["ppo", "chasing", "--run-dir", "mine"], "--out is its folder, leave out run_dir"),
        (["--resume", "a_run"], "an algorithm and an environment are needed"),
    ],
)
def test_wrong_words_are_refused_as_by_train(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["profile", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another place with --out"):
        profile(make_settings("ppo", "chasing", num_envs=4, device="cpu"), out=tmp_path / "file")


# ---- whose time it is ----


def test_a_part_does_not_count_what_another_part_within_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def lasting(seconds: float) -> Any:
        def call() -> None:
            clock[0] += seconds

        return call

    trainer: Any = SimpleNamespace(
        env=SimpleNamespace(step=lasting(1.0)),
        act=lasting(2.0),
        learn=lasting(32.0),
        algorithm=SimpleNamespace(record_step=lasting(4.0), prepare=lasting(16.0)),
        statistics=SimpleNamespace(add=lasting(8.0)),
        guards=SimpleNamespace(after_rollout=lasting(64.0)),
    )

    def collect() -> None:
        for part in (
            trainer.env.step,
            trainer.act,
            trainer.algorithm.record_step,
            trainer.statistics.add,
        ):
            part()
        clock[0] += 0.5

    def iterate() -> None:
        trainer.collect()
        trainer.guards.after_rollout()
        trainer.algorithm.prepare()
        trainer.learn()
        clock[0] += 0.25

    trainer.collect, trainer.iterate = collect, iterate
    spans = Spans(trainer)
    trainer.iterate()
    trainer.collect()
    expected = {
        "env": 2.0,
        "policy": 4.0,
        "store": 24.0,
        "rollout": 1.0,
        "post": 80.0,
        "update": 32.0,
        "other": 0.25,
    }
    assert spans.seconds == expected


def event(
    name: str,
    start: float,
    end: float,
    parent: Any = None,
    kernels: tuple[tuple[str, float], ...] = (),
    kind: Any = CPU,
) -> Any:
    durations = [SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels]
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        cpu_parent=parent,
        kernels=durations,
        device_type=kind,
    )


def test_operators_launches_and_kernels_go_to_the_innermost_range() -> None:
    iterate = event("gpurl/other", 0, 100)
    collect = event(
        "gpurl/rollout", 10, 60, iterate, kernels=(("of a graph", 7e6), ("gpurl/rollout", 50e6))
    )
    step = event("gpurl/env", 20, 30, collect)
    add = event("aten::add", 21, 25, step, kernels=(("add", 1e6),))
    within = event("aten::add_", 22, 24, add, kernels=(("add", 2e6),))
    events = [
        *(iterate, collect, step, add, within),
        event("cudaLaunchKernel", 23, 24, within),
        event("cuLaunchKernelEx", 26, 27, step),
        event("cudaGraphLaunch", 40, 41, collect),
        event("cudaStreamIsCapturing", 42, 43, collect),
        event("aten::mul", 70, 71, iterate),
        event("aten::mul", 101, 102),
        event("add", 500, 501, kind=CUDA),
    ]
    result = Profile("", 1, 1, 1, 1.0, True, Path(), [])
    module._count(result, events)
    counts = {
        name: (phase.operators, phase.launches, phase.device)
        for name, phase in result.phases.items()
        if phase != Phase()
    }
    assert counts == {"env": (1, 2, 3.0), "rollout": (0, 1, 7.0), "other": (2, 0, 0.0)}


def test_the_report_of_a_gpu_by_hand() -> None:
    kernel = Longest("k" * 90, 0.004, 6, "256x1x1 x 128")
    result = Profile("title", 2, 4, 5, 0.010, True, Path("trace.json"), [kernel])
    result.phases["env"] = Phase(host=0.006, device=0.002, operators=80, launches=40)
    result.phases["update"] = Phase(host=0.002, device=0.006, operators=100, launches=50)
    lines = {line.split()[0]: line.split()[1:] for line in report(result).splitlines() if line}
    assert lines["env"] == ["3.000", "75.0%", "1.000", "25.0%", "40", "20"]
    assert lines["update"] == ["1.000", "25.0%", "3.000", "75.0%", "50", "25"]
    output = report(result)
    assert "10.00 ms an iteration (median of 2)" in output
    assert (
        "the device is idle 60% of an iteration" in output
    )  # 8 ms of kernels in two iterations of 10 ms
    assert "an iteration 90.0 operators and 45.0 launches" in output
    assert (
        "a step of all environments 10.0 operators and 5.0 launches; a minibatch 10.0 operators "
        "and 5.0 launches" in output
    )
    assert f"{'k' * 69}…     256x1x1 x 128   2.000      3" in output


def test_kernels_are_told_apart_by_their_launch(tmp_path: Path) -> None:
    def kernel(name: str, microseconds: float, blocks: int) -> dict[str, Any]:
        launch = {"grid": [blocks, 1, 2], "block": [32, 4, 1]}
        return {"ph": "X", "cat": "kernel", "name": name, "dur": microseconds, "args": launch}

    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 7.0, "args": {}}
    others = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 900.0}, {"ph": "M"}]
    launches = [kernel("mm", 1.0, 2), kernel("mm", 2.0, 2), kernel("mm", 30.0, 132)]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*others, *launches, copy]}))
    assert [(each.name, each.grid, each.calls) for each in module._kernels(trace)] == [
        ("mm", "132x1x2 x 128", 1),
        ("Memcpy DtoD", "", 1),
        ("mm", "2x1x2 x 128", 2),
    ]
    assert [each.seconds for each in module._kernels(trace)] == pytest.approx([30e-6, 7e-6, 3e-6])
