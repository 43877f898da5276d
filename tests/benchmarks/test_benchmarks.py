"""The benchmarks at tiny sizes: they run, write what they measured, and time nothing that is
wrong.
"""

import csv
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    asynchronous,
    kernels,
    limits,
    memories,
    physics,
    profiles,
    results_table,
    throughput,
    timing,
    training,
    trainings,
)
from gpurl.cli import doctor
from gpurl.envs.registry import make_env
from gpurl.errors import GpurlError, UsageError
from gpurl.kernels import adam, gae
from gpurl.run.settings import make_settings

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--seconds", "0"]


def rows_in(folder: Path, script: str) -> list[dict[str, str]]:
    with (folder / f"{script}_cpu.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_measured(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert 0.0 < float(row["value"]) < math.inf
        assert row["device"] == "cpu"
        assert row["torch"] == torch.__version__
        assert all(row.values())


@pytest.fixture
def _small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "GAE_SIZES": [(4, 5)],
        "SCAN_SIZES": [(4, 5)],
        "ADAM_SIZES": [1000],
        "MOMENTS_SIZES": [(33, 3)],
        "RANDOM_SIZES": [(7, 3)],
    }
    small |= {
        "PERMUTATION_SIZES": [33],
        "GATHER_SIZES": [(33, (3, 1))],
        "PRIORITIZED_SIZES": [(33, 4)],
    }
    small |= {
        "PPO_LOSS_SIZES": [("gaussian", 9, 2), ("categorical", 9, 3)],
        "PROJECTION_SIZES": [(5, 3)],
        "SQUASH_SIZES": [(5, 3)],
    }
    for name, sizes in small.items():
        monkeypatch.setattr(kernels, name, sizes)


@pytest.fixture
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "PLAIN_SIZE", 6)
    monkeypatch.setattr(limits, "SQUARE", {"cpu": 64})


@pytest.mark.usefixtures("_small_machine")
def test_throughput_measures_three_things_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        throughput.main(
            [*QUICK, "--num-envs", "4", "8", "--horizon", "2", "4", "--out", str(tmp_path)]
        )
        == 0
    )
    rows = rows_in(tmp_path, "throughput")
    assert_measured(rows)
    whats = ("env", "env+policy", "training")
    chasing = [
        (f"chasing {what}", size, horizon)
        for horizon in ("2", "4")
        for size in ("4", "8")
        for what in whats
    ]
    others = [
        ("cart_pole env", "6", "2"),
        ("pendulum env", "6", "2"),
        ("chasing limit arithmetic", "-", "-"),
    ]
    assert [(row["case"], row["num_envs"], row["horizon"]) for row in rows] == [*chasing, *others]
    config = make_settings("ppo", "chasing").train
    how = (config.precision, "off", "steps")  # what auto is on a CPU
    for row in rows:
        stepped_by_policy = row["case"] in ("chasing env+policy", "chasing training")
        got = (row["precision"], row["graph"], row["rollout"])
        assert got == (
            how if stepped_by_policy else ("float32" if "limit" in row["case"] else "-", "-", "-")
        )
    assert "+ training" in capsys.readouterr().out


@pytest.mark.usefixtures("_small_machine")
def test_throughput_counts_all_steps_of_a_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        throughput,
        "median_seconds",
        lambda functions, device, budget: dict.fromkeys(functions, 0.5),
    )
    throughput.main([*QUICK, "--num-envs", "4", "--horizon", "2", "--out", str(tmp_path)])
    assert float(rows_in(tmp_path, "throughput")[0]["value"]) == 4 * 2 / 0.5


def test_every_case_takes_horizon_steps_of_every_environment() -> None:
    trainer = training.ready_trainer(
        make_settings("ppo", "chasing", **training.common_settings(4, 3)), CPU
    )
    env: Any = make_env("chasing", 4)
    functions = throughput.cases(trainer, env, 3)
    functions["chasing training"]()
    functions["chasing env+policy"]()
    functions["chasing env"]()
    assert trainer.steps == 4 * 3
    assert trainer.engine.buffer.size == 0
    assert int(trainer.env._random.step) == 1 + 2 * 3  # the reset, then the steps
    assert int(env._random.step) == 1 + 3


# ---- limits ----


