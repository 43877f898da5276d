"""How much memory a device has free, and how much a piece of code would take."""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CGROUP = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# a control group's files for its limit and what is used, and the files in memory that are not
# in use; of version 1 and 2
FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
FILES_2 = ("memory.max", "memory.current", "inactive_file")
# what oneDNN computes on a CPU, on copies in a layout of its own: blocks of so many channels
CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
CHANNELS = 8


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None if the system does not say."""
    if device.type == "cuda":
        reserved_but_free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved_but_free
    # the machine's free memory
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([free, *_left_by_groups()])


def _left_by_groups() -> Iterator[int]:
    """Bytes that the limits of this process' control group leave, and of every group around it."""
    lines = ["0::/"]  # of a system that does not say
    with suppress(OSError):
        lines = OWN_GROUPS.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root, (limit, used, cached) = CGROUP, FILES_2
        if controllers:
            root, (limit, used, cached) = CGROUP / "memory", FILES_1
            if "memory" not in controllers.split(","):
                continue
        own = PurePosixPath(path)
        for group in (own, *own.parents):
            folder = root / str(group).lstrip("/")
            # no limit is "max", which is no number; cached files are freed on demand
            with suppress(OSError, KeyError, ValueError):
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                stat = dict(
                    row.split() for row in (folder / "memory.stat").read_text().splitlines()
                )
                yield max(left + int(stat[cached]), 0)


class LiveBytes(TorchDispatchMode):
    """A `with` block that adds up the memory of the tensors made in it: `live` bytes now, and
    `peak`, the most so far. Tensors on the device meta count as if they had memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        if func in CONVOLUTIONS:
            tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
            self.peak = max(self.peak, self.live + sum(map(_bytes_in_blocks, tensors)))
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _bytes_in_blocks(tensor: torch.Tensor) -> int:
    """Of a tensor [B, C, ...] with its channels in blocks."""
    channels = tensor.shape[1] if tensor.dim() > 2 else CHANNELS
    return tensor.nbytes * -(-channels // CHANNELS) * CHANNELS // channels


def in_gib(number: float) -> str:
    """`12.3 GiB`."""
    return f"{number / 2**30:,.1f} GiB"
