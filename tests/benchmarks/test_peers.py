"""The comparison with other trainers: one stopwatch, processes in turn, the same threads for
all.
"""

import ast
import contextlib
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import processes
from benchmarks.peers import compare, gpurl_loops, installation, leanrl_style, one_run
from benchmarks.peers import job as cases
from benchmarks.peers.timed_env import timed_env
from benchmarks.results_table import ROOT, read_rows
from benchmarks.training import ready_trainer
from gpurl.errors import GpurlError, UsageError
from gpurl.run.settings import make_settings


def small_job(case: str, trainer: str = "gpurl", **changes: Any) -> cases.Job:
    small = {"num_envs": 4, "horizon": 2, "iterations": 2, "warm_up": 1, "total_steps": 64}
    return cases.Job(case, trainer, **(small | changes))


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that go on by one second a reading."""
    clock = iter(range(100))
    for module in ("gpurl_loops", "timed_env"):
        monkeypatch.setattr(f"benchmarks.peers.{module}.now", lambda device: float(next(clock)))


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("case", ["chasing", "pursuit"])
@pytest.mark.parametrize("loop", [gpurl_loops, leanrl_style])
def test_the_clock_is_read_once_a_rollout(loop: Any, case: str) -> None:
    outcome = loop.tensor_task(small_job(case))
    assert outcome.marks == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]  # the start of the clock, one to warm up, two timed
    assert outcome.steps == 4 * 2
    assert -2.0 < outcome.score < 1.0


@pytest.mark.parametrize("case", ["chasing", "pursuit"])
def test_all_trainers_meet_the_same_environments(case: str) -> None:
    job = small_job(case, num_envs=6, seed=3)
    timed = timed_env(job)
    obs, _ = timed.reset()
    trainer = ready_trainer(
        make_settings("ppo", gpurl_loops.ENVS[case], num_envs=6, minibatches=1, seed=3),
        torch.device("cpu"),
    )
    torch.testing.assert_close(obs, trainer.engine.obs, rtol=0, atol=0)
    torch.testing.assert_close(
        timed.episode_length_buf, trainer.env.episode_length_buf, rtol=0, atol=0
    )
    (size,) = timed.single_action_space.shape or ()
    rewards = [timed.step(torch.full((6, size), 0.1)).reward for _ in range(2)]
    assert timed.mean_reward == pytest.approx(float(torch.stack(rewards).mean()))


def test_the_cuda_graphs_of_leanrl_style_replay_what_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: a graph that captures a call, and replays it into the same memory."""
    seen: list[str] = []

    class Graph:
        def replay(self) -> None:
            seen.append("replay")
            graphed.results[0].copy_(graphed.arguments[0] * 2)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(
        leanrl_style.Graphed,
        "_eagerly",
        lambda self, arguments: (seen.append("eager"), self.function(*arguments))[1],
    )
    graphed = leanrl_style.Graphed(lambda x: (x * 2,))
    for value in range(6):
        (result,) = graphed(torch.tensor([float(value)]))
        assert result.tolist() == [2.0 * value]
    assert seen == ["eager"] * 3 + ["replay"] * 3


def test_leanrl_style_advantages_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**cases.TENSOR_TASK, "gamma": 0.5, "gae_lambda": 0.5}
    monkeypatch.setattr(leanrl_style, "TENSOR_TASK", settings)
    trainer = leanrl_style.Trainer(small_job("chasing", num_envs=1))
    monkeypatch.setattr(trainer.agent.critic, "forward", lambda obs: torch.tensor([[8.0]]))
    reward, value = torch.ones(3, 1), torch.tensor([[2.0], [4.0], [6.0]])
    # the second step ends an episode: A_2 = 1 + 4 - 6, A_1 = 1 - 4, A_0 = 1 + 2 - 2 + 0.25 A_1
    advantage, target = trainer.advantages(
        reward, value, torch.tensor([[0.0], [1.0], [0.0]]), torch.zeros(1, 8)
    )
    assert advantage.flatten().tolist() == [0.25, -3.0, -1.0]
    assert target.flatten().tolist() == [2.25, 1.0, 5.0]


def test_leanrl_style_learns_which_action_pays() -> None:
    """An action with a positive advantage gets likelier by an update."""
    torch.manual_seed(0)
    trainer = leanrl_style.Trainer(small_job("chasing"))
    obs, action = torch.randn(8, 8), torch.randn(8, 2)
    advantage = torch.tensor([1.0, -1.0] * 4)
    with torch.no_grad():
        before = trainer.agent.log_prob(trainer.agent.actor(obs), action)
    for _ in range(20):
        trainer.update(obs, action, before, advantage, torch.zeros(8))
    with torch.no_grad():
        change = trainer.agent.log_prob(trainer.agent.actor(obs), action) - before
    assert float((change * advantage).sum()) > 0.5


