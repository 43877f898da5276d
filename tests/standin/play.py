"""Plays every algorithm on its tasks on the GPU that computes nothing, and writes what it launched:
`python -m tests.standin.play LIBRARIES RESULT [NAME ...]`, with names only these cases.
"""

import importlib
import itertools
import json
import pkgutil
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from tests.standin import gpu as stand_in_gpu

Settings = dict[str, Any]
ENVS = "tests.standin.envs"
MAX_ITERATIONS = 10  # until graphs are captured
EVEN: Settings = {"num_envs": 64, "horizon": 2}
# Triton makes a constant of an integer that is 1, and another kernel for multiples of 16
ODD: Settings = {"num_envs": 3, "horizon": 3}
ONE: Settings = {"num_envs": 1, "horizon": 1}
PPO: Settings = {"epochs": 2, "minibatches": 2, "network": {"hidden": [16, 16]}}
ONE_BATCH = PPO | {"minibatches": 1}
REPLAY: Settings = {
    "updates": 2,
    "batch_size": 32,
    "learning_starts": 32,
    "replay_size": 4096,
}
ONE_ROW = REPLAY | {"batch_size": 1, "learning_starts": 1, "replay_size": 3}
FIVE_ROWS = REPLAY | {"batch_size": 5, "learning_starts": 5, "replay_size": 30}


def cases() -> dict[str, tuple[str, str, Settings]]:
    """name: algorithm, environment, settings over its preset."""
    return on_policy_cases() | off_policy_cases() | population_cases()


def on_policy_cases() -> dict[str, tuple[str, str, Settings]]:
    """Of PPO, with each option that takes another kernel or another form of one, A2C and PQN."""
    every = dict[str, tuple[str, str, Settings]]()
    tasks: list[tuple[str, str, Settings]] = [
        ("chasing", "", EVEN | PPO),
        ("chasing", " discrete", EVEN | PPO | {"env_options": {"discrete": True}}),
        ("cart_pole", ", 3 envs", ODD | ONE_BATCH),
        ("pendulum", "", EVEN | PPO),
        ("pendulum", ", 1 env", ONE | ONE_BATCH | {"normalize_advantage": "none"}),
    ]
    for env, label, settings in tasks:
        for rollout in ("steps", "persistent"):
            every[f"ppo {env} {rollout}{label}"] = "ppo", env, settings | {"rollout": rollout}
    plain = EVEN | PPO
    variants: dict[str, tuple[str, Settings]] = {
        "tf32": ("chasing", {"precision": "tf32", "network": {"hidden": [128, 64]}}),
        "bf16": ("chasing", {"precision": "bf16"}),
        "rollouts in bf16": ("chasing", {"storage": "bfloat16", "nan": "reset-envs"}),
        "autograd": ("chasing", {"update": "autograd", "rollout": "steps"}),
        "wide": ("chasing", {"network": {"hidden": [128, 80]}, "clip_range_value": 0.2}),
        "wide squashed": ("pendulum", {"network": {"hidden": [72]}, "squash": True}),
        "wide tf32": ("cart_pole", {"network": {"hidden": [80]}, "precision": "tf32"}),
        "asynchronous": ("chasing", {"asynchronous": True, "graph": "policy"}),
        "squashed": ("pendulum", {"squash": True}),
        "value clip": ("chasing", {"clip_range_value": 0.2, "rollout": "steps"}),
        "shared": ("cart_pole", {"network": {"hidden": [16, 16], "shared": True}}),
        "elu": ("cart_pole", {"network": {"hidden": [16], "activation": "elu"}}),
        "memory": ("pendulum", {"network": {"hidden": [16], "memory": "gru"}}),
        "lstm": ("pendulum", {"network": {"hidden": [16], "memory": "lstm"}}),
        "mingru": ("pendulum", {"network": {"hidden": [16], "memory": "mingru"}}),
        "nothing normalised": (
            "cart_pole",
            {"normalize_obs": False, "normalize_value": False, "update": "autograd"},
        ),
        "other losses": (
            "mountain_car_continuous",
            {"normalize_advantage": "minibatch", "entropy_coef": 0.01, "weight_decay": 0.01},
        ),
        "several choices": (f"{ENVS}:SeveralChoices", {}),
        "valid": (f"{ENVS}:LateRestarts", {"clip_range_value": 0.2}),
        "valid, resets": (f"{ENVS}:LateRestarts", {"nan": "reset-envs"}),
        "images": (f"{ENVS}:Images", {"update": "autograd"}),
        "privileged": (f"{ENVS}:Privileged", {}),
        "own acting": ("acrobot", {"update": "autograd"}),
        "graphs of the policy": ("chasing", {"graph": "policy"}),
        "graphs of the policy, valid": (f"{ENVS}:LateRestarts", {"graph": "policy"}),
    }
    every |= {f"ppo {name}": ("ppo", env, plain | more) for name, (env, more) in variants.items()}
    every |= {
        "a2c": ("a2c", "cart_pole", plain | {"epochs": 1, "minibatches": 1}),
        "pqn": ("pqn", "cart_pole", plain),
        "pqn, 1 env": ("pqn", "cart_pole", ONE | ONE_BATCH),
    }
    return every


