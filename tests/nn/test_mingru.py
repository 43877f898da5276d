"""The minGRU against its formula (Feng et al. 2024, section 3.1) in float64, one number at a time;
and without a loop over steps.
"""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpurl.nn.mingru import MinGru


def test_it_is_the_formula() -> None:
    torch.manual_seed(0)
    memory = MinGru(3, 4)
    memory.input.bias.data.normal_()
    x, state = torch.randn(6, 2, 3), torch.randn(2, 4)
    got = memory.unroll(x, state, torch.zeros(6, 2, dtype=torch.bool))
    weight, bias = memory.input.weight[0].double().tolist(), memory.input.bias.flatten().tolist()
    for env in range(2):
        h = state[env].double().tolist()
        for t in range(6):
            numbers = x[t, env].double().tolist()
            lines = [
                sum(w * each for w, each in zip(row, numbers)) + shift
                for row, shift in zip(weight, bias)
            ]
            for unit in range(4):
                z = 1.0 - 1.0 / (1.0 + math.exp(-lines[unit]))
                h[unit] = (1.0 - z) * h[unit] + z * math.tanh(lines[4 + unit])
            assert torch.allclose(got[t, env].double(), torch.tensor(h).double(), atol=1e-5)


def test_units_begin_with_many_time_scales() -> None:
    """Without weights they keep from 5 % to 95 % of their state in a step."""
    memory = MinGru(3, 9)
    memory.input.weight.data.zero_()
    kept, _ = memory(torch.zeros(1, 3), torch.ones(1, 9))
    torch.testing.assert_close(kept[0], torch.linspace(-3.0, 3.0, 9).sigmoid())


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_longer_rollouts_take_no_more_operations() -> None:
    memory = MinGru(3, 4)
    counts = []
    for steps in (4, 64):
        with _Counted() as count:
            features = memory.unroll(
                torch.randn(steps, 2, 3), torch.zeros(2, 4), torch.zeros(steps, 2).bool()
            )
            torch.autograd.grad(features.sum(), list(memory.parameters()))
        counts.append(count.operations)
    assert counts[0] == counts[1]
