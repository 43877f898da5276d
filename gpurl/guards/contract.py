"""Looks at the outside of what an environment returns, each step: form, keys and memory, which
costs no device anything.

What only values tell (NaN, an observation outside its space, both ends at once, an episode of
length 0) is not looked at here, since a look
waits for the device: NaN is `gpurl.guards.finite`'s, the others are `gpurl check-env`'s. Where both
ends are set the episode was terminated.
Tensors of any stride are taken.
"""

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from gpurl.envs.vec_env import Timestep, VecEnv, check_tensor
from gpurl.errors import CheckpointError, EnvError, GpurlError, raised_at
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.memory_errors import is_out_of_memory

IMAGE = np.dtype(np.uint8)
ALWAYS_LOOKED, LOOK_EVERY = (
    1000,
    64,
)  # steps at which memory that obs and final_obs share is looked into, where the host may


class EnvCrashError(EnvError, RuntimeError):
    """An exception inside an environment; a RuntimeError too, since a graph that cannot hold a step
    is captured without it.
    """


def step_env(env: VecEnv, actions: Tensor) -> Timestep:
    """env.step(actions); whatever goes wrong inside is an EnvError that names the line."""
    try:
        return env.step(actions)
    except Exception as error:
        if _passes(error):
            raise
        raise EnvCrashError(_told(env, "step", error)) from error


def reset_env(env: VecEnv, seed: int | None = None, mask: Tensor | None = None) -> Tensor:
    """The first observations after env.reset, of the form they must have."""
    try:
        result: Any = (
            env.reset(seed=seed) if mask is None else env.reset(options={"reset_mask": mask})
        )
    except Exception as error:
        if _passes(error):
            raise
        raise EnvCrashError(_told(env, "reset", error)) from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        got = (
            f"a tuple of {len(result)}"
            if isinstance(result, tuple)
            else f"a {type(result).__name__}"
        )
        raise EnvError(f"{type(env).__name__}.reset: wanted a tuple (obs, info), got {got}")
    check_reset(env, result[0])
    return result[0]


def load_env_state(env: VecEnv, state: dict[str, Any]) -> None:
    """env.load_state_dict(state) of a checkpoint; what goes wrong inside is a CheckpointError that
    names the line.
    """
    try:
        env.load_state_dict(state)
    except Exception as error:
        if _passes(error):
            raise
        raise CheckpointError(
            f"the checkpoint does not fit this run: {_told(env, 'load_state_dict', error)}"
        ) from error


def _passes(error: Exception) -> bool:
    """Whether it is told elsewhere, and not as the environment's fault."""
    return isinstance(error, GpurlError) or is_out_of_memory(error)


def _told(env: VecEnv, call: str, error: Exception) -> str:
    """Which class, call and line of the environment raised what."""
    place = raised_at(error, type(env))
    return f"{type(env).__name__}.{call} raised {type(error).__name__}: {error} ({place})"


