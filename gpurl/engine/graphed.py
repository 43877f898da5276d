"""An iteration of the training loop in CUDA graphs: the whole of it, or all but the environment.

full    one graph plays the rollout, one prepares the targets, one learns. For environments that a
        graph can hold (`graph_safe`).
policy  one graph acts, one takes in what the environment answered; both serve every step, since the
        row of the rollout is a number on the device. The environment is stepped in between, as it
        is or by a graph of its own on torch's current stream.
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpurl.algorithms.base import Decision
from gpurl.engine.graphs import Backend
from gpurl.envs.vec_env import Timestep
from gpurl.errors import first_line
from gpurl.guards.contract import step_env
from gpurl.kernels.memory_errors import is_out_of_memory

if TYPE_CHECKING:
    from gpurl.run.trainer import Trainer

WARM_UPS = 2
Prepared = tuple[dict[str, Tensor], Tensor | None]


class Graphed(ABC):
    """What both levels share: targets and learning. Captured after a first iteration without
    graphs; the run is left as it was.
    """

    def __init__(self, trainer: "Trainer", backend: Backend) -> None:
        self.trainer = trainer
        trainer.obs = trainer.obs.clone()  # a place that no environment writes into
        saved = trainer.running_state(iterations=WARM_UPS)
        try:
            for _ in range(WARM_UPS):
                backend.warm_up(self._iteration)
                trainer.buffer.clear()
            self._capture_collecting(backend)
            self._prepare, self.prepared = backend.capture(self._in_place(trainer.prepare))
            self._learn, self.metrics = backend.capture(lambda: trainer.learn(self.prepared[0]))
        finally:
            trainer.load_running_state(saved)
            trainer.buffer.clear()

    @abstractmethod
    def collect(self) -> None:
        """Fill the buffer."""

    def prepare(self) -> Prepared:
        """As `Trainer.prepare`."""
        self._prepare()
        return self.prepared

    def learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """As `Trainer.learn`, on what `prepare` gave last."""
        self._learn()
        return self.metrics

    def _iteration(self) -> None:
        """All that will be captured, once."""
        self._rehearse_collecting()
        self.trainer.learn(self._in_place(self.trainer.prepare)()[0])

    @abstractmethod
    def _rehearse_collecting(self) -> None:
        """Fill the buffer by what will be captured, without capturing it."""

    @abstractmethod
    def _capture_collecting(self, backend: Backend) -> None:
        """Capture what `collect` replays."""

    def _in_place(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """`function`, after which observations and memory are where they were before."""

        def moved_back() -> Any:
            trainer = self.trainer
            obs, carry = trainer.obs, trainer.carry
            try:
                result = function()
                for place, tensor in zip((obs, *carry), (trainer.obs, *trainer.carry)):
                    if tensor is not place:
                        place.copy_(tensor)
            finally:
                trainer.obs, trainer.carry = obs, carry
            return result

        return moved_back


class WholeGraphs(Graphed):
    """Level full."""

    def collect(self) -> None:
        self._collect()
        self.trainer.buffer.size = self._size

    def _rehearse_collecting(self) -> None:
        self._in_place(self.trainer.collect)()

    def _capture_collecting(self, backend: Backend) -> None:
        terms = set(self.trainer.statistics.terms)
        self._collect, _ = backend.capture(self._in_place(self.trainer.collect))
        self._size = self.trainer.buffer.size
        if new := set(self.trainer.statistics.terms) - terms:
            raise RuntimeError(
                f"info['log'] brought {', '.join(sorted(new))} late; its names must be there from "
                f"the first rollout on"
            )


class PolicyGraphs(Graphed):
    """Level policy."""

    def __init__(self, trainer: "Trainer", backend: Backend) -> None:
        timestep = trainer.timestep  # the next ones have the same tensors
        assert timestep is not None, "graphs are made after a first iteration without"
        self.has_valid = "valid" in timestep.info
        self.inputs = [tensor.clone() for tensor in _inputs(timestep)]
        self.timestep = _timestep(self.inputs, self.has_valid)
        trainer.buffer.row = torch.zeros(1, dtype=torch.int64, device=trainer.env.device)
        try:
            super().__init__(trainer, backend)
        except BaseException:
            trainer.buffer.row = None
            raise

    def collect(self) -> None:
        trainer = self.trainer
        while not trainer.algorithm.is_ready(trainer.buffer):
            self._act()
            timestep = step_env(
                trainer.env, self.decision.action.clone()
            )  # one that keeps it must not see the next one in its place
            trainer.env_guard.check(timestep)
            torch._foreach_copy_(self.inputs, _inputs(timestep))
            self._take()
            trainer.buffer.size += 1
            trainer.statistics.add_log(timestep.info)

    def _rehearse_collecting(self) -> None:
        trainer = self.trainer
        while not trainer.algorithm.is_ready(trainer.buffer):
            self.decision: Decision = trainer.act()
            self._in_place(self._take_in)()

    def _capture_collecting(self, backend: Backend) -> None:
        trainer = self.trainer
        self._act, self.decision = backend.capture(trainer.act)
        self._take, _ = backend.capture(self._in_place(self._take_in))

    def _take_in(self) -> None:
        self.trainer.take_in(self.decision, self.timestep)


LEVELS: dict[str, type[Graphed]] = {"full": WholeGraphs, "policy": PolicyGraphs}


def choose_graphs(trainer: "Trainer") -> tuple[str, Graphed | None, list[str]]:
    """(level, its graphs, a line for each level that was wanted and could not be) by the settings,
    the device and the environment.
    """
    wanted, backend, notes = trainer.config.graph, trainer.graph_backend, list[str]()
    if wanted == "off":
        return "off", None, []
    if backend is None:
        return (
            "off",
            None,
            [] if wanted == "auto" else [f"no CUDA graphs: there are none on {trainer.env.device}"],
        )
    levels = (
        ["policy"]
        if wanted == "policy"
        else ["full"]
        if trainer.persistent is not None
        else ["full", "policy"]
    )
    for level in levels:
        obstacle = _obstacle_to_full(trainer) if level == "full" else ""
        if not obstacle:
            try:
                return level, LEVELS[level](trainer, backend), notes
            except RuntimeError as error:
                if is_out_of_memory(error):  # a run without graphs would soon meet the same end
                    raise
                obstacle = _cause(error)
        notes.append(f"CUDA graph level {level} is not possible: {obstacle}")
    return "off", None, notes


def _obstacle_to_full(trainer: "Trainer") -> str:
    """Why a graph cannot hold the environment, or nothing."""
    if not trainer.env.graph_safe:
        return f"{trainer.settings.env} is not graph_safe, it is stepped between graphs"
    if not trainer.env.state_dict():
        return f"{trainer.settings.env} cannot restore its state, which warming up changes"
    log = trainer.timestep.info.get("log", {}) if trainer.timestep is not None else {}
    if numbers := [name for name, value in log.items() if not isinstance(value, Tensor)]:
        return (
            f"info['log'] of {trainer.settings.env} holds Python numbers ({', '.join(numbers)}), a "
            f"graph would repeat them; give tensors"
        )
    return ""


def _cause(error: RuntimeError) -> str:
    """The first line of the innermost error, and the line of code that raised it."""
    while isinstance(
        error.__context__, RuntimeError
    ):  # a capture that ends in an error tells of that alone
        error = error.__context__
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{first_line(error)} ({Path(place.filename).name}:{place.lineno}: {place.line})"


def _inputs(timestep: Timestep) -> list[Tensor]:
    """What a step of the environment brings into the graph, in a fixed order."""
    info = timestep.info
    tensors = [
        *timestep[:4],
        info["final_obs"],
        info["episode"]["r"],
        info["episode"]["l"],
        info["_episode"],
    ]
    return [*tensors, info["valid"]] if "valid" in info else tensors


def _timestep(inputs: list[Tensor], has_valid: bool) -> Timestep:
    """The Timestep whose tensors `_inputs` lists."""
    obs, reward, terminated, truncated, final_obs, episode_return, length, finished, *valid = inputs
    info: dict[str, Any] = {
        "final_obs": final_obs,
        "episode": {"r": episode_return, "l": length},
        "_episode": finished,
    }
    return Timestep(
        obs, reward, terminated, truncated, info | ({"valid": valid[0]} if has_valid else {})
    )
