"""Kernels against their references and torch's own equivalents: compared first, then timed in turn.

`kernel` is the form that gpurl calls: Triton on a GPU; on a CPU, C for GAE, linear scans, Adam,
random numbers, prioritised draws and squashed actions, else the reference itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from benchmarks.results_table import Row, machine, number, parser, save, table
from benchmarks.timing import median_seconds
from benchmarks.training import captured
from gpurl.buffers.minibatches import Minibatch
from gpurl.errors import GpurlError
from gpurl.kernels import (
    adam,
    categorical_projection,
    gae,
    linear_scan,
    moments,
    permutation,
    prioritized,
    random,
    squash,
)
from gpurl.kernels.random import RandomStreams
from gpurl.losses import ppo_loss
from gpurl.nn.distributions import Categorical, Gaussian, Head
from gpurl.run.setup import choose_device

Function = Callable[[], tuple[Tensor, ...]]
GAE_SIZES = ((32, 4096), (128, 4096), (256, 4096), (2048, 8))  # T, N
SCAN_SIZES = ((32, 4096 * 64), (128, 256 * 64))  # T, columns: environments times units of a memory
ADAM_SIZES = (10_240, 1_048_576)  # parameters: PPO's two 64x64 networks on Chasing, and a large one
MOMENTS_SIZES = ((131_072, 8), (131_072, 64))  # B, D
RANDOM_SIZES = ((4096, 2), (65_536, 2), (4096, 64))  # N, draws
PERMUTATION_SIZES = (8192, 131_072)  # S
# S, widths of the columns that a row packs
GATHER_SIZES = ((131_072, (16,)), (131_072, (11, 1, 1, 1, 1, 1)))
PRIORITIZED_SIZES = ((200_000, 256), (5_000_000, 8192))  # S, B
PPO_LOSS_SIZES = (  # B, numbers of the actor
    ("gaussian", 8192, 2),
    ("gaussian", 32_768, 2),
    ("gaussian", 32_768, 8),
    ("categorical", 32_768, 2),
    ("categorical", 32_768, 18),
)
PROJECTION_SIZES = ((256, 51), (2048, 51), (2048, 101))  # B, atoms
SQUASH_SIZES = ((256, 8), (8192, 21))  # B, A


@dataclass
class Case:
    """One kernel at one size; each function returns its results. `torch` computes the same, unless
    it draws other random numbers.
    """

    name: str
    kernel: Function
    reference: Function
    torch: Function | None = None
    torch_is_random: bool = False
    tolerance: float = 1e-5
    absolute_tolerance: float | None = None  # None: that of `tolerance`


def check(case: Case) -> None:
    """GpurlError unless the kernel and torch's equivalent return the results of the reference."""
    expected = case.reference()
    absolute = case.tolerance if case.absolute_tolerance is None else case.absolute_tolerance
    others = {"kernel": case.kernel, "torch": None if case.torch_is_random else case.torch}
    for label, function in others.items():
        if function is None:
            continue
        for position, (got, reference) in enumerate(zip(function(), expected, strict=True)):
            try:
                torch.testing.assert_close(got, reference, rtol=case.tolerance, atol=absolute)
            except AssertionError as error:
                raise GpurlError(
                    f"{case.name}: result {position} of the {label} differs from the reference's, "
                    f"so nothing is timed. {error}"
                ) from None


# ---- the cases ----


