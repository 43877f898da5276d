"""Discrete actions, Box2D, classic control and Chasing, mostly with rl-zoo3's budgets and
hyper-parameters.
"""

from benchmarks.learning.case import Case, Settings, task_of

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
    target = {"cart_pole": 450.0, "acrobot": -100.0, "lunar_lander": ZOO_DQN_LANDER}[task]
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


def _box2d(algorithm: str, env: str, steps: int, target: float | None = None) -> Case:
    suffix = "-500k" if algorithm == "dqn" else ""
    task = task_of(env)
    return Case(
        f"{algorithm}-{task}{suffix}",
        "box2d",
        algorithm,
        env,
        steps,
        published=ZOO_COLUMNS.get(algorithm, ()),
        target=target,
    )


BOX2D = [
    _box2d("ppo", LANDER, 1_000_000, 200.0),
    _box2d("dqn", LANDER, 500_000, 200.0),  # more steps than rl-zoo3's DQN has
    _box2d("ppo", CONTINUOUS_LANDER, 1_000_000, 200.0),
    _box2d("a2c", CONTINUOUS_LANDER, 1_000_000),
    _box2d("sac", CONTINUOUS_LANDER, 500_000, 200.0),
    _box2d("td3", CONTINUOUS_LANDER, 300_000),
    _box2d("sac", WALKER, 500_000, 280.0),
    _box2d("td3", WALKER, 1_000_000, 280.0),
]

# ---- classic control ----

# algorithm, task, steps, target
CONTROL: list[tuple[str, str, int, float | None]] = [
    ("ppo", "cart_pole", 1_000_000, 475.0),
    ("a2c", "cart_pole", 500_000, 475.0),
    ("ppo", "acrobot", 2_000_000, -100.0),
    ("a2c", "acrobot", 500_000, -100.0),
    ("ppo", "mountain_car_continuous", 4_000_000, 90.0),
    ("a2c", "mountain_car_continuous", 1_000_000, 90.0),
    ("sac", "mountain_car_continuous", 50_000, 90.0),
    ("td3", "mountain_car_continuous", 300_000, 90.0),
    ("ppo", "pendulum", 1_000_000, -200.0),
    ("a2c", "pendulum", 1_000_000, -200.0),
    *((name, "pendulum", 40_000, -200.0) for name in ("ddpg", "td3", "sac", "mod_sac", "redq")),
    *((name, "pendulum", 50_000, -200.0) for name in ("fast_td3", "fast_sac")),
]
CLASSIC = [
    Case(
        f"{algorithm}-{task}",
        "classic",
        algorithm,
        task,
        steps,
        published=ZOO_COLUMNS.get(algorithm, ()),
        target=target,
    )
    for algorithm, task, steps, target in CONTROL
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
