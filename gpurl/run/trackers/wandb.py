"""Weights & Biases: https://docs.wandb.ai. WANDB_MODE=offline keeps everything on this machine."""

import os
import uuid
from collections.abc import Mapping
from typing import Any

from gpurl.checkpoints.plain_files import Json
from gpurl.errors import first_line
from gpurl.run.trackers.tracker import RunCard

INIT_SECONDS = 15.0  # for the server's first answer; less than a training waits at its end


class Wandb:
    """A run of wandb; gpurl sends settings, metrics and the summary, and no code or output.

    Without a key, and without an answer of the server, the run is written into files as with
    WANDB_MODE=offline.
    """

    run: Any
    note = ""
    rescue = ""

    def begin(self, card: RunCard) -> str:
        # reports of its own errors
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        run_id = card.id or uuid.uuid4().hex[:8]
        try:
            self.run = _init(wandb, card, run_id)
        except Exception as error:  # of its network, its server, or its key
            server = wandb.setup().settings.base_url
            self.note = f"no run on {server} ({type(error).__name__}: {first_line(error)})"
            wandb.teardown()  # the id is in use until then
            self.run = _init(wandb, card, run_id, mode="offline")
        self.rescue = f"wandb sync {self.run.settings.sync_dir}"
        self.run.config.update(card.config, allow_val_change=True)
        return str(self.run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Json], failed: bool) -> None:
        for name, value in summary.items():
            self.run.summary[name] = value
        self.run.finish(exit_code=int(failed))


def _init(wandb: Any, card: RunCard, run_id: str, **more: str) -> Any:
    """A new run or that of `run_id`; more: further settings of wandb."""
    settings = wandb.Settings(
        root_dir=card.root,
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_stats=True,
        x_disable_meta=True,
        init_timeout=INIT_SECONDS,
        **more,
    )
    return wandb.init(
        project=card.project, name=card.name, id=run_id, resume="allow", settings=settings
    )


def make() -> Wandb:
    """A new one."""
    return Wandb()
