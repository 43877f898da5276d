"""Encoders of observation groups: convolutions for images before the hidden layers, own modules for
other groups, everything else as it is.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from gpurl.checks import Choices
from gpurl.discovery import find_class_at
from gpurl.envs.observation_groups import Group, GroupedBox, groups_of, is_image
from gpurl.errors import GpurlError, UsageError, did_you_mean, first_line, raised_at
from gpurl.kernels.random import CounterRandom
from gpurl.nn.acting import Sum
from gpurl.nn.mlp import BodyConfig, Dense, Layer, LowPrecision, Sequential, make_trunk, standalone
from gpurl.nn.optimizer import check_parameters

CONVOLUTIONAL = ("cnn", "impala")
TOO_SMALL = (
    "; if the image is too small for it, take smaller kernels and strides, larger images, or "
    "encoder cnn, which suits every size"
)
MIN_NATURE_SIDE = 36  # pixels that the three convolutions of Nature CNN need
MIN_SIDE = 4  # smaller maps are not halved again
IMPALA_CHANNELS = (16, 32, 32)
BYTE_SCALE = 1.0 / 255.0
# of the orthogonal start of convolutions whose features are read beside an action (Yarats et al.
# 2021, "Improving sample efficiency in model-free reinforcement learning from images"): torch's own
# start makes features so small that critics see little but the action
RELU_GAIN = math.sqrt(2.0)


@dataclass(frozen=True)
class EncoderConfig(BodyConfig):
    """Shape of the hidden layers, and of what encodes observations before them."""

    choices: ClassVar[Choices] = {"encoder": ("auto", "none", *CONVOLUTIONAL)}
    may_be_modules: ClassVar[tuple[str, ...]] = ("encoder",)

    encoder: str = "auto"
    """What reads observations before the hidden layers: cnn (the convolutions of Mnih et al. 2015)
    or impala (the residual ones of Espeholt et al. 2018) for images, none (flattened); auto is cnn
    for uint8 observations of 3 or 4 axes, none for others. Or a module of your own,
    my_project.nets:MyEncoder, made with the shape of an observation: it takes [B, *shape], uint8
    scaled to [0, 1], and gives features [B, F].
    """
    encoders: dict[str, str] = field(default_factory=dict)
    """Encoders of groups of a Dict observation by their names, instead of `encoder`: cnn, impala,
    none, or a module of your own, made with the shape of the group.
    """


# ---- which encoder ----


def reads_images(space: Box, config: EncoderConfig) -> bool:
    """Whether networks read bytes of this space, scaled by 1/255, and not rows of floats."""
    if isinstance(space, GroupedBox):
        return space.has_images
    if space.dtype != np.uint8 or config.encoder == "none":
        return False
    return is_image(space) or config.encoder in CONVOLUTIONAL or ":" in config.encoder


def choose_encoders(space: Box, config: EncoderConfig) -> dict[str, str]:
    """The encoder of each group by its name; {} if none of them needs one. UsageError for names
    that are no groups, and for convolutions over what is no image.
    """
    groups = groups_of(space).groups
    names = [group.name for group in groups]
    for name in config.encoders:
        if name not in names or not isinstance(space, GroupedBox):
            known = ", ".join(names) if isinstance(space, GroupedBox) else "no names"
            raise UsageError(
                f"network.encoders has {name!r}, the observation has {known}; "
                f"{did_you_mean(name, names)}".rstrip("; ")
            )
    is_named = isinstance(space, GroupedBox) and len(config.encoders) < len(names)
    if is_named and ":" in config.encoder:
        raise UsageError(
            f"network.encoder {config.encoder} reads one tensor, the observation has "
            f"{', '.join(names)}: name an encoder for each, network.encoders {names[0]} "
            f"{config.encoder}"
        )
    kinds = {group.name: _kind(group, config) for group in groups}
    if config.encoder in CONVOLUTIONAL and not any(group.is_image for group in groups):
        raise UsageError(
            f"network.encoder {config.encoder} needs an image, a uint8 Box of shape (H, W), "
            f"(H, W, C) or (C, H, W); this observation space is {space}"
        )
    for group in groups:
        kind = kinds[group.name]
        is_flat = len(group.shape) not in (2, 3, 4)
        if kind in CONVOLUTIONAL and (not group.is_image or is_flat):
            raise UsageError(
                f"encoder {kind} needs an image, uint8 of shape (H, W), (H, W, C) or (C, H, W); "
                f"{group.name} has shape {group.shape}, {'uint8' if group.is_image else 'float32'}"
            )
    needs_one = reads_images(space, config) or any(kind != "none" for kind in kinds.values())
    return kinds if needs_one else {}


def _kind(group: Group, config: EncoderConfig) -> str:
    if group.name in config.encoders:
        return config.encoders[group.name]
    if ":" in config.encoder:
        return config.encoder
    if not group.is_image:
        return "none"
    if config.encoder != "auto":
        return config.encoder
    return "cnn" if len(group.shape) in (3, 4) else "none"


def describe_encoders(space: Box, config: EncoderConfig) -> str:
    """For the user: what reads which image, "" without images."""
    kinds = choose_encoders(space, config)
    images = [group for group in groups_of(space).groups if group.is_image]
    texts = []
    for group in images:
        kind = kinds.get(group.name, "none")
        how = "flattened into a row"
        if kind in CONVOLUTIONAL:
            channels, height, width = image_shape(group.shape)
            how = f"{kind} of {channels} channels of {height} x {width}"
        elif kind != "none":
            how = kind
        texts.append(f"{group.name} {group.shape}: {how}")
    return "images: " + ", ".join(texts) if texts and kinds else ""


# ---- images ----


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of an image of this shape.

    Of (a, b, c) the smaller of the first and the last axis is that of the channels; of equal ones
    the first. (H, W) has one channel. Four axes are K such images, whose channels are joined.
    """
    if len(shape) == 4:
        channels, height, width = image_shape(shape[1:])
        return shape[0] * channels, height, width
    if len(shape) == 2:
        return 1, *shape  # type: ignore[return-value]
    first, middle, last = shape
    return (first, middle, last) if first <= last else (last, first, middle)


