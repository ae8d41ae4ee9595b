"""MLflow sink: a run on a tracking server, or in a database file in the folder of the run.

MLflow cannot delete values. It shows the newest value of a step, so a repeated step shows its new values. The tag
``asyncflow.made_again_from`` holds the first repeated step.

Invariants: a resumed run is the same run of MLflow. User and password of a server come from the environment
(MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import msgspec

from asyncflow.durable import write_whole
from asyncflow.telemetry.sinks.base import MetricSink, SinkRun, check_address

_ID = "run-id"
_JOB = "asyncflow.job"
"""Tag of a run with the UID of its job."""
_ILLEGAL = re.compile(r"[^\w\-. :/]")
_LONGEST = 500
"""Maximum characters of a parameter's value in any store of MLflow."""
_PARAMS = 100
"""Maximum number of parameters in one request."""
_STATUS = {"Succeeded": "FINISHED", "Suspended": "SCHEDULED", "Failed": "FAILED"}


class MlflowOptions(msgspec.Struct, frozen=True):
    """tracking_uri: by default an SQLite database below ``sinks/mlflow``; name: of the run, by default the job's."""

    tracking_uri: str = ""
    experiment: str = "asyncflow"
    name: str = ""


class MlflowSink(MetricSink):
    """Writes one run of MLflow."""

    Options = MlflowOptions
    needs = dict.fromkeys(("mlflow", "sqlalchemy", "alembic"), "asyncflow[mlflow]")

    def __init__(self, options: MlflowOptions, *, run: SinkRun) -> None:
        self._entities = import_module("mlflow.entities")
        uri = options.tracking_uri or f"sqlite:///{(run.own / 'mlflow.db').absolute()}"
        self._client: Any = import_module("mlflow").MlflowClient(tracking_uri=uri)
        self._run = self._open(options, run)

    @classmethod
    def check(cls, options: MlflowOptions) -> None:
        """Raise ManifestError for an address that contains a password."""
        check_address(options.tracking_uri, option="tracking_uri")

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Log one point."""
        metric, milliseconds = self._entities.Metric, int(1000 * at)
        points = [metric(_ILLEGAL.sub("_at_", name), value, milliseconds, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=points)

    def rewind(self, step: int) -> None:
        """Set the tag with the first repeated step."""
        self._client.set_tag(self._run, "asyncflow.made_again_from", str(step))

    def flush(self) -> None:
        """Do nothing: each point is stored when it is logged."""

    def close(self, phase: str) -> None:
        """Set the final status of the run, if it is known."""
        if phase in _STATUS:
            self._client.set_terminated(self._run, status=_STATUS[phase])

    def _open(self, options: MlflowOptions, run: SinkRun) -> str:
        """Return the id of the run, which is created once and found by a file in the folder, or by its tag."""
        found = self._client.get_experiment_by_name(options.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(options.experiment)
        if known := self._known(run, experiment):
            self._client.update_run(known, status="RUNNING")
            return known
        tags = {_JOB: run.uid} if run.uid else {}
        created: str = self._client.create_run(experiment, run_name=options.name or run.name, tags=tags).info.run_id
        params = [self._entities.Param(name, value[:_LONGEST]) for name, value in _flat(run.config)]
        for start in range(0, len(params), _PARAMS):
            self._client.log_batch(created, params=params[start : start + _PARAMS])
        write_whole(run.own / _ID, created.encode())
        return created

    def _known(self, run: SinkRun, experiment: str) -> str:
        """Return the id of the run if an earlier process has created it, otherwise ""."""
        file = run.own / _ID
        if file.exists():
            return file.read_text()
        if not run.uid:
            return ""
        found = self._client.search_runs([experiment], filter_string=f"tags.`{_JOB}` = '{run.uid}'", max_results=1)
        return str(found[0].info.run_id) if found else ""


def _flat(config: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield values by their dotted path, with only the characters that MLflow accepts."""
    for name, value in config.items():
        place = _ILLEGAL.sub("_", f"{prefix}{name}")
        if isinstance(value, Mapping):
            yield from _flat(value, prefix=f"{place}.")
        else:
            yield place, value if isinstance(value, str) else msgspec.json.encode(value).decode()
