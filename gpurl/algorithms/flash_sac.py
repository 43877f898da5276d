"""FlashSAC (Kim et al. 2026): SAC with weights of fixed length, batch norms, categorical critics
of scaled rewards, and exploration noise that lasts for several steps.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gpurl.algorithms.base import Metrics
from gpurl.algorithms.off_policy import Batch
from gpurl.algorithms.sac import SAC, SACConfig
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import Choices, check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.losses import row_share
from gpurl.nn.batch_norm import batch_statistics
from gpurl.nn.mlp import Layer, Sequential
from gpurl.nn.parts import Part, state_tensors
from gpurl.nn.reward_scaler import RewardScaler
from gpurl.nn.unit_network import UnitBodyConfig, make_unit_network, project_


@dataclass(frozen=True)
class FlashSACConfig(SACConfig):
    """Settings of FlashSAC (arXiv 2604.04539), of the authors' code for MuJoCo with one environment
    (github.com/Holiday-Robot/FlashSAC: configs/agent/flashSAC.yaml, scripts/run_mujoco.sh).

    Different from that code: the learning rates of actor and temperature fall as fast as that of
    the critics (half as fast there, since their schedule counts the actor's updates); each
    environment has its own spans of noise, which end with the episode (one for all environments
    there); the return of an episode starts with its first reward (with the last one of the
    episode before there).
    """

    choices: ClassVar[Choices] = {"schedule": ("constant", "linear", "cosine")}
    fixed: ClassVar[tuple[str, ...]] = (*SACConfig.fixed, "normalize_rewards")
    changeable: ClassVar[tuple[str, ...]] = ("learning_rate",)  # rewards are scaled by gamma

    # two steps and two updates in place of one each: the actor is updated every second time
    horizon: int = 2
    updates: int = 2
    policy_delay: int = 2
    batch_size: int = 512
    learning_starts: int = 10_000
    tau: float = 0.01
    atoms: int = 101
    v_min: float = -5.0
    v_max: float = 5.0
    initial_temperature: float = 0.01
    schedule: str = "cosine"
    """Learning rate over time: constant, linear (to 0) or cosine (to final_rate times itself)."""
    final_rate: float = 0.5
    """Learning rate at the end of the cosine schedule, as a fraction of that at its start."""
    target_std: float = 0.15
    """The entropy that the temperature aims at, by default: that of normal actions with this
    standard deviation.
    """
    noise_span: int = 16
    normalize_rewards: bool = True
    """Divide rewards by the running standard deviation of discounted returns, and by more where
    it takes more to bring all returns so far within v_max.
    """
    # a form of its own, without encoders
    actor_network: UnitBodyConfig = field(default_factory=UnitBodyConfig)  # type: ignore[assignment]
    critic_network: UnitBodyConfig = field(  # type: ignore[assignment]
        default_factory=lambda: UnitBodyConfig(hidden=(256, 256))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {}, ("final_rate", "target_std"), zero_to_one=("final_rate",))
        if self.normalize_rewards and self.v_max <= 0:
            raise UsageError(
                f"normalize_rewards brings returns within v_max: wanted one above 0, got "
                f"{self.v_max}"
            )
        if self.normalize_rewards and self.fit_returns:
            raise UsageError(
                "fit_returns takes rewards as they are: leave it out or set normalize_rewards "
                "to False"
            )


class FlashSAC(SAC):
    """SAC whose losses normalise with the statistics of observations and next observations
    together, as its policy will meet both (flash_rl/agents/flashSAC/update.py there).
    """

    config: FlashSACConfig
    flattens_images = False
    of_episodes = SAC.of_episodes | {"returned"}
    # layer.py there, NormalTanhPolicy: `LogStdLimits` keeps the outputs within
    log_std_limits = (-10.0, 2.0)

    def encoder_config(self) -> None:
        return None

    def make_networks(self) -> None:
        super().make_networks()
        config = self.config
        self.reward_scaler = (
            RewardScaler(self.num_envs, config.gamma, config.v_max)
            if config.normalize_rewards
            else None
        )

    def make_actor(self) -> Sequential:
        head = LogStdLimits(self.log_std_limits)
        sizes = self.num_inputs, self.actor_outputs()
        return make_unit_network(1, *sizes, self.config.actor_network, head)

    def make_critics(self, count: int) -> Sequential:
        config = self.config
        sizes = self.num_critic_obs + self.num_actions, max(config.atoms, 1)
        return make_unit_network(count, *sizes, config.critic_network)

    def parts(self) -> dict[str, Part]:
        parts = super().parts()
        critic = parts["critic"]
        tensors = (*critic.tensors, *state_tensors(self.reward_scaler))
        parts["critic"] = Part(critic.form, tensors)
        return parts

    def reward_form(self) -> str:
        form = super().reward_form()
        return form if self.reward_scaler is None else f"{form}, scaled by their returns"

    def default_target_entropy(self) -> float:
        """Of independent normal actions with target_std (agent.py there)."""
        return 0.5 * self.num_actions * math.log(2.0 * math.pi * math.e * self.config.target_std**2)

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        if self.config.schedule == "cosine":
            share = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
            final = self.config.final_rate
            for optimizer in self.optimizers.values():
                optimizer.learning_rate.fill_(
                    optimizer.initial_rate * (final + (1.0 - final) * share)
                )

    # ---- rewards ----

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        if self.reward_scaler is not None:
            ended = buffer["terminated"] | buffer["truncated"]
            self.reward_scaler.record(buffer["reward"], ended, buffer.columns.get("valid"))
        return super().prepare(buffer)

    def sample_batch(self) -> Batch:
        batch = super().sample_batch()
        if self.reward_scaler is not None:
            batch["reward"] = self.reward_scaler(batch["reward"])
        return batch

    def reward_unit(self) -> Tensor | float:
        unit = super().reward_unit()
        if self.reward_scaler is None:
            return unit
        return unit / self.reward_scaler(torch.ones((), device=self.device))

    def mark_episode_break(self, mask: Tensor | None = None) -> None:
        super().mark_episode_break(mask)
        if self.reward_scaler is not None:
            self.reward_scaler.begin_episodes(mask)

    # ---- learning ----

    def update_step(self, batch: Batch, number: int) -> Metrics:
        """The actor goes first, so the critics' target is of its new actions."""
        # with the last update of an iteration, whose metrics are logged
        is_actors_turn = (number + 1) % self.config.policy_delay == 0
        updates_actor = is_actors_turn and not self.warms_critic
        metrics = self.actor_step(batch) if updates_actor else {}
        return metrics | self.critic_step(batch, move_target=True)

    def critic_step(self, batch: Batch, move_target: bool) -> Metrics:
        optimizer = self.optimizers["critic"]
        loss, metrics = optimizer.evaluate(self.critic_loss, batch)
        norm = optimizer.step(loss, move_target=False, of=self.critic_loss)
        # the target averages weights of the right length
        project_(self.critic, norm.isfinite())
        if move_target:
            optimizer.move_target(norm)
        return metrics | {"critic_grad_norm": norm}

    def actor_optimizer_step(self, loss: Tensor) -> Tensor:
        norm = super().actor_optimizer_step(loss)
        project_(self.actor, norm.isfinite())
        return norm

    def critic_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        rows = len(batch["obs"])
        # both pairs in one forward pass: their statistics are of both
        with torch.no_grad():
            next_action, entropy_cost = self.next_action(batch["next_obs"])
            now = self.critic_inputs(self.critic, batch["obs"], batch["action"])
            later = self.critic_inputs(self.critic, batch["next_obs"], next_action)
            inputs = torch.cat((now, later))
            # nobody reads running statistics of the target
            with batch_statistics(self.target_critic, *self._drawn_critics, tracks=False):
                next_output = self.target_outputs(inputs)[:, rows:]
            target = self.bellman_target(batch, next_output, entropy_cost)
        with batch_statistics(self.critic):
            output = self.critic(inputs)[:, :rows]
        return self.loss_of(output, target, batch)

    def actor_loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        with batch_statistics(self.actor):
            obs, next_obs = batch["obs"], batch["next_obs"]
            both = torch.cat((self.actor_obs(obs), self.actor_obs(next_obs)))
            output = self.actor(both).squeeze(0)
        return self.soft_actor_loss(obs, output[: len(obs)], row_share(batch["weight"]))

    def temperature_loss(self, entropy: Tensor) -> Tensor:
        """0-d, linear in the temperature itself (update.py there), not in its logarithm."""
        return self.temperature.value() * (entropy - self.target_entropy)

    # ---- states ----

    def extra_state(self) -> dict[str, Any]:
        state = super().extra_state()
        if self.reward_scaler is not None:
            state["returned"] = self.reward_scaler.returned
        return state

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        # episodes of another number of environments start anew
        if self.reward_scaler is not None and "returned" in state:
            self.reward_scaler.returned.copy_(state["returned"])


class LogStdLimits(Layer):
    """[..., 2A] -> the means as they are, the log standard deviations between two limits by tanh:
    min + (max - min) (1 + tanh x) / 2.
    """

    def __init__(self, limits: tuple[float, float]) -> None:
        super().__init__()
        self.middle = 0.5 * (limits[0] + limits[1])
        self.reach = 0.5 * (limits[1] - limits[0])

    def forward(self, x: Tensor, noise: CounterRandom | None = None) -> Tensor:
        mean, raw = x.chunk(2, dim=-1)
        return torch.cat((mean, raw.tanh() * self.reach + self.middle), -1)

    def to_torch(self, member: int = 0) -> nn.Module:
        return nn.Identity()  # the mean alone acts
