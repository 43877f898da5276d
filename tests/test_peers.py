"""The comparison with other trainers: one stopwatch, processes in turn, the same threads for all."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peer_loops, peers
from benchmarks.results_table import read_rows
from gpurl.errors import GpurlError, UsageError


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
    rows = read_rows(tmp_path / "peers_cpu.csv")
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
