"""MuJoCo: PPO at a million steps, off-policy algorithms at 100,000 and 300,000."""

from benchmarks.learning.case import Case

PPO_COLUMNS = ("PPO CleanRL", "PPO Tianshou", "PPO rl-zoo3")
OFF_POLICY_COLUMNS = {
    "sac": ("SAC CleanRL", "SAC Tianshou", "SAC rl-zoo3"),
    "td3": ("TD3 CleanRL", "TD3 Tianshou", "TD3 rl-zoo3"),
    "ddpg": ("DDPG CleanRL",),
}

# PPO at 1 M steps: the lower end of the interval is to reach these, of three seeds the median
PPO_TARGETS = {
    "half_cheetah": 3000.0,
    "hopper": 2000.0,
    "walker2d": 2000.0,
    "ant": 1300.0,
    "swimmer": None,
    "inverted_pendulum": 950.0,
    "inverted_double_pendulum": None,
    "reacher": None,
    "pusher": None,
}
# half of Tianshou's mean at 1 M
OFF_POLICY_TARGETS = {
    ("sac", "half_cheetah"): 6070.0,
    ("sac", "hopper"): 1771.0,
    ("td3", "half_cheetah"): 5100.0,
    ("td3", "hopper"): 1736.0,
}
FLASH_COLUMNS = ("FlashSAC 100 k",)

PPO_MUJOCO = [
    Case(
        f"ppo-{task}",
        "ppo",
        "ppo",
        task,
        1_000_000,
        seeds=5,
        published=PPO_COLUMNS,
        target=target,
        is_lower_end=True,
    )
    for task, target in PPO_TARGETS.items()
]
# the same with Gymnasium's environments, eight of them in turn
PPO_GYMNASIUM = [
    Case(
        f"gymnasium-ppo-{task}",
        "gymnasium",
        "ppo",
        f"gymnasium_cpu:{env}",
        1_000_000,
        published=PPO_COLUMNS,
        target=PPO_TARGETS[task],
    )
    for task, env in (("half_cheetah", "HalfCheetah-v5"), ("hopper", "Hopper-v5"))
]
OFF_POLICY_MUJOCO = [
    *(
        Case(
            f"{name}-{task}",
            "off_policy",
            name,
            task,
            300_000,
            published=OFF_POLICY_COLUMNS[name],
            target=target,
        )
        for (name, task), target in OFF_POLICY_TARGETS.items()
    ),
    Case(
        "ddpg-half_cheetah",
        "off_policy",
        "ddpg",
        "half_cheetah",
        100_000,
        seeds=2,
        published=OFF_POLICY_COLUMNS["ddpg"],
    ),
    *(
        Case(
            f"{name}-half_cheetah",
            "off_policy",
            name,
            "half_cheetah",
            100_000,
            seeds=2,
        )
        for name in ("fast_td3", "fast_sac")
    ),
    Case(
        "redq-hopper",
        "off_policy",
        "redq",
        "hopper",
        100_000,
        seeds=2,
        better_than="sac-hopper",
    ),
    # published are the first 100,000 of a million steps, in which learning rates hardly fall. bf16
    # takes half the time of float32 on a CPU that multiplies in it. The target: within two of the
    # published standard deviations, 9815 - 2 x 155
    *(
        Case(
            f"flash_sac-{task}",
            "off_policy",
            "flash_sac",
            task,
            100_000,
            settings={"schedule": "constant", "precision": "bf16"},
            published=FLASH_COLUMNS,
            target=target,
            threads=2,
        )
        for task, target in (("half_cheetah", 9505.0), ("hopper", None), ("walker2d", None))
    ),
]
