"""Our environments as a skrl Wrapper: columns [N, 1] of rewards and flags, tensors stay where they
are.
"""

from typing import Any

import gymnasium
from skrl.envs.wrappers.torch import Wrapper
from torch import Tensor

from gpurl.adapters.transfer import action_limiter, one_reward
from gpurl.envs.vec_env import VecEnv


class SkrlEnv(Wrapper):
    """What only critics see, where there is such a thing, is skrl's state. Actions are clipped to
    the Box.

    skrl has no place for final_obs: its trainers store as next observation what the policy sees
    next, which after an episode's end is the first of another episode, and bootstrap time-outs from
    that. Make agents by `with_final_obs(PPO)` to store the true successor. A single environment,
    which they reset themselves, has final_obs as its next observation.
    """

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self.env = env
        self._limit = action_limiter(env)
        self._obs: Tensor | None = None
        self._state: Tensor | None = None
        self._next_state: Tensor | None = None

    @property
    def observation_space(self) -> gymnasium.Space:
        return self.env.single_observation_space

    @property
    def action_space(self) -> gymnasium.Space:
        return self.env.single_action_space

    @property
    def state_space(self) -> gymnasium.Space | None:
        return self.env.single_state_space

    @property
    def num_agents(self) -> int:
        return 1  # several act as one

    def reset(self) -> tuple[Tensor, dict[str, Any]]:
        """Observations [N, D] of the first episodes; later, those that the environments, which
        start anew by themselves, show already.
        """
        if self._obs is None:
            obs, info = self.env.reset()
            self._obs, self._state = obs.flatten(1), _flat(info.get("state"))
        self._next_state = self._state
        return self._obs, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """(observations [N, D], rewards, terminated, truncated [N, 1], info)."""
        shape = (self.env.num_envs, *(self.env.single_action_space.shape or ()))
        obs, reward, terminated, truncated, info = self.env.step(
            self._limit(actions.reshape(shape))
        )
        self._obs, self._state = obs.flatten(1), _flat(info.get("state"))
        given = {
            "final_obs": info["final_obs"].flatten(1),
            "final_state": _flat(info.get("final_state")),
        }
        if "log" in info:
            given["episode"] = info["log"]  # where its trainers read means
        alone = self.env.num_envs == 1
        self._next_state = given["final_state"] if alone else self._state
        next_obs = given["final_obs"] if alone else self._obs
        return (
            next_obs,
            one_reward(reward).unsqueeze(1),
            terminated.unsqueeze(1),
            truncated.unsqueeze(1),
            given,
        )

    def state(self) -> Tensor | None:
        """[N, D] what only critics see."""
        return self._next_state

    def render(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to show."""

    def close(self) -> None:
        self.env.close()


def with_final_obs(agent_class: type) -> type:
    """The skrl agent that stores final_obs of a `SkrlEnv` as next observation.

    On-policy agents then bootstrap time-outs from the true successor where their configuration has
    time_limit_bootstrap=True, off-policy ones in any case.
    """

    class Agent(agent_class):
        def record_transition(
            self,
            *,
            next_observations: Tensor,
            next_states: Tensor | None,
            infos: Any,
            **transition: Any,
        ) -> None:
            final_obs, final_state = infos["final_obs"], infos["final_state"]
            super().record_transition(
                next_observations=final_obs, next_states=final_state, infos=infos, **transition
            )

    Agent.__name__ = Agent.__qualname__ = agent_class.__name__
    return Agent


def _flat(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.flatten(1)
