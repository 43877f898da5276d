"""What an iteration takes that no neighbour can change: operations, waits, bytes, allocations;
compared exactly with a record.

Two ways are counted. `gpu` is the path of a GPU without one: tensors are fake, sizes are a GPU's, a
launch of a Triton kernel counts and computes nothing, and whoever would wait for the device fails.
`cpu` is the real thing with the C kernels, small. The third iteration counts.
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
from gpurl.run.settings import Settings, make_settings
from gpurl.run.setup import make_trainer

RECORD = Path(__file__).with_name("counters.json")
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh"}
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}
# of CUDA: results may differ in their last bits from call to call
# (torch.use_deterministic_algorithms lists them)
UNORDERED = {
    *(
        "bincount",
        "histc",
        "kthvalue",
        "median",
        "nanmedian",
        "put_",
        "scatter_reduce",
        "scatter_reduce_",
        "_embedding_bag",
        "cumsum",
    ),
    *(
        "scatter_add",
        "scatter_add_",
        "index_add",
        "index_add_",
        "index_put",
        "index_put_",
        "grid_sampler_2d_backward",
        "max_unpool2d",
    ),
}
COPIES = {"copy_", "_to_copy", "clone", "_foreach_copy_", "cat", "stack"}
SHORT: dict[str, Any] = {"horizon": 4, "epochs": 1, "minibatches": 2}
REPLAY: dict[str, Any] = {
    "horizon": 2,
    "updates": 4,
    "batch_size": 256,
    "learning_starts": 256,
    "replay_size": 10_000,
}
CASES: dict[
    str, tuple[str, str, dict[str, Any]]
] = {  # name: algorithm, environment, settings over its preset
    "ppo chasing": ("ppo", "chasing", SHORT | {"rollout": "steps"}),
    "ppo chasing persistent": ("ppo", "chasing", SHORT | {"rollout": "persistent"}),
    "ppo chasing gru": ("ppo", "chasing", SHORT | {"network": {"memory": "gru"}}),
    **{
        f"ppo {env}": ("ppo", env, SHORT | {"rollout": "steps"})
        for env in ("cart_pole", "pendulum", "mountain_car")
    },
    "a2c cart_pole": ("a2c", "cart_pole", {"horizon": 4}),
    "pqn cart_pole": ("pqn", "cart_pole", SHORT),
    **{
        f"{name} pendulum": (name, "pendulum", REPLAY)
        for name in ("ddpg", "td3", "sac", "redq", "mod_sac", "fast_td3", "fast_sac")
    },
    **{
        f"{name} cart_pole": (name, "cart_pole", REPLAY)
        for name in ("dqn", "rainbow", "discrete_sac")
    },
    "sac pendulum prioritized": ("sac", "pendulum", REPLAY | {"prioritized": True, "n_step": 3}),
    "vdn two_step_game": ("vdn", "two_step_game", REPLAY),
}
FEW_ENVS = 16  # on a real CPU, so that a case takes a moment


class Count(TorchDispatchMode):
    """Counts what is done inside: operations that launch (views and empty memory are none), and
    what lives and how much at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Count anew."""
        self.operations, self.waits = Counter[str](), Counter[str]()
        self.copied_bytes = self.allocations = self.unordered = 0
        self.live_at_start = self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.waits[name] += name in WAITS
        # sums of whole numbers have no order
        self.unordered += name in UNORDERED and (name != "cumsum" or args[0].is_floating_point())
        result = function(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(result)
        before = {_storage(tensor) for tensor in given}
        new = [tensor for tensor in made if _storage(tensor) not in before]
        for tensor in new:
            self._allocated(tensor)
        if name not in NO_LAUNCH and (new or function._schema.is_mutable):
            self.operations[name] += _copies(*args) if name == "_foreach_copy_" else 1
        if name in COPIES:
            self.copied_bytes += sum(tensor.nbytes for tensor in made or _tensors(args[0]))
        return result

    def launched(self, kernel: str) -> None:
        """A Triton kernel was launched."""
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
    """Launches of a `_foreach_copy_`: one a dtype, unless some lie otherwise than their places."""
    if all(place.stride() == each.stride() for place, each in zip(places, tensors, strict=True)):
        return len({place.dtype for place in places})
    return len(places)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def fake_gpu() -> Iterator[Callable[[Count | None], None]]:
    """The code path of a GPU on fake tensors; what it yields tells which count the launches of
    Triton's kernels go to.
    """
    counts: list[Count | None] = [None]

    def launch(kernel: Any, *_: Any, **__: Any) -> None:
        if counts[0] is not None:
            counts[0].launched(kernel.fn.__name__)

    with (
        mock.patch.object(backend, "choice", "triton"),
        mock.patch.dict(
            "os.environ", {"TRITON_INTERPRET": "1"}
        ),  # what the choice asks for on a CPU; the kernels are imported by now
        mock.patch.object(triton.runtime.jit.JITFunction, "run", launch),
        FakeTensorMode(),
        no_host_syncs(),
    ):
        yield lambda count: counts.__setitem__(0, count)


def measure(way: str, case: str) -> dict[str, int | float]:
    """The numbers of an iteration of `case` on the path `way`, gpu or cpu."""
    algorithm, env, changes = CASES[case]
    if way == "cpu":
        changes = (
            changes
            | {"num_envs": FEW_ENVS}
            | ({"learning_starts": 32, "batch_size": 32} if "batch_size" in changes else {})
        )
    settings = make_settings(
        algorithm, env, **({"threads": 1, "eval_episodes": 0} | changes)
    )  # imports all kernels that it needs
    if way == "cpu":
        return count_iteration(settings, lambda _: None)
    with fake_gpu() as launches_go_to:
        return count_iteration(settings, launches_go_to)


def count_iteration(
    settings: Settings, launches_go_to: Callable[[Count | None], None]
) -> dict[str, int | float]:
    """The third iteration of a training; from the second on it is known what is freed, so that all
    growth shows.
    """
    trainer = make_trainer(settings, torch.device("cpu"))
    trainer.start()
    config = trainer.algorithm.config
    updates = config.updates if hasattr(config, "updates") else config.epochs * config.minibatches
    parts = {
        "collect": ("operations_a_step", config.horizon),
        "prepare": ("operations_to_prepare", 1),
    }
    parts |= {"learn": ("operations_an_update", updates)}
    trainer.iterate()
    count, found = Count(), dict[str, int | float]()
    for _ in range(2):
        count.begin()
        for part, (name, pieces) in parts.items():
            launches_go_to(count)
            with count:
                if part == "collect":
                    trainer.engine.collect()
                elif part == "prepare":
                    data = trainer.engine.prepare()[0]
                else:
                    trainer.engine.learn(data)
            launches_go_to(None)
            found[name] = round(count.operations.total() / pieces, 2)
            count.operations.clear()
        del data
        trainer.engine.buffer.clear()
    found |= {
        "waits": count.waits.total(),
        "unordered": count.unordered,
        "copied_bytes": count.copied_bytes,
        "allocations": count.allocations,
    }
    return found | {
        "peak_bytes": count.peak_bytes - count.live_at_start,
        "grown_bytes": count.live_bytes - count.live_at_start,
    }


def recorded() -> dict[str, Any]:
    """The record: `torch`, of which it is, and the numbers of each case."""
    return json.loads(RECORD.read_text())


def write(found: dict[str, Any], path: Path) -> None:
    """One line a case, so that a change shows which."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    """Compare with the record, or write it anew; 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="take what is counted now as the record"
    )
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    before = recorded() if RECORD.exists() else {}
    found: dict[str, Any] = {"torch": torch.__version__.partition("+")[0]}
    names = [f"{way} {case}" for way in ("gpu", "cpu") for case in CASES]
    for name in names:
        if options.only not in name:
            continue
        found[name] = measure(*name.split(" ", 1))
        old = before.get(name, {})
        changes = [
            f"{key} {old.get(key)} -> {value}"
            for key, value in found[name].items()
            if value != old.get(key)
        ]
        print(f"{name}: {', '.join(changes) or 'as recorded'}")
    if options.write:
        both = before | found
        write({name: both[name] for name in ("torch", *names) if name in both}, RECORD)
        return 0
    return int(any(before.get(name) != value for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
