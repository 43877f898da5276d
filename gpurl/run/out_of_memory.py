"""Running out of memory becomes an error that says what was wanted, what takes the memory, and how
many environments would fit.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpurl.engine.eager import Eager
from gpurl.errors import GpurlError, UsageError, first_line
from gpurl.kernels.memory_errors import find_out_of_memory
from gpurl.memory import available_bytes, in_gib
from gpurl.run.settings import Settings

SHARE_TO_TAKE = (
    0.9  # of what there is: what comes later and what lies between blocks needs some too
)
UNITS = {
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
    "EiB": 2**60,
}


class Watch:
    """What `explain_out_of_memory` knows: the engine, once there is one."""

    engine: Eager | None = None


@contextmanager
def explain_out_of_memory(settings: Settings, device: torch.device) -> Iterator[Watch]:
    """A `with` block in which running out of memory is a UsageError, with what was raised as its
    cause.
    """
    watch = Watch()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield watch
    except Exception as error:
        if isinstance(error, GpurlError) or (found := find_out_of_memory(error)) is None:
            raise
        raise UsageError(explanation(found, settings, device, watch.engine)) from error


def explanation(
    error: BaseException, settings: Settings, device: torch.device, engine: Eager | None
) -> str:
    """What to tell the user."""
    count, config = settings.train.num_envs, settings.algorithm_config
    parts = parts_of(engine)
    held, free = held_and_free(device, sum(parts.values()))
    wanted = wanted_bytes(str(error))
    lines = [f"out of memory on {device}"]
    lines += [f"{in_gib(wanted)} more were wanted"] if wanted else []
    lines += (
        []
        if free is None
        else [f"{in_gib(free)} are free beside {in_gib(held)} that this run held"]
    )
    text = ", ".join(lines)
    if takers := [f"{name} {in_gib(size)}" for name, size in parts.items() if size]:
        text += f"; of that {', '.join(takers)}"
    fixed = parts.get("replay", 0) + parts.get("networks", 0)
    if (
        free is None or wanted == 0 or wanted < free
    ):  # the sums do not tell why it failed: a number would be a guess
        advice = [f"num_envs less than {count:,}"] if count > 1 else []
    else:
        fits = num_envs_that_fit(count, held + wanted, fixed, held + free)
        advice = (
            [f"num_envs {fits:,} instead of {count:,} would fit, by what they took until then"]
            if fits
            else []
        )
    if parts.get("replay"):
        advice.append(f"replay_size less than {config.replay_size:,} (or storage bfloat16)")
    if hasattr(config, "minibatches"):
        advice.append(
            f"horizon less than {config.horizon} or minibatches more than {config.minibatches}"
        )
    elif hasattr(config, "batch_size"):
        advice.append(f"batch_size less than {config.batch_size:,}")
    if engine is not None and engine.stages is not engine:
        advice.append("--no-graph")
    says = f"{type(error).__name__}: {first_line(error)}"
    return (
        f"{text}. What helps: {'; '.join(advice) or f'num_envs less than {count:,}'}. What failed: "
        f"{says}"
    )


def num_envs_that_fit(num_envs: int, needed: int, fixed: int, room: int) -> int | None:
    """The largest power of two below `num_envs` for which `room` bytes do; None where not even one
    fits.

    needed: bytes that `num_envs` environments took with what failed, `fixed` of them whatever their
    number.
    """
    each = max(needed - fixed, 1) / num_envs
    most = min(int((SHARE_TO_TAKE * room - fixed) // each), num_envs - 1)
    return None if most < 1 else 1 << (most.bit_length() - 1)


def wanted_bytes(message: str) -> int:
    """Bytes that could not be had, as torch, Warp or numpy says; 0 where it does not."""
    found = re.search(
        rf"(?:[Tt]r(?:ied|ying) to|Failed to|Unable to) allocate ([\d.]+) ({'|'.join(UNITS)})",
        message,
    )
    return int(float(found[1]) * UNITS[found[2]]) if found else 0


def held_and_free(device: torch.device, known: int) -> tuple[int, int | None]:
    """(bytes this process held at most, bytes that were free beside them); known: what its tensors
    take, all that a CPU can say.
    """
    free = available_bytes(device)
    if device.type != "cuda":
        return known, free
    peak = torch.cuda.max_memory_allocated(device)
    given_back = peak - torch.cuda.memory_allocated(device)
    return peak, None if free is None else max(free - given_back, 0)


def parts_of(engine: Eager | None) -> dict[str, int]:
    """Bytes of what an engine holds, by name."""
    if engine is None:
        return {}
    algorithm, found = engine.algorithm, dict[str, int]()
    found["environments"] = _size(engine.env.state_dict())
    found["rollout"] = _size(engine.buffer.columns)
    found["replay"] = getattr(getattr(algorithm, "replay", None), "bytes", 0)
    found["networks"] = 4 * _size(
        [*algorithm.parameters(), *algorithm.buffers()]
    )  # with gradients and Adam's two moments
    return found


def _size(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
