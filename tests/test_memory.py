"""Free memory is what the machine has and what every control group around the process leaves."""

from pathlib import Path

import pytest
import torch

from gpurl import memory
from gpurl.memory import available_bytes

CPU = torch.device("cpu")
MACHINE = 2**20 * 1024  # bytes free
NO_LIMIT_1 = 0x7FFFFFFFFFFFF000  # as version 1 writes it


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /sys/fs/cgroup; `groups` beside it is in place of /proc/self/cgroup."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "groups")
    real = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path: "MemAvailable: 1048576 kB" if path.name == "meminfo" else real(path),
    )
    return tmp_path / "cgroup"


def add_group(folder: Path, limit: object, used: int, cached: int, version: int = 2) -> None:
    names = memory.FILES_2 if version == 2 else memory.FILES_1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\ntotal_{names[2]} 1\n")
    if version == 1:  # of this group alone, and with all groups below
        (folder / "memory.stat").write_text(f"inactive_file 1\n{names[2]} {cached}\n")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", MACHINE), ("1000", 1000 - 700 + 50), ("600", 0), (str(2**40), MACHINE)],
)
@pytest.mark.parametrize("says", ["0::/\n", "0::/outside/of/this/mount\n", None])
def test_free_memory_is_the_machines_or_what_the_container_leaves(
    limit: str, expected: int, says: str | None, root: Path
) -> None:
    if says is not None:
        (root.parent / "groups").write_text(says)
    add_group(root, limit, 700, 50)
    assert available_bytes(CPU) == expected


@pytest.mark.parametrize(
    ("own", "around", "expected"),
    [
        (("max", 100, 0), (5000, 4000, 0), 1000),  # a job of a user with a limit
        ((3000, 100, 0), (5000, 4000, 30), 1030),
        ((900, 100, 7), (5000, 2000, 0), 807),
        (("max", 100, 0), ("max", 4000, 0), MACHINE),
    ],
)
def test_the_smallest_of_nested_groups_counts(
    own: tuple[object, int, int], around: tuple[object, int, int], expected: int, root: Path
) -> None:
    (root.parent / "groups").write_text("0::/user.slice/job: 7/step\n")
    add_group(root / "user.slice", *around)
    add_group(root / "user.slice" / "job: 7" / "step", *own)
    assert available_bytes(CPU) == expected


@pytest.mark.parametrize(
    ("own", "around", "expected"),
    [
        ((3000, 1000, 400), (NO_LIMIT_1, 5000, 0), 2400),
        ((NO_LIMIT_1, 1000, 0), (7000, 5000, 0), 2000),
        ((NO_LIMIT_1, 1000, 0), (NO_LIMIT_1, 5000, 0), MACHINE),
    ],
)
def test_groups_of_version_1_have_limits(
    own: tuple[int, int, int], around: tuple[int, int, int], expected: int, root: Path
) -> None:
    lines = "5:cpuset:/\n4:cpu,memory:/docker/c0ffee\n1:name=systemd:/\n0::/init.scope\n"
    (root.parent / "groups").write_text(lines)
    add_group(root / "memory" / "docker" / "c0ffee", *own, version=1)
    add_group(root / "memory", *around, version=1)
    add_group(root / "cpuset", 1, 1, 0, version=1)  # which counts no memory
    assert available_bytes(CPU) == expected


def test_free_memory_of_a_gpu_is_that_of_the_driver_and_of_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("memory_reserved", 100),
        ("memory_allocated", 70),
        ("mem_get_info", (1000, 2000)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert available_bytes(torch.device("cuda")) == 1000 + 100 - 70
