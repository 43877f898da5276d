"""Randomised ensembled double Q-learning (Chen et al. 2021): SAC with ten critics, of which two drawn anew make each target."""

from dataclasses import dataclass

from gpurl.algorithms.sac import SAC, SACConfig


@dataclass(frozen=True)
class REDQConfig(SACConfig):
    """Settings of REDQ."""

    num_critics: int = 10
    """Critics, each with a start of its own."""
    target_subset: int | None = 2
    """Critics, drawn anew for each update, whose target networks are asked."""
    actor_aggregate: str = "mean"
    """What the actor climbs: min or mean of all critics, or the first one."""
    updates: int = 20
    """Optimiser steps after each horizon, each on a batch of its own."""
    policy_delay: int = 20
    """Updates of the critics to one of the actor."""


class REDQ(SAC):
    """SAC under REDQConfig."""

    config: REDQConfig