def test_warm_up_is_left_out_of_a_result() -> None:
    outcome = cases.Outcome([0.0, 50.0, 52.0, 56.0], 300, 1.0)
    found = cases.result(small_job("chasing"), outcome)
    assert found["steps_per_second"] == 100.0
    assert 50.0 < found["peak_mib"] < 50_000.0
    assert found["note"] == "default"
    assert (
        cases.result(small_job("chasing", mode="tf32"), dataclasses.replace(outcome, note="x"))[
            "note"
        ]
        == "tf32, x"
    )
    json.dumps(found)


def test_pendulum_trains_to_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PENDULUM_HORIZON": 8,
        "PENDULUM_EPOCHS": 1,
        "PENDULUM_BATCH": 16,
        "PENDULUM_EPISODES": 2,
    }.items():
        monkeypatch.setattr(cases, name, value)
    outcome = gpurl_loops.pendulum(small_job("pendulum"))
    assert len(outcome.marks) == 1 + 64 // (4 * 8)
    assert -2000.0 < outcome.score < 0.0


def fake_runs(monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float]) -> list[str]:
    """Processes that answer from `speeds`, or fail without one; who ran."""
    ran: list[str] = []

    def run_once(
        python: Path, module: str, job: dict[str, Any], environment: dict[str, str], name: str
    ) -> dict[str, Any]:
        ran.append(name.partition(" ")[0])
        assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
        if ran[-1] not in speeds:
            raise GpurlError("broken")
        machine = {"device": "cpu", "threads": environment["OMP_NUM_THREADS"], "waits": "passive"}
        values = {
            "score": 1.0,
            "note": job["mode"],
            "peak_mib": 10.0,
            "gpu_mib": 0.0,
            "version": "1",
            "machine": machine,
        }
        return values | {"steps_per_second": speeds[ran[-1]] + job["seed"]}

    monkeypatch.setattr(compare, "run_once", run_once)
    return ran


WORDS = ["--python", "python", "--rounds", "3", "--threads", "2", "--waits", "passive"]


def test_peers_take_turns_and_the_best_one_is_the_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"gpurl": 300.0, "rsl_rl": 100.0, "rsl_rl:compile": 200.0}
    ran = fake_runs(monkeypatch, speeds)
    assert compare.main([*WORDS, "--trainers", *speeds, "--out", str(tmp_path)]) == 0
    names = list(speeds)
    assert ran == names + names[::-1] + names
    assert f"gpurl / best peer (rsl_rl:compile): {301 / 201:.2f}" in capsys.readouterr().out
    rows = read_rows(tmp_path / "peers_cpu.csv")
    assert [
        (row["trainer"], row["note"], row["value"], row["lowest"])
        for row in rows
        if row["unit"] == "env_steps/s"
    ] == [
        ("gpurl", "default", "301", "300"),
        ("rsl_rl", "default", "101", "100"),
        ("rsl_rl", "compile", "201", "200"),
    ]
    assert {(row["waits"], row["threads"], row["rounds"]) for row in rows} == {
        ("passive", "2", "3")
    }


def test_a_trainer_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = fake_runs(monkeypatch, {"gpurl": 300.0})
    assert compare.main([*WORDS, "--trainers", "gpurl", "skrl", "--out", str(tmp_path)]) == 1
    assert ran == ["gpurl", "skrl", "gpurl", "gpurl"]
    assert "failed: skrl: broken" in capsys.readouterr().out
    assert {row["trainer"] for row in read_rows(tmp_path / "peers_cpu.csv")} == {"gpurl"}
    with pytest.raises(GpurlError, match="broken"):
        compare.main([*WORDS, "--trainers", "skrl", "--out", str(tmp_path)])


def test_an_interruption_keeps_what_was_measured() -> None:
    def run(name: str, round_number: int) -> dict[str, Any]:
        if (name, round_number) == ("b", 1):
            raise KeyboardInterrupt
        return {"ran": (name, round_number)}

    kept: list[dict[str, int]] = []

    def keep(results: dict[str, list[Any]]) -> None:
        kept.append({name: len(runs) for name, runs in results.items()})

    results, failed = processes.take_turns(["a", "b", "c"], 3, run, keep)
    assert kept == [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 2}]
    assert results == {
        name: [{"ran": (name, number)} for number in numbers]
        for name, numbers in (("a", [0]), ("b", [0]), ("c", [0, 1]))
    }
    assert failed == {"the rest": "interrupted in round 2, when b ran"}


