"""How many operations and launches an iteration takes on a GPU, counted on a CPU: launches of Triton's kernels and torch's own operations.

Nothing is computed: tensors are fake, and a kernel's launch only counts. Views are no launches.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpurl.algorithms import make_algorithm
from gpurl.config import make_settings
from gpurl.envs.registry import make_env
from gpurl.kernels import backend
from gpurl.kernels.backend import no_host_looks
from gpurl.trainer import Trainer
from tests.fake_graphs import storage, tensors
from tests.small_runs import small_settings

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh"}


class Launches(TorchDispatchMode):
    """Counts what a GPU would be given: launches of kernels, and operations on its tensors that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(result)
        is_new = not {storage(tensor) for tensor in made} <= {storage(tensor) for tensor in given}
        name = function.overloadpacket.__name__
        if name not in ALLOCATIONS and (is_new or function._schema.is_mutable):
            # of a list the tensors of one dtype are copied in one launch, as RolloutBuffer gives them on a GPU
            self.count[name] += len({tensor.dtype for tensor in tensors(args[0])}) if name == "_foreach_copy_" else 1
        return result


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counting = Launches()
    monkeypatch.setattr(backend, "choice", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # what the choice asks for on a CPU; Triton is imported and compiles, but nothing is run

    def launch(self: Any, *_: Any, **__: Any) -> None:
        counting.count[self.fn.__name__] += 1

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", launch)
    return counting


def make_trainer(algorithm: str, env: str, **shape: Any) -> Trainer:
    settings = make_settings(algorithm, env, num_envs=32, **shape)
    made = make_env(env, 32, "cpu", 0)
    model = make_algorithm(algorithm, settings.algorithm_config, made.single_observation_space, made.single_action_space, 32)
    return Trainer(settings, model, made, None, Path("unused"))


def of_an_iteration(launches: Launches, algorithm: str, env: str, **shape: Any) -> list[Counter[str]]:
    """What collecting a rollout takes, preparing it and learning from it, once the first is over."""
    counts = []
    with FakeTensorMode(), no_host_looks():
        trainer = make_trainer(algorithm, env, **shape)
        trainer.start()
        trainer.iterate()
        data: dict[str, Any] = {}
        for part in (trainer.collect, lambda: data.update(trainer.prepare()[0]), lambda: trainer.learn(data)):
            launches.count = Counter()
            with launches:
                part()
            counts.append(launches.count)
    return counts


@pytest.mark.parametrize(
    ("algorithm", "env", "most", "changes"),
    [
        ("sac", "pendulum", 108, {}),
        ("td3", "pendulum", 80, {}),
        ("redq", "pendulum", 81, {"policy_delay": 4}),
        ("fast_sac", "pendulum", 131, {}),
        ("dqn", "cart_pole", 62, {}),
        ("rainbow", "cart_pole", 240, {}),
    ],
)
def test_an_update_from_a_replay_takes_few(algorithm: str, env: str, most: int, changes: dict[str, Any], launches: Launches) -> None:
    small = small_settings(algorithm)
    networks = {name: {"hidden": [64, 64]} for name in ("network", "actor_network", "critic_network") if name in small}
    collected, stored, learnt = of_an_iteration(launches, algorithm, env, horizon=2, **(small | networks | changes))
    updates = small["updates"]
    print(f"{algorithm}: {collected.total() / 2:.1f} a step, {stored.total()} to store, {learnt.total() / updates:.1f} an update: {learnt}")
    assert learnt.total() / updates <= most


SMALL_PPO = {"horizon": 8, "epochs": 2, "minibatches": 4, "total_steps": 10_000}


@pytest.mark.parametrize("env", ["chasing", "cart_pole", "pendulum"])
def test_the_fused_path_takes_few(env: str, launches: Launches) -> None:
    collected, prepared, learnt = of_an_iteration(launches, "ppo", env, rollout="steps", **SMALL_PPO)
    a_step, a_minibatch = collected.total() / 8, learnt.total() / 8
    print(f"{env}: {a_step:.1f} a step, {prepared.total()} to prepare, {a_minibatch:.1f} a minibatch: {learnt}, {prepared}")
    assert a_step <= 20
    assert prepared.total() <= 130
    assert a_minibatch <= 60


def test_a_rollout_by_one_kernel_takes_a_launch_and_what_counts_for_it(launches: Launches) -> None:
    collected, *_ = of_an_iteration(launches, "ppo", "chasing", **SMALL_PPO)
    assert collected["rollout_kernel"] == 1
    assert collected.total() <= 6
