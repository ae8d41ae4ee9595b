"""The certificate authority of a job on one machine, in a folder that only its user may read.

    FOLDER/seed              the seed that defines the authority, and the job's random unique name
    FOLDER/ROLE-INDEX/       the certificate of a process, as ``rpc.tls`` reads it

Invariant: an issuer that opens an existing folder continues its authority, so processes that were started before and
after accept each other's certificates.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncflow.api.names import CERTIFICATE_FILES, STORE_ROLES, STORE_SECRET
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.plan.certificates import SEED_BYTES, Authority, Leaf, period_of
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

_RENEW_S = 60.0
"""Seconds between two checks for a new period; few, since they do not pass while the machine sleeps."""


class Issuer:
    """Issues certificates by the authority in ``folder``, which is created if missing.

    Raises ManifestError if the folder's seed cannot be read as one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._issued: dict[tuple[str, int], int] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seed_file = folder / "seed"
        if not seed_file.exists():
            write_whole(seed_file, f"{uuid.uuid4()} {os.urandom(SEED_BYTES).hex()}\n".encode(), mode=0o600)
        try:
            job, seed = seed_file.read_text("ascii").split()
            self.authority = Authority(seed=bytes.fromhex(seed), job=job)
        except ValueError as error:
            hint = "Remove the folder, and restart all processes of this job"
            raise ManifestError("there is no certificate authority", where=str(seed_file), hint=hint) from error

    def issue(self, role: str, index: int = 0) -> Path:
        """Write the certificate of a process for the current period, and return its folder."""
        self._write(role, index, period_of(time.time()))
        return self.folder / f"{role}-{index}"

    def credentials(self, role: str, index: int = 0) -> Credentials:
        """Issue a certificate, and return it as credentials of that process."""
        return Credentials(self.issue(role, index))

    def renew(self) -> None:
        """Issue again the certificates of an earlier period."""
        now = period_of(time.time())
        for (role, index), period in list(self._issued.items()):
            if period != now:
                self._write(role, index, now)

    @contextlib.contextmanager
    def renewing(self) -> Iterator[Issuer]:
        """Renew the issued certificates in a separate thread, for as long as the context lasts."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(_RENEW_S):
                try:
                    self.renew()
                except OSError as error:
                    log.warning("the certificates in %s cannot be renewed: %s", self.folder, error)

        thread = threading.Thread(target=run, name="renew certificates", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def _write(self, role: str, index: int, period: int) -> None:
        secrets = {STORE_SECRET: self.authority.secret(STORE_SECRET)} if role in STORE_ROLES else {}
        leaf = self.authority.leaf(role, index, period=period)
        keep(self.folder / f"{role}-{index}", authority=self.authority.certificate, leaf=leaf, secrets=secrets)
        self._issued[role, index] = period


def keep(folder: Path, *, authority: bytes, leaf: Leaf, secrets: Mapping[str, str] | None = None) -> None:
    """Write the credentials of a process into ``folder``, which only this user may read.

    authority: certificate of the authority in PEM; secrets: further secrets, by file name. Each file is replaced
    atomically.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = dict(zip(CERTIFICATE_FILES, (authority, leaf.certificate, leaf.key), strict=True))
    files |= {name: secret.encode() for name, secret in (secrets or {}).items()}
    for name, content in files.items():
        write_whole(folder / name, content, mode=0o600)
