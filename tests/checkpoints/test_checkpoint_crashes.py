"""Full disks, kills and death at any system call leave the old checkpoint or the new one, whole."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpurl.checkpoints import folders
from gpurl.checkpoints.folders import best_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError
from tests.small_checkpoints import entries, small_parts, step_of

# ---- full disks ----


def test_a_disk_that_refuses_at_any_moment_costs_nothing_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, messages, done = os.fsync, [], False
    while not done:
        folder = tmp_path / str(len(messages))
        save_checkpoint(folder, 1, small_parts(1))
        left = [len(messages)]  # calls that still work

        def fsync(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            save_checkpoint(folder, 2, small_parts(2))
            done = True
        except CheckpointError as error:
            messages.append(str(error))
        monkeypatch.setattr(os, "fsync", real)
        assert step_of(folder / "step_000000000001") == 1
        assert step_of(folder) == (1 if len(messages) < 8 and not done else 2)
        assert not [name for name in entries(folder) if name.startswith(".tmp")]
        save_checkpoint(folder, 2, small_parts(2))
        assert step_of(folder) == 2
    assert (
        len(messages) == 8
        # three files, manifest, their folder, its parent, LATEST's text, and LATEST's folder once
        # more
    )
    for message in messages:
        assert re.search(r"step_000000000002: .*No space left.*[0-9]+ bytes free", message)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["disk", "Ctrl-C"]
)
def test_what_breaks_off_between_two_renames_puts_the_old_one_back(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two folders cannot be exchanged in one step."""
    monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    save_checkpoint(tmp_path, 1, small_parts(1))
    save_checkpoint(tmp_path, 2, small_parts(2), is_best=True)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.is_dir() and (path / "added.safetensors").exists():
            raise error
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
            save_checkpoint(tmp_path, 2, {"added": {}, **small_parts(2)})
    assert step_of(tmp_path) == 2
    assert best_checkpoint(tmp_path) == tmp_path / "step_000000000002"
    assert entries(tmp_path) == ["BEST", "LATEST", "step_000000000001", "step_000000000002"]


KILLS = int(os.environ.get("GPURL_KILLS", "40"))  # a soak takes more
HEADER = """
import logging, os, random, resource, shutil, signal, sys, time
from pathlib import Path
import torch
from gpurl.checkpoints.folders import list_checkpoints, load_checkpoint, save_checkpoint
from gpurl.errors import CheckpointError
def fail(*words):
    raise RuntimeError(words)
logging.getLogger("gpurl").warning = fail
torch.set_num_threads(1)
folder = Path(sys.argv[1])
def parts(step):
    rng = {"step": step, "text": "x" * 10_000}
    return {"model": {"w": torch.full((1 << 17,), float(step))}, "rng": rng}
def load():
    got, manifest = load_checkpoint(folder)
    assert bool((got["model"]["w"] == manifest["step"]).all())
    assert got["rng"]["step"] == manifest["step"]
    return manifest["step"]
calls = 0
def dying(function, deadline):
    def call(*arguments, **keywords):
        global calls
        calls += 1
        if calls > deadline:
            os._exit(9)
        return function(*arguments, **keywords)
    return call
def damaged():
    messages = []
    for path in list_checkpoints(folder):
        try:
            load_checkpoint(path)
        except CheckpointError as error:
            messages.append(str(error))
    return messages
"""


