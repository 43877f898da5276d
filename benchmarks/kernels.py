"""Kernels against their references: compared first, then timed in turn with the reference and with
torch's own equivalent.

`kernel` is what the product calls: Triton on a GPU; on a CPU, C for GAE, random numbers, drawing by
priority and squashed actions, torch's fused step for Adam, else the reference itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

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
    moments,
    permutation,
    prioritized,
    random,
    squash,
)
from gpurl.kernels.env_step import RandomStreams
from gpurl.losses import ppo_loss
from gpurl.nn.distributions import Categorical, Gaussian, Head
from gpurl.run.setup import choose_device

Function = Callable[[], tuple[Tensor, ...]]
GAE_SIZES = ((32, 4096), (128, 4096), (256, 4096), (2048, 8))  # T, N
ADAM_SIZES = (10_240, 1_048_576)  # parameters: PPO's two 64x64 networks on Chasing, and a large one
MOMENTS_SIZES = ((131_072, 8), (131_072, 64))  # B, D
RANDOM_SIZES = ((4096, 2), (65_536, 2), (4096, 64))  # N, draws
PERMUTATION_SIZES = (8192, 131_072)  # S
GATHER_SIZES = (
    (131_072, (16,)),
    (131_072, (11, 1, 1, 1, 1, 1)),
)  # S, widths of the columns that a row packs
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
    """One kernel at one size; each function returns what it computed. `torch` computes the same
    unless it draws random numbers.
    """

    name: str
    kernel: Function
    reference: Function
    torch: Function | None = None
    torch_is_random: bool = False
    tolerance: float = 1e-5
    absolute_tolerance: float | None = None  # None: the same


def check(case: Case) -> None:
    """GpurlError unless the kernel, and torch's equivalent, give what the reference gives."""
    wanted = case.reference()
    others = {"kernel": case.kernel, "torch": None if case.torch_is_random else case.torch}
    for label, function in others.items():
        if function is None:
            continue
        for position, (got, want) in enumerate(zip(function(), wanted, strict=True)):
            try:
                absolute = (
                    case.tolerance if case.absolute_tolerance is None else case.absolute_tolerance
                )
                torch.testing.assert_close(got, want, rtol=case.tolerance, atol=absolute)
            except AssertionError as error:
                message = (
                    f"{case.name}: result {position} of the {label} is not the reference's, so "
                    f"nothing is timed. {error}"
                )
                raise GpurlError(message) from None


# ---- the cases ----


def gae_case(num_steps: int, num_envs: int, device: torch.device) -> Case:
    """A rollout in which 2 % of the steps end an episode."""
    generator = torch.Generator().manual_seed(0)
    reward, value, final_value = (
        torch.randn(num_steps + extra, num_envs, generator=generator).to(device)
        for extra in (0, 1, 0)
    )
    kind = torch.rand(num_steps, num_envs, generator=generator).to(device)
    arguments = (
        reward,
        value,
        final_value,
        kind < 0.01,
        (kind >= 0.01) & (kind < 0.02),
        0.99,
        0.95,
    )
    return Case(
        f"gae {num_steps}x{num_envs}",
        lambda: gae.gae(*arguments),
        lambda: gae.gae_reference(*arguments),
        tolerance=1e-4,
    )


def adam_case(size: int, device: torch.device, has_target: bool = False) -> Case:
    """A step with the gradient clipped to norm 1, in place, each function on a copy of its own;
    torch's on the one flat parameter.
    """
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(size, generator=generator).to(device) for _ in range(2))

    def stepping(function: Callable[..., Tensor]) -> Function:
        count = torch.zeros((), dtype=torch.int64, device=device)
        own_target = start.clone() if has_target else None
        state = adam.AdamState(
            start.clone(), torch.zeros_like(start), torch.zeros_like(start), count, own_target
        )
        own_gradient, rate = gradient.clone(), torch.tensor(1e-3, device=device)
        options = adam.AdamOptions(eps=1e-5, max_grad_norm=1.0, tau=0.005)
        return lambda: (
            function(state, own_gradient, rate, options),
            state.parameters,
            *([own_target] if has_target else []),
        )

    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = gradient.clone()
    optimizer, target = torch.optim.Adam([parameter], lr=1e-3, eps=1e-5, fused=True), start.clone()

    def torch_step() -> tuple[Tensor, ...]:
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        return (
            norm,
            parameter.detach(),
            *([target.lerp_(parameter.detach(), 0.005)] if has_target else []),
        )

    return Case(
        f"adam_step {size}{' with target' if has_target else ''}",
        stepping(adam.adam_step),
        stepping(adam.adam_step_reference),
        torch_step,
    )


