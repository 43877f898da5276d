"""Where the time of an iteration of PPO goes: milliseconds of each part, and the longest kernels
with their launches.

The first run on a new kind of GPU: its rows are held against docs/model_of_time.md.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results_table import Row, device_parser, machine, number, save, table
from benchmarks.training import common_settings
from gpurl.cli.profile import Profile, profile
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device

NUM_ENVS = 4096
LONGEST = 15  # rows of kernels, of each case
LARGE: dict[str, Any] = {
    "network": {"hidden": [512, 256, 128], "activation": "elu"},
    "horizon": 24,
    "epochs": 5,
}
CASES: dict[str, dict[str, Any]] = {
    "64x64": {},
    "64x64 autograd": {"update": "autograd"},
    "512x256x128": LARGE,
    "512x256x128 autograd": LARGE | {"update": "autograd"},
}


def rows_of(case: str, found: Profile) -> list[Row]:
    """Microseconds of an iteration: all of it, its parts, the longest kernels or operators."""

    def row(part: str, name: str, seconds: float, **others: str) -> Row:
        columns = {"case": case, "part": part, "name": name, "value": f"{seconds * 1e6:.2f}"}
        return columns | {"unit": "us/iteration", **others}

    rows = [row("iteration", "all", found.seconds)]
    for name, phase in found.phases.items():
        launches = f"{(phase.launches or phase.operators) / found.iterations:.0f}"
        seconds = phase.device if found.is_cuda else phase.host
        rows.append(row("phase", name, seconds / found.iterations, calls=launches))
    for each in found.longest[:LONGEST]:
        calls = f"{each.calls / found.iterations:.0f}"
        seconds = each.seconds / found.iterations
        rows.append(row("kernel", each.name, seconds, calls=calls, grid=each.grid))
    return rows


def parse(words: list[str] | None) -> argparse.Namespace:
    """The options."""
    options = device_parser(__doc__)
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument(
        "--num-envs", type=int, default=NUM_ENVS, help=f"environments; default {NUM_ENVS}"
    )
    options.add_argument(
        "--iterations", type=int, default=5, help="iterations that are measured; default 5"
    )
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Profile each case, print and save."""
    options = parse(words)
    device = choose_device(options.device)
    is_cuda = device.type == "cuda"
    for case in options.cases:
        shape = common_settings(options.num_envs, 32) | CASES[case]
        settings = make_settings("ppo", "chasing", device=str(device), **shape)
        with tempfile.TemporaryDirectory() as folder:
            found = profile(settings, options.iterations, 4 if is_cuda else 1, Path(folder))
        rows = [row | machine(str(device)) for row in rows_of(case, found)]
        path = save("profile", rows, options.out)
        shown = ("name", "grid", "calls", "value")
        lines = [[row.get(name, "")[:70] for name in shown] for row in rows]
        rate = options.num_envs * shape["horizon"] / found.seconds
        print(f"\n{case} on {found.title}: {number(rate)} env-steps/s, microseconds an iteration")
        print(table(["", "blocks x threads", "calls", "us"], lines))
        print(f"written to {path}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
