"""The replay buffer: the newest transitions of N environments on the device, sampled uniformly; the
ring itself is `gpurl.kernels.replay`.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gpurl.buffers.frames import add_block, newest_frame, stack_batch
from gpurl.buffers.minibatches import PackedRows
from gpurl.errors import UsageError
from gpurl.kernels.random import CounterRandom
from gpurl.kernels.replay import (
    DONE,
    Batch,
    Block,
    new_ring,
    replay_add,
    replay_mark_episode_break,
    replay_sample,
    ring_bytes,
)

# of a step: [T, N, ...]; priorities in a prioritised buffer only
COLUMNS = ("obs", "numbers", "flags", "slot")
MAY_HAVE = ("priority",)
State = dict[str, Any]  # tensors, and nested states, for a checkpoint


class Replay:
    """A ring of `size` transitions, rounded up to whole steps of all environments.

    columns: what a step of one environment stores besides observations, name -> shape, () or (n,),
    "reward" first. storage: "float32" or "bfloat16", the dtype of float observations; uint8 ones
    are stored as uint8. final_obs_fraction: number of stored final observations, as a fraction of
    all transitions; if episodes end more often, the oldest truncated ends are not learned from.
    frames: obs_shape is that of so many stacked frames, of which each is stored once.
    """

    extra_bytes: ClassVar[int] = 0  # per transition, that a subclass needs besides the ring

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
        frames: int = 1,
    ) -> None:
        self.num_envs = num_envs
        self.device = device
        self.frames = frames
        self.num_rows = -(-size // num_envs)
        self.rows = PackedRows({name: torch.empty(1, 1, *shape) for name, shape in columns.items()})
        assert self.rows.places["reward"] == 0, "the ring takes the first column for the reward"
        kind = obs_dtype if obs_dtype == torch.uint8 else getattr(torch, storage)
        self.final_obs_fraction = final_obs_fraction
        num_final = self.num_final(num_envs)
        shape = num_envs, math.prod(obs_shape) // frames, self.rows.width, num_final, kind
        self.bytes = ring_bytes(self.num_rows, *shape) + self.extra_bytes * self.num_rows * num_envs
        self.ring = new_ring(self.num_rows, *shape, device)
        self.random = CounterRandom(seed, 1, device)
        self._reused: dict[int, Batch] = {}

    def num_final(self, num_envs: int) -> int:
        """Final observations that a buffer of so many environments stores."""
        return max(math.ceil(self.final_obs_fraction * self.num_rows * num_envs), 1)

    def add(self, columns: dict[str, Tensor]) -> None:
        """Add h steps over the oldest ones. columns: name -> [h, N, ...] for the columns of the
        replay, obs, final_obs, terminated, truncated and optionally valid.
        """
        obs, final_obs = columns["obs"], columns["final_obs"]
        if self.frames > 1:
            obs, final_obs = newest_frame(obs), newest_frame(final_obs)
        block = Block(
            obs,
            final_obs,
            columns["terminated"],
            columns["truncated"],
            columns.get("valid"),
            [columns[name] for name in self.rows.places],
        )
        if self.frames > 1:
            add_block(self.ring, block)
        else:
            replay_add(self.ring, block)

    def sample(
        self, batch_size: int, gamma: float, num_steps: int = 1, reuse: bool = False
    ) -> dict[str, Tensor]:
        """A batch of transitions, name -> [B, ...]: the columns of the first step; obs and next_obs
        [B, D]; reward and discount of up to `num_steps` steps; index; weight, 0 where there is
        nothing to learn from. At least one step must have been added.

        reuse: overwrite the last batch of this size that was sampled with `reuse`.
        """
        return self._sample(batch_size, gamma, num_steps, reuse, None)

    def _sample(
        self, batch_size: int, gamma: float, num_steps: int, reuse: bool, index: Tensor | None
    ) -> dict[str, Tensor]:
        self.random.advance()
        out = self._reused.get(batch_size) if reuse else None
        batch = replay_sample(
            self.ring, batch_size, gamma, num_steps, self.random.streams, index=index, out=out
        )
        if reuse:
            self._reused[batch_size] = batch
        if self.frames > 1:
            batch = stack_batch(self.ring, batch, self.frames, gamma, num_steps)
        # columns by their names; the reward is a field of the batch already
        fields = batch._asdict()
        columns = self.rows.unpack(fields.pop("numbers"))
        return columns | fields

    def clear(self) -> None:
        """Begin anew, in place: nothing that is stored so far is sampled any more."""
        for tensor in (self.ring.flags, self.ring.slot, self.ring.counts):
            tensor.zero_()
        self.ring.owner.fill_(-1)

    def mark_episode_break(self, mask: Tensor) -> None:
        """Truncate the newest step of the environments in mask [N] bool, which were reset from
        outside. Steps that already ended an episode do not change.
        """
        replay_mark_episode_break(self.ring, mask)

    # ---- states ----

    def state_dict(self) -> State:
        """The ring without rows that were never written, and the random stream."""
        stored = min(int(self.ring.counts[0]), self.num_rows)
        tensors = self.ring._asdict()
        rows = {name: tensors[name][:stored] for name in COLUMNS}
        return {**tensors, **rows, "random": self.random.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()` of a buffer of this size, or of a smaller one that was not
        full. UsageError for any other state.
        """
        # the saved tensors must fit
        for name, tensor in self.ring._asdict().items():
            saved = state[name]
            if (
                saved.shape[1:] != tensor.shape[1:]
                or saved.dtype != tensor.dtype
                or saved.shape[0] > tensor.shape[0]
            ):
                raise UsageError(
                    f"the saved replay is of another environment or size: its {name} is "
                    f"{saved.dtype} {tuple(saved.shape)}, this one's {tensor.dtype} "
                    f"{tuple(tensor.shape)}; replay_size, storage and final_obs_fraction must be "
                    f"those it was saved with"
                )
        rows = state["flags"].shape[0]
        # of a ring that was overwritten, the newest row is not the last one
        if int(state["counts"][0]) > rows != self.num_rows:
            raise UsageError(
                f"the saved replay has {rows} rows and is full, this one has {self.num_rows}: keep "
                f"replay_size"
            )
        # final observations of the newest step are the last rows of the table, whatever its size
        for name, tensor in self.ring._asdict().items():
            tensor[: state[name].shape[0]].copy_(state[name])
        self.ring.final_obs[-self.num_envs :].copy_(state["final_obs"][-self.num_envs :])
        self.random.load_state_dict(state["random"])

    def _next_rows(self, steps: int) -> Tensor:
        """[min(steps, T)] int64: the rows that the next steps are written to."""
        steps = min(steps, self.num_rows)
        return (self.ring.counts[0] + torch.arange(steps, device=self.device)) % self.num_rows


