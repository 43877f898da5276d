"""The check for a machine with a GPU: what it lacks is named, parts are kept apart and within their
time. No GPU is needed here.
"""

import importlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks.results_table import read_rows
from tests.tools import gpu_check, wheels
from tests.tools.gpu_check import Part

MISSING = ("no-such-thing-a", "no-such-thing-b")
A_IS_X = (("A", "x"),)


def write_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A pure wheel with one module that knows its version."""
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    info = f"{module}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", f"VERSION = '{version}'\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


# ---- what is needed ----


def test_own_requirements_are_those_of_pyproject() -> None:
    found = {Requirement(each).name for each in wheels.own_requirements()}
    assert {"torch", "gymnasium", "tyro", "matplotlib", "pytest"} <= found
    assert len(found) == 15
    assert {Requirement(each).name for each in wheels.physics_requirements()} == {
        "mujoco",
        "mujoco-warp",
        "warp-lang",
    }


def test_requirements_are_followed_through_extras_and_markers() -> None:
    known = {
        "a": ("b[more]>=2", "c; python_version < '3'", "torch>=2"),
        "b": ("d; extra == 'more'", "e; extra == 'other'", "f>=1"),
        "d": (),
    }

    def find(requirement: Requirement) -> wheels.Distribution | None:
        name = requirement.name
        return wheels.Distribution(name, "2.0", known[name]) if name in known else None

    found, missing = wheels.closure(["a", "f<3"], find)
    assert list(found) == [
        "a",
        "b",
        "d",
    ]  # c is for another Python, e of another extra, torch is the machine's
    assert {name: str(requirement) for name, requirement in missing.items()} == {"f": "f<3,>=1"}


def test_markers_are_those_of_the_other_machine() -> None:
    known = wheels.Distribution("a", "1", ("b; python_version >= '3.99'",))
    _, missing = wheels.closure(
        ["a"],
        lambda requirement: known if requirement.name == "a" else None,
        {"python_version": "3.99"},
    )
    assert list(missing) == ["b"]


def test_what_is_installed_needs_no_wheel_and_what_is_too_old_does(tmp_path: Path) -> None:
    write_wheel(tmp_path, MISSING[0], "1.5", (MISSING[1],))
    own = write_wheel(tmp_path, "pytest", "999.0")
    assert gpu_check.needed(["pytest>=8"], tmp_path) == ([], [])
    assert gpu_check.needed(["pytest>=900"], tmp_path) == ([own], [])
    files, missing = gpu_check.needed([f"{MISSING[0]}>=1"], tmp_path)
    assert [file.name for file in files] == ["no_such_thing_a-1.5-py3-none-any.whl"]
    assert missing == [MISSING[1]]
    assert gpu_check.needed([f"{MISSING[0]}>=2"], tmp_path) == ([], [f"{MISSING[0]}>=2"])


def test_what_is_missing_is_named_with_the_pinned_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wheels, "installed", lambda requirement: None)
    _, missing = gpu_check.needed(["tyro>=1.0,<2", "pyyaml>=6"], tmp_path)
    pins = {
        line.partition(";")[0].strip().lower()
        for line in wheels.CONSTRAINTS.read_text().splitlines()
    }
    assert len(missing) == 2
    assert {each.lower() for each in missing} <= pins


def test_levels_are_resolved_one_by_one_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"a": ["b>=1", "torch"], "b": ["c"], "c": ["b<5"]}
    asked: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        names = [word for word in command[command.index("--option") + 1 :]]
        asked.append(names)
        items = [
            {"metadata": {"name": name[0], "version": "3", "requires_dist": needs[name[0]]}}
            for name in names
        ]
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": items}))

    monkeypatch.setattr(wheels.subprocess, "run", run)
    assert list(wheels.resolved(["a", "torch>=2"], ["--option"], {})) == ["a", "b", "c"]
    assert asked == [["a"], ["b>=1"], ["c"]]
    needs["c"] = ["b<2"]
    with pytest.raises(ValueError, match="b 3 was chosen, but b<2 is needed too"):
        wheels.resolved(["a"], ["--option"], {})


def test_what_the_machine_has_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    chosen = {
        name: wheels.Distribution(name, "1", ()) for name in ("numpy", "tyro", "docstring-parser")
    }
    monkeypatch.setattr(wheels, "resolved", lambda roots, target, environment: chosen)
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, check: commands.append(command))
    (tmp_path / "have").write_text("numpy==2.5.2\nDocstring_Parser @ file:///x\n")
    assert (
        wheels.main(
            [
                "--have",
                str(tmp_path / "have"),
                "--folder",
                str(tmp_path),
                "--python-version",
                "3.12",
            ]
        )
        == 0
    )
    assert commands[0][-1] == "tyro==1"
    assert "numpy==1" not in commands[0]
    assert commands[0][commands[0].index("--python-version") + 1] == "3.12"
    assert "1 wheels for Python 3.12" in capsys.readouterr().out


# ---- the command ----


def test_without_a_gpu_it_says_what_is_missing_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert (
        gpu_check.main(["--dry-run", "--wheels", str(tmp_path), "--out", str(tmp_path)])
        == gpu_check.NO_GPU
    )
    said = capsys.readouterr().out
    assert f"no GPU can be used: torch {torch.__version__}" in said
    assert "-m benchmarks.throughput --device cuda" in said
    assert not list(tmp_path.iterdir())


def test_wheels_that_are_missing_stop_it_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpu", lambda: "Some GPU")
    monkeypatch.setattr(wheels, "own_requirements", lambda: [MISSING[0]])
    assert gpu_check.main(["--wheels", str(tmp_path)]) == gpu_check.WHEELS_MISSING
    assert f"gpurl: neither installed nor in {tmp_path}: {MISSING[0]}" in capsys.readouterr().out


def test_wheels_are_put_on_the_path_and_peers_are_left_out_without_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "wheels", MISSING[0], "1.5")
    monkeypatch.setattr(gpu_check, "gpu", lambda: "Some GPU")
    monkeypatch.setattr(gpu_check, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_check, "PEERS", (MISSING[1],))
    monkeypatch.setattr(wheels, "own_requirements", lambda: [MISSING[0]])
    show = "import no_such_thing_a, gpurl; print('found', no_such_thing_a.VERSION)"
    own, peers = (
        Part("doctor", "measure", ("-c", show), 60),
        Part("peers", "measure", ("-c", "print('peers ran')"), 60, needs="peers"),
    )
    monkeypatch.setattr(gpu_check, "parts", lambda out: [own, peers])
    assert gpu_check.main(["--wheels", str(tmp_path / "wheels")]) == 0
    said = capfd.readouterr().out
    assert "found 1.5" in said
    assert "peers ran" not in said
    assert "skipped: wheels are missing" in said
    write_wheel(tmp_path / "wheels", MISSING[1], "1")
    assert gpu_check.main(["--wheels", str(tmp_path / "wheels")]) == 0
    assert "peers ran" in capfd.readouterr().out


def test_a_part_that_fails_does_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    three = [
        Part("bad", "tests", ("-c", "raise SystemExit(7)"), 60),
        Part("good", "tests", ("-c", "import os; print('ran', os.environ['A'])"), 60, A_IS_X),
        Part("checked", "tests", ("python",), 60, program="no-such-sanitizer"),
    ]

    def run(parts: list[Part], seconds: float) -> int:
        return gpu_check.run_all(parts, {"": []}, {"tests": time.monotonic() + seconds})

    assert run(three, 60) == 1
    said = capfd.readouterr().out
    assert "ran x" in said
    assert "failed with code 7" in said
    assert "skipped: there is no no-such-sanitizer" in said
    assert run(three[1:], 60) == 0
    assert run(three[1:], 1) == 1
    assert "not run: no time is left" in capfd.readouterr().out


def test_a_part_that_takes_too_long_is_interrupted_with_what_it_began(tmp_path: Path) -> None:
    code = f"""
