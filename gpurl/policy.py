"""A trained policy by itself: loaded from a run, it acts on observations and needs neither the
environment nor the trainer.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpurl.algorithms.base import Algorithm
from gpurl.errors import UsageError
from gpurl.run.load import load_algorithm


class Policy:
    """`act(obs)` for one observation or a batch; a policy with memory keeps it between calls until
    `reset()`.
    """

    def __init__(self, algorithm: Algorithm, settings: dict[str, Any]) -> None:
        self.algorithm, self.settings = algorithm, settings
        self.device = algorithm.device
        self._policy_state: Any = None

    def act(self, obs: np.ndarray | Tensor, deterministic: bool = True) -> Any:
        """obs: [*obs] or [N, *obs], numpy or torch -> action [*action] or [N, *action] of the same
        kind, as the environment takes it.
        """
        batch, is_single = self._batch(obs)
        if self._policy_state is None or (
            self._policy_state and self._policy_state[0].shape[0] != batch.shape[0]
        ):
            self._policy_state = self.algorithm.initial_policy_state(batch.shape[0])
        if not deterministic and batch.shape[0] != self.algorithm.num_envs:
            raise UsageError(
                f"a sampling policy draws for {self.algorithm.num_envs} environments, got "
                f"{batch.shape[0]} observations; "
                f"load(..., num_envs={batch.shape[0]}) makes one that fits"
            )
        if self.algorithm.num_state and not deterministic:  # the actor reads nothing of it
            batch = torch.nn.functional.pad(batch.flatten(1), (0, self.algorithm.num_state))
        decision = self.algorithm.act(batch, self._policy_state, explore=not deterministic)
        self._policy_state = decision.policy_state
        return self._like(decision.action[0] if is_single else decision.action, obs)

    def value(self, obs: np.ndarray | Tensor, state: np.ndarray | Tensor | None = None) -> Any:
        """Expected return from obs: a number for [*obs], [N] for [N, *obs]; state [*state] or [N,
        *state] is what only the critic sees.

        A policy with memory takes obs as what follows the observations it acted on: ask before
        `act(obs)`, not after it.
        """
        batch, is_single = self._batch(obs)
        if num_state := self.algorithm.num_state:
            given = (
                None
                if state is None
                else torch.as_tensor(state, device=self.device).float().reshape(-1, num_state)
            )
            if given is None or len(given) != len(batch):
                got = "none" if state is None else f"one of shape {tuple(state.shape)}"
                raise UsageError(
                    f"this policy's critic reads a state of its own: value(obs, state "
                    f"[{len(batch)}, {num_state}]), got {got}"
                )
            batch = torch.cat((batch.flatten(1), given), dim=1)
        elif state is not None:
            raise UsageError(
                "the critic of this policy reads observations: value(obs), without a state"
            )
        policy_state = self._policy_state or self.algorithm.initial_policy_state(batch.shape[0])
        if policy_state and policy_state[0].shape[0] != batch.shape[0]:
            raise UsageError(
                f"the policy remembers {policy_state[0].shape[0]} episodes, got {batch.shape[0]} "
                f"observations; reset() empties its memory"
            )
        value = self.algorithm.value(batch, policy_state)
        return float(value[0]) if is_single else self._like(value, obs)

    def reset(self) -> None:
        """Empty the memory: the next observation begins an episode."""
        self._policy_state = None

    def _batch(self, obs: np.ndarray | Tensor) -> tuple[Tensor, bool]:
        shape = tuple(self.algorithm.observation_space.shape or ())
        tensor = torch.as_tensor(obs, device=self.device)
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        if tuple(tensor.shape) == shape:
            return tensor.unsqueeze(0), True
        if tuple(tensor.shape[1:]) == shape and tensor.dim() == len(shape) + 1:
            return tensor, False
        raise UsageError(
            f"the policy takes observations of shape {shape} or (N, {', '.join(map(str, shape))}), "
            f"got {tuple(tensor.shape)}"
        )

    @staticmethod
    def _like(tensor: Tensor, obs: np.ndarray | Tensor) -> Any:
        return tensor if isinstance(obs, Tensor) else tensor.cpu().numpy()


def load(path: str | Path, device: str = "cpu", num_envs: int = 1, best: bool = True) -> Policy:
    """The policy of a run folder (its best evaluated checkpoint, or with best=False its latest) or
    of one checkpoint folder.
    """
    return Policy(*load_algorithm(path, device, num_envs, best))
