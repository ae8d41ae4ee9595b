"""The place that a session takes: of a job that is run here, of one that runs already, or of a queue that stands alone.

    a manifest, a job made in Python       it is run here, by ``asyncflow run`` as a child process
    the same, with the driver's address    it runs elsewhere
    the folder of a run, or of a queue     it runs on this machine
    tcp://HOST:PORT                        a queue that stands alone

Invariants: a job is run with ``trainer.external``, and only such a job is joined as its trainer; a child that was
started here ends with the thread that started it, however that ends.
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
from asyncflow.commands.preflight import load
from asyncflow.commands.run import RUNS
from asyncflow.durable import write_whole
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError
from asyncflow.local.folder import JOB, QUEUE, holds_run, load_record, record_of
from asyncflow.process import PARENT

_POLL_S = 0.05
_TAIL = 2000
WHERE = "init_engines"


@dataclass(frozen=True, kw_only=True)
class SessionPlace:
    """Where a session belongs.

    address: of the driver, or of the queue's controller; manifest: file of the job, None for a queue; workdir: folder
    for checkpoints and the model; tls: folder with the certificates by process (``trainer-0``, ``client-0``), None
    where they are not needed; own: the certificate of a client of a queue that stands alone.
    """

    address: str
    manifest: Path | None = None
    workdir: Path | None = None
    tls: Path | None = None
    own: Path | None = None

    def certificate(self, role: str, index: int = 0) -> Path | None:
        """Return the folder of the certificate that a process of ``role`` shows, None where it shows none."""
        if role == CLIENT and self.own is not None:
            return self.own
        return None if self.tls is None else self.tls / f"{role}-{index}"

    @property
    def job(self) -> RLJob:
        """The job. Raises ManifestError where its trainer is not the user's to be."""
        assert self.manifest is not None
        job = load_job(self.manifest)
        if not job.spec.trainer.external:
            hint = "Run it with --set trainer.external=true"
            raise ManifestError("the job starts a trainer of its own", where=str(self.manifest), hint=hint)
        return job


def running(folder: Path) -> SessionPlace:
    """Return the place in the job, or the queue, that runs from ``folder``. Raises ManifestError where none does."""
    folder = folder.absolute()
    record = record_of(folder)
    tls = folder / "run" / "tls"
    if (folder / QUEUE).is_file():
        return SessionPlace(address=record.driver, own=tls / f"{CLIENT}-0")
    return SessionPlace(address=record.driver, manifest=folder / JOB, workdir=folder, tls=tls)


def elsewhere(
    job: RLJob | Path | str,
    *,
    address: str,
    tls: Path | str | None,
    workdir: Path | str | None,
    overrides: Sequence[str],
) -> SessionPlace:
    """Return the place in the job whose driver is at ``address``; the manifest is kept in ``workdir``."""
    manifest = load(job, overrides)
    if not isinstance(manifest, RLJob):
        raise ManifestError(f"kind = {manifest.kind!r}: not a job", where=str(job), hint="Give an RLJob")
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
    """``asyncflow run`` as a child process, which is made and waited for in one thread.

    job: a manifest or a job; output: folder of the run, ``runs/NAME`` where None. A run that the folder holds is
    continued.
    """

    def __init__(self, job: RLJob | Path | str, *, output: Path | str | None, overrides: Sequence[str]) -> None:
        sets = [*overrides, "trainer.external=true"]
        name = job.name if isinstance(job, RLJob) else name_of(Path(job), sets)
        self.folder = (Path(output) if output is not None else RUNS / name).absolute()
        self._sets = sets
        self._job = job
        self._child: subprocess.Popen[bytes] | None = None
        self._said = self.folder.with_name(f"{self.folder.name}.log")

    def start(self, *, timeout: float) -> SessionPlace:
        """Start it, and return the place of its trainer. Raises AsyncFlowError where it ended, or did not begin."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        source = Path(self._job) if not isinstance(self._job, RLJob) else self._written(self._job)
        command = [sys.executable, "-m", "asyncflow", "run", str(source), "--output", str(self.folder)]
        command += [word for each in self._sets for word in ("--set", each)]
        command += ["--resume"] if holds_run(self.folder) else []
        with self._said.open("wb") as said:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "asyncflow.process", *command],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT: str(os.getpid())},
            )
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            record = load_record(self.folder)
            if record is not None and record.supervisor == self._child.pid:
                return running(self.folder)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the run did not begin within {timeout:g} s", where=str(self.folder))
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise AsyncFlowError where it has ended."""
        if self._child is not None and (status := self._child.poll()) is not None:
            raise self._failed(status)

    def end(self, *, well: bool, timeout: float) -> None:
        """Wait for its end, which it reaches by itself where ``well``. Raises AsyncFlowError where it failed."""
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
        said = self._said.read_text(errors="replace")[-_TAIL:].strip()
        what = f"asyncflow run ended with exit status {status}"
        return AsyncFlowError(what, where=str(self.folder), hint=f"It said: {said}")
