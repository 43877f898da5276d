"""Discrete actions, Box2D, classic control and Chasing, mostly with rl-zoo3's budgets and
hyper-parameters.
"""

from benchmarks.learning.case import Case, Settings

ZOO_COLUMNS = {
    name: (f"{name.upper()} rl-zoo3",) for name in ("ppo", "a2c", "dqn", "sac", "td3", "ddpg")
}
LANDER = "gymnasium_cpu:LunarLander-v3"
CONTINUOUS_LANDER = "gymnasium_cpu:LunarLanderContinuous-v3"
WALKER = "gymnasium_cpu:BipedalWalker-v3"

# ---- discrete actions ----

# the budgets of rl-zoo3
CART_POLE_STEPS = 50_000
ZOO_STEPS = 100_000
ZOO_DQN_LANDER = 154.0  # the return of its DQN
DQN_FAMILY: dict[str, Settings] = {  # the name says what differs from DQN
    "dqn": {"double": False},
    "double_dqn": {},
    "dueling_dqn": {"network": {"dueling": True}},
    "c51": {"atoms": 51},
    "qr_dqn": {"quantiles": 25},
}
# the range of scaled returns, for the atoms of C51; Rainbow's presets have the same
RANGES: dict[str, Settings] = {
    "cart_pole": {"v_min": 0.0, "v_max": 10.0},
    "acrobot": {"v_min": -100.0, "v_max": 0.0},
    "lunar_lander": {"v_min": -300.0, "v_max": 300.0},
}
DISCRETE_TASKS = {"cart_pole": "cart_pole", "acrobot": "acrobot", "lunar_lander": LANDER}


def _discrete(task: str, env: str) -> list[Case]:
    """The DQN family and PQN on one task."""
    steps = CART_POLE_STEPS if task == "cart_pole" else ZOO_STEPS
    target = {"cart_pole": 450.0, "acrobot": None, "lunar_lander": ZOO_DQN_LANDER}[task]
    family = [(name, "dqn", changes) for name, changes in DQN_FAMILY.items()]
    cases = [
        Case(
            f"{name}-{task}",
            "discrete",
            algorithm,
            env,
            steps,
            settings=changes | (RANGES[task] if "atoms" in changes else {}),
            target=target,
        )
        for name, algorithm, changes in (*family, ("rainbow", "rainbow", {}))
    ]
    few: Settings = {"num_envs": 32, "horizon": 64}
    pqn_steps, pqn = (300_000, {}) if task == "cart_pole" else (500_000, few)
    return [
        *cases,
        Case(f"pqn-{task}", "discrete", "pqn", env, pqn_steps, settings=pqn, target=target),
    ]


DISCRETE = [case for task, env in DISCRETE_TASKS.items() for case in _discrete(task, env)]

# ---- Box2D ----

