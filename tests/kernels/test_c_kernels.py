"""The C forms of GAE, random numbers and shuffling against their references."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gpurl.kernels import adam, c_library
from gpurl.kernels.backend import no_host_syncs, use_c
from gpurl.kernels.gae import gae, gae_reference
from gpurl.kernels.random import (
    CounterRandom,
    random_normal,
    random_normal_reference,
    random_uniform,
    random_uniform_reference,
    stream_constants,
)
from gpurl.kernels.vtrace import vtrace

pytestmark = pytest.mark.skipif(c_library.load().functions is None, reason=c_library.load().why)


def test_they_serve_tensors_of_a_cpu_that_the_host_may_look_at() -> None:
    assert use_c(torch.zeros(1))
    assert not use_c(torch.zeros(1, device="meta"))
    with no_host_syncs():
        assert not use_c(torch.zeros(1))


def test_what_a_thread_may_look_at_is_its_own() -> None:
    """As of two trainings in threads that count their memory, one within the time of the other."""
    blocks = no_host_syncs(), no_host_syncs()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        threads = first, second
        for method in ("__enter__", "__exit__"):
            for thread, block in zip(threads, blocks):
                arguments = () if method == "__enter__" else (None, None, None)
                thread.submit(getattr(block, method), *arguments).result()
            inside = method == "__enter__"
            assert all(
                thread.submit(use_c, torch.zeros(1)).result() != inside for thread in threads
            )
            assert use_c(torch.zeros(1))


def test_a_step_of_float32_goes_to_c_and_one_of_float64_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = list[torch.dtype]()
    real = adam.adam_step_c
    monkeypatch.setattr(
        adam,
        "adam_step_c",
        lambda state, *others: called.append(state.parameters.dtype) or real(state, *others),
    )
    for dtype in (torch.float64, torch.float32):
        state = adam.AdamState(*torch.zeros(3, 4, dtype=dtype), torch.tensor(0), None, None)
        norm = adam.adam_step(
            state,
            torch.ones(4, dtype=dtype),
            torch.tensor(0.1),
            adam.AdamOptions(max_grad_norm=None),
        )
        assert float(norm) == 2.0
        torch.testing.assert_close(
            state.parameters, torch.full((4,), -0.1, dtype=dtype), rtol=1e-4, atol=0.0
        )
    assert called == [torch.float32]


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (32, 129), (1024, 8)], ids=str)
@pytest.mark.parametrize("has_valid", [False, True])
def test_gae_is_the_reference(size: tuple[int, int], has_valid: bool) -> None:
    """With NaN where nothing may be read: in final values of rows that were not cut off, beyond
    ends of episodes.
    """
    generator = torch.Generator().manual_seed(size[0])
    reward, final_value, chance = (torch.randn(size, generator=generator) for _ in range(3))
    value = torch.randn(size[0] + 1, size[1], generator=generator)
    terminated, truncated = chance > 1.3, chance < -1.3
    final_value[~truncated] = math.nan
    reward[chance.abs() > 2.0] = (
        math.nan
    )  # of an episode's last step: the step before is of the same episode and has it too
    valid = torch.rand(size, generator=generator) < 0.8 if has_valid else None
    arguments = (reward, value, final_value, terminated, truncated, 0.97, 0.9, valid)
    got, expected = gae(*arguments), gae_reference(*arguments)
    for mine, other in zip(got[:2], expected[:2]):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    reward.nan_to_num_(0.0)
    torch.testing.assert_close(
        gae(*arguments)[2], gae_reference(*arguments)[2], rtol=1e-5, atol=1e-6
    )
    if size[0] > 7:
        assert bool(expected[0].isnan().any())
        assert bool(expected[0].isfinite().any())


@pytest.mark.parametrize(
    ("reward", "value"),
    [((3, 2), (3, 2)), ((3, 2), (4, 3)), ((3,), (4,)), ((3, 2, 1), (4, 2, 1))],
    ids=str,
)
def test_gae_of_shapes_that_do_not_fit_is_refused(
    reward: tuple[int, ...], value: tuple[int, ...]
) -> None:
    flag = torch.zeros(reward, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"value must be \[T \+ 1, N\], reward"):
        gae(torch.zeros(reward), torch.zeros(value), torch.zeros(reward), flag, flag, 0.9, 0.9)


@pytest.mark.parametrize("place", [2, 3, 4, 7])
def test_gae_of_other_columns_that_do_not_fit_is_refused(place: int) -> None:
    """C would read beyond them."""
    flag = torch.zeros(3, 2, dtype=torch.bool)
    rows = torch.zeros(3, 2)
    columns: list[Any] = [rows, torch.zeros(4, 2), rows, flag, flag, 0.9, 0.9, flag]
    columns[place] = columns[place][:2]
    with pytest.raises(ValueError, match=r"flags \[T, N\]"):
        gae(*columns)
    with pytest.raises(ValueError, match=r"flags \[T, N\]"):
        vtrace(*columns[:5], torch.zeros(3, 2), *columns[5:])


def test_other_types_are_computed_by_torch() -> None:
    """As an own reward in float64 or int8: C would read its bytes as float32."""
    generator = torch.Generator().manual_seed(0)
    reward = torch.randint(-5, 5, (6, 3), generator=generator)
    value, final_value = (torch.randn(n, 3, generator=generator) for n in (7, 6))
    flags = [torch.rand(6, 3, generator=generator) < 0.2 for _ in range(2)]
    expected = gae(reward.float(), value, final_value, *flags, 0.9, 0.8)
    log_ratio = torch.zeros(6, 3)
    corrected = vtrace(reward.float(), value, final_value, *flags, log_ratio, 0.9, 0.8)
    for dtype in (torch.float64, torch.int8):
        steps = reward.to(dtype), value, final_value, *flags
        got = gae(*steps, 0.9, 0.8)
        for one, other in zip(got, expected):
            torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-5)
        for one, other in zip(vtrace(*steps, log_ratio, 0.9, 0.8), corrected):
            torch.testing.assert_close(one.float(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("streams", [1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 16, 17, 18, 33, 48, 79])  # 16 are computed at once
@pytest.mark.parametrize("steps", ["one", "one a stream"])
def test_random_numbers_are_the_references(streams: int, count: int, steps: str) -> None:
    key, gamma = stream_constants(5, streams)
    step = torch.tensor(7) if steps == "one" else torch.arange(streams)
    uniform = random_uniform(key, gamma, step, 3, count)
    assert torch.equal(uniform, random_uniform_reference(key, gamma, step, 3, count))
    normal, expected = (
        random_normal(key, gamma, step, 3, count),
        random_normal_reference(key, gamma, step, 3, count),
    )
    torch.testing.assert_close(normal, expected, rtol=1e-6, atol=1e-6)


def test_normal_numbers_are_those_of_float64_up_to_rounding() -> None:
    """Box and Muller's formula of the uniforms of the same words."""
    draw = (*stream_constants(1, 64), torch.tensor(9), 0, 20_000)
    first, second = random_uniform(*draw).double().unflatten(1, (-1, 2)).unbind(2)
    radius = (-2.0 * (first + 2.0**-24).log()).sqrt()
    angle = 2.0 * math.pi * second
    expected = torch.stack((radius * angle.cos(), radius * angle.sin()), 2).flatten(1)
    got = random_normal(*draw).double()
    assert (got - expected).abs().max() < 1e-6


