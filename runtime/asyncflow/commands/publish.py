"""``asyncflow publish``: publication of a model that no job trains, from this machine, until a signal ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from asyncflow.api.load import load
from asyncflow.api.weights import WeightSync
from asyncflow.commands.preflight import check_plugins
from asyncflow.commands.run import RUNS, serve_alone
from asyncflow.errors import ManifestError
from asyncflow.local.folder import SYNC
from asyncflow.models.source import materialize_config
from asyncflow.plan.publisher import publisher_role
from asyncflow.view.live import PublisherView
from asyncflow.weights.transport import find_transport

SMALLEST_SYNC = "{apiVersion: asyncflow.dev/v1alpha1, kind: WeightSync, metadata: {name: weights}}"
"""The manifest of a WeightSync with default values."""


def publish(source: Path | TextIO, overrides: Sequence[str], *, output: Path | None, fresh: bool, port: int) -> int:
    """Publish the model of a WeightSync from the folder ``output`` until a signal ends it; return the exit status.

    overrides: ``path=value`` strings; fresh: whether to move an existing folder aside; port: port to which followers
    connect, 0 for any. A relative model folder is relative to the folder of the manifest, or to the working directory.
    Raises ManifestError before anything has started, and another AsyncFlowError on failure.
    """
    sync = load(source, overrides)
    assert isinstance(sync, WeightSync)
    check_plugins(sync, source=f"WeightSync {sync.metadata.name}")
    if sync.spec.source is None or (model := sync.spec.publishes) is None:
        what, hint = "it has no model of its own to publish", "Set spec.source.model, or run the job that names it"
        raise ManifestError(what, where=f"WeightSync {sync.metadata.name}", hint=hint)
    is_watched = sync.spec.source.watch
    if "://" not in model:
        model = str((source.absolute().parent if isinstance(source, Path) else Path.cwd()) / model)
        absolute = sync.spec.source.model_copy(update={"model": model})
        sync = sync.model_copy(update={"spec": sync.spec.model_copy(update={"source": absolute})})
    try:
        find_transport(sync.spec.transport).check()
    except ManifestError as error:
        raise ManifestError(error.what, where="spec.transport", hint=error.hint) from error
    if not (is_watched or model.startswith("pvc://")):
        with TemporaryDirectory() as scratch:
            materialize_config(model, Path(scratch))
    path = output or RUNS / sync.metadata.name
    outcome, _ = serve_alone(
        sync,
        (publisher_role(sync),),
        path=path,
        name=SYNC,
        resume=(path / SYNC).is_file() and not fresh,
        fresh=fresh,
        port=port,
        make_view=PublisherView,
    )
    return outcome.exit_code
