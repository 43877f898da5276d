"""What a task of Isaac Gym returned, turned into transitions: by hand-worked numbers, and without
the host's looking.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpurl.envs.isaac_gym.steps import IsaacGymSteps, Returned
from gpurl.kernels.backend import no_host_syncs

NAN = float("nan")


def returned(
    obs: list[float], done: list[int], timed_out: list[int], clock: list[int], reward: float = 1.0
) -> Returned:
    """Three environments of one observation; the critic sees ten times as much."""
    column = torch.tensor(obs).unsqueeze(1)
    flags = torch.tensor(done).bool(), torch.tensor(timed_out).bool()
    return Returned(column, torch.full((3,), reward), *flags, torch.tensor(clock), 10.0 * column)


def test_a_task_that_restarts_later() -> None:
    steps = IsaacGymSteps(restarts_later=True, last_clock=5)
    steps.restart(
        returned([0.0, 0.1, 0.2], [0, 0, 1], [0, 0, 0], [0, 0, 0])
    )  # the third ended in its very first step
    transition = steps.transition(returned([1.0, 1.1, 1.2], [1, 1, 0], [0, 0, 1], [4, 3, 0]))
    assert transition.valid.tolist() == [True, True, False]
    assert transition.truncated.tolist() == [
        True,
        False,
        False,
    ]  # the clock says so, the task did not
    assert transition.terminated.tolist() == [False, True, False]
    assert transition.reward.tolist() == [1.0, 1.0, 0.0]
    assert transition.final[0].flatten().tolist() == pytest.approx([1.0, 1.1, 1.2])
    transition = steps.transition(
        returned([2.0, 2.1, 2.2], [1, 0, 1], [0, 0, 1], [5, 5, 1], reward=NAN)
    )
    assert transition.valid.tolist() == [False, False, True]
    assert transition.truncated.tolist() == [
        False,
        False,
        True,
    ]  # the task says so, the clock does not
    assert transition.terminated.tolist() == [False, False, False]
    assert transition.reward[:2].tolist() == [0.0, 0.0]
    transition = steps.transition(
        returned([3.0, 3.1, 3.2], [0, 0, 0], [1, 1, 1], [0, 0, 0])
    )  # stale time-outs
    assert transition.valid.tolist() == [False, True, False]  # the first restarted twice
    assert not transition.truncated.any()


def test_a_task_that_restarts_at_once() -> None:
    steps = IsaacGymSteps(restarts_later=False, last_clock=5)
    steps.restart(returned([0.0, 0.1, 0.2], [1, 0, 0], [0, 0, 0], [0, 0, 0]))
    transition = steps.transition(returned([1.0, 1.1, 1.2], [1, 1, 0], [0, 0, 0], [4, 3, 4]))
    assert transition.valid.all()
    assert transition.truncated.tolist() == [True, False, False]
    assert transition.terminated.tolist() == [False, True, False]
    assert transition.final[0].flatten().tolist() == pytest.approx([0.0, 0.1, 1.2])
    assert transition.final[1].flatten().tolist() == pytest.approx([0.0, 1.0, 12.0])
    steps.end_episodes(torch.tensor([True, False, False]))
    transition = steps.transition(returned([2.0, 2.1, 2.2], [1, 0, 1], [0, 0, 0], [0, 0, 0]))
    assert transition.valid.tolist() == [False, True, True]
    assert transition.terminated.tolist() == [False, False, True]
    assert steps.transition(returned([3.0, 3.1, 3.2], [0, 0, 0], [0, 0, 0], [0, 0, 0])).valid.all()


def test_what_broke_does_not_show_until_its_restart() -> None:
    steps = IsaacGymSteps(restarts_later=True, last_clock=5)
    steps.restart(returned([NAN, NAN, 0.2], [0, 0, 0], [0, 0, 0], [0, 0, 0]))
    steps.end_episodes(torch.tensor([True, False, True]))
    assert steps.last[0].flatten().nan_to_num(-1.0).tolist() == pytest.approx([0.0, -1.0, 0.2])
    assert steps.last[1].flatten().nan_to_num(-1.0).tolist() == pytest.approx([0.0, -1.0, 2.0])


@pytest.mark.parametrize("restarts_later", [True, False])
def test_the_host_looks_at_nothing(restarts_later: bool) -> None:
    given = returned([1.0, 1.1, 1.2], [1, 1, 0], [0, 0, 0], [4, 3, 4])
    with no_host_syncs(), FakeTensorMode(allow_non_fake_inputs=True):
        steps = IsaacGymSteps(restarts_later, last_clock=5)
        steps.restart(given)
        steps.end_episodes(steps.transition(given).terminated)
        assert steps.transition(given).valid.shape == (3,)
