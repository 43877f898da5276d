"""Mirrors for tests of symmetry, of Pendulum and of tasks that none fits."""

import torch
from torch import Tensor

from gpurl.envs.pendulum import Pendulum

Pair = tuple[Tensor, Tensor | None]
SIGNS = torch.tensor([1.0, -1.0, -1.0])


def mirror(obs: Tensor, action: Tensor | None) -> Pair:
    return obs * SIGNS, None if action is None else -action


def three(
    obs: Tensor, action: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """With privileged observations, of which two are swapped."""
    return (*mirror(obs, action), state.flip(1))


def no_involution(obs: Tensor, action: Tensor | None) -> Pair:
    return torch.stack((obs[:, 0], -obs[:, 1], -0.5 * obs[:, 2]), 1), action


def rotates_actions(obs: Tensor, action: Tensor | None) -> Pair:
    return obs * SIGNS, None if action is None else action + 0.25


def transposed(obs: Tensor, action: Tensor | None) -> Pair:
    return obs.T, action


def one_value(obs: Tensor, action: Tensor | None) -> Tensor:
    return obs


def in_place(obs: Tensor, action: Tensor | None) -> Pair:
    return obs.neg_(), action


def fails(obs: Tensor, action: Tensor | None) -> Pair:
    return obs[:, 7], action


def by_other_rows(obs: Tensor, action: Tensor | None) -> Pair:
    return obs.flip(0), action


def by_obs(obs: Tensor, action: Tensor | None) -> Pair:
    sign = torch.where(obs[:, :1] > 0.5, -1.0, 1.0)
    return obs, None if action is None else sign * action


def out_of_box(obs: Tensor, action: Tensor | None) -> Pair:
    return obs, None if action is None else 1.0 - action


class Hidden(Pendulum):
    """The critic sees two more numbers."""

    single_state_space = Pendulum.single_action_space.__class__(-1.0, 1.0, (2,))

    def observe_state(self, state: dict[str, Tensor]) -> Tensor:
        return state["obs"][:, :2].clone()


class NoMirror(Pendulum):
    """Says nothing of its symmetry."""

    mirror = None  # type: ignore[assignment]
