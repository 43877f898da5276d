"""Counts the operations, host syncs, copied bytes and allocations of an iteration, which do not
depend on the load of the machine, and compares them with a record.

There are two paths. `gpu` is that of a GPU, on fake tensors with the sizes of a GPU: a launch of a
Triton kernel is counted and computes nothing, and a host sync fails. `cpu` is the real path with C
kernels, at small sizes. The third iteration is counted.
"""

import argparse
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpurl.kernels import backend
from gpurl.kernels.backend import no_host_syncs
from gpurl.nn.actor_critic import MEMORIES
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import make_trainer

RECORD = Path(__file__).with_name("counters.json")
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh"}
WAITS = {
    "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2",
    "unique_dim",
}  # fmt: skip
# on CUDA the last bits of their results may differ from call to call
# (torch.use_deterministic_algorithms lists them)
UNORDERED = {
    "bincount", "histc", "kthvalue", "median", "nanmedian", "put_", "scatter_reduce",
    "scatter_reduce_", "_embedding_bag", "cumsum", "scatter_add", "scatter_add_", "index_add",
    "index_add_", "index_put", "index_put_", "grid_sampler_2d_backward", "max_unpool2d",
}  # fmt: skip
COPIES = {"copy_", "_to_copy", "clone", "_foreach_copy_", "cat", "stack"}
SHORT: dict[str, Any] = {"horizon": 4, "epochs": 1, "minibatches": 2}
STEPPED = SHORT | {"rollout": "steps", "update": "autograd"}
REPLAY: dict[str, Any] = {
    "horizon": 2,
    "updates": 4,
    "batch_size": 256,
    "learning_starts": 256,
    "replay_size": 10_000,
}
# name: algorithm, environment, settings over its preset
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo chasing": ("ppo", "chasing", STEPPED),
    "ppo chasing fused": ("ppo", "chasing", SHORT),
    "ppo chasing wide": ("ppo", "chasing", SHORT | {"network": {"hidden": [512, 256, 128]}}),
    **{
        f"ppo chasing {memory}": ("ppo", "chasing", SHORT | {"network": {"memory": memory}})
        for memory in MEMORIES
    },
    **{f"ppo {env}": ("ppo", env, STEPPED) for env in ("cart_pole", "pendulum", "mountain_car")},
    "a2c cart_pole": ("a2c", "cart_pole", {"horizon": 4}),
    "pqn cart_pole": ("pqn", "cart_pole", SHORT),
    **{
        f"{name} pendulum": (name, "pendulum", REPLAY)
        for name in ("ddpg", "td3", "sac", "redq", "mod_sac", "fast_td3", "fast_sac", "flash_sac")
    },
    # a target network that moves once an iteration, as by the preset, which has more updates
    **{
        f"{name} cart_pole": (name, "cart_pole", REPLAY | {"target_interval": REPLAY["updates"]})
        for name in ("dqn", "rainbow")
    },
    "discrete_sac cart_pole": ("discrete_sac", "cart_pole", REPLAY),
    "sac pendulum prioritized": ("sac", "pendulum", REPLAY | {"prioritized": True, "n_step": 3}),
    "vdn two_step_game": ("vdn", "two_step_game", REPLAY),
    # members side by side take what one takes; sac learns in its first iteration, and is stacked
    **{
        f"{name} {env}, {count} members": (
            name,
            env,
            changes | {"num_envs": 128, "population": count, "stack": "on"},
        )
        for name, env, changes in (("ppo", "chasing", STEPPED), ("sac", "pendulum", REPLAY))
        for count in (2, 4)
    },
}
CPU_ENVS = 16  # a case on the real CPU takes a moment


