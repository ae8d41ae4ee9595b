"""Settings of an operator: options of ``asyncflow-operator run``, and environment variables of the same names.

Invariants: this model is the only table of settings; the field ``probe_url`` is the option ``--probe-url`` and the
variable ``ASYNCFLOW_OPERATOR_PROBE_URL``. Nothing else is read from the environment. A wrong value ends the process
before it starts to work.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncflow import __version__
from asyncflow.api.names import CONTROL_PORT, HTTP_PORT
from asyncflow.errors import ManifestError

PREFIX: Final = "ASYNCFLOW_OPERATOR_"
_LEAST_KEY_BYTES: Final = 16
_LISTS: Final = frozenset(("namespaces", "watchers"))

Command = TypeVar("Command", bound=Callable[..., Any])


def _identity() -> str:
    return f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


class Settings(BaseModel):
    """All settings of one operator process."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve, separated by commas; all if empty."""
    namespace: str = "asyncflow-system"
    """Namespace of the operator itself and of its Lease."""
    identity: str = Field(default_factory=_identity)
    """Name of this process, among several operators; random by default."""
    watchers: tuple[str, ...] = ()
    """Namespaces that may read metrics and status, in addition to the operator's own; separated by commas."""
    leader_election: bool = True
    """Work only while holding the Lease."""
    lease: Annotated[str, Field(min_length=1, max_length=63)] = "asyncflow-operator"
    """Name of the Lease."""
    workers: Annotated[int, Field(ge=1, le=256)] = 16
    """Number of objects reconciled at the same time."""
    connections: Annotated[int, Field(ge=8, le=1024)] = 64
    """Most connections to the API server, in addition to one for each watch."""
    images: str = "asyncflow"
    """Registry and prefix of the images."""
    tag: str = __version__
    """Version of the images of new jobs; running jobs keep theirs."""
    key_file: Path
    """File with the master secret, from which the certificates and passwords of every job are derived."""
    probe_url: str = f"http://{{host}}:{HTTP_PORT}"
    """URL of a job's driver; {host} stands for its pod's address, {namespace} and {name} for the job's."""
    control_url: str = f"https://{{host}}:{CONTROL_PORT}"
    """URL of the control service of a job's driver, with the same placeholders."""
    probe_seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Seconds between two status requests to one driver."""
    resync_seconds: Annotated[float, Field(ge=10, le=86_400)] = 600.0
    """Seconds between two reconciliations of all objects, changed or not."""
    rights_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds between two checks in which of the namespaces to serve the operator has rights."""
    http_host: str = "*"
    """Address of /healthz, /readyz and /metrics; * for all addresses of this machine, IPv6 included."""
    http_port: Annotated[int, Field(ge=0, le=65_535)] = 8080
    """Port of /healthz, /readyz and /metrics; 0 is any free port."""
    decisions: Path | None = None
    """Folder of the decision log, which ``asyncflow-operator explain`` reads; none by default."""
    decision_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 40)] = 16 << 20
    """Most bytes of the decision log; the oldest decisions are dropped."""
    kubeconfig: Path | None = None
    """File with the address and credentials of the API server; the pod's service account by default."""
    log_level: str = "INFO"
    """Lowest level of the operator's own log lines."""

    def master_secret(self) -> bytes:
        """Read the master secret. Raises ManifestError if it is missing or too short."""
        try:
            secret = self.key_file.read_bytes().strip()
        except OSError as error:
            hint = "Mount the Secret of the operator there"
            raise ManifestError(f"cannot be read: {error.strerror}", where=str(self.key_file), hint=hint) from error
        if len(secret) < _LEAST_KEY_BYTES:
            hint = f"Write at least {_LEAST_KEY_BYTES} random bytes into it"
            raise ManifestError(f"the master secret has {len(secret)} bytes", where=str(self.key_file), hint=hint)
        return secret


def options(command: Command) -> Command:
    """Add an option for each setting to ``command``; each option also reads the variable of its name."""
    for name, field in reversed(Settings.model_fields.items()):
        flag = f"--{name.replace('_', '-')}"
        switch = field.annotation is bool
        option = click.option(
            f"{flag}/--no-{flag.removeprefix('--')}" if switch else flag,
            name,
            envvar=f"{PREFIX}{name.upper()}",
            default=None,
            type=None if switch else click.STRING,
            required=field.is_required(),
            metavar=None if switch else name.upper(),
            help=_help(name),
        )
        command = option(command)
    return command


def settings(arguments: dict[str, Any]) -> Settings:
    """Return the settings from the command line and the environment. Raises ManifestError if one is wrong."""
    values = {name: value for name, value in arguments.items() if value is not None}
    for name in _LISTS & values.keys():
        values[name] = tuple(part.strip() for part in values[name].split(",") if part.strip())
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = str(wrong["loc"][0]) if wrong["loc"] else ""
        hint = f"See asyncflow-operator run --help, or the variable {PREFIX}{name.upper()}"
        option = f"--{name.replace('_', '-')}"
        raise ManifestError(f"{wrong['input']!r}: {wrong['msg']}", where=option, hint=hint) from error


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    default = field.get_default()
    shown = (
        "" if field.is_required() or default in (None, (), "") or field.default_factory else f"  [default: {default}]"
    )
    return f"{field.description}{shown}".replace("``", "")