def off_policy_cases() -> dict[str, tuple[str, str, Settings]]:
    """All that replay, and their options."""
    every = dict[str, tuple[str, str, Settings]]()
    tasks = dict.fromkeys(("ddpg", "td3", "sac", "redq", "mod_sac"), "pendulum")
    tasks |= dict.fromkeys(("fast_td3", "fast_sac", "flash_sac"), "chasing")
    tasks |= dict.fromkeys(("dqn", "rainbow", "discrete_sac"), "cart_pole")
    for algorithm, env in (tasks | {"vdn": "two_step_game"}).items():
        # every update is one of the actor, too
        delay = {"policy_delay": 1} if algorithm in ("redq", "fast_sac", "flash_sac") else {}
        every[algorithm] = algorithm, env, EVEN | REPLAY | delay
        if algorithm in ("ddpg", "sac", "dqn", "rainbow", "vdn"):  # the others are as these
            every[f"{algorithm}, 1 row"] = algorithm, env, ONE | ONE_ROW | delay
    return every | {
        "bc": ("bc", "pendulum", EVEN | REPLAY),
        "bc discrete": ("bc", "cart_pole", EVEN | REPLAY),
        "sac, 5 rows": ("sac", "pendulum", ODD | FIVE_ROWS),
        "rainbow, 5 rows": ("rainbow", "cart_pole", ODD | FIVE_ROWS),
        "sac prioritized": ("sac", "pendulum", EVEN | REPLAY | {"prioritized": True, "n_step": 3}),
        "sac bf16": ("sac", "pendulum", EVEN | REPLAY | {"storage": "bfloat16"}),
        "dqn images": ("dqn", "catch", EVEN | REPLAY),
        "sac images": ("sac", "tests.picture_envs:Pointing", EVEN | REPLAY),
        "sac valid": ("sac", f"{ENVS}:LateRestarts", EVEN | REPLAY | {"n_step": 3}),
        "sac returns": ("sac", "pendulum", EVEN | REPLAY | {"fit_returns": 0.1}),
        "sac, graphs of the policy": ("sac", "pendulum", EVEN | REPLAY | {"graph": "policy"}),
        "td3 valid prioritized": (
            "td3",
            f"{ENVS}:LateRestarts",
            EVEN | REPLAY | {"prioritized": True},
        ),
        "dqn quantiles": ("dqn", "cart_pole", EVEN | REPLAY | {"quantiles": 5, "num_critics": 2}),
    }


def population_cases() -> dict[str, tuple[str, str, Settings]]:
    """Of members side by side: kernels with an axis of members, and what torch batches."""
    every = on_policy_cases() | off_policy_cases()
    names = [
        *("ppo autograd", "ppo memory", "ppo lstm", "ppo squashed", "ppo value clip", "ppo valid"),
        *("ppo images", "a2c", "pqn", "ddpg", "td3", "sac", "mod_sac", "fast_td3", "fast_sac"),
        *("dqn", "rainbow", "discrete_sac", "vdn", "rainbow, 5 rows", "sac, 5 rows", "sac, 1 row"),
        *("sac prioritized", "sac valid", "td3 valid prioritized"),
    ]
    return {
        f"{name}, {count} members": (algorithm, env, settings | {"population": count})
        for name, count in zip(names, itertools.cycle((2, 3)))
        for algorithm, env, settings in [every[name]]
    }