def to_image(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """uint8 [B, *shape] -> float32 [B, C, H, W] in [0, 1]."""
    if len(shape) == 2:
        x = x.unsqueeze(1)
    elif shape[-3] > shape[-1]:
        x = x.movedim(-1, -3)
    if len(shape) == 4:
        x = x.flatten(1, 2)
    return x.float() * BYTE_SCALE


def make_convolutions(
    kind: str, shape: tuple[int, ...], layer_norm: bool = False, gain: float | None = None
) -> nn.Module:
    """[B, C, H, W] -> [B, F], as `kind` says; layer_norm: normalise each image between a
    convolution and its activation; gain: as of `gpurl.nn.mlp.Dense`.
    """
    channels, height, width = image_shape(shape)
    make = _impala if kind == "impala" else _nature
    layers = make(channels, min(height, width), layer_norm)
    for module in layers.modules():
        if gain is not None and isinstance(module, Convolution):
            nn.init.orthogonal_(module.weight, gain)
            nn.init.zeros_(module.bias)
    return layers


class Convolution(LowPrecision, nn.Conv2d):
    """torch's convolution, whose products may be computed in bfloat16."""

    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.dtype is None:
            return super().forward(x)
        x, weight, bias = (each.to(self.dtype) for each in (x, self.weight, self.bias))
        return self._conv_forward(x, weight, bias).to(self.weight.dtype)


def _nature(channels: int, side: int, layer_norm: bool) -> nn.Sequential:
    """The convolutions of Mnih et al. 2015 (methods, "Model architecture"); for sides below 36
    pixels the same channels with 3 x 3 kernels, which halve the image while it has 4 pixels.
    """
    if side >= MIN_NATURE_SIDE:
        sizes = ((8, 4, 0), (4, 2, 0), (3, 1, 0))
    else:
        strides = []
        for _ in range(3):
            strides.append(2 if side >= MIN_SIDE else 1)
            side = -(-side // strides[-1])
        sizes = tuple((3, stride, 1) for stride in strides)  # type: ignore[assignment]
    layers = nn.Sequential()
    for outputs, (kernel, stride, padding) in zip((32, 64, 64), sizes):
        layers.append(Convolution(channels, outputs, kernel, stride, padding))
        if layer_norm:
            layers.append(nn.GroupNorm(1, outputs))  # one group: over all channels and pixels
        layers.append(nn.ReLU())
        channels = outputs
    return layers.append(nn.Flatten())


def _impala(channels: int, side: int, layer_norm: bool) -> nn.Sequential:
    """The residual convolutions of Espeholt et al. 2018 (figure 3, right): three sections of a
    convolution, a pooling and two residual blocks. The pooling is left out where the image has
    fewer than 4 pixels.
    """
    layers = nn.Sequential()
    for outputs in IMPALA_CHANNELS:
        layers.append(Convolution(channels, outputs, 3, 1, 1))
        if layer_norm:
            layers.append(nn.GroupNorm(1, outputs))
        if side >= MIN_SIDE:
            layers.append(nn.MaxPool2d(3, 2, 1))
            side = -(-side // 2)
        for _ in range(2):
            layers.append(
                Sum(
                    nn.Sequential(
                        nn.ReLU(),
                        Convolution(outputs, outputs, 3, 1, 1),
                        nn.ReLU(),
                        Convolution(outputs, outputs, 3, 1, 1),
                    )
                )
            )
        channels = outputs
    return layers.append(nn.ReLU()).append(nn.Flatten())


# ---- groups ----


class Convolutions(nn.Module):
    """uint8 [B, *shape] -> [B, F]."""

    def __init__(
        self, kind: str, shape: tuple[int, ...], layer_norm: bool, gain: float | None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.layers = make_convolutions(kind, shape, layer_norm, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(to_image(x, self.shape))


class Flattened(nn.Module):
    """[B, *shape] -> [B, F], bytes scaled to [0, 1]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)  # a trace would keep len(x)
        return rows.float() * BYTE_SCALE if x.dtype == torch.uint8 else rows


class OwnEncoder(nn.Module):
    """A user's module of one group: [B, *shape], bytes scaled to [0, 1], -> [B, F]."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.name = name
        kind = find_class_at(name, nn.Module, "network")
        with users_errors(f"encoder {name} cannot be made of the shape {shape} of a group", kind):
            self.module = kind(shape)
        check_parameters(self.module, may_be_lazy=True)
        self.eval()
        says = f"encoder {name} cannot read a group of shape {shape}"
        with users_errors(says, kind, TOO_SMALL), torch.no_grad():
            self(torch.zeros(2, *shape))

    def forward(self, x: Tensor) -> Tensor:
        features = self.module(scaled_bytes(x))
        if not isinstance(features, Tensor) or features.dim() != 2:
            got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise UsageError(f"encoder {self.name}: wanted features [B, F], got {got}")
        check_dtype(features, x, f"encoder {self.name}")
        return features


@contextmanager
def users_errors(says: str, kind: type, of_layers: str = "") -> Iterator[None]:
    """A `with` block that runs a user's module of the class `kind`: an error is a UsageError that
    begins with `says` and names the line. of_layers: advice where a layer of torch raised it.
    """
    try:
        yield
    except GpurlError:
        raise
    except Exception as error:
        is_of_torch = isinstance(error, RuntimeError)
        text = first_line(error)
        if not (is_of_torch or isinstance(error, TypeError)):
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        advice = of_layers if is_of_torch else ""
        raise UsageError(f"{says}: {text} ({raised_at(error, kind)}){advice}") from error


def check_dtype(features: Tensor, x: Tensor, module: str) -> None:
    """UsageError if the `features` of `x` are of another dtype than `x`, bytes counting as float32;
    module: in words, what made them.
    """
    dtype = x.dtype if x.is_floating_point() else torch.float32
    if features.dtype != dtype:
        raise UsageError(f"{module}: wanted features of {dtype}, got {features.dtype}")


def scaled_bytes(x: Tensor) -> Tensor:
    """float32 as it is, uint8 as float32 in [0, 1]."""
    return x.float() * BYTE_SCALE if x.dtype == torch.uint8 else x


class GroupEncoder(nn.Module):
    """One member: a dict of groups [B, *shape] -> features [B, F], those of the groups side by side
    in their order.
    """

    def __init__(
        self, space: GroupedBox, config: EncoderConfig, kinds: Mapping[str, str], gain: float | None
    ) -> None:
        super().__init__()
        self.names = [group.name for group in space.groups]
        parts: list[nn.Module] = []
        for group in space.groups:
            kind = kinds[group.name]
            if kind in CONVOLUTIONAL:
                parts.append(Convolutions(kind, group.shape, config.layer_norm, gain))
            else:
                parts.append(Flattened() if kind == "none" else OwnEncoder(kind, group.shape))
        self.parts = nn.ModuleList(parts)  # not by name: a name may have dots

    def forward(self, groups: Mapping[str, Tensor]) -> Tensor:
        features = [part(groups[name]) for name, part in zip(self.names, self.parts)]
        return features[0] if len(features) == 1 else torch.cat(features, dim=1)


class Encoder(Layer):
    """Rows [B, D] of a `GroupedBox` -> features [E, B, F] of E members, each with its own encoder
    of each group.
    """

    def __init__(
        self, members: int, space: Box, config: EncoderConfig, gain: float | None = None
    ) -> None:
        super().__init__()
        self.space = groups_of(space)
        kinds = choose_encoders(space, config)
        self.members = nn.ModuleList(
            GroupEncoder(self.space, config, kinds, gain) for _ in range(members)
        )
        # a first batch shows the width, and gives lazy modules their shape
        self.eval()
        with torch.no_grad():
            self.width = self.forward(empty_rows(space, 2)).shape[2]

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        groups = self.space.split(x)
        return torch.stack([member(groups) for member in self.members])

    def to_torch(self, member: int = 0) -> nn.Module:
        """A dict of groups [B, *shape] -> [B, F]."""
        copied = standalone(self.members[min(member, len(self.members) - 1)], "the encoder")
        for module in copied.modules():
            if isinstance(module, Convolution):
                module.dtype = None
        return copied


def empty_rows(space: Box, count: int) -> Tensor:
    """[count, D] zeros, as networks that read images or groups get observations."""
    dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
    return torch.zeros(count, math.prod(space.shape), dtype=dtype)


def make_encoders(
    members: int, space: Box | None, config: EncoderConfig, gain: float | None = None
) -> list[Encoder]:
    """The encoder that comes before hidden layers, or none."""
    if space is None or not choose_encoders(space, config):
        return []
    return [Encoder(members, space, config, gain)]


def make_encoded_network(
    num_inputs: int, num_outputs: int, space: Box, config: EncoderConfig
) -> Sequential:
    """A network [B, num_inputs] -> [1, B, num_outputs], with an encoder where `space` needs one."""
    encoders = make_encoders(1, space, config, RELU_GAIN)
    for encoder in encoders:
        num_inputs = encoder.width
    trunk, width = make_trunk(1, num_inputs, config)
    return Sequential([*encoders, *trunk, Dense(1, width, num_outputs)])


class EncodedCritics(Sequential):
    """Critics with one encoder of observations for all of them: `gpurl.algorithms.actor_critic`
    puts its features and an action side by side, and these are what the layers read.
    """

    def __init__(self, encoder: Encoder, layers: Sequential) -> None:
        super().__init__(layers.layers)  # type: ignore[arg-type]
        self.encoder = encoder
