"""The benchmarks at tiny sizes: they run, write what they measured, and time nothing that is wrong."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kernels, peer_loops, peers, results_table, throughput, timing
from gpurl import doctor
from gpurl.envs.registry import make_env
from gpurl.errors import GpurlError, UsageError
from gpurl.kernels import adam, gae

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
    small = {"GAE_SIZES": [(4, 5)], "ADAM_SIZES": [1000], "MOMENTS_SIZES": [(33, 3)], "RANDOM_SIZES": [(7, 3)]}
    small |= {"PERMUTATION_SIZES": [33], "GATHER_SIZES": [(33, (3, 1))]}
    small |= {"PPO_LOSS_SIZES": [("gaussian", 9, 2), ("categorical", 9, 3)]}
    for name, sizes in small.items():
        monkeypatch.setattr(kernels, name, sizes)


def test_throughput_measures_three_things_a_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(throughput, "PLAIN_SIZE", 6)
    assert throughput.main([*QUICK, "--num-envs", "4", "8", "--horizon", "2", "--out", str(tmp_path)]) == 0
    rows = rows_in(tmp_path, "throughput")
    assert_measured(rows)
    chasing = [(f"chasing {what}", size) for size in ("4", "8") for what in ("env", "env+policy", "training")]
    assert [(row["case"], row["num_envs"]) for row in rows] == [*chasing, ("cart_pole env", "6"), ("pendulum env", "6")]
    assert "+ training" in capsys.readouterr().out


def test_throughput_counts_all_steps_of_a_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(throughput, "median_seconds", lambda functions, device, budget: dict.fromkeys(functions, 0.5))
    throughput.main([*QUICK, "--num-envs", "4", "--horizon", "2", "--out", str(tmp_path)])
    assert float(rows_in(tmp_path, "throughput")[0]["value"]) == 4 * 2 / 0.5


def test_every_case_takes_horizon_steps_of_every_environment() -> None:
    functions = throughput.cases(4, 3, CPU)
    functions["chasing training"]()
    functions["chasing env+policy"]()
    trainer = functions["chasing training"].__self__  # type: ignore[attr-defined]
    assert trainer.steps == 4 * 3
    assert trainer.buffer.size == 0
    assert int(trainer.env._random.step) == 1 + 2 * 3  # the reset, then the steps
    env: Any = make_env("chasing", 4)
    throughput.random_steps(env, 3)()
    assert int(env._random.step) == 1 + 3


@pytest.mark.usefixtures("_small_kernels")
def test_kernels_are_timed_beside_reference_and_torch(tmp_path: Path) -> None:
    assert kernels.main([*QUICK, "--out", str(tmp_path)]) == 0
    rows = rows_in(tmp_path, "kernels")
    assert_measured(rows)
    measured = {row["case"]: [other["function"] for other in rows if other["case"] == row["case"]] for row in rows}
    assert measured == {
        "gae 4x5": ["kernel", "reference"],
        "adam_step 1000": ["kernel", "reference", "torch"],
        "update_moments 33x3": ["kernel", "reference"],
        "normalize 33x3": ["kernel", "reference"],
        "random_uniform 7x3": ["kernel", "reference", "torch"],
        "random_normal 7x3": ["kernel", "reference", "torch"],
        "permutation 33": ["kernel", "reference", "torch"],
        "gather_rows 33x3+1": ["kernel", "reference", "torch"],
        "ppo_loss gaussian 9x2": ["kernel", "reference", "torch"],
        "ppo_loss categorical 9x3": ["kernel", "reference", "torch"],
    }


@pytest.mark.usefixtures("_small_kernels")
@pytest.mark.parametrize(("module", "name", "position"), [(gae, "gae", 1), (adam, "adam_step", 0)])
def test_nothing_is_timed_where_a_kernel_is_wrong(
    module: Any, name: str, position: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = getattr(module, name)

    def wrong(*arguments: Any) -> Any:
        results = right(*arguments)
        if isinstance(results, torch.Tensor):
            return results + 0.01
        return tuple(result + 0.01 * (place == position) for place, result in enumerate(results))

    def timed(*arguments: Any) -> dict[str, float]:
        raise AssertionError("timed before all were compared")

    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(kernels, "median_seconds", timed)
    with pytest.raises(GpurlError, match=rf"{name} .*result {position} of the kernel is not the reference's"):
        kernels.main([*QUICK, "--out", str(tmp_path)])
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
    assert calls == ["a", "b", "a", "b", "b", "a", "a", "b"]  # to warm up, then the three rounds that there are at least
    calls.clear()
    timing.median_seconds(functions, CPU, budget=0.1)
    assert len(calls) == 2 + 2  # one round takes more than ten times the budget


def test_a_row_of_the_same_commit_is_replaced_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(case: str, value: str, at: str) -> None:
        monkeypatch.setattr(results_table, "commit", lambda: at)
        results_table.save("script", [{"case": case, "value": value, "device": "NVIDIA H100 80GB"}], tmp_path)

    for arguments in (("a", "1", "c1"), ("b", "2", "c1"), ("a", "3", "c1"), ("a", "4", "c2")):
        save(*arguments)
    with (tmp_path / "script_nvidia_h100_80gb.csv").open(newline="") as file:
        assert [(row["case"], row["value"], row["commit"]) for row in csv.DictReader(file)] == [
            ("b", "2", "c1"),
            ("a", "3", "c1"),
            ("a", "4", "c2"),
        ]


def test_bench_runs_both_and_needs_the_source_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    for module in (throughput, kernels):

        def main(words: list[str], name: str = module.__name__) -> int:
            seen.append((name, words))
            return 0

        monkeypatch.setattr(module, "main", main)
    assert doctor.run_benchmarks(["--device", "cpu"]) == 0
    assert seen == [("benchmarks.throughput", ["--device", "cpu"]), ("benchmarks.kernels", ["--device", "cpu"])]
    (tmp_path / "benchmarks").mkdir()  # somebody else's
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "gpurl" / "doctor.py"))
    with pytest.raises(UsageError, match="clone the project"):
        doctor.run_benchmarks([])


# ---- peers ----


def small_job(case: str, **changes: Any) -> peer_loops.Job:
    small = {"num_envs": 4, "horizon": 2, "iterations": 2, "warm_up": 1, "total_steps": 64}
    return peer_loops.Job(case, "gpurl", **(small | changes))


def test_the_stopwatch_reads_once_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(peer_loops, "now", lambda device: float(next(ticks)))
    outcome = peer_loops.chasing_gpurl(small_job("chasing"))
    assert outcome.marks == [0.0, 1.0, 2.0, 3.0]  # the start of the clock, one to warm up, two timed
    assert outcome.steps == 4 * 2
    assert -1.0 < outcome.score < 1.0


def test_warm_up_is_left_out_of_a_result() -> None:
    outcome = peer_loops.Outcome([0.0, 50.0, 52.0, 56.0], 300, 1.0)
    found = peer_loops.result(small_job("chasing"), outcome)
    assert found["steps_per_second"] == 100.0
    assert 50.0 < found["peak_mib"] < 50_000.0
    json.dumps(found)


def test_pendulum_trains_to_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PENDULUM_HORIZON": 8, "PENDULUM_EPOCHS": 1, "PENDULUM_BATCH": 16, "PENDULUM_EPISODES": 2}.items():
        monkeypatch.setattr(peer_loops, name, value)
    outcome = peer_loops.pendulum_gpurl(small_job("pendulum"))
    assert len(outcome.marks) == 1 + 64 // (4 * 8)
    assert -2000.0 < outcome.score < 0.0


def test_peers_take_turns_and_the_best_one_is_the_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds, ran = {"gpurl": 300.0, "rsl_rl": 100.0, "skrl": 200.0}, []

    def run_once(python: Path, job: dict[str, Any], threads: int, waits: str) -> dict[str, Any]:
        ran.append(job["trainer"])
        machine = {"device": "cpu", "threads": str(threads), "waits": waits}
        values = {"score": 1.0, "note": "", "peak_mib": 10.0, "gpu_mib": 0.0, "version": "1", "machine": machine}
        return values | {"steps_per_second": speeds[job["trainer"]] + job["seed"]}

    monkeypatch.setattr(peers, "run_once", run_once)
    words = ["--python", "python", "--rounds", "3", "--trainers", *speeds, "--threads", "2", "--waits", "passive", "--out", str(tmp_path)]
    assert peers.main(words) == 0
    assert ran == ["gpurl", "rsl_rl", "skrl", "skrl", "rsl_rl", "gpurl", "gpurl", "rsl_rl", "skrl"]
    assert f"gpurl / best peer (skrl): {301 / 201:.2f}" in capsys.readouterr().out
    rows = rows_in(tmp_path, "peers")
    assert [(row["trainer"], row["value"]) for row in rows if row["unit"] == "env_steps/s"] == [
        ("gpurl", "301"),
        ("rsl_rl", "101"),
        ("skrl", "201"),
    ]
    assert {(row["waits"], row["threads"], row["rounds"]) for row in rows} == {("passive", "2", "3")}


def test_a_process_gets_the_same_threads_and_waits_whatever_is_set_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def fake_run(command: list[str], **options: Any) -> Any:
        seen.update(options["env"], job=json.loads(command[-1]))
        return peers.subprocess.CompletedProcess(command, seen.pop("code", 0), stdout='noise\nRESULT {"score": 1}\nmore', stderr="broken")

    monkeypatch.setattr(peers.subprocess, "run", fake_run)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert peers.run_once(tmp_path, {"trainer": "skrl"}, 2, "default") == {"score": 1}
    assert "OMP_WAIT_POLICY" not in seen
    assert seen["OMP_NUM_THREADS"] == "2"
    assert seen["job"] == {"trainer": "skrl"}
    peers.run_once(tmp_path, {"trainer": "skrl"}, 2, "passive")
    assert seen["OMP_WAIT_POLICY"] == "PASSIVE"
    seen["code"] = 1
    with pytest.raises(GpurlError, match="skrl on chasing ended with code 1:\nbroken"):
        peers.run_once(tmp_path, {"trainer": "skrl", "case": "chasing"}, 2, "default")


def test_a_trainer_without_the_case_is_refused() -> None:
    with pytest.raises(UsageError, match="pendulum is not measured with skrl"):
        peers.parse(["--case", "pendulum", "--trainers", "skrl", "gpurl"])
