"""Settings that train an environment well, found by runs of this program; settings from files and
the command line win over them.
"""

import math

import torch

from gpurl.algorithms import config_class, resolve_algorithm
from gpurl.algorithms.off_policy import OffPolicyConfig
from gpurl.checkpoints.plain_files import Json
from gpurl.errors import UsageError, did_you_mean

Preset = dict[str, Json]

REPLAYING = ("ddpg", "td3", "sac", "discrete_sac", "redq", "mod_sac", "dqn", "rainbow", "vdn")
# a replay buffer of single steps learns best from few environments, with 8 updates of 256 a step
FEW_ENVS: Preset = {"num_envs": 64, "updates": 8, "total_steps": 1_000_000}
SMALL_NETWORK: Json = {"hidden": [128, 128]}
PENDULUM: Preset = {
    "num_envs": 64,
    "updates": 8,
    "total_steps": 40_000,
    "learning_starts": 1280,
    "learning_rate": 1e-3,
    "tau": 0.01,
    "reward_scale": 0.1,
    "actor_network": SMALL_NETWORK,
    "critic_network": SMALL_NETWORK,
}
# a deterministic actor explores little, so many random actions come first (rl-zoo3: gamma 0.98,
# 10,000 random steps)
DETERMINISTIC: Preset = {"gamma": 0.98, "learning_starts": 5000}
LEARN_CHASING: Preset = {
    "num_envs": 1024,
    "updates": 8,
    "total_steps": 2_000_000,
    "learning_starts": 20_480,
    "batch_size": 512,
    "learning_rate": 1e-3,
    "n_step": 3,
    "actor_network": SMALL_NETWORK,
    "critic_network": SMALL_NETWORK,
}
# positions are up to 8, velocities near 1, and values of two actions differ by less than critics
# err: without normalised observations and a slow actor, a return of 9 falls to -20 again. On 4096
# environments 8 updates are too few, also with 4 M transitions in the replay buffer
SLOW_ACTOR: Preset = {"updates": 16, "actor_learning_rate": 1e-4, "schedule": "linear"}
CHASING: Preset = LEARN_CHASING | SLOW_ACTOR | {"normalize_obs": True}
# rewards of Chasing are about 0.02 a step, so the entropy must weigh little: with the default, an
# initial temperature of 1, SAC acts at random for 15,000 updates
CHASING_SAC: Preset = CHASING | {"initial_temperature": 0.02}
# a deterministic actor leaves a good policy again, for -9 and back: not with FastTD3's noise, a
# size for each episode, targets that move fast, and the lower of two critics
CHASING_TD3: Preset = CHASING | {
    "policy_delay": 1,
    "tau": 0.05,
    "actor_aggregate": "min",
    "noise": "episode",
    "noise_std_range": [0.001, 0.4],
}
# returns of Chasing are between -5 and 12 where policies learn: atoms further apart would hide what
# actions differ by
FAST_CHASING: Preset = (
    LEARN_CHASING
    | SLOW_ACTOR
    | {
        "policy_delay": 1,
        "atoms": 101,
        "v_min": -5.0,
        "v_max": 12.0,
    }
)
FLASH_PENDULUM: Preset = {
    "num_envs": 64,
    "total_steps": 40_000,
    "horizon": 1,
    "updates": 8,
    "batch_size": 256,
    "learning_starts": 1280,
    "replay_size": 100_000,
    "learning_rate": 1e-3,
    "actor_network": {"hidden": [64, 64]},
    "critic_network": {"hidden": [64, 64]},
}
FLASH_CHASING: Preset = FLASH_PENDULUM | {
    "num_envs": 1024,
    "total_steps": 2_000_000,
    "n_step": 3,
    "learning_starts": 20_480,
    "replay_size": 1_000_000,
}
FAST_PENDULUM: Preset = {
    "num_envs": 128,
    "total_steps": 50_000,
    "updates": 8,
    "batch_size": 512,
    "learning_starts": 2560,
    "replay_size": 100_000,
    "learning_rate": 1e-3,
    "gamma": 0.97,
    "reward_scale": 0.1,
    "atoms": 51,
    "v_min": -30.0,
    "v_max": 0.0,
    "actor_network": {"hidden": [64, 64]},
    "critic_network": {"hidden": [128, 128]},
}
# the sizes of FlashSAC's authors for robots on a GPU (scripts/run_isaaclab.sh there)
MANY_FLASH: Preset = {
    "num_envs": 1024,
    "horizon": 1,
    "updates": 2,
    "batch_size": 2048,
    "learning_starts": 100_000,
    "replay_size": 10_000_000,
    "total_steps": 50_000_000,
}
# and for Gymnasium's MuJoCo tasks (scripts/run_mujoco.sh there)
FEW_FLASH: Preset = {
    "num_envs": 1,
    "horizon": 2,
    "updates": 2,
    "batch_size": 512,
    "learning_starts": 10_000,
    "total_steps": 1_000_000,
}
# with rl-zoo3's learning rate, and its target network, which 128 updates leave as it is: double DQN
# needs it (docs/results.md)
CART_POLE: Preset = {
    "num_envs": 32,
    "total_steps": 50_000,
    "horizon": 8,
    "updates": 128,
    "batch_size": 64,
    "learning_starts": 1000,
    "replay_size": 50_000,
    "learning_rate": 2.3e-3,
    "schedule": "linear",
    "target_interval": 128,
    "tau": 1.0,
    "n_step": 3,
    "reward_scale": 0.1,
    "network": {"hidden": [64, 64]},
}
# the sizes of DQN's. Values and entropies must move as fast as 64 updates in 256 steps allow, and
# pole velocities are many times the cart's
CART_POLE_SAC: Preset = {
    "num_envs": 32,
    "total_steps": 50_000,
    "horizon": 8,
    "updates": 64,
    "batch_size": 64,
    "learning_starts": 1000,
    "replay_size": 50_000,
    "learning_rate": 2.3e-3,
    "schedule": "linear",
    "tau": 0.05,
    "n_step": 3,
    "reward_scale": 0.1,
    "initial_temperature": 0.1,
    "normalize_obs": True,
    "actor_network": {"hidden": [64, 64]},
    "critic_network": {"hidden": [64, 64]},
}
ACROBOT_SAC: Preset = CART_POLE_SAC | {
    "total_steps": 40_000,
    "learning_rate": 1e-3,
    "reward_scale": 1.0,
    "initial_temperature": 1.0,
    "normalize_obs": False,
}
# chosen by trainings with seeds 10 to 13 (docs/results.md)
ACROBOT: Preset = CART_POLE | {
    "total_steps": 100_000,
    "batch_size": 128,
    "learning_rate": 2.5e-4,
    "reward_scale": 1.0,
}
# rl-zoo3's DQN for LunarLander
LANDER_DQN: Preset = {
    "num_envs": 4,
    "total_steps": 100_000,
    "updates": 4,
    "batch_size": 128,
    "learning_starts": 1000,
    "replay_size": 50_000,
    "learning_rate": 6.3e-4,
    "target_interval": 250,
    "tau": 1.0,
    "epsilon_fraction": 0.12,
    "epsilon_end": 0.1,
    "network": {"hidden": [256, 256]},
}
# rl-zoo3's PPO for the landers
LANDER_PPO: Preset = {
    "num_envs": 16,
    "total_steps": 1_000_000,
    "horizon": 1024,
    "minibatches": 256,
    "epochs": 4,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "learning_rate": 3e-4,
    "schedule": "constant",
}
# rl-zoo3's discount, longer rollouts. With 16 steps, 0.99, 0.95 and 1e-3 A2C ends at -109, and at
# -100 with 32 environments, 0.999, 0.98 and 2e-3 (seed 0)
LANDER_A2C: Preset = {
    "num_envs": 16,
    "total_steps": 1_000_000,
    "horizon": 64,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "learning_rate": 3e-3,
    "schedule": "linear",
}
# rl-zoo3's SAC and TD3 for Box2D, with eight environments in place of one
BOX2D: Preset = {
    "num_envs": 8,
    "updates": 8,
    "learning_starts": 10_000,
    "actor_network": {"hidden": [400, 300]},
    "critic_network": {"hidden": [400, 300]},
}
BOX2D_SAC: Preset = BOX2D | {"total_steps": 500_000, "learning_rate": 7.3e-4}
LANDER_SAC = BOX2D_SAC | {"tau": 0.01, "schedule": "linear", "replay_size": 500_000}
WALKER_SAC = BOX2D_SAC | {"tau": 0.02, "gamma": 0.98, "replay_size": 300_000}
BOX2D_TD3: Preset = BOX2D | {"learning_rate": 1e-3, "gamma": 0.98, "replay_size": 200_000}
# rl-zoo3's SAC explores by noise that depends on the state (gSDE); here noise lasts up to 32 steps,
# without which SAC never reaches the flag
CAR_SAC: Preset = {
    "num_envs": 32,
    "total_steps": 50_000,
    "updates": 32,
    "learning_starts": 5_000,
    "gamma": 0.9999,
    "tau": 0.01,
    "noise_span": 32,
    "noise_exponent": 0.5,
    "actor_network": {"hidden": [64, 64]},
    "critic_network": {"hidden": [64, 64]},
}
CAR_TD3: Preset = {
    "num_envs": 8,
    "total_steps": 300_000,
    "horizon": 2,
    "updates": 8,
    "learning_starts": 5_000,
    "noise": "ornstein_uhlenbeck",
    "noise_std": 0.5,
}
CAR_PPO: Preset = {
    "num_envs": 1024,
    "total_steps": 4_000_000,
    "horizon": 32,
    "gamma": 0.999,
    "initial_std": 1.5,
}
# rl-zoo3's rollouts, discount and lambda, on more environments at a higher rate. With 16 steps,
# 0.95 and 7e-4 A2C ends at -880 on Pendulum, and on MountainCarContinuous it pushes all the time
PENDULUM_A2C: Preset = {
    "num_envs": 32,
    "total_steps": 1_000_000,
    "horizon": 8,
    "initial_std": 0.6,
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "learning_rate": 2e-3,
    "schedule": "linear",
}
CAR_A2C: Preset = {
    "num_envs": 64,
    "total_steps": 1_000_000,
    "horizon": 100,
    "gamma": 0.99,
    "gae_lambda": 0.98,
    "learning_rate": 3e-3,
    "schedule": "linear",
}
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
# as in rsl_rl and mjlab: many environments, short rollouts, a learning rate that follows the KL
# divergence
LEGGED: Preset = {
    "num_envs": 4096,
    "horizon": 24,
    "epochs": 5,
    "minibatches": 8,
    "network": {"hidden": [256, 128, 64], "activation": "elu"},
}
ARM = LEGGED | {"gamma": 0.97, "total_steps": 20_000_000}
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
# one preset for Gymnasium's MuJoCo tasks on few environments, found by runs of a million steps
# (docs/results.md)
MUJOCO_TASKS = (
    *("half_cheetah", "hopper", "walker2d", "ant", "swimmer", "humanoid", "humanoid_standup"),
    *("inverted_pendulum", "inverted_double_pendulum", "reacher", "pusher"),
)
FEW_CONTINUOUS: Preset = {
    "num_envs": 64,
    "horizon": 32,
    "epochs": 7,
    "minibatches": 32,
    "learning_rate": 3e-4,
    "schedule": "linear",
    "value_coef": 0.25,
    "normalize_advantage": "minibatch",
    "initial_std": 0.45,
    "total_steps": 1_000_000,
}
# its 78 columns of contact forces are nearly always 0: scaled to a variance of 1 they would be most
# of what a network sees. In other tasks small observations matter
FEW_ANT = FEW_CONTINUOUS | {"normalize_obs_epsilon": 0.1}
# what an action of Swimmer is worth shows over hundreds of steps: with 0.99 it stays at 50, with
# 0.999 alone at 158. rl-zoo3's discounts, rate, epochs and noise, on rollouts of a quarter episode
FEW_SWIMMER = FEW_CONTINUOUS | {
    "num_envs": 16,
    "horizon": 256,
    "epochs": 10,
    "minibatches": 16,
    "learning_rate": 6e-4,
    "gamma": 0.9999,
    "gae_lambda": 0.98,
    "value_coef": 0.5,
    "max_grad_norm": 0.5,
    "initial_std": 1.0,
}
# it falls from some starts for good if it learns little from them, which soon are rare: with seed 3
# it stands from 64 % of 200 starts by the preset of the others, from all by rl-zoo3's discounts,
# rate, epochs, minibatches, clipping and noise
FEW_DOUBLE_PENDULUM = FEW_CONTINUOUS | {
    "epochs": 10,
    "minibatches": 4,
    "learning_rate": 1.55e-4,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "clip_range": 0.4,
    "value_coef": 0.7,
    "initial_std": 1.0,
}
# in Reacher it shows at once
FEW_REACHER = FEW_CONTINUOUS | {"gamma": 0.9}
# one update of 256 transitions for each step of an environment, as in the publications
ONE_UPDATE_A_STEP: Preset = {
    "num_envs": 8,
    "updates": 8,
    "learning_starts": 10_000,
    "total_steps": 1_000_000,
}
# cleanrl's rates of SAC
SAC_RATES: Preset = {"learning_rate": 1e-3, "actor_learning_rate": 3e-4}
# four updates of five critics for each step and one of the actor; the publication has 20 of ten,
# which takes a CPU six times as long
FEW_REDQ: Preset = {
    "num_envs": 2,
    "updates": 8,
    "policy_delay": 4,
    "num_critics": 5,
    "learning_starts": 5_000,
    "total_steps": 100_000,
}
# the publication has 128 environments and batches of 8192 and 32,768; a value is at most
# 1 / (1 - gamma) = 100 times the reward of a step, which is about 10, scaled by 0.1
FEW_FAST: Preset = {
    "num_envs": 16,
    "updates": 16,
    "batch_size": 512,
    "learning_starts": 5_000,
    "replay_size": 300_000,
    "reward_scale": 0.1,
    "v_min": -20.0,
    "v_max": 100.0,
    "actor_network": {"hidden": [256, 256]},
    "critic_network": {"hidden": [256, 256]},
    "total_steps": 1_000_000,
}
PRESET_NAMES = ("auto", "none", *NAMED)
MAX_FEW = 512  # environments
# tasks here by the name that Gymnasium's ids begin with
TWINS = {
    "CartPole": "cart_pole",
    "Pendulum": "pendulum",
    "Acrobot": "acrobot",
    "MountainCar": "mountain_car",
    "MountainCarContinuous": "mountain_car_continuous",
    **{task.title().replace("_", ""): task for task in MUJOCO_TASKS},
}
# what belongs to thousands of environments, and not to their task
SIZES = ("num_envs", "horizon", "epochs", "minibatches", "learning_rate", "schedule", "total_steps")


