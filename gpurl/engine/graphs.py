"""An engine's iterations in CUDA graphs: one replay in place of many launches from Python.

full    one graph plays the rollout, one prepares the targets, one learns. For environments that can
        be captured (`graph_safe`).
policy  one graph acts, one records the step; both serve every step, because the row of the rollout
        is a number on the device. The environment steps in between, from Python or by a graph of
        its own on torch's current stream.

All graphs share one memory pool. The result of a captured function has the same address at every
replay, and is valid until an earlier captured function is replayed.
"""

import contextlib
import gc
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpurl.algorithms.base import Decision, Metrics, PolicyState
from gpurl.engine.eager import Eager, Prepared
from gpurl.envs.vec_env import Timestep
from gpurl.errors import first_line
from gpurl.guards.contract import step_env
from gpurl.kernels.memory_errors import is_out_of_memory

WARM_UPS = 2  # iterations on the graphs' stream before capture; they count as training
Function = Callable[[], Any]


class Backend(Protocol):
    """Captures and replays: `CudaGraphs`, or a test's stand-in."""

    def warm_up(self, function: Function) -> tuple[Any, str]:
        """Run `function` on the graphs' stream; (its result, the first place where it waited for
        the device, which cannot be captured, or "").
        """

    def capture(self, function: Function) -> tuple[Callable[[], None], Any]:
        """(replay, the result of `function`). Capturing computes nothing: only replays do."""

    def another(self) -> "Backend":
        """One with memory of its own, whose graphs may run beside those of this one."""


