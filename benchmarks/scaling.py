"""What several processes cost: exchanges of an iteration, their time, and a formula for many GPUs.

    python -m benchmarks.scaling            # measures 1, 2 and 4 processes on this CPU
    python -m benchmarks.scaling --paper    # NVIDIA GPUs, on paper: 1 to 1,000

An iteration on G ranks takes T(G) = S + K * latency(G) + B / bandwidth(G): S is an iteration whose
exchanges are left out, K their number, B their bytes. S is measured with all G processes at work,
so that what they take from each other (cores, memory) is in it; latency and bandwidth are those of
an all-reduce of 4 B and of 4 MiB. What is measured above T(G) is waiting for the slowest rank.
"""

import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes import Result, host_environment, run_once, run_script
from benchmarks.results_table import Row, machine, median_columns, number, out_parser, save, table
from gpurl.nn.ranks import Alone
from gpurl.run.ranks import join_ranks
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer

COUNTS = (1, 2, 4)
ENVS_OF_RANK = 256
WARM_UP, ITERATIONS = 3, 12
SMALL, LARGE, REPEATS = 4, 4 * 2**20, 40  # bytes, bytes, exchanges of each
TIMEOUT = 120.0  # seconds that a rank waits for another
CASES: dict[str, dict[str, Any]] = {
    "ppo": {"horizon": 32, "epochs": 4, "minibatches": 4, "network": {"hidden": [64, 64]}},
    "sac": {"updates": 4, "learning_starts": 4 * ENVS_OF_RANK},
}
BATCH_OF_RANK = 256  # transitions, off-policy


class SilentRanks(Alone):
    """One of `count` ranks that never talk: each takes its own numbers for those of all."""

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.count = count

    def stack(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).repeat(self.count, *[1] * tensor.dim())

    def share(self, value: Any) -> list[Any]:
        return [value] * self.count


@dataclass
class Exchanged:
    """What a rank has sent."""

    calls: int = 0
    num_bytes: int = 0


@contextmanager
def counted() -> Iterator[Exchanged]:
    """A `with` block whose exchanges of torch.distributed are counted."""
    sum_, exchanged = dist.all_reduce, Exchanged()
    gather = dist.all_gather

    def count(tensor: Tensor) -> None:
        exchanged.calls += 1
        exchanged.num_bytes += tensor.numel() * tensor.element_size()

    def all_reduce(tensor: Tensor, *arguments: Any) -> Any:
        count(tensor)
        return sum_(tensor, *arguments)

    def all_gather(tensors: list[Tensor], tensor: Tensor) -> Any:
        count(tensor)
        return gather(tensors, tensor)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    try:
        yield exchanged
    finally:
        dist.all_reduce, dist.all_gather = sum_, gather


# ---- one process ----