def _isaac_gym(hidden: list[Json], **changes: Json) -> Preset:
    return {"network": ISAAC_NETWORK | {"hidden": hidden}, "bounds_coef": 1e-4, **changes}


# by algorithm and environment; "*": every environment, overridden by its own preset
PRESETS: dict[tuple[str, str], Preset] = {
    **{(name, "*"): FEW_ENVS for name in REPLAYING},
    ("redq", "*"): FEW_ENVS | {"updates": 20, "policy_delay": 20},
    **{
        (name, "gymnasium_cpu"): {"num_envs": 8, "total_steps": 200_000}
        for name in (*REPLAYING, "bc")
    },
    **{(name, "gymnasium_cpu"): FEW_ENVS for name in ("fast_td3", "fast_sac")},
    ("flash_sac", "*"): FEW_ENVS | {"horizon": 1, "updates": 8},
    ("flash_sac", "gymnasium_cpu"): FEW_FLASH,
    **{("flash_sac", name): MANY_FLASH for name in MUJOCO_TASKS},
    **{("flash_sac", name): MANY_FLASH | {"n_step": 3} for name in ("isaac_gym", "isaac_lab")},
    **{(name, "pendulum"): PENDULUM for name in ("sac", "mod_sac")},
    **{(name, "pendulum"): PENDULUM | DETERMINISTIC for name in ("ddpg", "td3")},
    **{(name, "chasing"): CHASING_SAC for name in ("sac", "mod_sac")},
    **{(name, "chasing"): CHASING_TD3 for name in ("ddpg", "td3")},
    ("bc", "pendulum"): {"actor_network": SMALL_NETWORK},  # as sac's, for init_from
    ("redq", "pendulum"): PENDULUM | dict(num_critics=5, updates=8, policy_delay=2),
    **{(name, "pendulum"): FAST_PENDULUM for name in ("fast_td3", "fast_sac")},
    ("fast_td3", "chasing"): FAST_CHASING,
    ("fast_sac", "chasing"): FAST_CHASING | {"initial_temperature": 0.01},
    ("flash_sac", "pendulum"): FLASH_PENDULUM,
    ("flash_sac", "chasing"): FLASH_CHASING,
    ("dqn", "cart_pole"): CART_POLE,
    ("rainbow", "cart_pole"): CART_POLE | {"v_min": 0.0, "v_max": 10.0},
    **{(name, "cart_pole"): CART_POLE_SAC for name in ("sac", "discrete_sac")},
    **{(name, "acrobot"): ACROBOT_SAC for name in ("sac", "discrete_sac")},
    ("dqn", "acrobot"): ACROBOT,
    ("rainbow", "acrobot"): ACROBOT | {"v_min": -100.0, "v_max": 0.0},
    # with a constant rate and single steps good policies are lost again (docs/results.md)
    ("dqn", "gymnasium_cpu:LunarLander-v3"): LANDER_DQN | {"schedule": "linear", "n_step": 3},
    ("rainbow", "gymnasium_cpu:LunarLander-v3"): LANDER_DQN | {"v_min": -300.0, "v_max": 300.0},
    ("ppo", "gymnasium_cpu:LunarLander-v3"): LANDER_PPO,
    ("ppo", "gymnasium_cpu:LunarLanderContinuous-v3"): LANDER_PPO,
    ("a2c", "gymnasium_cpu:LunarLanderContinuous-v3"): LANDER_A2C,
    ("sac", "gymnasium_cpu:LunarLanderContinuous-v3"): LANDER_SAC,
    ("td3", "gymnasium_cpu:LunarLanderContinuous-v3"): BOX2D_TD3 | {"total_steps": 300_000},
    ("sac", "gymnasium_cpu:BipedalWalker-v3"): WALKER_SAC,
    ("td3", "gymnasium_cpu:BipedalWalker-v3"): BOX2D_TD3 | {"total_steps": 1_000_000},
    ("ppo", "mountain_car_continuous"): CAR_PPO,
    ("a2c", "mountain_car_continuous"): CAR_A2C,
    ("sac", "mountain_car_continuous"): CAR_SAC,
    ("td3", "mountain_car_continuous"): CAR_TD3,
    ("ppo", "acrobot"): {"num_envs": 1024, "horizon": 16, "total_steps": 2_000_000},
    ("a2c", "acrobot"): {"num_envs": 16, "learning_rate": 7e-4, "total_steps": 500_000},
    ("a2c", "pendulum"): PENDULUM_A2C,
    ("pqn", "cart_pole"): dict(num_envs=32, horizon=64, total_steps=300_000, reward_scale=0.1),
    ("pqn", "gymnasium_cpu"): {"num_envs": 32, "horizon": 64, "total_steps": 500_000},
    ("ppo", "chasing"): dict(
        num_envs=4096, horizon=32, minibatches=16, gamma=0.99, initial_std=0.5, entropy_coef=0.005
    ),
    ("ppo", "cart_pole"): dict(
        num_envs=1024, horizon=16, total_steps=1_000_000, learning_rate=2e-3, schedule="linear"
    ),
    ("a2c", "cart_pole"): dict(
        num_envs=16, horizon=16, total_steps=500_000, learning_rate=1e-3, schedule="linear"
    ),
    ("ppo", "pendulum"): {"num_envs": 1024, "horizon": 16, "total_steps": 1_000_000, "gamma": 0.95},
    ("ppo", "gymnasium_cpu"): dict(
        num_envs=8,
        horizon=256,
        epochs=10,
        minibatches=8,
        total_steps=1_000_000,
        learning_rate=1e-3,
        schedule="linear",
    ),
    ("ppo", "inverted_pendulum"): {"num_envs": 256, "horizon": 16, "total_steps": 300_000},
    ("ppo", "inverted_double_pendulum"): {"num_envs": 256, "horizon": 32, "total_steps": 2_000_000},
    **{
        ("ppo", name): LEGGED | {"total_steps": 50_000_000}
        for name in ("hopper", "walker2d", "swimmer", "half_cheetah")
    },
    ("ppo", "ant"): LEGGED | {"total_steps": 100_000_000},
    **{
        ("ppo", name): LEGGED | {"total_steps": 200_000_000, "horizon": 32}
        for name in ("humanoid", "humanoid_standup")
    },
    **{("ppo", name): ARM for name in ("reacher", "pusher")},
    ("a2c", "gymnasium_cpu"): {"num_envs": 16, "total_steps": 1_000_000, "schedule": "linear"},
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


ANY_MUJOCO = (*MUJOCO_TASKS, "mujoco")  # the last one: a task of one's own
# those of a CPU and of up to MAX_FEW environments, which take the place of PRESETS
FEW_PRESETS: dict[tuple[str, str], Preset] = {
    **{("ppo", task): FEW_CONTINUOUS for task in ANY_MUJOCO},
    ("ppo", "ant"): FEW_ANT,
    ("ppo", "swimmer"): FEW_SWIMMER,
    ("ppo", "inverted_double_pendulum"): FEW_DOUBLE_PENDULUM,
    ("ppo", "reacher"): FEW_REACHER,
    **{
        (name, task): ONE_UPDATE_A_STEP | SAC_RATES
        for name in ("sac", "mod_sac")
        for task in ANY_MUJOCO
    },
    **{("redq", task): FEW_REDQ for task in ANY_MUJOCO},
    **{(name, task): FEW_FAST for name in ("fast_td3", "fast_sac") for task in ANY_MUJOCO},
    **{("flash_sac", task): FEW_FLASH for task in ANY_MUJOCO},
    # a deterministic actor explores little, so more random actions come first
    **{
        (name, task): ONE_UPDATE_A_STEP | {"learning_starts": 25_000}
        for name in ("ddpg", "td3")
        for task in ANY_MUJOCO
    },
}


def preset(
    algorithm: str,
    env: str,
    num_envs: object = None,
    device: object = "auto",
    name: object = "auto",
) -> Preset:
    """The preset for `algorithm` on `env`, {} if there is none; tasks of an adapter, named after a
    colon, share one and may add their own, and so may all tasks of a package, PACKAGE:TASK.

    name: "auto" for the task's own preset, "none" for no preset, or one of NAMED, which takes the
    place of the task's. UsageError for another one, and if it is not for `algorithm`.

    num_envs: the number of environments if one is given. With up to MAX_FEW, or on a CPU with none
    given, a task may have another preset. Presets with a replay buffer are fitted to the number,
    see `fit_updates`.
    """
    if name != "auto":
        return _named(algorithm, name)
    count = num_envs if isinstance(num_envs, int) and num_envs > 0 else None
    is_few = _is_cpu(device) if count is None else count <= MAX_FEW
    adapter, _, task = env.partition(":")
    package = task.partition(":")[0].partition(".")[0]
    values = _known(algorithm, adapter, f"{adapter}:{package}", env, is_few=is_few)
    twin = TWINS.get(task.partition("-v")[0]) if adapter == "gymnasium_cpu" else None
    if twin is not None:
        # on as many environments as a CPU steps in numpy
        default = values.get("num_envs")
        count = count or (default if isinstance(default, int) else None)
        values = _on_few(algorithm, values, _known(algorithm, twin, is_few=True), count)
    if count is None:
        return values
    if "updates" not in values:
        return _with_whole_rollouts(algorithm, values, count)
    config = config_class(resolve_algorithm(algorithm))
    assert issubclass(config, OffPolicyConfig)
    return fit_updates(values, count, getattr(config, "policy_delay", 1), config.replay_size)


def _named(algorithm: str, name: object) -> Preset:
    """The preset that --preset names, for `algorithm`."""
    if name == "none":
        return {}
    if name not in NAMED:
        raise UsageError(
            f"no preset is called {name!r}; {did_you_mean(str(name), PRESET_NAMES)}it must be one "
            f"of {', '.join(PRESET_NAMES)}: auto is that of the task, none leaves the defaults"
        )
    if algorithm != "ppo":
        raise UsageError(
            f"preset {name} is for ppo, not for {algorithm}: take --preset auto, the task's own"
        )
    return NAMED[str(name)]


def _known(algorithm: str, *names: str, is_few: bool) -> Preset:
    """What is known of all environments and of each of `names`; the last one wins."""
    values: Preset = {}
    for name in dict.fromkeys(("*", *names)):
        key = (algorithm, name)
        if is_few and key in FEW_PRESETS:
            values |= FEW_PRESETS[key]
        else:
            values |= PRESETS.get(key, {})
    return values


def _on_few(algorithm: str, values: Preset, of_twin: Preset, count: int | None) -> Preset:
    """The preset of a task for the same task elsewhere, on `count` environments; values: the preset
    of all tasks there.
    """
    made_for = of_twin.get("num_envs")
    if "updates" in of_twin:
        return of_twin  # `fit_updates` does the rest
    if count is None or not isinstance(made_for, int) or made_for > MAX_FEW:
        return values | {name: value for name, value in of_twin.items() if name not in SIZES}
    # rollouts of the same size
    values = values | of_twin
    return values | {"num_envs": count, "horizon": _horizon(algorithm, values, count)}


def _with_whole_rollouts(algorithm: str, values: Preset, num_envs: int) -> Preset:
    """A preset of few environments, for fewer: each plays more steps, so that a rollout stays as
    large. One of 32 steps of one environment would be minibatches of one row.
    """
    made_for = values.get("num_envs")
    if not isinstance(made_for, int) or not num_envs < made_for <= MAX_FEW:
        return values
    if not hasattr(config_class(resolve_algorithm(algorithm)), "minibatches"):
        return values  # bc learns from no rollouts
    return values | {"horizon": _horizon(algorithm, values, num_envs)}


def _horizon(algorithm: str, values: Preset, num_envs: int) -> int:
    """The horizon with which rollouts of `num_envs` environments are about as large as the
    preset's, and divide into its minibatches; what the preset leaves out is the algorithm's.
    """
    config = config_class(resolve_algorithm(algorithm))
    defaults = {name: getattr(config, name) for name in ("horizon", "minibatches")}
    sizes = [(defaults | values)[name] for name in ("num_envs", "horizon", "minibatches")]
    made_for, horizon, minibatches = (size for size in sizes if isinstance(size, int))
    step = minibatches // math.gcd(minibatches, num_envs)
    return max(1, round(horizon * made_for / (num_envs * step))) * step


def fit_updates(values: Preset, num_envs: int, policy_delay: int, replay_size: int) -> Preset:
    """A preset with `updates`, for another number of environments: with as many updates in all.

    With fewer environments, or where the preset has an update for each step of an environment, the
    updates after a step change with their number; if that would be less than one update of the
    actor, there are more steps between updates. With more environments the steps of each stay the
    same, and there are more in all, also before the first update, as far as the replay buffer holds
    them.

    policy_delay, replay_size: those of the algorithm, if the preset has none.
    """
    made_for, updates = values.get("num_envs"), values.get("updates")
    if not isinstance(made_for, int) or not isinstance(updates, int) or num_envs == made_for:
        return values
    horizon, delay = values.get("horizon", 1), values.get("policy_delay", policy_delay)
    assert isinstance(horizon, int)
    assert isinstance(delay, int)
    fitted = values | {"num_envs": num_envs}
    if num_envs < made_for or updates >= made_for * horizon:
        wanted = updates * num_envs / made_for
        if wanted < delay:
            return fitted | {"updates": delay, "horizon": round(horizon * delay / wanted)}
        # the actor is updated once in `delay` updates
        return fitted | {"updates": round(wanted / delay) * delay}
    for name in ("total_steps", "learning_starts"):
        if isinstance(steps := values.get(name), int):
            fitted[name] = steps * num_envs // made_for
    size, starts = values.get("replay_size", replay_size), fitted.get("learning_starts", 0)
    assert isinstance(size, int)
    assert isinstance(starts, int)
    return fitted | {"learning_starts": size} if starts > size else fitted


def _is_cpu(device: object) -> bool:
    """Whether training on `device`, or on what auto chooses, is on a CPU."""
    return not torch.cuda.is_available() if device == "auto" else device == "cpu"


def name_for_presets(name: str, kind: type, package: str) -> str:
    """The name under which presets are found: `name` itself if `package` contains it, else that of
    the nearest base class in `package`, so that a subclass of an adapter gets the adapter's
    presets; "mujoco" for a MuJoCo task of one's own.
    """
    for base in kind.__mro__:
        if base.__module__.startswith(f"{package}."):
            parent, _, base_name = base.__module__.rpartition(".")
            if base_name == "base":
                return parent.rpartition(".")[2]
            return name if name.partition(":")[0] == base_name else base_name
    return name
