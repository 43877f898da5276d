"""How much memory a device has free."""

from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


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
    # a container's limit; it counts cached files as used, but frees them on demand
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"])
        return free if limit == "max" else min(free, max(int(limit) - used + cached, 0))
    except (OSError, KeyError, ValueError):
        return free


def in_gib(number: float) -> str:
    """`12.3 GiB`."""
    return f"{number / 2**30:,.1f} GiB"
