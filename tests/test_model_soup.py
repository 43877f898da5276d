"""A soup of a population's run: never worse than its best member on the episodes that chose it, and
a run as any other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpurl
from gpurl import model_soup
from gpurl.api import evaluate_run
from gpurl.checkpoints.folders import load_checkpoint
from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.run.listing import find_runs
from gpurl.run.load import load_members
from tests.small_runs import small_run

SETTINGS: dict[str, Any] = {"population": 3, "threads": 1, "env": "cart_pole"}


def test_a_soup_is_a_run_of_one_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"member": {"learning_rate": [1e-3, 2e-3, 3e-3]}, "entropy_coef": 0.01}
    run = small_run(tmp_path / "run", 2, **SETTINGS, **changes)
    # averages are always as good: all members go in
    monkeypatch.setattr(model_soup, "_mean_return", lambda algorithm, env, episodes, seed: 1.0)
    folder = tmp_path / "soup"
    assert main(["soup", str(run.folder), "--episodes", "4", "--run-dir", str(folder)]) == 0
    out = capsys.readouterr().out
    members = load_members(run.folder)
    order = [each.member for each in members]
    assert f"members {', '.join(map(str, order))}: return 1.000 over other episodes" in out
    assert f"run folder {folder}" in out
    # it is listed as what it is, not as a training that failed
    (entry,) = find_runs(folder)
    assert (entry.state, entry.reason) == ("finished", "written without a training")
    # its weights are the mean of theirs
    soup = gpurl.load(folder).algorithm
    weights = [each.algorithm.optimizers["policy"].flat for each in members]
    torch.testing.assert_close(soup.optimizers["policy"].flat, torch.stack(weights).mean(0))
    # and so are Adam's moments
    learning = load_members(run.folder, learning=True)
    for name in ("exp_avg", "exp_avg_sq"):
        moments = [getattr(each.algorithm.optimizers["policy"].state, name) for each in learning]
        assert torch.stack(moments).any()
        saved = load_checkpoint(folder)[0]["training"]["optimizers"]["policy"][name]
        torch.testing.assert_close(saved, torch.stack(moments).mean(0))
    assert soup.config.learning_rate == changes["member"]["learning_rate"][order[0]]  # type: ignore[index]
    # and it is evaluated and trained as another run
    monkeypatch.undo()
    assert evaluate_run(folder, 4, "cpu")["eval/episodes"] == 4
    resumed = gpurl.resume(folder, total_steps=128, quiet=True)
    assert resumed.outcome.new_steps == 128


def test_a_soup_refuses_what_makes_it_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path / "run", 1, **SETTINGS)
    asked = []

    def mean_return(algorithm: Any, env: Any, episodes: int, seed: int) -> float:
        asked.append(seed)
        # three members, then two means that are worse, then the result twice
        return [5.0, 9.0, 7.0, 8.0, 8.5, 1.0, 2.0][len(asked) - 1]

    monkeypatch.setattr(model_soup, "_mean_return", mean_return)
    made = gpurl.soup(run.folder, 4, run_dir=str(tmp_path / "soup"))
    members = load_members(run.folder)
    assert made.members == (members[1].member,)
    assert (made.mean_return, made.best_return) == (1.0, 2.0)
    # it is that member, and was judged by other episodes
    obs = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    alone = gpurl.load(run.folder, member=made.members[0])
    torch.testing.assert_close(
        gpurl.load(made.folder).value(torch.from_numpy(obs)), alone.value(torch.from_numpy(obs))
    )
    assert len({*asked[:5]}) == 1
    assert {*asked[5:]}.isdisjoint(asked[:5])


def test_what_is_no_population_is_refused(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 1)
    with pytest.raises(UsageError, match="has one agent to average: a soup needs a population"):
        gpurl.soup(run.folder)
    with pytest.raises(UsageError, match="episodes must be at least 1, got 0"):
        gpurl.soup(run.folder, 0)