def play(name: str, folder: Path) -> list[str]:
    """The kernels that `name` launches: iterations until its graphs are captured and replayed, an
    evaluation, one observation by itself, and what the log reads.
    """
    import torch

    from gpurl.engine.graphs import WARM_UPS, CudaGraphs
    from gpurl.engine.statistics import to_host
    from gpurl.envs.registry import make_env
    from gpurl.policy import Policy
    from gpurl.run import evaluator
    from gpurl.run.settings import make_settings
    from gpurl.run.setup import choose_device, evaluation_env, make_trainer
    from tests.small_runs import some_demonstrations

    # begin
    gpu = stand_in_gpu.gpu
    gpu.reset()
    algorithm, env, values = cases()[name]
    if algorithm == "bc":
        values |= {"dataset": some_demonstrations(folder, make_env(env, 1, "cpu", 0))}
    device = choose_device("cuda")
    settings = make_settings(algorithm, env, device="cuda", eval_episodes=4, **values)
    trainer = make_trainer(settings, device)
    if values.get("population"):
        assert trainer.engine.name.startswith("stacked"), trainer.engine.notes
    trainer.start()

    # iterate: what is replayed is what was launched before the capture
    of_iterations = list[list[stand_in_gpu.Launch]]()
    while not getattr(trainer.engine.stages, "level", ""):
        began = len(gpu.launches)
        metrics = trainer.iterate()
        of_iterations.append(gpu.launches[began:])
        assert len(of_iterations) < MAX_ITERATIONS
    *_, launched, replayed = of_iterations
    level = "policy" if values.get("graph") == "policy" else "full"
    assert trainer.engine.notes[-1].endswith(f"CUDA graphs {level}"), trainer.engine.notes
    if rollout := values.get("rollout"):
        assert ("persistent" in trainer.engine.name) == (rollout == "persistent")
    assert [launch.what for launch in replayed] == [launch.what for launch in launched]

    # evaluate until these graphs are captured and replayed, and read
    eval_env = evaluation_env(settings, device)
    assert eval_env is not None
    policy_state = trainer.algorithm.initial_policy_state(eval_env.num_envs)
    graphs = CudaGraphs(device) if eval_env.graph_safe else None
    player = evaluator.Player(
        evaluator.greedy(trainer.algorithm), eval_env, 4, policy_state, graphs
    )
    # a step is as the one before it, so two are played where a GPU plays sixteen
    with gpu.waiting(), mock.patch.object(evaluator, "LOOK_EVERY", 2):
        for _ in range(WARM_UPS + 3):
            player.play()
        assert not player.obstacle
        to_host(metrics | trainer.engine.statistics.metrics())
    shape = trainer.algorithm.observation_space.shape
    dtype = torch.uint8 if trainer.algorithm.reads_bytes else torch.float32
    Policy(trainer.algorithm, {}).act(torch.zeros(shape, dtype=dtype, device=device))
    return sorted({launch.kernel for launch in gpu.launches})


def kernels() -> list[str]:
    """All kernels of the package: what is launched, not what kernels call."""
    from triton.runtime.jit import JITFunction

    import gpurl.kernels

    found = set[str]()
    for module in pkgutil.iter_modules(gpurl.kernels.__path__, "gpurl.kernels."):
        members = vars(importlib.import_module(module.name)).values()
        found |= {each.__name__ for each in members if isinstance(each, JITFunction)}
    return sorted(name for name in found if name.endswith("_kernel"))


def main(libraries: str, result: str, *names: str) -> int:
    """Play the cases; 1 if one failed."""
    stand_in_gpu.load(Path(libraries))
    import triton

    launched = dict[str, list[str]]()
    failed = dict[str, str]()
    with stand_in_gpu.stand_in(), TemporaryDirectory() as folder:
        for name in names or cases():
            try:
                launched[name] = play(name, Path(folder))
            except Exception:
                failed[name] = traceback.format_exc()[-2000:]
    said = {
        "triton": triton.__version__,
        "kernels": kernels(),
        "launched": launched,
        "failed": failed,
    }
    Path(result).write_text(json.dumps(said, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
