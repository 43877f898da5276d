"""Our environments as a TorchRL EnvBase of batch size [N]: tensors stay on the device, none is
copied.
"""

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase

from gpurl.adapters.transfer import one_reward
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError


class TorchRlEnv(EnvBase):
    """("next", "observation") is final_obs. Where an episode ended TorchRL calls reset, which
    returns what the policy sees next.

    Privileged observations are "state". Discrete actions are numbers (Categorical), not one-hot.
    Environments with autoreset NEXT_STEP are reset by that call, so every step is a transition,
    unless the reset takes effect a step later (`resets_late`, Isaac Gym), of which to_torchrl
    warns. Those that cannot reset a part of the environments raise.
    """

    def __init__(self, env: VecEnv) -> None:
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.env = env
        observations = {"observation": _spec(env, env.single_observation_space)}
        if env.single_state_space is not None:
            observations["state"] = _spec(env, env.single_state_space)
        column = (env.num_envs, 1)
        flags = {
            key: Categorical(2, column, self.device, torch.bool)
            for key in ("done", "terminated", "truncated")
        }
        self.observation_spec = Composite(observations, shape=self.batch_size, device=self.device)
        self.action_spec = _spec(env, env.single_action_space)
        self.reward_spec = Unbounded(column, device=self.device)
        self.done_spec = Composite(flags, shape=self.batch_size, device=self.device)
        self._seed: int | None = None
        self._observations: dict[str, Tensor] = {}  # what the policy sees next
        # [N] bool: the environment has reset itself
        self._is_reset = torch.zeros(env.num_envs, dtype=torch.bool, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        obs, reward, terminated, truncated, info = self.env.step(tensordict["action"])
        self._observations = _named(obs, info.get("state"))
        done = terminated | truncated
        if self.env.autoreset_mode == AutoresetMode.SAME_STEP:
            self._is_reset = done
        # the transition ends in the true successor
        results = _named(info["final_obs"], info.get("final_state"))
        results["reward"] = one_reward(reward).unsqueeze(1)
        results["done"] = done.unsqueeze(1)
        results["terminated"] = terminated.unsqueeze(1)
        results["truncated"] = truncated.unsqueeze(1)
        return TensorDict(results, batch_size=self.batch_size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            obs, info = self.env.reset(seed=self._seed)
            self._seed = None
            self._observations = _named(obs, info.get("state"))
            self._is_reset = torch.zeros_like(self._is_reset)
        else:
            # those that have reset themselves need no second reset
            mask = mask.view(-1)
            remaining = mask & ~self._is_reset
            self._is_reset = self._is_reset & ~mask
            # no further host sync: TorchRL has read `done` on the host before this call
            if bool(remaining.any()):
                obs, info = self.env.reset(options={"reset_mask": remaining})
                self._observations = _named(obs, info.get("state"))
        return TensorDict(self._observations, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        """Seed the next reset; without it the environments keep their own."""
        self._seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        if not self.is_closed:
            self.env.close()
        super().close(raise_if_closed=raise_if_closed)


def _named(obs: Tensor, state: Tensor | None) -> dict[str, Tensor]:
    return {"observation": obs} if state is None else {"observation": obs, "state": state}


def _spec(env: VecEnv, space: gymnasium.Space) -> TensorSpec:
    """TorchRL's description of N values of a space."""
    shape = torch.Size((env.num_envs, *(space.shape or ())))
    device = env.device
    if isinstance(space, Discrete):
        return Categorical(int(space.n), shape, device)
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(space.nvec.tolist(), shape, device)
    if not isinstance(space, Box):
        raise UsageError(f"to_torchrl takes Box, Discrete and MultiDiscrete spaces, got {space}")
    dtype = torch.uint8 if space.dtype == "uint8" else torch.float32
    if not (space.bounded_below & space.bounded_above).all():
        return Unbounded(shape, device, dtype)
    # limited in all dimensions
    low = torch.as_tensor(space.low, dtype=dtype, device=device).expand(shape)
    high = torch.as_tensor(space.high, dtype=dtype, device=device).expand(shape)
    return Bounded(low, high, shape, device, dtype)
