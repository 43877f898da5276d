"""An environment whose observations hold, behind them, what only its critic may see: one row a
sample, stored and shuffled as one.
"""

from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import UsageError
from gpurl.guards.contract import check_reset, check_state, check_step


class AppendPrivilegedState(VecEnv):
    """`env`, which has a `single_state_space`, with observations [N, D + S]: its own [N, D] and the
    state [N, S], both flat.

    The actor reads the first D numbers, the critic the other S
    (`gpurl.nn.networks.AsymmetricActorCritic`).
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
                    f"a critic with a state of its own needs float32 Boxes, "
                    f"{type(env).__name__}.{name} is {space}"
                )
        boxes = [space for space in spaces.values() if isinstance(space, Box)]
        low, high = (
            np.concatenate([getattr(box, side).reshape(-1) for box in boxes])
            for side in ("low", "high")
        )
        self.single_observation_space, self.single_action_space = (
            Box(low, high, dtype=np.float32),
            env.single_action_space,
        )
        self.num_agents, self.graph_safe, self.max_episode_steps = (
            env.num_agents,
            env.graph_safe,
            env.max_episode_steps,
        )
        super().__init__(env.num_envs, env.device)
        self.autoreset_mode, self.metadata = env.autoreset_mode, env.metadata

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        check_reset(self.env, obs)
        check_state(self.env, "reset", "state", info)
        return _joined(obs, info["state"]), info

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        timestep = self.env.step(actions)
        check_step(self.env, timestep)
        info = timestep.info
        obs = _joined(timestep.obs, info["state"])
        # the same where the environment says so itself: of a step at which no episode ended
        is_same = info["final_obs"] is timestep.obs and info["final_state"] is info["state"]
        final_obs = obs if is_same else _joined(info["final_obs"], info["final_state"])
        return timestep._replace(obs=obs, info=info | {"final_obs": final_obs})

    def stagger(self, clocks: Tensor) -> None:
        self.env.stagger(clocks)

    def state_dict(self) -> dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state)


def _joined(obs: Tensor, state: Tensor) -> Tensor:
    """[N, *obs], [N, *state] -> [N, D + S]."""
    return torch.cat((obs.flatten(1), state.flatten(1)), dim=1)
