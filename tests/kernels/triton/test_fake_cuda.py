"""The stand-in for a GPU refuses what a GPU refuses; otherwise tests on it would prove nothing."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.kernels import backend
from gpurl.kernels.permutation import gather_rows_triton
from gpurl.kernels.random import random_uniform_triton, stream_constants
from tests.fake_cuda import FakeCuda
from tests.kernels.triton.conftest import COMPILED_ON

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(COMPILED_ON is not None, reason="there is a real GPU"),
]


def on_gpu(device: str = "cuda") -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], device=device)


@pytest.mark.parametrize(
    ("mistake", "error", "reason"),
    [
        (lambda: on_gpu() + torch.ones(3), RuntimeError, "on the same device, .*cpu.*cuda:0.*add"),
        (lambda: on_gpu() + on_gpu("cuda:1"), RuntimeError, "on the same device, .*cuda:1"),
        (lambda: torch.stack([on_gpu(), torch.ones(3)]), RuntimeError, "on the same device"),
        (lambda: on_gpu().numpy(), TypeError, "to numpy"),
        (lambda: torch.ones(3, device="cuda", pin_memory=True), RuntimeError, "be pinned"),
        (lambda: torch.cuda.set_device(2), RuntimeError, "invalid device ordinal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_refused(
    mistake: Callable[[], Any], error: type[Exception], reason: str
) -> None:
    with FakeCuda(2), pytest.raises(error, match=reason):
        mistake()


def test_a_result_is_where_its_inputs_are() -> None:
    with FakeCuda(2):
        x = on_gpu("cuda:1").requires_grad_()
        network = torch.nn.Linear(3, 2).to("cuda:1")
        (gradient,) = torch.autograd.grad(network(x).sum(), x)
        for tensor in (x * 2.0, x[1:], torch.empty_like(x), x.new_zeros(4), gradient):
            assert str(tensor.device) == "cuda:1"
            assert (tensor.is_cuda, tensor.is_cpu) == (True, False)
        with torch.device("cuda"):
            assert str(torch.zeros(2).device) == "cuda:0"
        assert x.cpu().is_cpu
        assert torch.zeros(2).is_cpu
        # a copy, not the same memory
        host = torch.zeros(3)
        host.to("cuda").add_(1.0)
        assert host.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    "look",
    [
        lambda x: float(x[0]),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.tensor(1.0, device="cuda"),
        lambda x: x[[0, 1]],
    ],
)
def test_waiting_is_noted_where_the_debug_mode_forbids_it(look: Callable[[Tensor], Any]) -> None:
    with FakeCuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = on_gpu()
        look(x)
        torch.cuda.set_sync_debug_mode("error")
        x + 1.0
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            look(x)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("default")
        with (
            pytest.raises(RuntimeError, match="previous error during capture"),
            torch.cuda.graph(graph, None, torch.cuda.Stream(), "thread_local"),
        ):
            look(x)


def test_a_kernel_takes_tensors_of_the_current_gpu_only() -> None:
    with FakeCuda(2):
        key, gamma = stream_constants(0, 4, "cuda:1")
        step = torch.zeros((), dtype=torch.int64, device="cuda:1")
        with torch.cuda.device(1):
            assert str(random_uniform_triton(key, gamma, step, 0, 2).device) == "cuda:1"
        with pytest.raises(RuntimeError, match=r"illegal memory access: .*cuda:0 .* of cuda:1"):
            random_uniform_triton(key, gamma, step, 0, 2)
        with pytest.raises(ValueError, match=r"random_kernel: .* of shape \[4\] .*cpu tensor"):
            random_uniform_triton(key.cpu(), gamma, step, 0, 2)


def test_a_captured_launch_runs_at_every_replay_and_only_then() -> None:
    with FakeCuda():
        key, gamma = stream_constants(0, 1, "cuda")
        step = torch.zeros((), dtype=torch.int64, device="cuda")
        packed = torch.arange(30.0, device="cuda").view(10, 3)
        total = torch.zeros(4, 3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, None, torch.cuda.Stream(), "thread_local"):
            total += gather_rows_triton(packed, key, gamma, step, 0, 2, 4)
            step += 1
        assert not bool(total.any())
        expected = torch.zeros(4, 3, device="cuda")
        for number in range(3):
            graph.replay()
            expected += gather_rows_triton(
                packed, key, gamma, torch.tensor(number, device="cuda"), 0, 2, 4
            )
            assert torch.equal(total, expected)


def test_the_program_takes_the_gpus_paths() -> None:
    with FakeCuda():
        assert backend.use_triton(on_gpu())
        assert not backend.use_c(on_gpu())
        assert not backend.host_sync_is_free(on_gpu().device)
        assert not backend.use_triton(torch.zeros(1))
