"""Inside torch.func.vmap the members of a stack compute in the launches of one: each as alone, to
the bit, though the memory of one lies between the others'.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpurl.buffers.minibatches import Minibatch
from gpurl.engine.vmap_rules import VmapRules
from gpurl.kernels import (
    finite,
    gae,
    moments,
    newest_episodes,
    pack_rows,
    permutation,
    ppo_loss,
    sample,
    squash,
)
from gpurl.kernels.random import RandomStreams, stream_constants
from tests.kernels.triton.conftest import DEVICE, Counted

MEMBERS, STEPS, ENVS = 3, 5, 37
FACTOR = 1.7  # of what is differentiated
Results = tuple[Tensor, ...]
Compute = Callable[..., Results]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


def flags(*shape: int) -> Tensor:
    return torch.rand(*shape) < 0.3


def streams(member: int, count: int = 1) -> list[Tensor]:
    return [*stream_constants(member, count, DEVICE), torch.tensor(member + 5)]


def differentiated(function: Compute, *leaves: Tensor) -> Results:
    """(results, the gradients of the first one's sum, times FACTOR, by `leaves`); by torch.func
    inside vmap, where nothing else can.
    """
    if torch._C._are_functorch_transforms_active():

        def summed(*given: Tensor) -> tuple[Tensor, Results]:
            results = function(*given)
            return FACTOR * results[0].sum(), results

        numbers = tuple(range(len(leaves)))
        gradients, results = torch.func.grad(summed, numbers, has_aux=True)(*leaves)
    else:
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        results = function(*own)
        gradients = torch.autograd.grad(FACTOR * results[0].sum(), own)
    return (*(each.detach() for each in results), *gradients)


# ---- cases: what is computed, and the tensors of a member ----


def a_gaussian_sample(*given: Tensor) -> Results:
    mean, log_std, units, *of_stream = given
    return sample.sample_gaussian(mean, log_std, units, RandomStreams(*of_stream), 3)


def a_categorical_sample(logits: Tensor, *of_stream: Tensor) -> Results:
    return sample.sample_categorical(logits, RandomStreams(*of_stream), 3)


def an_order(*of_stream: Tensor) -> Results:
    return (permutation.permutation(*of_stream, 2, ENVS),)


def some_rows(packed: Tensor, *of_stream: Tensor) -> Results:
    return (permutation.gather_rows(packed, *of_stream, 2, 3, 20),)


def rollout(member: int) -> list[Tensor]:
    columns = [numbers(STEPS, ENVS), numbers(STEPS + 1, ENVS), numbers(STEPS, ENVS)]
    return [*columns, flags(STEPS, ENVS), flags(STEPS, ENVS), flags(STEPS, ENVS)]


def advantages(*given: Tensor) -> Results:
    *columns, valid = given
    return gae.gae(*columns, 0.9, 0.8, valid)


def advantages_of_all(*given: Tensor) -> Results:
    return gae.gae(*given[:-1], 0.9, 0.8)


def running(member: int) -> list[Tensor]:
    of_columns = [torch.randn(9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)]
    count = torch.tensor(3.0 * member, dtype=torch.float64)
    return [*of_columns, count, numbers(9), numbers(9), numbers(ENVS, 9), flags(ENVS)]


def new_moments(*given: Tensor) -> Results:
    *of_columns, x, valid = given
    moments.update_moments(moments.RunningMoments(*of_columns), 1e-5, x, valid)
    return ()


def new_moments_of_all(*given: Tensor) -> Results:
    *of_columns, x, _ = given
    moments.update_moments(moments.RunningMoments(*of_columns), 1e-5, x)
    return ()


def normal_numbers(*given: Tensor) -> Results:
    return (moments.normalize(*given, 1.5),)


def columns_of(member: int) -> list[Tensor]:
    shape = STEPS, ENVS
    scaled = [numbers(*shape, 4), numbers(4), numbers(4), numbers(*shape), numbers(1), numbers(1)]
    return [*scaled, numbers(*shape), numbers(3).abs(), torch.arange(STEPS * ENVS).view(shape)]


def packed(*given: Tensor) -> Results:
    obs, mean, inv_std, value, shift, scale, advantage, of_advantage, action = given
    columns = [
        pack_rows.Scaled(obs, mean, inv_std, 1.0),
        action,
        action > 3,
        pack_rows.Scaled(value, shift, scale, 0.0),
        pack_rows.Standardized(advantage, of_advantage),
    ]
    return (pack_rows.pack_rows(columns, 12),)


def with_nan(member: int) -> list[Tensor]:
    obs, reward, value = numbers(STEPS, ENVS, 3), numbers(STEPS, ENVS), numbers(STEPS, ENVS)
    # only of the last member no column of the environment is bad: its policy has diverged
    if member < 2:
        obs[member, 7, 1], reward[0, member] = torch.nan, torch.inf
    value[4, 9 * member] = -torch.inf
    found = [torch.tensor(-1), torch.tensor(0), torch.tensor(member), torch.tensor(False)]
    kept = [numbers(STEPS, 3), numbers(STEPS)]
    return [obs, reward, value, flags(STEPS, ENVS), flags(STEPS, ENVS), *found, *kept]


def found(*given: Tensor) -> Results:
    obs, reward, value, terminated, truncated, *others = given
    columns = finite.Columns([obs, reward, value], 1, 2, 1)
    evidence = [finite.Evidence(obs, others[4]), finite.Evidence(reward, others[5])]
    return finite.find_non_finite(
        columns, terminated, truncated, None, finite.Findings(*others[:4]), evidence
    )


def found_in_valid(valid: Tensor, *given: Tensor) -> Results:
    obs, reward, value, terminated, truncated, *others = given
    columns = finite.Columns([obs, reward, value], 1, 2, 1)
    result = finite.find_non_finite(
        columns, terminated, truncated, valid, finite.Findings(*others[:4]), []
    )
    return result[1:]  # the first one is `valid`


def newest(*given: Tensor) -> Results:
    newest_episodes.keep_newest(*given)
    return ()


def minibatch(member: int) -> list[Tensor]:
    own = [numbers(ENVS, 2), numbers(2), numbers(ENVS), torch.tensor(0.1 + 0.1 * member)]
    coefficient = torch.tensor(0.01 + 0.1 * member)
    return [*own, coefficient, numbers(ENVS, 7), torch.rand(ENVS) / ENVS]


def rows(packed: Tensor, action: Tensor, weight: Tensor | None) -> Minibatch:
    """Columns of one matrix, as rollouts are packed."""
    return Minibatch(packed, action, *packed[:, 3:7].unbind(1), weight)


def loss(*given: Tensor) -> Results:
    *leaves, clip_range, entropy_coef, packed, weight = given
    batch = rows(packed, packed[:, :2], weight)
    options = ppo_loss.PpoOptions(0.5, 0.2)
    return differentiated(
        lambda output, log_std, value: ppo_loss.fused_ppo_loss(
            output, log_std, value, batch, clip_range, entropy_coef, options
        ),
        *leaves,
    )


def loss_of_choices(*given: Tensor) -> Results:
    output, _, value, clip_range, entropy_coef, packed, _ = given
    batch = rows(packed, (packed[:, 0] > 0).long(), None)
    options = ppo_loss.PpoOptions(0.5)
    return differentiated(
        lambda output, value: ppo_loss.fused_ppo_loss(
            output, None, value, batch, clip_range, entropy_coef, options
        ),
        output,
        value,
    )


def squashed(output: Tensor, noise: Tensor, weights: Tensor) -> Results:
    """Both results have a part in the first one, whose gradient is taken."""

    def sampled(output: Tensor) -> Results:
        action, log_prob = squash.squashed_sample(output, noise)
        return (action * weights).sum(1) - 0.3 * log_prob, action

    return differentiated(sampled, output)


def squashed_actions(output: Tensor, noise: Tensor, weights: Tensor) -> Results:
    """Only the actions have."""
    return differentiated(
        lambda output: ((squash.squashed_sample(output, noise)[0] * weights).sum(1),), output
    )


def actions_of(member: int) -> list[Tensor]:
    return [2.0 * numbers(ENVS, 6), numbers(ENVS, 3), numbers(ENVS, 3)]


CASES: list[tuple[Any, Compute, Callable[[int], list[Tensor]]]] = [
    (
        sample,
        a_gaussian_sample,
        lambda k: [numbers(ENVS, 2), numbers(2), numbers(4, 2), *streams(k, ENVS)],
    ),
    (sample, a_categorical_sample, lambda k: [numbers(ENVS, 3), *streams(k, ENVS)]),
    (permutation, an_order, streams),
    (permutation, some_rows, lambda k: [numbers(ENVS, 7), *streams(k)]),
    (gae, advantages, rollout),
    (gae, advantages_of_all, rollout),
    (moments, new_moments, running),
    (moments, new_moments_of_all, running),
    (moments, normal_numbers, lambda k: [numbers(STEPS, ENVS, 3), numbers(3), numbers(3)]),
    (pack_rows, packed, columns_of),
    (finite, found, with_nan),
    (finite, found_in_valid, lambda k: [~flags(STEPS, ENVS), *with_nan(k)]),
    (
        newest_episodes,
        newest,
        lambda k: [numbers(3, ENVS), flags(ENVS), numbers(ENVS), torch.arange(ENVS) + k],
    ),
    (ppo_loss, loss, minibatch),
    (ppo_loss, loss_of_choices, minibatch),
    (squash, squashed, actions_of),
    (squash, squashed_actions, actions_of),
]


def apart(members: list[list[Tensor]]) -> list[Tensor]:
    """[M, ...] of each tensor, between numbers that are read and written only by mistake."""
    stacked = []
    for tensors in zip(*members, strict=True):
        one = tensors[0]
        memory = torch.full((MEMBERS, one.numel() + 9), 77).to(one.dtype)
        view = memory[:, 4 : 4 + one.numel()]
        stacked.append(view.unflatten(1, one.shape) if one.dim() else view.squeeze(1))
        stacked[-1].copy_(torch.stack(tensors))
    return stacked


@pytest.mark.parametrize(("module", "compute", "inputs"), CASES, ids=[c[1].__name__ for c in CASES])
def test_members_compute_in_the_launches_of_one(
    module: Any,
    compute: Compute,
    inputs: Callable[[int], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    torch.manual_seed(0)
    members = [inputs(k) for k in range(MEMBERS)]
    together = apart(members)
    around = [each.untyped_storage().clone() for each in together]
    grids = list[Any]()
    for name, kernel in list(vars(module).items()):
        if name.endswith("_kernel") and hasattr(kernel, "fn"):  # not choose_kernel
            monkeypatch.setattr(module, name, Counted(kernel, grids))

    got = torch.func.vmap(compute)(*together)
    launches, grids[:] = len(grids), []
    for k, tensors in enumerate(members):
        expected = compute(*tensors)
        assert len(grids) == launches * (k + 1) > 0
        own = [*(each[k] for each in got), *(each[k] for each in together)]
        torch.testing.assert_close(own, [*expected, *tensors], rtol=0.0, atol=0.0, equal_nan=True)

    # nothing was written between the members
    for each, before in zip(together, around, strict=True):
        memory = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
        was = torch.empty(0, dtype=each.dtype).set_(before)
        width = each.stride(0)
        for rows in (memory.view(MEMBERS, width), was.view(MEMBERS, width)):
            rows[:, 4 : width - 5] = 0
        assert torch.equal(memory, was)


READING = [case for case in CASES if case[0] in (sample, gae, pack_rows, ppo_loss, squash)]
READING += [case for case in CASES if case[1] is normal_numbers]


@pytest.mark.parametrize(("_", "compute", "inputs"), READING, ids=[c[1].__name__ for c in READING])
def test_members_may_lie_next_to_each_other(
    _: Any,
    compute: Compute,
    inputs: Callable[[int], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Number by number, which kernels do not read as it is."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    torch.manual_seed(0)
    members = [inputs(k) for k in range(MEMBERS)]
    together = [torch.stack(tensors, -1) for tensors in zip(*members, strict=True)]
    got = torch.func.vmap(compute, in_dims=-1)(*together)
    for k, tensors in enumerate(members):
        own = [each[k] for each in got]
        torch.testing.assert_close(own, [*compute(*tensors)], rtol=0.0, atol=0.0, equal_nan=True)


def test_members_may_differ_in_discounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    torch.manual_seed(0)
    members = [rollout(k)[:-1] for k in range(MEMBERS)]
    together = [torch.stack(tensors) for tensors in zip(*members, strict=True)]
    discounts = [0.9, 0.5, 0.7]

    def of_gamma(gamma: Tensor, *given: Tensor) -> Results:
        with VmapRules():
            return gae.gae(*given, gamma, 0.8)  # type: ignore[arg-type]

    def of_lambda(gae_lambda: Tensor, *given: Tensor) -> Results:
        with VmapRules():
            return gae.gae(*given, 0.9, gae_lambda)  # type: ignore[arg-type]

    by_gamma = torch.func.vmap(of_gamma)(torch.tensor(discounts), *together)
    by_lambda = torch.func.vmap(of_lambda)(torch.tensor(discounts), *together)
    for k, (tensors, number) in enumerate(zip(members, discounts)):
        for got, expected in (
            (by_gamma, gae.gae(*tensors, number, 0.8)),
            (by_lambda, gae.gae(*tensors, 0.9, number)),
        ):
            torch.testing.assert_close([each[k] for each in got], [*expected])


@pytest.mark.host
def test_gradients_outside_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """By autograd, and by torch.func.grad around the vmap."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    torch.manual_seed(0)
    output, noise = numbers(MEMBERS, 7, 4), numbers(MEMBERS, 7, 2)

    def summed(output: Tensor) -> Tensor:
        return torch.func.vmap(lambda o, n: squash.squashed_sample(o, n)[0])(output, noise).sum()

    leaf = output.clone().requires_grad_()
    (summed(leaf) + 0.5 * leaf.sum()).backward()
    expected = []
    for own, of_member in zip(output, noise):
        one = own.clone().requires_grad_()
        squash.squashed_sample(one, of_member)[0].sum().backward()
        expected.append(one.grad)
    torch.testing.assert_close(leaf.grad, torch.stack(expected) + 0.5)
    torch.testing.assert_close(torch.func.grad(summed)(output), torch.stack(expected))


@pytest.mark.host
def test_gradients_of_the_loss_outside_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member's loss has a factor of its own there."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    torch.manual_seed(0)
    options, factors = ppo_loss.PpoOptions(0.5, 0.2), torch.tensor([1.0, 2.0, 0.5])
    members = [minibatch(k) for k in range(MEMBERS)]

    def of_one(*given: Tensor) -> Tensor:
        output, log_std, value, clip_range, entropy_coef, packed, weight = given
        batch = rows(packed, packed[:, :2], weight)
        return ppo_loss.fused_ppo_loss(
            output, log_std, value, batch, clip_range, entropy_coef, options
        )[0]

    together = [torch.stack(tensors) for tensors in zip(*members, strict=True)]
    leaves = [each.requires_grad_() for each in together[:3]]
    losses = torch.func.vmap(of_one)(*together)
    got = torch.autograd.grad((factors * losses).sum(), leaves)
    for k, tensors in enumerate(members):
        own = [each.clone().requires_grad_() for each in tensors[:3]]
        expected = torch.autograd.grad(factors[k] * of_one(*own, *tensors[3:]), own)
        torch.testing.assert_close([each[k] for each in got], [*expected])


@pytest.mark.host
def test_two_axes_of_members_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    torch.manual_seed(0)
    x, mean, inv_std = numbers(2, MEMBERS, 5, 3), numbers(2, MEMBERS, 3), numbers(2, MEMBERS, 3)

    def normal(*given: Tensor) -> Tensor:
        return moments.normalize(*given, 1.5)

    got = torch.func.vmap(torch.func.vmap(normal))(x, mean, inv_std)
    expected = [normal(*each) for each in zip(*(y.flatten(0, 1) for y in (x, mean, inv_std)))]
    torch.testing.assert_close(got.flatten(0, 1), torch.stack(expected))


def test_members_have_statistics_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all members share cannot be written by each."""
    monkeypatch.setattr("gpurl.kernels.backend.choice", "triton")
    (own, ended, *episode), x = (
        (numbers(3, ENVS), flags(2, ENVS), numbers(2, ENVS), torch.ones(2, ENVS)),
        numbers(2, ENVS, 9),
    )
    with pytest.raises(AssertionError, match="memory of their own"):
        torch.func.vmap(lambda *given: newest_episodes.keep_newest(own, *given))(ended, *episode)
    rows, given = with_nan(0), [~flags(STEPS, ENVS), *(torch.stack((x, x)) for x in with_nan(0))]
    with pytest.raises(AssertionError, match="memory of their own"):
        torch.func.vmap(found_in_valid, in_dims=(None, *[0] * len(rows)))(*given)
    of_columns = moments.RunningMoments(*running(0)[:5])
    with pytest.raises(AssertionError, match="memory of their own"):
        torch.func.vmap(lambda x: moments.update_moments(of_columns, 1e-5, x))(x)
