"""Connection data of a session: for a job that is started here, a job that runs already, or a standalone queue.

    a manifest, a job made in Python       the job is started here, by ``asyncflow run`` as a child process
    the same, with the driver's address    the job runs on other machines
    the folder of a run, or of a queue     the job or queue runs on this machine
    tcp://HOST:PORT                        a standalone queue

Invariants: a job is started with ``trainer.external``, and a session becomes the trainer of such a job only; a child
process that is started here ends with the thread that started it, even if that thread is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job, name_of, to_yaml
from asyncflow.api.names import CLIENT
from asyncflow.commands.preflight import load, source_name
from asyncflow.commands.run import RUNS
from asyncflow.durable import write_whole
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError
from asyncflow.local.folder import JOB, QUEUE, holds_run, record_of
from asyncflow.local.record import load_record
from asyncflow.process import PARENT

_POLL_S = 0.05
_TAIL = 2000
WHERE = "init_engines"


@dataclass(frozen=True, kw_only=True)
class SessionPlace:
    """The job or queue that a session connects to.

    address: address of the driver, or of the queue's controller; manifest: file of the job, None for a queue; workdir:
    folder for checkpoints and the model; tls: folder with the certificates by process (``trainer-0``, ``client-0``),
    None if they are not needed; own: folder with the certificate of a client of a standalone queue.
    """

    address: str
    manifest: Path | None = None
    workdir: Path | None = None
    tls: Path | None = None
    own: Path | None = None

    def certificate(self, role: str, index: int = 0) -> Path | None:
        """Return the folder of the certificate that a process of ``role`` presents, None if it presents none."""
        if role == CLIENT and self.own is not None:
            return self.own
        return None if self.tls is None else self.tls / f"{role}-{index}"

    @property
    def job(self) -> RLJob:
        """The job. Raises ManifestError if the job does not have an external trainer."""
        assert self.manifest is not None
        job = load_job(self.manifest)
        _check_external(job, where=str(self.manifest))
        return job


def _check_external(job: RLJob, *, where: str) -> None:
    """Raise ManifestError if the job does not have an external trainer."""
    if not job.spec.trainer.external:
        hint = "Run it with --set trainer.external=true; to join it by address, set the field in the manifest, too"
        raise ManifestError("the job starts a trainer of its own", where=where, hint=hint)


def place_of_run(folder: Path) -> SessionPlace:
    """Return the place of the job or queue that runs from ``folder``. Raises ManifestError if none does."""
    folder = folder.absolute()
    record = record_of(folder)
    tls = folder / "run" / "tls"
    if (folder / QUEUE).is_file():
        return SessionPlace(address=record.driver, own=tls / f"{CLIENT}-0")
    return SessionPlace(address=record.driver, manifest=folder / JOB, workdir=folder, tls=tls)


def remote_place(
    job: RLJob | Path | str,
    *,
    address: str,
    tls: Path | str | None,
    workdir: Path | str | None,
    overrides: Sequence[str],
) -> SessionPlace:
    """Return the place of the job whose driver is at ``address``; writes the manifest into ``workdir``."""
    manifest = load(job, overrides)
    if not isinstance(manifest, RLJob):
        raise ManifestError(f"kind = {manifest.kind!r}: not a job", where=source_name(job), hint="Pass an RLJob")
    _check_external(manifest, where=source_name(job))
    folder = Path(workdir) if workdir is not None else RUNS / manifest.name
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / JOB, to_yaml(manifest).encode())
    return SessionPlace(
        address=address,
        manifest=(folder / JOB).absolute(),
        workdir=folder.absolute(),
        tls=None if tls is None else Path(tls).absolute(),
    )


class LocalRun:
    """``asyncflow run`` as a child process; one thread starts it and waits for it.

    job: a manifest or a job; output: folder of the run, None for ``runs/NAME``. If the folder contains a run, that run
    is continued.
    """

    def __init__(self, job: RLJob | Path | str, *, output: Path | str | None, overrides: Sequence[str]) -> None:
        sets = [*overrides, "trainer.external=true"]
        name = job.name if isinstance(job, RLJob) else name_of(Path(job), sets)
        self.folder = (Path(output) if output is not None else RUNS / name).absolute()
        self._sets = sets
        self._job = job
        self._child: subprocess.Popen[bytes] | None = None
        self._log = self.folder.with_name(f"{self.folder.name}.log")

    def start(self, *, timeout: float) -> SessionPlace:
        """Start the run, and return the place of its trainer. Raises AsyncFlowError if it ended, or did not start."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        source = Path(self._job) if not isinstance(self._job, RLJob) else self._written(self._job)
        command = [sys.executable, "-m", "asyncflow", "run", str(source), "--output", str(self.folder)]
        command += [argument for each in self._sets for argument in ("--set", each)]
        command += ["--resume"] if holds_run(self.folder) else []
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "asyncflow.process", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT: str(os.getpid())},
            )
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            record = load_record(self.folder)
            if record is not None and record.supervisor == self._child.pid:
                return place_of_run(self.folder)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the run did not start within {timeout:g} s", where=str(self.folder))
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise AsyncFlowError if the child process has ended."""
        if self._child is not None and (status := self._child.poll()) is not None:
            raise self._failed(status)

    def end(self, *, well: bool, timeout: float) -> None:
        """Wait for the end of the child; terminate it first unless ``well``. Raises AsyncFlowError if it failed."""
        if self._child is None:
            return
        if not well:
            self._child.terminate()
        try:
            status = self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            what = f"asyncflow run did not end within {timeout:g} s, and was killed"
            raise DeadlineExceeded(what, where=str(self.folder)) from None
        if well and status:
            raise self._failed(status)

    def _written(self, job: RLJob) -> Path:
        source = self.folder.with_name(f"{self.folder.name}.yaml")
        write_whole(source, to_yaml(load(job)).encode())
        return source

    def _failed(self, status: int) -> AsyncFlowError:
        tail = self._log.read_text(errors="replace")[-_TAIL:].strip()
        what = f"asyncflow run ended with exit status {status}"
        return AsyncFlowError(what, where=str(self.folder), hint=f"Its last output: {tail}")
