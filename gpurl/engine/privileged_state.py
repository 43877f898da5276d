"""Appends privileged observations, which only the critic reads, to the actor's: one row a sample,
stored and shuffled together.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.vec_env import Seed, Timestep, VecEnv
from gpurl.envs.wrapper import VecEnvWrapper
from gpurl.errors import UsageError
from gpurl.guards.contract import check_reset, check_step


class AppendPrivilegedState(VecEnvWrapper):
    """`env`, which has a `single_state_space`, with observations [N, D + S]: the actor's [N, D] and
    the state [N, S], both flattened.

    The actor reads the first D numbers, the critic the other S. UsageError unless both are float32
    Boxes.
    """

    def __init__(self, env: VecEnv) -> None:
        spaces = {
            "single_observation_space": env.single_observation_space,
            "single_state_space": env.single_state_space,
        }
        for name, space in spaces.items():
            if not isinstance(space, Box) or space.dtype != np.float32:
                raise UsageError(
                    f"an asymmetric critic needs float32 Boxes, {type(env).__name__}.{name} is "
                    f"{space}; --asymmetric False leaves the state out, where the algorithm has it"
                )
        # one space for both
        boxes = [space for space in spaces.values() if isinstance(space, Box)]
        low = np.concatenate([box.low.reshape(-1) for box in boxes])
        high = np.concatenate([box.high.reshape(-1) for box in boxes])
        super().__init__(env, Box(low, high, dtype=np.float32))
        self.single_state_space = None  # it is among the observations now

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


def _concatenate(obs: Tensor, state: Tensor) -> Tensor:
    """[N, *obs], [N, *state] -> [N, D + S]."""
    return torch.cat((obs.flatten(1), state.flatten(1)), dim=1)
