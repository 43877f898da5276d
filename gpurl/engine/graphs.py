"""An engine's iterations in CUDA graphs: Python runs no more, it replays.

full    one graph plays the rollout, one prepares the targets, one learns. For environments that a
        graph can hold (`graph_safe`).
policy  one graph acts, one records what the environment answered; both serve every step, since the
        row of the rollout is a number on the device. The environment is stepped in between, as it
        is or by a graph of its own on torch's current stream.

All graphs share one memory pool. What a captured function returns lies at the same place at every
replay, and stays true until the functions captured before it are replayed again.
"""

import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpurl.algorithms.base import Decision, Metrics
from gpurl.engine.eager import Eager, Prepared
from gpurl.envs.vec_env import Timestep
from gpurl.errors import first_line
from gpurl.guards.contract import step_env
from gpurl.kernels.memory_errors import is_out_of_memory

WARM_UPS = 2  # iterations on the graphs' stream before capturing
Function = Callable[[], Any]


class Backend(Protocol):
    """What captures and replays: `CudaGraphs`, or what a test puts in its place."""

    def warm_up(self, function: Function) -> tuple[Any, str]:
        """(what `function` returned, run as it will be captured; where it waited for the device,
        which no graph can hold, or nothing)."""

    def capture(self, function: Function) -> tuple[Callable[[], None], Any]:
        """(replay, what `function` returned). Capturing computes nothing: only replays do."""


class CudaGraphs:
    """CUDA graphs on a stream of their own, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Function) -> tuple[Any, str]:
        current, before = torch.cuda.current_stream(self.device), torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(current)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                with torch.cuda.stream(self.stream):
                    result = function()
            finally:  # what goes on must not overtake what was begun
                torch.cuda.set_sync_debug_mode(before)
                current.wait_stream(self.stream)
        waits = [each for each in caught if "synchronizing" in str(each.message)]
        for each in caught:
            if each not in waits and "prototype feature" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if not waits:
            return result, ""
        place = f"{Path(waits[0].filename).name}:{waits[0].lineno}"
        return result, f"{first_line(waits[0].message)} ({place})"

    def capture(self, function: Function) -> tuple[Callable[[], None], Any]:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                result = function()
        except BaseException:  # a capture that broke leaves its stream chosen and its pool in use
            torch.cuda.set_stream(current)
            self.pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay, result


class GraphLevel(ABC):
    """What both levels share: iterations to warm up by, which count as any other, then captured
    functions that are replayed."""

    def __init__(self, eager: Eager, backend: Backend) -> None:
        self.eager, self.backend = eager, backend
        eager.obs = eager.obs.clone()  # a place that no environment writes into
        eager.in_place = True
        self.is_captured = False
        self.waited = ""  # where a warm-up waited for the device

    @abstractmethod
    def collect(self) -> None:
        """Fill the buffer, on the graphs' stream or by replays."""

    def prepare(self) -> Prepared:
        """As `Eager.prepare`."""
        if not self.is_captured:
            return self._warm_up(self._in_place(self.eager.prepare))
        self._prepare()
        return self.prepared

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `Eager.learn`, on what `prepare` gave last."""
        if not self.is_captured:
            return self._warm_up(lambda: self.eager.learn(data))
        self._learn()
        return self.metrics

    def capture(self) -> None:
        """Make the graphs; RuntimeError where something cannot be captured, which leaves the run
        as it was."""
        eager, terms = self.eager, dict(self.eager.statistics.terms)
        try:
            self._capture_collecting()
            self._prepare, self.prepared = self.backend.capture(self._in_place(eager.prepare))
            self._learn, self.metrics = self.backend.capture(lambda: eager.learn(self.prepared[0]))
        except BaseException:
            eager.statistics.terms = terms
            raise
        finally:
            eager.buffer.clear()
        self.is_captured = True

    def leave(self) -> None:
        """Make way for another level."""
        self.eager.in_place = False

    @abstractmethod
    def _capture_collecting(self) -> None:
        """Capture what `collect` replays."""

    def _warm_up(self, function: Function) -> Any:
        result, waited = self.backend.warm_up(function)
        self.waited = self.waited or waited
        return result

    def _in_place(self, function: Function) -> Function:
        """`function`, after which observations and hidden state are where they were before."""

        def moved_back() -> Any:
            eager = self.eager
            obs, policy_state = eager.obs, eager.policy_state
            try:
                result = function()
                for place, tensor in zip((obs, *policy_state), (eager.obs, *eager.policy_state)):
                    if tensor is not place:
                        place.copy_(tensor)
            finally:
                eager.obs, eager.policy_state = obs, policy_state
            return result

        return moved_back


class FullLevel(GraphLevel):
    """The environment is in the graph too."""

    def collect(self) -> None:
        if not self.is_captured:
            self._warm_up(self._in_place(self.eager.collect))
            return
        self._collect()
        self.eager.buffer.size = self._size

    def _capture_collecting(self) -> None:
        terms = set(self.eager.statistics.terms)
        self._collect, _ = self.backend.capture(self._in_place(self.eager.collect))
        self._size = self.eager.buffer.size
        if new := set(self.eager.statistics.terms) - terms:
            raise RuntimeError(
                f"info['log'] brought {', '.join(sorted(new))} late; its names must be there from "
                "the first rollout on"
            )


class PolicyLevel(GraphLevel):
    """The environment is stepped between the graphs."""

    def __init__(self, eager: Eager, backend: Backend) -> None:
        super().__init__(eager, backend)
        self.timestep: Timestep | None = None  # in places that the graph reads
        eager.buffer.row = torch.zeros(1, dtype=torch.int64, device=eager.env.device)

    def collect(self) -> None:
        eager = self.eager
        while not eager.algorithm.is_ready(eager.buffer):
            self._act()
            # one that keeps its actions must not see the next ones in their place
            timestep = step_env(eager.env, self.decision.action.clone())
            eager.guards.after_step(timestep)
            self._bring_in(timestep)
            self._record()
            eager.statistics.add_log(timestep.info)

    def _bring_in(self, timestep: Timestep) -> None:
        """Copy what the environment answered to where the graph reads it."""
        given = _inputs(timestep)
        if self.timestep is None:
            self.has_valid = "valid" in timestep.info
            self.inputs = [tensor.clone() for tensor in given]
            self.timestep = _timestep(self.inputs, self.has_valid)
        torch._foreach_copy_(self.inputs, given)

    def _act(self) -> None:
        if self.is_captured:
            self._replay_act()
        else:
            self.decision: Decision = self._warm_up(self.eager.act)

    def _record(self) -> None:
        if self.is_captured:
            self._replay_record()
            self.eager.buffer.size += 1
        else:
            self._warm_up(self._in_place(self._record_step))

    def _record_step(self) -> None:
        assert self.timestep is not None
        self.eager.record_step(self.decision, self.timestep)

    def _capture_collecting(self) -> None:
        self._replay_act, self.decision = self.backend.capture(self.eager.act)
        self._replay_record, _ = self.backend.capture(self._in_place(self._record_step))

    def leave(self) -> None:
        super().leave()
        self.eager.buffer.row = None


LEVELS: dict[str, type[GraphLevel]] = {"full": FullLevel, "policy": PolicyLevel}


class Graphed:
    """The stages of `eager` in CUDA graphs of the best level that is possible.

    The first iteration that learns runs as it is, so that everything is compiled and allocated; the
    next WARM_UPS run on the graphs' stream; then the functions are captured. All of them are
    iterations of the training. Where a level fails, a note says why, and the next one is tried.
    """

    def __init__(self, eager: Eager, backend: Backend, levels: list[str]) -> None:
        self.eager, self.backend = eager, backend
        self._levels = list(levels)  # still to be tried, the best first
        self._made: GraphLevel | None = None
        self._learned = 0  # iterations in the present state
        self._timestep: Timestep | None = None
        self.level = ""  # full, policy or off, once that is known

    def collect(self) -> None:
        """As `Eager.collect`."""
        if not self.level and self._learned:
            self._advance()
        (self._made or self.eager).collect()

    def prepare(self) -> Prepared:
        """As `Eager.prepare`."""
        return (self._made or self.eager).prepare()

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `Eager.learn`."""
        metrics = (self._made or self.eager).learn(data)
        self._learned += 1
        return metrics

    def _advance(self) -> None:
        """From eager to warming up, from that to graphs, or to the next level."""
        if self._made is None:
            self._begin()
        elif self._made.waited:
            self._give_up(self._made.waited)
        elif self._learned >= WARM_UPS:
            self._capture(self._made)

    def _begin(self) -> None:
        """Warm up for the best level that is left."""
        self._learned = 0
        while self._levels:
            name = self._levels[0]
            if obstacle := obstacle_to_full(self.eager) if name == "full" else "":
                self._note(obstacle)
                continue
            self._made = LEVELS[name](self.eager, self.backend)
            return
        self._decide("off")

    def _capture(self, made: GraphLevel) -> None:
        try:
            made.capture()
        except RuntimeError as error:
            if is_out_of_memory(error):  # a run without graphs would soon meet the same end
                raise
            self._give_up(_cause(error))
            return
        self._decide(self._levels[0])

    def _give_up(self, obstacle: str) -> None:
        """On this level."""
        assert self._made is not None
        self._made.leave()
        self._made = None
        self._note(obstacle)
        self._begin()

    def _note(self, obstacle: str) -> None:
        level = self._levels.pop(0)
        self.eager.notes.append(f"CUDA graph level {level} is not possible: {obstacle}")

    def _decide(self, level: str) -> None:
        self.level = level
        if level == "off":
            self.eager.stages = self.eager
        self.eager.notes.append(f"engine {self.eager.name}, CUDA graphs {level}")


