"""Hostile files in every place that takes a file: nothing in them is executed, and each is an error
with its code, not a crash.
"""

import json
import os
import random
import resource
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import gpurl
from gpurl.api import resume
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.cli.convert.tensors import read_foreign, run_worker
from gpurl.cli.convert.worker import Refused, check_archive
from gpurl.errors import CheckpointError, GpurlError, UsageError
from gpurl.run.plot import note_references, read_metrics
from gpurl.run.records import write_record
from gpurl.run.run_folder import create_run_folder
from gpurl.run.trackers.process import TrackerProcess
from gpurl.run.trackers.tracker import RunCard
from tests.checkpoints.test_checkpoint_damage import sign
from tests.converted import convert, forked
from tests.hostile_files import HOSTILE, LIVE, trust
from tests.small_runs import exit_code, small_run

Words = list[str]
CARD = RunCard("project", "name", "root", {})


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("good") / "run", 1, eval_episodes=0).folder


def as_file(name: str, *words: str) -> Callable[[Path, bytes, Path], Words]:
    """A place for a file of its own, FILE in the words."""

    def put(folder: Path, content: bytes, run: Path) -> Words:
        (folder / name).write_bytes(content)
        return [str(folder / name) if word == "FILE" else word for word in words]

    return put


def as_part(name: str, *words: str) -> Callable[[Path, bytes, Path], Words]:
    """A place in the checkpoint of a run, all of its sums right; RUN in the words."""

    def put(folder: Path, content: bytes, run: Path) -> Words:
        shutil.copytree(run, folder / "run")
        (step,) = (folder / "run" / "checkpoints").glob("step_*")
        (step / name).write_bytes(content)
        if name != "manifest.json":
            sign(step)
        return [str(folder / "run") if word == "RUN" else word for word in words]

    return put


def in_run(name: str, *words: str) -> Callable[[Path, bytes, Path], Words]:
    def put(folder: Path, content: bytes, run: Path) -> Words:
        shutil.copytree(run, folder / "run")
        (folder / "run" / name).write_bytes(content)
        return [str(folder / "run") if word == "RUN" else word for word in words]

    return put


def as_results(folder: Path, content: bytes, run: Path) -> Words:
    (folder / "throughput_cpu.csv").write_bytes(content)
    return ["plot", "--bench", str(folder)]


def as_leaderboard(folder: Path, content: bytes, run: Path) -> Words:
    (folder / "board").mkdir()
    (folder / "board" / "leaderboard.json").write_bytes(content)
    words = ["train", "ppo", "pendulum", *SMALL[:2], *SMALL[3:], "total_steps=32", "population=2"]
    return [*words, "pbt=True", "pbt_every=16", f"pbt_leaderboard={folder / 'board'}"]