def test_a_process_gets_the_same_threads_and_waits_whatever_is_set_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def fake_run(command: list[str], **options: Any) -> Any:
        seen.update(options["env"], job=json.loads(command[-1]), module=command[2])
        return processes.subprocess.CompletedProcess(
            command, seen.pop("code", 0), stdout='noise\nRESULT {"score": 1}\nmore', stderr="broken"
        )

    monkeypatch.setattr(processes.subprocess, "run", fake_run)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def run_once(waits: str) -> dict[str, Any]:
        return processes.run_once(
            tmp_path,
            "a.module",
            {"trainer": "skrl"},
            processes.host_environment(2, waits),
            "skrl on chasing",
        )

    assert run_once("default") == {"score": 1}
    assert "OMP_WAIT_POLICY" not in seen
    assert seen["OMP_NUM_THREADS"] == "2"
    assert (seen["job"], seen["module"]) == ({"trainer": "skrl"}, "a.module")
    run_once("passive")
    assert seen["OMP_WAIT_POLICY"] == "PASSIVE"
    seen["code"] = 1
    with pytest.raises(GpurlError, match="skrl on chasing ended with code 1:\nbroken"):
        run_once("default")


def test_wrong_trainers_and_modes_are_refused() -> None:
    with pytest.raises(UsageError, match="pendulum is not measured with skrl"):
        compare.parse(["--case", "pendulum", "--trainers", "skrl", "gpurl"])
    with pytest.raises(UsageError, match="rsl_rl has no mode fast; it has default, compile"):
        compare.parse(["--trainers", "rsl_rl:fast"])


@pytest.mark.parametrize("trainer", list(compare.MODES))
def test_the_modes_listed_are_those_of_the_file(trainer: str) -> None:
    """Read from the source: most files import a trainer that is not here."""
    tree = ast.parse((ROOT / "benchmarks" / "peers" / f"{one_run.LOOPS[trainer]}.py").read_text())
    (modes,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and "MODES" in ast.unparse(node).partition("=")[0]
        and isinstance(node.value, ast.Dict)
    )
    assert tuple(ast.literal_eval(key) for key in modes.keys if key) == compare.MODES[trainer]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("case", ["chasing", "pursuit", "pendulum"])
def test_the_usual_contestants_exist(case: str, device: str) -> None:
    names = compare.parse(["--case", case, "--device", device]).trainers
    assert "gpurl" in names
    for name in names:
        trainer = name.partition(":")[0]
        functions = ast.parse(
            (ROOT / "benchmarks" / "peers" / f"{one_run.LOOPS[trainer]}.py").read_text()
        ).body
        function = "pendulum" if case == "pendulum" else "tensor_task"
        assert function in {node.name for node in functions if isinstance(node, ast.FunctionDef)}


def test_gpurl_has_the_settings_of_its_modes() -> None:
    for values in gpurl_loops.MODES.values():
        make_settings("ppo", "chasing", **values)


def test_the_environment_is_made_once_for_the_same_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        installation.subprocess, "run", lambda command, check: commands.append(command)
    )
    folder = tmp_path / "peers"
    folder.mkdir()
    for _ in range(2):
        assert installation.make_environment(folder) == folder / "bin" / "python"
    assert [command[-1] for command in commands] == [
        str(folder),
        installation.TORCH,
        installation.PEERS[-1],
        str(ROOT),
    ]
    monkeypatch.setattr(installation, "PEERS", ("rl-games==2.0",))
    installation.make_environment(folder)
    assert len(commands) == 8


def test_of_two_commands_one_makes_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    folder = tmp_path / "peers"
    folder.mkdir()

    def run(command: list[str], check: bool) -> None:
        commands.append(command)
        time.sleep(0.05)  # the other looks for the marker meanwhile

    monkeypatch.setattr(installation.subprocess, "run", run)
    with ThreadPoolExecutor() as pool:
        pythons = list(pool.map(installation.make_environment, [folder, folder]))
    assert pythons == [folder / "bin" / "python"] * 2
    assert len(commands) == 4


@pytest.mark.parametrize(
    ("case", "horizon"), [("chasing", "16"), ("pursuit", "16"), ("pendulum", "1024")]
)
def test_a_row_has_the_horizon_that_was_played(case: str, horizon: str) -> None:
    found = {
        "steps_per_second": 1.0,
        "peak_mib": 1.0,
        "score": 1.0,
        "version": "1",
        "note": "",
        "machine": {"device": "cpu"},
    }
    rows = compare.rows_of(compare.parse(["--case", case, "--horizon", "16"]), {"gpurl": [found]})
    assert [row["horizon"] for row in rows] == [horizon] * 3
    # a run of another size is another measurement
    steps = {"chasing": 12 * 4096 * 16, "pursuit": 12 * 4096 * 16, "pendulum": 100_000}
    assert {row["steps"] for row in rows} == {str(steps[case])}
    assert {
        row["horizon"]
        for row in read_rows(ROOT / "benchmarks" / "results" / "peers_cpu.csv")
        if row["case"] == "pendulum tanh"
    } <= {*("", "1024")}
