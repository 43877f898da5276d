"""Parts of an algorithm in a form that algorithms share, so that a new run can begin with the actor
or the critic of another one.

A part's tensors are views of the algorithm's own memory: what is copied into them is trained on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from gpurl.nn.encoders import Encoder, GroupEncoder
from gpurl.nn.mlp import Dense, Layer, Sequential

CONTAINERS = (Sequential, nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class Part:
    """Weights and what computes with them; two parts fit if their forms are the same."""

    form: tuple[str, ...]  # what it reads, then its layers in their order, with their sizes
    tensors: tuple[Tensor, ...]
    needs_actor: bool = False  # it reads features of the actor, and is worth nothing without them


@dataclass(frozen=True)
class Deviation:
    """Where the standard deviation of continuous actions, in the policy's units, is kept: a number
    v an action, with std = exp(offset + v) or, unless is_log, offset + v.
    """

    # [A], the same for all observations; or the last layer's rows that give them: weight
    # [1, A, H], bias [1, 1, A]
    values: Tensor | tuple[Tensor, Tensor]
    is_log: bool = True
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ActorPart(Part):
    """An actor: its memory and hidden layers as a `Part`, and a last layer from H features to A
    numbers.
    """

    weight: Tensor  # [1, A, H] of the means of actions, of logits, or of a Beta's two parameters
    bias: Tensor  # [1, 1, A]
    std: Deviation | None  # None: the actor is deterministic, or its deviation is in `weight`
    # how the numbers become actions: "clipped", "squashed", "beta" or "logits"
    actions: str


def describe(*modules: nn.Module | None) -> tuple[str, ...]:
    """The layers of `modules` that hold weights or running statistics, or that have an own type."""
    return tuple(
        text
        for module in modules
        if module is not None
        for each in _modules_of_one(module)
        if (text := _describe_one(each))
    )


def _modules_of_one(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and those inside it; of encoders, which are a module for each member, one."""
    if isinstance(module, Encoder):
        yield from module.members[0].modules()
        return
    yield module
    for child in module.children():
        yield from _modules_of_one(child)


def _describe_one(module: nn.Module) -> str:
    """One module without those inside it; "" for a mere container."""
    if isinstance(module, CONTAINERS) and type(module) in CONTAINERS:
        return ""
    if isinstance(module, Dense):
        num_outputs, num_inputs = module.weight.shape[-2:]
        activation = "" if module.activation == "none" else f" {module.activation}"
        kind = "dense" if type(module) is Dense else type(module).__name__
        return f"{kind} {num_inputs}-{num_outputs}{activation}"
    if isinstance(module, GroupEncoder):
        return f"groups {', '.join(module.names)}"
    if isinstance(module, nn.Conv2d):
        shape = "x".join(map(str, module.weight.shape))
        return f"convolution {shape}, stride {module.stride[0]}"
    own = [tensor for name, tensor in module.state_dict().items() if "." not in name]
    # without the axis of members, which `Part.tensors` show
    first = 1 if isinstance(module, Layer) else 0
    shapes = ", ".join(str(tuple(tensor.shape[first:])) for tensor in own)
    return f"{type(module).__name__} {shapes}".strip()


def state_tensors(*modules: nn.Module | None) -> tuple[Tensor, ...]:
    """The tensors that checkpoints hold of `modules`, views of their own memory."""
    present = [module for module in modules if module is not None]
    return tuple(tensor for module in present for tensor in module.state_dict().values())


def member_tensors(module: nn.Module, first: int, last: int) -> tuple[Tensor, ...]:
    """Those of members `first` to `last` (excluded): layers stack their weights [E, ...], encoders
    are a module for each member.
    """
    if isinstance(module, CONTAINERS):
        children = (member_tensors(child, first, last) for child in module.children())
        return tuple(tensor for tensors in children for tensor in tensors)
    if isinstance(module, Encoder):
        return state_tensors(*module.members[first:last])
    return tuple(tensor[first:last] for tensor in state_tensors(module))


def dense_actor_part(
    body: tuple[tuple[str, ...], tuple[Tensor, ...]],
    last: Dense,
    num_means: int,
    actions: str,
    is_log: bool = True,
    offset: float = 0.0,
) -> ActorPart:
    """The part of an actor with `body` (layers, weights) and a last layer that gives num_means
    numbers, or twice as many: then the second half is the standard deviation's, see `Deviation`.
    """
    weight, bias = last.weight.detach(), last.bias.detach()
    std = None
    if weight.shape[1] == 2 * num_means:
        rows = weight[:, num_means:], bias[..., num_means:]
        std = Deviation(rows, is_log, offset)
        weight, bias = weight[:, :num_means], bias[..., :num_means]
    return ActorPart(*body, weight=weight, bias=bias, std=std, actions=actions)
