"""What acts in a trained policy, in torch's own modules: raw observations in, the environment's
greedy actions out. No C, no Triton, no critic, nothing that only training needs.
"""

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gpurl.envs.observation_groups import GroupedBox


class Actor(NamedTuple):
    """How an algorithm acts greedily, as `Algorithm.actor_modules` gives it."""

    network: nn.Module  # [N, D] observations, or features of the memory -> [N, outputs]
    choice: nn.Module  # [N, outputs] -> [N, *action] as the environment takes it
    # (observations [N, D] or a dict of groups, its state [N, S]) -> (features [N, F], next state)
    memory: nn.Module | None = None
    memory_size: int = 0  # S


class PolicyModule(nn.Module):
    """A policy without memory: `forward(obs)`."""

    def __init__(self, num_inputs: int, normalizer: nn.Module | None, actor: Actor) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.memory_size = actor.memory_size
        self.normalizer = normalizer
        self.network = actor.network
        self.choice = actor.choice

    def inputs(self, obs: Tensor) -> Tensor:
        """obs [N, *obs] -> [N, D] float32, normalised."""
        rows = obs.reshape(-1, self.num_inputs).float()
        return rows if self.normalizer is None else self.normalizer(rows)

    def forward(self, obs: Tensor) -> Tensor:
        """obs [N, *obs] as the environment gives it -> action [N, *action] as it takes it."""
        return self.choice(self.network(self.inputs(obs)))


class GroupedPolicyModule(PolicyModule):
    """A policy of named groups, with or without memory: `forward(*groups)`, in the order of
    `names`, and the memory after them.
    """

    def __init__(
        self, space: GroupedBox, takes_groups: bool, normalizer: nn.Module | None, actor: Actor
    ) -> None:
        """takes_groups: whether the network takes a dict of groups and not rows."""
        super().__init__(math.prod(space.shape), normalizer, actor)
        self.space = space
        self.takes_groups = takes_groups
        self.names = tuple(group.name for group in space.groups)
        self.memory = actor.memory

    def inputs(self, *groups: Tensor) -> Any:  # type: ignore[override]
        """[N, *group] of each, as the environment gives them -> a dict of them or rows [N, D], with
        floats normalised.
        """
        parts = dict(zip(self.names, groups))
        numbers = [group for group in self.space.groups if not group.is_image]
        if numbers:
            rows = [parts[group.name].float().reshape(-1, group.size) for group in numbers]
            floats = torch.cat(rows, dim=1)
            if self.normalizer is not None:
                floats = self.normalizer(floats)
            if not self.takes_groups and not self.space.has_images:
                return floats
            sizes = [group.size for group in numbers]
            for group, part in zip(numbers, floats.split(sizes, dim=1)):
                parts[group.name] = part.reshape(-1, *group.shape)
        return parts if self.takes_groups else self.space.join(parts)

    def forward(self, *tensors: Tensor) -> Any:  # type: ignore[override]
        """Groups [N, *group] -> action [N, *action]; with memory (*groups, memory [N, S]) ->
        (action, next memory).
        """
        inputs = self.inputs(*tensors[: len(self.names)])
        if self.memory is None:
            return self.choice(self.network(inputs))
        features, memory = self.memory(inputs, tensors[-1])
        return self.choice(self.network(features)), memory


