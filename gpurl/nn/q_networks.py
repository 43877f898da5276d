"""Networks that value every action of a few: noisy layers, dueling streams, heads on one trunk, and
embedded actions.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import gymnasium
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from torch import Tensor, nn

from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.losses import dueling
from gpurl.nn.acting import member_of
from gpurl.nn.encoders import EncoderConfig, make_encoders
from gpurl.nn.mlp import Dense, Layer, Sequential, make_trunk

# algorithms by the action space that they take
TAKERS: dict[type[gymnasium.Space], str] = {
    Discrete: "ppo and dqn take",
    MultiDiscrete: "ppo and a2c take",
    Box: "ppo, td3 and sac take",
}


@dataclass(frozen=True)
class QNetworkConfig(EncoderConfig):
    """Shape of a network of action values."""

    dueling: bool = False
    """A stream for the value of the state and one for the advantages (Wang et al. 2016), each with
    a last hidden layer of its own.
    """
    noisy: bool = False
    """Noise on the weights of the last two layers, learned, in place of random actions (Fortunato
    et al. 2018).
    """
    noise_scale: float = 0.5
    """Standard deviation of that noise at the start, as a share of 1 / sqrt(inputs)."""
    heads: int = 1
    """Heads on one trunk, each with a start of its own, in place of num_critics networks
    (ElegantRL's ensemble DQN).
    """
    action_embedding: int = 0
    """Numbers by which an action is embedded and fed to a network of state and action (ElegantRL's
    embedding DQN); 0: one output each.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.action_embedding < 0 or not self.noise_scale > 0:
            raise UsageError(
                f"heads must be at least 1, action_embedding at least 0 and noise_scale above 0, "
                f"got {self.heads}, "
                f"{self.action_embedding} and {self.noise_scale}"
            )
        if self.action_embedding and (self.dueling or self.noisy):
            raise UsageError(
                "action_embedding gives one value for state and action: leave out dueling and noisy"
            )


class NoisyDense(Dense):
    """A dense layer with a factorised noise of each row: y = x W + b + ((x f(e_in)) S + s)
    f(e_out), f(e) = sign(e) sqrt|e|.

    Fortunato et al. 2018, equations 9 to 11; in this form rows, and so environments, have noise of
    their own without weights of their own.
    """

    def __init__(
        self,
        members: int,
        num_inputs: int,
        num_outputs: int,
        activation: str = "none",
        layer_norm: bool = False,
        scale: float = 0.5,
    ) -> None:
        super().__init__(members, num_inputs, num_outputs, activation, layer_norm)
        start = scale / math.sqrt(num_inputs)
        self.noise_weight = nn.Parameter(torch.full((members, num_outputs, num_inputs), start))
        self.noise_bias = nn.Parameter(torch.full((members, 1, num_outputs), start))

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        if noise is None:
            return super().forward(x)
        num_outputs, num_inputs = self.weight.shape[1:]
        drawn = noise.normal((num_inputs + num_outputs,)).to(x.dtype)
        of_input, of_output = (drawn.sign() * drawn.abs().sqrt()).split(
            (num_inputs, num_outputs), dim=1
        )
        of_noise = self._affine(x * of_input, self.noise_weight, self.noise_bias)
        z = torch.addcmul(self._affine(x, self.weight, self.bias), of_noise, of_output)
        return self._activated(z)


class Dueling(Layer):
    """Two streams on the same features, joined as `gpurl.losses.dueling`; gives [E, B, A
    Z].
    """

    def __init__(self, value: Sequential, advantage: Sequential, num_actions: int) -> None:
        super().__init__()
        self.value, self.advantage, self.num_actions = value, advantage, num_actions

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        value = self.value.forward(x, noise)
        advantage = self.advantage.forward(x, noise)
        return dueling(value, advantage.unflatten(2, (self.num_actions, -1))).flatten(2)

    def to_torch(self, member: int = 0) -> nn.Module:
        streams = self.value.to_torch(member), self.advantage.to_torch(member)
        return TorchDueling(*streams, self.num_actions)


class TorchDueling(nn.Module):
    """One member of `Dueling` in torch's own modules: [B, H] -> [B, A Z]."""

    def __init__(self, value: nn.Module, advantage: nn.Module, num_actions: int) -> None:
        super().__init__()
        self.value, self.advantage, self.num_actions = value, advantage, num_actions

    def forward(self, x: Tensor) -> Tensor:
        advantage = self.advantage(x).unflatten(1, (self.num_actions, -1))
        return dueling(self.value(x), advantage).flatten(1)


class ExpandToHeads(Layer):
    """The features of one trunk for `members` heads: [1, B, H], or [B, H], -> [E, B, H]."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self.members = members

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        return x.expand(self.members, *x.shape[-2:])

    def to_torch(self, member: int = 0) -> nn.Module:
        return nn.Identity()


class ActionEmbedding(Layer):
    """Values every action by a network of the features and of the action's embedding: [E, B, H], or
    [B, H] for all, -> [E, B, A Z].
    """

    def __init__(self, members: int, num_actions: int, size: int, head: Sequential) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(members, num_actions, size).uniform_(-1.0, 1.0))
        self.head = head  # from H + size to Z

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        (members, num_actions, size), rows = self.embedding.shape, x.shape[-2]
        features = x.expand(members, rows, x.shape[-1]).unsqueeze(2).expand(-1, -1, num_actions, -1)
        actions = self.embedding.unsqueeze(1).expand(members, rows, num_actions, size)
        both = torch.cat((features, actions), -1).flatten(1, 2)
        return self.head.forward(both).view(members, rows, -1)

    def to_torch(self, member: int = 0) -> nn.Module:
        return TorchActionEmbedding(member_of(self.embedding, member), self.head.to_torch(member))


class TorchActionEmbedding(nn.Module):
    """One member of `ActionEmbedding` in torch's own modules: [B, H] -> [B, A Z]."""

    def __init__(self, embedding: Tensor, head: nn.Module) -> None:
        super().__init__()
        self.num_actions, self.size = embedding.shape
        self.embedding = nn.Parameter(embedding.clone())
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        features = x.unsqueeze(1).expand(-1, self.num_actions, -1)
        actions = self.embedding.unsqueeze(0).expand(x.shape[0], -1, -1)
        return self.head(torch.cat((features, actions), -1)).flatten(1)


def make_q_network(
    members: int,
    num_inputs: int,
    num_actions: int,
    atoms: int,
    config: QNetworkConfig,
    space: Box | None = None,
) -> Sequential:
    """`members` networks, or as many heads as config.heads, from [B, num_inputs] to [E, B,
    num_actions * atoms]. space: of observations whose groups or images have encoders, which come
    first.
    """
    encoders = make_encoders(members, space, config)
    for encoder in encoders:
        num_inputs = encoder.width
    is_mlp = config.body == "mlp"
    own = config.hidden[-1:] if is_mlp else ()  # the last hidden layer belongs to the heads
    kind = functools.partial(NoisyDense, scale=config.noise_scale) if config.noisy else Dense
    trunk, width = make_trunk(
        members,
        num_inputs,
        dataclasses.replace(config, hidden=config.hidden[:-1]) if own else config,
    )
    trunk = [*encoders, *trunk]
    if config.heads > 1:
        trunk, members = [*trunk, ExpandToHeads(config.heads)], config.heads

    def head(inputs: int, outputs: int) -> Sequential:
        sizes = (inputs, *own, outputs)
        last = len(sizes) - 2
        layers = [
            kind(
                members,
                *pair,
                "none" if number == last else config.activation,
                config.layer_norm and number < last,
            )
            for number, pair in enumerate(itertools.pairwise(sizes))
        ]
        layers[-1].keep_float32 = True
        return Sequential(layers)

    if config.action_embedding:
        return Sequential(
            [
                *trunk,
                ActionEmbedding(
                    members,
                    num_actions,
                    config.action_embedding,
                    head(width + config.action_embedding, atoms),
                ),
            ]
        )
    if config.dueling:
        return Sequential(
            [*trunk, Dueling(head(width, atoms), head(width, num_actions * atoms), num_actions)]
        )
    return Sequential([*trunk, head(width, num_actions * atoms)])


def who_takes(space: gymnasium.Space) -> str:
    """The algorithms for an action space that another one refuses, as the end of its message."""
    for kind, text in TAKERS.items():
        if isinstance(space, kind):
            return f"; {text} a {kind.__name__}"
    return ""


def num_choices(space: gymnasium.Space, label: str) -> int:
    """The number of actions of a Discrete space from 0; else a UsageError with the algorithm's
    label and what takes this space.
    """
    if not isinstance(space, Discrete):
        raise UsageError(
            f"{label} needs a Discrete action space, this one is {space}{who_takes(space)}"
        )
    if space.start != 0:
        raise UsageError(f"{label} numbers actions from 0, this space is {space}")
    return int(space.n)
