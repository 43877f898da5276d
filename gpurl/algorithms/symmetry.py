"""Symmetries of a task in learning: mirrored copies of what was played, a loss that draws the
policy's actions to mirrored ones, and how far the policy is from symmetric.

Mittal et al. 2024, "Symmetry considerations for learning task symmetric robot policies", as rsl_rl
has it (rsl_rl/extensions/symmetry.py). An algorithm keeps a `Symmetry` and says where it is used.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor

from gpurl.buffers.minibatches import Minibatch
from gpurl.errors import UsageError, did_you_mean, raised_at
from gpurl.nn.action_scaler import MAX_WIDTH, ActionScaler

# (obs [B, D], action [B, A] or None) -> both mirrored; with privileged observations (obs, action,
# state [B, S]) -> all three. Actions of a Discrete space are [B] int64
Mirror = Callable[..., tuple[Tensor, ...]]
OF_TASK = "task"  # names the method `mirror` of the environment
NUM_SAMPLES = 64  # for the check
TOLERANCE = 1e-4  # of mirroring twice, in units of a number's size where that is above 1


def find_mirror(name: str, env: object) -> Mirror:
    """The function at MODULE:FUNCTION, or for OF_TASK the method `mirror` of `env`."""
    if name == OF_TASK:
        method = getattr(env, "mirror", None)
        if not callable(method):
            raise UsageError(
                f"symmetry task needs a method mirror(obs, action) of {type(env).__name__}, which "
                f"has none: define it, or name a function, as --symmetry my_task:mirror"
            )
        return method  # type: ignore[no-any-return]
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(
            f"symmetry is {name!r}; it must be MODULE:FUNCTION, as my_task:mirror, or task for the "
            f"method mirror of the environment"
        )
    try:
        module = importlib.import_module(module_name)
    except (SyntaxError, NameError, ImportError) as error:
        raise UsageError(
            f"symmetry {name}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"symmetry {name}: {module_name} has no function {function_name}; "
            f"{did_you_mean(function_name, known)}it has {', '.join(known) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


class Symmetry:
    """A task's mirror for rows [B, D + S] of observations and privileged ones, and for actions as a
    policy stores them. UsageError if `mirror` is no mirror: mirroring twice must change nothing.

    scaler: between the policy's units of a Box and the environment's; None for other spaces.
    is_squashed: stored actions are those before a tanh.
    """

    def __init__(
        self,
        mirror: Mirror,
        name: str,
        spaces: tuple[gymnasium.Space, gymnasium.Space, gymnasium.Space | None],
        scaler: ActionScaler | None,
        device: torch.device,
        is_squashed: bool = False,
    ) -> None:
        self.mirror = mirror
        self.name = name
        self.observation_space, self.action_space, self.state_space = spaces
        self.scaler = scaler
        self.device = device
        self.num_obs = int(np.prod(self.observation_space.shape or ()))
        # mean difference of greedy actions, for the log; NaN before the first `measure`
        self.asymmetry = torch.full((), torch.nan, device=device)
        self._check(is_squashed)

    # ---- mirrored rows and actions ----

    def rows(self, rows: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(rows [B, D + S], action or None), mirrored. action: as the policy stores it."""
        of_task = None if action is None else self._to_task(action)
        parts = (rows[:, : self.num_obs], of_task)
        if self.state_space is None:
            obs, mirrored = self.mirror(*parts)
        else:
            obs, mirrored, state = self.mirror(*parts, rows[:, self.num_obs :])
            obs = torch.cat((obs, state), dim=1)
        return obs, None if action is None else self._from_task(mirrored, action)

    def action(self, action: Tensor) -> Tensor:
        """`action` [B, ...], as the policy stores it, mirrored; it depends on no observation."""
        num_state = 0 if self.state_space is None else int(np.prod(self.state_space.shape or ()))
        rows = torch.zeros(len(action), self.num_obs + num_state, device=action.device)
        mirrored = self.rows(rows, action)[1]
        assert mirrored is not None
        return mirrored

    def _to_task(self, action: Tensor) -> Tensor:
        if self.scaler is None:
            return action.long()
        _, _, half_width, centre = self.scaler.units.to(action.device).unbind(0)
        return action * half_width + centre

    def _from_task(self, action: Tensor, stored: Tensor) -> Tensor:
        if self.scaler is not None:
            _, _, half_width, centre = self.scaler.units.to(action.device).unbind(0)
            # a dimension with a single action has width 0
            action = (action - centre) / half_width.clamp(min=torch.finfo(action.dtype).tiny)
        return action.to(stored.dtype)

    # ---- in learning ----

    @staticmethod
    def augment(batch: Minibatch) -> Minibatch:
        """`batch` [B, ...] followed by its mirrored copies. All that is no observation or action is
        repeated, the log-probability of the original action among it, as in rsl_rl.
        """

        def twice(x: Tensor) -> Tensor:
            return torch.cat((x, x))

        assert batch.mirror_obs is not None
        assert batch.mirror_action is not None
        augmented = dataclasses.replace(
            batch,
            obs=torch.cat((batch.obs, batch.mirror_obs)),
            action=torch.cat((batch.action, batch.mirror_action)),
            log_prob=twice(batch.log_prob),
            value=twice(batch.value),
            advantage=twice(batch.advantage),
            returns=twice(batch.returns),
            weight=None if batch.weight is None else 0.5 * twice(batch.weight),
        )
        augmented.originals = len(batch.obs)
        return augmented

    def mirror_every_second_(self, batch: dict[str, Tensor]) -> None:
        """Mirror, in place, every second row of a batch of transitions of a replay buffer, so that
        its size stays: observations as stored and actions.
        """
        action = batch["action"][1::2]
        obs, mirrored = self.rows(batch["obs"][1::2].float(), action)
        next_obs, _ = self.rows(batch["next_obs"][1::2].float())
        assert mirrored is not None
        for name, value in (("obs", obs), ("next_obs", next_obs), ("action", mirrored)):
            batch[name][1::2].copy_(value)

    def measure(self, greedy: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """Set `asymmetry` to the mean of |pi(mirror(s)) - mirror(pi(s))| over states s and actions
        in the environment's units; of choices, to the fraction that differs.

        greedy: rows [B, D + S] -> the environment's actions.
        """
        mirrored, _ = self.rows(rows)
        action, of_mirrored = greedy(rows), greedy(mirrored)
        if self.scaler is None:
            difference = (of_mirrored != self.action(action)).float()
        else:
            action, of_mirrored = action.flatten(1), of_mirrored.flatten(1)
            wanted = self._to_task(self.action(self._from_task(action, action)))
            difference = (of_mirrored - wanted).abs()
        self.asymmetry.copy_(difference.mean())

    # ---- the check at the start ----

    @torch.no_grad()
    def _check(self, is_squashed: bool) -> None:
        """UsageError unless `mirror` is what `Mirror` says, on samples of the spaces."""
        random = np.random.default_rng(0)
        obs, action = self._samples(self.observation_space, random), self._actions(random)
        inputs = [obs, action]
        names = ["obs", "action"]
        if self.state_space is not None:
            self._check_takes_state()
            inputs.append(self._samples(self.state_space, random))
            names.append("state")
        # the form of what it returns, and whether it is an involution
        once = self._call(names, inputs)
        twice = self._call(names, once)
        for name, before, after in zip(names, inputs, twice):
            self._check_same(
                f"is no mirror: mirroring {name} twice does not give it back", before, after
            )
        # without an action; each row by itself; actions without observations
        without = self._call(names, [obs, None, *inputs[2:]])
        self._check_same("mirrors obs otherwise if action is None", once[0], without[0])
        rest = self._call(names, [value[1:] for value in inputs])
        for name, whole, part in zip(names, once, rest):
            self._check_same(f"mirrors {name} of a row by other rows", whole[1:], part)
        zeros = self._call(names, [torch.zeros_like(obs), *inputs[1:]])
        self._check_same("mirrors action by what is in obs", once[1], zeros[1])
        self._check_bounds(once[1])
        if is_squashed:
            stored = self._from_task(action, action)
            self._check_same(
                "does not only permute actions and change their signs, which squash needs",
                self.action(stored).tanh(),
                self.action(stored.tanh()),
            )

    def _check_takes_state(self) -> None:
        parameters = inspect.signature(self.mirror).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        count = sum(parameter.kind in positional for parameter in parameters)
        if count >= 3 or any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
            return
        raise UsageError(
            f"symmetry {self.name}: the critic reads privileged observations "
            f"{self.state_space}, and they must be mirrored too: wanted mirror(obs, action, state) "
            f"-> (obs, action, state), got one of {count} arguments; or take --asymmetric False"
        )

    def _call(self, names: list[str], inputs: list[Any]) -> list[Tensor]:
        """What `mirror` gives for `inputs`; UsageError for an error in it or another form."""
        copies = [None if value is None else value.clone() for value in inputs]
        shapes = ", ".join(
            f"{name} {'None' if value is None else list(value.shape)}"
            for name, value in zip(names, inputs)
        )
        try:
            result: Any = self.mirror(*inputs)
        except Exception as error:
            is_none = any(value is None for value in inputs)
            hint = "; where action is None, only the others are to be mirrored" if is_none else ""
            raise UsageError(
                f"symmetry {self.name} raised {type(error).__name__} for {shapes}: {error} "
                f"({raised_at(error, object)}){hint}"
            ) from error
        wanted = f"symmetry {self.name}: wanted ({', '.join(names)}) for {shapes}, got"
        if not isinstance(result, tuple) or len(result) != len(names):
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise UsageError(f"{wanted} {got}")
        for name, value, given, copy in zip(names, result, inputs, copies):
            if given is None:
                continue
            assert copy is not None
            if not isinstance(value, Tensor):
                raise UsageError(f"{wanted} a {type(value).__name__} as {name}")
            if value.shape != given.shape or value.dtype != given.dtype:
                got = f"{name} {list(value.shape)} of {value.dtype}"
                raise UsageError(f"{wanted} {got}, where {given.dtype} is wanted")
            if not torch.equal(given, copy):
                raise UsageError(
                    f"symmetry {self.name} changes {name} in place, and with it what was played: "
                    f"it must return a new tensor"
                )
        return list(result)

    def _check_same(self, what: str, one: Tensor, other: Tensor) -> None:
        """UsageError that begins with `what`, with the largest difference."""
        a, b = one.double().reshape(len(one), -1), other.double().reshape(len(other), -1)
        difference = (a - b).abs() / a.abs().clamp(min=1.0)
        if bool((difference <= TOLERANCE).all()):  # NaN is no small difference
            return
        index = int(difference.nan_to_num(nan=torch.inf).amax(0).argmax())
        row = int(difference.nan_to_num(nan=torch.inf)[:, index].argmax())
        raise UsageError(
            f"symmetry {self.name} {what}; the largest difference is in number {index}: wanted "
            f"{float(a[row, index]):.6g}, got {float(b[row, index]):.6g}"
        )

    def _check_bounds(self, mirrored: Tensor) -> None:
        """UsageError if it takes actions out of the action space."""
        space = self.action_space
        if isinstance(space, Box):
            limits = space.low.reshape(-1), space.high.reshape(-1)
        else:
            assert isinstance(space, Discrete | MultiDiscrete)
            counts = space.nvec if isinstance(space, MultiDiscrete) else np.array([space.n])
            limits = np.zeros_like(counts), counts - 1
        low, high = (torch.from_numpy(limit).to(self.device) for limit in limits)
        slack = TOLERANCE * mirrored.abs().clamp(min=1.0)
        if bool(((mirrored < low - slack) | (mirrored > high + slack)).any()):
            raise UsageError(
                f"symmetry {self.name} takes actions out of {self.action_space}: actions are those "
                f"of the environment, in its own units"
            )

    def _samples(self, space: gymnasium.Space, random: np.random.Generator) -> Tensor:
        """[NUM_SAMPLES, D] float32: uniform between bounds, else normal."""
        assert isinstance(space, Box)
        low, high = (limit.reshape(-1).astype(np.float64) for limit in (space.low, space.high))
        with np.errstate(over="ignore", invalid="ignore"):
            is_bounded = high - low <= MAX_WIDTH
        low, high = np.where(is_bounded, low, 0.0), np.where(is_bounded, high, 0.0)
        uniform = low + random.random((NUM_SAMPLES, len(low))) * (high - low)
        normal = random.standard_normal(uniform.shape)
        values = np.where(is_bounded, uniform, normal).astype(np.float32)
        return torch.from_numpy(values).to(self.device)

    def _actions(self, random: np.random.Generator) -> Tensor:
        """[NUM_SAMPLES, A] float32 of a Box, else int64 [NUM_SAMPLES] or [NUM_SAMPLES, K]."""
        space = self.action_space
        if isinstance(space, Box):
            return self._samples(space, random)
        assert isinstance(space, Discrete | MultiDiscrete)
        if isinstance(space, Discrete):
            values = random.integers(0, int(space.n), NUM_SAMPLES)
        else:
            values = random.integers(0, space.nvec, (NUM_SAMPLES, len(space.nvec)))
        return torch.from_numpy(values).to(self.device)
