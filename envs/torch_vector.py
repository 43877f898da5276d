"""Any vector environment whose arrays are torch tensors: ManiSkill's and mjlab's tasks, or one of
your own, `make_env("torch_vector:...")`.

It steps in this process; its results are copied once, into the form that `vec_env.py` defines. The
state of a simulator cannot be saved: a resumed run begins new episodes.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from gpurl.envs._autoreset import check_autoreset_mode, check_partial_reset, find_ends
from gpurl.envs._counting_env import AT_END, CountingEnv, select
from gpurl.envs._managed_robot import action_names, describe_robot, observation_names
from gpurl.envs._torch_spaces import make_groups, make_torch_decoder, to_gymnasium, torch_arrays
from gpurl.envs._torch_tasks import make_torch_task, registered_groups
from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.observation_groups import GroupedBox
from gpurl.envs.vec_env import Info, Options, Timestep, describe
from gpurl.errors import EnvError, UsageError, raised_at

FINAL_KEYS = ("final_obs", "final_observation")  # the second is Gymnasium's old name, ManiSkill's
# tensors [N] in which a simulator counts: Isaac Lab's and mjlab's, and ManiSkill's
CLOCKS = ("episode_length_buf", "elapsed_steps")
PATIENCE = 1000  # steps after which an episode has probably ended, if there is no time limit


class TorchVector(CountingEnv):
    """`num_envs` environments of the registered `task`, or `env`: a vector environment that follows
    Gymnasium's API with tensors.

    Observations: of a dict with a group `policy` or `actor` the policy gets that group; the group
    `critic` or `privileged` becomes the `state` of critics. obs_groups and state_groups name other
    groups for them, several in one row; without them mjlab's tasks have those that they are
    registered with. Groups that neither gets are named in a warning. Other dicts and tuples are
    flattened as by Gymnasium.

    Resets: as in metadata["autoreset_mode"], by default in the same step; with `auto_reset` false
    (on the environment or its `cfg`) the adapter resets environments whose episode ended, and the
    host waits for that in each step. If an environment that resets in the same step returns no
    `final_obs`, the observation before the last step replaces it: at a time limit the value is then
    that of one step before. `cfg.is_finite_horizon` makes a time-out a termination.

    overrides: `NAME=VALUE NAME=VALUE`, arguments of the task's constructor, or paths in mjlab's
    configuration. action_limit: actions are clipped to +-limit, and the action space becomes this
    wide; without it the actions of an unlimited Box are not changed, which suits PPO, but
    algorithms with squashed actions need a limit. across_devices: the simulator may be on another
    device than the run.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        overrides: str = "",  # NAME=VALUE NAME=VALUE, settings of the task
        action_limit: float | None = None,  # clip actions to +-limit; the action space is this wide
        across_devices: bool = False,  # the simulator may be on another device than the run
        obs_groups: str = "",  # NAME NAME, observation groups of the policy
        state_groups: str = "",  # NAME NAME, observation groups of the critic
        env: Any = None,
    ) -> None:
        name = type(self).__name__
        # the environment, given or made by name
        if bool(task) == (env is not None):
            raise UsageError(
                f"{name} needs either a task (torch_vector:PACKAGE:ID) or env=; got "
                f"task={task!r}, env={env}"
            )
        if isinstance(env, type):
            raise UsageError(
                f"{name}: wanted env= an instance, got the class {env.__name__}; make it, as "
                f"env={env.__name__}(num_envs, device)"
            )
        if env is not None and overrides:
            raise UsageError("overrides are for a task given by name; set them where env is made")
        self.task = task
        self.overrides = overrides
        self.action_limit = action_limit
        self.across_devices = across_devices
        self.obs_groups = obs_groups
        self.state_groups = state_groups
        self._seed = seed
        if env is None:
            env = make_torch_task(task, num_envs, str(device), seed, overrides)
        self._env = env
        try:
            self._read_spaces(torch.device(device))
            if self._attribute("num_envs") != num_envs:
                raise UsageError(
                    f"num_envs is {num_envs}, but {self._label} has {self._attribute('num_envs')} "
                    f"environments"
                )
        except BaseException:
            self._env.close()
            raise
        super().__init__(num_envs, device)
        # of the last step
        self._done = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._last: list[Tensor] | None = None  # obs, and state
        # info["log"] of the last step: the dict, and (value, how often it was written) by name
        self._log_dict: Info = {}
        self._log_terms: dict[str, tuple[object, int]] = {}
        self._steps = 0
        # without a promise the last observations are kept, in case that they become final ones
        is_same_step = self._mode == AutoresetMode.SAME_STEP
        self._returns_final_obs = not is_same_step or self._promises_final_obs()
        self._has_returned_final_obs = False

    @property
    def _label(self) -> str:
        return self.task or type(self._attribute("unwrapped") or self._env).__name__

    def _attribute(self, name: str) -> Any:
        """An attribute of the environment, or of the innermost one if wrappers hide it; None if
        there is none.
        """
        value = getattr(self._env, name, None)
        if value is None:
            value = getattr(getattr(self._env, "unwrapped", None), name, None)
        return value

    def _read_spaces(self, device: torch.device) -> None:
        """Spaces, autoreset mode and time limit of the environment."""
        # observations
        spaces = [self._attribute(f"single_{kind}_space") for kind in ("observation", "action")]
        if None in spaces:
            raise UsageError(
                f"{self._label} is no vector environment: it lacks single_observation_space or "
                f"single_action_space"
            )
        self._arrays = torch_arrays(device, self.across_devices)
        observation, action = map(to_gymnasium, spaces)
        chosen = self.obs_groups.split(), self.state_groups.split()
        if not any(chosen):
            chosen = registered_groups(self.task)
        self._policy_groups = chosen[0]
        groups = make_groups(observation, self._arrays, *chosen)
        if groups.unread and not any(chosen):
            self._warn_of_unread(groups.unread)
        self._encoders = [each for each in (groups.policy, groups.critic) if each is not None]
        self.single_observation_space = groups.policy.space
        if groups.critic is not None:
            self.single_state_space = groups.critic.space
        # actions, on the simulator's device
        self._simulator = device
        if self.across_devices:
            self._simulator = torch.device(self._attribute("device") or device)
        self.single_action_space, self._decode = make_torch_decoder(
            action, self._simulator, self.action_limit
        )
        # ends of episodes
        self._mode = self._find_mode()
        if self._mode == AutoresetMode.NEXT_STEP:  # otherwise the next episode begins in `step`
            self.autoreset_mode = AutoresetMode.NEXT_STEP
        self._is_finite_horizon = bool(getattr(self._attribute("cfg"), "is_finite_horizon", False))
        limit = (
            self._attribute("max_episode_length")
            or self._attribute("max_episode_steps")
            or getattr(self._attribute("spec"), "max_episode_steps", None)
        )
        if limit is not None:  # otherwise the subclass sets it
            self.max_episode_steps = int(limit)
        # Isaac Lab's and mjlab's time of a step, and ManiSkill's
        seconds = self._attribute("step_dt") or self._attribute("control_timestep")
        if isinstance(seconds, float | int):
            self.control_step = float(seconds)

    def known_names(self) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        inner = self._attribute("unwrapped") or self._env
        names = None
        # managers know the order of one row, not that of groups or of a Dict of terms
        is_row = not isinstance(self.single_observation_space, GroupedBox)
        if is_row and len(self._policy_groups) < 2:
            names = observation_names(inner, *self._policy_groups)
        return names, action_names(inner)

    def robot(self) -> Info:
        return describe_robot(self._attribute("unwrapped") or self._env)

    def _find_mode(self) -> AutoresetMode:
        for owner in (self._env, self._attribute("cfg")):
            if getattr(owner, "auto_reset", True) is False:
                return AutoresetMode.DISABLED
        metadata = self._attribute("metadata") or {}
        mode = metadata.get("autoreset_mode", AutoresetMode.SAME_STEP)
        return check_autoreset_mode(self._label, mode)

    def _promises_final_obs(self) -> bool:
        """Gymnasium's vector environments must return final_obs, others may be configured to."""
        return isinstance(self._env, VectorEnv) or bool(
            getattr(self._attribute("cfg"), "compute_final_obs", False)
        )

    def _warn_of_unread(self, names: Sequence[str]) -> None:
        logging.getLogger("gpurl").warning(
            "%s observes %s too, which neither policy nor critic reads: name all groups that they "
            "are to read in --env.obs-groups and --env.state-groups, as 'policy camera'",
            self._label,
            ", ".join(names),
        )

    def _warn_of_missing_final_obs(self) -> None:
        self._returns_final_obs = False
        logging.getLogger("gpurl").warning(
            "%s returns no final_obs: at a time limit, the observation before the last step "
            "replaces the one after it",
            self._label,
        )

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        """The first reset without a seed uses the constructor's. `options` besides "reset_mask" go
        to the environment.
        """
        others = dict(options or {})
        mask = others.pop("reset_mask", None)
        if seed is None and self._last is None:
            seed = self._seed
        if seed is not None:
            seed += self.first_env
        if mask is None or self._last is None:
            batch, extras = self._call("reset", self._env.reset, seed=seed, options=others or None)
            self._check_info("reset", extras)
            self._new_log_terms(extras)  # of unfinished episodes: no step reports them
            obs = self._encode("reset", batch)
            self._done = torch.zeros_like(self._done)
            self._restart_clocks()
            # some of Isaac Lab's tasks begin at random clocks when all restart, as staggering does
            self.stagger(torch.zeros_like(self.episode_length_buf))
        else:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
            obs = self._reset_rows(mask, self._last, seed, others)
            self._done = self._done & ~mask
            self._restart_clocks(mask)
        self._keep(obs)
        return obs[0], {"state": obs[1]} if len(obs) > 1 else {}

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if self._last is None:
            raise UsageError(f"{type(self).__name__}.step: reset() comes before the first step")
        # step the simulator
        action = self._decode(torch.as_tensor(actions, device=self.device))
        result = self._call("step", self._env.step, action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvError(
                f"{self._label}.step: wanted (obs, reward, terminated, truncated, info), got "
                f"{describe(result)}"
            )
        batch, raw_reward, raw_terminated, raw_truncated, extras = result
        self._check_info("step", extras)
        # columns [N] in new memory
        reward = self._column("reward", raw_reward, np.float32)
        terminated = self._column("terminated", raw_terminated, np.bool_)
        truncated = self._column("truncated", raw_truncated, np.bool_)
        if self._is_finite_horizon:
            terminated = terminated | truncated
        valid = None
        if self._mode == AutoresetMode.NEXT_STEP:
            valid = ~self._done
            reward = torch.where(valid, reward, 0.0)
        # observations, then statistics
        terminated, truncated, done = find_ends(terminated, truncated, valid)
        obs, final = self._after(self._encode("step", batch), extras, done)
        timestep = self._timestep(obs, final, reward, terminated, truncated, done, valid)
        if log := self._new_log_terms(extras) | _ended_episodes(extras, done):
            timestep.info["log"] = log
        # for the next step
        self._keep(obs)
        self._done = done
        self._steps += 1
        return timestep

    def _check_info(self, where: str, info: object) -> None:
        if not isinstance(info, Mapping):
            raise EnvError(f"{self._label}.{where}: wanted a dict as info, got {describe(info)}")

    def _keep(self, obs: list[Tensor]) -> None:
        """Keep the observations for the next step; as clones if they may become final
        observations, since the caller may write into its own.
        """
        self._last = obs if self._returns_final_obs else [tensor.clone() for tensor in obs]

    def _after(
        self, obs: list[Tensor], extras: Info, done: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(next observations, true successors), each obs and state, of a step that returned
        `obs`.
        """
        if self._mode == AutoresetMode.NEXT_STEP:
            return obs, obs
        if self._mode == AutoresetMode.DISABLED:
            # a reset takes indices and is expensive, so the host reads whether one is needed
            return (self._reset_rows(done, obs, None, {}) if bool(done.any()) else obs), obs
        # SAME_STEP: the final observations of this step, or else the last observations
        final = next((extras[key] for key in FINAL_KEYS if key in extras), None)
        if final is not None:  # of all environments; it may be left from an earlier step
            last = self._encode("step: final_obs", final)
            self._has_returned_final_obs = True
        else:
            assert self._last is not None
            last = self._last
            # episodes have ended by now, so it would have come
            is_time = self._steps == (self.max_episode_steps or PATIENCE)
            if is_time and not self._has_returned_final_obs:
                self._warn_of_missing_final_obs()
        return obs, [select(done, *pair) for pair in zip(last, obs)]

    def _reset_rows(
        self, mask: Tensor, before: list[Tensor], seed: int | None, options: Options
    ) -> list[Tensor]:
        """Obs and state of all environments after a reset of those in mask [N]; before: those
        before it.
        """
        index = mask.nonzero().squeeze(1)
        if not len(index):
            return before
        batch, is_partial = self._restart(
            index.to(self._simulator), mask.to(self._simulator, copy=True), seed, options
        )
        rows = self._encode("reset", batch)
        if not is_partial:
            requests = "options['reset_mask'] and options['env_idx'], takes no env_ids"
            for pair in zip(rows, before):
                check_partial_reset(self._label, mask, *pair, requests)
        return [select(mask, *pair) for pair in zip(rows, before)]

    def _restart(
        self, index: Tensor, mask: Tensor, seed: int | None, options: Options
    ) -> tuple[Batch, bool]:
        """Resets the environments of `index`; returns (observations of all environments, whether it
        is certain that no others were reset).
        """
        # the way of Isaac Lab and mjlab, which reset exactly these
        inner = self._attribute("unwrapped") or self._env
        if "env_ids" in inspect.signature(inner.reset).parameters:  # wrappers do not pass it on
            return self._call("reset", inner.reset, env_ids=index, seed=seed)[0], True
        # Gymnasium's way, and ManiSkill's
        options = {**options, "reset_mask": mask, "env_idx": index}
        return self._call("reset", self._env.reset, seed=seed, options=options)[0], False

    def _new_log_terms(self, extras: Info) -> Info:
        """The simulator's log terms, if this step changed them: the same dict stays in `extras`
        until the next episodes end.
        """
        terms = extras.get("log")
        if not isinstance(terms, dict):
            return {}
        # compared without a host sync: tensors by how often they were written in place too; other
        # values, of which equal ones are often one object, only in the same dict
        before, is_same_dict = self._log_terms, terms is self._log_dict
        current = {name: (value, _writes(value)) for name, value in terms.items()}
        self._log_terms, self._log_dict = current, terms
        if current.keys() == before.keys() and all(
            value is before[name][0]
            and writes == before[name][1]
            and (is_same_dict or isinstance(value, Tensor))
            for name, (value, writes) in current.items()
        ):
            return {}
        return {
            name: value for name, value in terms.items() if isinstance(value, (int, float, Tensor))
        }

    def _encode(self, where: str, batch: Batch) -> list[Tensor]:
        """Obs, and state if there is one, in new memory."""
        try:
            return [encoder.encode(batch) for encoder in self._encoders]
        except EnvError as error:
            raise EnvError(f"{self._label}.{where}: {error}") from None
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            space = self._attribute("single_observation_space")
            raise EnvError(
                f"{self._label}.{where}: wanted an observation of {space}, got {_outline(batch)} "
                f"({error})"
            ) from error

    def _column(self, name: str, value: object, dtype: type[np.generic]) -> Tensor:
        """[N] of a tensor [N] or [N, 1], in new memory."""
        try:
            column = self._arrays.cast(value, dtype)
        except EnvError as error:
            raise EnvError(f"{self._label}.step: {name}: {error}") from None
        if column.numel() != self.num_envs:
            raise EnvError(
                f"{self._label}.step: {name}: wanted one number for each of {self.num_envs} "
                f"environments, got shape {tuple(column.shape)}"
            )
        return column.reshape(-1)

    def _call(
        self, name: str, function: Callable[..., Any], *arguments: object, **options: object
    ) -> Any:
        """The result of `function`; its errors become EnvErrors."""
        try:
            return function(*arguments, **options)
        except Exception as error:
            place = raised_at(error, type(self._attribute("unwrapped") or self._env))
            raise EnvError(
                f"{self._label} failed in {name}: {type(error).__name__}: {error} ({place})"
            ) from error

    def stagger(self, clocks: Tensor) -> None:
        """Does nothing if the simulator has no clocks that can be set."""
        for name in CLOCKS:
            simulator_clocks = self._attribute(name)
            if isinstance(simulator_clocks, Tensor) and simulator_clocks.shape == clocks.shape:
                simulator_clocks.copy_(clocks)
                super().stagger(clocks)
                return

    def close_extras(self, **kwargs: object) -> None:
        self._env.close()


def _writes(value: object) -> int:
    """How often a tensor was written in place, unless it was made in inference mode; else 0."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _ended_episodes(extras: Info, done: Tensor) -> Info:
    """Metrics of the episodes that ended in this step, as ManiSkill records them: tensors [N] in
    extras["final_info"]["episode"], with the mask done [N] of those that count.
    """
    final = extras.get("final_info")
    episode = final.get("episode") if isinstance(final, dict) else None
    if not isinstance(episode, dict):
        return {}
    log: Info = {}
    for name, value in episode.items():
        if isinstance(value, Tensor) and value.shape == done.shape:
            log[f"{name}{AT_END}"] = value
            log[f"_{name}{AT_END}"] = done
    return log


def _outline(batch: Batch) -> str:
    """The form of a batch, for a message."""
    if isinstance(batch, dict):
        groups = ", ".join(f"{name!r}: {_outline(group)}" for name, group in batch.items())
        return "{" + groups + "}"
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)}"
    return f"a {type(batch).__name__}"
