"""What several processes exchange is counted exactly, and the formula is worked out by hand."""

import math

import pytest
import torch

from benchmarks import scaling
from benchmarks.scaling import (
    CASES,
    ENVS_OF_RANK,
    OTHER_EXCHANGES,
    SMALL,
    SilentRanks,
    iteration_seconds,
    nccl_seconds,
    paper_efficiency,
    run_ranks,
)
from gpurl.nn.optimizer import BLOCK
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer


def test_an_iteration_exchanges_a_gradient_a_minibatch_and_little_else() -> None:
    settings = make_settings(
        "ppo", "chasing", num_envs=ENVS_OF_RANK, device="cpu", eval_episodes=0, **CASES["ppo"]
    )
    trainer = make_trainer(settings, torch.device("cpu"))
    parameters = sum(each.numel() for each in trainer.algorithm.parameters())
    flat = math.ceil(parameters / BLOCK) * BLOCK
    trainer.env.close()
    minibatches = CASES["ppo"]["epochs"] * CASES["ppo"]["minibatches"]

    results = run_ranks(2, {"algorithm": "ppo"})

    assert [each["calls"] for each in results] == [minibatches + OTHER_EXCHANGES] * 2
    gradients = 4 * minibatches * flat
    assert gradients < results[0]["bytes"] < gradients + 1000


def test_ranks_that_never_talk_have_the_shapes_of_those_that_do() -> None:
    ranks = SilentRanks(1, 3)
    assert ranks.stack(torch.ones(2, 5)).shape == (3, 2, 5)
    assert ranks.share("x") == ["x", "x", "x"]


def test_an_iteration_is_its_work_its_latencies_and_its_bytes() -> None:
    assert iteration_seconds(0.5, 10, 2e6, 0.01, 1e7) == pytest.approx(0.5 + 0.1 + 0.2)


def test_nccl_has_these_times() -> None:
    # one node of 8: 4.4 + 2 * 7 * 0.52 us; 4 nodes: 4.4 + 2 * (7 * 0.52 * 1.8 + 2 * 5) us
    assert nccl_seconds(0, 1) == 0.0
    assert nccl_seconds(0, 8) == pytest.approx(11.68e-6)
    assert nccl_seconds(0, 32) == pytest.approx(37.504e-6)
    # many bytes go by LL128: 4.4 + 2 * 7 * 1.2 us, 42 GB/s
    assert nccl_seconds(42e6, 8) == pytest.approx(21.2e-6 + 1e-3)


def test_efficiency_falls_with_gpus_and_with_small_networks() -> None:
    for case in scaling.PAPER:
        efficiencies = [paper_efficiency(case, count) for count in scaling.PAPER_COUNTS]
        assert efficiencies[0] == 1.0
        assert efficiencies == sorted(efficiencies, reverse=True)
    assert paper_efficiency("chasing 64x64", 8) < paper_efficiency("robot 512x256x128", 8)
    seconds = 16 * nccl_seconds(41e3, 2) + OTHER_EXCHANGES * nccl_seconds(SMALL, 2)
    assert paper_efficiency("chasing 64x64", 2) == pytest.approx(6.5e-3 / (6.5e-3 + seconds))
    assert not math.isnan(paper_efficiency("chasing 64x64", 1000, factor=3.0))
