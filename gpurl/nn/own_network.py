"""An actor-critic on own trunks: any modules from observations to features, followed by gpurl's
heads."""

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.discovery import find_class_at
from gpurl.envs.observation_groups import GroupedBox
from gpurl.errors import UsageError
from gpurl.nn.acting import Shaped, chain
from gpurl.nn.actor_critic import NetworkConfig, evaluate_heads
from gpurl.nn.encoders import (
    TOO_SMALL,
    check_dtype,
    empty_rows,
    reads_images,
    scaled_bytes,
    users_errors,
)
from gpurl.nn.mlp import Dense, standalone
from gpurl.nn.optimizer import check_parameters
from gpurl.nn.parts import describe, state_tensors


class OwnTrunks(nn.Module):
    """`config.trunk` made twice, for actor and critic, or once for both (`config.shared`). Where
    observations have names, a trunk is made with a dict of shapes and takes a dict of tensors.
    """

    def __init__(self, config: NetworkConfig, space: Box, num_outputs: int) -> None:
        super().__init__()
        self.shape, self.name = space.shape, config.trunk
        self.groups = space if isinstance(space, GroupedBox) else None
        shape: object = self.shape
        if self.groups is not None:
            shape = {group.name: group.shape for group in self.groups.groups}
        make = find_class_at(config.trunk, nn.Module, "network")
        says = f"network {config.trunk} cannot be made of an observation shape and options"
        with users_errors(f"{says} {config.options}", make):
            trunks = [make(shape, **config.options) for _ in range(1 + (not config.shared))]
        if not any(True for _ in trunks[0].parameters()):
            raise UsageError(
                f"network {config.trunk} has no parameters to train: set its layers as attributes, "
                f"in lists as nn.ModuleList"
            )
        self.trunks = nn.ModuleList(trunks)
        check_parameters(trunks[0], may_be_lazy=True)
        # a first batch shows the width, and gives lazy modules their shape; in eval mode, so that
        # no running statistics begin with it
        self.trunks.eval()
        self.reads_images = reads_images(space, config)
        obs = empty_rows(space, 2)
        if not self.reads_images:
            obs = obs.float()
        says = f"network {config.trunk} cannot read observations of shape {shape}"
        with users_errors(says, make, TOO_SMALL), torch.no_grad():
            widths = [self._features(trunk, obs).shape[1] for trunk in trunks]
        self.actor = Dense(1, widths[0], num_outputs, gain=config.gains.actor)
        self.critic = Dense(1, widths[-1], 1, gain=config.gains.critic)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [B, D] flat observations -> (outputs for the action head [B, A], value [B])."""
        features = [self._features(trunk, x) for trunk in self.trunks]
        return evaluate_heads(self.actor, self.critic, features[0], features[-1])

    @property
    def critic_reads_actor(self) -> bool:
        """Whether actor and critic share a trunk."""
        return len(self.trunks) == 1

    def actor_part(self) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
        """As `ActorCritic.actor_part`."""
        return describe(self.trunks[0]), state_tensors(self.trunks[0])

    def critic_part(self) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
        """As `ActorCritic.critic_part`."""
        own = () if self.critic_reads_actor else (self.trunks[-1],)
        return describe(self.trunks[-1], self.critic), state_tensors(*own, self.critic)

    def actor_to_torch(self) -> nn.Module:
        """What `forward` needs for the outputs, with copies of the weights."""
        trunk = standalone(self.trunks[0], f"network {self.name}")
        before: nn.Module = Shaped(self.shape)
        if self.groups is not None or self.reads_images:
            before = ScaledGroups(has_names=self.groups is not None)
        return chain(before, trunk, self.actor.to_torch())

    def _features(self, trunk: nn.Module, x: Tensor) -> Tensor:
        """x: [B, D] -> [B, F]."""
        if self.groups is None:
            features = trunk(scaled_bytes(x.view(-1, *self.shape)))
        else:
            parts = self.groups.split(x)
            features = trunk({name: scaled_bytes(part) for name, part in parts.items()})
        if not isinstance(features, Tensor) or features.dim() != 2 or len(features) != len(x):
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise UsageError(
                f"network {self.name}: wanted features [{len(x)}, F] of {len(x)} observations, got "
                f"{got}"
            )
        check_dtype(features, x, f"network {self.name}")
        return features


class ScaledGroups(nn.Module):
    """A dict of groups [B, *shape], bytes scaled to [0, 1]; without names the only one of them."""

    def __init__(self, has_names: bool) -> None:
        super().__init__()
        self.has_names = has_names

    def forward(self, groups: dict[str, Tensor]) -> dict[str, Tensor] | Tensor:
        scaled = {name: scaled_bytes(part) for name, part in groups.items()}
        return scaled if self.has_names else scaled["obs"]
