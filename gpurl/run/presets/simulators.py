"""Presets of Isaac Gym, Isaac Lab and mjlab: PPO's as their authors publish them."""

from gpurl.checkpoints.plain_files import Json
from gpurl.run.presets.bases import MANY_FLASH
from gpurl.run.presets.table import Preset, Table

# ---- Isaac Gym ----

# IsaacGymEnvs' settings, cfg/train/*PPO.yaml at v1.5.1: critic_coef counts half there; max_epochs
# iterations give total_steps. Omitted are reward_shaper's scale, which normalised returns and
# advantages undo, and mixed_precision. rl_games checks the KL divergence after every minibatch
# (ShadowHand: every epoch). There it is from the policy that last learned from the same row, as
# each minibatch replaces mu and sigma, here from the policy that acted: a goal is tighter here
ISAAC_NETWORK: dict[str, Json] = {"activation": "elu", "shared": True, "init": "uniform"}
ISAAC_GYM: Preset = {
    "num_envs": 4096,
    "horizon": 16,
    "epochs": 4,
    "minibatches": 2,
    "learning_rate": 3e-4,
    "schedule": "kl_minibatch",
    "target_kl": 0.008,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_value": 0.2,
    "value_coef": 1.0,
    "total_steps": 32_768_000,
    "network": ISAAC_NETWORK | {"hidden": [256, 128, 64]},
}


def _isaac_gym(hidden: list[Json], **changes: Json) -> Preset:
    return {"network": ISAAC_NETWORK | {"hidden": hidden}, "bounds_coef": 1e-4, **changes}


# ---- Isaac Lab and mjlab ----

# rsl_rl's PPO as the robot simulators configure it. Its standard deviation is itself the parameter
# (`std_type scalar`), here its logarithm, which every engine knows; the learning is the same at 1
RSL_RL: Preset = {
    "num_envs": 4096,
    "horizon": 24,
    "epochs": 5,
    "minibatches": 4,
    "learning_rate": 1e-3,
    "schedule": "kl_minibatch",
    "target_kl": 0.01,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_value": 0.2,
    "value_coef": 1.0,
    "max_grad_norm": 1.0,
    "normalize_obs": True,
    "normalize_value": False,
    "initial_std": 1.0,
    "network": {"hidden": [512, 256, 128], "activation": "elu", "init": "uniform"},
}
# by the name of --preset, for ppo on any environment
NAMED: dict[str, Preset] = {
    # Isaac Lab, isaaclab_tasks/manager_based/locomotion/velocity/config/*/agents/rsl_rl_ppo_cfg.py,
    # on rough ground: max_iterations 1500, entropy_coef 0.005 (ANYmal C), 0.008 (G1) or 0.01 (A1).
    # They leave observations as they are; here they are normalised (empirical_normalization)
    "isaac": RSL_RL | {"entropy_coef": 0.005, "total_steps": 1500 * 4096 * 24},
    # mjlab, src/mjlab/tasks/velocity/config/*/rl_cfg.py: max_iterations 10,000 (Go1) or 30,000
    # (G1); obs_normalization is on since rl_cfg.py has a model for the actor and one for the critic
    "mjlab": RSL_RL | {"entropy_coef": 0.01, "total_steps": 10_000 * 4096 * 24},
}

PRESETS: Table = {
    **{("flash_sac", name): MANY_FLASH | {"n_step": 3} for name in ("isaac_gym", "isaac_lab")},
    ("ppo", "isaac_lab"): NAMED["isaac"] | {"preset": "isaac"},
    ("ppo", "torch_vector:mjlab"): NAMED["mjlab"] | {"preset": "mjlab"},
    ("ppo", "isaac_gym"): ISAAC_GYM,
    ("ppo", "isaac_gym:Ant"): {"max_grad_norm": None, "bounds_coef": 1e-4},
    ("ppo", "isaac_gym:Humanoid"): _isaac_gym(
        [400, 200, 100],
        horizon=32,
        epochs=5,
        minibatches=4,
        learning_rate=5e-4,
        value_coef=2.0,
        total_steps=131_072_000,
    ),
    ("ppo", "isaac_gym:Cartpole"): _isaac_gym(
        [32, 32], num_envs=512, epochs=8, minibatches=1, value_coef=2.0, total_steps=819_200
    ),
    ("ppo", "isaac_gym:Anymal"): dict(
        horizon=24, epochs=5, minibatches=3, total_steps=98_304_000, bounds_coef=1e-3
    ),
    ("ppo", "isaac_gym:ShadowHand"): _isaac_gym(
        [512, 512, 256, 128],
        num_envs=16384,
        schedule="kl",  # there after each epoch
        horizon=8,
        epochs=5,
        minibatches=4,
        learning_rate=5e-4,
        target_kl=0.016,
        value_coef=2.0,
        total_steps=655_360_000,
    ),
}
