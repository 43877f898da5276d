"""Small runs of every algorithm and kind of network, with weights that matter."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

import gpurl
from gpurl.algorithms import resolve_algorithm
from gpurl.algorithms.on_policy import OnPolicy
from gpurl.api import train
from gpurl.checkpoints.folders import load_checkpoint, save_checkpoint
from gpurl.envs.registry import make_env
from gpurl.export.parity import random_observations
from tests.small_runs import small_settings, some_demonstrations

OWN = "tests.export.own"
WALK = "tests.tiny_envs:RandomWalk"
SEEN = "tests.picture_envs"
GRU = {"hidden": [8], "memory": "gru", "memory_size": 6}
NORMAL = {"normalize_obs": True}

# name of the case -> (algorithm, environment, settings)
ROWS = {"hidden": [8], "encoder": f"{OWN}:Rows"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo": ("ppo", "pendulum", {}),
    "ppo_raw": ("ppo", WALK, {"normalize_obs": False}),
    "ppo_squash": ("ppo", "pendulum", {"squash": True}),
    "ppo_scalar_std": ("ppo", "pendulum", {"std_type": "scalar"}),
    "ppo_state_std": ("ppo", "pendulum", {"state_dependent_std": True}),
    "ppo_squash_state_std": ("ppo", "pendulum", {"state_dependent_std": True, "squash": True}),
    "ppo_beta": ("ppo", "pendulum", {"distribution": "beta"}),
    "ppo_half_bounded": ("ppo", f"{OWN}:HalfBounded", {}),
    "ppo_discrete": ("ppo", "cart_pole", {}),
    "ppo_many_choices": ("ppo", f"{OWN}:ManyChoices", {}),
    "ppo_gru": ("ppo", "pendulum", {"network": GRU}),
    "ppo_lstm": ("ppo", "pendulum", {"network": GRU | {"memory": "lstm"}}),
    "ppo_mingru": ("ppo", "pendulum", {"network": GRU | {"memory": "mingru"}}),
    "ppo_gru_shared_discrete": ("ppo", "cart_pole", {"network": GRU | {"shared": True}}),
    "ppo_asymmetric": ("ppo", f"{OWN}:Hidden", {"normalize_obs": False}),
    "sac_asymmetric": ("sac", f"{OWN}:Hidden", {"normalize_obs": False}),
    "ppo_layer_norm": ("ppo", WALK, {"network": {"hidden": [8, 8], "layer_norm": True}}),
    "ppo_silu": ("ppo", WALK, {"network": {"hidden": [8, 8], "activation": "silu"}}),
    "ppo_gelu": ("ppo", WALK, {"network": {"hidden": [8, 8], "activation": "gelu"}}),
    "ppo_simba": (
        "ppo",
        WALK,
        {"network": {"hidden": [8, 8], "body": "simba", "activation": "relu"}},
    ),
    "ppo_bro": ("ppo", WALK, {"network": {"hidden": [8], "body": "bro", "activation": "relu"}}),
    "ppo_images": ("ppo", f"{OWN}:Pictures", {"network": {"trunk": f"{OWN}:Conv"}}),
    "ppo_cnn": ("ppo", "catch", {}),
    "ppo_impala": ("ppo", f"{SEEN}:Pixels", {"network": {"hidden": [8], "encoder": "impala"}}),
    "ppo_gru_cnn": ("ppo", "catch", {"network": GRU}),
    "ppo_lstm_cnn": ("ppo", "catch", {"network": GRU | {"memory": "lstm"}}),
    "ppo_mingru_cnn": ("ppo", "catch", {"network": GRU | {"memory": "mingru"}}),
    "ppo_groups": ("ppo", f"{SEEN}:Seen", {}),
    "ppo_number": ("ppo", f"{SEEN}:WithNumber", {}),
    "ppo_gru_groups": ("ppo", f"{SEEN}:Seen", {"network": GRU}),
    "ppo_named": ("ppo", f"{SEEN}:Named", {}),
    "ppo_gru_named": ("ppo", f"{SEEN}:Named", {"network": GRU}),
    "ppo_group_trunk": ("ppo", f"{SEEN}:Seen", {"network": {"trunk": f"{SEEN}:GroupTrunk"}}),
    "ppo_named_trunk": ("ppo", f"{SEEN}:Named", {"network": {"trunk": f"{SEEN}:GroupTrunk"}}),
    "pqn_cnn": ("pqn", "catch", {}),
    "sac_groups": ("sac", f"{SEEN}:Pointing", {"normalize_obs": True}),
    "td3_groups": ("td3", f"{SEEN}:Pointing", {}),
    "sac_rows": ("sac", "pendulum", NORMAL | dict(actor_network=ROWS, critic_network=ROWS)),
    "td3_rows": ("td3", "pendulum", dict(actor_network=ROWS, critic_network=ROWS)),
    "dqn_rows": ("dqn", "cart_pole", {"network": ROWS, "num_critics": 2}),
    "ppo_rows": ("ppo", WALK, {"network": ROWS}),
    "bc_rows": ("bc", "pendulum", {"actor_network": ROWS}),
    "sac_discrete_cnn": ("sac", "catch", {}),
    "dqn_groups": ("dqn", f"{SEEN}:Seen", {"normalize_obs": True, "num_critics": 2}),
    "ppo_own_trunk": ("ppo", WALK, {"network": {"trunk": f"{OWN}:Mixed", "shared": True}}),
    "ppo_own_network": (f"{OWN}:OwnNetworkPPO", WALK, {}),
    "ppo_scaled_trunk": ("ppo", WALK, {"network": {"trunk": f"{OWN}:Scaled"}}),
    "sac_own_actor": (f"{OWN}:OwnActorSAC", "pendulum", {}),
    "td3_own_actor": (f"{OWN}:OwnActorTD3", "pendulum", {}),
    "dqn_own_network": (f"{OWN}:OwnNetworkDQN", "cart_pole", {}),
    "a2c": ("a2c", "pendulum", {}),
    "pqn": ("pqn", "cart_pole", {}),
    "ddpg": ("ddpg", "pendulum", {"noise": "ornstein_uhlenbeck"}),
    "td3": ("td3", "pendulum", NORMAL),
    "sac": ("sac", "pendulum", NORMAL),
    "sac_discrete": ("sac", "cart_pole", {}),
    "redq": ("redq", "pendulum", {}),
    "mod_sac": ("mod_sac", "pendulum", {}),
    "fast_td3": ("fast_td3", "pendulum", {}),
    "fast_sac": ("fast_sac", "pendulum", {}),
    "flash_sac": ("flash_sac", "pendulum", {}),
    "discrete_sac": ("discrete_sac", "cart_pole", NORMAL),
    "dqn": ("dqn", "cart_pole", NORMAL),
    "dqn_quantiles": ("dqn", "cart_pole", {"quantiles": 5, "num_critics": 2}),
    "dqn_heads": ("dqn", "cart_pole", {"network": {"hidden": [8, 8], "heads": 3}}),
    "dqn_embedding": ("dqn", "cart_pole", {"network": {"hidden": [8], "action_embedding": 4}}),
    "rainbow": ("rainbow", "cart_pole", {}),
    "vdn": ("vdn", "two_step_game", {}),
    "bc": ("bc", "pendulum", {}),
    "bc_deterministic": ("bc", "pendulum", {"head": "deterministic"}),
    "bc_many_choices": ("bc", f"{OWN}:ManyChoices", {}),
}


def make_run(folder: Path, case: str) -> Path:
    """The run folder of a case, trained for a few steps; then its weights were moved so far that
    actions depend on observations, and its statistics away from 0 and 1.
    """
    algorithm, env, changes = CASES[case]
    settings = small_settings(algorithm) | {"num_envs": 8, "horizon": 4, "total_steps": 64}
    if issubclass(resolve_algorithm(algorithm), OnPolicy):
        settings["minibatches"] = 1
    if algorithm == "bc":
        settings["dataset"] = some_demonstrations(folder, make_env(env, 1, "cpu", 0))
    quiet = {"quiet": True, "device": "cpu", "eval_episodes": 0}
    run = train(algorithm, env, run_dir=str(folder / "run"), **(settings | changes | quiet))
    parts, manifest = load_checkpoint(run.folder)
    trained = parts["model"]
    for seed in range(30):
        moved = {name: _moved(name, value, seed) for name, value in trained.items()}
        save_checkpoint(run.folder / "checkpoints", manifest["step"], {**parts, "model": moved})
        if _varies(gpurl.load(run.folder)):
            return run.folder
    raise AssertionError(f"{case}: whatever the weights, the action is the same")


def _moved(name: str, value: Tensor, seed: int) -> Tensor:
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    if name.endswith(("running_variance", "variance", "inv_std")):
        return value * (1.0 + noise.abs())
    width = value.shape[-1] if value.dim() else 1
    moved = value + 0.5 * noise / max(1.0, width / 8) ** 0.5
    return moved if value.is_floating_point() else value


def _varies(policy: gpurl.Policy) -> bool:
    """Whether every number of the action depends on the observation."""
    algorithm = policy.algorithm
    rng = np.random.default_rng(0)
    space = cast(Box, algorithm.observation_space)
    action = policy.act(random_observations(space, algorithm.normalizer, 64, rng))
    policy.reset()
    return bool((action != action[:1]).any(0).all())