class RecurrentPolicyModule(PolicyModule):
    """A policy with memory: `forward(obs, memory)`; the memory is zeros where an episode begins."""

    def __init__(self, num_inputs: int, normalizer: nn.Module | None, actor: Actor) -> None:
        super().__init__(num_inputs, normalizer, actor)
        assert actor.memory is not None
        self.memory = actor.memory

    def forward(self, obs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """obs [N, *obs], memory [N, S] -> (action [N, *action], next memory [N, S])."""
        features, memory = self.memory(self.inputs(obs), memory)
        return self.choice(self.network(features)), memory


# ---- parts ----


class Normalize(nn.Module):
    """(x - mean) / std, clipped; x [N, D]."""

    mean: Tensor  # [D]
    inv_std: Tensor  # [D]

    def __init__(self, mean: Tensor, inv_std: Tensor, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", mean.clone())
        self.register_buffer("inv_std", inv_std.clone())

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * self.inv_std).clamp(-self.clip, self.clip)


class FirstHalf(nn.Module):
    """[N, 2A] mean and log standard deviation -> [N, A] mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, dim=-1)[0]


class BetaMean(nn.Module):
    """[N, 2A] outputs of a Beta policy -> [N, A] mean in [-1, 1]; see `gpurl.nn.distributions`."""

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = (1.0 + nn.functional.softplus(x)).chunk(2, dim=-1)
        return (alpha - beta) / (alpha + beta)


class OneOutput(nn.Module):
    """Of a network of one's own: the outputs of an actor-critic, which gives (outputs, value), or
    one member of a stacked network, which gives [E, B, out]; of a single one [B, out].
    """

    def __init__(self, network: nn.Module, number: int = 0) -> None:
        super().__init__()
        self.network = network
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        returned = self.network(x)
        is_single = isinstance(returned, Tensor) and returned.dim() == 2
        return returned if is_single else returned[self.number]


class EncodedMemory(nn.Module):
    """A memory of encoded observations."""

    def __init__(self, encoder: nn.Module, memory: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.memory = memory

    def forward(self, obs: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.memory(self.encoder(obs), state)


class Shaped(nn.Module):
    """Rows [N, D] as [N, *shape], for networks that take observations as they are."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *self.shape)


class Sum(nn.Module):
    """x + layers(x)."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class MeanOfMembers(nn.Module):
    """The mean of an ensemble's expected values: [N, D] -> [N, A].

    A member gives A Z numbers for A actions: Z are the logits of `support` [Z], or Z quantiles.
    """

    support: Tensor | None

    def __init__(self, members: list[nn.Module], width: int, support: Tensor | None) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.width = width
        self.register_buffer("support", None if support is None else support.clone())

    def forward(self, x: Tensor) -> Tensor:
        values = [self._expected(member(x)) for member in self.members]
        return values[0] if len(values) == 1 else torch.stack(values).mean(0)

    def _expected(self, output: Tensor) -> Tensor:
        if self.width == 1:
            return output
        output = output.unflatten(-1, (-1, self.width))
        return output.mean(-1) if self.support is None else output.softmax(-1) @ self.support


# ---- choices ----


class Best(nn.Module):
    """The index of the largest of [N, A] -> [N] int64."""

    def forward(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)

    def margin(self, scores: Tensor) -> Tensor:
        """[N, 1]: how far the largest score is above the next one, in units of the scores' size."""
        return _margin(scores).unsqueeze(-1)


class BestOfEach(nn.Module):
    """The index of the largest of each group of columns: [N, sum(sizes)] -> [N, K] int64."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, scores: Tensor) -> Tensor:
        return torch.stack([part.argmax(-1) for part in scores.split(self.sizes, -1)], -1)

    def margin(self, scores: Tensor) -> Tensor:
        """[N, K], as of `Best`."""
        return torch.stack([_margin(part) for part in scores.split(self.sizes, -1)], -1)


class BestOfAgents(nn.Module):
    """The best action of each of G agents, rows [N G, A] -> [N, G] int64."""

    def __init__(self, num_agents: int) -> None:
        super().__init__()
        self.num_agents = num_agents

    def forward(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1).reshape(-1, self.num_agents)

    def margin(self, scores: Tensor) -> Tensor:
        """[N, G], as of `Best`."""
        return _margin(scores).reshape(-1, self.num_agents)


def _margin(scores: Tensor) -> Tensor:
    if scores.shape[-1] == 1:
        return torch.full(scores.shape[:-1], torch.inf)
    best, second = scores.topk(2, dim=-1).values.unbind(-1)
    return (best - second) / scores.abs().amax(-1).clamp(min=1.0)


# ---- torch's own layers with given values ----

AnyModule = TypeVar("AnyModule", bound=nn.Module)
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


def chain(*modules: nn.Module) -> nn.Sequential:
    """Modules one after the other, without chains inside chains."""
    flat = list[nn.Module]()
    for module in modules:
        flat += list(module) if type(module) is nn.Sequential else [module]
    return nn.Sequential(*(each for each in flat if not isinstance(each, nn.Identity)))


def activations(name: str) -> list[nn.Module]:
    """The module of an activation; empty for none."""
    return [] if name == "none" else [ACTIVATIONS[name]()]


def member_of(parameter: Tensor, member: int) -> Tensor:
    """[out, in] of parameter [E, out, in]; members may share one (E = 1)."""
    return parameter.detach()[min(member, len(parameter) - 1)]


def row_of(parameter: Tensor, member: int) -> Tensor:
    """[D] of parameter [E, 1, D]; members may share one (E = 1)."""
    return member_of(parameter, member)[0]


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Of weight [out, in] and bias [out]."""
    layer = nn.utils.skip_init(nn.Linear, *weight.shape[::-1], device=weight.device)
    return with_values(layer, weight=weight, bias=bias)


def with_values(module: AnyModule, **values: Tensor) -> AnyModule:
    """`module`, with copies of `values` as its parameters and buffers."""
    module = module.to(next(iter(values.values())).device)
    module.load_state_dict({name: value.detach() for name, value in values.items()}, strict=False)
    return module
