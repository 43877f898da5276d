"""The newest episodes by one launch against the reference, with returns that are not finite."""

import pytest
import torch

from gpurl.kernels import backend
from gpurl.kernels.newest_episodes import keep_newest, keep_newest_reference, keep_newest_triton


@pytest.mark.parametrize("num_envs", [1, 77, 256, 5000])
def test_one_launch_keeps_what_the_reference_keeps(num_envs: int) -> None:
    generator = torch.Generator().manual_seed(num_envs)
    newest = [torch.zeros(3, num_envs) for _ in range(2)]
    by_hand = torch.zeros(num_envs, 3)
    for _ in range(3):
        episode_return = torch.randn(num_envs, generator=generator)
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(num_envs)
        episode_return[::7] = bad[: len(episode_return[::7])]
        length = torch.randint(1, 1000, (num_envs,), generator=generator)
        ended = torch.rand(num_envs, generator=generator) < 0.6
        for function, rows in zip((keep_newest_triton, keep_newest_reference), newest):
            function(rows, ended, episode_return, length)
        for env in (ended & episode_return.isfinite()).nonzero().squeeze(1).tolist():
            count = float(by_hand[env, 2]) + 1.0
            values = [float(episode_return[env]), float(length[env]), count]
            by_hand[env] = torch.tensor(values)
    for rows in newest:
        torch.testing.assert_close(rows, by_hand.T, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("length", [torch.int32, torch.int16, torch.float32, torch.float64])
@pytest.mark.parametrize("returns", [torch.float64, torch.float16, torch.bfloat16])
def test_other_number_types_give_the_same(returns: torch.dtype, length: torch.dtype) -> None:
    ended = torch.arange(9) % 2 == 0
    numbers = torch.arange(9)
    for function in (keep_newest_triton, keep_newest_reference):
        newest = torch.zeros(3, 9)
        function(newest, ended, numbers.to(returns), numbers.to(length) + 1)
        expected = torch.stack((numbers, numbers + 1, torch.ones(9))) * ended
        torch.testing.assert_close(newest, expected, rtol=0.0, atol=0.0)


def test_a_return_beyond_float32_does_not_count() -> None:
    returns = torch.tensor([1e300, 2.0], dtype=torch.float64)
    arguments = torch.tensor([True, True]), returns, torch.ones(2)
    for function in (keep_newest_triton, keep_newest_reference):
        newest = torch.zeros(3, 2)
        function(newest, *arguments)
        assert newest.tolist() == [[0.0, 2.0], [0.0, 1.0], [0.0, 1.0]]


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = torch.tensor([True, False]), torch.tensor([5.0, 7.0]), torch.tensor([3, 4])
    for choice in ("torch", "triton"):
        monkeypatch.setattr(backend, "choice", choice)
        newest = torch.zeros(3, 2)
        keep_newest(newest, *arguments)
        assert newest.tolist() == [[5.0, 0.0], [3.0, 0.0], [1.0, 0.0]]