def test_an_environment_step_costs_what_the_networks_have_weights_for() -> None:
    # by hand: actor 8*64 + 64*64 + 64*2 = 4736, critic 8*64 + 64*64 + 64 = 4672
    assert limits.multiply_adds(8, 2, (64, 64)) == 9408
    assert limits.flop_per_step(8, 2, (64, 64), epochs=4) == 2 * 9408 * 13
    # a row of 14 floats; an epoch gathers and packs 13 floats and moves 256 hidden ones 11 times
    assert limits.bytes_per_step(8, 2, (64, 64), epochs=4) == 4 * (14 + 4 * (26 + 11 * 256))
    network = training.ready_trainer(
        make_settings("ppo", "chasing", **training.common_settings(4, 3)), CPU
    ).algorithm.network  # type: ignore[attr-defined]
    assert (
        sum(part.numel() for name, part in network.named_parameters() if "weight" in name) == 9408
    )


def test_the_limit_is_the_rate_over_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "fastest_seconds", lambda function, device, budget: 0.5)
    found = limits.limits(CPU, 8, 2, (64, 64), 4, 0.0)
    assert found == {"arithmetic float32": pytest.approx(2 * 1024**3 / 0.5 / (2 * 9408 * 13))}


def test_the_fastest_call_counts_for_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seconds = [0.0], iter([1.0, 5.0, 2.0, 9.0])

    def function() -> None:
        clock[0] += next(seconds)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert timing.fastest_seconds(function, CPU, budget=10.0) == 2.0  # the first one warms up


@pytest.mark.usefixtures("_small_kernels")
def test_kernels_are_timed_beside_reference_and_torch(tmp_path: Path) -> None:
    assert kernels.main([*QUICK, "--out", str(tmp_path)]) == 0
    rows = rows_in(tmp_path, "kernels")
    assert_measured(rows)
    measured = {
        row["case"]: [other["function"] for other in rows if other["case"] == row["case"]]
        for row in rows
    }
    assert measured == {
        "gae 4x5": ["kernel", "reference"],
        "linear_scan 4x5": ["kernel", "reference"],
        "linear_scan backward 4x5": ["kernel", "reference"],
        "adam_step 1000": ["kernel", "reference", "torch"],
        "adam_step 1000 with target": ["kernel", "reference", "torch"],
        "update_moments 33x3": ["kernel", "reference"],
        "normalize 33x3": ["kernel", "reference"],
        "random_uniform 7x3": ["kernel", "reference", "torch"],
        "random_normal 7x3": ["kernel", "reference", "torch"],
        "permutation 33": ["kernel", "reference", "torch"],
        "gather_rows 33x3+1": ["kernel", "reference", "torch"],
        "prioritized_draw 33x4": ["kernel", "reference", "torch"],
        "ppo_loss gaussian 9x2": ["kernel", "reference"],
        "ppo_loss categorical 9x3": ["kernel", "reference"],
        "categorical_projection 2x5x3": ["kernel", "reference"],
        "squashed 5x3": ["kernel", "reference"],
    }


