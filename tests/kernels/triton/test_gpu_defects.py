"""What would break on a GPU and not on a CPU, on the stand-in of tests/fake_cuda.py."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpurl
from gpurl.engine.graphs import CudaGraphs
from gpurl.envs.registry import make_env
from tests.fake_cuda import FakeCuda
from tests.kernels.triton.conftest import COMPILED_ON

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(COMPILED_ON is not None, reason="there is a real GPU"),
]


@pytest.mark.parametrize("name", ["chasing", "cart_pole"])
def test_an_environment_steps_on_a_gpu_that_is_not_the_current_one(name: str) -> None:
    with FakeCuda(2):
        env = make_env(name, 4, "cuda:1")
        env.reset(seed=0)
        kind = torch.int64 if name == "cart_pole" else torch.float32
        action = torch.zeros(4, *(env.single_action_space.shape or ()), dtype=kind, device="cuda:1")
        assert str(env.step(action).reward.device) == "cuda:1"
        assert torch.cuda.current_device() == 0


def test_a_policy_acts_on_a_gpu_that_is_not_the_current_one(tmp_path: Path) -> None:
    run = gpurl.train(
        "ppo", "pendulum", num_envs=4, horizon=4, minibatches=1, epochs=2, total_steps=16,
        eval_episodes=0, quiet=True, run_dir=tmp_path / "run", device="cpu",
        network={"hidden": (16,)},
    )  # fmt: skip
    with FakeCuda(2):
        policy = gpurl.load(run.folder, "cuda:1")
        obs = torch.zeros(3, device="cuda:1")
        for deterministic in (True, False):
            assert str(policy.act(obs, deterministic).device) == "cuda:1"
        assert isinstance(policy.value(obs), float)
        assert torch.cuda.current_device() == 0


def test_another_capture_works_after_one_that_failed() -> None:
    """The allocator of torch 2.11 believes in a failed capture until it is told."""
    with FakeCuda() as gpu:
        graphs = CudaGraphs(torch.device("cuda"))
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graphs.capture(lambda: float(x.sum()))
        assert gpu.captures == []
        replay, _ = graphs.capture(lambda: x.add_(1.0))
        replay()
        assert x.tolist() == [2.0] * 3


def test_no_earlier_graph_is_destroyed_by_garbage_collection_during_a_capture() -> None:
    """CUDA refuses that: a training after another one of the same process warned of it."""
    with FakeCuda():
        graphs = CudaGraphs(torch.device("cuda"))
        x = torch.ones(3, device="cuda")
        _, was_enabled = graphs.capture(lambda: (x.add_(1.0), gc.isenabled())[1])
        assert not was_enabled
        assert gc.isenabled()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graphs.capture(lambda: float(x.sum()))
        assert gc.isenabled()
        gc.disable()
        try:
            graphs.capture(lambda: x.add_(1.0))
            assert not gc.isenabled()  # who has turned it off wants it so
        finally:
            gc.enable()


def test_other_versions_may_refuse_to_end_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda():

        def refuses(device: int, pool: object) -> None:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuses)
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="previous error during capture"):
            CudaGraphs(torch.device("cuda")).capture(lambda: float(x.sum()))


def test_the_warning_of_the_debug_mode_is_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    with FakeCuda():
        x = torch.ones(3, device="cuda")

        def doubled() -> Tensor:
            return x * 2.0

        result, waited = CudaGraphs(torch.device("cuda")).warm_up(doubled)
    assert result.tolist() == [2.0] * 3
    assert waited == ""
    assert [
        str(warning.message) for warning in recwarn if "prototype" in str(warning.message)
    ] == []
