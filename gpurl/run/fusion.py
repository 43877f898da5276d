"""Model fusion: one agent whose weights are the mean of several agents' weights.

A mean of weights is a good policy only where the agents went on from the same weights a short while
ago; of two seeds it is the mean of what are different functions (Wortsman et al. 2022, "Model
soups"). `gpurl.selection.greedy_soup` refuses a mean that is worse.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.nn.normalizer import Normalizer

# of `extra_state`, what is averaged; the rest stays
AVERAGED = "optimizers", "num_updates"


@torch.no_grad()
def fuse(target: Algorithm, sources: Sequence[Algorithm]) -> None:
    """Make `target` the mean of `sources`, algorithms of the same shapes: of weights, targets and
    running statistics of batch norms, and of Adam's moments, steps and learning rates. Normalisers
    get the moments of all rows that those of the sources have seen (Chan, Golub and LeVeque 1979).
    Random streams, settings and replay buffer of `target` stay.
    """
    # from copies: `target` may be one of them
    model = mean_state([dict(each.state_dict()) for each in sources])
    statistics = {
        name: [copy.deepcopy(_normalizers(each)[name].state_dict()) for each in sources]
        for name in _normalizers(target)
    }
    training = [each.extra_state() for each in sources]
    averaged = {name: mean_state([state[name] for state in training]) for name in AVERAGED}
    target.load_state_dict(model)
    target.load_extra_state(target.extra_state() | averaged)
    for name, normalizer in _normalizers(target).items():
        normalizer.merge(statistics[name])


def mean_state(states: Sequence[Any]) -> Any:
    """The means of the tensors in nested dicts of the same keys, computed in float64; of integers
    and flags the rounded mean.
    """
    first = states[0]
    if isinstance(first, Mapping):
        return {name: mean_state([state[name] for state in states]) for name in first}
    assert isinstance(first, Tensor)
    mean = torch.stack([state.double() for state in states]).mean(0)
    return mean.to(first.dtype) if first.is_floating_point() else mean.round().to(first.dtype)


def _normalizers(algorithm: Algorithm) -> dict[str, Normalizer]:
    return {
        name: module for name, module in algorithm.named_modules() if isinstance(module, Normalizer)
    }