def forms(module: ModuleType, name: str, *arguments: object) -> tuple[Function, Function]:
    """(kernel, reference) of `name` in `module`, as functions without arguments."""

    def bind(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> Function:
        def call() -> tuple[Tensor, ...]:
            results = function(*arguments)
            return results if isinstance(results, tuple) else (results,)

        return call

    return bind(getattr(module, name)), bind(getattr(module, f"{name}_reference"))


def normal_numbers(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The same standard normal numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def one_stream(device: torch.device) -> RandomStreams:
    """One random stream at step 5."""
    return RandomStreams(*random.stream_constants(0, 1, device), torch.tensor(5, device=device))


def gae_case(num_steps: int, num_envs: int, device: torch.device) -> Case:
    """A rollout in which 2 % of the steps end an episode."""
    shape = (num_steps, num_envs)
    reward, value, final_value = normal_numbers(device, shape, (num_steps + 1, num_envs), shape)
    kind = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)
    terminated = kind < 0.01
    truncated = (kind >= 0.01) & (kind < 0.02)
    arguments = (reward, value, final_value, terminated, truncated, 0.99, 0.95)
    return Case(f"gae {num_steps}x{num_envs}", *forms(gae, "gae", *arguments), tolerance=1e-4)


def linear_scan_cases(num_steps: int, num_columns: int, device: torch.device) -> list[Case]:
    """The recurrence, in which 2 % of the steps begin an episode, and its gradient."""
    shape = (num_steps, num_columns)
    b, initial, gradient = normal_numbers(device, shape, shape[1:], shape)
    a = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)
    a = torch.where(a < 0.02, 0.0, a)
    arguments = [each.requires_grad_() for each in (a, b, initial)]
    state = linear_scan.linear_scan(*arguments)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(state, arguments, gradient, retain_graph=True)

    def backward_reference() -> tuple[Tensor, ...]:
        tensors = (each.detach() for each in (a, initial, state))
        return linear_scan.linear_scan_backward_reference(*tensors, gradient)

    size = f"{num_steps}x{num_columns}"
    plain = [each.detach() for each in arguments]
    return [
        Case(f"linear_scan {size}", *forms(linear_scan, "linear_scan", *plain)),
        Case(f"linear_scan backward {size}", backward, backward_reference),
    ]


def adam_case(size: int, device: torch.device, has_target: bool = False) -> Case:
    """A step in place with the gradient clipped to norm 1; each function has its own copy of the
    flat parameter.
    """
    start, gradient = normal_numbers(device, (size,), (size,))

    def stepping(function: Callable[..., Tensor]) -> Function:
        count = torch.zeros((), dtype=torch.int64, device=device)
        own_target = start.clone() if has_target else None
        state = adam.AdamState(
            start.clone(), torch.zeros_like(start), torch.zeros_like(start), count, own_target
        )
        own_gradient = gradient.clone()
        rate = torch.tensor(1e-3, device=device)
        options = adam.AdamOptions(eps=1e-5, max_grad_norm=1.0, tau=0.005)
        return lambda: (
            function(state, own_gradient, rate, options),
            state.parameters,
            *([own_target] if has_target else []),
        )

    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = gradient.clone()
    optimizer = torch.optim.Adam([parameter], lr=1e-3, eps=1e-5, fused=True)
    target = start.clone()

    def torch_step() -> tuple[Tensor, ...]:
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        if not has_target:
            return norm, parameter.detach()
        return norm, parameter.detach(), target.lerp_(parameter.detach(), 0.005)

    return Case(
        f"adam_step {size}{' with target' if has_target else ''}",
        stepping(adam.adam_step),
        stepping(adam.adam_step_reference),
        torch_step,
    )


def update_moments_case(rows: int, columns: int, device: torch.device) -> Case:
    """Merging the observations of a rollout into running moments."""
    (x,) = normal_numbers(device, (rows, columns))

    def updating(function: Callable[..., None]) -> Function:
        mean = torch.zeros(columns, dtype=torch.float64, device=device)
        variance = torch.ones(columns, dtype=torch.float64, device=device)
        count = torch.ones((), dtype=torch.float64, device=device)
        scale = torch.zeros(columns, device=device), torch.ones(columns, device=device)
        running = moments.RunningMoments(mean, variance, count, *scale)

        def update() -> tuple[Tensor, ...]:
            function(running, 1e-8, x)
            return tuple(running)

        return update

    return Case(
        f"update_moments {rows}x{columns}",
        updating(moments.update_moments),
        updating(moments.update_moments_reference),
    )


def normalize_case(rows: int, columns: int, device: torch.device) -> Case:
    """Normalising and clipping a rollout's observations."""
    (x,) = normal_numbers(device, (rows, columns))
    functions = forms(moments, "normalize", x, x.mean(0), 1.0 / x.std(0), 2.0)
    return Case(f"normalize {rows}x{columns}", *functions)


def random_case(kind: str, num_envs: int, draws: int, device: torch.device) -> Case:
    """Uniform or normal numbers of a step; torch draws other ones, from one stream."""
    streams = (*random.stream_constants(0, num_envs, device), torch.tensor(5, device=device))
    draw = torch.rand if kind == "uniform" else torch.randn
    return Case(
        f"random_{kind} {num_envs}x{draws}",
        *forms(random, f"random_{kind}", *streams, 0, draws),
        lambda: (draw(num_envs, draws, device=device),),
        torch_is_random=True,
    )


