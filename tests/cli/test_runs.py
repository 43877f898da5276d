"""`gpurl runs`: every state, damaged folders, filters and order; what `--prune` deletes and what it
never does.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import gpurl
from gpurl.cli.main import main
from gpurl.cli.runs import COLUMNS, DROPPED, run_table
from gpurl.errors import UsageError
from gpurl.run.listing import RunEntry, find_runs
from gpurl.run.run_folder import lock_run
from tests.small_runs import ITERATION, exit_code, small_run


class Fails(gpurl.Callback):
    def on_start(self, run: Any) -> None:
        raise UsageError("stop here")


class Interrupts(gpurl.Callback):
    def after_iteration(self, run: Any, metrics: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that ended in every way, and folders that are no runs."""
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpurl.api.plot_curve", lambda folder: folder)
        small_run(root / "a" / "finished", 3, eval_every=ITERATION)
        short = {"max_episode_steps": 4}
        changes = {"learning_rate": 0.5, "eval_episodes": 0, "env_options": short}
        small_run(root / "a" / "other", 1, env="cart_pole", **changes)
        with pytest.raises(UsageError):
            small_run(root / "failed", 3, callbacks=[Fails()], eval_episodes=0)
        with pytest.raises(KeyboardInterrupt):
            small_run(root / "stopped", 3, callbacks=[Interrupts()])
    (root / "no_run").mkdir()
    (root / "no_run" / "notes.txt").write_text("mine")
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    import shutil

    return Path(shutil.copytree(trained, tmp_path / "root"))