def run_script(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", HEADER + script, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=max(120, 3 * KILLS), env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_file_size_limit_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    """EFBIG comes through safetensors for the large file, through Python for the small ones;
    SIGXFSZ must not kill.
    """
    out = run_script(
        """
save_checkpoint(folder, 1, parts(1))
before = sorted(os.listdir(folder))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for step, limit in enumerate((100_000, 11_000, 5000, 3, 0), 2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        save_checkpoint(folder, step, parts(step))
        sys.exit("saved beyond the limit")
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(message)
    assert f"step_{step:012d}" in message and "bytes free" in message, message
    assert sorted(os.listdir(folder)) == before, os.listdir(folder)
    assert load() == 1
save_checkpoint(folder, 7, parts(7))
assert load() == 7
""",
        tmp_path,
    )
    assert out.count("File too large") == 5


def test_the_best_of_another_task_replaces_the_old_one_at_its_own_step(tmp_path: Path) -> None:
    """A resumed run that evaluates another task before its first iteration."""
    save_checkpoint(tmp_path, 1, small_parts(1), is_best=True)
    save_checkpoint(tmp_path, 2, small_parts(2))
    path = save_checkpoint(tmp_path, 2, small_parts(2), is_best=True, drop_best=True)
    assert best_checkpoint(tmp_path) == path


# ---- kills ----


def test_a_checkpoint_is_written_again_without_a_moment_without_one(tmp_path: Path) -> None:
    """The only checkpoint; the process dies before its n-th change of the disk."""
    out = run_script(
        """
from gpurl.checkpoints import folders
seen = []
for deadline in range(1000):
    shutil.rmtree(folder)
    save_checkpoint(folder, 1, {"other": {}, **parts(1)})
    child = os.fork()
    if child == 0:
        for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, dying(getattr(os, name), deadline))
        folders._exchange = dying(folders._exchange, deadline)
        save_checkpoint(folder, 1, parts(1))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    load()
    seen.append("other" not in load_checkpoint(folder)[0])
    if code == 0:
        break
    assert code == 9, code
assert seen == sorted(seen), seen
print(seen.count(False), seen.count(True))
""",
        tmp_path,
    )
    before, after = map(int, out.split())
    assert before > 4
    assert after > 4


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", ["_write_pointer", "_write_folder"])
def test_a_kill_between_the_names_costs_no_best_policy(
    name: str, is_there: bool, tmp_path: Path
) -> None:
    """A run that was killed after its first change of a kind never resumes with a best return that
    its BEST has not; is_there: the checkpoint is written again, after an evaluation.
    """
    out = run_script(
        """
from gpurl.checkpoints import folders
def of(step, best):
    return {**parts(step), "trainer": {"best_return": best}}
save_checkpoint(folder, 1, of(1, 10.0), is_best=True)
if int(sys.argv[3]):
    save_checkpoint(folder, 2, of(2, 10.0))
child = os.fork()
if child == 0:
    real = getattr(folders, sys.argv[2])
    def dying(*arguments):
        real(*arguments)
        os._exit(9)
    setattr(folders, sys.argv[2], dying)
    save_checkpoint(folder, 2, of(2, 50.0), is_best=True)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
resumed, manifest = load_checkpoint(folder)
best, of_best = load_checkpoint(folder, best=True)
print(resumed["trainer"]["best_return"], best["trainer"]["best_return"], of_best["step"])
""",
        tmp_path,
        name,
        int(is_there),
    )
    resumed, best, step = map(float, out.split())
    assert best >= resumed
    assert step == 2 or resumed == 10.0


@pytest.mark.soak
@pytest.mark.timeout(max(300, 4 * KILLS))
def test_kills_leave_no_corrupt_no_missing_and_no_older_checkpoint(tmp_path: Path) -> None:
    """A forked process saves without pause until SIGKILL; what it announced as saved must be
    there.
    """
    out = run_script(
        """
rng = random.Random(7)
save_checkpoint(folder, 1, parts(1))
started = time.perf_counter()
for latest in (2, 3, 4):
    save_checkpoint(folder, latest, parts(latest))
seconds, interrupted = (time.perf_counter() - started) / 3, 0
for kill in range(int(sys.argv[2])):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(latest + 1, latest + 1000):
            save_checkpoint(folder, step, parts(step), keep=1 + kill % 2, is_best=step % 5 == 0)
            os.write(writer, step.to_bytes(8, "little"))
    os.close(writer)
    # a slow machine only makes the test longer
    announced = b"".join(os.read(reader, 8) for _ in range(kill % 3))
    time.sleep(rng.uniform(0.0, 1.2 * seconds))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with os.fdopen(reader, "rb") as stream:
        announced += stream.read()
    saved = int.from_bytes(announced[-8:], "little") if announced else latest
    interrupted += any(name.startswith(".tmp-") for name in os.listdir(folder))
    now = load()
    assert now >= saved >= latest, (now, saved, latest)
    bad = damaged()
    assert not bad, bad
    latest = now
save_checkpoint(folder, latest + 1, parts(latest + 1))
assert not [name for name in os.listdir(folder) if name.startswith(".tmp-")]
print(interrupted, latest)
""",
        tmp_path,
        KILLS,
    )
    interrupted, latest = map(int, out.split())
    assert interrupted >= KILLS // 8  # else the kills missed what they were to hit
    assert latest >= 4 + KILLS - 1  # 0, 1 or 2 whole saves before each kill


@pytest.mark.parametrize(
    "damaged", [0, 1, 2], ids=["new step", "over a damaged one", "over another training's"]
)
def test_death_at_each_system_call_leaves_the_old_or_the_new(tmp_path: Path, damaged: int) -> None:
    """Random kills seldom hit the moments between two renames: here the process dies before its
    n-th change of the disk.
    """
    skipped = (
        14 if damaged == 2 else 0
    )  # writing beside it is the same: from there on it is put in place
    out = run_script(
        """
CHANGES = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "chmod", "open")
seen = []
for deadline in range(int(sys.argv[3]), 1000):
    shutil.rmtree(folder)
    save_checkpoint(folder, 1, parts(1), keep=2)
    if int(sys.argv[2]) == 2:  # LATEST is one step back
        save_checkpoint(folder, 2, {"other": {}, **parts(2)}, keep=2)
        (folder / "LATEST").write_text("step_000000000001")
    elif int(sys.argv[2]):
        shutil.copytree(folder / "step_000000000001", folder / "step_000000000002")
    child = os.fork()
    if child == 0:
        for name in CHANGES:
            setattr(os, name, dying(getattr(os, name), deadline))
        save_checkpoint(folder, 2, parts(2), keep=1, is_best=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen.append(load())
    bad = damaged()
    assert not bad or int(sys.argv[2]) == 1, bad
    assert seen[-1] == 1 or "other" not in load_checkpoint(folder)[0]
    save_checkpoint(folder, 3, parts(3), keep=1)
    assert not [name for name in os.listdir(folder) if name.startswith(".tmp-")]
    if code == 0:
        break
    assert code == 9, code
assert seen == sorted(seen), seen
print(seen.count(1), seen.count(2))
""",
        tmp_path,
        damaged,
        skipped,
    )
    before, after = map(int, out.split())
    assert before + skipped > 15  # died before LATEST named the new one
    assert after > 5  # died after
