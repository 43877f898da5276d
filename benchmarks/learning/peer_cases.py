"""The comparison with stable-baselines3: pairs of cases with the same hyper-parameters, task and
seeds, under the names that each library has for them.
"""

from benchmarks.learning.case import Case, Settings, task_of

SEEDS = 3
# of PPO on LunarLander three say little: the last return differs by 30 from seed to seed
LANDER_SEEDS = 8
# evaluations count as wall clock and play one environment at a time: few of them
POINTS, CURVE_EPISODES = 10, 2
PPO_STEPS, LANDER_STEPS, SAC_STEPS = 300_000, 1_000_000, 100_000

# stable-baselines3's defaults for PPO and SAC, with normalised observations for PPO; where the two
# count differently, the pair of values means the same: 2048 steps in minibatches of 64
GPURL_PPO: Settings = {
    "num_envs": 1,
    "horizon": 2048,
    "minibatches": 32,
    "epochs": 10,
    "learning_rate": 3e-4,
    "schedule": "constant",
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "value_coef": 0.5,
    "entropy_coef": 0.0,
    "max_grad_norm": 0.5,
    "normalize_advantage": "minibatch",
    "normalize_obs": True,
    "normalize_value": False,
    "initial_std": 1.0,
    "network": {"hidden": [64, 64], "activation": "tanh"},
}
SB3_PPO: Settings = {
    "num_envs": 1,
    "normalize_obs": True,
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "vf_coef": 0.5,
    "ent_coef": 0.0,
    "max_grad_norm": 0.5,
    "policy_kwargs": {"net_arch": [64, 64], "log_std_init": 0.0},
}
GPURL_SAC: Settings = {
    "num_envs": 1,
    "horizon": 1,
    "updates": 1,
    "batch_size": 256,
    "replay_size": 100_000,
    "learning_starts": 10_000,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "tau": 0.005,
    "initial_temperature": 1.0,
    "actor_network": {"hidden": [256, 256]},
    "critic_network": {"hidden": [256, 256]},
}
SB3_SAC: Settings = {
    "num_envs": 1,
    "train_freq": 1,
    "gradient_steps": 1,
    "batch_size": 256,
    "buffer_size": 100_000,
    "learning_starts": 10_000,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "tau": 0.005,
    "ent_coef": "auto_1.0",
    "policy_kwargs": {"net_arch": [256, 256]},
}
# rl-zoo3's hyper-parameters for LunarLander
GPURL_PPO_LANDER = GPURL_PPO | {
    "num_envs": 16,
    "horizon": 1024,
    "minibatches": 256,
    "epochs": 4,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "entropy_coef": 0.01,
    "normalize_obs": False,
}
SB3_PPO_LANDER = SB3_PPO | {
    "num_envs": 16,
    "n_steps": 1024,
    "n_epochs": 4,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "ent_coef": 0.01,
    "normalize_obs": False,
}
GPURL_DQN: Settings = {
    "num_envs": 1,
    "horizon": 4,
    "updates": 4,
    "double": False,
    "batch_size": 128,
    "replay_size": 50_000,
    "learning_starts": 1_000,
    "learning_rate": 6.3e-4,
    "schedule": "constant",
    "n_step": 1,
    "gamma": 0.99,
    "tau": 1.0,
    "target_interval": 250,
    "epsilon_fraction": 0.12,
    "epsilon_end": 0.1,
    "max_grad_norm": 10.0,
    "network": {"hidden": [256, 256]},
}
SB3_DQN: Settings = {
    "num_envs": 1,
    "train_freq": 4,
    "gradient_steps": 4,
    "batch_size": 128,
    "buffer_size": 50_000,
    "learning_starts": 1_000,
    "learning_rate": 6.3e-4,
    "gamma": 0.99,
    "tau": 1.0,
    "target_update_interval": 250,
    "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
    "max_grad_norm": 10.0,
    "policy_kwargs": {"net_arch": [256, 256]},
}

# algorithm, Gymnasium's id, steps, seeds, gpurl's settings, those of stable-baselines3
PAIRS: list[tuple[str, str, int, int, Settings, Settings]] = [
    ("ppo", "HalfCheetah-v5", PPO_STEPS, SEEDS, GPURL_PPO, SB3_PPO),
    ("ppo", "Hopper-v5", PPO_STEPS, SEEDS, GPURL_PPO, SB3_PPO),
    ("sac", "HalfCheetah-v5", SAC_STEPS, SEEDS, GPURL_SAC, SB3_SAC),
    ("sac", "Hopper-v5", SAC_STEPS, SEEDS, GPURL_SAC, SB3_SAC),
    ("ppo", "LunarLander-v3", LANDER_STEPS, LANDER_SEEDS, GPURL_PPO_LANDER, SB3_PPO_LANDER),
    ("dqn", "LunarLander-v3", SAC_STEPS, SEEDS, GPURL_DQN, SB3_DQN),
]


def _pair(
    algorithm: str, env: str, steps: int, seeds: int, own: Settings, other: Settings
) -> list[Case]:
    """The case of gpurl and that of stable-baselines3."""
    env = f"gymnasium_cpu:{env}"
    name = f"{algorithm}-{task_of(env)}"
    rows = (("gym", "gpurl", own), ("sb3", "sb3", other))
    return [
        Case(
            f"{prefix}-{name}",
            "peers",
            algorithm,
            env,
            steps,
            seeds=seeds,
            settings=settings,
            points=POINTS,
            curve_episodes=CURVE_EPISODES,
            trainer=trainer,
        )
        for prefix, trainer, settings in rows
    ]


PEER_CASES = [case for pair in PAIRS for case in _pair(*pair)]
