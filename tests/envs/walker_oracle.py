"""What single true episodes of tests/envs/fake_isaac_gym give, worked out from what was observed;
any step is compared with it.
"""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from gpurl.envs.vec_env import Timestep, VecEnv

FAKE = Path(__file__).parent / "fake_isaac_gym"
NUM_ENVS = 6
POSITION, AGE, NUMBER, EPISODE, START, WORLD = range(6)  # of an observation


@dataclasses.dataclass
class Variant:
    """How a task restarts; limit: transitions of an episode; first_age: steps that a walker has
    made when it is first seen.
    """

    task: str
    shows_end: bool
    first_age: int
    limit: int
    state_of: str = ""


VARIANTS = [
    Variant(
        "FakeCartpole", shows_end=True, first_age=0, limit=9
    ),  # episodeLength 10, and VecTask's clock ends at 9
    Variant(
        "FakeHand", shows_end=True, first_age=1, limit=8, state_of="hand"
    ),  # the first step is made within the dead one
    Variant("FakeTerrain", shows_end=False, first_age=0, limit=9),
    Variant(
        "walker_rough", shows_end=False, first_age=0, limit=9, state_of="legged"
    ),  # max_episode_length 8, and > where others have >=
]


def drifting_actions(step: int, device: torch.device) -> Tensor:
    """[N, 1]: walkers that fall at once, at the very time limit, in turns and never."""
    wander = ((step * 5) % 7 - 3) / 4
    return torch.tensor(
        [1.0, -0.375, wander, 0.0, -1.0, 0.4375 if step % 3 else -0.125], device=device
    ).unsqueeze(1)


def check_episodes(env: VecEnv, variant: Variant, obs: Tensor, steps: int = 40) -> dict[str, int]:
    """Play from obs [N, 6], all episodes at their beginning, and compare each number; returns how
    often what happened.
    """
    seen = dict.fromkeys(("terminated", "truncated", "dead", "both"), 0)
    length, total, was_dead = [0] * NUM_ENVS, [0.0] * NUM_ENVS, [False] * NUM_ENVS
    for step in range(steps):
        action = drifting_actions(step, env.device)
        timestep = env.step(action)
        for row in range(NUM_ENVS):
            before, after, final = (
                rows[row].tolist() for rows in (obs, timestep.obs, timestep.info["final_obs"])
            )
            flags = [
                bool(flag[row])
                for flag in (timestep.terminated, timestep.truncated, timestep.info["valid"])
            ]
            reward = float(timestep.reward[row])
            if was_dead[row]:
                assert (flags, reward) == ([False, False, False], 0.0)
                assert final == after
                seen["dead"] += 1
                was_dead[row] = False
                moved = action[row].item() if variant.first_age else 0.0
                assert after == [
                    after[START] + moved,
                    variant.first_age,
                    row,
                    before[EPISODE] + 1,
                    after[START],
                    before[WORLD],
                ]
                continue
            length[row] += 1
            position, age = before[POSITION] + action[row].item(), before[AGE] + 1
            gained = 2 * (position - before[START]) + age / 8
            total[row] += gained
            has_fallen, is_late = abs(position - before[START]) > 3, length[row] == variant.limit
            successor = [position, age, *before[NUMBER:]]
            assert flags == [has_fallen and not is_late, is_late, True], (step, row, before, after)
            assert reward == gained
            assert timestep.info["episode"]["l"][row] == length[row]
            assert timestep.info["episode"]["r"][row] == total[row]
            assert timestep.info["_episode"][row] == (has_fallen or is_late)
            if not (has_fallen or is_late):
                assert after == final == successor
                continue
            seen["both"] += has_fallen and is_late
            seen["terminated" if flags[0] else "truncated"] += 1
            length[row], total[row] = 0, 0.0
            if variant.shows_end:
                assert after == final == successor
                was_dead[row] = True
            else:
                assert final == before
                assert after == [
                    after[START],
                    0,
                    row,
                    before[EPISODE] + 1,
                    after[START],
                    before[WORLD],
                ]
        check_state(variant, timestep)
        obs = timestep.obs.clone()
        for given in (
            timestep.obs,
            *(timestep.info[key] for key in ("state",) if key in timestep.info),
        ):
            given.zero_()  # a caller may: it is its own
    return seen


def check_state(variant: Variant, timestep: Timestep) -> None:
    """What critics see is made of what the policy sees, in each fake its own way."""
    if not variant.state_of:
        assert "state" not in timestep.info
        return
    for key, obs in (("state", timestep.obs), ("final_state", timestep.info["final_obs"])):
        assert torch.equal(timestep.info[key], state_of(variant, obs))


def state_of(variant: Variant, obs: Tensor) -> Tensor:
    """[N, S] for obs [N, 6]."""
    return (
        10.0 * obs[:, :3]
        if variant.state_of == "hand"
        else torch.cat((obs, 2.0 * obs[:, :1]), dim=1)
    )
