"""Turns running out of memory into an error that says how much was requested, what uses the memory,
and which settings need less.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpurl.algorithms.base import AlgorithmConfig
from gpurl.engine.eager import Eager
from gpurl.errors import GpurlError, UsageError, first_line
from gpurl.kernels.memory_errors import find_out_of_memory
from gpurl.memory import available_bytes, in_gib
from gpurl.run.settings import Settings

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass
class MemoryUser:
    """The engine whose memory `explain_out_of_memory` lists, once it exists."""

    engine: Eager | None = None


@contextmanager
def explain_out_of_memory(settings: Settings, device: torch.device) -> Iterator[MemoryUser]:
    """A `with` block that turns running out of memory into a UsageError, with the original error as
    its cause.
    """
    user = MemoryUser()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield user
    except Exception as error:
        cause = None if isinstance(error, GpurlError) else find_out_of_memory(error)
        if cause is None:
            raise
        num_envs = settings.train.num_envs
        text = explanation(cause, num_envs, settings.algorithm_config, device, user.engine)
        raise UsageError(text) from error


def explanation(
    error: BaseException,
    num_envs: int,
    config: AlgorithmConfig,
    device: torch.device,
    engine: Eager | None,
) -> str:
    """How much memory was requested, free and used, by what, and which settings need less."""
    # what was requested, free and used
    sizes = engine_sizes(engine)
    used, free = used_and_free(device, sum(sizes.values()))
    requested = requested_bytes(str(error))
    facts = [f"out of memory on {device}"]
    if requested:
        facts.append(f"{in_gib(requested)} requested")
    if free is not None:
        facts.append(f"{in_gib(free)} free besides {in_gib(used)} used by this run")
    text = ", ".join(facts)
    if users := [f"{name} {in_gib(size)}" for name, size in sizes.items() if size]:
        text += f" ({', '.join(users)})"
    # settings that need memory
    advice = [f"num_envs less than {num_envs:,}"] if num_envs > 1 else []
    if sizes.get("replay"):
        replay_size = getattr(config, "replay_size", 0)
        advice.append(f"replay_size less than {replay_size:,} (or storage bfloat16)")
    if hasattr(config, "minibatches"):
        advice.append(
            f"horizon less than {config.horizon} or minibatches more than {config.minibatches}"
        )
    elif hasattr(config, "batch_size"):
        advice.append(f"batch_size less than {config.batch_size:,}")
    if engine is not None and engine.stages is not engine:
        advice.append("--graph off")
    helps = "; ".join(advice) or "smaller networks"
    failed = f"{type(error).__name__}: {first_line(error)}"
    return f"{text}. What helps: {helps}. What failed: {failed}"


def requested_bytes(message: str) -> int:
    """Bytes of the failed request, as torch, Warp or numpy reports them; 0 if it does not."""
    match = re.search(
        rf"(?:[Tt]r(?:ied|ying) to|Failed to|Unable to) allocate ([\d.]+) ({'|'.join(UNITS)})",
        message,
    )
    return int(float(match[1]) * 1024 ** UNITS.index(match[2])) if match else 0


def used_and_free(device: torch.device, engine_bytes: int) -> tuple[int, int | None]:
    """(peak bytes used by this process, bytes free besides them). On a CPU only `engine_bytes`, the
    size of the engine's tensors, is known to be used.
    """
    free = available_bytes(device)
    if device.type != "cuda":
        return engine_bytes, free
    # the peak may have been freed since
    peak = torch.cuda.max_memory_allocated(device)
    freed_since = peak - torch.cuda.memory_allocated(device)
    return peak, None if free is None else max(free - freed_since, 0)


def engine_sizes(engine: Eager | None) -> dict[str, int]:
    """Bytes of what an engine holds, by name."""
    if engine is None:
        return {}
    algorithm = engine.algorithm
    weights = [*algorithm.parameters(), *algorithm.buffers()]
    return {
        "environments": _size(engine.env.state_dict()),
        "rollout": _size(engine.buffer.columns),
        "replay": getattr(getattr(algorithm, "replay", None), "bytes", 0),
        "networks": 4 * _size(weights),  # with gradients and Adam's two moments
    }


def _size(values: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
