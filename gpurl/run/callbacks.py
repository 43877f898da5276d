"""Callbacks: what a user adds to a run, between iterations and never inside one."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import SupportsFloat

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm, Metrics
from gpurl.discovery import find_class_at
from gpurl.engine.eager import Eager
from gpurl.engine.privileged_state import AppendPrivilegedState
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import GpurlError, UsageError, did_you_mean, raised_at

OWN_GROUPS = ("train", "rollout", "eval", "env", "time", "members")  # of gpurl's tags


@dataclass
class RunView:
    """What a callback sees of a run, and what it may do."""

    engine: Eager
    folder: Path
    stop_reason: str = ""
    logged: dict[str, Tensor | float] = field(default_factory=dict)  # for the next log entry
    # whether a signal asked the run to end, for callbacks that take long
    should_stop: Callable[[], bool] = bool
    # shows a text such as "frame 40 of 500" on the screen while a callback takes long, until ""
    show_activity: Callable[[str], object] = str

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in training, of a population that of member 0."""
        return self.engine.algorithm

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The algorithms of all members of a population; else the one in training."""
        return tuple(member.algorithm for member in self.engine.members)

    @property
    def env(self) -> VecEnv:
        """The training environments; their attributes may be changed between iterations. A CUDA
        graph reads Python attributes once, when it is captured: keep a curriculum in tensors and
        write into them."""
        env = self.engine.env
        return env.env if isinstance(env, AppendPrivilegedState) else env

    @property
    def steps(self) -> int:
        """Env steps of complete iterations, summed over environments."""
        return self.engine.steps

    @property
    def iteration(self) -> int:
        """Complete iterations."""
        return self.engine.iteration

    def stop(self, reason: str = "callback") -> None:
        """End the run after this iteration, in `on_start` before the first one; it is saved and
        evaluated as at any limit.
        """
        self.stop_reason = reason

    def log(self, name: str, value: Tensor | float) -> None:
        """Put a number into the next log entry. A 0-d tensor stays on the device until then, so
        nothing waits for it here. UsageError for a name that gpurl logs itself.
        """
        group = name.partition("/")[0]
        if group in OWN_GROUPS or name in ("step", "time"):
            raise UsageError(
                f"run.log: {name!r} is a name of gpurl, which has the groups "
                f"{', '.join(OWN_GROUPS)}; choose another one, for example my/{name.split('/')[-1]}"
            )
        if isinstance(value, Tensor) and not value.dim():
            # a copy: memory of metrics is used again
            device = self.engine.env.device
            self.logged[name] = value.detach().to(device, torch.float64, copy=True)
        elif isinstance(value, SupportsFloat) and not isinstance(value, Tensor):
            self.logged[name] = float(value)
        else:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise UsageError(f"run.log: wanted a number or a 0-d tensor as {name!r}, got {got}")


class Callback:
    """Override what you need. Nothing here waits for the device unless you read a tensor's
    value."""

    def on_start(self, run: RunView) -> None:
        """Before the first iteration of this process."""

    def after_iteration(self, run: RunView, metrics: Metrics) -> None:
        """metrics: 0-d tensors on the device, by their logged names, valid until the next
        iteration."""

    def after_evaluation(self, run: RunView, values: dict[str, float]) -> None:
        """values: as they are logged, eval/mean_reward among them."""

    def before_save(self, run: RunView) -> None:
        """Before a checkpoint is written, unless an error ended the run."""

    def on_end(self, run: RunView) -> None:
        """After the last checkpoint, unless an error ended the run."""


HOOKS = tuple(name for name in vars(Callback) if not name.startswith("_"))


class Callbacks:
    """All callbacks of a run, in order."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.callbacks = check_callbacks(callbacks)
        self._said_false: set[tuple[type[Callback], str]] = set()
        for each in self.callbacks:
            functions = (getattr(getattr(each, hook), "__func__", None) for hook in HOOKS)
            if all(function is getattr(Callback, name) for function, name in zip(functions, HOOKS)):
                logging.getLogger("gpurl").warning(
                    "callback %s overrides none of %s: nothing calls it",
                    type(each).__name__,
                    ", ".join(HOOKS),
                )
            others = [name for name in dir(type(each)) if name not in HOOKS and name[0] != "_"]
            for name in others:
                if hint := did_you_mean(name, HOOKS, cutoff=0.85):
                    logging.getLogger("gpurl").warning(
                        "callback %s.%s: nothing calls it; %s",
                        type(each).__name__,
                        name,
                        hint.rstrip(),
                    )

    def call(self, method: str, run: RunView, *arguments: object) -> None:
        """Call `method` of each; an error names the file and line of the callback."""
        for callback in self.callbacks:
            function: Callable[..., object] = getattr(callback, method)
            with _errors_of(type(callback), method):
                result = function(run, *arguments)
            # in stable-baselines3 it ends a run
            if result is False and (type(callback), method) not in self._said_false:
                self._said_false.add((type(callback), method))
                logging.getLogger("gpurl").warning(
                    "callback %s.%s returned False, which is ignored: run.stop(reason) ends a run",
                    type(callback).__name__,
                    method,
                )


def check_callbacks(callbacks: object) -> list[Callback]:
    """The callbacks as a list; UsageError for what is none."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise UsageError(f"callbacks is a list, as callbacks=[MyCallback()], got {callbacks!r}")
    checked = list(callbacks)
    for each in checked:
        if not isinstance(each, Callback):
            is_class = isinstance(each, type) and issubclass(each, Callback)
            advice = f"make one, {each.__name__}()" if is_class else "derive your class from it"
            raise UsageError(f"a callback is a gpurl.Callback, got {each!r}; {advice}")
    return checked


def make_callbacks(names: Iterable[str]) -> list[Callback]:
    """Instances of callback classes such as `my_module:MyCallback`."""
    callbacks = []
    for name in names:
        kind = find_class_at(name, Callback, "callback")
        with _errors_of(kind, "__init__"):
            callbacks.append(kind())
    return callbacks


@contextmanager
def _errors_of(kind: type[Callback], method: str) -> Iterator[None]:
    """A `with` block whose errors name the file and line of the callback `kind`."""
    try:
        yield
    except GpurlError:
        raise
    except Exception as error:
        raise UsageError(
            f"callback {kind.__name__}.{method} raised {type(error).__name__}: {error} "
            f"({raised_at(error, kind)})"
        ) from error
