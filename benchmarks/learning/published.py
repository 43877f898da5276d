"""Published returns at the end of a training, with their sources: mean and standard deviation over
seeds, NaN where there is none.
"""

from dataclasses import dataclass

NONE = float("nan")


@dataclass(frozen=True)
class Column:
    """One algorithm of one publication."""

    name: str
    source: str
    steps: str  # of a training
    returns: dict[str, tuple[float, float]]  # by task: mean, standard deviation


CLEANRL = "CleanRL's documentation, docs.cleanrl.dev, Gymnasium's or Gym's MuJoCo v2 to v4"
TIANSHOU = "Tianshou's MuJoCo benchmark, examples/mujoco/README.md, Gym's MuJoCo v3"
ZOO = "rl-baselines3-zoo, benchmark.md; MuJoCo v3 or v4"
FLASH = "FlashSAC's publication, MuJoCo v4"

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
                "reacher": (-4.1, 0.3),
                "swimmer": (67, 99),
            },
        ),
        Column(
            "PPO rl-zoo3",
            ZOO,
            "1 M; 100 k of the control tasks, 5 M of BipedalWalker",
            {
                "half_cheetah": (5819, 664),
                "hopper": (2410, 10),
                "walker2d": (3479, 822),
                "ant": (1327, 452),
                "swimmer": (282, 10),
                "lunar_lander": (242, NONE),
                "lunar_lander_continuous": (271, NONE),
                "bipedal_walker": (288, NONE),
                "acrobot": (-74, NONE),
                "cart_pole": (500, NONE),
                "pendulum": (-172, NONE),
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
            "500 k; 20 k of Pendulum",
            {
                "lunar_lander_continuous": (260, NONE),
                "bipedal_walker": (298, NONE),
                "pendulum": (-157, NONE),
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
        Column("TD3 rl-zoo3", ZOO, "1 M", {"bipedal_walker": (306, NONE)}),
        Column(
            "DDPG CleanRL",
            CLEANRL,
            "1 M",
            {
                "half_cheetah": (10374, 158),
                "hopper": (1577, 819),
                "walker2d": (1240, 390),
                "inverted_pendulum": (643, 70),
                "pusher": (-77, 39),
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
