"""Running statistics as they are applied, by hand; any split of any rows is in
test_properties_kernels.py.
"""

import torch

from gpurl.nn.normalizer import Normalizer, ValueNormalizer


def test_observations_are_clipped_at_ten_and_returns_never() -> None:
    x = torch.tensor([[11.0, -30.0], [9.5, 0.0]])
    assert Normalizer(2)(x).tolist() == [[10.0, -10.0], [9.5, 0.0]]
    assert Normalizer(2, clip=1.0)(x).tolist() == [[1.0, -1.0], [1.0, 0.0]]
    assert torch.equal(ValueNormalizer()(1e6 * x), 1e6 * x)