def update_moments_case(rows: int, columns: int, device: torch.device) -> Case:
    """Taking a rollout's observations into running moments."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)

    def updating(function: Callable[..., None]) -> Function:
        mean, variance = (
            make(columns, dtype=torch.float64, device=device) for make in (torch.zeros, torch.ones)
        )
        count = torch.ones((), dtype=torch.float64, device=device)

        def update() -> tuple[Tensor, ...]:
            function(mean, variance, count, x)
            return mean, variance, count

        return update

    return Case(
        f"update_moments {rows}x{columns}",
        updating(moments.update_moments),
        updating(moments.update_moments_reference),
    )


def normalize_case(rows: int, columns: int, device: torch.device) -> Case:
    """Normalising and clipping a rollout's observations."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device)
    arguments = (x, x.mean(0), 1.0 / x.std(0), 2.0)
    return Case(
        f"normalize {rows}x{columns}",
        lambda: (moments.normalize(*arguments),),
        lambda: (moments.normalize_reference(*arguments),),
    )


def random_case(kind: str, num_envs: int, draws: int, device: torch.device) -> Case:
    """Uniform or normal numbers of a step; torch's are others, from one stream."""
    key, gamma = random.stream_constants(0, num_envs, device)
    arguments = (key, gamma, torch.tensor(5, device=device), 0, draws)
    kernel, reference = (getattr(random, f"random_{kind}{suffix}") for suffix in ("", "_reference"))
    draw = torch.rand if kind == "uniform" else torch.randn
    return Case(
        f"random_{kind} {num_envs}x{draws}",
        lambda: (kernel(*arguments),),
        lambda: (reference(*arguments),),
        lambda: (draw(num_envs, draws, device=device),),
        torch_is_random=True,
    )


def permutation_case(size: int, device: torch.device) -> Case:
    """A random order; torch's is another one."""
    arguments = (*random.stream_constants(0, 1, device), torch.tensor(5, device=device), 0, size)
    return Case(
        f"permutation {size}",
        lambda: (permutation.permutation(*arguments),),
        lambda: (permutation.permutation_reference(*arguments),),
        lambda: (torch.randperm(size, device=device),),
        torch_is_random=True,
    )


def gather_rows_case(size: int, widths: tuple[int, ...], device: torch.device) -> Case:
    """All rows in random order; torch is given the order, and gathers each column by itself."""
    packed = torch.randn(size, sum(widths), generator=torch.Generator().manual_seed(0)).to(device)
    stream = (*random.stream_constants(0, 1, device), torch.tensor(5, device=device), 0)
    order = permutation.permutation(*stream, size)
    columns = [column.contiguous() for column in packed.split(widths, dim=1)]
    return Case(
        f"gather_rows {size}x{'+'.join(map(str, widths))}",
        lambda: permutation.gather_rows(packed, *stream, 0, size).split(widths, dim=1),
        lambda: permutation.gather_rows_reference(packed, *stream, 0, size).split(widths, dim=1),
        lambda: tuple(column.index_select(0, order) for column in columns),
    )


def prioritized_draw_case(size: int, batch_size: int, device: torch.device) -> Case:
    """A batch by priority; torch.multinomial's is another one, comes without probabilities and is
    not stratified.
    """
    priority = torch.rand(size, generator=torch.Generator().manual_seed(0)).to(device) ** 3
    streams = RandomStreams(*random.stream_constants(0, 1, device), torch.tensor(5, device=device))
    arguments = (priority, streams, 0, batch_size)
    return Case(
        f"prioritized_draw {size}x{batch_size}",
        lambda: prioritized.prioritized_draw(*arguments),
        lambda: prioritized.prioritized_draw_reference(*arguments),
        lambda: (torch.multinomial(priority, batch_size, replacement=True),),
        torch_is_random=True,
    )


