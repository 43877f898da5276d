"""The base of all algorithms: act, record a step, prepare targets, learn. One training loop serves
all of them.
"""

import copy
import dataclasses
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import gymnasium
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn
from torch.nn import functional

from gpurl.algorithms.symmetry import Mirror, Symmetry
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_choices, check_numbers
from gpurl.envs.observation_groups import GroupedBox, groups_of, is_image
from gpurl.envs.vec_env import Timestep
from gpurl.envs.vec_env import describe as describe_value
from gpurl.errors import CheckpointError, UsageError
from gpurl.kernels.pack_rows import Column
from gpurl.kernels.random import CounterRandom
from gpurl.nn.acting import Actor
from gpurl.nn.batch_norm import BatchNorm
from gpurl.nn.encoders import Encoder, EncoderConfig, choose_encoders, reads_images
from gpurl.nn.mlp import set_dtype
from gpurl.nn.normalizer import Normalizer
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.own_network import OwnTrunks
from gpurl.nn.parts import Part, describe, state_tensors
from gpurl.nn.ranks import ALONE, Alone

Metrics = dict[str, Tensor]  # name in the log -> value
PolicyState = tuple[Tensor, ...]  # () without memory, else one [N, S] tensor a memory
# packages whose modules compute the same in train mode and in eval mode
MODE_INDEPENDENT = ("gpurl.", "torch.nn.modules.container")
# modules that take the bytes of images, and of numbers beside them
BYTE_READERS = (Encoder, OwnTrunks)

_global_stream = threading.RLock()


@contextmanager
def global_stream(seed: int) -> Iterator[None]:
    """A `with` block in which torch's global random numbers begin at `seed` and no training of
    another thread draws any; afterwards they go on as before.
    """
    with _global_stream, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Decision(NamedTuple):
    """What `act` returns."""

    action: Tensor  # [N, *action] as the environment takes it
    policy_state: PolicyState  # memory after this step; () without memory
    columns: dict[str, Tensor]  # [N, ...] stored with the step for the update