SMALL = ("num_envs=4", "horizon=2", "total_steps=8", "eval_episodes=0", "device=cpu")
EVALUATED = (*SMALL[:3], "eval_episodes=1", "device=cpu")
PLACES: dict[str, tuple[Callable[[Path, bytes, Path], Words], set[int]]] = {
    "--config": (as_file("x.yaml", "train", "ppo", "pendulum", "--config", "FILE", *SMALL), {2}),
    "--dataset .npz": (
        as_file("x.npz", "train", "bc", "pendulum", "--dataset", "FILE", *SMALL),
        {2},
    ),
    "--dataset .safetensors": (
        as_file("x.safetensors", "train", "bc", "pendulum", "--dataset", "FILE", *SMALL),
        {2},
    ),
    "--teacher": (as_file("x.pt", "train", "bc", "pendulum", "--teacher", "FILE", *SMALL), {5}),
    "--init-from": (
        as_file("x.pt", "train", "sac", "pendulum", "--init-from", "FILE", *SMALL),
        {5},
    ),
    "--resume": (as_file("x.zip", "train", "--resume", "FILE"), {2}),
    "eval": (as_file("x.pt", "eval", "FILE"), {5}),
    "play": (as_file("x.pth", "play", "FILE"), {5}),
    "doctor": (as_file("x.pt", "doctor", "FILE"), {5}),
    "plot": (as_file("x.pt", "plot", "FILE"), {2}),
    "model in eval": (as_part("model.safetensors", "eval", "RUN"), {5}),
    "trainer in --resume": (as_part("trainer.safetensors", "train", "--resume", "RUN"), {5}),
    "state.json in play": (as_part("state.json", "play", "RUN"), {5}),
    "manifest in doctor": (as_part("manifest.json", "doctor", "RUN"), {5}),
    "metrics.jsonl in plot": (in_run("metrics.jsonl", "plot", "RUN"), {0}),
    "references.json in plot": (in_run("references.json", "plot", "RUN"), {0}),
    "metrics.jsonl in --resume": (
        in_run("metrics.jsonl", "train", "--resume", "RUN", "--total-steps", "256", "--quiet"),
        {0},
    ),
    "plot --bench": (as_results, {2}),
    "convert .pt": (as_file("x.pt", "convert", "FILE"), {5}),
    "convert .zip": (as_file("x.zip", "convert", "FILE"), {5}),
    "convert .safetensors": (as_file("x.safetensors", "convert", "FILE"), {5}),
    "--space": (as_file("x.yaml", "tune", "ppo", "pendulum", "--space", "FILE", *EVALUATED), {2}),
    "journal of tune": (
        as_file("x.journal", "tune", "ppo", "pendulum", "--storage", "FILE", *EVALUATED),
        {2},
    ),
    "journal of tune --show": (as_file("x.journal", "tune", "--show", "FILE"), {2}),
    "SQLite of tune": (
        as_file("x.db", "tune", "ppo", "pendulum", "--storage", "FILE", *EVALUATED),
        {2},
    ),
    "SQLite of tune --show": (as_file("x.db", "tune", "--show", "FILE"), {2}),
    "--pbt-leaderboard": (as_leaderboard, {0}),
    "MJCF": (
        as_file("x.xml", "train", "ppo", "inverted_pendulum", "--env.xml-file", "FILE", *SMALL),
        {2},
    ),
}


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    """Pictures are not what is looked at, and the worker of convert need not import torch each
    time.
    """
    with (
        patch("gpurl.run.plot.save_figure", lambda figure, path: path),
        patch("gpurl.cli.convert.tensors.run_worker", forked),
    ):
        yield


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_a_file_is_executed(
    place: str,
    kind: str,
    a_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place == "MJCF":
        pytest.importorskip("mujoco_warp")
    put, codes = PLACES[place]
    inside, canary = tmp_path / "inside", tmp_path / "canary"
    inside.mkdir()
    monkeypatch.chdir(inside)
    code = exit_code(put(inside, HOSTILE[kind](canary), a_run))
    message = capsys.readouterr().err
    assert not canary.exists()
    assert code in codes, message
    assert "Traceback" not in message
    assert not codes & {2, 5} or message.startswith("gpurl: ")


@pytest.mark.parametrize("kind", LIVE)
def test_what_was_tried_does_something_when_it_is_trusted(kind: str, tmp_path: Path) -> None:
    canary, inside = tmp_path / "canary", tmp_path / "inside"
    inside.mkdir()
    trust(kind, HOSTILE[kind](canary), inside)
    assert canary.exists()


# ---- names ----


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "..", "~/x", "a\0b", ""])
def test_names_of_runs_and_of_parts_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "a" / "b"
    assert create_run_folder(inside, name, name, 0).resolve().is_relative_to(inside)
    with pytest.raises(CheckpointError, match="parts named"):
        save_checkpoint(inside, 1, {name: {}})
    assert not (tmp_path / "x").exists()


