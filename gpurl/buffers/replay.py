"""The replay buffer: the newest transitions of N environments on the device, drawn uniformly; the
ring itself is `gpurl.kernels.replay`.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpurl.buffers.minibatches import PackedRows
from gpurl.errors import UsageError
from gpurl.kernels.env_step import RandomStreams
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.replay import (
    Batch,
    Block,
    Ring,
    new_ring,
    replay_add,
    replay_mark_episode_break,
    replay_sample,
    ring_bytes,
)
from gpurl.memory import available_bytes, in_gib

SHARE_TO_TAKE = 0.9  # of the free memory


class Replay:
    """A ring of `size` transitions, rounded up to whole steps of all environments.

    columns: what a step of one environment stores beside its observation, name -> shape, () or
    (n,), "reward" first. storage: float32 or bfloat16, of float observations; uint8 ones stay as
    they are. final_obs_fraction: final observations to keep, as a share of all transitions; with
    fewer the oldest truncated ends are not learnt from.
    """

    also_bytes: ClassVar[int] = 0  # of a transition, of what a subclass keeps beside the ring

    def __init__(
        self,
        size: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        columns: dict[str, tuple[int, ...]],
        device: torch.device,
        seed: int = 0,
        obs_dtype: torch.dtype = torch.float32,
        storage: str = "float32",
        final_obs_fraction: float = 1.0 / 16.0,
    ) -> None:
        self.num_envs, self.obs_shape, self.device = num_envs, obs_shape, device
        self.num_rows = -(-size // num_envs)
        self.rows = PackedRows({name: torch.empty(1, 1, *shape) for name, shape in columns.items()})
        assert self.rows.places["reward"] == 0, "the ring takes the first column for the reward"
        kind = obs_dtype if obs_dtype == torch.uint8 else getattr(torch, storage)
        obs_size, num_final = (
            math.prod(obs_shape),
            max(math.ceil(final_obs_fraction * self.num_rows * num_envs), 1),
        )
        shape = num_envs, obs_size, self.rows.width, num_final, kind
        self.bytes = ring_bytes(self.num_rows, *shape) + self.also_bytes * self.num_rows * num_envs
        self._must_fit(storage if kind != torch.uint8 else "uint8")
        self.ring: Ring = new_ring(self.num_rows, *shape, device)
        self.random = CounterRandom(seed, 1, device)
        self._reused: dict[int, Batch] = {}

    def _must_fit(self, storage: str) -> None:
        """UsageError instead of running out of memory."""
        free = available_bytes(self.device)
        if free is None or self.bytes <= free:
            return
        held = self.num_rows * self.num_envs
        fits = int(held * SHARE_TO_TAKE * free / self.bytes)
        half = (
            ", storage bfloat16 takes half as much for observations" if storage == "float32" else ""
        )
        raise UsageError(
            f"a replay of {held:,} transitions takes {in_gib(self.bytes)} on {self.device}, where "
            f"{in_gib(free)} are free: "
            f"replay_size {fits:,} would fit{half}"
        )

    def add(self, columns: dict[str, Tensor]) -> None:
        """Write steps over the oldest: name -> [h, N, ...] of the columns, obs, final_obs,
        terminated, truncated and perhaps valid.
        """
        obs, final_obs, terminated, truncated = (
            columns[name] for name in ("obs", "final_obs", "terminated", "truncated")
        )
        numbers = [columns[name] for name in self.rows.places]
        replay_add(
            self.ring, Block(obs, final_obs, terminated, truncated, columns.get("valid"), numbers)
        )

    def sample(
        self, batch_size: int, gamma: float, num_steps: int = 1, reuse: bool = False
    ) -> dict[str, Tensor]:
        """name -> [B, ...]: the columns of the first step; obs and next_obs [B, D]; reward and
        discount of up to `num_steps` steps; index; weight, 0 where there is nothing to learn from.
        Some row must have been added.

        reuse: in the memory of the last batch of this size that was drawn so, which is then gone.
        """
        return self._sample(batch_size, gamma, num_steps, reuse, None)

    def _sample(
        self, batch_size: int, gamma: float, num_steps: int, reuse: bool, index: Tensor | None
    ) -> dict[str, Tensor]:
        self.random.advance()
        out = self._reused.get(batch_size) if reuse else None
        batch = replay_sample(
            self.ring, batch_size, gamma, num_steps, self._streams(), index=index, out=out
        )
        if reuse:
            self._reused[batch_size] = batch
        found = batch._asdict()
        numbers = found.pop("numbers")
        return {
            name: numbers[:, place] for name, place in self.rows.places.items() if name != "reward"
        } | found

    def _streams(self) -> RandomStreams:
        return RandomStreams(self.random.key, self.random.gamma, self.random.step)

    def mark_episode_break(self, mask: Tensor) -> None:
        """What follows the newest step belongs to other episodes where mask [N]: it was reset from
        outside. A step that ended stays so.
        """
        replay_mark_episode_break(self.ring, mask)

    # ---- states ----

    def state_dict(self) -> dict[str, Any]:
        """All that was stored, without the rows that never were."""
        stored = min(int(self.ring.counts[0]), self.num_rows)
        tensors = self.ring._asdict()
        rows = {name: tensors[name][:stored] for name in ("obs", "numbers", "flags", "slot")}
        return {**tensors, **rows, "random": self.random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of a buffer of this size, or of a smaller one that was not
        overwritten yet.
        """
        for name, tensor in self.ring._asdict().items():
            saved = state[name]
            if (
                saved.shape[1:] != tensor.shape[1:]
                or saved.dtype != tensor.dtype
                or saved.shape[0] > tensor.shape[0]
            ):
                raise UsageError(
                    f"the saved replay is of another environment or size: its {name} is "
                    f"{saved.dtype} {tuple(saved.shape)}, "
                    f"this one's {tensor.dtype} {tuple(tensor.shape)}; replay_size, storage and "
                    f"final_obs_fraction must be those it was saved with"
                )
        rows = state["flags"].shape[0]
        if int(state["counts"][0]) > rows != self.num_rows:  # its newest row is not its last
            raise UsageError(
                f"the saved replay has {rows} rows and is full, this one has {self.num_rows}: keep "
                f"replay_size"
            )
        for name, tensor in self.ring._asdict().items():
            tensor[: state[name].shape[0]].copy_(state[name])
        self.ring.final_obs[-self.num_envs :].copy_(
            state["final_obs"][-self.num_envs :]
        )  # of the newest row, behind any table
        self.random.load_state_dict(state["random"])

    def _next_rows(self, steps: int) -> Tensor:
        """[min(steps, T)] int64: the rows that the next steps go into."""
        return (
            self.ring.counts[0] + torch.arange(min(steps, self.num_rows), device=self.device)
        ) % self.num_rows
