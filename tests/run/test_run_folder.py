"""Run folders: names nobody else gets, what it takes to repeat a run, and a lock that dies with its
process.
"""

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

import gpurl
from gpurl.api import run
from gpurl.errors import CheckpointError, UsageError
from gpurl.run import run_folder as module
from gpurl.run.run_folder import create_run_folder, lock_run, run_of, write_run_info
from gpurl.run.settings import make_settings

ROOT = Path(__file__).resolve().parent.parent.parent


# ---- names ----


def test_a_folder_is_named_by_task_algorithm_time_and_seed(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "runs", "chasing", "ppo", -3)
    assert folder.is_dir()
    assert folder.parent == tmp_path / "runs" / "chasing" / "ppo"
    assert re.fullmatch(r"20\d{6}-\d{6}_-3", folder.name)


def test_creators_in_the_same_second_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "strftime", lambda _: "20260102-030405")
    with ThreadPoolExecutor(8) as pool:
        folders = list(
            pool.map(lambda _: create_run_folder(tmp_path, "chasing", "ppo", 0), range(8))
        )
    expected = {"20260102-030405_0", *(f"20260102-030405_0-{number}" for number in range(2, 9))}
    assert {folder.name for folder in folders} == expected


def test_a_chosen_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path / "a" / "b"))
        == tmp_path / "a" / "b"
    )
    assert create_run_folder(
        tmp_path, "chasing", "ppo", 0, str(tmp_path / "a" / "b")
    ).is_dir()  # there, but empty
    monkeypatch.setenv("HOME", str(tmp_path))
    assert create_run_folder(tmp_path, "chasing", "ppo", 0, "~/mine") == tmp_path / "mine"


def test_what_a_run_leaves_that_was_killed_behind_its_lock_is_taken_again(tmp_path: Path) -> None:
    """Which SIGKILL between the lock and the number of its process did, once in thousands."""
    (tmp_path / "run.lock").touch()
    assert create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path)) == tmp_path


def test_what_a_run_leaves_that_failed_at_once_is_taken_again(tmp_path: Path) -> None:
    for name in ("config.yaml", "command.txt", "run.lock", "run.pid"):
        (tmp_path / name).touch()
    assert create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path)) == tmp_path
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("num_envs: 8  # written by hand")
    with pytest.raises(UsageError, match="already holds files"):
        create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path / "mine"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="already holds files"):
        create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path))


def test_what_a_run_leaves_that_diverged_or_filmed_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    for name in ("run.lock", "config.yaml", "references.json", ".config.yaml.new"):
        (tmp_path / name).touch()
    for name in ("non_finite", "videos"):
        (tmp_path / name).mkdir()
    assert create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path)) == tmp_path


def test_pictures_go_beside_a_checkpoint_never_into_it(tmp_path: Path) -> None:
    run, copied = tmp_path / "run", tmp_path / "elsewhere" / "step_000000000008"
    checkpoint = run / "checkpoints" / "step_000000000008"
    for folder in (checkpoint, copied):
        folder.mkdir(parents=True)
    assert run_of(run) == run_of(run / "checkpoints") == run_of(checkpoint) == run
    assert run_of(copied) == copied.parent


def test_a_folder_with_files_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        UsageError,
        match=r"already holds files: continue that run with --resume, or choose another "
        r"--run-dir",
    ):
        create_run_folder(tmp_path, "chasing", "ppo", 0, str(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_place_without_folders_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in (None, str(tmp_path / "file" / "run")):
        with pytest.raises(
            UsageError, match=r"no run folder at .*/file.*; choose another place with --run-dir"
        ):
            create_run_folder(tmp_path / "file", "chasing", "ppo", 0, name)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("gymnasium_cpu:Pendulum-v1", "gymnasium_cpu_Pendulum-v1"),
        ("my_project.my_env:Env", "my_project.my_env_Env"),
        ("../../etc", "etc"),
        ("/etc/passwd", "etc_passwd"),
        ("a/b\\c d\n*", "a_b_c_d"),
        ("..", "unnamed"),
        ("", "unnamed"),
        ("-rf", "rf"),
        (".hidden", "hidden"),
        ("x" * 300, "x" * 100),
        ("a" * 50 + "." + "b" * 99, "b" * 99),
    ],
)
def test_names_are_safe_as_folders(tmp_path: Path, env: str, name: str) -> None:
    assert create_run_folder(tmp_path, env, "ppo", 0).relative_to(tmp_path).parts[:2] == (
        name,
        "ppo",
    )


# ---- what it takes to repeat a run ----


def info(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    working_directory: Path,
    config: dict[str, Any] | None = None,
) -> None:
    folder.mkdir()
    monkeypatch.chdir(working_directory)
    write_run_info(folder, config or {}, ["gpurl", "train", "--note", "two words", "it's"])