def permutation_case(size: int, device: torch.device) -> Case:
    """A random order; torch's is another one."""
    return Case(
        f"permutation {size}",
        *forms(permutation, "permutation", *one_stream(device), 0, size),
        lambda: (torch.randperm(size, device=device),),
        torch_is_random=True,
    )


def gather_rows_case(size: int, widths: tuple[int, ...], device: torch.device) -> Case:
    """All rows in random order; torch gets the order, and gathers each column separately."""
    (packed,) = normal_numbers(device, (size, sum(widths)))
    stream = (*one_stream(device), 0)
    order = permutation.permutation(*stream, size)
    columns = [column.contiguous() for column in packed.split(widths, dim=1)]
    return Case(
        f"gather_rows {size}x{'+'.join(map(str, widths))}",
        lambda: permutation.gather_rows(packed, *stream, 0, size).split(widths, dim=1),
        lambda: permutation.gather_rows_reference(packed, *stream, 0, size).split(widths, dim=1),
        lambda: tuple(column.index_select(0, order) for column in columns),
    )


def prioritized_draw_case(size: int, batch_size: int, device: torch.device) -> Case:
    """A batch by priority; torch.multinomial draws another one, without probabilities and without
    stratification.
    """
    priority = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(device) ** 3
    return Case(
        f"prioritized_draw {size}x{batch_size}",
        *forms(prioritized, "prioritized_draw", priority, one_stream(device), 0, batch_size),
        lambda: (torch.multinomial(priority, batch_size, replacement=True),),
        torch_is_random=True,
    )


