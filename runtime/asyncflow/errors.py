"""The error hierarchy: every error states what is wrong, where, and what to do.

    AsyncFlowError
    ├── ManifestError            a manifest or an option is wrong: exit code 2, nothing was started
    │   └── NotYetError          the contract defines a feature that this version does not implement
    ├── DeadlineExceeded         an awaited event did not happen before its deadline
    ├── PeerLost                 the connection to a peer broke during a call: retry
    ├── WrongUnit                the rows are at another unit, or this unit no longer accepts new rows
    ├── Refused                  the peer understood the request and refused it
    │   ├── Fenced               the caller belongs to an older attempt, or its lease has expired
    │   ├── StaleHandle          the named row, version or lease no longer exists
    │   │   └── RowsLost         rows of a started step were lost: the caller must restart the step
    │   └── Misdirected          another controller of the queue is responsible for the request
    ├── ProtocolError            bytes that do not follow the protocol
    ├── RemoteError              a handler on the other side failed unexpectedly
    ├── LedgerCorrupt            a ledger record that was acknowledged cannot be read back
    ├── CheckpointError          a checkpoint is missing, incomplete or does not fit the job
    ├── Diverged                 training no longer makes progress: gradients are not finite
    ├── DiskError                a file cannot be read or written at present: retry
    └── RoleFailed               a role ended unexpectedly, and may not be restarted again

Invariant: an error that crosses a socket arrives as the same class with the same text (``to_wire``, ``from_wire``).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import ClassVar


class AsyncFlowError(Exception):
    """Base of all errors that AsyncFlow raises on purpose.

    what: the problem, with the offending value; where: the path, role, address or field; hint: the remedy; from_peer:
    whether the error was received from another process.
    """

    code: ClassVar[str] = "error"
    from_peer = False

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.hint}" if self.hint else head

    def to_wire(self) -> dict[str, str]:
        """Return the error as plain strings."""
        return {"code": self.code, "what": self.what, "where": self.where, "hint": self.hint}


class ManifestError(AsyncFlowError):
    """A manifest or an option is wrong."""

    code = "manifest"


class NotYetError(ManifestError):
    """The contract defines a feature that this version does not implement."""

    code = "not_yet"


class DeadlineExceeded(AsyncFlowError):
    """An awaited event did not happen before its deadline."""

    code = "deadline"


class PeerLost(AsyncFlowError):
    """The connection to a peer broke during a call; the call may be retried."""

    code = "peer_lost"


class WrongUnit(AsyncFlowError):
    """The rows are at another unit (the controller knows which), or this unit no longer accepts new rows."""

    code = "elsewhere"


class Refused(AsyncFlowError):
    """The peer understood the request and refused it."""

    code = "refused"


class Fenced(Refused):
    """The caller belongs to an older attempt, or its lease has expired."""

    code = "fenced"


class StaleHandle(Refused):
    """The named row, version or lease no longer exists."""

    code = "stale_handle"


class RowsLost(StaleHandle):
    """Rows of a started step were lost with their storage unit; the step must be restarted."""

    code = "rows_lost"


class Misdirected(Refused):
    """Another controller of the queue is responsible for the request; ``where`` ends with its number."""

    code = "misdirected"

    @classmethod
    def at(cls, controller: int, what: str) -> Misdirected:
        """Return the error that directs the caller to ``controller``."""
        return cls(what, where=f"controller {controller}", hint="Ask that one")

    @property
    def controller(self) -> int:
        """The number of the responsible controller."""
        return int(self.where.rpartition(" ")[2])


class ProtocolError(AsyncFlowError):
    """Bytes that do not follow the protocol."""

    code = "protocol"


class RemoteError(AsyncFlowError):
    """A handler on the other side failed unexpectedly; its log has the traceback."""

    code = "remote"


class LedgerCorrupt(AsyncFlowError):
    """A ledger record that was acknowledged cannot be read back."""

    code = "ledger_corrupt"


class CheckpointError(AsyncFlowError):
    """A checkpoint is missing, incomplete or does not fit the job."""

    code = "checkpoint"


class Diverged(AsyncFlowError):
    """Training no longer makes progress: the gradients of several consecutive steps are not finite."""

    code = "diverged"


class DiskError(AsyncFlowError):
    """A file cannot be read or written at present; a retry may succeed."""

    code = "disk"


class RoleFailed(AsyncFlowError):
    """A role ended unexpectedly, and may not be restarted again."""

    code = "role_failed"


def _tree(root: type[AsyncFlowError]) -> list[type[AsyncFlowError]]:
    return [root, *(error for child in root.__subclasses__() for error in _tree(child))]


_BY_CODE = {error.code: error for error in _tree(AsyncFlowError)}


def from_wire(fields: dict[str, str]) -> AsyncFlowError:
    """Return the error that ``to_wire`` described; an unknown code becomes a RemoteError."""
    kind = _BY_CODE.get(fields.get("code", ""), RemoteError)
    error = kind(fields.get("what", "unknown error"), where=fields.get("where", ""), hint=fields.get("hint", ""))
    error.from_peer = True
    return error


def in_one_line(error: BaseException, *, folder: Path) -> str:
    """Return an error of a user's code in one line, with the last place of its traceback in a file below ``folder``."""
    if isinstance(error, AsyncFlowError):
        return str(error)
    (what,) = traceback.format_exception_only(error)[-1:]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    own = [(Path(file), line) for file, line in places if Path(file).is_relative_to(folder)]
    return f"{what.strip()} ({own[-1][0].relative_to(folder)}:{own[-1][1]})" if own else what.strip()