# ---- states of several ranks ----


def joined_states(states: Sequence[State], num_final: int) -> State:
    """The state of one buffer with the environments of several, which have written the same steps.
    num_final: final observations that it stores; of more, the newest are kept.
    """
    num_envs = states[0]["flags"].shape[1]
    names = [name for name in COLUMNS + MAY_HAVE if name in states[0]]
    columns = {name: torch.cat([each[name] for each in states], 1) for name in names}
    newest = torch.cat([each["final_obs"][-num_envs:] for each in states])
    ends = [_known_ends(each) for each in states]
    row = torch.cat([end[0] for end in ends])
    env = torch.cat([end[1] + rank * num_envs for rank, end in enumerate(ends)])
    final_obs = torch.cat([end[2] for end in ends])
    return _with_ends(states[0], columns, newest, row, env, final_obs, num_final)


def state_of_envs(state: State, first: int, num_envs: int, num_final: int) -> State:
    """The state of a buffer with some of the environments of another: first, first + 1, ..."""
    end = first + num_envs
    names = [name for name in COLUMNS + MAY_HAVE if name in state]
    columns = {name: state[name][:, first:end].contiguous() for name in names}
    of_all = state["flags"].shape[1]
    newest = state["final_obs"][-of_all:][first:end]
    row, env, final_obs = _known_ends(state)
    mine = (env >= first) & (env < end)
    ends = row[mine], env[mine] - first, final_obs[mine]
    return _with_ends(state, columns, newest, *ends, num_final)


def _known_ends(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """(row [E], environment [E], final observation [E, D]) of the ends of episodes whose final
    observation is still stored.
    """
    num_envs = state["flags"].shape[1]
    owner = state["owner"][:-1]
    entry = (owner >= 0).nonzero().squeeze(1)
    row, env = owner[entry] // num_envs, owner[entry] % num_envs
    # an entry outlives the step that it was of
    is_known = (state["slot"][row, env] == entry) & ((state["flags"][row, env] & DONE) != 0)
    return row[is_known], env[is_known], state["final_obs"][entry[is_known]]


def _with_ends(
    state: State,
    columns: State,
    newest: Tensor,
    row: Tensor,
    env: Tensor,
    final_obs: Tensor,
    num_final: int,
) -> State:
    """`state` with other environments: their columns [T, N, ...], the final observations of the
    newest step [N, D], and those of ends of episodes, written anew in the order of their age.
    """
    num_rows, num_envs = columns["flags"].shape
    age = (row - state["counts"][2] - 1) % num_rows  # 0: the oldest row
    order = (age * num_envs + env).argsort()[-num_final:]
    row, env = row[order], env[order]
    count = len(order)
    table = newest.new_zeros(num_final + num_envs, newest.shape[1])
    table[:count] = final_obs[order]
    table[num_final:] = newest
    owner = state["owner"].new_full((num_final + 1,), -1)
    owner[:count] = row * num_envs + env
    slot = torch.zeros_like(columns["slot"])
    slot[row, env] = torch.arange(count, dtype=slot.dtype, device=slot.device)
    counts = state["counts"].clone()
    counts[1] = count
    tables = {"slot": slot, "final_obs": table, "owner": owner, "counts": counts}
    return state | columns | tables
