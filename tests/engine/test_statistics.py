"""Episode statistics: whose returns and lengths go into the means."""

import torch

from gpurl.engine.statistics import EpisodeStatistics
from gpurl.envs.vec_env import Timestep


def test_episodes_whose_return_is_not_finite_do_not_count() -> None:
    """Nor do episodes that go on; their lengths stay out too, and later means are not spoiled."""
    statistics, nobody = EpisodeStatistics(torch.device("cpu")), torch.zeros(6, dtype=torch.bool)
    episode = {
        "r": torch.tensor([1.0, torch.nan, 3.0, 7.0, torch.inf, -torch.inf]),
        "l": torch.tensor([10, 20, 30, 40, 50, 60]),
    }
    finished = torch.tensor([True, True, True, False, True, True])
    statistics.add(
        Timestep(
            torch.zeros(6, 1),
            torch.zeros(6),
            nobody,
            nobody,
            {"episode": episode, "_episode": finished},
        )
    )
    metrics = {name: float(value) for name, value in statistics.metrics().items()}
    assert metrics == {"episodes": 2.0, "returns": 4.0, "lengths": 40.0}
    assert statistics.read(metrics) == {
        "rollout/ep_rew_mean": 2.0,
        "rollout/ep_len_mean": 20.0,
        "rollout/episodes": 2.0,
    }