def measure_rank(algorithm: str, silent: bool) -> Result:
    """Seconds of an iteration of this rank, and what it exchanges in one."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settings = make_settings(
        algorithm,
        "chasing",
        num_envs=ENVS_OF_RANK * count,
        device="cpu",
        threads=1,
        eval_episodes=0,
        **CASES[algorithm],
        **({} if algorithm == "ppo" else {"batch_size": BATCH_OF_RANK * count}),
    )
    with join_ranks(TIMEOUT) as real, counted() as exchanged:
        ranks = SilentRanks(index, count) if silent else real
        trainer = make_trainer(settings, torch.device("cpu"), ranks=ranks)
        trainer.start()
        for _ in range(WARM_UP):
            trainer.iterate()
        exchanged.calls = exchanged.num_bytes = 0
        seconds = []
        for _ in range(ITERATIONS):
            if count > 1:
                dist.barrier()
            began = time.perf_counter()
            trainer.iterate()
            seconds.append(time.perf_counter() - began)
        trainer.env.close()
        return {
            "seconds": statistics.median(seconds),
            "calls": exchanged.calls / ITERATIONS,
            "bytes": exchanged.num_bytes / ITERATIONS,
        }


def measure_exchange() -> Result:
    """Seconds of an all-reduce of SMALL and of LARGE bytes."""
    with join_ranks(TIMEOUT):
        return {str(size): _all_reduce_seconds(size) for size in (SMALL, LARGE)}


def _all_reduce_seconds(size: int) -> float:
    tensor, seconds = torch.zeros(size // 4), []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(algorithm: str | None = None, silent: bool = False) -> Result:
    """What the process of a rank measures."""
    return measure_exchange() if algorithm is None else measure_rank(algorithm, silent)


# ---- all of them ----


def run_ranks(count: int, job: dict[str, Any]) -> list[Result]:
    """The results of `count` processes that run `job` together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = host_environment(1, "passive") | {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def run(index: int) -> Result:
        environment = shared | {"RANK": str(index)}
        return run_once(Path(sys.executable), __spec__.name, job, environment, f"rank {index}")

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@dataclass
class Costs:
    """Of one iteration on G ranks. seconds: as measured; silent: without exchanges."""

    seconds: float
    silent: float
    calls: float
    num_bytes: float
    latency: float  # s
    bandwidth: float  # B/s

    @property
    def predicted(self) -> float:
        """Seconds by the formula."""
        return iteration_seconds(
            self.silent, self.calls, self.num_bytes, self.latency, self.bandwidth
        )


def iteration_seconds(
    silent: float, calls: float, num_bytes: float, latency: float, bandwidth: float
) -> float:
    """Seconds of an iteration with exchanges one after another (Hockney 1994, Parallel Computing
    20(3), eq. 1, for each of them)."""
    return silent + calls * latency + num_bytes / bandwidth


def costs(algorithm: str, count: int) -> Costs:
    """Measure `count` processes."""
    silent = max(r["seconds"] for r in run_ranks(count, {"algorithm": algorithm, "silent": True}))
    if count == 1:
        return Costs(silent, silent, 0.0, 0.0, 0.0, math.inf)
    ranks = run_ranks(count, {"algorithm": algorithm})
    exchange = run_ranks(count, {})
    small, large = (max(each[str(size)] for each in exchange) for size in (SMALL, LARGE))
    return Costs(
        seconds=max(each["seconds"] for each in ranks),
        silent=silent,
        calls=ranks[0]["calls"],
        num_bytes=ranks[0]["bytes"],
        latency=small,
        bandwidth=(LARGE - SMALL) / (large - small),
    )


HEADER = (
    "processes",
    "exchanges",
    "KiB",
    "latency us",
    "MB/s",
    "without ms",
    "predicted ms",
    "measured ms",
)


def measured_line(algorithm: str, count: int, all_: list[Costs]) -> tuple[str, ...]:
    """The medians of `all_` under HEADER."""

    def median(name: str, factor: float = 1.0) -> str:
        value = statistics.median(getattr(each, name) for each in all_)
        return "-" if math.isinf(value) else number(value * factor)

    return (
        f"{algorithm} {count}",
        median("calls"),
        median("num_bytes", 1 / 1024),
        median("latency", 1e6),
        median("bandwidth", 1e-6),
        median("silent", 1e3),
        median("predicted", 1e3),
        median("seconds", 1e3),
    )


# ---- on paper ----

# After NCCL's model of a tree all-reduce, src/graph/tuning.cc (ncclTopoTuneModel, commit 01afd20):
# microseconds at the start, for each GPU of a node and for each level of the tree of nodes, and the
# bytes a second that a rank sees, of the protocols LL and LL128. Nodes of 8 GPUs, NVLink inside.
# Without its corrections by size (0.6 to 0.9 of the bandwidth), and with levels that are no whole
# numbers.
GPUS_OF_NODE = 8
TREES = {  # start, NVLink, network (us), bytes/s of one node and of several
    "LL": (4.4, 0.52, 5.0, 14.5e9, 10.5e9),
    "LL128": (4.4, 1.2, 8.5, 42.0e9, 36.0e9),
}
# an all-reduce of 4 KiB between nodes of H100 took 75 us where NCCL's model said 26 us
# (github.com/NVIDIA/nccl/issues/1453)
PESSIMISM = 3.0
# a rank's iteration without exchanges: by autograd in CUDA graphs, float32, as an H200 took it
# (results/trainings_nvidia_h200.csv); ranks have no fused update
PAPER = {
    "chasing 64x64": {"seconds": 6.5e-3, "steps": 131_072, "minibatches": 16, "bytes": 41e3},
    "robot 512x256x128": {"seconds": 44e-3, "steps": 98_304, "minibatches": 20, "bytes": 1.6e6},
}
OTHER_EXCHANGES = 5  # an iteration, as counted: normalisers, advantages, rows that are valid
PAPER_COUNTS = (1, 2, 8, 64, 256, 1000)


def nccl_seconds(num_bytes: float, count: int) -> float:
    """Seconds of an all-reduce over `count` GPUs, by the better of NCCL's two protocols."""
    if count == 1:
        return 0.0
    local = min(count, GPUS_OF_NODE)
    nodes = math.ceil(count / GPUS_OF_NODE)
    times = []
    for name, (start, nvlink, network, one_node, several) in TREES.items():
        hop = nvlink * (1.8 if nodes > 1 and name == "LL" else 1.0)
        latency = start + 2 * ((local - 1) * hop + math.log2(nodes) * network)
        times.append(latency * 1e-6 + num_bytes / (one_node if nodes == 1 else several))
    return min(times)


def paper_efficiency(case: str, count: int, factor: float = 1.0) -> float:
    """The part of its time that a rank of `count` does not exchange; `factor`: times NCCL's
    model.
    """
    values = PAPER[case]
    exchanges = values["minibatches"] * nccl_seconds(values["bytes"], count)
    exchanges += OTHER_EXCHANGES * nccl_seconds(SMALL, count)
    return values["seconds"] / (values["seconds"] + factor * exchanges)


def paper_lines() -> list[tuple[str, ...]]:
    """The table on paper."""
    lines = []
    for case, values in PAPER.items():
        for count in PAPER_COUNTS:
            low, high = (paper_efficiency(case, count, f) for f in (PESSIMISM, 1.0))
            rate = count * values["steps"] / values["seconds"] / 1e9
            nodes = math.ceil(count / GPUS_OF_NODE)
            sent = values["minibatches"] * values["bytes"] * (2 if nodes > 1 else 0) / 1e6
            lines.append(
                (
                    case,
                    f"{count:,}",
                    number(sent) if sent else "0",
                    f"{low:.0%} to {high:.0%}",
                    f"{number(rate * low)} to {number(rate * high)}",
                )
            )
    return lines


PAPER_HEADER = ("case", "GPUs", "MB a node and iteration", "efficiency", "G steps/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print, or print what is on paper."""
    parser = out_parser(__doc__)
    parser.add_argument("--paper", action="store_true", help="the table on paper, nothing runs")
    parser.add_argument("--rounds", type=int, default=3, help="of each number of processes")
    parser.add_argument("--only", choices=CASES, help="one algorithm")
    options = parser.parse_args(arguments)
    if options.paper:
        print(table(PAPER_HEADER, paper_lines()))
        return 0
    lines, rows = [], list[Row]()
    for algorithm in [options.only] if options.only else CASES:
        results: dict[int, list[Costs]] = {count: [] for count in COUNTS}
        for _ in range(options.rounds):
            for count in COUNTS:
                results[count].append(costs(algorithm, count))
        for count, all_ in results.items():
            line = measured_line(algorithm, count, all_)
            lines.append(line)
            names = {"algorithm": algorithm, "processes": str(count), "unit": "ms an iteration"}
            names |= {"num_envs": str(ENVS_OF_RANK * count)}
            names |= dict(zip(HEADER[1:-1], line[1:-1]))
            rows.append(
                machine("cpu")
                | {"threads": "1", "waits": "passive"}
                | names
                | median_columns([each.seconds * 1e3 for each in all_], ".2f")
            )
    print(table(HEADER, lines))
    print(save("scaling", rows, options.out))
    return 0


if __name__ == "__main__":
    run_script(main, measure)
