"""Every function gives the same for a tensor and for a numpy array, far out too."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpurl.nn.arrays import add_at, as_tensor, clip, log_softmax, namespace, of_kind, pick, softplus
from gpurl.nn.normalizer import Normalizer, ValueNormalizer

ROWS = np.float32(
    [[0.0, 1.0, -2.0], [1000.0, 0.0, -1000.0], [-90.0, -91.0, -89.0], [3.0, 3.0, 3.0]]
)
INDEX, VALUES = np.array([2, 0, 1, 1]), np.float32([1.0, -2.0, 3.0, -4.0])


def shifted_normalizer() -> Normalizer:
    normalizer = Normalizer(3, clip=5.0)
    normalizer.update(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) * 3.0 + 1.0)
    return normalizer


def shifted_value_normalizer() -> ValueNormalizer:
    normalizer = ValueNormalizer()
    normalizer.update(torch.randn(50, 1, generator=torch.Generator().manual_seed(0)) * 3.0 + 1.0)
    return normalizer


FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "clip": lambda x, index, values: clip(x, -1.5, 2.0),
    "clip by rows": lambda x, index, values: clip(x, x * 0.5, x * 0.5 + 1.0),
    "log_softmax": lambda x, index, values: log_softmax(x),
    "softplus": lambda x, index, values: softplus(x),
    "pick": lambda x, index, values: pick(x, index),
    "add_at": lambda x, index, values: add_at(x, index, values),
    "exp": lambda x, index, values: namespace(x).exp(-abs(x)),
    "of_kind": lambda x, index, values: of_kind(torch.ones(3), x) * x,
    "normalizer": lambda x, index, values: shifted_normalizer()(x),
    "value": lambda x, index, values: shifted_value_normalizer().denormalized(x[:, 0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_and_an_array_give_the_same(name: str) -> None:
    array = FUNCTIONS[name](ROWS.copy(), INDEX, VALUES)
    tensor = FUNCTIONS[name](
        torch.from_numpy(ROWS.copy()), torch.from_numpy(INDEX), torch.from_numpy(VALUES)
    )
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float32
    assert bool(np.isfinite(array).all())
    torch.testing.assert_close(as_tensor(array), as_tensor(tensor), rtol=1e-6, atol=1e-6)


def test_arrays_of_tensors_share_their_memory() -> None:
    tensor = torch.zeros(3)
    of_kind(tensor, ROWS)[1] = 7.0
    assert tensor.tolist() == [0.0, 7.0, 0.0]
    array = np.zeros(2, np.float32)
    as_tensor(array)[0] = 5.0
    assert array.tolist() == [5.0, 0.0]