def ppo_loss_case(kind: str, rows: int, width: int, device: torch.device) -> Case:
    """The loss and its gradients for a minibatch in one matrix, with two fifths of its ratios
    clipped; the reference is gpurl.losses under autograd.
    """
    # outputs and actions
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(rows, width, generator=generator)
    value = torch.randn(rows, generator=generator)
    action = output + torch.randn(rows, width, generator=generator)
    head: Head = Gaussian(Box(-1.0, 1.0, (width,), np.float32))
    if kind == "categorical":
        head, action = Categorical(width), torch.randint(width, (rows,), generator=generator)

    # the minibatch; no ratio is so near to the clip that rounding decides
    shift = 0.15 * torch.randint(-2, 3, (rows,), generator=generator)
    old_log_prob = head.log_prob(output, action).detach() - shift
    others = (torch.randn(rows, generator=generator) for _ in range(3))
    columns = torch.stack((old_log_prob, *others), 1)
    if kind == "gaussian":
        packed = torch.cat((action, columns), 1).to(device)
        action, columns = packed[:, :width], packed[:, width:]
    batch = Minibatch(output, action.to(device), *columns.to(device).unbind(1))

    # both forms
    head = head.to(device)
    leaves = [output.to(device).requires_grad_(), value.to(device).requires_grad_()]
    leaves += head.parameters()
    clip_range, entropy_coef = (torch.tensor(x, device=device) for x in (0.2, 0.01))

    def differentiated(loss: Tensor, metrics: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return *torch.autograd.grad(loss, leaves), *metrics.values()

    def kernel() -> tuple[Tensor, ...]:
        return differentiated(*head.ppo_loss(*leaves[:2], batch, clip_range, entropy_coef, 1.0))

    def reference() -> tuple[Tensor, ...]:
        log_prob, entropy = head.log_prob_and_entropy(leaves[0], batch.action)
        return differentiated(
            *ppo_loss(log_prob, leaves[1], entropy, batch, clip_range, entropy_coef, 1.0)
        )

    return Case(
        f"ppo_loss {kind} {rows}x{width}",
        kernel,
        reference,
        tolerance=1e-4,
        absolute_tolerance=1e-3 / rows,
    )


def projection_case(rows: int, atoms: int, device: torch.device) -> Case:
    """The distributions of the next values of two critics, moved by reward and discount."""
    logits, reward, chance = normal_numbers(device, (2, rows, atoms), (rows,), (rows,))
    discount = torch.where(chance > 2.0, 0.0, 0.99)
    arguments = (logits.softmax(-1), reward, discount, -10.0, 10.0)
    functions = forms(categorical_projection, "categorical_projection", *arguments)
    return Case(f"categorical_projection 2x{rows}x{atoms}", *functions)


def squash_case(rows: int, actions: int, device: torch.device) -> Case:
    """Actions for a batch and their gradient, as in an actor step of SAC."""
    shape = (rows, actions)
    output, noise, slope = normal_numbers(device, (rows, 2 * actions), shape, shape)
    output.requires_grad_()
    log_prob_gradient = torch.full((rows,), 0.2 / rows, device=device)

    def with_gradient(sample: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        action, log_prob, *_ = sample(output, noise)
        gradients = slope, log_prob_gradient
        return action, log_prob, *torch.autograd.grad((action, log_prob), output, gradients)

    return Case(
        f"squashed {rows}x{actions}",
        lambda: with_gradient(squash.squashed_sample),
        lambda: with_gradient(squash.squashed_sample_reference),
        absolute_tolerance=1e-4,
    )


def all_cases(device: torch.device) -> list[Case]:
    """Every kernel at every size."""
    return [
        *(gae_case(*size, device) for size in GAE_SIZES),
        *(case for size in SCAN_SIZES for case in linear_scan_cases(*size, device)),
        *(adam_case(size, device) for size in ADAM_SIZES),
        adam_case(ADAM_SIZES[-1], device, has_target=True),
        *(update_moments_case(*size, device) for size in MOMENTS_SIZES),
        *(normalize_case(*size, device) for size in MOMENTS_SIZES),
        *(
            random_case(kind, *size, device)
            for kind in ("uniform", "normal")
            for size in RANDOM_SIZES
        ),
        *(permutation_case(size, device) for size in PERMUTATION_SIZES),
        *(gather_rows_case(*size, device) for size in GATHER_SIZES),
        *(prioritized_draw_case(*size, device) for size in PRIORITIZED_SIZES),
        *(ppo_loss_case(*size, device) for size in PPO_LOSS_SIZES),
        *(projection_case(*size, device) for size in PROJECTION_SIZES),
        *(squash_case(*size, device) for size in SQUASH_SIZES),
    ]


# ---- measuring ----


def main(words: list[str] | None = None) -> int:
    """Compare, measure, print and save; 1 if a comparison failed: that kernel is not timed."""
    options = parser(__doc__, seconds=0.5).parse_args(words)
    device = choose_device(options.device)

    lines, rows, failed = [], list[Row](), list[str]()
    for case in all_cases(device):
        # compare
        try:
            check(case)
        except GpurlError as error:
            failed.append(str(error))
            continue

        # time
        functions: dict[str, Callable[[], object]] = {"kernel": case.kernel}
        if device.type == "cuda":
            functions["graph"] = captured(case.kernel, device)
        functions["reference"] = case.reference
        if case.torch is not None:
            functions["torch"] = case.torch
        seconds = median_seconds(functions, device, options.seconds)
        for name, value in seconds.items():
            row = {"case": case.name, "function": name, "value": f"{value * 1e6:.2f}", "unit": "us"}
            rows.append(row | machine(str(device)))
        lines.append([case.name, *_cells(seconds)])
        save("kernels", rows, options.out)  # kept if a later case is interrupted
    for message in failed:
        print(f"failed: {message}")
    if not rows:
        return 1
    print(
        f"kernels: microseconds a call on {rows[0]['device']}, {rows[0]['threads']} CPU threads; "
        f"all that are listed agree with their references"
    )
    header = ["kernel", "kernel", "in a graph", "reference", "torch"]
    print(table([*header, "reference/kernel", "torch/kernel"], lines))
    print(f"written to {save('kernels', rows, options.out)}\n")
    return 1 if failed else 0


def _cells(seconds: dict[str, float]) -> list[str]:
    times = [
        number(seconds[name] * 1e6) if name in seconds else ""
        for name in ("kernel", "graph", "reference", "torch")
    ]
    return times + [
        f"{seconds[name] / seconds['kernel']:.2f}" if name in seconds else ""
        for name in ("reference", "torch")
    ]


if __name__ == "__main__":
    sys.exit(main())
