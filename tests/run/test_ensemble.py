"""The members of a population as one policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpurl
from gpurl.api import evaluate_run
from gpurl.cli.main import main
from gpurl.errors import UsageError
from gpurl.policy import Ensemble
from gpurl.run.ensemble import combined
from gpurl.run.members import member_number
from tests.small_runs import exit_code, small_run

SETTINGS: dict[str, Any] = {"population": 3, "threads": 1}


def test_continuous_actions_are_averaged_and_discrete_ones_voted() -> None:
    floats = torch.tensor([[[1.0, 4.0]], [[2.0, -4.0]], [[6.0, 0.0]]])  # [M 3, N 1, 2]
    assert combined(floats).tolist() == [[3.0, 0.0]]
    votes = torch.tensor([[3, 1, 0, 2], [0, 1, 2, 0], [0, 0, 1, 2], [1, 0, 3, 0]])  # [M 4, N 4]
    # a majority; two against two, and one against all: the first policy's; two against two
    assert combined(votes).tolist() == [0, 1, 0, 2]
    # of several numbers each by itself
    several = torch.tensor([[[0, 1]], [[1, 1]], [[1, 0]]])
    assert combined(several).tolist() == [[1, 1]]
    assert combined(several).dtype == torch.int64


def test_the_order_of_voters_matters_only_for_equal_votes() -> None:
    generator = torch.Generator().manual_seed(0)
    votes = torch.randint(0, 3, (7, 500), generator=generator)
    counts = torch.stack([(votes == choice).sum(0) for choice in range(3)])
    is_clear = (counts == counts.max(0).values).sum(0) == 1
    assert 300 < int(is_clear.sum()) < 500
    found = combined(votes)
    assert torch.equal(found[is_clear], counts.argmax(0)[is_clear])
    assert torch.equal(combined(votes[torch.randperm(7)])[is_clear], found[is_clear])
    assert torch.equal(counts.gather(0, found[None])[0], counts.max(0).values)


@pytest.mark.parametrize("env", ["pendulum", "cart_pole"])
def test_all_members_act_together(tmp_path: Path, env: str) -> None:
    run = small_run(tmp_path / "run", 2, env=env, **SETTINGS)
    ensemble = gpurl.load(run.folder, member="all")
    assert isinstance(ensemble, Ensemble)
    assert repr(ensemble).endswith("of 3 members")
    best = int(run.outcome.evaluation["eval/best_member"])
    assert next(iter(ensemble.members)) == best
    obs = np.random.default_rng(0).normal(size=(64, 3 + (env == "cart_pole"))).astype(np.float32)
    each = np.stack([gpurl.load(run.folder, member=k).act(obs) for k in ensemble.members])
    action = ensemble.act(obs)
    if env == "pendulum":
        np.testing.assert_allclose(action, each.mean(0), atol=1e-6)
    else:
        assert np.array_equal(action, each.sum(0) >= 2)  # of three, two choose 1
        assert 0 < action.mean() < 1
    np.testing.assert_allclose(ensemble.act(obs[0]), action[0], atol=1e-6)
    assert torch.equal(ensemble.act(torch.from_numpy(obs)), torch.from_numpy(action))
    # what it cannot do is said
    for call in (ensemble.module, lambda: ensemble.value(obs), lambda: ensemble.act(obs, False)):
        with pytest.raises(UsageError, match=r"load\(RUN, member=0\)"):
            call()


def test_an_ensemble_remembers(tmp_path: Path) -> None:
    memory = {"network": {"memory": "gru", "memory_size": 4, "hidden": [4]}}
    run = small_run(tmp_path / "run", 1, **SETTINGS, **memory)
    ensemble = gpurl.load(run.folder, member="all")
    members = [gpurl.load(run.folder, member=k) for k in range(3)]
    steps = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    for obs in steps:
        expected = np.mean([each.act(obs) for each in members], axis=0)
        np.testing.assert_allclose(ensemble.act(obs), expected, atol=1e-6)
    second = ensemble.act(steps[0])
    ensemble.reset()
    assert not np.array_equal(ensemble.act(steps[0]), second)


def test_an_ensemble_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run", 1, **SETTINGS)
    values = evaluate_run(run.folder, 4, "cpu", member="all")
    assert values["eval/episodes"] == 4
    alone = [evaluate_run(run.folder, 4, "cpu", member=k)["eval/mean_reward"] for k in range(3)]
    assert values["eval/mean_reward"] not in alone
    words = ["eval", str(run.folder), "--episodes", "4", "--device", "cpu", "--member"]
    assert main([*words, "all"]) == 0
    assert f"return {values['eval/mean_reward']:.3f}" in capsys.readouterr().out
    assert exit_code([*words, "some"]) == 2
    assert "member is 'some'; it must be a number, or all" in capsys.readouterr().err
    # one agent is an ensemble of one
    single = small_run(tmp_path / "single", 1)
    assert list(gpurl.load(single.folder, member="all").members) == [0]  # type: ignore[attr-defined]


def test_words_for_members() -> None:
    assert [member_number(each) for each in (None, 3, "3")] == [None, 3, 3]
    for word in ("-1", "1.5", "", "²"):
        with pytest.raises(UsageError, match="it must be a number, or all"):
            member_number(word)