def test_the_least_and_the_largest_word_give_finite_normal_numbers() -> None:
    """The uniforms of word 0 are 0; those of the one whose bits are all 1, 1 - 2^-24."""
    gamma = torch.ones(1, dtype=torch.int64)
    least = random_normal(torch.zeros_like(gamma), gamma, torch.tensor(0), 0, 2)
    assert least.tolist() == [pytest.approx([math.sqrt(48 * math.log(2)), 0.0])]
    # the key that the mixing makes -1 of: each of its steps is undone
    key = torch.tensor([unmixed(2**64 - 1) - 2**64])
    assert random_uniform(key, gamma, torch.tensor(0), 0, 2).tolist() == [[1 - 2**-24] * 2]
    assert random_normal(key, gamma, torch.tensor(0), 0, 2).abs().tolist() == [[0.0, 0.0]]


def unmixed(word: int) -> int:
    """The 64-bit number that `mixed` of random_cpu.h makes `word` of; a product with an odd number
    is undone by one with its inverse.
    """
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = word
        for _ in range(3):
            shifted = word ^ (shifted >> shift)
        word = shifted * pow(factor, -1, 2**64) % 2**64
    return word


def test_random_numbers_do_not_depend_on_the_batch() -> None:
    few, many = CounterRandom(3, 5), CounterRandom(3, 5000)
    assert torch.equal(few.normal((2,)), many.normal((2,))[:5])
    assert torch.equal(few.uniform(shape=(3,)), many.uniform(shape=(3,))[:5])
