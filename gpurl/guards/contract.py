"""Checks what an environment returns in each step against `gpurl.envs.vec_env`: shapes, dtypes,
keys and memory, for which the device does nothing.

Values (NaN, an observation outside its space, both flags at once, an episode of length 0) are not
checked here, since reading them waits for the device: `gpurl.guards.finite` sees NaN,
`gpurl.guards.space` samples observations, `gpurl check-env` sees all. Where both flags are set the
episode was terminated. Tensors may have any strides.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

import numpy as np
from gymnasium.spaces import Discrete
from torch import Tensor

from gpurl.envs.vec_env import (
    Info,
    Seed,
    TensorSpec,
    Timestep,
    VecEnv,
    check_tensor,
    describe,
    step_specs,
    step_values,
    tensor_problem,
)
from gpurl.errors import CheckpointError, EnvError, GpurlError, raised_at
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.memory_errors import is_out_of_memory

# whether obs and final_obs share memory matters only where an episode ended, which the host has to
# read: where that costs nothing, in each of the first steps, then now and then
ALWAYS_COMPARED = 1000  # steps
COMPARE_EVERY = 64  # steps


class EnvCrashError(EnvError, RuntimeError):
    """An exception inside an environment; a RuntimeError too, since a graph that cannot hold a step
    is captured without it.
    """


def step_env(env: VecEnv, actions: Tensor) -> Timestep:
    """env.step(actions); whatever goes wrong inside is an EnvError that names the line."""
    try:
        return env.step(actions)
    except Exception as error:
        _raise_crash(env, "step", error)


def reset_env(env: VecEnv, seed: Seed | None = None, mask: Tensor | None = None) -> Tensor:
    """The first observations after env.reset, checked."""
    try:
        result: object
        if mask is None:
            # ShareSeeds only if the environment takes them
            result = env.reset(seed=seed)  # type: ignore[arg-type]
        else:
            result = env.reset(options={"reset_mask": mask})
    except Exception as error:
        _raise_crash(env, "reset", error)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvError(
            f"{type(env).__name__}.reset: wanted a tuple (obs, info), got {describe(result)}"
        )
    check_reset(env, result[0])
    return result[0]


def load_env_state(env: VecEnv, state: Info) -> None:
    """env.load_state_dict(state) of a checkpoint; what goes wrong inside is a CheckpointError that
    names the line.
    """
    try:
        env.load_state_dict(state)
    except Exception as error:
        _raise_crash(
            env,
            "load_state_dict",
            error,
            lambda text: CheckpointError(f"the checkpoint does not fit this run: {text}"),
        )


def _raise_crash(
    env: VecEnv,
    call: str,
    error: Exception,
    make_error: Callable[[str], GpurlError] = EnvCrashError,
) -> NoReturn:
    """Raise an error that names class, call and line; not for gpurl's own errors and memory that
    ran out, which are raised unchanged.
    """
    if isinstance(error, GpurlError) or is_out_of_memory(error):
        raise error
    name = type(env).__name__
    place = raised_at(error, type(env))
    text = f"{type(error).__name__}: {error}{_hint(env, error)}"
    raise make_error(f"{name}.{call} raised {text} ({place})") from error


def _hint(env: VecEnv, error: Exception) -> str:
    """What to do about errors of torch that are frequent in a task of many environments."""
    text = str(error)
    if "Boolean value of Tensor with more than one value" in text:
        return "; each environment decides by itself in torch.where(condition, yes, no)"
    space = env.single_action_space
    if isinstance(error, IndexError) and "too many indices" in text and isinstance(space, Discrete):
        return f"; actions of {space} are [N] int64, without a second axis"
    return ""


class EnvGuard:
    """Checks the steps of one environment, one after the other."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.specs = step_specs(env)
        self.keys: frozenset[object] = frozenset()  # of the last info
        self.log_names: frozenset[object] = frozenset()
        self.has_valid: bool | None = None
        self.steps = 0  # in which memory could be compared

    def check(self, timestep: Timestep, before: Tensor | None = None) -> None:
        """EnvError naming the key, what was wanted and what was got; before: the observations [N,
        *obs] that were acted on.
        """
        check_step(self.env, timestep, self.specs)
        info = timestep.info
        if info.keys() != self.keys:
            self._check_keys(info)
        if "log" in info and info["log"].keys() != self.log_names:
            self._check_log(info["log"])
        self._check_memory(timestep, before)

    def _check_memory(self, timestep: Timestep, before: Tensor | None) -> None:
        """That neither `before` nor final_obs is overwritten by obs."""
        obs = timestep.obs
        final_obs = timestep.info["final_obs"]
        if type(obs) is not Tensor or type(final_obs) is not Tensor:
            return  # tensors without memory, of torch's fake mode
        address = obs.data_ptr()
        if before is not None and type(before) is Tensor and before.data_ptr() == address:
            self._stop(
                "obs: wanted new memory in each step, got that of the observations before, which "
                "are still in use; return a clone()"
            )
        if self.has_valid or self.env.resets_late:
            return  # obs may be the last observation: the next episode shows in the next step
        if (
            address == final_obs.data_ptr()
            and self._may_read()
            and bool((timestep.terminated | timestep.truncated).any())
        ):
            self._stop(
                "info['final_obs']: wanted the true last observation where an episode ended, got "
                "the memory of obs, which holds the next episode's first; clone it before the reset"
            )

    def _may_read(self) -> bool:
        self.steps += 1
        is_due = self.steps <= ALWAYS_COMPARED or self.steps % COMPARE_EVERY == 0
        return is_due and host_sync_is_free(self.env.device)

    def _check_keys(self, info: Info) -> None:
        for key in info:
            if not isinstance(key, str):
                self._stop(f"info: wanted names as keys, got {key!r}, a {type(key).__name__}")
        if self.has_valid is not None and ("valid" in info) != self.has_valid:
            self._stop(
                f"info['valid']: wanted it in every step or in none, got it "
                f"{'late' if 'valid' in info else 'no longer'}"
            )
        if "log" in info and not isinstance(info["log"], dict):
            self._stop(f"info['log']: wanted a dict of numbers, got {describe(info['log'])}")
        if "action_mask" in info.keys() - self.keys:
            logging.getLogger("gpurl").warning(
                "info['action_mask'] is read by no algorithm: policies choose among all actions, "
                "and the environment decides what one that is not allowed does"
            )
        self.has_valid = "valid" in info
        self.keys = frozenset(info)

    def _check_log(self, log: Info) -> None:
        for name, value in log.items():
            is_number = isinstance(value, (Tensor, np.ndarray)) or (
                np.isscalar(value) and not isinstance(value, (str, bytes))
            )
            if not (isinstance(name, str) and is_number):
                self._stop(
                    f"info['log'][{name!r}]: wanted a name with a number or a tensor, got "
                    f"{describe(value)}"
                )
        self.log_names = frozenset(log)

    def _stop(self, text: str) -> NoReturn:
        raise EnvError(f"{type(self.env).__name__}.step: {text}")


