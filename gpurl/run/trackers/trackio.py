"""trackio: runs in a data base on this machine, by default in the cache of Hugging Face
(TRACKIO_DIR), or in a Space: https://huggingface.co/docs/trackio."""

import os
import uuid
from collections.abc import Mapping
from typing import Any

from gpurl.checkpoints.plain_files import Json
from gpurl.run.trackers.tracker import RunCard, flat

ANALYTICS_OFF = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


class Trackio:
    """A run of trackio, which knows runs by their names: the name is the id."""

    run: Any
    note = ""
    rescue = ""

    def begin(self, card: RunCard) -> str:
        os.environ.update(ANALYTICS_OFF)
        import trackio

        name = card.id or f"{card.name}-{uuid.uuid4().hex[:6]}"
        self.run = trackio.init(
            project=card.project,
            name=name,
            config=dict(flat(card.config)),
            resume="allow" if card.id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Json], failed: bool) -> None:
        # it has no summaries: a last row
        self.run.log({f"summary/{name}": value for name, value in summary.items()})
        self.run.finish()


def make() -> Trackio:
    """A new one."""
    return Trackio()
