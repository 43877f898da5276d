"""Appends privileged observations, which only the critic reads, to the actor's: one row a sample,
stored and shuffled together.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.vec_env import Seed, Timestep, VecEnv
from gpurl.errors import UsageError
from gpurl.guards.contract import check_reset, check_step


class AppendPrivilegedState(VecEnv):
    """`env`, which has a `single_state_space`, with observations [N, D + S]: the actor's [N, D] and
    the state [N, S], both flattened.

    The actor reads the first D numbers, the critic the other S
    (`gpurl.nn.actor_critic.AsymmetricActorCritic`). UsageError unless both are float32 Boxes.
    """

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        spaces = {
            "single_observation_space": env.single_observation_space,
            "single_state_space": env.single_state_space,
        }
        for name, space in spaces.items():
            if not isinstance(space, Box) or space.dtype != np.float32:
                raise UsageError(
                    f"an asymmetric critic needs float32 Boxes, {type(env).__name__}.{name} is "
                    f"{space}; ppo and a2c do without by --asymmetric False"
                )
        # one space for both
        boxes = [space for space in spaces.values() if isinstance(space, Box)]
        low = np.concatenate([box.low.reshape(-1) for box in boxes])
        high = np.concatenate([box.high.reshape(-1) for box in boxes])
        self.single_observation_space = Box(low, high, dtype=np.float32)
        # the rest is that of the environment
        self.single_action_space = env.single_action_space
        self.num_agents = env.num_agents
        self.graph_safe = env.graph_safe
        self.max_episode_steps = env.max_episode_steps
        self.takes_share_seeds = env.takes_share_seeds
        super().__init__(env.num_envs, env.device)
        self.training_progress = env.training_progress
        self.autoreset_mode = env.autoreset_mode
        self.metadata = env.metadata

    def reset(
        self, *, seed: Seed | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        # ShareSeeds only if the environment takes them
        obs, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        check_reset(self.env, obs, info)
        return _concatenate(obs, info["state"]), info

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = self.env.step(actions)
        check_step(self.env, timestep)
        info = timestep.info
        obs = _concatenate(timestep.obs, info["state"])
        # the environment returns the same tensors where no episode ended
        is_same = info["final_obs"] is timestep.obs and info["final_state"] is info["state"]
        final_obs = obs if is_same else _concatenate(info["final_obs"], info["final_state"])
        return timestep._replace(obs=obs, info=info | {"final_obs": final_obs})

    def stagger(self, clocks: Tensor) -> None:
        self.env.stagger(clocks)

    def state_dict(self) -> dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state)

    def curriculum_state(self) -> dict[str, Any]:
        return self.env.curriculum_state()

    def load_curriculum_state(self, state: dict[str, Any]) -> None:
        self.env.load_curriculum_state(state)


def _concatenate(obs: Tensor, state: Tensor) -> Tensor:
    """[N, *obs], [N, *state] -> [N, D + S]."""
    return torch.cat((obs.flatten(1), state.flatten(1)), dim=1)
