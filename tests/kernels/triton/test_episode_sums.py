"""Sums of ended episodes by one program against the reference, with returns that are not finite."""

import pytest
import torch

from gpurl.kernels import backend
from gpurl.kernels.episode_sums import add_episodes, add_episodes_reference, add_episodes_triton


@pytest.mark.parametrize("num_envs", [1, 77, 2048, 5000])
def test_one_launch_adds_what_the_reference_adds(num_envs: int) -> None:
    generator = torch.Generator().manual_seed(num_envs)
    episode_return, length = (
        torch.randn(num_envs, generator=generator),
        torch.randint(1, 1000, (num_envs,), generator=generator),
    )
    ended = torch.rand(num_envs, generator=generator) < 0.6
    episode_return[::7] = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(num_envs)[
        : len(episode_return[::7])
    ]
    sums = [torch.tensor([1.0, 2.0, 3.0]) for _ in range(2)]
    for _ in range(2):
        add_episodes_triton(sums[0], ended, episode_return, length)
        add_episodes_reference(sums[1], ended, episode_return, length)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-4)
    finite = ended & torch.isfinite(episode_return)
    assert float(sums[0][0]) == 1.0 + 2 * int(finite.sum())
    assert float(sums[0][2]) == 3.0 + 2 * int(length[finite].sum())


@pytest.mark.parametrize("length", [torch.int32, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("returns", [torch.float64, torch.float16, torch.bfloat16])
def test_other_number_types_add_the_same(returns: torch.dtype, length: torch.dtype) -> None:
    ended = torch.arange(9) % 2 == 0
    for function in (add_episodes_triton, add_episodes_reference):
        sums = torch.zeros(3)
        function(sums, ended, torch.arange(9).to(returns), torch.arange(9).to(length) + 1)
        assert sums.tolist() == [5.0, 20.0, 25.0]


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = torch.tensor([True, False]), torch.tensor([5.0, 7.0]), torch.tensor([3, 4])
    for choice in ("torch", "triton"):
        monkeypatch.setattr(backend, "choice", choice)
        sums = torch.zeros(3)
        add_episodes(sums, *arguments)
        assert sums.tolist() == [1.0, 5.0, 3.0]