def test_a_module_in_a_strangers_run_folder_is_not_found(
    a_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments are code, imported by name: from where Python finds modules, which the folder of
    a run is not.
    """
    folder = shutil.copytree(a_run, tmp_path / "run")
    for place in (folder, folder / "checkpoints"):
        (place / "strange_task.py").write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})")
    parts, manifest = load_checkpoint(folder)
    parts["meta"]["settings"]["env"] = "strange_task"
    shutil.rmtree(folder / "checkpoints" / f"step_{manifest['step']:012d}")
    save_checkpoint(folder / "checkpoints", manifest["step"], parts)
    assert exit_code(["eval", str(folder)]) == 2
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("env", "nest"),
    [
        ("isaac_gym:Ant", lambda options: options),
        ("frame_stack:isaac_gym:Ant", lambda options: {"task_options": options}),
    ],
)
def test_no_run_and_no_configuration_starts_a_program(
    env: str, nest: Any, a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nmkdir {tmp_path / 'canary'}\n")
    program.chmod(0o755)
    options = nest({"python": str(program)})
    # a run that names it
    folder = shutil.copytree(a_run, tmp_path / "run")
    parts, manifest = load_checkpoint(folder)
    parts["meta"]["settings"] |= {"env": env, "env_options": options}
    shutil.rmtree(folder / "checkpoints" / f"step_{manifest['step']:012d}")
    save_checkpoint(folder / "checkpoints", manifest["step"], parts)
    # a configuration that does
    config = tmp_path / "x.yaml"
    config.write_text(json.dumps({"algorithm": "ppo", "env": env, "env_options": options}))
    for words in (
        ["eval", str(folder)],
        ["play", str(folder)],
        ["train", "--resume", str(folder)],
        ["train", "--config", str(config), *SMALL],
    ):
        assert exit_code(words) == 2
        assert "no option python" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


# ---- a stranger's run folder ----

WRITTEN = ("references.json", "metrics.jsonl", "command.txt", "ended.json", "run.pid", "run.lock")
FOLDERS = ("checkpoints", "records", "tracking", "non_finite", "videos")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_resume_writes_through_no_link_and_waits_for_no_pipe(
    kind: str, a_run: Path, tmp_path: Path
) -> None:
    """Also into a run of the victim's, whose old checkpoints would be removed."""
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    for name in (*WRITTEN, "checkpoints/.lock", "checkpoints/LATEST"):
        run = shutil.copytree(a_run, tmp_path / name.replace("/", "_"))
        (run / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(run / name)
        else:
            (run / name).symlink_to(victim)
        words = ["train", "--resume", str(run), "--total-steps", "256", "--quiet"]
        assert exit_code(words) in (0, 5), name
        with suppress(GpurlError):
            note_references(run, {"scripted policy": 1.0})
        assert victim.read_text() == "mine\n", name


def test_folders_of_a_run_are_no_links(a_run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(a_run, tmp_path / "other")
    before = sorted(other.rglob("*"))
    run = shutil.copytree(a_run, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(other / "checkpoints")
    with pytest.raises(CheckpointError, match="it is a link"):
        save_checkpoint(run / "checkpoints", 10**6, {"model": {}}, keep=1)
    for make in (lambda path: write_record(path), lambda path: TrackerProcess("wandb", CARD, path)):
        run = tmp_path / f"run{len(os.listdir(tmp_path))}"
        run.mkdir()
        for name in FOLDERS:
            (run / name).symlink_to(other)
        with pytest.raises(OSError, match="it is a link"):
            make(run)
    assert sorted(other.rglob("*")) == before


def test_a_page_shows_nothing_of_what_links_lead_to(a_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(a_run, tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text("a secret: [1\n")
    for name in ("command.txt", "records/0/git.diff", "config.yaml"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
    assert exit_code(["report", str(run)]) == 0
    assert "secret" not in (run / "report.html").read_text().replace(str(secret), "")


# ---- sizes, numbers and lines ----


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content",
    [
        b"seed: " + b"1:" * 500_000 + b"1",  # to base 60
        b"gamma: " + b"1:" * 300_000 + b"1.0",
        b"seed: !!int ''",
        b"gamma: !!float ''",
        b"seed: !!timestamp x",
        b"stagger: !!bool x",
        b"? [1]\n: 2",
        b"network: {1: 2}",
        b"env_options: {1: 2}",
        b"network: {0: 2}",
        b"learning_rate: " + b"9" * 390,
        b"seed: " + b"9" * 300,
        b"network: {hidden: [" + b"9" * 30 + b"]}",
        b'"\\ud800": 1',
    ],
    ids=range(14),
)
def test_a_configuration_that_no_setting_has_is_an_error_at_once(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    began = time.process_time()  # its own, whatever else runs
    assert (
        exit_code(["train", "ppo", "pendulum", "--config", str(tmp_path / "x.yaml"), *SMALL]) == 2
    )
    assert capsys.readouterr().err.startswith("gpurl: ")
    assert time.process_time() - began < 20.0  # one of them took 65


@pytest.mark.parametrize(
    "words",
    [
        ["--seed", str(1 << 63)],
        ["--eval-episodes", str(10**30)],
        ["--network.hidden", str(10**30)],
        ["--network.hidden", "1000000000", "1000000000"],
        ["--run-dir", "a\0b"],
        ["--root", "a\0b"],
        ["--run-dir", "x" * 5000],
        ["--run-dir", "a\udcff"],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_flag_that_no_run_can_have_is_an_error(
    words: Words, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = {word.removeprefix("--").replace("-", "_") for word in words if word[:2] == "--"}
    others = [word for word in SMALL if word.partition("=")[0] not in changed]
    assert exit_code(["train", "ppo", "pendulum", *others, *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_json_takes_no_more_memory_than_its_limit_allows(a_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(a_run, tmp_path / "run")
    (step,) = (run / "checkpoints").glob("step_*")
    (step / "state.json").write_bytes(b"[" + b"[]," * (6 << 20) + b"[]]")
    sign(step)
    with pytest.raises(CheckpointError, match="more than 16777216 bytes"):
        gpurl.load(run)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "time": "x"}',
        '{"step": 1, "time/iterations": "x", "time/non_finite_scalars": [1]}',
        '{"step": 1, "time/iterations": Infinity}',
        '{"step": 1, "time": 1' + "0" * 400 + "}",
        "a line of somebody's",
        "[1]",
    ],
)
def test_foreign_lines_in_the_log_break_no_resume(line: str, a_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(a_run, tmp_path / "run")
    own = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f"{line}\n{own}")
    resume(run, total_steps=256, quiet=True)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert lines[: 1 + own.count("\n")] == [line, *own.splitlines()]
    assert json.loads(lines[-1])["step"] == 256
    assert json.loads(lines[-1])["time/iterations"] == 2


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread")], ids=["memory", "threads"]
)
def test_what_the_system_refuses_is_a_sentence(
    error: Exception, capsys: pytest.CaptureFixture
) -> None:
    with patch("gpurl.api.evaluate_run", side_effect=error):
        assert exit_code(["eval", "run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.timeout(60)
def test_lists_that_share_lists_are_counted(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(50):
        nested = [nested, nested]
    torch.save({"a": torch.ones(1), "b": nested}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds more than"):
        read_foreign(tmp_path / "x.pt")


# ---- content that is absurd ----


def test_a_checkpoint_of_nonsense_with_right_sums_is_an_error(a_run: Path, tmp_path: Path) -> None:
    """One value of the state is another or is gone."""
    parts, manifest = load_checkpoint(a_run)
    rng, refused = random.Random(1), 0
    nonsense: list[Any] = [
        None,
        True,
        -1,
        10**30,
        float("nan"),
        "x",
        [],
        {},
        [1, 2],
        torch.ones(3),
        torch.ones(2, 2, dtype=torch.int64),
    ]
    places = [
        (part, name, inner)
        for part in ("meta", "trainer", "training", "model")
        for name, inner in _places(parts[part])
    ]
    for number in range(16):
        part, name, inner = rng.choice(places)
        changed = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in parts[part].items()
        }
        owner, key = (changed, name) if inner is None else (changed[name], inner)
        if rng.random() < 0.3:
            del owner[key]
        else:
            owner[key] = rng.choice(nonsense)
        folder = tmp_path / str(number)
        save_checkpoint(folder / "checkpoints", manifest["step"], parts | {part: changed})
        for call in (
            gpurl.load,
            lambda path: resume(path, total_steps=129, eval_episodes=0, threads=1),
        ):
            try:
                call(folder)
            except GpurlError:
                refused += 1
    assert refused > 8


def _places(state: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    for name, value in state.items():
        yield name, None
        if isinstance(value, dict):
            yield from ((name, inner) for inner in value)


def test_a_log_of_nonsense_is_drawn_without_it(tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "train/loss": 2.0, "eval/mean_reward": 3.0})
    nonsense = [
        "[" * 100_000,
        '{"a":' * 50_000,
        '{"step": 1e400}',
        '{"step": 1' + "0" * 5000 + "}",
        '{"step": "x"}',
        "\0\xff",
        "NaN",
        "[]",
    ]
    nonsense += [
        '{"step": NaN, "a": 1}',
        '{"step": 2, "train/loss": 1' + "0" * 400 + "}",
        '{"step": {"a": 1}}',
        '{"step": 1e300, "a": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([good, *nonsense, '{"step": 2, "train/loss": Infinity, "a": 1e308}', ""])
    )
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b" " * (3 << 20))  # one line of any length costs no more memory than a short one
        file.write(b"\n" + good.encode() + b"\n")
    series = read_metrics(tmp_path)
    assert series["train/loss"][0] == [1.0, 2.0, 1.0]
    assert series["eval/mean_reward"] == ([1.0, 1.0], [3.0, 3.0])
    assert exit_code(["plot", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: [" * 5000, "cannot read"),
        (
            b"a: &a [x, x, x, x, x, x, x, x]\n"
            + b"".join(
                f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n".encode()
                for a, b in zip("abcdefghij", "bcdefghijk")
            ),
            "more than 10000 values",
        ),
        (b"seed: " + b"1" * (2 << 20), "more than 1048576 bytes"),
        (b"seed: " + b"1" * 5000, "cannot read"),
        (b"a: &a [*a]\n", "cannot read"),
        (
            b"a: &a {x: 1}\n"
            + b"".join(
                f"{b}: &{b}\n  <<: [{', '.join([f'*{a}'] * 10)}]\n".encode()
                for a, b in zip("abcdef", "bcdefg")
            ),
            "merge keys (<<) are not allowed",
        ),
    ],
    ids=range(6),
)
def test_settings_that_stand_for_too_much_are_refused(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    assert exit_code(["train", "ppo", "pendulum", "--config", str(tmp_path / "x.yaml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe"])
@pytest.mark.timeout(60)
def test_what_has_no_end_is_not_read(
    kind: str,
    tmp_path: Path,
    a_run: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(a_run, tmp_path / "run")
    (step,) = run.glob("checkpoints/step_*")
    for name, words, code in (
        ("x.yaml", ["train", "ppo", "pendulum", "--config", "x.yaml"], 2),
        ("x.npz", ["train", "bc", "pendulum", "--dataset", "x.npz", *SMALL], 2),
        ("x.safetensors", ["train", "bc", "pendulum", "--dataset", "x.safetensors", *SMALL], 2),
        ("x.pt", ["convert", "x.pt"], 2),
        ("y.safetensors", ["convert", "y.safetensors"], 2),
        ("throughput_x.csv", ["plot", "--bench", "."], 2),
        ("run/references.json", ["plot", "run"], 0),
        ("run/metrics.jsonl", ["plot", "run"], 2),
        ("run/checkpoints/LATEST", ["eval", "run", "--episodes", "1"], 0),
        (str(step / "state.json"), ["eval", "run"], 5),
    ):
        (tmp_path / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).symlink_to(kind)
        assert exit_code(words) == code, words
    assert "it is no regular file" in capsys.readouterr().err


def test_names_in_files_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    name = "\x1b[31m\ngpurl: all is well\r\u202e"
    torch.save(
        {
            name: torch.ones(2, 3),
            f"{name}.weight": torch.ones(2, 3),
            f"{name}.bias": torch.ones(2),
            f"{name}.n": 1,
        },
        tmp_path / "x.pt",
    )
    torch.save({name: torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({name: {"a": torch.ones(1)}, f"{name}.a": torch.ones(1)}, tmp_path / "twice.pt")
    torch.save({name: torch.ones(1), f"module.{name}": torch.ones(1)}, tmp_path / "wrapped.pt")
    np.savez(tmp_path / "x.npz", **{name: np.ones(2)})
    assert convert(tmp_path / "x.pt") == 0
    assert [convert(tmp_path / f"{each}.pt") for each in ("sparse", "twice", "wrapped")] == [
        5,
        5,
        5,
    ]
    assert (
        convert(
            tmp_path / "x.pt",
            "--algorithm",
            "ppo",
            "--env",
            "pendulum",
            "--network.activation",
            "tanh",
        )
        == 5
    )
    assert exit_code(["train", "bc", "pendulum", "--dataset", str(tmp_path / "x.npz"), *SMALL]) == 2
    message = "".join(capsys.readouterr())
    assert message.count("\\x1b[31m\\ngpurl") >= 9
    assert not {"\x1b", "\r", "\u202e"} & set(message)
    assert "\ngpurl: all is well" not in message


# ---- gpurl convert ----


class Unknown:
    """A class that loading would have to call."""


def test_what_convert_refuses_and_why(tmp_path: Path) -> None:
    def written(value: Any, name: str = "x.pt") -> Path:
        torch.save(value, tmp_path / name)
        return tmp_path / name

    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("policy.pth", b"\0" * (100 << 20))
    zeros = tmp_path / "zeros.pt"
    with zeros.open("wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "folder.pt").mkdir()
    loop: list[Any] = []
    loop.append(loop)
    cases = [
        (
            written(Unknown(), "a.pt"),
            r"it names tests\.test_security\.Unknown, which loading it would call",
        ),
        (written(torch.nn.Linear(2, 2), "b.pt"), r"it names torch\.nn\.modules\.linear\.Linear"),
        (written({"a": torch.ones(1).expand(10**12)}, "c.pt"), "tensors would take 4000000000000"),
        (
            written({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "d.pt"),
            r"two tensors called 'a\.b'",
        ),
        (
            written({"a": torch.ones(1, dtype=torch.complex64)}, "e.pt"),
            "which safetensors does not hold",
        ),
        (written({"a": torch.ones(1), "module.a": torch.ones(1)}, "f.pt"), "has a twice"),
        (written({"it": 3}, "g.pt"), "holds no tensors"),
        (written(loop, "h.pt"), "nests deeper than 64"),
        (zeros, "torch.save did not write it so"),
        (bomb, "unpacks to 104857600: no file of weights does"),
    ]
    for path, message in cases:
        with pytest.raises(CheckpointError, match=message) as refusal:
            read_foreign(path)
        assert "weights_only" not in str(refusal.value)  # torch's advice would be to execute it
    with pytest.raises(UsageError, match=r"reads \.pt"):
        read_foreign(tmp_path / "x.npz")
    with pytest.raises(UsageError, match="is a folder, wanted a file"):
        read_foreign(tmp_path / "folder.pt")
    assert convert(tmp_path / "none.pt") == 2


@pytest.mark.parametrize(
    "name", ["../x.pth", "a/../../x.pth", "/x.pth", "a\\x.pth", "C:x.pth", "link.pth", "twice.pth"]
)
def test_members_of_a_zip_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    member = zipfile.ZipInfo(name)
    if name == "link.pth":
        member.external_attr = 0o120777 << 16
    with (
        zipfile.ZipFile(tmp_path / "x.zip", "w") as archive,
        pytest.warns() if name == "twice.pth" else nullcontext(),
    ):
        for _ in range(1 + (name == "twice.pth")):
            archive.writestr(member, "x")
    with (
        zipfile.ZipFile(tmp_path / "x.zip") as archive,
        pytest.raises(Refused, match=r"its zip has (the|2) (member|link)"),
    ):
        check_archive(archive, 1000)


def test_tensors_come_out_as_they_were_by_their_path(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    numbers = {"numpy": np.float32(2.0), "it": 3, "names": ("x", None)}
    state = {
        "model": {"module.z": base, "_orig_mod.a": base.t(), "row": base[1]},
        "list": [torch.ones(2, dtype=torch.bfloat16)],
        **numbers,
    }
    torch.save(state, tmp_path / "x.pt")
    assert convert(tmp_path / "x.pt", "--out", str(tmp_path / "y.safetensors")) == 0
    message = capsys.readouterr().out
    assert "model.z" in message
    assert "[3, 4]" in message
    assert "skipped, not tensors: numpy, it, names.0, names.1" in message
    assert (
        "without the prefixes of wrappers (_orig_mod., module.): 2 names, as model.module.z"
        in message
    )
    again = read_foreign(tmp_path / "y.safetensors").tensors
    expected = {
        "model.z": base,
        "model.a": base.t(),
        "model.row": base[1],
        "list.0": torch.ones(2, dtype=torch.bfloat16),
    }
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    assert convert(tmp_path / "x.pt", "--out", str(tmp_path / "y.safetensors")) == 2
    assert "is there already" in capsys.readouterr().err


def test_the_worker_is_a_process_of_its_own_and_its_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(
        f"import os; os.mkdir({str(tmp_path / 'canary')!r})"
    )  # beside the file: must not be imported
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    (tmp_path / "out").mkdir()
    done = run_worker(tmp_path / "x.pt", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["names"] == ["a"]
    assert not (tmp_path / "canary").exists()
    monkeypatch.setattr(
        "gpurl.cli.convert.tensors.run_worker",
        lambda path, folder: subprocess.CompletedProcess([], -9, b"", b""),
    )
    with pytest.raises(
        CheckpointError, match="was ended by signal 9, as of a process that goes over its limits"
    ):
        read_foreign(tmp_path / "x.pt")


def test_the_worker_is_limited_by_the_size_of_its_file(tmp_path: Path) -> None:
    path, size = tmp_path / "x.pt", 100 << 20
    with path.open("wb") as file:
        file.truncate(size)

    def limits(source: str) -> dict[str, torch.Tensor]:
        names = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_CORE")
        return {name: torch.tensor(resource.getrlimit(getattr(resource, name))) for name in names}

    with patch("gpurl.cli.convert.worker.read", limits):
        found = {name: value.tolist() for name, value in read_foreign(path).tensors.items()}
    # weights and what may be unpacked: 4 times the file, and 64 MiB
    allowed = 4 * size + (64 << 20)
    soft, hard = found.pop("RLIMIT_AS")
    assert 3 * allowed < soft == hard
    assert found == {
        "RLIMIT_CPU": [70] * 2,
        "RLIMIT_FSIZE": [2 * allowed] * 2,
        "RLIMIT_CORE": [0] * 2,
    }
    # zeros that nothing touches: without a limit they would take no memory either
    with (
        patch("gpurl.cli.convert.worker.read", lambda source: bytes(4 << 30)),
        pytest.raises(CheckpointError, match="takes more memory than a file of its size should"),
    ):
        read_foreign(path)


def test_a_worker_that_takes_too_long_is_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with (tmp_path / "x.pt").open("wb") as file:
        file.truncate(100 << 20)

    def late(words: Words, **options: Any) -> None:
        raise subprocess.TimeoutExpired(words, options["timeout"])

    with (
        patch("gpurl.cli.convert.tensors.run_worker", run_worker),
        patch("subprocess.run", late),
    ):
        assert exit_code(["convert", str(tmp_path / "x.pt")]) == 5
    assert "x.pt is refused: reading it took more than 140 seconds" in capsys.readouterr().err
