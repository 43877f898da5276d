"""Published returns at the end of a training, with their sources: mean and standard deviation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One algorithm of one publication."""

    name: str
    source: str
    steps: str  # of a training
    returns: dict[str, tuple[float, float]]  # by task: mean, standard deviation


CLEANRL = (
    "CleanRL's documentation, rl-algorithms: training episodes, which explore; MuJoCo v4 "
    "(SAC mostly v2)"
)
TIANSHOU = (
    "Tianshou, examples/mujoco/README.md: the highest mean of ten seeds at any time of the "
    "training; MuJoCo v3 and v2"
)
ZOO = (
    "rl-baselines3-zoo, benchmark.md: one training, the standard deviation is over its episodes; "
    "MuJoCo v3, Box2D v2 and v3"
)
FLASH = (
    "Kim et al. 2026, arXiv 2604.04539, from the curves of five seeds in its repository "
    "(results/stateRL_cpusim/FlashSAC.csv); MuJoCo v4"
)

COLUMNS = {
    column.name: column
    for column in (
        Column(
            "PPO CleanRL",
            CLEANRL,
            "1 M",
            {
                "half_cheetah": (1443, 46),
                "hopper": (2383, 272),
                "walker2d": (2288, 572),
                "inverted_pendulum": (963, 22),
                "pusher": (-40.4, 7.2),
            },
        ),
        Column(
            "PPO Tianshou",
            TIANSHOU,
            "1 M",
            {
                "half_cheetah": (5784, 1244),
                "hopper": (2609, 701),
                "walker2d": (3589, 757),
                "ant": (3258, 1079),
                "inverted_pendulum": (1000, 0),
                "inverted_double_pendulum": (9231, 270),
                "reacher": (-4.1, 0.3),
                "swimmer": (67, 99),
            },
        ),
        Column(
            "PPO rl-zoo3",
            ZOO,
            "1 M (100 k of CartPole and Pendulum, 20 k of MountainCarContinuous)",
            {
                "half_cheetah": (5819, 664),
                "hopper": (2410, 10),
                "walker2d": (3479, 822),
                "ant": (1327, 452),
                "swimmer": (282, 10),
                "lunar_lander": (242, 32),
                "lunar_lander_continuous": (271, 32),
                "acrobot": (-73.5, 18.2),
                "cart_pole": (500, 0),
                "pendulum": (-172, 104),
                "mountain_car_continuous": (88.3, 2.6),
            },
        ),
        Column(
            "SAC CleanRL",
            CLEANRL,
            "1 M",
            {
                "half_cheetah": (9635, 1424),
                "hopper": (2310, 343),
                "walker2d": (3591, 911),
                "inverted_pendulum": (909, 56),
                "pusher": (-22.5, 0.5),
            },
        ),
        Column(
            "SAC Tianshou",
            TIANSHOU,
            "1 M",
            {
                "half_cheetah": (12139, 1049),
                "hopper": (3542, 52),
                "walker2d": (5007, 252),
                "ant": (5850, 476),
                "inverted_pendulum": (1000, 0),
                "reacher": (-2.6, 0.2),
                "swimmer": (44, 0.5),
            },
        ),
        Column(
            "SAC rl-zoo3",
            ZOO,
            "1 M (500 k of Box2D, 20 k of Pendulum, 50 k of MountainCarContinuous)",
            {
                "half_cheetah": (9535, 100),
                "hopper": (2326, 1130),
                "walker2d": (3863, 254),
                "ant": (4616, 1354),
                "swimmer": (346, 3),
                "lunar_lander_continuous": (260, 65),
                "bipedal_walker": (298, 33),
                "pendulum": (-157, 89),
                "mountain_car_continuous": (94.7, 1.1),
            },
        ),
        Column(
            "TD3 CleanRL",
            CLEANRL,
            "1 M",
            {
                "half_cheetah": (9583, 126),
                "hopper": (3135, 360),
                "walker2d": (4058, 659),
                "inverted_pendulum": (969, 26),
                "pusher": (-30.9, 1.1),
            },
        ),
        Column(
            "TD3 Tianshou",
            TIANSHOU,
            "1 M",
            {
                "half_cheetah": (10201, 773),
                "hopper": (3472, 117),
                "walker2d": (3982, 275),
                "ant": (5116, 800),
                "inverted_pendulum": (1000, 0),
                "reacher": (-2.7, 0.2),
                "swimmer": (104, 34),
            },
        ),
        Column(
            "DDPG CleanRL",
            CLEANRL,
            "1 M",
            {
                "half_cheetah": (10374, 157),
                "hopper": (1577, 819),
                "walker2d": (1240, 390),
                "inverted_pendulum": (643, 70),
                "pusher": (-77, 39),
            },
        ),
        Column(
            "TD3 rl-zoo3",
            ZOO,
            "1 M (300 k of LunarLanderContinuous and MountainCarContinuous, 20 k of Pendulum)",
            {
                "half_cheetah": (9656, 970),
                "hopper": (3606, 4),
                "walker2d": (4718, 46),
                "ant": (5813, 590),
                "swimmer": (359, 1),
                "lunar_lander_continuous": (207, 68),
                "bipedal_walker": (306, 57),
                "pendulum": (-152, 90),
                "mountain_car_continuous": (93.5, 0.1),
            },
        ),
        Column(
            "DDPG rl-zoo3",
            ZOO,
            "20 k",
            {
                "pendulum": (-152, 94),
            },
        ),
        Column(
            "A2C rl-zoo3",
            ZOO,
            "500 k (1 M of Pendulum, 100 k of MountainCarContinuous, 5 M of LunarLanderContinuous)",
            {
                "cart_pole": (500, 0),
                "acrobot": (-83.4, 17.2),
                "pendulum": (-163, 103),
                "mountain_car_continuous": (91.2, 0.3),
                "lunar_lander_continuous": (84.2, 146),
            },
        ),
        Column(
            "DQN rl-zoo3",
            ZOO,
            "100 k (50 k of CartPole)",
            {
                "cart_pole": (500, 0),
                "acrobot": (-76.6, 11.8),
                "lunar_lander": (154, 79),
            },
        ),
        Column(
            "QR-DQN rl-zoo3",
            ZOO,
            "100 k (50 k of CartPole)",
            {
                "cart_pole": (500, 0),
                "acrobot": (-69.1, 10.0),
                "lunar_lander": (70.2, 225),
            },
        ),
        Column(
            "FlashSAC 100 k",
            FLASH,
            "100 k",
            {"half_cheetah": (9815, 155), "hopper": (2121, 1052), "walker2d": (3299, 1556)},
        ),
    )
}


def published(column: str, task: str) -> tuple[float, float] | None:
    """(mean, standard deviation) in a column, None if it has no such task."""
    return COLUMNS[column].returns.get(task)
