"""Weights & Biases: https://docs.wandb.ai. WANDB_MODE=offline keeps everything on this machine."""

import os
import uuid
from collections.abc import Mapping
from typing import Any

from gpurl.checkpoints.plain_files import Json
from gpurl.run.trackers.tracker import RunCard


class Wandb:
    """A run of wandb; gpurl sends settings, metrics and the summary, and no code or output."""

    run: Any

    def begin(self, card: RunCard) -> str:
        # reports of its own errors
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        settings = wandb.Settings(
            root_dir=card.root,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self.run = wandb.init(
            project=card.project,
            name=card.name,
            id=card.id or uuid.uuid4().hex[:8],
            resume="allow",
            settings=settings,
        )
        self.run.config.update(card.config, allow_val_change=True)
        return str(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Json], failed: bool) -> None:
        for name, value in summary.items():
            self.run.summary[name] = value
        self.run.finish(exit_code=int(failed))


def make() -> Wandb:
    """A new one."""
    return Wandb()
