"""Any vector environment whose arrays are torch tensors: ManiSkill's and mjlab's tasks, or one of
your own, `make_env("torch_vector:...")`.

It steps in this process, on its own device; what it returns is copied once and brought into the
form that `vec_env.py` sets.
A simulator's state cannot be saved: a resumed run begins new episodes.
"""

import inspect
import logging
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from gpurl.envs._counting_env import CountingEnv, select
from gpurl.envs._torch_spaces import make_groups, make_torch_decoder, to_gymnasium, torch_arrays
from gpurl.envs._torch_tasks import make_torch_task
from gpurl.envs.vec_env import Timestep
from gpurl.errors import EnvError, UsageError

FINAL_KEYS = (
    "final_obs",
    "final_observation",
)  # the second is Gymnasium's old name, which ManiSkill kept
CLOCKS = (
    "episode_length_buf",
    "elapsed_steps",
)  # tensors [N] in which a simulator counts, Isaac Lab's and mjlab's, and ManiSkill's
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
        if bool(task) == (env is not None):
            raise UsageError(
                f"{name} needs a task (torch_vector:PACKAGE:ID) or env=, one of them; got "
                f"task={task!r}, env={env}"
            )
        if env is not None and overrides:
            raise UsageError("overrides are for a task by its name; set them where env is made")
        self.task, self.overrides, self.action_limit, self.across_devices = (
            task,
            overrides,
            action_limit,
            across_devices,
        )
        self._seed = seed
        self._env = (
            make_torch_task(task, num_envs, str(device), seed, overrides) if env is None else env
        )
        try:
            self._read_spaces(torch.device(device))
            if self._has("num_envs") != num_envs:
                raise UsageError(
                    f"num_envs is {num_envs}, but {self._label} has {self._has('num_envs')} "
                    f"environments"
                )
        except BaseException:
            self._env.close()
            raise
        super().__init__(num_envs, device)
        self._ended = torch.zeros(
            num_envs, dtype=torch.bool, device=self.device
        )  # at the step before
        self._shown: list[Tensor] | None = None  # obs and state of the last step
        self._terms: dict[str, Any] = {}  # info["log"] of the step before
        self._steps, self._tells_final = 0, True
        if self.autoreset_mode == AutoresetMode.SAME_STEP and not self._promises_final():
            self._note_stand_in()

    @property
    def _label(self) -> str:
        return self.task or type(self._has("unwrapped") or self._env).__name__

    def _has(self, name: str) -> Any:
        """An attribute of the environment, or of the innermost one where wrappers do not pass it
        on; None where there is none.
        """
        value = getattr(self._env, name, None)
        return (
            getattr(getattr(self._env, "unwrapped", None), name, None) if value is None else value
        )

    def _read_spaces(self, device: torch.device) -> None:
        spaces = [self._has(f"single_{kind}_space") for kind in ("observation", "action")]
        if None in spaces:
            raise UsageError(
                f"{self._label} has no single_observation_space and single_action_space: it is no "
                f"vector environment"
            )
        self._arrays = torch_arrays(device, self.across_devices)
        observation, action = map(to_gymnasium, spaces)
        self._groups = make_groups(observation, self._arrays)
        self.single_observation_space = self._groups.policy.space
        if self._groups.critic is not None:
            self.single_state_space = self._groups.critic.space
        self._simulator = (
            torch.device(self._has("device") or device) if self.across_devices else device
        )
        self.single_action_space, self._decode = make_torch_decoder(
            action, self._simulator, self.action_limit
        )
        self.autoreset_mode = self._find_mode()
        self._is_finite_horizon = bool(getattr(self._has("cfg"), "is_finite_horizon", False))
        spec = self._has("spec")
        limit = (
            self._has("max_episode_length")
            or self._has("max_episode_steps")
            or getattr(spec, "max_episode_steps", None)
        )
        if limit is not None:  # else what a subclass says
            self.max_episode_steps = int(limit)

    def _find_mode(self) -> AutoresetMode:
        if False in (
            getattr(self._env, "auto_reset", True),
            getattr(self._has("cfg"), "auto_reset", True),
        ):
            return AutoresetMode.DISABLED
        mode = (self._has("metadata") or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
        if not isinstance(mode, AutoresetMode):
            wanted = "one of gymnasium.vector.AutoresetMode"
            raise UsageError(
                f"{self._label} does not say how it resets: metadata['autoreset_mode'] must be "
                f"{wanted}, it is {mode!r}"
            )
        return mode

    def _promises_final(self) -> bool:
        """Gymnasium's vector environments must give final_obs, others give it where their
        configuration says so.
        """
        return isinstance(self._env, gymnasium.vector.VectorEnv) or bool(
            getattr(self._has("cfg"), "compute_final_obs", False)
        )

    def _note_stand_in(self) -> None:
        self._tells_final = False
        logging.getLogger("gpurl").warning(
            "%s gives no final_obs: where time runs out, the observation before the last step "
            "stands in for the one after it",
            self._label,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The first reset without a seed takes the constructor's. Other entries of `options` go to
        the environment.
        """
        passed = dict(options or {})
        mask = passed.pop("reset_mask", None)
        if seed is None and self._shown is None:
            seed = self._seed
        if mask is None or self._shown is None:
            batch, extras = self._call("reset", self._env.reset, seed=seed, options=passed or None)
            self._new_terms(extras)  # of episodes that did not end, which no step is to report
            shown = self._encoded("reset", batch)
            self._ended = torch.zeros_like(self._ended)
            self._restart_clocks()
        else:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
            shown = self._reset_rows(mask, self._shown, seed, passed)
            self._ended = self._ended & ~mask
            self._restart_clocks(mask)
        self._shown = self._kept(shown)
        return shown[0], {"state": shown[1]} if len(shown) > 1 else {}

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if self._shown is None:
            raise UsageError(f"{type(self).__name__}.step: reset() comes before the first step")
        result = self._call(
            "step", self._env.step, self._decode(torch.as_tensor(actions, device=self.device))
        )
        if not isinstance(result, tuple) or len(result) != 5:
            got = (
                f"a tuple of {len(result)}"
                if isinstance(result, tuple)
                else f"a {type(result).__name__}"
            )
            raise EnvError(
                f"{self._label}.step: wanted (obs, reward, terminated, truncated, info), got {got}"
            )
        batch, raw_reward, raw_terminated, raw_truncated, extras = result
        reward = self._column("reward", raw_reward, np.float32)
        terminated, truncated = (
            self._column("terminated", raw_terminated, np.bool_),
            self._column("truncated", raw_truncated, np.bool_),
        )
        if self._is_finite_horizon:
            terminated, truncated = terminated | truncated, torch.zeros_like(truncated)
        valid = None
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            valid = ~self._ended
            reward, terminated, truncated = (
                torch.where(valid, reward, 0.0),
                terminated & valid,
                truncated & valid,
            )
        truncated = truncated & ~terminated
        done = terminated | truncated
        shown, final = self._after(self._encoded("step", batch), extras, done)
        self._count(reward, valid)
        info = self._episode_info(done, truncated)
        info["final_obs"] = final[0]
        if len(shown) > 1:
            info["state"], info["final_state"] = shown[1], final[1]
        if valid is not None:
            info["valid"] = valid
        if log := self._new_terms(extras):
            info["log"] = log
        self._restart_clocks(done)
        self._shown, self._ended = self._kept(shown), done
        self._steps += 1
        return Timestep(shown[0], reward, terminated, truncated, info)

    def _kept(self, shown: list[Tensor]) -> list[Tensor]:
        """What was shown, for the next step; what may stand in for a last observation is nobody
        else's to write into.
        """
        return shown if self._tells_final else [part.clone() for part in shown]

    def _after(
        self, shown: list[Tensor], extras: dict[str, Any], done: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(what is shown next, the true successor), each obs and state, of a step after which
        `shown` was returned.
        """
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            return shown, shown
        if self.autoreset_mode == AutoresetMode.DISABLED:
            # a reset takes numbers of environments and is no small thing, so whether there is one
            # must be known
            return (self._reset_rows(done, shown, None, {}) if bool(done.any()) else shown), shown
        given = next((extras[key] for key in FINAL_KEYS if key in extras), None)
        if given is not None:  # of all environments, and it may be there still from an earlier step
            last = self._encoded("step: final_obs", given)
            self._tells_final = False
        else:
            assert self._shown is not None
            last = self._shown
            if self._tells_final and self._steps == (self.max_episode_steps or PATIENCE):
                self._note_stand_in()
        return shown, [select(done, *pair) for pair in zip(last, shown)]

    def _reset_rows(
        self, mask: Tensor, before: list[Tensor], seed: int | None, options: dict[str, Any]
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
        rows = self._encoded("reset", batch)
        if not is_partial and any(not _unchanged(*pair, mask) for pair in zip(rows, before)):
            wanted = "an argument env_ids, options['reset_mask'] and options['env_idx'] were tried"
            raise EnvError(
                f"{self._label} cannot reset some environments only, it has reset all of them: "
                f"{wanted}"
            )
        return [select(mask, *pair) for pair in zip(rows, before)]

    def _restart(
        self, index: Tensor, mask: Tensor, seed: int | None, options: dict[str, Any]
    ) -> tuple[Any, bool]:
        """(observations of all environments, whether only those of `index` were reset for sure)
        after a reset of the environments in it.
        """
        inner = self._has("unwrapped") or self._env
        if "env_ids" in inspect.signature(inner.reset).parameters:  # wrappers do not pass it on
            return self._call("reset", inner.reset, env_ids=index, seed=seed)[0], True
        chosen = {
            **options,
            "reset_mask": mask,
            "env_idx": index,
        }  # Gymnasium's way, and ManiSkill's
        return self._call("reset", self._env.reset, seed=seed, options=chosen)[0], False

    def _new_terms(self, extras: dict[str, Any]) -> dict[str, Any]:
        """What a simulator logs, in a step that brought news of it: the same dict stays in `extras`
        until the next episodes end.
        """
        terms = extras.get("log")
        if not isinstance(terms, dict):
            return {}
        is_old = terms.keys() == self._terms.keys() and all(
            value is self._terms[name] for name, value in terms.items()
        )
        self._terms = dict(terms)
        return (
            {}
            if is_old
            else {
                name: value
                for name, value in terms.items()
                if isinstance(value, (int, float, Tensor))
            }
        )

    def _encoded(self, where: str, batch: Any) -> list[Tensor]:
        """Obs, and state where there is one, in memory of their own."""
        encoders = [encoder for encoder in self._groups if encoder is not None]
        try:
            return [encoder.encode(batch) for encoder in encoders]
        except EnvError as error:
            raise EnvError(f"{self._label}.{where}: {error}") from None
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            space = self._has("single_observation_space")
            raise EnvError(
                f"{self._label}.{where}: wanted an observation of {space}, got {_outline(batch)} "
                f"({error})"
            ) from error

    def _column(self, name: str, value: Any, dtype: Any) -> Tensor:
        """[N] of a tensor [N] or [N, 1], in memory of its own."""
        try:
            return self._arrays.cast(value, dtype).reshape(-1)
        except EnvError as error:
            raise EnvError(f"{self._label}.step: {name}: {error}") from None

    def _call(self, name: str, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise EnvError(
                f"{self._label} failed in {name}: {type(error).__name__}: {error}"
            ) from error

    def stagger(self, clocks: Tensor) -> None:
        """A simulator that does not show its clocks leaves them as they are."""
        for name in CLOCKS:
            own = self._has(name)
            if isinstance(own, Tensor) and own.shape == clocks.shape:
                own.copy_(clocks)
                super().stagger(clocks)
                return

    def close_extras(self, **kwargs: Any) -> None:
        self._env.close()


def _unchanged(rows: Tensor, before: Tensor, mask: Tensor) -> bool:
    """Whether rows outside mask [N] are what they were, NaN included."""
    is_same = (rows == before) | ((rows != rows) & (before != before))
    return bool((is_same.flatten(1).all(1) | mask).all())


def _outline(batch: Any) -> str:
    """The form of a batch, for a message."""
    if isinstance(batch, dict):
        return "{" + ", ".join(f"{name!r}: {_outline(part)}" for name, part in batch.items()) + "}"
    return (
        f"a tensor {tuple(batch.shape)}"
        if isinstance(batch, Tensor)
        else f"a {type(batch).__name__}"
    )
