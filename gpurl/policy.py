"""A trained policy by itself: loaded from a run, it acts on observations and needs neither the
environment nor the trainer.
"""

from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gpurl.algorithms.base import Algorithm, PolicyState
from gpurl.checkpoints.state_files import State
from gpurl.errors import UsageError
from gpurl.kernels.backend import on_device, on_own_device
from gpurl.run.load import load_algorithm

Array = TypeVar("Array", np.ndarray, Tensor)


class Policy:
    """`act(obs)` for one observation or a batch; a recurrent policy keeps its hidden state between
    calls until `reset()`.
    """

    def __init__(self, algorithm: Algorithm, settings: State) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.device = algorithm.device
        self._policy_state: PolicyState | None = None

    @on_own_device
    def act(self, obs: Array, deterministic: bool = True) -> Array:
        """obs: [*obs] or [N, *obs], numpy or torch -> action [*action] or [N, *action] of the same
        type, as the environment takes it.
        """
        batch, is_single = self._batch(obs)
        algorithm = self.algorithm
        policy_state = self._policy_state
        # a batch of another size begins new episodes
        if policy_state is None or (policy_state and len(policy_state[0]) != len(batch)):
            policy_state = algorithm.initial_policy_state(len(batch))
        if not deterministic:
            if len(batch) != algorithm.num_envs:
                raise UsageError(
                    f"this policy samples actions for {algorithm.num_envs} environments, got "
                    f"{len(batch)} observations; load(..., num_envs={len(batch)}) makes one that "
                    f"fits"
                )
            if algorithm.num_state:  # the actor does not read privileged observations
                batch = functional.pad(batch.flatten(1), (0, algorithm.num_state))
        decision = algorithm.act(batch, policy_state, explore=not deterministic)
        self._policy_state = decision.policy_state
        return _like(decision.action[0] if is_single else decision.action, obs)

    @on_own_device
    def value(self, obs: Array, state: np.ndarray | Tensor | None = None) -> float | Array:
        """Expected return from obs: a number for [*obs], [N] for [N, *obs]. state: [*state] or [N,
        *state], the privileged observations of an asymmetric critic.

        A recurrent policy takes obs as the successor of the observations it acted on: call it
        before `act(obs)`, not after it.
        """
        batch, is_single = self._batch(obs)
        # append what only the critic sees
        if num_state := self.algorithm.num_state:
            rows = None
            if state is not None:
                rows = torch.as_tensor(state, device=self.device).float().reshape(-1, num_state)
            if rows is None or len(rows) != len(batch):
                got = "none" if state is None else f"one of shape {tuple(state.shape)}"
                raise UsageError(
                    f"this policy's critic reads privileged observations: value(obs, state "
                    f"[{len(batch)}, {num_state}]), got {got}"
                )
            batch = torch.cat((batch.flatten(1), rows), dim=1)
        elif state is not None:
            raise UsageError("this policy's critic reads observations only: value(obs)")
        # the hidden state must be of these episodes
        policy_state = self._policy_state or self.algorithm.initial_policy_state(len(batch))
        if policy_state and len(policy_state[0]) != len(batch):
            raise UsageError(
                f"the hidden state is of {len(policy_state[0])} episodes, got {len(batch)} "
                f"observations; reset() empties it"
            )
        value = self.algorithm.value(batch, policy_state)
        return float(value[0]) if is_single else _like(value, obs)

    def reset(self) -> None:
        """Empty the hidden state: the next observation begins an episode."""
        self._policy_state = None

    def _batch(self, obs: np.ndarray | Tensor) -> tuple[Tensor, bool]:
        """(observations [N, *obs] on the device, whether `obs` is a single one)."""
        shape = tuple(self.algorithm.observation_space.shape or ())
        tensor = torch.as_tensor(obs, device=self.device)
        if tensor.is_floating_point():
            tensor = tensor.float()
        if tuple(tensor.shape) == shape:
            return tensor.unsqueeze(0), True
        if tuple(tensor.shape[1:]) == shape and tensor.dim() == len(shape) + 1:
            return tensor, False
        raise UsageError(
            f"the policy takes observations of shape {shape} or (N, {', '.join(map(str, shape))}), "
            f"got {tuple(tensor.shape)}"
        )


def _like(tensor: Tensor, obs: Array) -> Array:
    """`tensor` as the type of `obs`."""
    return tensor if isinstance(obs, Tensor) else tensor.cpu().numpy()


def load(path: str | Path, device: str = "cpu", num_envs: int = 1, best: bool = True) -> Policy:
    """The policy of a checkpoint folder, or of the best checkpoint of a run folder (best=False: the
    latest).
    """
    with on_device(torch.device(device)):
        return Policy(*load_algorithm(path, device, num_envs, best))
