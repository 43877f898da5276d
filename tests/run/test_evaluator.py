"""The evaluator: whose episodes count, and a memory that ends with its episode in every autoreset
mode.
"""

import math

import torch
from torch import Tensor

from gpurl.algorithms.base import PolicyState
from gpurl.envs.registry import make_env
from gpurl.envs.torch_env import State
from gpurl.kernels.random import CounterRandom
from gpurl.run.evaluator import evaluate
from tests.tiny_envs import AlternatingEnv


def test_a_memory_is_empty_at_every_episodes_first_step() -> None:
    """Where the environment resets at the next step, the step between two episodes belongs to
    neither.
    """
    seen: list[Tensor] = []
    env = make_env("gymnasium_cpu:CartPole-v1", 4, vectorization="vector")
    starts: list[Tensor] = []
    step = env.step

    def watched(action: Tensor) -> object:
        starts.append(env.episode_length_buf == 0)
        return step(action)

    env.step = watched  # type: ignore[method-assign, assignment]

    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        seen.append(policy_state[0][:, 0].clone())
        return torch.ones(4, dtype=torch.int64), (policy_state[0] + 1.0,)

    values = evaluate(act, env, 12, (torch.zeros(4, 1),))
    assert values["eval/episodes"] == 12
    ended = 0
    for steps_so_far, policy_state in zip(env_steps_since_start(starts), seen):
        real = steps_so_far >= 0
        assert torch.equal(policy_state[real], steps_so_far[real].float())
        ended += int((steps_so_far == 0).sum())
    assert ended > 8


def env_steps_since_start(starts: list[Tensor]) -> list[Tensor]:
    """[N] real steps taken in the present episode before each step; -1 at the step that only
    resets.
    """
    counts, now = [], torch.zeros(4, dtype=torch.int64)
    for number, start in enumerate(starts):
        begins = start & (starts[number - 1] if number else torch.ones_like(start))
        now = torch.where(start, torch.where(begins, 0, -1), now + 1)
        counts.append(now.clone())
    return counts


class Faulty(AlternatingEnv):
    """Returns 1 an episode; NaN in the first `faulty` environments."""

    faulty = 0

    def transition(
        self, state: State, action: Tensor, rng: CounterRandom
    ) -> tuple[State, Tensor, Tensor]:
        next_state, reward, ended = super().transition(state, action, rng)
        return (
            next_state,
            torch.where(torch.arange(self.num_envs) < self.faulty, torch.nan, reward),
            ended,
        )


def test_episodes_without_a_finite_return_are_counted_apart() -> None:
    def act(obs: Tensor, policy_state: PolicyState) -> tuple[Tensor, PolicyState]:
        return torch.zeros(4, dtype=torch.int64), policy_state

    env = Faulty(4)
    env.faulty = 1
    values = evaluate(act, env, 8)
    assert values == {
        **{"eval/mean_reward": 1.0, "eval/std_reward": 0.0, "eval/mean_ep_length": 3.0},
        **{"eval/episodes": 6.0, "eval/non_finite_episodes": 2.0},
    }
    env.faulty = 4
    values = evaluate(act, env, 8)
    assert (values["eval/episodes"], values["eval/non_finite_episodes"]) == (0.0, 8.0)
    assert math.isnan(values["eval/mean_reward"])
    assert math.isnan(values["eval/std_reward"])
