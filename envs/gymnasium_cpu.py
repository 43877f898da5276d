"""Any Gymnasium environment, on the CPU: `make_env("gymnasium_cpu:Pendulum-v1", 8)`, or a numpy
vector environment of your own.

The environments step in numpy, one after the other or in processes; the results are tensors on
`device`, as `vec_env.py` defines them. The state of a simulator cannot be saved: a resumed run
begins new episodes.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from gpurl.envs import registry
from gpurl.envs._autoreset import check_autoreset_mode, check_partial_reset, find_ends
from gpurl.envs.canvas import scale
from gpurl.envs.numpy.infos import log_of_infos
from gpurl.envs.numpy.spaces import column_names, make_decoder, make_encoder, stack_rows
from gpurl.envs.numpy.vector import (
    VECTORIZATIONS,
    MakeEnv,
    Watched,
    check_task_options,
    find_spec,
    make_copies,
    make_pool,
    make_task,
)
from gpurl.envs.numpy.workers import explain_failure, kill
from gpurl.envs.vec_env import Info, Options, Timestep, VecEnv, check_at_least_one
from gpurl.errors import EnvError, UsageError, first_line
from gpurl.kernels.memory_errors import is_out_of_memory

OF_WORKERS = ("restart_workers", "worker_timeout")
SAME_TASKS = {  # of Gymnasium, and ours with the same observations and actions
    "CartPole-v1": "cart_pole",
    "Pendulum-v1": "pendulum",
    "Acrobot-v1": "acrobot",
    "MountainCar-v0": "mountain_car",
    "MountainCarContinuous-v0": "mountain_car_continuous",
}
RESTART_SEED = 1_000_003  # added to the seed at each restart of the workers


class GymnasiumCpu(VecEnv):
    """`num_envs` environments of the registered `task`, or of `env`: a function that makes one, or
    a numpy vector environment.

    vectorization: "sync" (one after the other in this process), "async" (a process each), "vector"
    (the task's vector version) or "envpool" (EnvPool's threads). task_options go to the task's
    constructor; by the name of a task, its parameters are options too. If the wrapped environment
    resets in the next step, as most of "vector" and all of "envpool" do, the step after the end of
    an episode is no transition: info["valid"] is False.

    restart_workers: number of restarts, before the run ends, of processes that died, hang or
    raised an error. All of them are restarted, since Gymnasium cannot replace one: all episodes
    break off, and info["valid"] is False in that step for all environments. worker_timeout:
    seconds after which a process that has not returned from a step or a reset counts as hanging;
    None waits forever.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        vectorization: str = "sync",  # sync, async (a process each), vector or envpool
        max_episode_steps: int | None = None,  # steps to the time limit; None: the task's
        task_options: dict[str, Any] | None = None,  # arguments of the task's constructor
        env: VectorEnv | MakeEnv | None = None,
        restart_workers: int = 0,  # restarts of processes that died, before the run ends
        worker_timeout: float | None = None,  # seconds until a process counts as hanging
    ) -> None:
        # settings that do not work together
        if vectorization not in VECTORIZATIONS:
            raise UsageError(
                f"vectorization must be one of {', '.join(VECTORIZATIONS)}, got {vectorization!r}"
            )
        check_task_options(task_options)
        check_at_least_one(num_envs=num_envs)
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
        self.task = task
        self.vectorization = vectorization
        self.task_options = task_options
        self.restart_workers = restart_workers
        self.worker_timeout = worker_timeout
        options = dict(task_options or {})
        if max_episode_steps is not None:
            options["max_episode_steps"] = max_episode_steps
        self._seed = seed
        self._num_restarts = 0  # of the workers
        self._is_broken = False
        # the environment; it may have to be made again, if its workers die
        self._make = partial(self._make_vector_env, env, num_envs, options)
        self._env = self._make()
        try:
            mode = self._env.metadata.get("autoreset_mode")
            self._mode = check_autoreset_mode(str(self._env), mode)
            self._encoder = make_encoder(self._env.single_observation_space)
            self._decoder = make_decoder(self._env.single_action_space)
        except UsageError:
            kill(self._env)
            raise
        self.gymnasium_spaces = (
            self._env.single_observation_space,
            self._env.single_action_space,
        )
        self.single_observation_space = self._encoder.space
        self.single_action_space = self._decoder.space
        if self._mode == AutoresetMode.NEXT_STEP:
            self.autoreset_mode = AutoresetMode.NEXT_STEP
        super().__init__(num_envs, device)
        self.render_fps = (self._env.metadata or {}).get("render_fps")
        first = getattr((getattr(self._env, "envs", None) or [None])[0], "unwrapped", None)
        self.spec = getattr(self._env, "spec", None) or getattr(first, "spec", None)
        for key in ("dt", "tau"):  # of MuJoCo tasks and Pendulum, of CartPole
            seconds = getattr(first, key, None)
            if isinstance(seconds, float) and seconds > 0:
                self.control_step = seconds
        # the last step, and the counters of running episodes
        self._obs: np.ndarray | None = None  # [N, *obs] of the last step
        # [N, *obs] first observations of new workers, if a reset of some environments restarted
        # them: in the next step all episodes begin there
        self._restarted_obs: np.ndarray | None = None
        self._done = np.zeros(num_envs, bool)  # in the last step
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)

    def _make_vector_env(
        self, env: VectorEnv | MakeEnv | None, num_envs: int, options: dict[str, Any]
    ) -> VectorEnv:
        """The wrapped environment; sets time limit and reward threshold of the task."""
        if bool(self.task) == (env is not None):
            raise UsageError(
                f"gymnasium_cpu needs either a task (gymnasium_cpu:Pendulum-v1) or env=; got "
                f"task={self.task!r}, env={env}"
            )
        if isinstance(env, gymnasium.Env):
            raise UsageError(
                f"{type(self).__name__}: wanted env= a function that makes one environment, got an "
                f"instance, which cannot be copied; give env=lambda: {type(env).__name__}(...)"
            )
        # a vector environment
        if isinstance(env, VectorEnv):
            if env.num_envs != num_envs:
                raise UsageError(f"num_envs is {num_envs}, but env has {env.num_envs} environments")
            if options or self.vectorization != "sync":
                raise UsageError(
                    "env is a vector environment already; leave out vectorization, "
                    "max_episode_steps and task_options"
                )
            return env
        # a task of EnvPool
        if env is None and self.vectorization == "envpool":
            pool = make_pool(self.task, num_envs, self._seed, options)
            self.max_episode_steps = pool.max_episode_steps
            return pool
        # a task in Gymnasium's registry
        if env is None:
            spec = find_spec(self.task)
            self.max_episode_steps = options.get("max_episode_steps", spec.max_episode_steps)
            self.reward_threshold = spec.reward_threshold
            return make_task(spec, num_envs, self.vectorization, options, self.worker_timeout)
        # a function that makes one environment
        if self.vectorization not in ("sync", "async"):
            raise UsageError(
                f"vectorization={self.vectorization!r} needs a registered task; a function env "
                f"takes sync or async"
            )
        self.max_episode_steps = limit = options.get("max_episode_steps")
        if unknown := sorted(options.keys() - {"max_episode_steps"}):
            raise UsageError(
                f"task_options {unknown} need a registered task; give them inside the function env"
            )
        make = partial(_make_time_limited, env, limit) if limit else env
        name = f"the environment of {getattr(env, 'func', env)}"
        return make_copies(make, name, num_envs, self.vectorization, self.worker_timeout)

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        """The first reset without a seed uses the constructor's. `options` besides "reset_mask" go
        to the environments.
        """
        # "reset_mask" is of this interface, everything else goes to the environments
        others = dict(options or {})
        mask = others.pop("reset_mask", None)
        if seed is None and self._obs is None:
            seed = self._seed
        if mask is None or self._obs is None:
            try:
                obs = self._reset(seed, others)
            except EnvError as error:
                obs = self._restart_workers(error)
            self._begin_all(obs)
        else:
            mask = torch.as_tensor(mask, dtype=torch.bool).numpy(force=True)
            obs = self._reset_some(mask, self._obs, seed, others) if mask.any() else self._obs
            self._obs = obs
            self._done = self._done & ~mask
            self._restart_clocks(mask)
        return send({"obs": obs.copy()}, self.device)["obs"], {}

    def _begin_all(self, obs: np.ndarray) -> None:
        """Start episodes in all environments, at obs [N, *obs]."""
        self._obs = obs
        self._restarted_obs = None
        self._done = np.zeros(self.num_envs, bool)  # new memory: the old one was returned
        self._restart_clocks(~self._done)

    def _restart_clocks(self, mask: np.ndarray) -> None:
        """Set clocks and returns to 0 where mask [N] bool."""
        self._return[mask] = 0.0
        self._length[mask] = 0
        self.episode_length_buf.masked_fill_(torch.from_numpy(mask).to(self.device), 0)

    def _reset_some(
        self, mask: np.ndarray, obs: np.ndarray, seed: int | None, options: Options
    ) -> np.ndarray:
        """Observations [N, *obs] of all environments after a reset of those in mask [N]; obs: those
        before. If the workers are restarted, the other episodes end with the next step.
        """
        # what the environments observed before, also when the workers were restarted since
        before = obs if self._restarted_obs is None else self._restarted_obs
        try:
            after = self._reset_rows(mask, before, seed, options)
        except EnvError as error:
            if not self._is_broken:
                raise
            after = self._restarted_obs = self._restart_workers(error)
        if self._restarted_obs is None:
            return after
        self._restarted_obs = after
        return _merge(mask, after[mask], obs)

    def known_names(self) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        """Those that a single environment declares, those of our task of the same kind, or the keys
        of a Dict.
        """
        first = (getattr(self._env, "envs", None) or [None])[0]
        owners = [getattr(first, "unwrapped", None)]
        if self.task in SAME_TASKS:
            owners.append(registry.resolve_env(SAME_TASKS[self.task])[0])
        found = [
            next(filter(None, (getattr(owner, key, None) for owner in owners)), None)
            for key in ("observation_names", "action_names")
        ]
        return found[0] or column_names(self._env.single_observation_space), found[1]

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if self._restarted_obs is not None:
            return self._begin_by_step(self._restarted_obs)
        try:
            batch, raw_reward, raw_terminated, raw_truncated, info = self._env.step(
                self._decoder.decode(actions.numpy(force=True))
            )
        except Exception as error:
            return self._begin_by_step(self._restart_workers(self._broken("step", error)))
        # copies; the step after the end of an episode is no transition
        reward = np.array(raw_reward, np.float32)
        valid = np.ones(self.num_envs, bool) if self.restart_workers else None
        if self._mode == AutoresetMode.NEXT_STEP:
            valid = ~self._done
            reward[self._done] = 0.0
        terminated, truncated, done = find_ends(
            np.array(raw_terminated, bool), np.array(raw_truncated, bool), valid
        )
        obs = final_obs = self._encoder.encode(batch)
        if np.count_nonzero(done):  # faster than any()
            obs, final_obs = self._after_end(obs, info, done)
        self._obs = obs
        self._done = done
        timestep = self._timestep(obs, final_obs, reward, terminated, truncated, valid)
        if info and (log := log_of_infos(info, done, valid)):
            timestep.info["log"] = log
        return timestep

    def _after_end(
        self, obs: np.ndarray, info: Info, done: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(obs, final_obs), both [N, *obs], of a step in which episodes ended; obs: as the wrapped
        environment returned it.
        """
        if self._mode == AutoresetMode.NEXT_STEP:
            return obs, obs
        # ended environments are reset here
        if self._mode == AutoresetMode.DISABLED:
            return self._reset_rows(done, obs, None, {}), obs
        if "final_obs" not in info:
            raise EnvError(
                f"{self._env} has autoreset_mode SAME_STEP but returned no info['final_obs'] at "
                f"the end of an episode, only {sorted(info)}"
            )
        # SAME_STEP: final observations as one batch, or as an array of objects
        final = info["final_obs"]
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return obs, _merge(done, self._encoder.encode(final)[done], obs)
        # an array of objects: an observation where an episode ended, None elsewhere
        if missing := [int(index) for index in done.nonzero()[0] if final[index] is None]:
            raise EnvError(
                f"{self._env} returned no info['final_obs'] for environments {missing}, whose "
                f"episodes ended"
            )
        rows = stack_rows(self._env.single_observation_space, list(final[done]))
        return obs, _merge(done, self._encoder.encode(rows), obs)

    def _timestep(
        self,
        obs: np.ndarray,
        final_obs: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray | None,
    ) -> Timestep:
        """Count the step, then copy all arrays [N, ...], in new memory, to the device at once."""
        # statistics, which include this step
        self._return += reward
        self._length += 1 if valid is None else valid
        arrays = {
            "obs": obs,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "done": self._done,
            "return": self._return.astype(np.float32),
            "length": self._length.copy(),
        }
        if final_obs is not obs:
            arrays["final_obs"] = final_obs
        if valid is not None:
            arrays["valid"] = valid
        sent = send(arrays, self.device)
        # clocks restart after their values were copied
        self.episode_length_buf += 1 if valid is None else sent["valid"]
        if np.count_nonzero(self._done):
            self._restart_clocks(self._done)
        info: Info = {
            "final_obs": sent.get("final_obs", sent["obs"]),
            "_final_obs": sent["done"],
            "time_outs": sent["truncated"],
            "episode": {"r": sent["return"], "l": sent["length"]},
            "_episode": sent["done"],
        }
        if valid is not None:
            info["valid"] = sent["valid"]
        return Timestep(sent["obs"], sent["reward"], sent["terminated"], sent["truncated"], info)

    def _reset(self, seed: int | None, options: Options) -> np.ndarray:
        """Reset the wrapped environment; returns its observations. If it takes a list of seeds, it
        gets independent ones, derived from `seed`.
        """
        seeds: Any = None if seed is None else seed + self.first_env
        if seed is not None and isinstance(self._env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            of_all = np.random.SeedSequence(seed).generate_state(self.first_env + self.num_envs)
            seeds = of_all[self.first_env :].tolist()
        try:
            batch, _ = self._env.reset(seed=seeds, options=options or None)
        except Exception as error:
            raise self._broken("reset", error) from error
        return self._encoder.encode(batch)

    def _reset_rows(
        self, mask: np.ndarray, before: np.ndarray, seed: int | None, options: Options
    ) -> np.ndarray:
        """Observations [N, *obs] of all environments after a reset of those in mask [N]; before:
        those [N, *obs] before it.
        """
        rows = self._reset(seed, {**options, "reset_mask": mask.copy()})
        if len(rows) == self.num_envs:  # EnvPool returns those in the mask only
            check_partial_reset(str(self._env), mask, rows, before, "options['reset_mask']")
            rows = rows[mask]
        return _merge(mask, rows, before)

    def _broken(self, call: str, error: Exception) -> EnvError:
        """The error to raise for `error`; ends the vector environment, as a worker may hang.

        Raises `error` itself if memory ran out and the workers may not be restarted.
        """
        explained = explain_failure(self._env, call, error)
        self._is_broken = True
        kill(self._env)
        if is_out_of_memory(error) and self._num_restarts >= self.restart_workers:
            raise error
        return explained

    def _begin_by_step(self, obs: np.ndarray) -> Timestep:
        """The step after a restart of the workers, which is no transition in any environment; obs
        [N, *obs]: the first ones of new episodes.
        """
        self._begin_all(obs)
        reward = np.zeros(self.num_envs, np.float32)
        false = np.zeros(self.num_envs, bool)
        return self._timestep(obs, obs, reward, false, false.copy(), false.copy())

    def _restart_workers(self, error: EnvError) -> np.ndarray:
        """Restart the workers; returns first observations [N, *obs], of other episodes than those
        of the seed. Raises `error` after `restart_workers` restarts.
        """
        while self._num_restarts < self.restart_workers:
            self._num_restarts += 1
            logging.getLogger("gpurl").warning(
                "%s; all %d workers are restarted (%d of %d times)",
                error,
                self.num_envs,
                self._num_restarts,
                self.restart_workers,
            )
            try:
                self._env = self._make()
                self._is_broken = False
                return self._reset(self._seed + RESTART_SEED * self._num_restarts, {})
            except (EnvError, UsageError) as again:
                error = EnvError(str(again))
        raise error

    @classmethod
    def picture_options(cls, options: Options) -> Options:
        """In this process, and with Gymnasium's render mode for arrays where it makes the task."""
        kept = {name: value for name, value in options.items() if name not in OF_WORKERS}
        if kept.get("vectorization") == "async":
            kept["vectorization"] = "sync"
        known = registry.env_options(cls)
        given = dict(kept.get("task_options") or {})
        if "render_mode" in known:
            kept.setdefault("render_mode", given.get("render_mode", "rgb_array"))
        elif "task_options" in known:
            kept["task_options"] = {"render_mode": "rgb_array", **given}
        return kept

    def picture(self, index: int, height: int, action: Tensor | None = None) -> np.ndarray:
        """What the environment's own `render` returns, scaled to the height."""
        singles = getattr(self._env.unwrapped, "envs", None)
        name = str(self.task or type(self).__name__)
        if singles is None:
            raise UsageError(
                f"{name} with vectorization {self.vectorization!r} draws no pictures, only single "
                f"environments do: vectorization sync"
            )
        if singles[index].render_mode != "rgb_array":
            raise UsageError(
                f"{name} draws no pictures: its environments must be made with "
                f"render_mode='rgb_array', this one's is {singles[index].render_mode!r}"
            )
        try:
            picture: Any = singles[index].render()
        except Exception as error:
            raise UsageError(
                f"{name} draws no pictures: its render raised {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        shape = np.shape(picture)
        if len(shape) != 3 or shape[2] != 3:
            raise EnvError(f"{name}.render: wanted an array [H, W, 3], got shape {shape}")
        return scale(np.asarray(picture, np.uint8), height)

    def watch_ends(self, watcher: Callable[[int], None]) -> None:
        for single in getattr(self._env.unwrapped, "envs", ()):
            if isinstance(single, Watched):
                single.watcher = watcher

    def close_extras(self, **kwargs: object) -> None:
        if self._is_broken:
            return
        try:
            self._env.close()
        # workers that died cannot be closed; an error here must not hide the one that ended them
        except Exception as error:
            logging.getLogger("gpurl").warning(
                "%s did not close: %s: %s", self._env, type(error).__name__, error
            )
            if hasattr(self._env.unwrapped, "processes"):
                kill(self._env)


def _make_time_limited(make: MakeEnv, max_episode_steps: int) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(make(), max_episode_steps)


def _merge(mask: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """`others` [N, ...] with `rows` where mask [N]."""
    merged = others.copy()
    merged[mask] = rows
    return merged


def send(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on `device`: in the same memory on a CPU, else in one copy for all."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return tensors
    return dict(zip(tensors, send_packed(list(tensors.values()), device)))


def send_packed(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies `tensors` to `device` in one piece, of which the results are views. Torch keeps the
    pinned memory until the copy has read it.
    """
    # bytes of each tensor in the piece
    spans = []
    size = 0
    for tensor in tensors:
        spans.append(slice(size, size + tensor.nbytes))
        size += -(-tensor.nbytes // 16) * 16  # aligned for every dtype
    # one piece in memory that a GPU copies from without waiting
    staging = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, span in zip(tensors, spans):
        staging[span].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    moved = staging.to(device, non_blocking=True)
    return [
        moved[span].view(tensor.dtype).view(tensor.shape) for tensor, span in zip(tensors, spans)
    ]
