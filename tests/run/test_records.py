"""Records of a run: the commit, the diff and the untracked files are what was trained; asking git
executes nothing of the repository.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl.run import records as module
from gpurl.run.records import write_record
from tests.small_runs import ITERATION, small_run


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a committed file, in whose subfolder the process is."""
    folder = tmp_path / "code"
    (folder / "part").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "code.py").write_text("old\n")
    (folder / "part" / "data.bin").write_bytes(bytes(range(256)))
    (folder / ".gitignore").write_text("ignored.py\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder / "part")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def about(record: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((record / "git.json").read_text())
    return result


def test_commit_diff_and_untracked_files_are_the_code(
    code: Path, run: Path, tmp_path: Path
) -> None:
    # whatever the user prefers in diffs
    for key in ("diff.noprefix", "diff.mnemonicPrefix", "diff.relative", "diff.renames"):
        git(code, "config", key, "true")
    git(code, "config", "color.ui", "always")
    (code / "code.py").write_text("new\n")
    (code / "part" / "data.bin").write_bytes(bytes(range(255, -1, -1)))
    (code / "part" / "my_env.py").write_text("mine\n")
    record = write_record(run)
    assert record == run / "records" / "0"
    commit = about(record)["commit"]
    assert commit == git(code, "rev-parse", "HEAD")
    # repeat it elsewhere
    git(tmp_path, "clone", "-q", str(code), "again")
    again = tmp_path / "again"
    git(again, "checkout", "-q", commit)
    git(again, "apply", str(record / "git.diff"))
    for name in ("code.py", "part/data.bin"):
        assert (again / name).read_bytes() == (code / name).read_bytes()
    assert (record / "untracked" / "part" / "my_env.py").read_text() == "mine\n"


def test_what_is_left_out_is_said(
    code: Path, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    monkeypatch.setattr(module, "MAX_DIFF_BYTES", 1000)
    (code / "code.py").write_text("x" * 2000)
    (code / "ignored.py").write_text("x")
    (code / "large.py").write_text("x" * 101)
    (code / "weights.pt").write_text("x")
    (code / ".env").write_text("SECRET=1")
    (tmp_path / "secret.py").write_text("secret")
    (code / "link.py").symlink_to(tmp_path / "secret.py")
    (code / "runs" / "old").mkdir(parents=True)
    (code / "runs" / "old" / "config.yaml").write_text("x")
    record = write_record(run, [code / "runs"])
    assert not (record / "git.diff").exists()
    assert about(record)["git.diff"] == "left out: it has more than 1000 bytes"
    assert sorted(about(record)["untracked left out"]) == [
        ".env: no source file",
        "large.py: too large",
        "link.py: no regular file",
        "weights.pt: no source file",
    ]
    assert not (record / "untracked").exists()


def test_all_packages_have_their_version(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    record = write_record(run)
    versions = json.loads((record / "versions.json").read_text())
    assert versions["packages"]["torch"] == importlib.metadata.version("torch")
    assert versions["packages"]["pytest"] == importlib.metadata.version("pytest")
    assert versions["python"] == sys.version.split()[0]
    assert os.listdir(record) == ["versions.json"]  # no repository here


def test_without_git_only_the_versions_are_kept(code: Path, run: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", str(run))
    assert os.listdir(write_record(run)) == ["versions.json"]


def test_a_slow_git_is_not_waited_for(code: Path, run: Path, monkeypatch: Any) -> None:
    tools = run / "tools"
    tools.mkdir()
    (tools / "git").write_text("#!/bin/sh\nexec sleep 100\n")
    (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "GIT_SECONDS", 0.2)
    assert os.listdir(write_record(run)) == ["versions.json"]


@pytest.mark.parametrize("is_careful", [True, False])
def test_nothing_of_the_repository_is_executed(
    code: Path, run: Path, tmp_path: Path, is_careful: bool, monkeypatch: Any
) -> None:
    """And plain git does execute it, so that this test can fail."""
    canary = tmp_path / "canary"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho $0 $@ >> {canary}\ncat\n")
    program.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "fsmonitor-watchman"):
        (hooks / name).symlink_to(program)
    # a submodule with a filter of its own
    inner = code / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "inner.py").write_text("old\n")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "first")
    git(code, "add", "inner")
    git(code, "commit", "-qm", "second")
    for folder, names in ((code, ("evil", "with=sign", "With.Dots")), (inner, ("evil",))):
        for name in names:
            for key in ("clean", "smudge", "process"):
                git(folder, "config", f"filter.{name}.{key}", str(program))
            git(folder, "config", f"filter.{name}.required", "true")
        git(folder, "config", "diff.evil.textconv", str(program))
        git(folder, "config", "diff.evil.command", str(program))
        git(folder, "config", "diff.external", str(program))
        git(folder, "config", "core.fsmonitor", str(program))
        git(folder, "config", "core.hooksPath", str(hooks))
        git(folder, "config", "core.pager", str(program))
        attributes = "*.py filter=evil diff=evil\n*.bin filter=with=sign\n*.txt filter=With.Dots\n"
        (folder / ".git" / "info" / "attributes").write_text(attributes)
    canary.unlink(missing_ok=True)
    (code / "code.py").write_text("new\n")
    (code / "part" / "data.bin").write_bytes(b"new")
    (inner / "inner.py").write_text("new\n")
    (code / "own.py").write_text("mine\n")
    if is_careful:
        record = write_record(run)
        assert "+new" in (record / "git.diff").read_text()
        assert (record / "untracked" / "own.py").exists()
        assert not canary.exists(), canary.read_text()
    else:
        subprocess.run(["git", "diff", "HEAD"], capture_output=True, check=False, timeout=20)
        assert canary.exists()


def test_a_resume_adds_a_record(tmp_path: Path, code: Path) -> None:
    (code / "my_env.py").write_text("first\n")
    trained = small_run(tmp_path / "trained", 1, eval_episodes=0)
    (code / "my_env.py").write_text("second\n")
    (code / "code.py").write_text("changed\n")
    gpurl.resume(trained.folder, total_steps=2 * ITERATION)
    kept = [trained.folder / "records" / number for number in ("0", "1")]
    assert sorted((trained.folder / "records").iterdir()) == kept
    texts = [(record / "untracked" / "my_env.py").read_text() for record in kept]
    assert texts == ["first\n", "second\n"]
    assert (kept[0] / "git.diff").read_text() == ""
    assert "+changed" in (kept[1] / "git.diff").read_text()
