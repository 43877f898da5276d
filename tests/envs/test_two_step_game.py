"""The two-step game: all its payoffs and policies, worked out by hand from the paper's table."""

import itertools

import pytest
import torch
from torch import Tensor

from gpurl.envs.two_step_game import TwoStepGame
from gpurl.run.evaluator import Act, evaluate, scripted

PAYOFF_2B = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 8.0}
JOINT_ACTIONS = list(itertools.product((0, 1), repeat=2))
FIRST_PLACE = [[1.0, 0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0]]  # what the two agents see
IN_2A = [[0.0, 1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 1.0]]
IN_2B = [[0.0, 0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0, 1.0]]


def payoff(first: tuple[int, int], second: tuple[int, int]) -> float:
    return 7.0 if first[0] == 0 else PAYOFF_2B[second]


def test_the_payoffs_of_all_pairs_of_joint_actions() -> None:
    pairs = list(itertools.product(JOINT_ACTIONS, repeat=2))
    env = TwoStepGame(len(pairs))
    obs, _ = env.reset()
    assert obs.tolist() == [FIRST_PLACE] * 16
    step = env.step(torch.tensor([first for first, _ in pairs]))
    assert step.obs.tolist() == [IN_2B if first[0] else IN_2A for first, _ in pairs]
    assert step.reward.tolist() == [[0.0, 0.0]] * 16
    assert not bool((step.terminated | step.truncated).any())
    step = env.step(torch.tensor([second for _, second in pairs]))
    assert step.reward.tolist() == [[payoff(*pair)] * 2 for pair in pairs]
    assert bool(step.terminated.all())
    assert not bool(step.truncated.any())


def test_an_ended_game_begins_anew_and_its_statistics_are_of_one_agent() -> None:
    env = TwoStepGame(4)
    env.reset()
    actions = torch.tensor(JOINT_ACTIONS)
    for _ in range(3):
        first = env.step(actions)
        assert first.info["episode"]["r"].tolist() == [0.0] * 4
        assert not bool(first.info["_episode"].any())
        last = env.step(actions)
        assert last.obs.tolist() == [FIRST_PLACE] * 4
        assert last.info["final_obs"].tolist() == [IN_2A, IN_2A, IN_2B, IN_2B]
        assert last.info["episode"]["r"].tolist() == [7.0, 7.0, 1.0, 8.0]
        assert last.info["episode"]["l"].tolist() == [2] * 4
        assert last.info["_episode"].tolist() == [True] * 4


def joint_policies() -> Tensor:
    """[64, place, agent] the action of each agent in each place, of all deterministic joint
    policies.
    """
    return torch.tensor(list(itertools.product((0, 1), repeat=6))).view(64, 3, 2)


def playing(policies: Tensor) -> Act:
    """policies [N, place, agent]: what the agents of each environment do, by nothing but what they
    see.
    """

    def act(obs: Tensor, policy_state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        place, agent = obs[..., :3].argmax(2), obs[..., 3:].argmax(2)
        return policies[torch.arange(len(obs)).unsqueeze(1), place, agent], policy_state

    return act


def test_the_returns_of_all_deterministic_joint_policies() -> None:
    policies = joint_policies()
    env = TwoStepGame(64)
    obs, _ = env.reset()
    act = playing(policies)
    for _ in range(2):
        step = env.step(act(obs, ())[0])
        obs = step.obs
    expected = [
        payoff(policy[0], policy[2])
        for policy in (list(map(tuple, policy.tolist())) for policy in policies)
    ]
    assert step.info["episode"]["r"].tolist() == expected
    assert sorted(expected) == [0.0] * 8 + [1.0] * 16 + [7.0] * 32 + [8.0] * 8


@pytest.mark.parametrize(("in_first_place", "expected"), [(0, 7.0), (1, 8.0)])
def test_an_evaluation_gives_7_and_8(in_first_place: int, expected: float) -> None:
    policies = torch.ones(8, 3, 2, dtype=torch.int64)
    policies[:, 0, 0] = in_first_place
    values = evaluate(playing(policies), TwoStepGame(8), 24)
    assert values == {
        "eval/mean_reward": expected,
        "eval/std_reward": 0.0,
        "eval/mean_ep_length": 2.0,
        "eval/episodes": 24.0,
    }


def test_the_scripted_policy_is_the_best() -> None:
    act = scripted(env := TwoStepGame(8))
    assert act is not None
    assert evaluate(act, env, 8)["eval/mean_reward"] == 8.0
