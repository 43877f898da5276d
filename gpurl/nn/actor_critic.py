"""The actor-critic of PPO: hidden layers of policy and value network as one stack, an optional
memory before them, and a linear head each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.checks import Choices
from gpurl.errors import UsageError
from gpurl.nn.acting import EncodedMemory, chain
from gpurl.nn.encoders import EncoderConfig, make_encoders
from gpurl.nn.gru import Gru
from gpurl.nn.lstm import Lstm
from gpurl.nn.memory import Memory
from gpurl.nn.mingru import MinGru
from gpurl.nn.mlp import Dense, Sequential, make_trunk
from gpurl.nn.parts import describe, member_tensors, state_tensors


class Gains(NamedTuple):
    """Of the weights at the start, see `gpurl.nn.mlp.Dense`."""

    hidden: float | None
    actor: float | None
    critic: float | None


# a small gain of the actor: the first policy hardly depends on the observation
ORTHOGONAL = Gains(hidden=math.sqrt(2.0), actor=0.01, critic=1.0)
UNIFORM = Gains(None, None, None)
MEMORIES: dict[str, Callable[[int, int], Memory]] = {"gru": Gru, "lstm": Lstm, "mingru": MinGru}


@dataclass(frozen=True)
class NetworkConfig(EncoderConfig):
    """Shape of the policy and value networks."""

    choices: ClassVar[Choices] = {
        "memory": ("none", *MEMORIES),
        "init": ("orthogonal", "uniform"),
    }

    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared: bool = False
    """One trunk for actor and critic instead of two networks; a critic of privileged observations
    shares none.
    """
    init: str = "orthogonal"
    """Weights at the start: orthogonal (gains sqrt(2) in hidden layers, 0.01 in the actor's last, 1
    in the critic's; Andrychowicz et al. 2021), or uniform in +-1/sqrt(inputs), torch's own, as
    rsl_rl and rl_games have them.
    """
    memory: str = "none"
    """gru, lstm or mingru puts a recurrent layer before actor and critic. mingru, whose gates read
    the observation only, is trained without a loop over the steps of a rollout.
    """
    memory_size: int = 64
    """Units of the memory."""
    trunk: str = ""
    """A module of your own in place of the hidden layers, my_project.nets:MyTrunk: made with the
    shape of an observation and the options, it takes [B, *obs] and gives features [B, F]. Of a Dict
    observation it gets dicts, of shapes and of tensors. Images are float32 between 0 and 1.
    """
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Keyword arguments of the trunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_size < 1:
            raise UsageError(f"memory_size must be at least 1, got {self.memory_size}")
        if self.options and not self.trunk:
            raise UsageError(f"network.options {self.options} needs network.trunk")
        if self.trunk and self.memory != "none":
            raise UsageError(
                f"trunk {self.trunk} and memory {self.memory} cannot be combined: use one of them"
            )
        if self.trunk and (self.encoder != "auto" or self.encoders):
            raise UsageError(
                f"trunk {self.trunk} reads the observations itself: leave out encoder and encoders"
            )
        if self.shared and not self.hidden and not self.trunk:
            raise UsageError("shared needs at least one hidden layer to share, hidden is empty")

    @property
    def gains(self) -> Gains:
        """Of the orthogonal start, all None where it is uniform."""
        return ORTHOGONAL if self.init == "orthogonal" else UNIFORM


class ActorCritic(nn.Module):
    """Observations to the policy head's numbers and to a value; two networks or one trunk for both,
    with or without a memory before them.

    Without a memory `forward` takes observations. With one it takes features: `remember` gives
    those of one step, `unroll` those of a sequence.

    space: of observations whose groups or images have encoders, which come first.
    """

    def __init__(
        self, config: NetworkConfig, num_inputs: int, num_outputs: int, space: Box | None = None
    ) -> None:
        super().__init__()
        self.config = config
        # encoders of observations come first: one for a memory, else one for each trunk
        has_memory = config.memory != "none"
        encoders = make_encoders(
            1 if config.shared or has_memory else 2, space, config, config.gains.hidden
        )
        num_features = encoders[0].width if encoders else num_inputs
        self.encoder = encoders.pop() if encoders and has_memory else None
        self.memory: Memory | None = None
        if has_memory:
            self.memory = MEMORIES[config.memory](num_features, config.memory_size)
            num_features = self.memory.size
        hidden, width = _make_hidden(1 if config.shared else 2, num_features, config)
        self.trunk = Sequential([*encoders, hidden]) if encoders else hidden
        self.actor = Dense(1, width, num_outputs, gain=config.gains.actor, keep_float32=True)
        self.critic = Dense(1, width, 1, gain=config.gains.critic, keep_float32=True)

    def remember(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """obs [N, D], one step; state [N, S] of the memory -> (features [N, F], next state)."""
        assert self.memory is not None
        features, state = self.memory(self.encoded(obs), state)
        return features, state

    def unroll(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """obs [T, N, D], state [N, S] of the memory before them, starts of episodes [T, N] ->
        features [T, N, F].
        """
        assert self.memory is not None
        return self.memory.unroll(self.encoded(obs), state, starts)

    def encoded(self, obs: Tensor) -> Tensor:
        """[..., D] -> [..., F] what the memory reads of observations."""
        if self.encoder is None:
            return obs
        return self.encoder(obs.flatten(0, -2))[0].unflatten(0, obs.shape[:-1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, F] -> (the policy head's numbers [B, A], value [B])."""
        features = self.trunk(x)
        # without hidden layers the trunk gives x itself
        members = features.unbind(0) if features.dim() == 3 else (features,)
        return evaluate_heads(self.actor, self.critic, members[0], members[-1])

    @property
    def critic_reads_actor(self) -> bool:
        """Whether the critic reads features that the actor has too: of the memory, or of a shared
        trunk.
        """
        return self.memory is not None or self.config.shared

    def actor_part(self) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
        """(layers, weights) of the actor without its last layer; see `gpurl.nn.parts`."""
        first = self.encoder, self.memory
        weights = *state_tensors(*first), *member_tensors(self.trunk, 0, 1)
        return describe(*first, self.trunk), weights

    def critic_part(self) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
        """(layers, weights) of the critic, of which no actor reads any."""
        own = () if self.config.shared else member_tensors(self.trunk, 1, 2)
        return describe(self.trunk, self.critic), (*own, *state_tensors(self.critic))

    def actor_to_torch(self) -> nn.Module:
        """What `forward` needs for the policy head's numbers, in torch's own modules."""
        return chain(self.trunk.to_torch(), self.actor.to_torch())

    def memory_to_torch(self) -> nn.Module:
        """(observations, or a dict of their groups; state [B, S]) -> (features, next state)."""
        assert self.memory is not None
        if self.encoder is None:
            return self.memory.to_torch()
        return EncodedMemory(self.encoder.to_torch(), self.memory.to_torch())


class AsymmetricActorCritic(ActorCritic):
    """An actor that reads observations and a critic that reads privileged ones (Pinto et al. 2017):
    rows hold both. The memory is the actor's.
    """

    def __init__(
        self, config: NetworkConfig, num_inputs: int, num_state: int, num_outputs: int
    ) -> None:
        actor_config = replace(config, shared=True) if config.hidden else config
        super().__init__(actor_config, num_inputs, num_outputs)
        self.num_inputs = num_inputs
        self.critic_trunk, width = _make_hidden(1, num_state, config)
        self.critic = Dense(1, width, 1, gain=config.gains.critic, keep_float32=True)

    @property
    def critic_reads_actor(self) -> bool:
        return False

    def critic_part(self) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
        modules = self.critic_trunk, self.critic
        return describe(*modules), state_tensors(*modules)

    def remember(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """obs [N, D + P], P of them privileged, one step; state [N, S] of the memory -> (features
        [N, F + P], next state).
        """
        features, state = super().remember(obs[:, : self.num_inputs], state)
        return torch.cat((features, obs[:, self.num_inputs :]), dim=1), state

    def unroll(self, obs: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        features = super().unroll(obs[..., : self.num_inputs], state, starts)
        return torch.cat((features, obs[..., self.num_inputs :]), dim=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, F + P] -> (the policy head's numbers [B, A], value [B])."""
        width = self.num_inputs if self.memory is None else self.memory.size
        actor_features = self.trunk(x[:, :width])
        critic_features = self.critic_trunk(x[:, width:])
        return evaluate_heads(self.actor, self.critic, actor_features, critic_features)


def evaluate_heads(
    actor: Dense, critic: Dense, actor_features: Tensor, critic_features: Tensor
) -> tuple[Tensor, Tensor]:
    """Features [B, F] or [1, B, F] of each -> (the policy head's numbers [B, A], value [B])."""
    return actor(actor_features).squeeze(0), critic(critic_features).flatten()


def _make_hidden(members: int, num_inputs: int, config: NetworkConfig) -> tuple[Sequential, int]:
    """(the hidden layers of `members` networks, the size of what they give)."""
    layers, width = make_trunk(members, num_inputs, config, config.gains.hidden)
    return Sequential(layers), width
