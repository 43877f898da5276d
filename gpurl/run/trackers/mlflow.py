"""MLflow: a server (MLFLOW_TRACKING_URI), or without one the data base mlflow.db in the folder of
all runs: https://mlflow.org/docs/latest/ml/tracking."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpurl.checkpoints.plain_files import Json
from gpurl.run.trackers.tracker import RunCard, flat

MAX_METRICS = 1000  # of one request
MAX_PARAMETERS = 100
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
FIRST_RETRIES = "2"  # about six seconds
MAX_CHARACTERS = 500  # of a parameter, as the oldest servers take them


class Mlflow:
    """A run of MLflow; the project is its experiment."""

    client: Any
    run_id: str
    note = ""
    rescue = ""

    def begin(self, card: RunCard) -> str:
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(card.root) / 'mlflow.db'}"
        self.client = client = MlflowClient(uri)
        # a server that does not answer at the start is told of before a short training ends; later
        # its requests may wait as long as MLflow lets them
        retries = os.environ.get(RETRIES)
        os.environ[RETRIES] = FIRST_RETRIES if retries is None else retries
        try:
            self.run_id = self._find_run(client, card)
        finally:
            if retries is None:
                del os.environ[RETRIES]
        self._log_settings(card.config)
        return self.run_id

    @staticmethod
    def _find_run(client: Any, card: RunCard) -> str:
        """A new run, or that of `card.id`."""
        if card.id is not None:
            client.update_run(card.id, status="RUNNING")
            return card.id
        experiment = client.get_experiment_by_name(card.project)
        number = experiment.experiment_id if experiment else _experiment(client, card)
        return str(client.create_run(number, run_name=card.name).info.run_id)

    def _log_settings(self, config: Mapping[str, Json]) -> None:
        """As parameters, which cannot change: what a resume has changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        settings = {_name(key): str(value)[:MAX_CHARACTERS] for key, value in flat(config)}
        known = self.client.get_run(self.run_id).data.params
        new = [Param(key, value) for key, value in settings.items() if key not in known]
        for start in range(0, len(new), MAX_PARAMETERS):
            self.client.log_batch(self.run_id, params=new[start : start + MAX_PARAMETERS])
        changed = [
            RunTag(f"resumed.{key}", value)
            for key, value in settings.items()
            if known.get(key, value) != value
        ]
        if changed:
            self.client.log_batch(self.run_id, tags=changed[:MAX_PARAMETERS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # ms
        metrics = [Metric(_name(key), value, now, step) for key, value in values.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MAX_METRICS])

    def finish(self, summary: Mapping[str, Json], failed: bool) -> None:
        for name, value in summary.items():
            self.client.set_tag(self.run_id, name, value)
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _experiment(client: Any, card: RunCard) -> str:
    """A new experiment. gpurl uploads no files, so a local one keeps its place for them in root."""
    if os.environ.get("MLFLOW_TRACKING_URI"):
        return str(client.create_experiment(card.project))
    folder = (Path(card.root) / "mlartifacts").as_uri()
    return str(client.create_experiment(card.project, artifact_location=folder))


def _name(key: str) -> str:
    """`key` in the characters that MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", key, flags=re.ASCII)


def make() -> Mlflow:
    """A new one."""
    return Mlflow()
