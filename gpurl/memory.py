"""How much memory a device has free."""

from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int | None:
    """What may still be allocated on `device`; None where nobody says so."""
    if device.type == "cuda":
        reserved_but_free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved_but_free
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:  # a container's own limit; files that were read count as used there, and are given back
        limit, used = (
            (CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
        read = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())[
            "inactive_file"
        ]
        return free if limit == "max" else min(free, max(int(limit) - int(used) + int(read), 0))
    except (OSError, KeyError, ValueError):
        return free


def in_gib(number: float) -> str:
    """`12.3 GiB`."""
    return f"{number / 2**30:,.1f} GiB"