class CudaGraphs:
    """CUDA graphs on a stream of their own, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def another(self) -> "CudaGraphs":
        return CudaGraphs(self.device)

    def warm_up(self, function: Function) -> tuple[Any, str]:
        current = torch.cuda.current_stream(self.device)
        debug_mode = torch.cuda.get_sync_debug_mode()
        # run on the graphs' stream; torch warns of each wait for the device
        self.stream.wait_stream(current)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                with torch.cuda.stream(self.stream):
                    result = function()
            finally:  # later work on the current stream must come after this
                torch.cuda.set_sync_debug_mode(debug_mode)
                current.wait_stream(self.stream)
        # repeat all other warnings
        waits = [each for each in caught if "called a synchronizing" in str(each.message)]
        for warning in caught:
            # the first such mode of a process makes torch warn of the mode itself
            if warning not in waits and "prototype feature" not in str(warning.message):
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        # name the first wait
        if not waits:
            return result, ""
        place = f"{Path(waits[0].filename).name}:{waits[0].lineno}"
        return result, f"{first_line(waits[0].message)} ({place})"

    def capture(self, function: Function) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        try:
            with (
                no_garbage_collection(),
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                result = function()
        except BaseException:  # a failed capture leaves its stream current and its pool in use
            torch.cuda.set_stream(current)
            self._end_allocation()
            self.pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay, result

    def _end_allocation(self) -> None:
        """After a failed capture the allocator of torch 2.11 believes in it for ever, and refuses
        the next one. Other versions refuse this call.
        """
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, self.pool)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """None within a capture: CUDA refuses to destroy the graphs of an earlier training then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphLevel(ABC):
    """What both levels share: warm-up iterations, which count as training, then capture, then
    replays.
    """

    def __init__(
        self, eager: Eager, backend: Backend, learning_backend: Backend | None = None
    ) -> None:
        """learning_backend: of `prepare` and `learn`, if they run beside `collect`: graphs that
        share memory cannot.
        """
        self.eager = eager
        self.backend = backend
        self.learning_backend = learning_backend or backend
        # a copy of its own: environments must not overwrite it
        eager.obs = eager.obs.clone(memory_format=torch.contiguous_format)
        eager.in_place = True
        self.is_captured = False
        # the first place where a warm-up waited for the device
        self.waited = ""

    @abstractmethod
    def collect(self) -> None:
        """As `Eager.collect`, on the graphs' stream or by replays."""

    def prepare(self) -> Prepared:
        """As `Eager.prepare`."""
        if not self.is_captured:
            return self._warm_up(in_place(self.eager, self.eager.prepare), self.learning_backend)
        self._prepare()
        return self.prepared

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `Eager.learn`, on the data of the last `prepare`."""
        if not self.is_captured:
            return self._warm_up(lambda: self.eager.learn(data), self.learning_backend)
        self._learn()
        return self.metrics

    def capture(self) -> None:
        """Capture the stages. RuntimeError if one cannot be captured; the run is then unchanged."""
        eager = self.eager
        terms = dict(eager.statistics.terms)
        try:
            self._capture_collecting()
            capture = self.learning_backend.capture
            self._prepare, self.prepared = capture(in_place(eager, eager.prepare))
            self._learn, self.metrics = capture(lambda: eager.learn(self.prepared[0]))
        except BaseException:
            eager.statistics.terms = terms
            raise
        finally:
            eager.buffer.clear()
        self.is_captured = True

    def leave(self) -> None:
        """Release the engine for another level."""
        self.eager.in_place = False

    @abstractmethod
    def _capture_collecting(self) -> None:
        """Capture what `collect` replays."""

    def _warm_up(self, function: Function, backend: Backend | None = None) -> Any:
        result, waited = (backend or self.backend).warm_up(function)
        self.waited = self.waited or waited
        return result


class HasAddresses(Protocol):
    """What a graph reads at one address and a step replaces by new tensors."""

    obs: Tensor
    policy_state: PolicyState


def in_place(owner: HasAddresses, function: Function) -> Function:
    """`function`, followed by a copy of the observations and the hidden state of `owner` to their
    old addresses, which graphs read.
    """

    def run() -> Any:
        obs = owner.obs
        policy_state = owner.policy_state
        try:
            result = function()
            for target, source in zip((obs, *policy_state), (owner.obs, *owner.policy_state)):
                if source is not target:
                    target.copy_(source)
        finally:
            owner.obs = obs
            owner.policy_state = policy_state
        return result

    return run


class FullLevel(GraphLevel):
    """The environment is captured too."""

    def collect(self) -> None:
        if not self.is_captured:
            self._warm_up(in_place(self.eager, self.eager.collect))
            return
        self._collect()
        self.eager.buffer.size = self._size

    def _capture_collecting(self) -> None:
        terms = set(self.eager.statistics.terms)
        self._collect, _ = self.backend.capture(in_place(self.eager, self.eager.collect))
        self._size = self.eager.buffer.size
        if new := set(self.eager.statistics.terms) - terms:
            raise RuntimeError(
                f"info['log'] has new names {', '.join(sorted(new))}; all names must be there from "
                "the first rollout on"
            )


class PolicyLevel(GraphLevel):
    """The environment is stepped between the graphs."""

    def __init__(
        self, eager: Eager, backend: Backend, learning_backend: Backend | None = None
    ) -> None:
        super().__init__(eager, backend, learning_backend)
        # at the addresses that the graph reads
        self.timestep: Timestep | None = None
        eager.buffer.row = torch.zeros(1, dtype=torch.int64, device=eager.env.device)

    def collect(self) -> None:
        eager = self.eager
        while not eager.buffer.is_full:
            self._act()
            # a copy: an environment that keeps its actions must not see them overwritten
            timestep = step_env(eager.env, self.decision.action.clone())
            eager.guards.after_step(timestep)
            self._copy_timestep(timestep)
            self._record()
            eager.statistics.add_log(timestep.info)

    def _copy_timestep(self, timestep: Timestep) -> None:
        """Copy the environment's step to the addresses that the graph reads."""
        tensors = _tensors_of(timestep)
        if self.timestep is None:
            self.tensors = [tensor.clone() for tensor in tensors]
            self.timestep = _timestep_of(self.tensors)
        torch._foreach_copy_(self.tensors, tensors)

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
            self._warm_up(in_place(self.eager, self._record_step))

    def _record_step(self) -> None:
        assert self.timestep is not None
        self.eager.record_step(self.decision, self.timestep)

    def _capture_collecting(self) -> None:
        self._replay_act, self.decision = self.backend.capture(self.eager.act)
        self._replay_record, _ = self.backend.capture(in_place(self.eager, self._record_step))

    def leave(self) -> None:
        super().leave()
        self.eager.buffer.row = None


LEVELS: dict[str, type[GraphLevel]] = {"full": FullLevel, "policy": PolicyLevel}


