"""Any vector environment whose arrays are torch tensors: ManiSkill's and mjlab's tasks, or one of
your own, `make_env("torch_vector:...")`.

It steps in this process, on its own device; what it returns is copied once and brought into the
form that `vec_env.py` sets.
A simulator's state cannot be saved: a resumed run begins new episodes.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from gpurl.envs._autoreset import check_autoreset_mode, check_partial_reset, find_ends
from gpurl.envs._counting_env import CountingEnv, select
from gpurl.envs._torch_spaces import make_groups, make_torch_decoder, to_gymnasium, torch_arrays
from gpurl.envs._torch_tasks import make_torch_task
from gpurl.envs.numpy.spaces import Batch
from gpurl.envs.vec_env import Info, Options, Timestep, describe
from gpurl.errors import EnvError, UsageError

FINAL_KEYS = ("final_obs", "final_observation")  # the second is Gymnasium's old name, ManiSkill's
# tensors [N] in which a simulator counts: Isaac Lab's and mjlab's, and ManiSkill's
CLOCKS = ("episode_length_buf", "elapsed_steps")
PATIENCE = 1000  # steps until which an episode has probably ended, where there is no time limit


class TorchVector(CountingEnv):
    """`num_envs` environments of the registered `task`, or `env`: a vector environment that follows
    Gymnasium's API with tensors.

    An observation that is a dict with a group `policy` or `actor` shows that to the policy; the
    group `critic` or `privileged` becomes the `state` of critics; other dicts and tuples are
    flattened as by Gymnasium. The environment resets as its metadata["autoreset_mode"] says, else
    in the same step; with `auto_reset` false (on it, or on its `cfg`) the adapter resets what
    ended, for which it waits in each step.
    Where an environment that resets in the same step does not give `final_obs`, what was observed
    before the last step stands in for it:
    where time ran out, values are then those of one step before. `cfg.is_finite_horizon` makes a
    time-out a termination.

    overrides: `NAME=VALUE NAME=VALUE`, of the task's constructor, or paths in mjlab's
    configuration. action_limit: actions are clipped to +-limit, which then is the width of the
    action space; without it actions of an unlimited Box are those of the policy as they are, which
    suits PPO, but algorithms with squashed actions need a limit. across_devices: the simulator may
    be on another device than the run.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        task: str = "",
        overrides: str = "",
        action_limit: float | None = None,
        across_devices: bool = False,
        env: Any = None,
    ) -> None:
        name = type(self).__name__
        # one source of the environment
        if bool(task) == (env is not None):
            raise UsageError(
                f"{name} needs a task (torch_vector:PACKAGE:ID) or env=, one of them; got "
                f"task={task!r}, env={env}"
            )
        if env is not None and overrides:
            raise UsageError("overrides are for a task by its name; set them where env is made")
        self.task = task
        self.overrides = overrides
        self.action_limit = action_limit
        self.across_devices = across_devices
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
        self._done = torch.zeros(num_envs, dtype=torch.bool, device=self.device)  # in the last step
        self._last: list[Tensor] | None = None  # obs, and state, of the last step
        self._log_terms: Info = {}  # info["log"] of the step before
        self._steps = 0
        self._gives_final = True
        if self.autoreset_mode == AutoresetMode.SAME_STEP and not self._promises_final():
            self._warn_of_stand_in()

    @property
    def _label(self) -> str:
        return self.task or type(self._attribute("unwrapped") or self._env).__name__

    def _attribute(self, name: str) -> Any:
        """An attribute of the environment, or of the innermost one where wrappers do not pass it
        on; None where there is none.
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
                f"{self._label} has no single_observation_space and single_action_space: it is no "
                f"vector environment"
            )
        self._arrays = torch_arrays(device, self.across_devices)
        observation, action = map(to_gymnasium, spaces)
        groups = make_groups(observation, self._arrays)
        self._encoders = [encoder for encoder in groups if encoder is not None]
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
        self.autoreset_mode = self._find_mode()
        self._is_finite_horizon = bool(getattr(self._attribute("cfg"), "is_finite_horizon", False))
        limit = (
            self._attribute("max_episode_length")
            or self._attribute("max_episode_steps")
            or getattr(self._attribute("spec"), "max_episode_steps", None)
        )
        if limit is not None:  # else what a subclass says
            self.max_episode_steps = int(limit)

    def _find_mode(self) -> AutoresetMode:
        if False in (
            getattr(self._env, "auto_reset", True),
            getattr(self._attribute("cfg"), "auto_reset", True),
        ):
            return AutoresetMode.DISABLED
        metadata = self._attribute("metadata") or {}
        mode = metadata.get("autoreset_mode", AutoresetMode.SAME_STEP)
        return check_autoreset_mode(self._label, mode)

    def _promises_final(self) -> bool:
        """Gymnasium's vector environments must give final_obs, others give it where their
        configuration says so.
        """
        return isinstance(self._env, VectorEnv) or bool(
            getattr(self._attribute("cfg"), "compute_final_obs", False)
        )

    def _warn_of_stand_in(self) -> None:
        self._gives_final = False
        logging.getLogger("gpurl").warning(
            "%s gives no final_obs: where time runs out, the observation before the last step "
            "stands in for the one after it",
            self._label,
        )

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        """The first reset without a seed takes the constructor's. Other entries of `options` go to
        the environment.
        """
        others = dict(options or {})
        mask = others.pop("reset_mask", None)
        if seed is None and self._last is None:
            seed = self._seed
        if mask is None or self._last is None:
            batch, extras = self._call("reset", self._env.reset, seed=seed, options=others or None)
            self._new_log_terms(extras)  # of episodes that did not end: no step reports them
            shown = self._encode("reset", batch)
            self._done = torch.zeros_like(self._done)
            self._restart_clocks()
        else:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
            shown = self._reset_rows(mask, self._last, seed, others)
            self._done = self._done & ~mask
            self._restart_clocks(mask)
        self._keep(shown)
        return shown[0], {"state": shown[1]} if len(shown) > 1 else {}

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
        # columns [N] in new memory
        reward = self._column("reward", raw_reward, np.float32)
        terminated = self._column("terminated", raw_terminated, np.bool_)
        truncated = self._column("truncated", raw_truncated, np.bool_)
        if self._is_finite_horizon:
            terminated = terminated | truncated
        valid = None
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            valid = ~self._done
            reward = torch.where(valid, reward, 0.0)
        # observations, then statistics
        terminated, truncated, done = find_ends(terminated, truncated, valid)
        shown, final = self._after(self._encode("step", batch), extras, done)
        timestep = self._timestep(shown, final, reward, terminated, truncated, done, valid)
        if log := self._new_log_terms(extras):
            timestep.info["log"] = log
        # for the next step
        self._keep(shown)
        self._done = done
        self._steps += 1
        return timestep

    def _keep(self, shown: list[Tensor]) -> None:
        """For the next step: what may stand in for a last observation is cloned, since the caller
        may write into its own.
        """
        self._last = shown if self._gives_final else [tensor.clone() for tensor in shown]

    def _after(
        self, shown: list[Tensor], extras: Info, done: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(what is shown next, the true successor), each obs and state, of a step after which
        `shown` was returned.
        """
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            return shown, shown
        if self.autoreset_mode == AutoresetMode.DISABLED:
            # a reset takes numbers of environments and costs much, so the host has to know whether
            # there is one
            return (self._reset_rows(done, shown, None, {}) if bool(done.any()) else shown), shown
        final = next((extras[key] for key in FINAL_KEYS if key in extras), None)
        if final is not None:  # of all environments; it may still be there from an earlier step
            last = self._encode("step: final_obs", final)
            self._gives_final = False
        else:
            assert self._last is not None
            last = self._last
            if self._gives_final and self._steps == (self.max_episode_steps or PATIENCE):
                self._warn_of_stand_in()
        return shown, [select(done, *pair) for pair in zip(last, shown)]

    def _reset_rows(
        self, mask: Tensor, before: list[Tensor], seed: int | None, options: Options
    ) -> list[Tensor]:
        """Obs and state after a reset of the environments in mask [N]; `before` is what all of them
        showed.
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
        """(observations of all environments, whether only those of `index` were reset for sure)
        after a reset of the environments in it.
        """
        # the way of Isaac Lab and mjlab, which reset exactly these
        inner = self._attribute("unwrapped") or self._env
        if "env_ids" in inspect.signature(inner.reset).parameters:  # wrappers do not pass it on
            return self._call("reset", inner.reset, env_ids=index, seed=seed)[0], True
        # Gymnasium's way, and ManiSkill's
        chosen = {**options, "reset_mask": mask, "env_idx": index}
        return self._call("reset", self._env.reset, seed=seed, options=chosen)[0], False

    def _new_log_terms(self, extras: Info) -> Info:
        """What a simulator logs, in a step that changed it: the same dict stays in `extras` until
        the next episodes end.
        """
        terms = extras.get("log")
        if not isinstance(terms, dict):
            return {}
        # compared by identity, which costs no host sync
        is_old = terms.keys() == self._log_terms.keys() and all(
            value is self._log_terms[name] for name, value in terms.items()
        )
        self._log_terms = dict(terms)
        if is_old:
            return {}
        return {
            name: value for name, value in terms.items() if isinstance(value, (int, float, Tensor))
        }

    def _encode(self, where: str, batch: Batch) -> list[Tensor]:
        """Obs, and state where there is one, in new memory."""
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
            return self._arrays.cast(value, dtype).reshape(-1)
        except EnvError as error:
            raise EnvError(f"{self._label}.step: {name}: {error}") from None

    def _call(
        self, name: str, function: Callable[..., Any], *arguments: object, **options: object
    ) -> Any:
        """The result of `function`, whose errors become EnvErrors."""
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise EnvError(
                f"{self._label} failed in {name}: {type(error).__name__}: {error}"
            ) from error

    def stagger(self, clocks: Tensor) -> None:
        """A simulator that does not show its clocks leaves them as they are."""
        for name in CLOCKS:
            simulator_clocks = self._attribute(name)
            if isinstance(simulator_clocks, Tensor) and simulator_clocks.shape == clocks.shape:
                simulator_clocks.copy_(clocks)
                super().stagger(clocks)
                return

    def close_extras(self, **kwargs: object) -> None:
        self._env.close()


def _outline(batch: Batch) -> str:
    """The form of a batch, for a message."""
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{name!r}: {_outline(part)}" for name, part in batch.items()) + "}"
    if isinstance(batch, Tensor):
        return f"a tensor {tuple(batch.shape)}"
    return f"a {type(batch).__name__}"
