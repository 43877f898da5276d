"""The ablation ladder: rungs build on each other, are compared before they are timed, and take
turns.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ladder
from benchmarks.results_table import read_rows
from gpurl.errors import GpurlError
from gpurl.run.settings import make_settings

CPU = torch.device("cpu")


def small_ladder(tmp_path: Path) -> int:
    return ladder.run(CPU, rounds=3, seconds=0.0, folder=tmp_path, num_envs=4, horizon=2)


def test_a_rung_has_all_that_those_before_it_have() -> None:
    rungs, skipped = ladder.rungs_for("cpu")
    assert list(rungs) == ["eager", "+ C kernel"]
    assert rungs["eager"].settings == rungs["+ C kernel"].settings
    assert rungs["+ C kernel"].environment == {"GPURL_BACKEND": "torch", "GPURL_CPU_KERNEL": "1"}
    assert all(skipped.values())
    rungs, skipped = ladder.rungs_for("cuda")
    assert list(skipped) == ["+ C kernel"]
    last = rungs["+ bf16"]
    assert last.settings == {
        "graph": "full",
        "rollout": "persistent",
        "update": "fused",
        "compile": False,
        "precision": "bf16",
    }
    assert last.environment == {"GPURL_BACKEND": "auto", "GPURL_CPU_KERNEL": "0"}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_rung_is_of_settings_that_exist(kind: str) -> None:
    for rung in ladder.rungs_for(kind)[0].values():
        config = make_settings("ppo", "chasing", **rung.settings).train
        assert {name: getattr(config, name) for name in rung.settings} == rung.settings


def test_a_rung_compares_before_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "median_seconds", lambda functions, device, budget: {"": 0.5})
    eager = ladder.rungs_for("cpu")[0]["eager"]
    job = {
        "name": "eager",
        "settings": eager.settings,
        "device": "cpu",
        "num_envs": 4,
        "horizon": 2,
        "seconds": 0.0,
        "expected": None,
    }
    first = ladder.measure_here(job)
    assert first["rate"] == 4 * 2 / 0.5
    assert len(first["returns"]) == 4
    assert ladder.measure_here(job | {"expected": first["returns"]})["returns"] == first["returns"]

    def timed(*arguments: Any) -> dict[str, float]:
        raise AssertionError("timed before it was compared")

    monkeypatch.setattr(ladder, "median_seconds", timed)
    with pytest.raises(
        GpurlError,
        match=r"returns of the first rollout differ from those of eager by 0\.1",
    ):
        ladder.measure_here(job | {"expected": [first["returns"][0] + 0.1, *first["returns"][1:]]})
    with pytest.raises(GpurlError, match="differ from those of eager by nan"):
        ladder.measure_here(job | {"expected": [math.nan] * 4})


def fake_rungs(
    monkeypatch: pytest.MonkeyPatch, rates: dict[str, list[float]]
) -> list[tuple[str, Any, str]]:
    """Processes that answer from `rates`, where a rung fails once its own are used up; what was
    asked of them.
    """
    asked: list[tuple[str, Any, str]] = []

    def run_once(
        python: Path, module: str, job: dict[str, Any], environment: dict[str, str], name: str
    ) -> dict[str, Any]:
        asked.append((job["name"], job["expected"], environment["GPURL_CPU_KERNEL"]))
        if not rates[job["name"]]:
            raise GpurlError("broken")
        engine = {
            "precision": "float32",
            "graph": "off",
            "rollout": "steps",
            "update": "autograd",
        }
        machine = {"device": "cpu"}
        return {
            "returns": [0.5],
            "rate": rates[job["name"]].pop(0),
            "engine": engine,
            "machine": machine,
        }

    monkeypatch.setattr(ladder, "run_once", run_once)
    return asked


def test_rungs_take_turns_and_their_medians_and_spread_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = fake_rungs(
        monkeypatch, {"eager": [100.0, 300.0, 200.0], "+ C kernel": [500.0, 400.0, 600.0]}
    )
    assert small_ladder(tmp_path) == 0
    first, *later = asked
    assert first == ("eager", None, "0")
    turns = [
        ("+ C kernel", "1"),
        ("+ C kernel", "1"),
        ("eager", "0"),
        ("eager", "0"),
        ("+ C kernel", "1"),
    ]
    assert later == [(name, [0.5], kernel) for name, kernel in turns]
    rows = read_rows(tmp_path / "ladder_cpu.csv")
    assert [(row["rung"], row["value"], row["lowest"], row["highest"]) for row in rows] == [
        ("eager", "200", "100", "300"),
        ("+ C kernel", "500", "400", "600"),
    ]
    said = capsys.readouterr().out
    assert re.search(r"\+ C kernel +500\.0 +400\.0-600\.0 +2\.50 +2\.50 +float32", said)
    assert "skipped: + graph full: CUDA graphs need a GPU" in said


def test_a_rung_that_fails_has_no_number_and_the_ladder_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_rungs(monkeypatch, {"eager": [100.0] * 3, "+ C kernel": [500.0]})
    assert small_ladder(tmp_path) == 1
    assert [row["rung"] for row in read_rows(tmp_path / "ladder_cpu.csv")] == ["eager"]
    assert "failed: + C kernel: broken" in capsys.readouterr().out
