"""Running statistics as they are applied, by hand; any split of any rows is in
test_properties_kernels.py.
"""

import pytest
import torch

from gpurl.errors import UsageError
from gpurl.nn import normalizer as module
from gpurl.nn.normalizer import Normalizer, ValueNormalizer
from gpurl.run.settings import make_settings
from gpurl.run.setup import make_trainer


def test_observations_are_clipped_at_ten_and_returns_never() -> None:
    x = torch.tensor([[11.0, -30.0], [9.5, 0.0]])
    assert Normalizer(2)(x).tolist() == [[10.0, -10.0], [9.5, 0.0]]
    assert Normalizer(2, clip=1.0)(x).tolist() == [[1.0, -1.0], [1.0, 0.0]]
    assert torch.equal(ValueNormalizer()(1e6 * x), 1e6 * x)


def test_epsilon_keeps_columns_that_are_almost_always_zero_small() -> None:
    """Row 0 of 100 has a force: by hand, mean 0.01 and variance 0.01 - 0.0001."""
    x = torch.zeros(100, 2)
    x[0, 0] = 1.0
    x[:, 1] = torch.tensor([10.0, -10.0]).repeat(50)
    enlarged, kept = Normalizer(2), Normalizer(2, epsilon=0.1)
    for normalizer in (enlarged, kept):
        normalizer.update(x)
    expected = (1.0 - 0.01) / (0.0099 + 0.1) ** 0.5
    assert float(enlarged(x)[0, 0]) == pytest.approx(0.99 / 0.0099**0.5, rel=1e-5)
    assert float(kept(x)[0, 0]) == pytest.approx(expected, rel=1e-5)
    assert expected < 3.0
    # a column with a large variance is as before
    torch.testing.assert_close(kept(x)[:, 1], enlarged(x)[:, 1], rtol=1e-3, atol=0.0)


def test_a_policy_takes_epsilon_from_its_settings() -> None:
    settings = make_settings("ppo", "ant", num_envs=4)
    trainer = make_trainer(settings, torch.device("cpu"))
    normalizer = trainer.algorithm.normalizer
    assert normalizer is not None
    assert normalizer.epsilon == settings.algorithm_config.normalize_obs_epsilon == 0.1
    with pytest.raises(UsageError, match="normalize_obs_epsilon"):
        make_settings("ppo", "ant", normalize_obs_epsilon=0.0)


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


@pytest.mark.parametrize("masks", [False, True])
def test_columns_of_which_nothing_is_known_begin_with_the_next_rows(masks: bool) -> None:
    torch.manual_seed(0)
    normalizer = Normalizer(3)
    first, second = torch.randn(32, 3), torch.randn(16, 3) * 2.0 + 50.0
    normalizer.update(first)
    normalizer.measure_anew(1)
    valid = torch.arange(16) < 10 if masks else None
    if masks:  # no rows say nothing
        normalizer.update(second, torch.zeros(16, dtype=torch.bool))
        torch.testing.assert_close(normalizer.mean, first.double().mean(0))
        normalizer.measure_anew(1)
    normalizer.update(second, valid)
    rows = second[:10] if masks else second
    everything = torch.cat((first, rows)).double()
    expected = torch.cat((everything[:, :1].mean(0), rows[:, 1:].double().mean(0)))
    torch.testing.assert_close(normalizer.mean, expected)
    spread = torch.cat(
        (everything[:, :1].var(0, correction=0), rows[:, 1:].double().var(0, correction=0))
    )
    torch.testing.assert_close(normalizer.variance, spread)
    torch.testing.assert_close(normalizer.shift, expected.float())
    # only once
    normalizer.update(first)
    assert ((normalizer.mean[1:] > 5.0) & (normalizer.mean[1:] < 45.0)).all()
