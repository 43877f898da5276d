"""Our environments as a skrl Wrapper: columns [N, 1] of rewards and flags, tensors stay on the
device.
"""

import gymnasium
from skrl.envs.wrappers.torch import Wrapper
from torch import Tensor

from gpurl.adapters.transfer import action_limiter, log_of_all, one_reward
from gpurl.envs.vec_env import VecEnv

Info = dict[str, object]


class SkrlEnv(Wrapper):
    """Privileged observations are skrl's state. Actions are clipped to the Box.

    skrl has no place for final_obs. Its trainers store as next observation what the policy sees
    next, after the end of an episode the first observation of another one, and bootstrap time-outs
    from that. Agents of `with_final_obs(PPO)` store the true successor. A single environment, which
    skrl resets itself, returns final_obs as its next observation.
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

    def reset(self) -> tuple[Tensor, Info]:
        """Observations [N, D] of the first episodes; later the present ones, since the environments
        reset themselves.
        """
        if self._obs is None:
            obs, info = self.env.reset()
            self._obs = obs.flatten(1)
            self._state = _rows(info.get("state"))
        self._next_state = self._state
        return self._obs, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Info]:
        """(observations [N, D], rewards, terminated, truncated [N, 1], info)."""
        shape = (self.env.num_envs, *(self.env.single_action_space.shape or ()))
        actions = self._limit(actions.reshape(shape))
        obs, reward, terminated, truncated, info = self.env.step(actions)
        # what the policy sees next, and the true successor
        self._obs = obs.flatten(1)
        self._state = _rows(info.get("state"))
        final_obs = info["final_obs"].flatten(1)
        final_state = _rows(info.get("final_state"))
        infos: Info = {"final_obs": final_obs, "final_state": final_state}
        if "log" in info:
            infos["episode"] = log_of_all(info["log"])  # skrl's trainers read means there
        # skrl resets a single environment after the end of an episode, and reset returns self._obs
        is_single = self.env.num_envs == 1
        self._next_state = final_state if is_single else self._state
        return (
            final_obs if is_single else self._obs,
            one_reward(reward).unsqueeze(1),
            terminated.unsqueeze(1),
            truncated.unsqueeze(1),
            infos,
        )

    def state(self) -> Tensor | None:
        """[N, D] privileged observations."""
        return self._next_state

    def render(self, *args: object, **kwargs: object) -> None:
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
            infos: Info,
            **transition: object,
        ) -> None:
            super().record_transition(
                next_observations=infos["final_obs"],
                next_states=infos["final_state"],
                infos=infos,
                **transition,
            )

    Agent.__name__ = Agent.__qualname__ = agent_class.__name__
    return Agent


def _rows(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.flatten(1)
