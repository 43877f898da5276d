"""Parallelised Q-network (Gallici et al. 2024): Q-learning on rollouts, with layer normalisation in
place of a replay buffer and a target network.

Different from the publication: the optimiser is Adam (RAdam there), and the loss is the squared
error (half of it there), so max_grad_norm 10 clips the gradients of errors half as large.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpurl.algorithms.base import Decision, PolicyState
from gpurl.algorithms.exploration import EPSILONS, EpsilonGreedyConfig
from gpurl.algorithms.on_policy import OnPolicy, OnPolicyConfig
from gpurl.buffers.rollout import RolloutBuffer
from gpurl.checks import check_numbers
from gpurl.errors import UsageError
from gpurl.kernels.gae import gae
from gpurl.kernels.pack_rows import Column
from gpurl.losses import td_loss, values_of_actions
from gpurl.nn.acting import Actor, Best
from gpurl.nn.encoders import EncoderConfig
from gpurl.nn.mlp import to_torch
from gpurl.nn.optimizer import FlatAdam
from gpurl.nn.parts import Part
from gpurl.nn.q_networks import QNetworkConfig, make_q_network, num_choices


@dataclass(frozen=True)
class PQNConfig(EpsilonGreedyConfig, OnPolicyConfig):
    """Settings of PQN."""

    fixed = (*OnPolicyConfig.fixed, "network")

    minibatches: int = 16
    learning_rate: float = 5e-4
    schedule: str = "linear"
    q_lambda: float = 0.95
    """Lambda of Q(lambda): 0 gives one-step targets, 1 sums all rewards to the end of the
    rollout.
    """
    reward_scale: float = 1.0
    """Factor by which rewards are multiplied before learning."""
    max_grad_norm: float | None = 10.0
    network: QNetworkConfig = field(
        default_factory=lambda: QNetworkConfig(hidden=(128, 128), layer_norm=True)
    )
    """Shape of the network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {}, ("reward_scale",), zero_to_one=("q_lambda", *EPSILONS))
        if self.network.noisy or self.network.heads > 1:
            raise UsageError(
                "pqn explores by epsilon-greedy and has one network: leave out network.noisy and "
                "network.heads"
            )


class PQN(OnPolicy):
    """Targets R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) max Q(s_{t+1})): equation 4 of the
    paper. GAE's recursion computes them, with max Q as the value.
    """

    config: PQNConfig

    def encoder_config(self) -> EncoderConfig | None:
        return self.config.network

    def make_networks(self) -> None:
        self.num_actions = num_choices(self.action_space, self.label)
        sizes = 1, self.num_inputs, self.num_actions, 1
        self.network = make_q_network(*sizes, self.config.network, self.observation_space)

    def parts(self) -> dict[str, Part]:
        network = super().parts()["network"]
        return {"network": Part((self.reward_form(), *network.form), network.tensors)}

    def make_optimizers(self) -> dict[str, FlatAdam]:
        config = self.config
        adam = FlatAdam(
            self.network,
            config.learning_rate,
            1e-8,
            config.weight_decay,
            config.max_grad_norm,
            losses=("loss",),
        )
        return {"network": adam}

    def make_training(self) -> None:
        super().make_training()
        # 0-d on the device, as CUDA graphs need it; `schedule` sets it
        self.epsilon = torch.tensor(self.config.epsilon_end, device=self.device)

    @torch.no_grad()
    def act(self, obs: Tensor, policy_state: PolicyState = (), explore: bool = True) -> Decision:
        values = self._values(obs)
        best = values.argmax(-1)
        if not explore:
            return Decision(best, policy_state, {})
        # epsilon-greedy
        random_action = self.action_random.integers(0, self.num_actions)
        draw = self.action_random.uniform()
        self.action_random.advance()
        action = torch.where(draw < self.epsilon, random_action, best)
        return Decision(action, policy_state, {"action": action, "value": values.amax(-1)})

    def actor_modules(self) -> Actor:
        return Actor(to_torch(self.network), Best())

    @torch.no_grad()
    def value(self, obs: Tensor, policy_state: PolicyState = ()) -> Tensor:
        return self._values(obs).amax(-1)

    def reward_unit(self) -> Tensor | float:
        return 1.0 / self.config.reward_scale

    def _values(self, obs: Tensor) -> Tensor:
        """[B, A] the values of all actions at obs [B, *obs]."""
        return self._outputs(self.inputs(obs)).squeeze(0)

    def _outputs(self, rows: Tensor) -> Tensor:
        """[1, B, A] the same of normalised rows [B, D]."""
        shape = 1, len(rows), self.num_actions
        return self.check_output("network", self.network, self.network(rows), shape)

    # ---- learning ----

    def prepare(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """{"packed": [T N, W] a row for each sample}."""
        config = self.config
        valid = buffer.columns.get("valid")
        # targets
        final_value = self.final_values(buffer)
        _, returns, _ = gae(
            buffer["reward"] * config.reward_scale,
            torch.cat((buffer["value"], final_value[-1:])),
            final_value,
            buffer["terminated"],
            buffer["truncated"],
            config.gamma,
            config.q_lambda,
            valid,
        )
        # the columns of the minibatches
        data: dict[str, Column] = {
            "obs": self.inputs_to_pack(buffer["obs"]),
            "action": buffer["action"],
            "returns": returns,
        }
        if valid is not None:
            data["valid"] = valid
        # acting and learning on this rollout use the same statistics
        self.update_normalizer(buffer["obs"], valid)
        return {"packed": self.minibatches.pack(data)}

    def learn(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        for _ in range(self.config.epochs):
            steps = []
            for minibatch in self.minibatches.of_steps(data["packed"]):
                loss, metrics = self.optimizer.evaluate(self.loss, minibatch)
                norm = self.optimizer.step(loss, of=self.loss)
                steps.append(metrics | {"grad_norm": norm})
        self.num_updates += 1
        # the means over the minibatches of the last epoch
        metrics = {
            f"train/{name}": torch.stack([step[name] for step in steps]).mean() for name in steps[0]
        }
        return metrics | {
            "train/learning_rate": self.optimizer.learning_rate.clone(),
            "train/n_updates": self.num_updates.clone(),
        }

    def loss(self, minibatch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(0-d loss, metrics) of rows [B, ...]: obs, action, returns, and weight if some rows are
        not valid.
        """
        returns = minibatch["returns"]
        values = values_of_actions(self._outputs(minibatch["obs"]), minibatch["action"])
        # every valid row weighs the same
        weight = torch.ones_like(returns)
        if "weight" in minibatch:
            weight = (minibatch["weight"] > 0).float()
        loss, _ = td_loss(values, returns, weight, None)
        return loss, {"loss": loss.detach(), "q_values": values.detach().mean()}

    def schedule(self, progress: float, steps: int) -> None:
        super().schedule(progress, steps)
        self.epsilon.fill_(self.config.epsilon_at(progress))