import pathlib, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
try:
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path / "saved")!r}).write_text("yes")
"""
    verdict, lasted = gpu_check.run_part(Part("slow", "tests", ("-c", code), 60), [], 1.5)
    assert verdict == "stopped after 2 s"
    assert lasted < 30
    assert (tmp_path / "saved").read_text() == "yes"
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    deadline = time.monotonic() + 10
    while (
        child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z"
    ):  # a zombie until somebody looks
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("part", gpu_check.parts(Path("out")), ids=lambda part: part.name)
def test_every_part_is_a_command_that_exists(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are understood: argparse and tyro would leave with code 2."""
    at = part.command.index("-m")  # after the options of another program
    module, words = part.command[at + 1], list(part.command[at + 2 :])
    seen: list[Any] = []
    if module == "benchmarks.throughput":
        from benchmarks import throughput

        seen.append(throughput.parse(words))
    elif module == "benchmarks.peers":
        from benchmarks.peers import compare

        seen.append(compare.parse(words))
    elif module == "benchmarks.physics":
        from benchmarks import physics

        seen.append(physics.parse(words))
    elif module == "benchmarks.off_policy":
        from benchmarks.off_policy import compare as replaying
        from benchmarks.off_policy.job import Job

        options = replaying.parse(words)
        seen.append(Job("replay", "gpurl", seconds=options.seconds, **options.sizes))
    elif module == "benchmarks.kernels":
        from benchmarks.results_table import parser

        seen.append(parser("", 1.0).parse_args(words))
    elif module in ("benchmarks.profiles", "benchmarks.trainings"):
        seen.append(importlib.import_module(module).parse(words))
    elif module == "gpurl":
        from gpurl.cli.main import COMMANDS

        assert words[0] in COMMANDS
        seen.append(words)
    else:
        assert module == "pytest"
        seen.append(words)
    assert seen


@pytest.mark.parametrize("half", gpu_check.HALVES)
def test_the_parts_of_a_half_that_need_no_other_wheels_fit_into_its_time(half: str) -> None:
    assert gpu_check.HALF_SECONDS == 9 * 60
    limits = [
        part.seconds
        for part in gpu_check.parts(Path("out"))
        if part.half == half and not part.needs and part.program == sys.executable
    ]
    assert len(limits) >= 2
    assert sum(limits) <= 1.1 * gpu_check.HALF_SECONDS  # limits, not what they usually take


def test_what_was_measured_is_on_disk_when_a_half_is_killed(tmp_path: Path) -> None:
    """As where a machine is lent for minutes: nobody asks the processes to stop."""
    words = ["-m", "benchmarks.throughput", "--device", "cpu", "--out", str(tmp_path)]
    words += ["--num-envs", "8", "16", "--seconds", "0.2"]
    with subprocess.Popen([sys.executable, *words], cwd=gpu_check.ROOT) as process:
        deadline = time.monotonic() + 120
        while not (rows := read_rows(tmp_path / "throughput_cpu.csv")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.wait()
    assert rows[0]["case"] == "chasing env"
    assert float(rows[0]["value"]) > 0.0
    left = read_rows(tmp_path / "throughput_cpu.csv")
    assert left[: len(rows)] == rows


def test_gpu_tests_are_skipped_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest, torch\n@pytest.mark.gpu\ndef test_gpu(): assert "
        "torch.cuda.is_available()\ndef test_cpu(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout or "2 passed" in done.stdout