class EnvGuard:
    """Of the steps of one environment, one after the other."""

    def __init__(self, env: VecEnv) -> None:
        self.env, space = env, env.single_observation_space
        self.shape, self.row = (env.num_envs, *(space.shape or ())), (env.num_envs,)
        self.reward_shape, self.device = env.reward_shape, env.device
        self.dtype = torch.uint8 if space.dtype == IMAGE else torch.float32
        self.keys: frozenset[Any] = frozenset()  # of the last info
        self.log_names: frozenset[Any] = frozenset()
        self.has_valid: bool | None = None
        self.steps = 0

    def check(self, timestep: Timestep, before: Tensor | None = None) -> None:
        """EnvError naming the key, what was wanted and what was got; before: the observations [N,
        *obs] that were acted on.
        """
        if not self._is_usual(timestep):
            check_step(self.env, timestep)  # names it
        obs, final_obs, info = timestep.obs, timestep.info["final_obs"], timestep.info
        if info.keys() != self.keys:
            self._look_at_keys(info)
        if "log" in info and info["log"].keys() != self.log_names:
            self._look_at_log(info["log"])
        if (
            type(obs) is not Tensor or type(final_obs) is not Tensor
        ):  # of a mode that holds no memory
            return
        at = obs.data_ptr()
        if before is not None and type(before) is Tensor and before.data_ptr() == at:
            self._stop(
                "obs: wanted new memory in each step, got that of the observations before, which "
                "are still in use; return a clone()"
            )
        if (
            self.has_valid or self.env.resets_late
        ):  # obs may be the last observation: the next step, no transition, brings the first
            return
        if (
            at == final_obs.data_ptr()
            and self._looks()
            and bool((timestep.terminated | timestep.truncated).any())
        ):
            wanted = (
                "the true last observation where an episode ended, got the memory of obs, which "
                "holds the next episode's first"
            )
            self._stop(f"info['final_obs']: wanted {wanted}; clone it before the reset")

    def _looks(self) -> bool:
        self.steps += 1
        return (self.steps <= ALWAYS_LOOKED or self.steps % LOOK_EVERY == 0) and host_sync_is_free(
            self.device
        )

    def _is_usual(self, timestep: Timestep) -> bool:
        """Whether all is as wanted, in one line of comparisons."""
        if (
            type(timestep) is not Timestep
            or type(timestep.info) is not dict
            or self.env.single_state_space is not None
        ):
            return False
        obs, reward, terminated, truncated, info = timestep
        shape, row, dtype, device = self.shape, self.row, self.dtype, self.device
        final_obs, episode = info.get("final_obs"), info.get("episode")
        return (
            type(obs)
            is type(reward)
            is type(terminated)
            is type(truncated)
            is type(final_obs)
            is Tensor
            and obs.shape == shape
            and obs.dtype == dtype
            and obs.device == device
            and not obs.requires_grad
            and reward.shape == self.reward_shape
            and reward.dtype == torch.float32
            and reward.device == device
            and not reward.requires_grad
            and terminated.shape == row
            and terminated.dtype == torch.bool
            and terminated.device == device
            and truncated.shape == row
            and truncated.dtype == torch.bool
            and truncated.device == device
            and (
                final_obs is obs
                or (
                    final_obs.shape == shape
                    and final_obs.dtype == dtype
                    and final_obs.device == device
                    and not final_obs.requires_grad
                )
            )
            and "valid" not in info
            and type(episode) is dict
            and type(r := episode.get("r"))
            is type(length := episode.get("l"))
            is type(ended := info.get("_episode"))
            is Tensor
            and r.shape == row
            and length.shape == row
            and ended.shape == row
        )

    def _look_at_keys(self, info: dict[str, Any]) -> None:
        if wrong := [key for key in info if not isinstance(key, str)]:
            self._stop(f"info: wanted names as keys, got {wrong[0]!r}, a {type(wrong[0]).__name__}")
        if self.has_valid is not None and ("valid" in info) != self.has_valid:
            self._stop(
                f"info['valid']: wanted it in every step or in none, got it "
                f"{'late' if 'valid' in info else 'no longer'}"
            )
        if "log" in info and not isinstance(info["log"], dict):
            self._stop(f"info['log']: wanted a dict of numbers, got a {type(info['log']).__name__}")
        mask = info.get("action_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.shape[:1] == self.row):
            self._stop(
                f"info['action_mask']: wanted a tensor of {self.row[0]} rows, got {_form(mask)}"
            )
        self.has_valid, self.keys = "valid" in info, frozenset(info)

    def _look_at_log(self, log: dict[str, Any]) -> None:
        for name, value in log.items():
            is_number = isinstance(value, Tensor) or (
                np.isscalar(value) and not isinstance(value, (str, bytes))
            )
            if not (isinstance(name, str) and (is_number or isinstance(value, np.ndarray))):
                self._stop(
                    f"info['log'][{name!r}]: wanted a name with a number or a tensor, got "
                    f"{_form(value)}"
                )
        self.log_names = frozenset(log)

    def _stop(self, text: str) -> NoReturn:
        raise EnvError(f"{type(self.env).__name__}.step: {text}")


def _form(value: object) -> str:
    return (
        f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )


def check_reset(env: VecEnv, obs: Tensor) -> None:
    """EnvError unless obs [N, *obs] is what `env.reset` must return."""
    space = env.single_observation_space
    dtype = torch.uint8 if space.dtype == IMAGE else torch.float32
    check_tensor(
        f"{type(env).__name__}.reset: obs",
        obs,
        (env.num_envs, *(space.shape or ())),
        dtype,
        env.device,
    )


def check_step(env: VecEnv, timestep: Timestep) -> None:
    """EnvError naming the key, what was wanted and what was got, unless `timestep` has the form
    that `gpurl.envs.vec_env` sets.
    """
    name = type(env).__name__
    if not isinstance(timestep, Timestep):
        raise EnvError(
            f"{name}.step: wanted a gpurl.envs.vec_env.Timestep, got a {type(timestep).__name__}"
        )
    space, device = env.single_observation_space, env.device
    shape, dtype = (
        (env.num_envs, *(space.shape or ())),
        torch.uint8 if space.dtype == IMAGE else torch.float32,
    )
    row = (env.num_envs,)
    if not isinstance(info := timestep.info, dict):
        raise EnvError(f"{name}.step: info: wanted a dict, got a {type(info).__name__}")
    wanted = [
        ("obs", timestep.obs, shape, dtype),
        ("reward", timestep.reward, env.reward_shape, torch.float32),
        ("terminated", timestep.terminated, row, torch.bool),
        ("truncated", timestep.truncated, row, torch.bool),
        ("info['final_obs']", info.get("final_obs"), shape, dtype),
    ]
    episode = info.get("episode")
    if "_episode" not in info or not isinstance(episode, dict) or not {"r", "l"} <= set(episode):
        raise EnvError(
            f"{name}.step: wanted info['episode'] with r and l and info['_episode'], got "
            f"{sorted(map(str, info))}"
        )
    if "valid" in info:
        wanted.append(("info['valid']", info["valid"], row, torch.bool))
    for key, value, value_shape, value_dtype in wanted:
        check_tensor(f"{name}.step: {key}", value, value_shape, value_dtype, device)
        if isinstance(value, Tensor) and value.requires_grad:
            raise EnvError(
                f"{name}.step: {key}: wanted a tensor without gradient, got requires_grad=True; "
                f"compute under torch.no_grad()"
            )
    for key, value in (
        ("info['episode']['r']", episode["r"]),
        ("info['episode']['l']", episode["l"]),
        ("info['_episode']", info["_episode"]),
    ):
        if not isinstance(value, Tensor) or value.shape != row:
            raise EnvError(
                f"{name}.step: {key}: wanted a tensor of shape {row}, got {_form(value)}"
            )
    for key in ("state", "final_state"):
        check_state(env, "step", key, info)


def check_state(env: VecEnv, call: str, key: str, info: dict[str, Any]) -> None:
    """EnvError unless info[key] is what only critics see, where `env` says that there is such a
    thing.
    """
    if (space := env.single_state_space) is not None:
        shape = (env.num_envs, *(space.shape or ()))
        check_tensor(
            f"{type(env).__name__}.{call}: info[{key!r}]",
            info.get(key),
            shape,
            torch.float32,
            env.device,
        )