def obstacle_to_full(eager: Eager) -> str:
    """Why a graph cannot hold the environment, or nothing."""
    name = eager.guards.env_name
    if not eager.env.graph_safe:
        return f"{name} is not graph_safe, it is stepped between graphs"
    if numbers := sorted(eager.statistics.logged_numbers):
        return (
            f"info['log'] of {name} holds Python numbers ({', '.join(numbers)}), a graph would "
            "repeat them; give tensors"
        )
    return ""


def _cause(error: RuntimeError) -> str:
    """The first line of the innermost error, and the line of code that raised it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__  # a capture that ends in an error tells of that alone
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{first_line(error)} ({Path(place.filename).name}:{place.lineno}: {place.line})"


def _inputs(timestep: Timestep) -> list[Tensor]:
    """What a step of the environment brings into the graph, in a fixed order."""
    info = timestep.info
    episode = info["episode"]
    tensors = [*timestep[:4], info["final_obs"], episode["r"], episode["l"], info["_episode"]]
    return [*tensors, info["valid"]] if "valid" in info else tensors


def _timestep(inputs: list[Tensor], has_valid: bool) -> Timestep:
    """The Timestep whose tensors `_inputs` lists."""
    obs, reward, terminated, truncated, final_obs, returned, length, finished, *valid = inputs
    info: dict[str, Any] = {"final_obs": final_obs, "_episode": finished}
    info["episode"] = {"r": returned, "l": length}
    if has_valid:
        info["valid"] = valid[0]
    return Timestep(obs, reward, terminated, truncated, info)