@pytest.mark.usefixtures("_small_kernels")
@pytest.mark.parametrize(("module", "name", "position"), [(gae, "gae", 1), (adam, "adam_step", 0)])
def test_a_kernel_that_is_wrong_is_not_timed_and_the_others_are(
    module: Any,
    name: str,
    position: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = getattr(module, name)

    def wrong(*arguments: Any) -> Any:
        results = right(*arguments)
        if isinstance(results, torch.Tensor):
            return results + 0.01
        return tuple(result + 0.01 * (place == position) for place, result in enumerate(results))

    monkeypatch.setattr(module, name, wrong)
    assert kernels.main([*QUICK, "--out", str(tmp_path)]) == 1
    assert re.search(
        rf"failed: {name} .*result {position} of the kernel differs from the reference's",
        capsys.readouterr().out,
    )
    timed = {row["case"].split()[0] for row in rows_in(tmp_path, "kernels")}
    assert name not in timed
    assert {"normalize", "squashed"} <= timed


def test_profiles_say_where_an_iteration_goes(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--out", str(tmp_path), "--num-envs", "8", "--iterations", "1"]
    assert profiles.main([*words, "--cases", "64x64", "64x64 autograd"]) == 0
    rows = rows_in(tmp_path, "profile")
    assert {row["case"] for row in rows} == {"64x64", "64x64 autograd"}
    whole, *parts = [row for row in rows if row["case"] == "64x64 autograd"]
    assert (whole["part"], whole["unit"]) == ("iteration", "us/iteration")
    phases = {row["name"]: float(row["value"]) for row in parts if row["part"] == "phase"}
    assert min(phases["env"], phases["update"]) > 0.0
    assert sum(phases.values()) == pytest.approx(float(whole["value"]), rel=0.2)
    longest = [float(row["value"]) for row in parts if row["part"] == "kernel"]
    assert longest == sorted(longest, reverse=True)
    assert len(longest) == profiles.LONGEST


@pytest.mark.parametrize(
    ("case", "steps"),
    [("64x64, autograd, float32", 8 * 32), ("8 members, in turn", 64 * 32), ("dqn cart_pole", 64)],
)
def test_whole_trainings_are_timed_when_they_learn(case: str, steps: int, tmp_path: Path) -> None:
    words = [*QUICK, "--out", str(tmp_path), "--num-envs", "8", "--cases", case]
    assert trainings.main(words) == 0
    (row,) = rows_in(tmp_path, "trainings")
    assert_measured([row])
    assert (row["case"], row["steps"]) == (case, str(steps))
    assert row["update"] == "C"  # also of members


def test_whole_trainings_are_not_timed_before_they_learn() -> None:
    trainer = training.ready_trainer(trainings.settings_of("dqn cart_pole", 8), CPU)
    trainings.play_until_it_learns(trainer)
    assert trainer.engine.steps > trainer.settings.algorithm_config.learning_starts > 0


def test_trainings_that_the_device_cannot_run_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*QUICK, "--out", str(tmp_path), "--cases", "64x64, fused, tf32"]
    assert trainings.main(words) == 1
    assert "64x64, fused, tf32: skipped: " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_functions_take_turns_and_the_slow_one_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], []

    def function(name: str, seconds: float) -> Any:
        def call() -> None:
            calls.append(name)
            clock[0] += seconds if calls.count(name) > 1 else 100.0  # the first call compiles

        return call

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    functions = {"a": function("a", 1.0), "b": function("b", 2.0)}
    assert timing.median_seconds(functions, CPU, budget=3.0) == {"a": 1.0, "b": 2.0}
    assert calls == [
        "a",
        "a",
        "b",
        "b",
        "a",
        "b",
        "b",
        "a",
        "a",
        "b",
    ]  # to warm up and to see how long one takes, then three rounds
    calls.clear()
    timing.median_seconds(functions, CPU, budget=0.1)
    assert len(calls) == 4 + 2  # one round takes more than ten times the budget


def test_a_row_of_the_same_commit_is_replaced_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(case: str, value: str, at: str) -> None:
        monkeypatch.setattr(results_table, "commit", lambda: at)
        results_table.save(
            "script", [{"case": case, "value": value, "device": "NVIDIA H100 80GB"}], tmp_path
        )

    for arguments in (("a", "1", "c1"), ("b", "2", "c1"), ("a", "3", "c1"), ("a", "4", "c2")):
        save(*arguments)
    with (tmp_path / "script_nvidia_h100_80gb.csv").open(newline="") as file:
        assert [(row["case"], row["value"], row["commit"]) for row in csv.DictReader(file)] == [
            ("b", "2", "c1"),
            ("a", "3", "c1"),
            ("a", "4", "c2"),
        ]


def test_every_column_of_any_row_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_table, "commit", lambda: "c1")
    for row in (
        {"case": "a", "note": "x"},
        {"case": "b", "horizon": "32"},
        {"case": "a", "note": "x"},
    ):
        path = results_table.save("script", [{"value": "1", "device": "cpu", **row}], tmp_path)
    rows = results_table.read_rows(path)
    assert [(row["case"], row["note"], row["horizon"]) for row in rows] == [
        ("b", "", "32"),
        ("a", "x", ""),
    ]
    assert results_table.read_rows(tmp_path / "none.csv") == []


