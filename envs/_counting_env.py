"""Base of tensor environments that count their episodes: clock, return and length as tensors."""

import functools
import inspect
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.envs.vec_env import Info, Seed, ShareSeeds, Timestep, VecEnv, describe
from gpurl.errors import EnvError, UsageError, did_you_mean
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.random import CounterRandom

AT_END = "_at_end"  # ends the names of metrics that count where an episode ends


def widen(mask: Tensor, rows: Tensor) -> Tensor:
    """mask [N] as [N, 1, ...], to broadcast with rows [N, ...]."""
    return mask.view(-1, *(1,) * (rows.dim() - 1))


def select(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Rows of `yes` where mask [N], else of `no`; both [N, ...]."""
    return torch.where(widen(mask, no), yes, no)


def check_functions(
    env: VecEnv, base: type[VecEnv], needed: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """EnvError for a function that a task must define and does not, which may be misspelt, and for
    one that takes other arguments.

    base: the class that declares them; needed, optional: as `observe(state)`.
    """
    kind = type(env)
    own = {
        name
        for one in kind.__mro__
        if issubclass(one, base)
        for name, value in vars(one).items()
        if callable(value) and not hasattr(base, name)
    }
    for function in needed:
        name = function.partition("(")[0]
        if getattr(kind, name) is getattr(base, name):
            raise EnvError(
                f"{kind.__name__}: wanted a function {function}, got none; "
                f"{did_you_mean(name, own, 'is it ')}".rstrip("; ")
            )
    for function in (*needed, *optional):
        name, _, names = function.rstrip(")").partition("(")
        own_function = getattr(env, name)
        if not callable(own_function):
            raise EnvError(f"{kind.__name__}: wanted a function {function}, got {own_function!r}")
        signature = inspect.signature(own_function)
        try:
            signature.bind(*names.split(", "))
        except TypeError:
            raise EnvError(
                f"{kind.__name__}.{name}: wanted the arguments ({names}), got {signature}"
            ) from None


class CountingEnv(VecEnv):
    """A VecEnv with the clocks and returns of its episodes on the device. `step` of a subclass
    calls either `_count`, `_episode_info` and `_restart_clocks`, or `_timestep`.
    """

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        super().__init__(num_envs, device)
        self._episode_return = torch.zeros(num_envs, device=self.device)
        # clock at which the episode began, above 0 after a staggered start
        self._episode_start = torch.zeros_like(self.episode_length_buf)

    def stagger(self, clocks: Tensor) -> None:
        self.episode_length_buf.copy_(clocks)
        self._episode_start.copy_(clocks)

    def _checked_action(self, actions: object) -> Tensor:
        """[N, *action] float32 or int64, of a tensor or an array. UsageError unless it is in the
        action space.
        """
        # arrays are taken too, as action_space.sample() returns them
        action = torch.as_tensor(actions, device=self.device)
        space = self.single_action_space
        name = f"{type(self).__name__}.step"
        shape = (self.num_envs, *(space.shape or ()))
        dtype = torch.float32 if isinstance(space, Box) else torch.int64
        # shape and kind of numbers, which cost no host sync
        if action.shape != shape:
            raise UsageError(f"{name}: wanted actions of shape {shape}, got {tuple(action.shape)}")
        if action.is_floating_point() != dtype.is_floating_point:
            raise UsageError(f"{name}: wanted actions of {space}, got {action.dtype}")
        # the range only where the host may read the numbers
        if isinstance(space, (Discrete, MultiDiscrete)) and host_sync_is_free(self.device):
            self._check_choices(name, action, space)
        return action.to(dtype)

    def _check_choices(self, name: str, action: Tensor, space: Discrete | MultiDiscrete) -> None:
        """UsageError for choices out of range; the host reads the actions."""
        if isinstance(space, Discrete):
            low = int(space.start)
            high = int(space.start + space.n - 1)
            is_inside = low <= int(action.min()) <= int(action.max()) <= high
            expected = f"from {low} to {high}"
        else:
            choice = action - torch.as_tensor(space.start)
            is_inside = bool(((choice >= 0) & (choice < torch.as_tensor(space.nvec))).all())
            expected = f"of {space}"
        if not is_inside:
            raise UsageError(
                f"{name}: wanted actions {expected}, got {int(action.min())} to {int(action.max())}"
            )

    def _reseed(self, random: CounterRandom, seed: Seed | None) -> None:
        """Restart the streams of `random` from the `seed` of a reset, if it has one."""
        if seed is None:
            return
        seeds = seed if isinstance(seed, ShareSeeds) else (seed,)
        if not all(isinstance(each, (int, np.integer)) for each in seeds):
            raise UsageError(
                f"reset takes one seed, from which each environment gets a random stream, got "
                f"{seed!r}"
            )
        if len(seeds) == 0 or self.num_envs % len(seeds):
            raise UsageError(
                f"{len(seeds)} seeds need equal shares of the environments, there are "
                f"{self.num_envs}"
            )
        random.restart([int(each) for each in seeds], self.first_env)

    def _count(self, reward: Tensor, valid: Tensor | None = None) -> None:
        """Count one step with reward [N] or [N, A], except where valid [N] is False."""
        # statistics are of the mean over agents
        if self.num_agents > 1:
            reward = reward.mean(1)
        if valid is None:
            self.episode_length_buf += 1
            self._episode_return += reward
        else:
            self.episode_length_buf += valid
            self._episode_return += torch.where(valid, reward, 0.0)

    def _time_limit(self, terminated: Tensor) -> Tensor:
        """[N] bool, after `_count`: the time limit is reached in this step, without termination."""
        if self.max_episode_steps is None:
            return torch.zeros_like(terminated)
        return (self.episode_length_buf >= self.max_episode_steps) & ~terminated

    def _episode_info(self, done: Tensor, truncated: Tensor) -> Info:
        """The entries of info about episodes; done, truncated: [N] bool."""
        return {
            "time_outs": truncated,
            "_final_obs": done,
            "episode": {
                "r": self._episode_return.clone(),
                "l": self.episode_length_buf - self._episode_start,
            },
            # a staggered first episode is too short to count
            "_episode": done & (self._episode_start == 0),
        }

    def _log_of_metrics(self, metrics: Mapping[str, Tensor], info: Info) -> Info:
        """info["log"] of a task's `metrics`, with a mask where not all environments count: those
        named *_at_end are of the episodes that end in this step, and count. info: of the step.
        """
        name = f"{type(self).__name__}.metrics"
        if not isinstance(metrics, Mapping):
            raise EnvError(f"{name}: wanted a dict of tensors by name, got {describe(metrics)}")
        log: Info = {}
        for key, value in metrics.items():
            if not (isinstance(value, Tensor) and value.shape == (self.num_envs,)):
                raise EnvError(
                    f"{name}: {key}: wanted a tensor of shape ({self.num_envs},), got "
                    f"{describe(value)}"
                )
            if key.startswith("_"):
                raise EnvError(f"{name}: {key}: wanted a name that begins with a letter")
            log[key] = value
            masks = [info["_episode"]] if key.endswith(AT_END) else []
            masks += [info["valid"]] if "valid" in info else []
            if masks:
                log[f"_{key}"] = functools.reduce(torch.logical_and, masks)
        return log

    def _timestep(
        self,
        obs: list[Tensor],
        final: list[Tensor],
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        done: Tensor,
        valid: Tensor | None,
    ) -> Timestep:
        """The timestep of a simulator that resets by itself; counts it, and restarts the clocks of
        episodes that ended.

        obs, final: observations, and state if there is one; `obs` those that the policy gets next,
        `final` the true successors.
        """
        # statistics of the step; `info` has copies, so that the clocks can restart
        self._count(reward, valid)
        info = self._episode_info(done, truncated)
        # observations
        info["final_obs"] = final[0]
        if len(obs) > 1:
            info["state"] = obs[1]
            info["final_state"] = final[1]
        if valid is not None:
            info["valid"] = valid
        self._restart_clocks(done)
        return Timestep(obs[0], reward, terminated, truncated, info)

    def _restart_clocks(self, mask: Tensor | None = None) -> None:
        """Set them to 0, everywhere or where mask [N] bool."""
        for counter in (self.episode_length_buf, self._episode_start, self._episode_return):
            if mask is None:
                counter.zero_()
            else:
                counter.masked_fill_(mask, 0)

    def _clocks(self) -> dict[str, Tensor]:
        """The state for `_load_clocks`."""
        return {
            "length": self.episode_length_buf,
            "start": self._episode_start,
            "return": self._episode_return,
        }

    def _load_clocks(self, clocks: dict[str, Tensor]) -> None:
        for name, counter in self._clocks().items():
            counter.copy_(clocks[name])
