"""An iteration takes what tests/tools/counters.json records, exactly: more is a regression, and
less is to be recorded with its reason.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpurl.algorithms import algorithm_names
from gpurl.engine.cpu_ppo import CpuPpo
from gpurl.engine.eager import Eager
from gpurl.engine.fused_update import FusedUpdate
from gpurl.kernels import c_library
from tests.tools import counters
from tests.tools.counters import CASES, measure, recorded, write

RECORD = recorded()
SAME_TORCH = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECORD["torch"],
    reason=f"recorded with torch {RECORD['torch']}, whose operations differ from others'",
)
HOW = (
    "python -m tests.tools.counters --write records what is counted now; the commit says why it "
    "changed"
)


@SAME_TORCH
@pytest.mark.parametrize("name", [f"{way} {case}" for way in ("gpu", "cpu") for case in CASES])
def test_an_iteration_takes_what_is_recorded(name: str) -> None:
    way, _, case = name.partition(" ")
    if way == "cpu" and c_library.load().functions is None:
        pytest.skip("the C kernels could not be built here")
    assert measure(way, case) == RECORD[name], HOW


def test_the_record_is_of_every_case_and_every_algorithm() -> None:
    assert set(RECORD) - {"torch"} == {f"{way} {case}" for way in ("gpu", "cpu") for case in CASES}
    assert {algorithm for algorithm, _, _ in CASES.values()} == set(algorithm_names()) - {
        "bc"
    }  # which learns as ddpg's actor does


def test_on_a_gpu_nothing_waits_and_nothing_grows() -> None:
    for name, numbers in RECORD.items():
        if name.startswith("gpu "):
            assert (numbers["waits"], numbers["grown_bytes"]) == (0, 0), name


def test_members_side_by_side_take_no_operations_of_their_own() -> None:
    for case in ("ppo chasing", "sac pendulum"):
        two, four = (RECORD[f"gpu {case}, {count} members"] for count in (2, 4))
        operations = [name for name in two if name.startswith("operations")]
        assert [two[name] for name in operations] == [four[name] for name in operations], case


def test_the_rollout_kernel_is_one_launch_and_what_counts_for_it() -> None:
    steps = CASES["ppo chasing fused"][2]["horizon"]
    assert RECORD["gpu ppo chasing fused"]["operations_a_step"] * steps <= 6


def planted(kept: list[Any]) -> None:
    kept.append(torch.ones(5).clone())
    kept[-1].cumsum(0)
    float(torch.tensor(1.0))


@SAME_TORCH
@pytest.mark.parametrize("way", ["gpu", "cpu"])
def test_one_more_operation_one_more_copy_and_what_is_never_freed_are_seen(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, kept, before = "a2c cart_pole", list[Any](), RECORD[f"{way} a2c cart_pole"]
    engine = CpuPpo if way == "cpu" else FusedUpdate
    prepare, learn = Eager.prepare, engine.learn
    monkeypatch.setattr(Eager, "prepare", lambda self: (planted(kept), prepare(self))[1])
    monkeypatch.setattr(
        engine, "learn", lambda self, data: (data["packed"] + 1.0, learn(self, data))[1]
    )
    now = measure(way, case)
    assert (
        now["operations_to_prepare"] == before["operations_to_prepare"] + 3
    )  # the ones, their copy and their sum
    assert now["unordered"] == before["unordered"] + 1
    assert now["waits"] == before["waits"] + 1
    assert now["operations_an_update"] == before["operations_an_update"] + 1
    assert now["copied_bytes"] == before["copied_bytes"] + 20
    assert now["allocations"] == before["allocations"] + 4 + (
        way == "gpu"
    )  # a fake number is a tensor
    assert now["grown_bytes"] == before["grown_bytes"] + 20


def test_a_difference_is_told_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counters, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr("sys.argv", ["counters", "--only", "cpu a2c cart_pole"])
    monkeypatch.setattr(counters, "measure", lambda way, case: {"waits": 3})
    write(
        {"torch": torch.__version__.partition("+")[0], "cpu a2c cart_pole": {"waits": 2}},
        tmp_path / "record.json",
    )
    assert counters.main() == 1
    assert capsys.readouterr().out == "cpu a2c cart_pole: waits 2 -> 3\n"
    monkeypatch.setattr("sys.argv", ["counters", "--only", "cpu a2c cart_pole", "--write"])
    assert counters.main() == 0
    monkeypatch.setattr("sys.argv", ["counters", "--only", "cpu a2c cart_pole"])
    assert counters.main() == 0