def test_the_driver_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["580.159.03\n580.159.03\n", "", None])

    def run(command: list[str], **options: Any) -> Any:
        if (answer := next(answers)) is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(results_table.subprocess, "run", run)
    for expected in ("580.159.03", "unknown", "unknown"):
        results_table.driver_version.cache_clear()
        assert results_table.driver_version() == expected
    results_table.driver_version.cache_clear()
    assert results_table.machine("cpu")["driver"] == "-"


def test_a_commit_outside_git_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(results_table, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results_table.commit() == "unknown"
    monkeypatch.setenv("GPURL_COMMIT", "abc1234")
    assert results_table.commit() == "abc1234"


def test_bench_runs_both_and_needs_the_source_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    for module in (throughput, kernels):

        def main(words: list[str], name: str = module.__name__) -> int:
            seen.append((name, words))
            return 0

        monkeypatch.setattr(module, "main", main)
    assert doctor.run_benchmarks(["--device", "cpu", "--num-envs", "64", "--seconds", "0.1"]) == 0
    out = ["--out", "runs/bench"]
    own = ["--device", "cpu", "--num-envs", "64", "--seconds", "0.1"]
    assert seen.pop(0) == ("benchmarks.throughput", [*out, *own])
    # kernels have no numbers of environments
    assert seen.pop(0) == ("benchmarks.kernels", ["--device", "cpu", *out, "--seconds", "0.1"])
    assert doctor.run_benchmarks(["--ladder", "--out", str(tmp_path)]) == 0
    assert [name for name, _ in seen] == ["benchmarks.throughput"]
    with pytest.raises(SystemExit):
        doctor.run_benchmarks(["--num-env", "many"])
    assert len(seen) == 1
    (tmp_path / "benchmarks").mkdir()  # somebody else's
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "gpurl" / "doctor.py"))
    with pytest.raises(UsageError, match="clone the project"):
        doctor.run_benchmarks([])


# ---- physics.py ----


def test_physics_is_compared_then_timed_in_its_phases_and_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mujoco_warp")
    assert (
        physics.main(
            [
                *QUICK,
                "--tasks",
                "inverted_pendulum",
                "--num-envs",
                "4",
                "--horizon",
                "2",
                "--ways",
                "mujoco",
                "warp",
                "sync",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    rows = rows_in(tmp_path, "physics")
    assert_measured(rows)
    phases = ["physics", "env", "training", "memory"]
    assert [(row["case"].split()[1], row["way"]) for row in rows] == [
        *((phase, way) for way in ("mujoco", "warp") for phase in phases),
        *((phase, "sync") for phase in phases[1:]),
    ]
    assert {row["unit"] for row in rows} == {"env_steps/s", "MiB"}
    assert "+ training" in capsys.readouterr().out


def test_physics_that_is_not_mujocos_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco_warp")

    def slower(task: str, *arguments: Any, **options: Any) -> Any:
        env: Any = make_env(task, *arguments, **options)
        env._worlds.simulator.frame_skip = 1
        return env

    monkeypatch.setattr(physics, "make_env", slower)
    with pytest.raises(
        GpurlError,
        match=r"inverted_pendulum: step 0 of world 0 is not MuJoCo's: qpos differs by .*; nothing "
        r"is timed",
    ):
        physics.measure(physics.Job("inverted_pendulum", "mujoco", 4, 2, "cpu", 0.0))


def test_learning_beside_collecting_is_timed_in_turn(tmp_path: Path) -> None:
    case = "Pendulum-v1, in this process"
    assert asynchronous.main(["--only", case, "--rounds", "1", "--out", str(tmp_path)]) == 0
    rows = rows_in(tmp_path, "asynchronous")
    assert [(row["case"], row["load"]) for row in rows] == [(case, "balanced"), (case, "5 epochs")]
    assert all(float(row["value"]) > 0.0 for row in rows)


def test_memories_are_timed_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "SIZES", [(8, 2)])
    assert memories.make(memories.BASELINE, 8, 2).name == "eager"
    assert memories.main(["--rounds", "2", "--out", str(tmp_path)]) == 0
    rows = rows_in(tmp_path, "memories")
    assert_measured(rows)
    assert [row["case"] for row in rows] == ["MLP", "MLP in C", "gru", "lstm", "mingru"]
    assert float(rows[0]["value"]) == 1.0