@dataclass(frozen=True)
class AlgorithmConfig:
    """Settings every algorithm has."""

    # a resumed run must keep these: they shape the weights or matter at the start only
    fixed: ClassVar[tuple[str, ...]] = ("normalize_obs", "init_from")
    # allowed values of `schedule`
    choices: ClassVar[Choices] = {"schedule": ("constant", "linear")}
    # numbers that `Algorithm.change_setting` may change in a run: nothing is built from them
    changeable: ClassVar[tuple[str, ...]] = ("learning_rate", "gamma")
    # those that population based training explores by default, and their ranges
    explored: ClassVar[dict[str, tuple[float, float]]] = {"learning_rate": (1e-5, 1e-2)}

    gamma: float = 0.99
    """Discount factor."""
    horizon: int = 32
    """Steps of every environment between updates."""
    learning_rate: float = 1e-3
    """Adam's step size, at the start of its schedule."""
    schedule: str = "constant"
    """Learning rate over time: constant or linear (to 0)."""
    max_grad_norm: float | None = None
    """Gradients with a larger norm are scaled down to it. The norm is over all weights of an
    optimiser, all critics of an ensemble together.
    """
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""
    normalize_obs: bool = False
    """Running normalisation of observations inside the policy; buffers store them unchanged.
    Images are not normalised.
    """
    normalize_obs_epsilon: float = 1e-8
    """Added to the variance before the division. With 0.1, columns that are almost always 0, as
    the contact forces of ant are, stay small instead of being enlarged to unit variance.
    """
    init_from: str | None = None
    """Begin with the actor, the critics and the normalisers of another run, as far as they fit: its
    folder (the best checkpoint) or that of a checkpoint. Its environment, settings and algorithm
    may be others.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        check_numbers(
            self,
            {"horizon": 1, "weight_decay": 0},
            ("learning_rate", "max_grad_norm", "normalize_obs_epsilon"),
            zero_to_one=("gamma",),
        )


class Algorithm(ABC, nn.Module):
    """Acts, records steps, prepares training data and learns from it.

    No method waits for the device: metrics stay tensors. A checkpoint holds `state_dict()`,
    `extra_state()` and `replay_state()`.
    """

    # several agents: obs [N, A, D], actions [N, A] or [N, A, d], reward [N, A]
    takes_agents: ClassVar[bool] = False
    # the algorithm that replaces this one for a Discrete action space
    discrete_form: ClassVar[str] = ""
    # whether targets need the values of final_obs
    values_final_obs: ClassVar[bool] = False
    # whether images are flattened into rows where no network of this algorithm reads them
    flattens_images: ClassVar[bool] = True
    # of `random_streams`, those whose numbers are the same on all ranks
    common_streams: ClassVar[frozenset[str]] = frozenset()
    # by the name of a network that of its target network, both attributes
    target_networks: ClassVar[dict[str, str]] = {}
    # of `extra_state`, what belongs to the environments and episodes of this agent
    of_episodes: ClassVar[frozenset[str]] = frozenset({"random"})
    # transitions in the replay buffer of all ranks before the first `learn`
    learning_starts: int = 0
    # the processes that train this agent
    ranks: Alone = ALONE
    # the task's mirror, where the settings name one and the algorithm uses it
    symmetry: Symmetry | None = None
    config: AlgorithmConfig
    name: str
    normalizer: Normalizer | None

    def __init__(
        self,
        config: AlgorithmConfig,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        num_envs: int,
        device: torch.device,
        seed: int = 0,
        state_space: gymnasium.Space | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.label = type(self).__name__
        if not isinstance(observation_space, Box):
            raise UsageError(
                f"{self.label} needs a Box observation space, this one is {observation_space}"
            )
        self.observation_space = observation_space
        self.action_space = action_space
        self.num_envs = num_envs
        self.device = device
        self.seed = seed
        self.precision = "float32"  # or tf32, bf16: see `set_precision`
        # inputs of the networks: observations, then the privileged state where the critic reads it
        self.num_inputs = math.prod(observation_space.shape)
        # of images, and of rows that hold some, the networks read the bytes
        self.groups = groups_of(observation_space)
        encoders = self.encoder_config()
        self.reads_bytes = encoders is not None and reads_images(observation_space, encoders)
        if not self.reads_bytes and self._needs_images(observation_space):
            raise UsageError(
                f"{self.label} has no convolutional network for the images in {observation_space}: "
                f"take ppo, sac, dqn or another one, or an environment that observes numbers"
            )
        self.state_space = state_space if self.reads_state() else None
        self.num_state = 0 if self.state_space is None else math.prod(self.state_space.shape or ())
        self.normalizer = self._make_normalizer()
        # modules, then what trains them on the device
        if self.make_networks() is not None:  # type: ignore[func-returns-value]
            raise UsageError(
                f"{self.label}.make_networks: wanted modules as attributes, such as self.network; "
                f"got a value that it returns"
            )
        self._renew_targets()
        if self.reads_bytes and not any(isinstance(each, BYTE_READERS) for each in self.modules()):
            self._read_numbers()
        if device.type != "cpu":
            self.to(device)
        # logged as train/n_updates; includes skipped steps (train/skipped_steps)
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)
        self.optimizers = self.make_optimizers()
        self.random_streams: dict[str, CounterRandom] = {}
        # settings that are not those of the start any more: see `change_setting`
        self.changed_settings: dict[str, float] = {}
        self.make_training()
        # iterations to learn in which the actor stays as it is, see `warms_critic`
        self.warm_up_left: int = getattr(config, "critic_warmup", 0)
        # by `init_from`, as far as its actor fitted
        self.actor_is_transferred = False
        # everything is in eval mode, except in `train_mode`
        self.eval()
        networks = [optimizer.module for optimizer in self.optimizers.values()]
        self._networks_with_modes = tuple(filter(_may_have_modes, networks))

    @abstractmethod
    def make_networks(self) -> None:
        """Set the modules. UsageError for spaces that the algorithm cannot use."""

    def _renew_targets(self) -> None:
        """Where a subclass has replaced a network, its target network is a copy of it, unless it is
        of the subclass, too.
        """
        for name, target_name in self.target_networks.items():
            network, target = getattr(self, name), getattr(self, target_name, None)
            if target is None or not is_of_gpurl(target):
                continue
            if not is_of_gpurl(network) or describe(network) != describe(target):
                setattr(self, target_name, copy.deepcopy(network))

    def check_output(
        self, name: str, network: nn.Module, output: Tensor, shape: Sequence[int]
    ) -> Tensor:
        """`output` of a network [E, B, O], of which somebody's own may leave out E = 1. UsageError,
        with the `name` of its attribute, for another shape.
        """
        if is_of_gpurl(network) or torch.jit.is_tracing():
            return output
        got = getattr(output, "shape", None)
        if got != tuple(shape) and (shape[0] != 1 or got != tuple(shape[1:])):
            raise UsageError(
                f"{self.label}.{name}: wanted a tensor of shape {tuple(shape)}: networks, rows, "
                f"outputs; {type(network).__name__} returned {describe_value(output)}"
            )
        return output.view(*shape)

    @abstractmethod
    def make_optimizers(self) -> dict[str, FlatAdam]:
        """The optimisers, each with the name of its module; the modules are on the device now."""

    @abstractmethod
    def make_training(self) -> None:
        """Set random streams and scalars. Checkpoints hold the streams in `random_streams`."""

    def join(self, ranks: Alone) -> None:
        """Train with other processes, each with environments of its own: average gradients, merge
        normalisers, and draw the random numbers that these environments have in one process.
        UsageError for what ranks cannot share.
        """
        if obstacle := self.ranks_obstacle():
            raise UsageError(f"{self.label} is trained by one process: {obstacle}")
        self.ranks = ranks
        for optimizer in self.optimizers.values():
            optimizer.reduce = ranks.reduce  # type: ignore[method-assign]
        for module in self.modules():
            if isinstance(module, Normalizer | BatchNorm):
                module.ranks = ranks
        for name, stream in self.random_streams.items():
            if name not in self.common_streams:
                stream.begin_at(ranks.index * stream.num_envs)

    def ranks_obstacle(self) -> str:
        """Why several processes cannot train it, or ""."""
        for module in self.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                return (
                    f"{type(module).__name__} takes its statistics from the rows of one process; "
                    f"torch.nn.LayerNorm or GroupNorm takes those of each row"
                )
        return ""

    def set_symmetry(self, mirror: Mirror, name: str) -> None:
        """Use the task's `mirror`, which the settings call `name`. UsageError if it is none, or if
        the algorithm cannot use it.
        """
        raise UsageError(f"{self.label} does not use the symmetry of a task: leave out {name}")

    def refuse_mirrored_images(self, name: str) -> None:
        """UsageError where networks read images: a mirror is of rows of numbers."""
        if self.reads_bytes:
            raise UsageError(
                f"symmetry {name} mirrors rows of numbers, these observations have images: "
                f"{self.observation_space}; leave it out, or flatten an image without name by "
                f"--network.encoder none"
            )

    def reads_state(self) -> bool:
        """Whether the critic reads privileged observations."""
        return False

    def encoder_config(self) -> EncoderConfig | None:
        """Settings of the network that encodes observations, None where none does."""
        return None

    def refuse_encoders_beside_state(self, config: EncoderConfig) -> None:
        """UsageError where a network by `config` encodes observations and the critic reads
        privileged ones.
        """
        if self.num_state and choose_encoders(self.observation_space, config):
            raise UsageError(
                f"a critic of privileged observations and its actor read plain rows, these "
                f"observations have encoders or images: {self.observation_space}; take "
                f"--asymmetric False"
            )

    def without_state(self, obs: Tensor) -> Tensor:
        """`obs` [N, *obs], or rows [N, D + S], as rows [N, D + S] with zeros for the privileged
        observations: a trained policy gets none, and no actor reads them. As it is where the critic
        reads none either.
        """
        if not self.num_state:
            return obs
        return functional.pad(obs.flatten(1)[:, : self.num_inputs], (0, self.num_state))

    def takes_groups(self) -> bool:
        """Whether the actor in torch's own modules takes a dict of the observation's groups in
        place of rows.
        """
        encoders = self.encoder_config()
        return encoders is not None and bool(choose_encoders(self.observation_space, encoders))

    def _make_normalizer(self) -> Normalizer | None:
        """Of the numbers in what networks read; None if there are none, or it is not wanted."""
        count = self.groups.num_floats if self.reads_bytes else self.num_inputs
        count += self.num_state
        if not self.config.normalize_obs or not count:
            return None
        return Normalizer(count, epsilon=self.config.normalize_obs_epsilon)

    def _read_numbers(self) -> None:
        """The network of a subclass encodes no bytes: it gets the pixels of an image as numbers."""
        if isinstance(self.observation_space, GroupedBox):
            names = ", ".join(group.name for group in self.groups.groups)
            raise UsageError(
                f"{self.label}.make_networks makes a network without encoders, and the "
                f"observations {names} have images: give it a "
                f"gpurl.nn.encoders.Encoder, or observe numbers"
            )
        self.reads_bytes = False
        self.normalizer = self._make_normalizer()

    def _needs_images(self, space: Box) -> bool:
        """Whether `space` cannot be read as rows of numbers."""
        if isinstance(space, GroupedBox):
            return space.has_images
        return is_image(space) and not self.flattens_images

    def __deepcopy__(self, memo: dict[int, Any]) -> "Algorithm":
        raise TypeError(
            f"{type(self).__name__} shares memory between weights and optimiser, which a copy "
            "would separate: make another one (make_algorithm, gpurl.load), load the state_dict()"
        )

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """The policy state at the start of an episode: () or tensors [num_envs, S]."""
        return ()

    @abstractmethod
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        """The actions at obs [N, *obs]; explore=False: greedy ones."""

    def actor_modules(self) -> Actor:
        """What `act(obs, explore=False)` computes, in torch's own modules with copies of the
        weights: for `Policy.module` and `gpurl export`.
        """
        raise UsageError(
            f"{self.label} cannot be exported, as it does not say what acts: define "
            f"actor_modules(self) -> gpurl.nn.acting.Actor, as docs/export.md shows"
        )

    def forward(self, *_: Any) -> None:
        """UsageError: an algorithm also holds critics, and kernels that a trace would not see."""
        raise UsageError(
            "an algorithm is no network to call, trace or export: take policy.module(), a plain "
            "nn.Module, or the command gpurl export RUN"
        )

    @abstractmethod
    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        """[N] expected return from obs [N, *obs], of rewards as the algorithm scales them."""

    def reward_unit(self) -> Tensor | float:
        """The reward of the environment that counts as 1 in `value`."""
        return 1.0

    def reward_form(self) -> str:
        """Of which rewards values are, in words; critics of others are not taken, see `parts`."""
        scale = getattr(self.config, "reward_scale", 1.0)
        return "rewards as they are" if scale == 1.0 else f"rewards times {scale}"

    @abstractmethod
    def make_buffer(self) -> RolloutBuffer:
        """The storage for `record_step`."""

    def record_step(
        self,
        buffer: RolloutBuffer,
        obs: Tensor,
        decision: Decision,
        timestep: Timestep,
        final_value: Tensor | None = None,
    ) -> None:
        """Store one step: `decision` at `obs` led to `timestep`.

        final_value: [N] values of its final observations, if the engine has computed them.
        """
        row = {
            "obs": obs,
            "reward": self.reward_of(timestep),
            "terminated": timestep.terminated,
            "truncated": timestep.truncated,
            **decision.columns,
        }
        if final_value is None:
            row["final_obs"] = timestep.info["final_obs"]
        else:
            row["final_value"] = final_value
        if "valid" in timestep.info:
            row["valid"] = timestep.info["valid"]
        buffer.add(row)

    def reward_of(self, timestep: Timestep) -> Tensor:
        """[N] the reward to learn from."""
        return timestep.reward

    def inputs(self, obs: Tensor) -> Tensor:
        """[N, *obs] -> [N, D] float32, normalised; with images uint8, in which floats are. Rows
        with privileged observations stay [N, D + S].
        """
        rows = obs.reshape(obs.shape[0], -1)
        if not self.reads_bytes:
            rows = rows.float()
            return rows if self.normalizer is None else self.normalizer(rows)
        return self._normalized_bytes(rows)

    def _normalized_bytes(self, rows: Tensor) -> Tensor:
        """[..., D] uint8 with its floats normalised."""
        if self.normalizer is None:
            return rows
        floats = self.normalizer(self.groups.floats(rows)).view(torch.uint8)
        return torch.cat((floats, rows[..., floats.shape[-1] :]), dim=-1)

    def inputs_to_pack(self, obs: Tensor) -> Column:
        """[T, N, *obs] -> a column [T, N, D] of rows, normalised as `inputs` does now."""
        rows = obs.reshape(*obs.shape[:2], -1)
        if self.reads_bytes:
            return self._normalized_bytes(rows)
        rows = rows.float()
        return rows if self.normalizer is None else self.normalizer.scaled_as_now(rows)

    def update_normalizer(self, obs: Tensor, valid: Tensor | None) -> None:
        """Add the numbers of observations [T, N, *obs], where valid [T, N], to the statistics; not
        those that a frozen actor of another run reads. A new one has still to learn what its
        critic will read.
        """
        if self.normalizer is None:
            return
        rows = obs.reshape(*obs.shape[:2], -1)
        floats = self.groups.floats(rows) if self.reads_bytes else rows.float()
        num_fixed = 0
        if self.warms_critic and self.actor_is_transferred:
            num_fixed = self.groups.num_floats if self.reads_bytes else self.num_inputs
        self.normalizer.update(floats, valid, num_fixed)

    @abstractmethod
    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """The data for `learn`: the targets of a rollout; or {}, after it was moved into a replay
        buffer.
        """

    @abstractmethod
    def learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the optimiser steps on the data of `prepare`. Returns 0-d metrics on the device, by
        their names in the log.
        """

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """A `with` block in which the modules of the optimisers are in train mode, as Dropout and
        BatchNorm need it to learn; engines call `learn` in it. Target networks stay in eval mode.
        """
        try:
            for network in self._networks_with_modes:
                network.train()
            yield
        finally:
            for network in self._networks_with_modes:
                network.eval()

    @abstractmethod
    def max_batch_rows(self) -> int:
        """Rows of the largest batch, to choose the number of CPU threads."""

    def set_precision(self, precision: str) -> None:
        """Compute matrix products in float32, tf32 or bf16; all else stays float32."""
        if precision == "bf16" and not set_dtype(self, torch.bfloat16):
            raise UsageError(
                f"{self.label} has no layers that compute in {precision}, only in float32"
            )
        self.precision = precision

    def schedule(self, progress: float, steps: int) -> None:
        """Called before each iteration: set learning rates, epsilon and the like. progress: from 0
        to 1. steps: environment steps so far.
        """
        if self.config.schedule == "linear":
            for optimizer in self.optimizers.values():
                optimizer.learning_rate.fill_(optimizer.initial_rate * max(1.0 - progress, 0.0))

    def change_setting(self, name: str, value: float) -> None:
        """Go on with another value of a setting in `config.changeable`; checkpoints keep it. A
        learning rate that a schedule has adapted changes in proportion.
        """
        before = getattr(self.config, name)
        value = type(before)(value)
        changed: dict[str, Any] = {name: value}
        self.config = dataclasses.replace(self.config, **changed)
        self.changed_settings |= changed
        if name != "learning_rate":
            return
        for optimizer in self.optimizers.values():
            if optimizer.initial_rate == before:  # others have a setting of their own
                optimizer.initial_rate = value
                if self.config.schedule == "constant":
                    optimizer.learning_rate = value
                else:
                    optimizer.learning_rate.mul_(value / before)

    def take_over(self, model: dict[str, Any], training: dict[str, Any]) -> None:
        """Go on with the weights, optimisers and normalisers of another agent; random streams,
        replay buffer and what belongs to episodes stay. model: its `state_dict()`; training: its
        `extra_state()`.
        """
        own = self.extra_state()
        kept = {name: own[name] for name in self.of_episodes & own.keys()}
        self.load_state_dict(model)
        self.load_extra_state(training | kept)

    @property
    def warms_critic(self) -> bool:
        """Whether this iteration's `learn` changes the critics only (`critic_warmup`). The host
        decides it: fast engines learn as `Eager` does until it is over.
        """
        return self.warm_up_left > 0

    def end_learning(self) -> None:
        """At the end of each `learn`: counts the iterations in which only critics learn."""
        self.warm_up_left = max(self.warm_up_left - 1, 0)

    def parts(self) -> dict[str, Part]:
        """What another run can begin with (`init_from`), beside the normaliser, by name: by default
        the module of each optimiser.
        """
        parts = {}
        for name, optimizer in self.optimizers.items():
            module = optimizer.module
            if module is self:  # whose buffers belong to its spaces and normalisers
                named = dict(self.named_parameters())
                form = tuple(f"{key} {tuple(each.shape)}" for key, each in named.items())
                parts[name] = Part(form, tuple(each.detach() for each in named.values()))
            else:
                parts[name] = Part(describe(module), state_tensors(module))
        return parts

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        """The environments of mask [N], or all, were reset from outside: their next step does not
        continue the last recorded one.
        """

    def extra_state(self) -> dict[str, Any]:
        """What a run needs to continue besides the weights: optimiser and random state."""
        return {
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "random": {name: each.state_dict() for name, each in self.random_streams.items()},
            "num_updates": self.num_updates,
            "rate_settings": self._rate_settings(),
            "changed_settings": dict(self.changed_settings),
            "warm_up_left": self.warm_up_left,
            "actor_is_transferred": self.actor_is_transferred,
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from `extra_state()`; a learning rate or a schedule that the user has changed
        since applies.
        """
        for name, stream in self.random_streams.items():
            stream.load_state_dict(state["random"][name])
        self.warm_up_left = int(state.get("warm_up_left", 0))
        is_transferred = state.get("actor_is_transferred", self.config.init_from is not None)
        self.actor_is_transferred = bool(is_transferred)
        self.load_learning(state)

    def load_learning(self, state: dict[str, Any]) -> None:
        """Of `extra_state()` the optimisers, and settings that selection among agents has changed,
        which stay as they were whatever the run is given since.
        """
        self.num_updates.copy_(state["num_updates"])
        for name, value in state.get("changed_settings", {}).items():
            if name not in self.config.changeable:
                raise CheckpointError(
                    f"the checkpoint changes {name}, which may not change; wanted one of "
                    f"{', '.join(self.config.changeable) or 'none'}"
                )
            self.change_setting(name, value)
        rates, saved_rates = self._rate_settings(), state["rate_settings"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
            if rates[name] != saved_rates[name]:
                optimizer.learning_rate.fill_(optimizer.initial_rate)

    def _rate_settings(self) -> dict[str, dict[str, Any]]:
        schedule = self.config.schedule
        return {
            name: {"schedule": schedule, "learning_rate": optimizer.initial_rate}
            for name, optimizer in self.optimizers.items()
        }

    def replay_state(self) -> dict[str, Any]:
        """The replay buffer, if checkpoints are to hold it; else {}."""
        return {}

    def load_replay_state(self, state: dict[str, Any]) -> int:
        """Continue from `replay_state()`; returns the number of transitions stored so far."""
        return 0


def _may_have_modes(network: nn.Module) -> bool:
    """Whether train mode may change what `network` computes: it has modules from elsewhere."""
    return any(
        not type(module).__module__.startswith(MODE_INDEPENDENT) for module in network.modules()
    )


def episode_ends(timestep: Timestep) -> Tensor:
    """[N] bool: the next step belongs to another episode. An invalid step, in which a reset
    happened, ends one too.
    """
    ended = timestep.terminated | timestep.truncated
    valid = timestep.info.get("valid")
    return ended if valid is None else ended | ~valid


def restart_policy_state(policy_state: PolicyState, ended: Tensor) -> PolicyState:
    """Zero the policy state where ended [N]."""
    return tuple(memory.masked_fill(ended.unsqueeze(1), 0.0) for memory in policy_state)


def is_of_gpurl(network: nn.Module) -> bool:
    """Whether it is a network of gpurl, not somebody's own."""
    return type(network).__module__.startswith("gpurl.")
