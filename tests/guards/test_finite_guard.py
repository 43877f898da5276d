"""Which rows of a rollout the guard against NaN skips, and that nothing of them remains."""

from contextlib import nullcontext

import pytest
import torch

from gpurl.buffers.rollout import RolloutBuffer
from gpurl.errors import NonFiniteError
from gpurl.guards.finite import FiniteGuard
from gpurl.kernels.backend import no_host_syncs


def rollout(bad: float) -> RolloutBuffer:
    """4 steps of 4 environments; `bad` is seen at step 2 by 0 in mid-episode, by 1 after a
    termination, by 2 after a truncation.
    """
    buffer, nobody = RolloutBuffer(4, torch.device("cpu")), torch.zeros(4, dtype=torch.bool)
    for _ in range(4):
        row = {"obs": torch.ones(4, 2), "reward": torch.ones(4), "final_value": torch.ones(4)}
        buffer.add({**row, "terminated": nobody, "truncated": nobody})
    buffer["obs"][2, :3, 1] = bad
    buffer["terminated"][1, 1] = buffer["truncated"][1, 2] = True
    return buffer


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_whose_successor_is_nan_is_left_out_unless_its_episode_ended(bad: float) -> None:
    buffer = rollout(bad)
    bad_envs = FiniteGuard("rollout", buffer.device).clean(buffer)
    assert bad_envs is not None
    assert bad_envs.tolist() == [True, True, True, False]
    valid_steps = [[t for t in range(4) if buffer["valid"][t, env]] for env in range(4)]
    assert valid_steps == [[0, 3], [0, 1, 3], [0, 1, 3], [0, 1, 2, 3]]
    assert all(
        bool(torch.isfinite(buffer[name]).all()) for name in ("obs", "reward", "final_value")
    )


def test_a_finite_rollout_is_left_as_it_is() -> None:
    buffer = rollout(1.0)
    assert FiniteGuard("rollout", buffer.device).clean(buffer) is None
    assert "valid" not in buffer.columns


def test_a_policy_that_diverged_is_told_from_an_environment_that_did() -> None:
    """NaN in a value whose observation is finite; with --nan skip too, for such weights never come
    back.
    """
    buffer = rollout(1.0)
    buffer.columns["value"] = torch.ones(4, 4)
    buffer["value"][1, 2] = torch.nan
    guard = FiniteGuard("walk", buffer.device)
    assert guard.clean(buffer) is not None
    with pytest.raises(
        NonFiniteError,
        match=r"the policy gave NaN .*step 1 of the rollout.* observations of 'walk' are finite",
    ):
        guard.stop_if_bad(numbers(guard), 4, False, 3, [2])
    both = rollout(torch.nan)  # a NaN that was seen makes a NaN value
    both.columns["value"] = both["obs"].sum(2)
    guard.clean(both)
    guard.stop_if_bad(numbers(guard), 4, False, 3, [0, 1, 2])
    guard.clean(rollout(torch.nan))
    with pytest.raises(
        NonFiniteError,
        match=r"environments 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 54 more\); these steps were not",
    ):
        guard.stop_if_bad(numbers(guard), 64, True, 3, list(range(64)))


def test_what_only_critics_see_is_told_apart() -> None:
    """Two numbers of an observation and one of a state in a row; the step before one that saw NaN
    in the state is left out too.
    """
    buffer = rollout(1.0)
    buffer.columns["obs"] = buffer.columns["final_obs"] = torch.ones(4, 4, 3)
    buffer["obs"][2, 0, 2] = torch.nan
    guard = FiniteGuard("walk", buffer.device, num_inputs=2)
    assert guard.clean(buffer) is not None
    assert [t for t in range(4) if buffer["valid"][t, 0]] == [0, 3]
    assert bool(buffer["obs"].isfinite().all())
    with pytest.raises(
        NonFiniteError, match=r"first in the next obs \(iteration 1, step 1 "
    ) as caught:
        guard.stop_if_bad(numbers(guard), 4, True, 1, [])
    assert caught.value.evidence is not None
    columns = caught.value.evidence["columns"]
    assert columns["state"].isnan().squeeze(1).tolist() == [False, False, True, False]
    assert columns["obs"].shape == (4, 2)
    buffer["obs"][0, 1, 2] = torch.nan
    guard.clean(buffer)
    with pytest.raises(NonFiniteError, match=r"first in state and final_state \("):
        guard.stop_if_bad(numbers(guard), 4, True, 1, [])


def numbers(guard: FiniteGuard) -> dict[str, float]:
    return {name: float(value) for name, value in guard.metrics().items()}


@pytest.mark.parametrize("looks", [True, False])
def test_the_first_environment_s_columns_are_kept_as_they_were(looks: bool) -> None:
    """Of the first rollout with NaN, not of later ones; on a device without a look at it."""
    with nullcontext() if looks else no_host_syncs():
        guard, first, later = FiniteGuard("walk", torch.device("cpu")), rollout(1.0), rollout(1.0)
        guard.clean(rollout(1.0))
        for buffer, t, env in ((first, 3, 1), (later, 0, 2)):
            buffer["reward"].add_(torch.arange(16.0).view(4, 4))
            buffer["reward"][t, env] = torch.nan
            before = buffer["reward"].clone()
            guard.clean(buffer)
            if buffer is first:
                expected = before[:, 1]
    torch.testing.assert_close(guard.evidence["reward"], expected, equal_nan=True)
    with pytest.raises(
        NonFiniteError,
        match=r"2 times, first in reward \(iteration 5, step 3 of the rollout, environments 1\)",
    ) as caught:
        guard.stop_if_bad(numbers(guard), 4, True, 5, [])
    assert caught.value.evidence is not None
    assert (
        caught.value.evidence["index"],
        caught.value.evidence["step"],
        caught.value.evidence["keys"],
    ) == (1, 3, ["reward"])