class Graphed:
    """The stages of `eager` in CUDA graphs, at the best level that works.

    The iterations of critic_warmup and the first one after them that learns run without graphs,
    which compiles and allocates everything; the next WARM_UPS run on the graphs' stream; then the
    stages are captured. All of these are iterations of the training. If a level fails, a note says
    why, and the next one is tried.
    """

    def __init__(
        self,
        eager: Eager,
        backend: Backend,
        levels: list[str],
        learning_backend: Backend | None = None,
    ) -> None:
        self.eager = eager
        self.backends = backend, learning_backend
        # still to be tried, the best first
        self._levels = list(levels)
        self._graphs: GraphLevel | None = None
        # iterations that learned since the last change of state
        self._learned = 0
        # full, policy or off, once it is decided
        self.level = ""

    def beside(self) -> Backend | None:
        """For graphs that are replayed between iterations, or None if there are none here."""
        backend, learning_backend = self.backends
        if self.level not in LEVELS or learning_backend is not None:
            return None
        return backend.another()

    def collect(self) -> None:
        """As `Eager.collect`."""
        if not self.level and self._learned:
            self._advance()
        (self._graphs or self.eager).collect()

    def prepare(self) -> Prepared:
        """As `Eager.prepare`."""
        return (self._graphs or self.eager).prepare()

    def learn(self, data: dict[str, Tensor]) -> Metrics:
        """As `Eager.learn`."""
        # graphs repeat what they have captured: they begin once the whole algorithm learns
        is_whole = not self.eager.algorithm.warms_critic
        metrics = (self._graphs or self.eager).learn(data)
        self._learned += is_whole
        return metrics

    def _advance(self) -> None:
        """Go from no graphs to warm-up, from warm-up to captured graphs, or to the next level."""
        if self._graphs is None:
            self._begin()
        elif self._graphs.waited:
            self._give_up(self._graphs.waited)
        elif self._learned >= WARM_UPS:
            self._capture(self._graphs)

    def _begin(self) -> None:
        """Start the warm-up of the best level left."""
        self._learned = 0
        while self._levels:
            name = self._levels[0]
            obstacle = obstacle_to_full(self.eager) if name == "full" else ""
            if obstacle:
                self._skip_level(obstacle)
                continue
            self._graphs = LEVELS[name](self.eager, *self.backends)
            return
        self._decide("off")

    def _capture(self, graphs: GraphLevel) -> None:
        try:
            graphs.capture()
        except RuntimeError as error:
            if is_out_of_memory(error):  # a run without graphs would run out of memory too
                raise
            self._give_up(_cause(error))
            return
        self._decide(self._levels[0])

    def _give_up(self, obstacle: str) -> None:
        """Leave the level that failed and try the next one."""
        assert self._graphs is not None
        self._graphs.leave()
        self._graphs = None
        self._skip_level(obstacle)
        self._begin()

    def _skip_level(self, obstacle: str) -> None:
        level = self._levels.pop(0)
        self.eager.notes.append(f"CUDA graph level {level} is not possible: {obstacle}")

    def _decide(self, level: str) -> None:
        self.level = level
        if level == "off":
            self.eager.stages = self.eager
        self.eager.notes.append(f"engine {self.eager.name}, CUDA graphs {level}")


def obstacle_to_full(eager: Eager) -> str:
    """Why the environment cannot be captured, or ""."""
    name = eager.guards.env_name
    if not eager.env.graph_safe:
        return f"{name} is not graph_safe; it is stepped between graphs"
    if numbers := sorted(eager.statistics.host_terms):
        return (
            f"info['log'] of {name} holds Python numbers ({', '.join(numbers)}), which a graph "
            "would repeat; use tensors"
        )
    return ""


def _cause(error: RuntimeError) -> str:
    """The first line of the innermost error, and the line of code that raised it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__  # the outer one only says that the capture failed
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{first_line(error)} ({Path(place.filename).name}:{place.lineno}: {place.line})"


def _tensors_of(timestep: Timestep) -> list[Tensor]:
    """All tensors of a step that a graph reads, in a fixed order."""
    info = timestep.info
    episode = info["episode"]
    tensors = [*timestep[:4], info["final_obs"], episode["r"], episode["l"], info["_episode"]]
    return [*tensors, info["valid"]] if "valid" in info else tensors


def _timestep_of(tensors: list[Tensor]) -> Timestep:
    """The inverse of `_tensors_of`."""
    obs, reward, terminated, truncated, final_obs, returned, length, finished, *valid = tensors
    info: dict[str, Any] = {
        "final_obs": final_obs,
        "episode": {"r": returned, "l": length},
        "_episode": finished,
    }
    if valid:
        (info["valid"],) = valid
    return Timestep(obs, reward, terminated, truncated, info)