def test_config_command_and_versions_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "env": "chasing",
        "network": {"hidden": [64, 64]},
        "rate": 1e-5,
        "none": None,
        "note": "Größe: 5",
    }
    info(tmp_path / "run", monkeypatch, tmp_path, config)
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert written == config
    assert list(written) == list(config)
    assert shlex.split((tmp_path / "run" / "command.txt").read_text()) == [
        "gpurl",
        "train",
        "--note",
        "two words",
        "it's",
    ]


def test_a_full_disk_at_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "write_regular", fail)
    with pytest.raises(
        UsageError,
        match=r"cannot write .*config.yaml: No space left on device; choose another place with "
        r"--run-dir",
    ):
        info(tmp_path / "run", monkeypatch, tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.yaml", "command.txt"])
def test_a_new_run_writes_into_no_pipe_and_through_no_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for kind in ("pipe", "link"):
        (tmp_path / kind).mkdir()
        if kind == "pipe":
            os.mkfifo(tmp_path / kind / name)
        else:
            (tmp_path / kind / name).symlink_to(tmp_path / "mine")
        with pytest.raises(UsageError, match=f"cannot write .*{name}: "):
            module.write_run_info(tmp_path / kind, {}, ["gpurl"])
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [".config.yaml.new", "command.txt"])
def test_a_resume_writes_into_no_pipe_and_through_no_link(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine").write_text("mine")
    os.mkfifo(tmp_path / name)
    module.note_resume(tmp_path, {}, ["gpurl"])
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "mine")
    module.note_resume(tmp_path, {}, ["gpurl"])
    assert caplog.text.count("config.yaml of ") == 2
    assert (tmp_path / "mine").read_text() == "mine"


# ---- the lock ----

HOLDER = """
import sys, time
from pathlib import Path
from gpurl.run.run_folder import lock_run
with lock_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        in_use = rf"{tmp_path} is in use by process {holder.pid} on \S+: wait for it"
        with pytest.raises(UsageError, match=in_use), lock_run(tmp_path):
            pass
        with pytest.raises(
            UsageError, match=in_use
        ):  # although there is no checkpoint to resume from yet
            gpurl.resume(tmp_path)
        with pytest.raises(UsageError, match=in_use):
            run(make_settings("ppo", "pendulum", device="cpu"), tmp_path)
    finally:
        holder.kill()  # kill -9: nothing is cleaned up
        holder.communicate()
    with lock_run(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / "run.pid").read_text()
    with pytest.raises(UsageError, match="no checkpoint to load"):
        gpurl.resume(tmp_path)


@pytest.fixture
def kept_locks(monkeypatch: pytest.MonkeyPatch) -> list[FileLock]:
    """Every lock that is made, kept: its release must not come from the garbage collector."""
    locks: list[FileLock] = []

    def make(*arguments: Any, **options: Any) -> FileLock:
        locks.append(FileLock(*arguments, **options))
        return locks[-1]

    monkeypatch.setattr(module, "FileLock", make)
    return locks


def test_the_block_holds_the_lock_and_its_end_frees_it(
    tmp_path: Path, kept_locks: list[FileLock]
) -> None:
    with (
        lock_run(tmp_path),
        pytest.raises(UsageError, match=f"in use by process {os.getpid()}"),
        lock_run(tmp_path),
    ):
        pass
    with lock_run(tmp_path):
        assert [lock.is_locked for lock in kept_locks] == [False, False, True]


@pytest.mark.parametrize("kind", ["pipe", "long", "none"])
def test_a_holder_that_cannot_be_named_is_unknown(kind: str, tmp_path: Path) -> None:
    with lock_run(tmp_path):
        (tmp_path / "run.pid").unlink()
        if kind == "pipe":
            os.mkfifo(tmp_path / "run.pid")
        elif kind == "long":
            (tmp_path / "run.pid").write_text("x" * 1001)
        with (
            pytest.raises(UsageError, match="in use by an unknown process: wait"),
            lock_run(tmp_path),
        ):
            pass


def test_an_error_in_the_block_stays_what_it_is_and_frees_the_lock(
    tmp_path: Path, kept_locks: list[FileLock]
) -> None:
    with pytest.raises(FileNotFoundError) as kept, lock_run(tmp_path):
        raise FileNotFoundError("the training's own")
    assert "the training's own" in str(kept.value)
    assert not kept_locks[0].is_locked


def test_a_folder_that_cannot_be_locked_is_named(
    tmp_path: Path, kept_locks: list[FileLock]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run.pid").mkdir()  # the lock is taken, its holder's name cannot be written
    for folder in (tmp_path / "file", tmp_path):
        with (
            pytest.raises(CheckpointError, match=f"cannot lock the run folder {folder}"),
            lock_run(folder),
        ):
            pass
    assert not any(lock.is_locked for lock in kept_locks)
