"""The cases of the suite by group, the short and the full suite, and the choice by patterns."""

import fnmatch
from collections.abc import Iterable

from benchmarks.learning.case import Case
from benchmarks.learning.clock_cases import WALL_CLOCK
from benchmarks.learning.gpu_cases import GPU_CASES
from benchmarks.learning.gymnasium_cases import BOX2D, CHASING, CLASSIC, DISCRETE
from benchmarks.learning.mujoco_cases import OFF_POLICY_MUJOCO, PPO_GYMNASIUM, PPO_MUJOCO
from benchmarks.learning.peer_cases import PEER_CASES
from benchmarks.learning.preset_cases import PRESET_CASES
from benchmarks.learning.rsl_rl_cases import MJLAB_CASES, RSL_RL_CASES
from gpurl.errors import UsageError, did_you_mean

GROUPS: dict[str, list[Case]] = {
    "ppo": PPO_MUJOCO,
    "gymnasium": PPO_GYMNASIUM,
    "off_policy": OFF_POLICY_MUJOCO,
    "discrete": DISCRETE,
    "box2d": BOX2D,
    "classic": CLASSIC,
    "chasing": CHASING,
    "presets": PRESET_CASES,
    "peers": PEER_CASES,
    "rsl_rl": RSL_RL_CASES,
    "mjlab": MJLAB_CASES,
    "gpu": GPU_CASES,
    "wall_clock": WALL_CLOCK,
}
CASES = {case.name: case for cases in GROUPS.values() for case in cases}
# groups that need more than a CPU and the packages here: run by their names
BY_NAME = ("mjlab", "gpu")
# whose trainings take over ten minutes by their rows: not in the short suite
LONG = ("td3-mountain_car_continuous",)
# patterns of the names of cases and groups
SUITES = {
    "short": (
        *(case.name for case in CLASSIC if case.name not in LONG),
        *("*dqn-cart_pole", "c51-cart_pole", "rainbow-cart_pole", "pqn-cart_pole"),
    ),
    "full": tuple(group for group in GROUPS if group not in BY_NAME),
}


def select(suite: str, only: Iterable[str] = ()) -> list[Case]:
    """The cases of a suite; those of the full suite that fit a pattern if there are any.

    UsageError for a pattern that no case and no group fits.
    """
    chosen: dict[str, Case] = {}
    for pattern in only or SUITES[suite]:
        found = [
            case
            for case in CASES.values()
            if fnmatch.fnmatch(case.name, pattern) or fnmatch.fnmatch(case.group, pattern)
        ]
        if not found:
            hint = did_you_mean(pattern, [*CASES, *GROUPS])
            raise UsageError(f"no case and no group fits {pattern!r}; {hint}--list shows them")
        chosen |= {case.name: case for case in found}
    return [case for case in CASES.values() if case.name in chosen]


def case_named(name: str) -> Case:
    """The case called `name`; UsageError if there is none."""
    if name not in CASES:
        raise UsageError(f"no case is called {name!r}; {did_you_mean(name, CASES)}--list shows all")
    return CASES[name]
