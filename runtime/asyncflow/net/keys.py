"""The job's key: who holds it may speak, everybody else is refused in the handshake.

A job has one CURVE key pair, in one file of mode 0600 that every role can read. It is the server's and the client's
pair at once. A server asks the gatekeeper (ZAP, one thread a process, because zmq allows one handler a context) whether
the client's public key is that of the job.

Invariant: a server that was given keys never delivers a message of a peer that does not hold the same file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import zmq
from zmq.utils import z85

from asyncflow.errors import ManifestError
from asyncflow.net.wire import Socket, context

_ZAP = "inproc://zeromq.zap.01"


class Keys:
    """The CURVE key pair of a job (Z85 text, 40 characters each). It is never logged and has no printable form."""

    def __init__(self, *, public: bytes, secret: bytes) -> None:
        self._public = public
        self._secret = secret

    def __repr__(self) -> str:
        return f"Keys({self.domain})"

    @property
    def domain(self) -> str:
        """A name for the job's key that tells nothing about it: the ZAP domain of its servers."""
        return hashlib.blake2b(self._public, digest_size=8).hexdigest()

    def derived(self, purpose: str) -> bytes:
        """Give 32 bytes for ``purpose`` that only holders of this key can make, and that tell nothing about it."""
        return hashlib.blake2b(purpose.encode(), key=self._secret, digest_size=32).digest()

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read the key that ``generate`` wrote; ManifestError where the file is missing or holds something else."""
        try:
            secret = path.read_text("ascii").strip().encode("ascii")
            return cls(public=zmq.curve_public(secret), secret=secret)
        except (OSError, ValueError, zmq.ZMQError) as error:
            hint = "The file holds 40 characters, as `Keys.generate` writes them"
            raise ManifestError(
                f"the job's key cannot be read: {type(error).__name__}", where=str(path), hint=hint
            ) from error

    @classmethod
    def generate(cls, path: Path) -> Keys:
        """Make a new key and write it to ``path``, readable only by its owner; FileExistsError if there is one."""
        public, secret = zmq.curve_keypair()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
        return cls(public=public, secret=secret)

    def guard_server(self, socket: Socket) -> None:
        """Let only holders of this key connect to ``socket``; to be called before it is bound."""
        _GATE.admit(self.domain, self._public)
        socket.setsockopt(zmq.ZAP_DOMAIN, self.domain.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def guard_client(self, socket: Socket) -> None:
        """Make ``socket`` speak only to servers that hold this key; to be called before it connects."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)


class _Gate:
    """Answers zmq's question, for each new connection, whether that client key may come in."""

    def __init__(self) -> None:
        self._admitted: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._started = 0

    def admit(self, domain: str, public: bytes) -> None:
        """Let clients with the key ``public`` into ``domain``, from now on."""
        with self._lock:
            self._admitted[domain.encode()] = z85.decode(public)
            if self._started != os.getpid():
                socket = context().socket(zmq.REP)
                socket.setsockopt(zmq.LINGER, 0)
                socket.bind(_ZAP)
                threading.Thread(target=self._serve, args=(socket,), name="zap", daemon=True).start()
                self._started = os.getpid()

    def _serve(self, socket: Socket) -> None:
        while True:
            try:
                version, request, domain, _address, _identity, mechanism, *credentials = socket.recv_multipart()
            except zmq.ContextTerminated:
                socket.close()
                return
            known = mechanism == b"CURVE" and credentials == [self._admitted.get(domain)]
            verdict = (b"200", b"OK") if known else (b"400", b"not a key of this job")
            socket.send_multipart([version, request, *verdict, b"", b""])


_GATE = _Gate()
