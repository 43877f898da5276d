"""Whole iterations on a GPU: graphs equal the loop, one kernel equals the steps, nothing waits,
seeds repeat.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gpurl.algorithms.on_policy import OnPolicy
from gpurl.engine.persistent import PersistentRollout
from gpurl.run.presets.find import preset
from gpurl.run.settings import make_settings
from gpurl.run.setup import choose_device, make_trainer
from gpurl.run.trainer import Trainer
from tests.conftest import FAKE_GPU
from tests.engines import graph_level, running_state
from tests.small_runs import OFF_POLICY, assert_same, small_settings, start, state_of

pytestmark = pytest.mark.gpu
# on a stand-in in small sizes; the rest of what a GPU does is the same
NUM_ENVS = 8 if FAKE_GPU else 512
ITERATIONS = 5 if FAKE_GPU else 10
SHAPE: dict[str, Any] = {
    "num_envs": NUM_ENVS,
    "horizon": 2 if FAKE_GPU else 16,
    "minibatches": 2,
    "network": {"hidden": [16, 16] if FAKE_GPU else [64, 64]},
    "total_steps": 10_000_000,
} | ({"epochs": 1} if FAKE_GPU else {})

SMALLEST = {"updates": 2, "batch_size": 16}
DISTRIBUTIONAL = ("rainbow", "fast_td3", "fast_sac", "flash_sac")


def trainer_of(env: str, algorithm: str = "ppo", **changes: Any) -> Trainer:
    shape = dict(SHAPE)
    if algorithm == "a2c":
        shape["minibatches"] = 1
        shape.pop("epochs", None)
    if algorithm in OFF_POLICY:
        shape = {
            "num_envs": NUM_ENVS,
            "horizon": 2,
            "total_steps": 10_000_000,
            **small_settings(algorithm, rows=2 * NUM_ENVS),
        }
        if FAKE_GPU:
            shape |= {name: value for name, value in SMALLEST.items() if name in shape}
            if algorithm in DISTRIBUTIONAL:
                shape["atoms"] = 5
    torch.manual_seed(0)
    trainer = make_trainer(
        make_settings(algorithm, env, **{**shape, **changes}), choose_device("cuda")
    )
    trainer.folder = Path("unused")
    trainer.start()
    return trainer


def results(trainer: Trainer, iterations: int = ITERATIONS) -> dict[str, Any]:
    for _ in range(iterations):
        trainer.iterate()
    torch.cuda.synchronize()
    state = running_state(trainer.engine)
    return {name: state[name] for name in ("algorithm", "env", "obs", "statistics")}


def largest_difference(one: Any, other: Any) -> float:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return max(
        float((a.double() - b.double()).abs().max())
        for a, b in pairs
        if isinstance(a, torch.Tensor)
    )


@pytest.mark.parametrize("level", ["full", "policy"])
@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("chasing", {}),
        ("chasing", {"env_options": {"dim": 7}}),
        ("chasing", {"network": {"hidden": [160, 96], "activation": "elu"}}),
        ("cart_pole", {"schedule": "linear"}),
        ("pendulum", {"algorithm": "a2c"}),
        *(
            ("acrobot", {"network": {"memory": memory, "hidden": [64]}})
            for memory in ("gru", "lstm", "mingru")
        ),
        ("two_step_game", {"algorithm": "tests.joint_ppo"}),
        ("pendulum", {"algorithm": "sac", "n_step": 3}),
        ("chasing", {"algorithm": "redq", "prioritized": True}),
        ("chasing", {"algorithm": "fast_td3", "storage": "bfloat16"}),
        ("pendulum", {"algorithm": "mod_sac"}),
        ("pendulum", {"algorithm": "flash_sac"}),
        ("cart_pole", {"algorithm": "rainbow"}),
        ("two_step_game", {"algorithm": "vdn"}),
    ],
    ids=str,
)
def test_graphs_do_what_the_loop_does(env: str, changes: dict[str, Any], level: str) -> None:
    trainer = trainer_of(env, graph=level, rollout="steps", **changes)
    got, expected = (
        results(trainer),
        results(trainer_of(env, graph="off", rollout="steps", **changes)),
    )
    assert graph_level(trainer.engine) == level
    assert trainer.engine.notes[-1].endswith(f"CUDA graphs {level}")
    assert not any("no C:" in note for note in trainer.engine.notes)
    difference = largest_difference(got, expected)
    print(
        f"{env} {level} {changes}: largest difference to the loop after {ITERATIONS} iterations "
        f"{difference:.2e}"
    )
    assert difference == 0.0


def test_a_captured_persistent_rollout_is_the_same_as_without_a_graph() -> None:
    runs = [trainer_of("chasing", graph=graph, rollout="persistent") for graph in ("full", "off")]
    assert largest_difference(*(results(run) for run in runs)) == 0.0
    assert [graph_level(run.engine) for run in runs] == ["full", "off"]
    assert all(run.engine.name.startswith("persistent rollout") for run in runs)


@pytest.mark.parametrize("env", ["chasing", "cart_pole", "pendulum"])
def test_one_kernel_plays_what_the_steps_play(env: str) -> None:
    """The first rollouts, before rounding makes other episodes of them; products are three TF32
    ones here and float32 there.
    """
    columns = []
    for rollout in ("persistent", "steps"):
        trainer = trainer_of(env, graph="off", rollout=rollout)
        assert isinstance(trainer.engine, PersistentRollout) == (rollout == "persistent")
        trainer.engine.collect()
        found = {name: column.clone() for name, column in trainer.engine.buffer.columns.items()}
        used = found["truncated"].clone()
        used[-1] = True
        algorithm = trainer.algorithm
        assert isinstance(algorithm, OnPolicy)
        found["final_value"] = torch.where(used, algorithm.final_values(trainer.engine.buffer), 0.0)
        columns.append(
            {
                name: found[name]
                for name in (
                    "obs",
                    "action",
                    "log_prob",
                    "value",
                    "reward",
                    "final_value",
                    "terminated",
                    "truncated",
                )
            }
        )
    for name, column in columns[0].items():
        torch.testing.assert_close(
            column,
            columns[1][name],
            rtol=1e-3,
            atol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    "env",
    ["chasing", "cart_pole", "pendulum", "mountain_car", "acrobot", "mountain_car_continuous"],
)
@pytest.mark.parametrize("rollout", ["auto", "steps"])
def test_an_iteration_never_waits_for_the_device(env: str, rollout: str) -> None:
    trainer = trainer_of(env, graph="off", rollout=rollout)
    results(trainer, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [("fast_sac", "chasing"), ("td3", "pendulum"), ("rainbow", "cart_pole"), ("pqn", "cart_pole")],
)
def test_an_iteration_from_a_replay_never_waits_either(algorithm: str, env: str) -> None:
    changes = {"network": {"hidden": [64]}} if algorithm == "pqn" else {}
    trainer = trainer_of(env, algorithm, graph="off", **changes)
    results(trainer, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert trainer.iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sac_learns_pendulum_in_graphs() -> None:
    settings = preset("sac", "pendulum") | {"total_steps": 40_000, "graph": "full"}
    if FAKE_GPU:
        settings |= {"num_envs": NUM_ENVS, "learning_starts": 32, "batch_size": 32}
    trainer = trainer_of("pendulum", "sac", **settings)
    iterations = 10 if FAKE_GPU else 40_000 // 64
    for _ in range(iterations):
        trainer.iterate()
    assert graph_level(trainer.engine) == "full"
    if FAKE_GPU:
        return
    newest_return, _, _ = trainer.engine.statistics.newest
    assert float(newest_return.mean()) > -300.0


def test_the_same_seed_gives_the_same_run() -> None:
    assert largest_difference(results(trainer_of("chasing")), results(trainer_of("chasing"))) == 0.0


@pytest.mark.parametrize(
    ("algorithm", "env", "shape"),
    [
        ("ppo", "chasing", "--num-envs 512 --horizon 16"),
        ("rainbow", "cart_pole", "--num-envs 64 --learning-starts 1024 --replay-size 16384"),
        (
            "sac",
            "pendulum",
            "--num-envs 64 --learning-starts 1024 --replay-size 16384 --prioritized",
        ),
    ],
)
def test_deterministic_processes_end_in_the_same_bits(
    algorithm: str, env: str, shape: str, tmp_path: Path
) -> None:
    steps = 40_000
    if FAKE_GPU:
        steps = 160
        shape = "--num-envs 16 --horizon 4 --network.hidden 16 --epochs 1"
        if algorithm != "ppo":
            shape = "--num-envs 16 --learning-starts 64 --batch-size 16"
            shape += " --atoms 5" if algorithm in DISTRIBUTIONAL else ""
    options = f"--deterministic --device cuda --total-steps {steps} --eval-episodes 0 --quiet"
    words = ["train", algorithm, env, *options.split(), *shape.split()]
    module = "tests.fake_cuda" if FAKE_GPU else "gpurl"
    processes = [start([*words, "--run-dir", str(tmp_path / name)], module) for name in "ab"]
    message = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], message
    assert_same(*(state_of(tmp_path / name) for name in "ab"))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_less_precise_products_stay_close(precision: str) -> None:
    exact, rounded = (
        results(trainer_of("chasing", precision=each), 2)["algorithm"]["model"]
        for each in ("float32", precision)
    )
    change = max(
        float((one - other).norm() / one.norm())
        for one, other in zip(exact.values(), rounded.values())
        if one.numel() > (100 if FAKE_GPU else 1000)
    )
    print(f"{precision}: weights differ by {change:.2e} after 2 iterations")
    assert change < 0.1
    assert change > 0.0 or FAKE_GPU  # a CPU has no TF32


def test_chasing_is_learned() -> None:
    shape = {} if FAKE_GPU else {"num_envs": 4096, "horizon": 32, "minibatches": 4}
    trainer = trainer_of("chasing", **shape, total_steps=20_000_000)
    first = last = 0.0
    for number in range(6 if FAKE_GPU else 150):
        trainer.iterate()
        if number in (20, 149):
            newest_return, _, _ = trainer.engine.statistics.newest
            first, last = last, float(newest_return.mean())
    print(f"mean return {first:.2f} early, {last:.2f} after 20 M steps")
    assert last > first + 2.0 or FAKE_GPU