def listed(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    assert main(["runs", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_table_says_what_each_run_is(root: Path, capsys: Any) -> None:
    with lock_run(root / "a" / "other"):
        entries = {entry["name"]: entry for entry in listed(capsys, root)}
    assert set(entries) == {"a/finished", "a/other", "failed", "stopped"}
    states = {name: entry["state"] for name, entry in entries.items()}
    assert states == {
        "a/finished": "finished",
        "a/other": "running",
        "failed": "failed",
        "stopped": "stopped",
    }
    finished = entries["a/finished"]
    lines = map(json.loads, (root / "a/finished/metrics.jsonl").read_text().splitlines())
    returns = [line["eval/mean_reward"] for line in lines if "eval/mean_reward" in line]
    assert finished["best"] == max(returns)
    assert (finished["env"], finished["algorithm"]) == ("pendulum", "ppo")
    assert finished["steps"] == 3 * ITERATION
    files = [path for path in (root / "a/finished").rglob("*") if path.is_file()]
    assert finished["size"] == sum(path.stat().st_size for path in files)
    assert 0.0 <= finished["age"] < 600.0
    assert main(["runs", str(root)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == list(COLUMNS)
    assert len(table) == 5
    # a run without an evaluation has its last training return, and no other number
    rows = {row.split()[0]: row.split() for row in table[1:]}
    trained = list(map(json.loads, (root / "a/other/metrics.jsonl").read_text().splitlines()))
    assert entries["a/other"]["last"] == trained[-1]["rollout/ep_rew_mean"]
    assert rows["a/other"][4:6] == ["-", f"{entries['a/other']['last']:.4g}"]
    assert rows["failed"][3:6] == ["-", "-", "-"]
    assert any("failed (UsageError)" in line for line in table)


def some_entries() -> list[RunEntry]:
    first = RunEntry(Path("a"), "chasing/ppo/20261122-183041_0", "chasing", "ppo", 20_000_000)
    first.best_return, first.last_return, first.state = 9.99, 9.5, "finished"
    reason = "error: environment 'my_env' at env step 128: MyEnv.step raised ValueError"
    return [first, RunEntry(Path("b"), "mine", "half_cheetah", "flash_sac", 5, reason=reason)]


def test_a_table_of_no_runs_says_so(root: Path, capsys: Any) -> None:
    assert main(["runs", str(root / "no_run")]) == 0
    assert capsys.readouterr().out == f"no run in {root / 'no_run'}\n"
    assert main(["runs", str(root), "--filter", "env=hopper"]) == 0
    assert capsys.readouterr().out == f"no run in {root} matches the filter\n"
    assert listed(capsys, root, "--filter", "env=hopper") == []


@pytest.mark.parametrize("width", range(20, 260, 3))
def test_the_table_fits_the_terminal(width: int) -> None:
    """No line is wider, each run has one, and columns go in the order of DROPPED."""
    lines = run_table(some_entries(), width).splitlines()
    assert max(map(len, lines)) <= width
    shown = lines[0].split()
    gone = [column for column in COLUMNS if column not in shown]
    if width >= 45:  # below, lines are cut
        assert sorted(gone) == sorted(DROPPED[: len(gone)])
        note = " ".join(lines[3:])
        assert note.startswith(f"not shown: {', '.join(DROPPED[: len(gone)])};") == bool(gone)
        assert lines[1].split()[0].endswith("183041_0")
    assert lines[2].startswith("mine")


def test_columns_that_the_name_repeats_go_first() -> None:
    chasing, mine = some_entries()
    whole = max(map(len, run_table([chasing]).splitlines()))
    texts = run_table([chasing], whole - len("  algorithm  chasing")).splitlines()
    assert texts[0].split() == ["name", "steps", "best", "last", "state", "age", "size"]
    assert texts[2].startswith("not shown: algorithm, env;")
    assert "algorithm" in run_table([chasing, mine], 85)


def test_without_a_terminal_the_table_is_whole() -> None:
    """Numbers end below each other, and a column has what the run has."""
    header, first, second = run_table(some_entries()).splitlines()
    assert header.split() == [*COLUMNS]
    assert first.split()[:6] == [
        *("chasing/ppo/20261122-183041_0", "chasing", "ppo", "20,000,000", "9.99", "9.5")
    ]
    assert "failed (environment 'my_env' at env step 128: MyEnv.step raised ValueError)" in second
    assert header.index("steps") + 5 == first.index("20,000,000") + 10
    # a width at which it just fits changes nothing, one less drops the reason
    width = max(map(len, (header, first, second)))
    assert run_table(some_entries(), width) == run_table(some_entries())
    narrower = run_table(some_entries(), width - 1)
    assert "failed" in narrower
    assert "raised" not in narrower


def test_filters_and_order(root: Path, capsys: Any) -> None:
    def names(*words: str) -> list[str]:
        return [entry["name"] for entry in listed(capsys, root, *words)]

    assert names("--filter", "env=cart*") == ["a/other"]
    assert names("--filter", "learning_rate=0.5") == ["a/other"]
    assert names("--filter", "env=pendulum", "state=finished") == ["a/finished"]
    assert names("--sort", "name") == ["a/finished", "a/other", "failed", "stopped"]
    assert names("--sort", "steps")[0] == "a/finished"
    assert names("--sort", "steps")[-1] == "failed"  # it has none
    assert exit_code(["runs", str(root), "--sort", "bets"]) == 2
    assert "it must be one of" in capsys.readouterr().err
    assert main(["runs", str(root), "--filter", "lerning_rate=1"]) == 2
    assert "did you mean learning_rate" in capsys.readouterr().err
    assert main(["runs", str(root / "nothing")]) == 2


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1", b"[]", b'{"step": "x"}\n', b"a: [\n"])
def test_damaged_folders_are_shown(content: bytes, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "root" / "run"
    folder.mkdir(parents=True)
    for name in ("run.lock", "config.yaml", "metrics.jsonl", "ended.json"):
        (folder / name).write_bytes(content)
    (entry,) = listed(capsys, tmp_path / "root")
    assert (entry["state"], entry["env"], entry["best"]) == ("failed", None, None)
    assert main(["runs", str(tmp_path / "root")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:6] == ["run", *"-----"]


def test_a_killed_run_failed_and_a_resumed_one_forgets_how_it_ended(root: Path) -> None:
    (root / "a" / "other" / "ended.json").unlink()
    states = {run.name: run.state for run in find_runs(root)}
    assert states["a/other"] == "finished"  # it has all its steps
    (root / "stopped" / "ended.json").unlink()
    states = {run.name: run.state for run in find_runs(root)}
    assert states["stopped"] == "failed"
    gpurl.resume(root / "stopped")
    states = {run.name: run.state for run in find_runs(root)}
    assert states["stopped"] == "finished"


# ---- deleting ----


def test_prune_deletes_only_with_yes_and_by_default_what_holds_nothing(
    root: Path, capsys: Any
) -> None:
    # the run that failed has a checkpoint of its start
    assert main(["runs", str(root), "--prune", "--yes"]) == 0
    assert capsys.readouterr().out == "no runs to delete\n"
    (root / "early").mkdir()
    (root / "early" / "run.lock").touch()
    assert main(["runs", str(root), "--prune"]) == 0
    output = capsys.readouterr().out
    assert f"would delete {root / 'early'}" in output
    assert "add --yes" in output
    assert (root / "early").exists()
    assert main(["runs", str(root), "--prune", "--yes"]) == 0
    assert not (root / "early").exists()
    assert len(find_runs(root)) == 4
    assert (root / "no_run" / "notes.txt").exists()
    assert main(["runs", str(root), "--yes"]) == 2
    assert main(["runs", str(root), "--prune", "--json"]) == 2


def test_prune_keeps_what_runs_and_what_holds_files_of_the_user(root: Path, capsys: Any) -> None:
    (root / "stopped" / "thesis.tex").write_text("mine")
    (root / "stopped" / "policy.onnx").write_text("perhaps in use")
    (root / "stopped" / "my.tmp").write_text("mine")
    (root / "stopped" / "videos").mkdir()  # a run makes them
    (root / "stopped" / ".learning_curve.png.7.tmp").touch()
    words = ["runs", str(root), "--prune", "--yes", "--filter", "env=pendulum"]
    with lock_run(root / "a" / "finished"):
        assert main(words) == 0
    output = capsys.readouterr().out
    assert "a/finished: it is running" in output
    assert "stopped: it holds other files: my.tmp, policy.onnx, thesis.tex" in output
    assert {run.name for run in find_runs(root)} == {"a/finished", "a/other", "stopped"}


def test_prune_does_not_follow_links(root: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "keep.txt").write_text("mine")
    (root / "failed" / "learning_curve.png").unlink(missing_ok=True)
    (root / "failed" / "learning_curve.png").symlink_to(target, target_is_directory=True)
    (root / "linked").symlink_to(root / "a" / "finished", target_is_directory=True)
    assert main(["runs", str(root), "--prune", "--yes", "--filter", "name=*"]) == 0
    assert (target / "keep.txt").exists()
    assert find_runs(root) == []
    assert (root / "linked").is_symlink()
