"""Any Gymnasium environment, on the CPU: `make_env("gymnasium_cpu:Pendulum-v1", 8)`, or a numpy
vector environment of your own.

The environments step in numpy, one after the other or in processes; what leaves is tensors on
`device`, as `vec_env.py` says.
A simulator's state cannot be saved: a resumed run begins new episodes.
"""

import logging
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from gpurl.envs.numpy.spaces import make_decoder, make_encoder, stack_rows
from gpurl.envs.numpy.vector import VECTORIZATIONS, find_spec, make_copies, make_pool, make_task
from gpurl.envs.numpy.workers import failure, kill
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.memory_errors import is_out_of_memory

RESTART_SEED = 1_000_003


class GymnasiumCpu(VecEnv):
    """`num_envs` environments of the registered `task`, or of `env`: a function that makes one, or
    a whole numpy vector environment.

    vectorization: "sync" (one after the other in this process), "async" (a process each), "vector"
    (the task's own vector version) or "envpool" (EnvPool's threads). task_options go to the task's
    constructor. Where the wrapped environment resets at the next step, as most of "vector" and all
    of "envpool" do, the step after an episode's end is no transition: info["valid"] is False there.

    restart_workers: how many times processes that died, hang or raised an error may be started
    again, instead of ending the run. All of them are, since Gymnasium cannot replace one: every
    episode breaks off, and info["valid"] is False for that step of all environments.
    worker_timeout: seconds after which a process that does not answer a step or a reset counts as
    hanging; without it, never.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        vectorization: str = "sync",
        max_episode_steps: int | None = None,
        task_options: dict[str, Any] | None = None,
        env: gymnasium.vector.VectorEnv | Callable[[], gymnasium.Env] | None = None,
        restart_workers: int = 0,
        worker_timeout: float | None = None,
    ) -> None:
        if vectorization not in VECTORIZATIONS:
            raise UsageError(
                f"vectorization must be one of {', '.join(VECTORIZATIONS)}, got {vectorization!r}"
            )
        if num_envs < 1:
            raise UsageError(f"num_envs must be at least 1, got {num_envs}")
        if restart_workers < 0 or (worker_timeout is not None and worker_timeout <= 0):
            raise UsageError(
                f"restart_workers must be at least 0 and worker_timeout above 0, got "
                f"{restart_workers} and {worker_timeout}"
            )
        if vectorization != "async" and (restart_workers or worker_timeout is not None):
            raise UsageError(
                f"restart_workers and worker_timeout are for vectorization async, which has "
                f"workers; it is {vectorization!r}"
            )
        options = dict(task_options or {}) | (
            {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
        )
        self.task, self.vectorization, self.task_options = task, vectorization, task_options
        self._seed, self._is_broken = seed, False
        self.restart_workers, self.worker_timeout, self._restarts = (
            restart_workers,
            worker_timeout,
            0,
        )
        self._obs: np.ndarray | None = None  # [N, *obs] shown last
        self._begun: np.ndarray | None = (
            None  # [N, *obs] of new workers, where a reset of some environments has started them
        )
        self._wanted = env, task, num_envs, vectorization, options
        self._env = self._find_env(*self._wanted)
        try:
            self._mode = _autoreset_mode(self._env)
            self._encoder = make_encoder(self._env.single_observation_space)
            self._decoder = make_decoder(self._env.single_action_space)
        except UsageError:
            kill(self._env)
            raise
        self.single_observation_space, self.single_action_space = (
            self._encoder.space,
            self._decoder.space,
        )
        if self._mode == AutoresetMode.NEXT_STEP:
            self.autoreset_mode = AutoresetMode.NEXT_STEP
        super().__init__(num_envs, device)
        self._ended = np.zeros(num_envs, bool)  # at the step before
        self._return, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def _find_env(
        self, env: Any, task: str, num_envs: int, vectorization: str, options: dict[str, Any]
    ) -> gymnasium.vector.VectorEnv:
        if bool(task) == (env is not None):
            raise UsageError(
                f"gymnasium_cpu needs a task (gymnasium_cpu:Pendulum-v1) or env=, one of them; got "
                f"task={task!r}, env={env}"
            )
        if isinstance(env, gymnasium.vector.VectorEnv):
            if env.num_envs != num_envs:
                raise UsageError(f"num_envs is {num_envs}, but env has {env.num_envs} environments")
            if options or vectorization != "sync":
                raise UsageError(
                    "env is a vector environment already; leave out vectorization, "
                    "max_episode_steps and task_options"
                )
            return env
        if vectorization == "envpool" and env is None:
            pool = make_pool(task, num_envs, self._seed, options)
            self.max_episode_steps = pool.max_episode_steps
            return pool
        if env is None:
            spec = find_spec(task)
            self.max_episode_steps = options.get("max_episode_steps", spec.max_episode_steps)
            self.reward_threshold = spec.reward_threshold
            return make_task(spec, num_envs, vectorization, options, self.worker_timeout)
        if vectorization not in ("sync", "async"):
            raise UsageError(
                f"vectorization={vectorization!r} needs a registered task; a function env takes "
                f"sync or async"
            )
        self.max_episode_steps = options.get("max_episode_steps")
        if unknown := sorted(options.keys() - {"max_episode_steps"}):
            raise UsageError(
                f"task_options {unknown} need a registered task; give them inside the function env"
            )
        make = _time_limited(env, self.max_episode_steps) if self.max_episode_steps else env
        return make_copies(
            make, f"the environment of {env}", num_envs, vectorization, self.worker_timeout
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The first reset without a seed takes the constructor's. Other entries of `options` go to
        the environments.
        """
        passed = dict(options or {})
        mask = passed.pop("reset_mask", None)
        if seed is None and self._obs is None:
            seed = self._seed
        if mask is None or self._obs is None:
            try:
                rows = self._reset(seed, passed)[0]
            except EnvError as error:
                rows = self._after_restart(error)
            self._begin_all(self._encoder.encode(rows))
        else:
            mask = (
                mask.numpy(force=True).astype(bool)
                if isinstance(mask, Tensor)
                else np.array(mask, bool)
            )
            if mask.any():
                self._obs = self._reset_some(mask, self._obs, seed, passed)
            self._ended = self._ended & ~mask
            self._return[mask], self._length[mask] = 0.0, 0
            self.episode_length_buf.masked_fill_(torch.from_numpy(mask).to(self.device), 0)
        return send([self._obs.copy()], self.device)[0], {}  # type: ignore[union-attr]

    def _begin_all(self, obs: np.ndarray) -> None:
        """All episodes begin, at obs [N, *obs]."""
        self._obs, self._begun = obs, None
        self._ended = np.zeros(
            self.num_envs, bool
        )  # a new one: the old one is memory of a tensor that was returned
        self._return[:], self._length[:] = 0.0, 0
        self.episode_length_buf.zero_()

    def _reset_some(
        self, mask: np.ndarray, shown: np.ndarray, seed: int | None, options: dict[str, Any]
    ) -> np.ndarray:
        """What to show [N, *obs] after a reset of those in mask [N]; if it restarts the workers,
        the others break off in the next step.
        """
        try:
            rows = self._reset_rows(
                mask, shown if self._begun is None else self._begun, seed, options
            )
        except EnvError as error:
            if not self._is_broken:
                raise
            rows = self._begun = self._encoder.encode(self._after_restart(error))
        if self._begun is None:
            return rows
        self._begun, after = rows, shown.copy()
        after[mask] = rows[mask]
        return after

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if self._begun is not None:
            return self._no_step(self._begun)
        try:
            batch, raw_reward, raw_terminated, raw_truncated, info = self._env.step(
                self._decoder.decode(actions.numpy(force=True))
            )
        except Exception as error:
            return self._no_step(
                self._encoder.encode(self._after_restart(self._broken("step", error)))
            )
        terminated, truncated = np.array(raw_terminated, bool), np.array(raw_truncated, bool)
        valid = np.ones(self.num_envs, bool) if self.restart_workers else None
        if self._mode == AutoresetMode.NEXT_STEP:
            valid = ~self._ended
            terminated &= valid
            truncated &= valid
            raw_reward = np.where(valid, raw_reward, 0.0)
        truncated &= ~terminated
        self._ended = done = terminated | truncated
        obs = final_obs = self._encoder.encode(batch)
        if np.count_nonzero(done):
            obs, final_obs = self._after_end(obs, info, done)
        self._obs = obs
        return self._timestep(
            obs, final_obs, np.array(raw_reward, np.float32), terminated, truncated, valid
        )

    def _after_end(
        self, obs: np.ndarray, info: dict[str, Any], done: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(obs, final_obs), both [N, *obs], of a step at which episodes ended; `obs` is what the
        wrapped environment returned.
        """
        if self._mode == AutoresetMode.NEXT_STEP:
            return obs, obs
        if self._mode == AutoresetMode.DISABLED:
            return self._reset_rows(done, obs, None, {}), obs
        if "final_obs" not in info:
            raise EnvError(
                f"{self._env} says autoreset SAME_STEP but gave no info['final_obs'] at an "
                f"episode's end, only {sorted(info)}"
            )
        given, final_obs = info["final_obs"], obs.copy()
        if isinstance(given, np.ndarray) and given.dtype == object:
            missing = [int(index) for index in done.nonzero()[0] if given[index] is None]
            if missing:
                raise EnvError(
                    f"{self._env} gave no info['final_obs'] for environments {missing}, whose "
                    f"episodes ended"
                )
            final_obs[done] = self._encoder.encode(
                stack_rows(self._env.single_observation_space, list(given[done]))
            )
        else:
            final_obs[done] = self._encoder.encode(given)[done]
        return obs, final_obs

    def _timestep(
        self,
        obs: np.ndarray,
        final_obs: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray | None,
    ) -> Timestep:
        """Count, then send everything to the device in one go; arrays [N, ...] of their own
        memory.
        """
        done = self._ended
        self._return += reward
        self._length += 1 if valid is None else valid
        arrays = [
            obs,
            reward,
            terminated,
            truncated,
            done,
            self._return.astype(np.float32),
            self._length.copy(),
        ]
        arrays += [] if final_obs is obs else [final_obs]
        arrays += [] if valid is None else [valid]
        sent = send(arrays, self.device)
        self.episode_length_buf += 1 if valid is None else sent[-1]
        if np.count_nonzero(done):
            self._return[done], self._length[done] = 0.0, 0
            self.episode_length_buf.masked_fill_(sent[4], 0)
        info: dict[str, Any] = {
            "final_obs": sent[0] if final_obs is obs else sent[7],
            "_final_obs": sent[4],
            "time_outs": sent[3],
        }
        info |= {"episode": {"r": sent[5], "l": sent[6]}, "_episode": sent[4]}
        if valid is not None:
            info["valid"] = sent[-1]
        return Timestep(sent[0], sent[1], sent[2], sent[3], info)

    def _reset(self, seed: int | None, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Reset the wrapped environment; one seed becomes as many independent ones where it takes a
        list.
        """
        seeds: Any = seed
        if seed is not None and isinstance(self._env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            seeds = np.random.SeedSequence(seed).generate_state(self.num_envs).tolist()
        try:
            return self._env.reset(seed=seeds, options=options or None)
        except Exception as error:
            raise self._broken("reset", error) from error

    def _reset_rows(
        self, mask: np.ndarray, before: np.ndarray, seed: int | None, options: dict[str, Any]
    ) -> np.ndarray:
        """obs [N, *obs] after a reset of the environments in mask [N]; `before` [N, *obs] is what
        all of them showed.
        """
        rows = self._encoder.encode(self._reset(seed, {**options, "reset_mask": mask.copy()})[0])
        if len(rows) == self.num_envs and not np.array_equal(
            rows[~mask], before[~mask], equal_nan=rows.dtype.kind == "f"
        ):
            raise EnvError(
                f"{self._env} cannot reset some environments only: it ignores "
                f"options['reset_mask'] and has reset all of them"
            )
        after = before.copy()
        after[mask] = rows[mask] if len(rows) == self.num_envs else rows
        return after

    def _broken(self, call: str, error: Exception) -> EnvError:
        """What `error` means; a vector environment whose worker failed is ended at once. Memory
        that ran out is raised as it is.

        That is, where workers may not be started again.
        """
        explained = failure(self._env, call, error)
        self._is_broken = True
        kill(self._env)
        if is_out_of_memory(error) and self._restarts >= self.restart_workers:
            raise error
        return explained

    def _no_step(self, obs: np.ndarray) -> Timestep:
        """After a restart of the workers: no transition of any environment; obs [N, *obs] is the
        first of new episodes.
        """
        self._begin_all(obs)
        no = np.zeros(self.num_envs, bool)
        return self._timestep(
            obs, obs, np.zeros(self.num_envs, np.float32), no, no.copy(), no.copy()
        )

    def _after_restart(self, error: EnvError) -> Any:
        """What new workers show first, other episodes than the seed's; raises `error` when they
        have been started again often enough.
        """
        while self._restarts < self.restart_workers:
            self._restarts += 1
            count = f"{self._restarts} of {self.restart_workers} times"
            logging.getLogger("gpurl").warning(
                "%s; all %d workers are started again (%s)", error, self.num_envs, count
            )
            try:
                self._env, self._is_broken = self._find_env(*self._wanted), False
                return self._reset(self._seed + RESTART_SEED * self._restarts, {})[0]
            except (EnvError, UsageError) as again:
                error = EnvError(str(again))
        raise error

    def close_extras(self, **kwargs: Any) -> None:
        if self._is_broken:
            return
        try:
            self._env.close()
        # workers that are gone cannot be told to end; what ended them must not be hidden by this
        except Exception as error:
            logging.getLogger("gpurl").warning(
                "%s did not close: %s: %s", self._env, type(error).__name__, error
            )
            if hasattr(self._env.unwrapped, "processes"):
                kill(self._env)


def _autoreset_mode(env: gymnasium.vector.VectorEnv) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise UsageError(
            f"{env} does not say how it resets: set env.metadata['autoreset_mode'] to "
            f"gymnasium.vector.AutoresetMode.SAME_STEP, "
            f"NEXT_STEP or DISABLED; it is {mode!r}"
        )
    return mode


def _time_limited(
    make: Callable[[], gymnasium.Env], max_episode_steps: int
) -> Callable[[], gymnasium.Env]:
    return lambda: gymnasium.wrappers.TimeLimit(make(), max_episode_steps)


def send(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`. On a CPU they share memory; elsewhere all go in one copy,
    through pinned memory for CUDA.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else send_packed(tensors, device)


def send_packed(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """One copy for all; the results are views of it. Torch keeps pinned memory until the copy that
    reads it has run.
    """
    spans, size = [], 0
    for tensor in tensors:
        spans.append(slice(size, size + tensor.nbytes))
        size += -(-tensor.nbytes // 16) * 16  # aligned for every dtype
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, span in zip(tensors, spans):
        staging[span].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    moved = staging.to(device, non_blocking=True)
    return [
        moved[span].view(tensor.dtype).view(tensor.shape) for tensor, span in zip(tensors, spans)
    ]
