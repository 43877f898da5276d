"""Running statistics as they are applied, by hand; any split of any rows is in
test_properties_kernels.py.
"""

import pytest
import torch

from gpurl.nn import normalizer as module
from gpurl.nn.normalizer import Normalizer, ValueNormalizer


def test_observations_are_clipped_at_ten_and_returns_never() -> None:
    x = torch.tensor([[11.0, -30.0], [9.5, 0.0]])
    assert Normalizer(2)(x).tolist() == [[10.0, -10.0], [9.5, 0.0]]
    assert Normalizer(2, clip=1.0)(x).tolist() == [[1.0, -1.0], [1.0, 0.0]]
    assert torch.equal(ValueNormalizer()(1e6 * x), 1e6 * x)


def test_a_traced_normaliser_calls_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result would be a constant of the trace."""
    normalizer = Normalizer(3)
    normalizer.update(torch.randn(64, 3) * 4.0 + 1.0)
    x = torch.randn(5, 3)
    expected = normalizer(x)
    with monkeypatch.context() as patch:
        patch.setattr(module, "normalize", None)
        traced = torch.jit.trace(normalizer, torch.zeros(2, 3), check_trace=False)
        torch.testing.assert_close(traced(x), expected)
