"""Several trained policies that act as one: the mean of their continuous actions, and between
discrete ones the choice of most of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, PolicyState
from gpurl.run.evaluator import Act, greedy


def combined(actions: Tensor) -> Tensor:
    """[M, N, *action] greedy actions of M policies -> [N, *action]: the mean of floats; of
    integers, each by itself, what most policies choose, and where votes are equal the choice of the
    first of them (majority voting; Wiering and van Hasselt 2008, "Ensemble algorithms in
    reinforcement learning").

    A Gaussian policy's greedy action is its mean, so that the mean of actions is that of the
    mixture of all policies; inside a Box it stays inside.
    """
    if actions.is_floating_point():
        return actions.mean(0)
    votes = torch.stack([(actions == own).sum(0) for own in actions])
    return actions.gather(0, votes.argmax(0, keepdim=True)).squeeze(0)


def greedy_ensemble(policies: Sequence[Algorithm]) -> Act:
    """All policies on the same observations, without exploration; see `ensemble_state`."""
    players = [greedy(each) for each in policies]

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        # each has as many hidden states as the others
        count = len(policy_state) // len(players)
        actions, states = zip(*(
            player(obs, policy_state[k * count : (k + 1) * count])
            for k, player in enumerate(players)
        ))  # fmt: skip
        return combined(torch.stack(actions)), tuple(each for state in states for each in state)

    return act


def ensemble_state(policies: Sequence[Algorithm], num_envs: int) -> PolicyState:
    """The hidden states at the start of an episode, of all policies one after the other."""
    return tuple(each for one in policies for each in one.initial_policy_state(num_envs))
