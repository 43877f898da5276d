"""Records of a run: the commit, the diff and the untracked files are what was trained; asking git
executes nothing of the repository.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import gpurl
from gpurl.run import records as module
from gpurl.run.records import write_record
from gpurl.run.report import write_report
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


def test_all_files_together_have_a_limit(
    code: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILES_BYTES", 150)
    for name in ("a.py", "b.py"):
        (code / name).write_text("x" * 100)
    record = write_record(run)
    assert about(record)["untracked left out"] == ["b.py: too large"]
    assert [path.name for path in (record / "untracked").iterdir()] == ["a.py"]


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


# ---- own modules, with or without git ----

MY_ENV = """
import my_rewards
from my_numbers import START
from my_shapes.rows import as_rows
from tests.tiny_envs import RandomWalk


class MyEnv(RandomWalk):
    pass


class Optional:
    size = 1
"""
MY_PPO = "from gpurl.algorithms.ppo import PPO\n\n\nclass MyPPO(PPO):\n    pass\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in no repository, with an environment, an algorithm and what they import."""
    files = {
        "my_env.py": MY_ENV,
        "my_ppo.py": MY_PPO,
        "my_rewards.py": "COST = 1.0\n",
        "my_numbers.py": "START = 1.0\n",
        "my_shapes/__init__.py": "",
        "my_shapes/rows.py": "def as_rows(x):\n    return x\n",
        "unused.py": "",
    }
    folder = tmp_path / "project"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in files:
        sys.modules.pop(name.partition(".")[0].partition("/")[0], None)
    sys.modules.pop("my_shapes.rows", None)


def kept(run_folder: Path, number: int) -> dict[str, str]:
    """The own modules in a record, without those of these tests."""
    folder = run_folder / "records" / str(number) / "sources"
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    return {name: text for name, text in files.items() if not name.startswith("tests/")}


def forget(name: str) -> None:
    """As another process begins."""
    sys.modules.pop(name)
    importlib.invalidate_caches()


def test_own_modules_are_kept_without_git(project: Path) -> None:
    run = small_run(project / "run", 1, "my_ppo", "my_env", minibatches=2, eval_episodes=0)
    # no class or function of my_numbers was imported, and none of gpurl's or torch's files is own
    assert kept(run.folder, 0) == {
        name: (project / name).read_text()
        for name in ("my_env.py", "my_ppo.py", "my_rewards.py", "my_shapes/rows.py")
    }
    assert not (run.folder / "records" / "0" / "git.json").exists()


def test_tasks_of_gpurl_and_of_gymnasium_need_no_copies(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 1, eval_episodes=0)
    assert not (run.folder / "records" / "0" / "sources").exists()
    # a function that makes environments is own code
    settings = {"num_envs": 2, "horizon": 8, "minibatches": 1, "total_steps": 16, "quiet": True}
    run = gpurl.train("ppo", make_cart_pole, run_dir=tmp_path / "own", eval_episodes=0, **settings)
    name = Path(__file__).name
    assert (run.folder / f"records/0/sources/tests/run/{name}").read_text() == Path(
        __file__
    ).read_text()


def make_cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def test_a_resume_says_where_it_continues_and_what_changed(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = small_run(project / "run", 1, "my_ppo", "my_env", eval_episodes=0).folder
    settings = {"total_steps": 2 * ITERATION, "quiet": False}
    capsys.readouterr()
    # nothing has changed
    gpurl.resume(folder, **settings)
    text = capsys.readouterr().out
    assert f"continues at step {ITERATION} of {2 * ITERATION}\n" in text
    assert "changed since" not in text
    # another reward
    (project / "my_rewards.py").write_text("COST = 2.0\n")
    forget("my_env")
    forget("my_rewards")
    gpurl.resume(folder, **settings | {"total_steps": 3 * ITERATION})
    text = capsys.readouterr().out
    assert "changed since the last start: my_rewards.py (records/2 keeps it)\n" in text
    costs = [kept(folder, number)["my_rewards.py"] for number in range(3)]
    assert costs == ["COST = 1.0\n", "COST = 1.0\n", "COST = 2.0\n"]


def test_a_resume_says_which_options_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_episode_steps": 9}
    folder = small_run(tmp_path / "run", 1, eval_episodes=0, env_options=options).folder
    changes = {"env_options": {"max_episode_steps": 7}, "quiet": False}
    gpurl.resume(folder, total_steps=2 * ITERATION, **changes)
    text = capsys.readouterr().out
    assert "changed since the last start: env_options.max_episode_steps 9 -> 7 (" in text


def test_the_report_shows_own_modules(project: Path) -> None:
    folder = small_run(project / "run", 1, "ppo", "my_env", eval_episodes=0).folder
    (folder / "records/0/sources/my_rewards.py").write_text("COST = '<b>'\n")
    page = write_report(folder).read_text()
    assert "<summary>my_rewards.py</summary>\n<pre>COST = &#x27;&lt;b&gt;&#x27;\n</pre>" in page
