"""MuJoCo tasks on a GPU: a step is that of a CPU, is captured, waits for nothing, and trains
between graphs of the policy.
"""

from typing import Any

import pytest
import torch

from gpurl.envs import make_env
from tests.engines import graph_level
from tests.envs.test_mujoco import actions_of
from tests.gpu.test_training_on_a_gpu import trainer_of

pytest.importorskip("mujoco_warp")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["hopper", "ant"])
@pytest.mark.parametrize("graph", [True, False])
def test_a_step_is_that_of_a_cpu_and_waits_for_nothing(name: str, graph: bool) -> None:
    host: Any = make_env(name, 16, cone="elliptic", simulator="warp")
    device: Any = make_env(name, 16, "cuda", cone="elliptic", graph=graph)
    host.reset(seed=1)
    device.reset(seed=1)
    assert device._worlds.is_captured == graph
    mode = torch.cuda.get_sync_debug_mode()
    for action in actions_of(host, 30):
        device.load_state_dict(
            host.state_dict()
        )  # each from the same state, as motions drift apart
        on_device = action.cuda()
        torch.cuda.set_sync_debug_mode(
            "error" if graph else mode
        )  # without a graph the solver looks whether it is done
        try:
            there = device.step(on_device)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        here = host.step(action)
        torch.testing.assert_close(
            there.info["final_obs"].cpu(), here.info["final_obs"], rtol=2e-2, atol=2e-2
        )
        torch.testing.assert_close(there.reward.cpu(), here.reward, rtol=1e-3, atol=1e-3)
        assert bool(there.info["valid"].all())


def test_training_replays_physics_between_graphs_of_the_policy() -> None:
    trainer = trainer_of("inverted_pendulum")
    for _ in range(20):
        trainer.iterate()
    env: Any = trainer.env
    assert graph_level(trainer.engine) == "policy"
    assert env._worlds.is_captured
    values = trainer.engine.statistics.read(
        {name: float(value) for name, value in trainer.engine.statistics.metrics().items()},
        trainer.engine.steps,
    )
    assert values["rollout/episodes"] > 0
    assert not any("worlds" in name for name in values)  # none has failed
    assert values["rollout/ep_len_mean"] > 5.0
