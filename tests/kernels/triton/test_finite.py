"""Rows with NaN or infinity found in Triton against the reference, and by hand: which rows are
valid, what is zeroed, what is kept of the first one.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import finite as module
from gpurl.kernels.finite import (
    Columns,
    Evidence,
    Findings,
    find_non_finite,
    find_non_finite_reference,
    find_non_finite_triton,
)

NAMES = ("obs", "state", "reward", "final_obs", "action", "value", "final_value")
BAD = (torch.nan, torch.inf, -torch.inf)


@dataclass
class Case:
    """A rollout of which two copies are checked: obs and state are views of one tensor."""

    columns: dict[str, Tensor]
    terminated: Tensor
    truncated: Tensor
    valid: Tensor | None
    findings: Findings = field(
        default_factory=lambda: Findings(
            torch.full((), -1, dtype=torch.int64),
            torch.zeros((), dtype=torch.int64),
            torch.zeros((), dtype=torch.int64),
            torch.zeros((), dtype=torch.bool),
        )
    )
    kept: list[Tensor] = field(default_factory=list)

    def check(self, function: Any) -> tuple[Tensor, Tensor]:
        checked = Columns([self.columns[name] for name in NAMES], 2, 4, 2)
        evidence = [*(self.columns[name] for name in ("obs", "state", "choice")), self.terminated]
        if not self.kept:
            self.kept = [
                torch.zeros(each.shape[:1] + each.shape[2:], dtype=each.dtype) for each in evidence
            ]
        return function(
            checked,
            self.terminated,
            self.truncated,
            self.valid,
            self.findings,
            [Evidence(*pair) for pair in zip(evidence, self.kept)],
        )


def rollout(num_steps: int, num_envs: int, seed: int, valid: bool, share: float = 0.0) -> Case:
    """Random columns, `share` of their rows with a number that is not finite."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(num_steps, num_envs, *shape, generator=generator).to(dtype)
        bad = torch.rand(num_steps, num_envs, generator=generator) < share
        row = x.view(num_steps, num_envs, -1)
        column = int(torch.randint(row.shape[2], (), generator=generator))
        row[..., column] = torch.where(bad, BAD[seed % 3], row[..., column])
        return x

    def flag(chance: float) -> Tensor:
        return torch.rand(num_steps, num_envs, generator=generator) < chance

    both = noise(23)
    columns = {
        "obs": both[..., :20],
        "state": both[..., 20:],
        "reward": noise(dtype=torch.float64),
        "final_obs": noise(3, 5),
        "action": noise(2, dtype=torch.float16),
        "value": noise(),
        "final_value": noise(),
        "choice": torch.randint(9, (num_steps, num_envs, 2), generator=generator),
    }
    return Case(columns, flag(0.1), flag(0.1), flag(0.8) if valid else None)


def copy_of(case: Case) -> Case:
    return Case(
        {name: column.clone() for name, column in case.columns.items()},
        case.terminated,
        case.truncated,
        None if case.valid is None else case.valid.clone(),
    )


def assert_equal(got: Case, expected: Case, results: list[tuple[Tensor, Tensor]]) -> None:
    torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.testing.assert_close(got.columns, expected.columns, rtol=0, atol=0)
    torch.testing.assert_close(tuple(got.findings), tuple(expected.findings))
    torch.testing.assert_close(got.kept, expected.kept, equal_nan=True)


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (33, 20), (9, 70)])
def test_equals_the_reference(
    size: tuple[int, int], share: float, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two rollouts in a row, whose findings add up; up to five programs of 16 environments,
    whose parts are merged two at once.
    """
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 2)
    monkeypatch.setattr(module, "BLOCK_P", 2)
    kept = None
    for seed in range(2):
        got = rollout(*size, seed, valid, share)
        expected = copy_of(got)
        if kept is not None:
            got.findings, got.kept, expected.findings, expected.kept = kept
        results = [
            case.check(function)
            for case, function in (
                (got, find_non_finite_triton),
                (expected, find_non_finite_reference),
            )
        ]
        assert_equal(got, expected, results)
        kept = got.findings, got.kept, expected.findings, expected.kept
    assert (share > 0) <= (int(got.findings.count) > 0) or size == (1, 1)


@pytest.mark.parametrize(("name", "bad"), [(name, BAD[i % 3]) for i, name in enumerate(NAMES)])
@pytest.mark.parametrize("function", [find_non_finite_reference, find_non_finite_triton])
def test_one_number_in_any_column_is_found(function: Any, name: str, bad: float) -> None:
    case = rollout(6, 5, 1, False)
    case.terminated.zero_()
    case.truncated.zero_()
    case.columns[name][3, 2].view(-1)[-1] = bad
    before = case.columns["obs"][:, 2].clone()
    valid, envs = case.check(function)
    # a bad observation shows that the step before led to it
    rows = [2, 3] if name in ("obs", "state") else [3]
    assert [t for t in range(6) if not valid[t, 2]] == rows
    assert int((~valid).sum()) == int(case.findings.count) == len(rows)
    assert envs.nonzero().flatten().tolist() == [2]
    assert int(case.findings.first) == rows[0] * 5 + 2
    assert int(case.findings.keys) == (0 if len(rows) == 2 else 1 << NAMES.index(name))
    assert bool(case.findings.policy_diverged) == (name in ("action", "value"))
    assert all(bool(torch.isfinite(case.columns[each]).all()) for each in NAMES)
    torch.testing.assert_close(case.kept[0], before, equal_nan=True)  # as it was


@pytest.mark.parametrize("function", [find_non_finite_reference, find_non_finite_triton])
def test_no_successor_after_the_end_of_an_episode(function: Any) -> None:
    case = rollout(4, 3, 1, False)
    case.terminated.zero_()
    case.truncated.zero_()
    case.terminated[1, 0] = case.truncated[1, 1] = True
    case.columns["obs"][2, :, 4] = torch.nan
    valid, _ = case.check(function)
    assert (~valid).nonzero().tolist() == [[1, 2], [2, 0], [2, 1], [2, 2]]


@pytest.mark.parametrize("function", [find_non_finite_reference, find_non_finite_triton])
def test_what_was_not_valid_is_zeroed_and_not_counted(function: Any) -> None:
    case = rollout(4, 3, 1, False)
    case.valid = torch.ones(4, 3, dtype=torch.bool)
    case.valid[2, 1] = False
    case.columns["value"][2, 1] = torch.nan
    valid, envs = case.check(function)
    assert valid is case.valid
    assert (~valid).nonzero().tolist() == [[2, 1]]
    assert not bool(envs.any())
    assert [int(each) for each in case.findings] == [-1, 0, 0, 0]
    assert float(case.columns["value"][2, 1]) == 0.0


def test_finite_rollouts_are_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the dispatch, which takes Triton."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    case = rollout(7, 4, 3, False)
    before = copy_of(case)
    valid, envs = case.check(find_non_finite)
    assert bool(valid.all())
    assert not bool(envs.any())
    torch.testing.assert_close(case.columns, before.columns, rtol=0, atol=0)
    assert [int(each) for each in case.findings] == [-1, 0, 0, 0]
