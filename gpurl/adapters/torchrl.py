"""Our environments as a TorchRL EnvBase of batch size [N]: tensors stay where they are, none is
copied.
"""

from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, Unbounded
from torchrl.envs import EnvBase

from gpurl.adapters.transfer import one_reward
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError


class TorchRlEnv(EnvBase):
    """("next", "observation") is final_obs, and the reset that TorchRL asks for where an episode
    ended gives what the policy sees next.

    What only critics see, where there is such a thing, is "state". Discrete actions are numbers
    (Categorical), not one-hot. Environments that start anew one step after an episode's end are
    reset in that place instead, so they have no step that is none, unless that reset, too, takes
    effect a step later (`resets_late`, Isaac Gym's), of which to_torchrl warns; those that cannot
    reset some of them only raise.
    """

    def __init__(self, env: VecEnv) -> None:
        super().__init__(device=env.device, batch_size=[env.num_envs])
        self.env = env
        observed = {"observation": _spec(env, env.single_observation_space)}
        if env.single_state_space is not None:
            observed["state"] = _spec(env, env.single_state_space)
        shape, column = self.batch_size, (env.num_envs, 1)
        self.observation_spec = Composite(observed, shape=shape, device=self.device)
        self.action_spec = _spec(env, env.single_action_space)
        self.reward_spec = Unbounded(column, device=self.device)
        flags = {
            key: Categorical(2, column, self.device, torch.bool)
            for key in ("done", "terminated", "truncated")
        }
        self.done_spec = Composite(flags, shape=shape, device=self.device)
        self._seed: int | None = None
        self._shown: dict[str, Tensor] = {}  # what the policy sees next
        self._fresh = torch.zeros(
            env.num_envs, dtype=torch.bool, device=self.device
        )  # [N] started anew by the environment itself

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        obs, reward, terminated, truncated, info = self.env.step(tensordict["action"])
        self._shown = _observed(obs, info.get("state"))
        done = terminated | truncated
        if self.env.autoreset_mode == AutoresetMode.SAME_STEP:
            self._fresh = done
        flags = {
            "done": done.unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": truncated.unsqueeze(1),
        }
        results = (
            _observed(info["final_obs"], info.get("final_state"))
            | flags
            | {"reward": one_reward(reward).unsqueeze(1)}
        )
        return TensorDict(results, batch_size=self.batch_size, device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        asked = None if tensordict is None else tensordict.get("_reset", None)
        if asked is None:
            obs, info = self.env.reset(seed=self._seed)
            self._seed = None
            self._shown, self._fresh = (
                _observed(obs, info.get("state")),
                torch.zeros_like(self._fresh),
            )
        else:
            asked = asked.view(-1)
            wanted, self._fresh = asked & ~self._fresh, self._fresh & ~asked
            if bool(wanted.any()):  # TorchRL has looked at `done` on the host before it came here
                obs, info = self.env.reset(options={"reset_mask": wanted})
                self._shown = _observed(obs, info.get("state"))
        return TensorDict(self._shown, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        """Of the next reset; without it the environments keep their own."""
        self._seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        if not self.is_closed:
            self.env.close()
        super().close(raise_if_closed=raise_if_closed)


def _observed(obs: Tensor, state: Tensor | None) -> dict[str, Tensor]:
    return {"observation": obs} | ({} if state is None else {"state": state})


def _spec(env: VecEnv, space: gymnasium.Space) -> Any:
    """TorchRL's word for N of a space."""
    shape, device = torch.Size((env.num_envs, *(space.shape or ()))), env.device
    if isinstance(space, Discrete):
        return Categorical(int(space.n), shape, device)
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(space.nvec.tolist(), shape, device)
    if not isinstance(space, Box):
        raise UsageError(f"to_torchrl takes Box, Discrete and MultiDiscrete spaces, got {space}")
    dtype = torch.uint8 if space.dtype == "uint8" else torch.float32
    if not (space.bounded_below & space.bounded_above).all():
        return Unbounded(shape, device, dtype)
    low, high = (
        torch.as_tensor(limit, dtype=dtype, device=device).expand(shape)
        for limit in (space.low, space.high)
    )
    return Bounded(low, high, shape, device, dtype)