class Count(TorchDispatchMode):
    """Counts operations that launch a kernel (views and empty tensors do not), host syncs, copies,
    allocations and live memory in its context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Reset the counters."""
        self.operations, self.waits = Counter[str](), Counter[str]()
        self.copied_bytes = self.allocations = self.unordered = 0
        self.live_at_start = self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.waits[name] += name in WAITS
        # sums of whole numbers do not depend on the order
        self.unordered += name in UNORDERED and (name != "cumsum" or args[0].is_floating_point())
        result = function(*args, **(kwargs or {}))
        results = _tensors(result)
        before = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        new = [tensor for tensor in results if _storage(tensor) not in before]
        for tensor in new:
            self._allocated(tensor)
        if name not in NO_LAUNCH and (new or function._schema.is_mutable):
            self.operations[name] += _copies(*args) if name == "_foreach_copy_" else 1
        if name in COPIES:
            self.copied_bytes += sum(tensor.nbytes for tensor in results or _tensors(args[0]))
        return result

    def launched(self, kernel: str) -> None:
        """Count the launch of a Triton kernel."""
        self.operations[kernel] += 1

    def _allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.allocations += 1
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.live_bytes -= size


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _copies(places: list[Tensor], tensors: list[Tensor], *_: Any) -> int:
    """Launches of a `_foreach_copy_`: one for each dtype, or one for each tensor if strides
    differ.
    """
    if all(place.stride() == each.stride() for place, each in zip(places, tensors, strict=True)):
        return len({place.dtype for place in places})
    return len(places)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def fake_gpu() -> Iterator[Callable[[Count | None], None]]:
    """The code path of a GPU on fake tensors. It yields a function that sets the Count for the
    launches of Triton kernels.
    """
    counts: list[Count | None] = [None]

    def launch(kernel: Any, *_: Any, **__: Any) -> None:
        if counts[0] is not None:
            counts[0].launched(kernel.fn.__name__)

    with (
        mock.patch.object(backend, "choice", "triton"),
        # `use_triton` requires it on a CPU; the kernels are imported already, without it
        mock.patch.dict("os.environ", {"TRITON_INTERPRET": "1"}),
        mock.patch.object(triton.runtime.jit.JITFunction, "run", launch),
        # members are put side by side by their memory, of which a fake tensor has none
        mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata),
        FakeTensorMode(),
        no_host_syncs(),
    ):
        yield lambda count: counts.__setitem__(0, count)


def measure(path: str, case: str) -> dict[str, int | float]:
    """The counts of an iteration of `case` on `path`, "gpu" or "cpu"."""
    algorithm, env, changes = CASES[case]
    if path == "cpu":
        changes = changes | {"num_envs": CPU_ENVS}
        if "batch_size" in changes:
            changes |= {"learning_starts": 32, "batch_size": 32}
    # this imports all kernels of the case
    settings = make_settings(algorithm, env, **({"threads": 1, "eval_episodes": 0} | changes))
    if path == "cpu":
        return count_iteration(settings, lambda _: None)
    with fake_gpu() as launches_go_to:
        return count_iteration(settings, launches_go_to)


def count_iteration(
    settings: Settings, launches_go_to: Callable[[Count | None], None]
) -> dict[str, int | float]:
    """The counts of the third iteration of a training. The second one is watched too, to know which
    memory the third one frees.
    """
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    config = trainer.algorithm.config
    updates = config.updates if hasattr(config, "updates") else config.epochs * config.minibatches
    phases = {
        "collect": ("operations_a_step", config.horizon),
        "prepare": ("operations_to_prepare", 1),
        "learn": ("operations_an_update", updates),
    }
    trainer.iterate()

    # two iterations, phase by phase
    count = Count()
    counts = dict[str, int | float]()
    for _ in range(2):
        count.begin()
        for phase, (name, repeats) in phases.items():
            launches_go_to(count)
            with count:
                if phase == "collect":
                    trainer.engine.collect()
                elif phase == "prepare":
                    data = trainer.engine.prepare()[0]
                else:
                    trainer.engine.learn(data)
            launches_go_to(None)
            counts[name] = round(count.operations.total() / repeats, 2)
            count.operations.clear()
        del data
        trainer.engine.buffer.clear()
    return counts | {
        "waits": count.waits.total(),
        "unordered": count.unordered,
        "copied_bytes": count.copied_bytes,
        "allocations": count.allocations,
        "peak_bytes": count.peak_bytes - count.live_at_start,
        "grown_bytes": count.live_bytes - count.live_at_start,
    }


def recorded() -> dict[str, Any]:
    """The record: the version of `torch`, and the counts of each case."""
    return json.loads(RECORD.read_text())


def write(record: dict[str, Any], path: Path) -> None:
    """Write a record with one line for each case, so that a diff shows which case changed."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Compare with the record, or write a new one; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the present counts as the record"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases with TEXT in their name")
    options = parser.parse_args()
    before = recorded() if RECORD.exists() else {}
    now: dict[str, Any] = {"torch": torch.__version__.partition("+")[0]}
    names = [f"{path} {case}" for path in ("gpu", "cpu") for case in CASES]
    for name in names:
        if options.only not in name:
            continue
        now[name] = measure(*name.split(" ", 1))
        old = before.get(name, {})
        changes = [
            f"{key} {old.get(key)} -> {value}"
            for key, value in now[name].items()
            if value != old.get(key)
        ]
        print(f"{name}: {', '.join(changes) or 'as recorded'}")
    if options.write:
        merged = before | now
        write({name: merged[name] for name in ("torch", *names) if name in merged}, RECORD)
        return 0
    return int(any(before.get(name) != value for name, value in now.items()))


if __name__ == "__main__":
    sys.exit(main())
