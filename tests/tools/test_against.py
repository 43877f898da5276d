"""The comparison of two trees: its interval covers what it should, its processes import what they
should, and it calls slower what is.
"""

import subprocess
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from tests.tools import against
from tests.tools.against import CASES, checked_out, interval, run_in


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        mean, low, high = interval(list(1.2 * np.exp(rng.normal(0.0, 0.1, 15))), seed)
        assert low < mean < high
        covered += low <= 1.2 <= high
    assert 85 <= covered <= 99


def test_ratios_that_are_all_the_same_have_no_width() -> None:
    assert np.allclose(interval([1.5] * 5), 1.5)


def test_a_commit_is_checked_out_for_the_time_of_the_block(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for text in ("old", "new"):
        (tmp_path / "file").write_text(text)
        subprocess.run([*git, "add", "file"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
    with checked_out(tmp_path, "HEAD~1") as tree:
        assert (tree / "file").read_text() == "old"
    assert not tree.exists()
    assert (
        len(
            subprocess.run(
                [*git, "worktree", "list"], capture_output=True, text=True, check=True
            ).stdout.splitlines()
        )
        == 1
    )


@pytest.mark.parametrize(
    ("code", "printed", "message"),
    [
        (
            0,
            'RESULT {"gpurl": "/elsewhere/gpurl", "seconds": {}}',
            "wanted gpurl of .*, got /elsewhere/gpurl",
        ),
        (1, "", "ended with code 1:\nits words"),
        (0, "", "ended with code 0"),
    ],
)
def test_a_process_that_fails_or_imports_another_gpurl_ends_the_comparison(
    code: int, printed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def run(
        command: list[str], env: dict[str, str], **_: object
    ) -> "subprocess.CompletedProcess[str]":
        given.append(env["PYTHONPATH"])
        return subprocess.CompletedProcess(command, code, printed, "its words")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=message):
        run_in(tmp_path, {}, {})
    assert given == [str(tmp_path)]


@pytest.mark.parametrize(
    ("factor", "code", "word"),
    [(1.3, 1, "slower"), (1.05, 0, "within the limit"), (0.8, 0, "faster")],
)
def test_a_slower_tree_is_called_slower(
    factor: float,
    code: int,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rng, order = np.random.default_rng(2), []

    def run(tree: Path, *_: object) -> dict[str, float]:
        is_this = tree == Path(__file__).resolve().parents[2]
        order.append(is_this)
        return {case: float((factor if is_this else 1.0) * rng.normal(1.0, 0.01)) for case in CASES}

    monkeypatch.setattr(against, "run_in", run)
    monkeypatch.setattr(against, "checked_out", lambda root, commit: nullcontext(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["against", "HEAD", "--pairs", "6", "--device", "auto"])
    assert against.main() == code
    assert capsys.readouterr().out.count(word) == len(CASES)
    assert order == [True, False, False, True] * 3
    monkeypatch.setattr("sys.argv", ["against", "HEAD", "--pairs", "2"])
    with pytest.raises(SystemExit):
        against.main()
