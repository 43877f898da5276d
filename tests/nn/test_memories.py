"""What every memory must do: a rollout unrolled is its steps one after the other, episodes start
empty, and torch's own modules compute the same.
"""

import pytest
import torch
from torch import Tensor

from gpurl.nn.actor_critic import MEMORIES
from gpurl.nn.memory import Memory

KINDS = pytest.mark.parametrize("kind", MEMORIES)


def memory_of(kind: str) -> Memory:
    """With biases that are not zero."""
    torch.manual_seed(0)
    memory = MEMORIES[kind](3, 5)
    for parameter in memory.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    return memory


def steps_of(memory: Memory, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
    """[T, N, F], as a policy acts and the engine clears its state."""
    features = []
    for x_now, starts_now in zip(x, starts):
        state = state.masked_fill(starts_now.unsqueeze(1), 0.0)
        now, state = memory(x_now, state)
        assert state.shape == (x.shape[1], memory.state_size)
        features.append(now)
    return torch.stack(features)


def rollout(memory: Memory, steps: int = 7, envs: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """(x, the state before it, starts); in the first row, in the last and in a row."""
    x, state = torch.randn(steps, envs, 3), torch.randn(envs, memory.state_size)
    starts = torch.rand(steps, envs) < 0.2
    starts[0, 0] = starts[-1, 1] = starts[2, 2] = starts[3, 2] = True
    starts[:, 3] = False
    return x, state, starts


@KINDS
def test_a_rollout_unrolled_is_its_steps(kind: str) -> None:
    memory = memory_of(kind)
    x, state, starts = rollout(memory)
    x.requires_grad_()
    parameters = [*memory.parameters(), x]
    unrolled, stepped = (
        each(x, state, starts) for each in (memory.unroll, lambda *given: steps_of(memory, *given))
    )
    assert unrolled.shape == (7, 6, memory.size)
    torch.testing.assert_close(unrolled, stepped)
    of_features = torch.randn_like(unrolled)
    gradients = (torch.autograd.grad(each, parameters, of_features) for each in (unrolled, stepped))
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@KINDS
def test_an_episode_starts_empty_and_the_others_go_on(kind: str) -> None:
    memory = memory_of(kind)
    x, state, _ = rollout(memory)
    starts = torch.zeros(7, 6, dtype=torch.bool)
    starts[3, 1] = True
    unrolled = memory.unroll(x, state, starts)
    fresh = memory.unroll(x[3:], torch.zeros_like(state), torch.zeros_like(starts[3:]))
    torch.testing.assert_close(unrolled[3:, 1], fresh[:, 1])
    for env in (0, 2):
        assert float((unrolled[3, env] - fresh[0, env]).detach().abs().max()) > 1e-3
    # nor does NaN go on
    x[2, 1] = torch.nan
    broken = memory.unroll(x, state, starts)
    assert broken[2, 1].isnan().all()
    torch.testing.assert_close(broken[3:, 1], fresh[:, 1])


@KINDS
def test_torchs_own_modules_compute_the_same(kind: str) -> None:
    memory = memory_of(kind)
    module = memory.to_torch()
    assert all(
        type(each).__module__.startswith(("torch.", "gpurl.nn.")) for each in module.modules()
    )
    x, state, _ = rollout(memory)
    for x_now in x:
        for got, expected in zip(module(x_now, state), memory(x_now, state), strict=True):
            torch.testing.assert_close(got, expected)
        state = memory(x_now, state)[1]
    # a copy
    next(memory.parameters()).data.zero_()
    assert all(bool(parameter.any()) for parameter in module.parameters())
