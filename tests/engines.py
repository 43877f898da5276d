"""What tests ask of an engine: all that a run consists of, and in what graphs it runs."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpurl.engine.eager import Eager


def running_state(engine: Eager) -> dict[str, Any]:
    """Copies of all that iterations change, but for a replay."""
    algorithm = engine.algorithm
    parts = {
        "algorithm": {"model": algorithm.state_dict(), "training": algorithm.extra_state()},
        "env": engine.env.state_dict(),
        "guards": engine.guards.metrics(),
        **engine.state_dict(),
    }
    return tree_map(
        lambda value: value.clone() if isinstance(value, torch.Tensor) else value, parts
    )


def graph_level(engine: Eager) -> str:
    """off, policy or full; empty until that is known."""
    return "off" if engine.stages is engine else engine.stages.level  # type: ignore[attr-defined]