def check_reset(env: VecEnv, obs: object, info: Info | None = None) -> None:
    """EnvError unless obs [N, *obs] is what `env.reset` must return, and the state in `info`."""
    specs = step_specs(env)
    name = f"{type(env).__name__}.reset"
    check_tensor(f"{name}: obs", obs, specs["obs"], env.device)
    key = "info['state']"
    if info is not None and key in specs:
        check_tensor(f"{name}: {key}", info.get("state"), specs[key], env.device)


def check_step(env: VecEnv, timestep: Timestep, specs: dict[str, TensorSpec] | None = None) -> None:
    """EnvError naming the key, what was wanted and what was got, unless every tensor of `timestep`
    is what `step_specs(env)` says.
    """
    if problem := _step_problem(env, timestep, specs or step_specs(env)):
        raise EnvError(f"{type(env).__name__}.step: {problem}")


def _step_problem(env: VecEnv, timestep: Timestep, specs: dict[str, TensorSpec]) -> str:
    """`key: wanted ..., got ...`, empty where all is right."""
    if not isinstance(timestep, Timestep):
        return f"wanted a gpurl.envs.vec_env.Timestep, got {describe(timestep)}"
    if not isinstance(timestep.info, dict):
        return f"info: wanted a dict, got {describe(timestep.info)}"
    device = env.device
    for key, value in step_values(timestep).items():
        if key not in specs:  # a state where the environment has none
            continue
        if problem := tensor_problem(value, specs[key], device):
            return f"{key}: {problem}"
        if value.requires_grad:
            return (
                f"{key}: wanted a tensor without gradient, got requires_grad=True; compute under "
                f"torch.no_grad()"
            )
    return ""