# rl-zoo3's hyper-parameters of PPO for the landers
ZOO_PPO_LANDER: Settings = {
    "num_envs": 16,
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
# and of SAC and TD3 for Box2D, with eight environments in place of one
ZOO_NETWORKS: Settings = {
    "actor_network": {"hidden": [400, 300]},
    "critic_network": {"hidden": [400, 300]},
}
ZOO_SAC: Settings = ZOO_NETWORKS | {
    "num_envs": 8,
    "updates": 8,
    "learning_starts": 10_000,
    "learning_rate": 7.3e-4,
}
ZOO_SAC_LANDER = ZOO_SAC | {"tau": 0.01, "schedule": "linear", "replay_size": 500_000}
ZOO_SAC_WALKER = ZOO_SAC | {"tau": 0.02, "gamma": 0.98, "replay_size": 300_000}
ZOO_TD3: Settings = ZOO_NETWORKS | {
    "num_envs": 8,
    "updates": 8,
    "learning_starts": 10_000,
    "learning_rate": 1e-3,
    "gamma": 0.98,
    "replay_size": 200_000,
}
# rl-zoo3's discount, longer rollouts. The preset of Gymnasium's tasks (16 steps, 0.99, 0.95, 1e-3)
# ends at -109, and -100 with 32 environments, 0.999, 0.98 and 2e-3 (seed 0)
A2C_LANDER: Settings = {
    "num_envs": 16,
    "horizon": 64,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "learning_rate": 3e-3,
    "schedule": "linear",
}


def _box2d(
    algorithm: str, env: str, steps: int, settings: Settings, target: float | None = None
) -> Case:
    suffix = "-500k" if algorithm == "dqn" else ""
    task = Case("", "", algorithm, env, steps).task
    return Case(
        f"{algorithm}-{task}{suffix}",
        "box2d",
        algorithm,
        env,
        steps,
        settings=settings,
        published=ZOO_COLUMNS.get(algorithm, ()),
        target=target,
    )


BOX2D = [
    _box2d("ppo", LANDER, 1_000_000, ZOO_PPO_LANDER, 200.0),
    _box2d("dqn", LANDER, 500_000, {}, 200.0),  # more steps than rl-zoo3's DQN has
    _box2d("ppo", CONTINUOUS_LANDER, 1_000_000, ZOO_PPO_LANDER, 200.0),
    _box2d("a2c", CONTINUOUS_LANDER, 1_000_000, A2C_LANDER),
    _box2d("sac", CONTINUOUS_LANDER, 500_000, ZOO_SAC_LANDER, 200.0),
    _box2d("td3", CONTINUOUS_LANDER, 300_000, ZOO_TD3),
    _box2d("sac", WALKER, 500_000, ZOO_SAC_WALKER, 280.0),
    _box2d("td3", WALKER, 1_000_000, ZOO_TD3, 280.0),
]

# ---- classic control ----

MANY_STEPS: Settings = {"num_envs": 1024, "horizon": 32, "gamma": 0.999, "initial_std": 1.5}
# rl-zoo3's SAC explores by noise that depends on the state (gSDE); here noise lasts up to 32 steps,
# without which SAC never reaches the flag
CAR_SAC: Settings = {
    "num_envs": 32,
    "updates": 32,
    "learning_starts": 5_000,
    "gamma": 0.9999,
    "tau": 0.01,
    "noise_span": 32,
    "noise_exponent": 0.5,
    "actor_network": {"hidden": [64, 64]},
    "critic_network": {"hidden": [64, 64]},
}
CAR_TD3: Settings = {
    "num_envs": 8,
    "updates": 8,
    "learning_starts": 5_000,
    "noise": "ornstein_uhlenbeck",
    "noise_std": 0.5,
}
# rl-zoo3's rollouts, discount and lambda, on more environments at a higher rate. With 16 steps,
# 0.95 and 7e-4 A2C ends at -880 on Pendulum, and on MountainCarContinuous it pushes all the time
A2C_PENDULUM: Settings = {
    "num_envs": 32,
    "horizon": 8,
    "initial_std": 0.6,
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "learning_rate": 2e-3,
    "schedule": "linear",
}
A2C_CAR: Settings = {
    "num_envs": 64,
    "horizon": 100,
    "gamma": 0.99,
    "gae_lambda": 0.98,
    "learning_rate": 3e-3,
    "schedule": "linear",
}
FEW: Settings = {"num_envs": 16, "learning_rate": 7e-4}

# algorithm, task, steps, settings, target
CONTROL: list[tuple[str, str, int, Settings, float | None]] = [
    ("ppo", "cart_pole", 1_000_000, {}, 475.0),
    ("a2c", "cart_pole", 500_000, {}, 475.0),
    ("ppo", "acrobot", 2_000_000, {"num_envs": 1024, "horizon": 16}, -100.0),
    ("a2c", "acrobot", 500_000, FEW, None),
    ("ppo", "mountain_car_continuous", 4_000_000, MANY_STEPS, 90.0),
    ("a2c", "mountain_car_continuous", 1_000_000, A2C_CAR, 90.0),
    ("sac", "mountain_car_continuous", 50_000, CAR_SAC, 90.0),
    ("td3", "mountain_car_continuous", 300_000, CAR_TD3, None),
    ("ppo", "pendulum", 1_000_000, {}, -200.0),
    ("a2c", "pendulum", 1_000_000, A2C_PENDULUM, -200.0),
    *((name, "pendulum", 40_000, {}, -200.0) for name in ("ddpg", "td3", "sac", "mod_sac", "redq")),
    *((name, "pendulum", 50_000, {}, -200.0) for name in ("fast_td3", "fast_sac")),
]
CLASSIC = [
    Case(
        f"{algorithm}-{task}",
        "classic",
        algorithm,
        task,
        steps,
        settings=settings,
        published=ZOO_COLUMNS.get(algorithm, ()),
        target=target,
    )
    for algorithm, task, steps, settings, target in CONTROL
]

# ---- Chasing ----

# variant, options, steps, target: about what the scripted pursuer gets (10.4; with directions 7.06,
# since a diagonal one costs as much as its length, 1.41)
VARIANTS: list[tuple[str, Settings, int, float]] = [
    ("", {}, 20_000_000, 10.0),
    ("-no_bonus", {"bonus": False}, 20_000_000, 1.5),
    ("-discrete", {"discrete": True}, 20_000_000, 6.9),
    ("-dim_3", {"dim": 3}, 40_000_000, 9.0),
]
CHASING = [
    Case(
        f"ppo-chasing{variant}",
        "chasing",
        "ppo",
        "chasing",
        steps,
        settings={"env_options": options} if options else {},
        target=target,
    )
    for variant, options, steps, target in VARIANTS
]
