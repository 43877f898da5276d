"""Isaac Gym's two processes on one GPU: memory and events by CUDA IPC, over the fake simulators on
the GPU pipeline.
"""

import sys
from typing import Any

import pytest
import torch

import gpurl
from gpurl.envs import make_env
from gpurl.envs.isaac_gym.check import describe
from gpurl.envs.isaac_gym.process import PYTHON_VARIABLE
from tests.envs.walker_oracle import FAKE, NUM_ENVS, VARIANTS, Variant, check_episodes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.task)
def test_all_that_counts_are_true_transitions(variant: Variant) -> None:
    env = make_env(f"isaac_gym:{variant.task}", NUM_ENVS, "cuda", seed=5)
    seen = check_episodes(env, variant, env.reset()[0])
    assert min(seen["terminated"], seen["truncated"], seen["both"]) > 0
    env.close()


def test_the_cpu_pipeline_serves_a_policy_on_the_gpu() -> None:
    env = make_env("isaac_gym:FakeCartpole", NUM_ENVS, "cuda", pipeline="cpu")
    assert check_episodes(env, VARIANTS[0], env.reset()[0])["dead"] > 0
    env.close()


def test_doctor_tries_what_is_shared() -> None:
    assert describe()[1] == "CUDA IPC works"


def test_neither_side_runs_ahead_of_the_others_gpu_work() -> None:
    """Actions that the GPU is still busy with when the step is asked for, many times, with nothing
    that waits between.
    """
    count = 1 << 16
    env: Any = make_env(
        "isaac_gym:FakeCartpole",
        count,
        "cuda",
        overrides="env.clipObservations=100000.0",
    )
    obs, _ = env.reset()
    busy = torch.randn(4096, 4096, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(200):
            for _ in range(4):
                busy = (busy @ busy).tanh()
            action = (
                torch.full((count, 1), 1 / 64 if step % 2 else -1 / 64, device="cuda")
                + 0.0 * busy[0, 0]
            )
            timestep = env.step(action)
            moved = timestep.info["final_obs"][:, 0] - obs[:, 0] - action[:, 0]
            wrong += ((moved != 0.0) & timestep.info["valid"]).sum()
            obs = timestep.obs
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(wrong) == 0
    env.close()


def test_ppo_trains_with_graphs_around_the_simulator(tmp_path: Any) -> None:
    small = {
        "num_envs": 512,
        "horizon": 8,
        "minibatches": 2,
        "total_steps": 512 * 8 * 6,
        "quiet": True,
        "eval_episodes": 64,
    }
    run = gpurl.train(
        "ppo",
        "isaac_gym:FakeCartpole",
        run_dir=str(tmp_path / "run"),
        device="cuda",
        env_options={"max_episode_steps": 20},
        **small,
    )
    assert run.outcome.reason == "total_steps"