def ppo_loss_case(kind: str, rows: int, width: int, device: torch.device) -> Case:
    """A minibatch in one matrix, two fifths of its ratios clipped, the loss and its gradients; the
    reference is gpurl.losses under autograd.
    """
    generator = torch.Generator().manual_seed(0)
    output, value = (
        torch.randn(rows, width, generator=generator),
        torch.randn(rows, generator=generator),
    )
    action = output + torch.randn(rows, width, generator=generator)
    head: Head = Gaussian(Box(-1.0, 1.0, (width,), np.float32))
    if kind == "categorical":
        head, action = Categorical(width), torch.randint(width, (rows,), generator=generator)
    # of no log-ratio to where rounding decides on the clip
    shift = 0.15 * torch.randint(-2, 3, (rows,), generator=generator)
    old_log_prob = head.log_prob(output, action).detach() - shift
    columns = torch.stack(
        (old_log_prob, *(torch.randn(rows, generator=generator) for _ in range(3))), 1
    )
    if kind == "gaussian":
        packed = torch.cat((action, columns), 1).to(device)
        action, columns = packed[:, :width], packed[:, width:]
    batch = Minibatch(output, action.to(device), *columns.to(device).unbind(1))
    head = head.to(device)
    leaves = [output.to(device).requires_grad_(), value.to(device).requires_grad_()]
    leaves += head.parameters()
    clip_range, entropy_coef = (torch.tensor(x, device=device) for x in (0.2, 0.01))

    def differentiated(loss: Tensor, parts: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return *torch.autograd.grad(loss, leaves), *parts.values()

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
    """The next distributions of two critics, moved by reward and discount."""
    generator = torch.Generator().manual_seed(0)
    pmf = torch.randn(2, rows, atoms, generator=generator).softmax(-1).to(device)
    reward, chance = (torch.randn(rows, generator=generator).to(device) for _ in range(2))
    arguments = (pmf, reward, torch.where(chance > 2.0, 0.0, 0.99), -10.0, 10.0)
    kernel, reference = (
        getattr(categorical_projection, f"categorical_projection{suffix}")
        for suffix in ("", "_reference")
    )
    return Case(
        f"categorical_projection 2x{rows}x{atoms}",
        lambda: (kernel(*arguments),),
        lambda: (reference(*arguments),),
    )


def squash_case(rows: int, actions: int, device: torch.device) -> Case:
    """A draw for a batch and its gradient, as a step of SAC's actor takes them."""
    generator = torch.Generator().manual_seed(0)
    output, noise, slope = (
        torch.randn(rows, width, generator=generator).to(device)
        for width in (2 * actions, actions, actions)
    )
    output.requires_grad_()
    of_log_prob = torch.full((rows,), 0.2 / rows, device=device)

    def with_gradient(sample: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        action, log_prob, *_ = sample(output, noise)
        slopes = slope, of_log_prob
        return action, log_prob, *torch.autograd.grad((action, log_prob), output, slopes)

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
    """Compare, measure, print and save."""
    options = parser(__doc__, budget=0.5).parse_args(words)
    device = choose_device(options.device)
    found, lines, rows = all_cases(device), [], list[Row]()
    for case in found:
        check(case)
    for case in found:
        functions = {
            "kernel": case.kernel,
            "graph": captured(case.kernel, device) if device.type == "cuda" else None,
            "reference": case.reference,
            "torch": case.torch,
        }
        seconds = median_seconds(
            {name: function for name, function in functions.items() if function},
            device,
            options.seconds,
        )
        for name, value in seconds.items():
            rows.append(
                {
                    "case": case.name,
                    "function": name,
                    "value": f"{value * 1e6:.2f}",
                    "unit": "us",
                    **machine(str(device)),
                }
            )
        lines.append([case.name, *_cells(seconds)])
        save("kernels", rows, options.out)  # what was measured stays
    print(
        f"kernels: microseconds a call on {rows[0]['device']}, {rows[0]['threads']} CPU threads; "
        f"all agree with their references"
    )
    print(
        table(
            [
                "kernel",
                "kernel",
                "in a graph",
                "reference",
                "torch",
                "reference/kernel",
                "torch/kernel",
            ],
            lines,
        )
    )
    print(f"written to {save('kernels', rows, options.out)}\n")
    return 0


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
