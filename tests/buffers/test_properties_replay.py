"""Laws of the replay ring, torch and C: whatever was played and cut, a row gives the transition
that was played, or counts for nothing.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpurl.buffers.replay import Replay
from gpurl.kernels.replay import TRUNCATED, Ring, new_ring, replay_mark_episode_break
from tests.replay_world import FORMS, OBS, Form, World, streams

KINDS = st.sampled_from([torch.float32, torch.uint8])


class History(World):
    """A world and the ring that was given all of it; `ends` in the order in which their final
    observations were written.
    """

    def __init__(self, draw: st.DrawFn, form: Form) -> None:
        chances = st.sampled_from([0.0, 0.1, 0.5, 1.0])
        envs, gamma = draw(st.integers(1, 4)), draw(st.sampled_from([0.0, 0.5, 0.99, 1.0]))
        super().__init__(draw(st.integers(0, 2**32)), draw(KINDS), draw(chances), 2, envs, gamma)
        self.num_rows, self.num_final = draw(st.integers(1, 12)), draw(st.integers(1, 60))
        self.ring: Ring = new_ring(
            self.num_rows, envs, OBS, self.width, self.num_final, self.kind, torch.device("cpu")
        )
        self.endings: list[tuple[int, int]] = []
        invalid = draw(chances)
        for steps in draw(st.lists(st.integers(1, self.num_rows), min_size=1, max_size=8)):
            form[0](self.ring, self.block(steps, invalid))
            self._note_episode_ends(len(self.steps) - steps)
            if draw(st.booleans()):
                mask = np.array(draw(st.lists(st.booleans(), min_size=envs, max_size=envs)))
                before = self.steps[-1]["flags"].copy()
                self.mark_episode_break(mask)
                replay_mark_episode_break(self.ring, torch.from_numpy(mask))
                self.endings += [
                    (len(self.steps) - 1, n)
                    for n in range(envs)
                    if before[n] != self.steps[-1]["flags"][n]
                ]

    def _note_episode_ends(self, first: int) -> None:
        self.endings += [
            (t, n)
            for t in range(first, len(self.steps))
            for n in range(self.envs)
            if self.steps[t]["flags"][n] & 3
        ]

    def stored(self) -> list[tuple[int, int]]:
        """(step, environment) of all that is not overwritten."""
        return [
            (t, n)
            for t in range(max(len(self.steps) - self.num_rows, 0), len(self.steps))
            for n in range(self.envs)
        ]

    def index(self) -> torch.Tensor:
        """Where `stored` lies in the ring."""
        return torch.tensor([t % self.num_rows * self.envs + n for t, n in self.stored()])

    def end_of(self, t: int, n: int, num_steps: int) -> tuple[int, int]:
        """The last step of the transition from `t` on."""
        flags = [step["flags"][n] for step in self.steps]
        last = t
        while (
            last + 1 < min(t + num_steps, len(flags))
            and not flags[last] & 3
            and not flags[last + 1] & 4
        ):
            last += 1
        return last, n


@st.composite
def histories(draw: st.DrawFn, form: Form) -> History:
    return History(draw, form)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), num_steps=st.integers(1, 6))
def test_every_row_gives_the_transition_that_was_played(
    form: Form, data: Any, num_steps: int
) -> None:
    world = data.draw(histories(form))
    batch = form[1](
        world.ring, len(world.stored()), world.gamma, num_steps, streams(), index=world.index()
    )
    kept = set(world.endings[-world.num_final :])
    for i, (t, n) in enumerate(world.stored()):
        reward, discount, next_obs, is_valid = world.transition(t, n, num_steps)
        end = world.end_of(t, n, num_steps)
        is_lost = world.steps[end[0]]["flags"][n] & 3 == TRUNCATED and end not in kept
        assert float(batch.reward[i]) == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert float(batch.discount[i]) == pytest.approx(discount, rel=1e-5)
        assert float(batch.weight[i]) == float(is_valid and not is_lost)
        np.testing.assert_array_equal(batch.obs[i].numpy(), world.steps[t]["obs"][n])
        np.testing.assert_array_equal(batch.numbers[i].numpy(), world.steps[t]["numbers"][n])
        if batch.weight[i] and batch.discount[i]:
            np.testing.assert_array_equal(batch.next_obs[i].numpy(), next_obs)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_what_can_be_drawn_is_what_is_stored(form: Form, data: Any) -> None:
    """Each of at most 48 rows is among 2000 draws, and no other: rewards, which are all different,
    name them.
    """
    world = data.draw(histories(form))
    batch = form[1](world.ring, 2000, world.gamma, 1, streams(data.draw(st.integers(0, 99))))
    expected = [float(world.steps[t]["numbers"][n, 0]) for t, n in world.stored()]
    assert len(set(expected)) == len(expected)
    assert dict(zip(batch.index.tolist(), batch.numbers[:, 0].tolist())) == dict(
        zip(world.index().tolist(), expected)
    )


COLUMNS: dict[str, tuple[int, ...]] = {"reward": (), "action": (2,)}


@given(
    data=st.data(),
    size=st.integers(1, 40),
    more=st.integers(1, 9),
    share=st.sampled_from([0.01, 0.5, 2.0]),
)
def test_a_buffer_that_was_saved_is_the_one_that_went_on(
    data: Any, size: int, more: int, share: float
) -> None:
    def columns(steps: int) -> dict[str, torch.Tensor]:
        flags = torch.from_numpy(random.random((2, steps, 3)) < 0.3)
        numbers = {
            name: torch.from_numpy(random.normal(size=(steps, 3, *shape))).float()
            for name, shape in COLUMNS.items()
        }
        numbers |= {
            name: torch.from_numpy(random.normal(size=(steps, 3, 2))).float()
            for name in ("obs", "final_obs")
        }
        return numbers | {"terminated": flags[0], "truncated": flags[1] & ~flags[0]}

    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    one, other = (
        Replay(size, 3, (2,), COLUMNS, torch.device("cpu"), seed=seed, final_obs_fraction=share)
        for seed in (1, 2)
    )
    for steps in data.draw(st.lists(st.integers(1, one.num_rows), min_size=1, max_size=4)):
        one.add(columns(steps))
    other.load_state_dict(
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in one.state_dict().items()
        }
    )
    drawn = []
    for buffer in (one, other):
        random = np.random.default_rng(5)
        buffer.add(columns(min(more, one.num_rows)))
        buffer.mark_episode_break(torch.tensor([True, False, True]))
        assert bool((buffer.ring.flags[int(buffer.ring.counts[2])] & 3)[::2].all())
        drawn.append(buffer.sample(50, 0.9, 3))
    for name, value in drawn[0].items():
        assert torch.equal(value, drawn[1][name]), name
