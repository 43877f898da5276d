"""Randomised ensembled double Q-learning (Chen et al. 2021): SAC with ten critics; two of them,
drawn anew for each update, make its target.
"""

from dataclasses import dataclass

from gpurl.algorithms.sac import SAC, SACConfig


@dataclass(frozen=True)
class REDQConfig(SACConfig):
    """Settings of REDQ. The publication's target_entropy is -1 for Hopper, -3 for HalfCheetah and
    Walker2d, -4 for Ant and -2 for Humanoid; here it is minus the number of actions, as in SAC.
    """

    num_critics: int = 10
    target_subset: int | None = 2
    """Target critics, drawn anew for each update, that make its target."""
    actor_aggregate: str = "mean"
    updates: int = 20
    policy_delay: int = 20


class REDQ(SAC):
    """SAC under REDQConfig."""

    config: REDQConfig
