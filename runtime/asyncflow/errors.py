"""The error tree: every error says what was wrong, where, and what to do.

    AsyncFlowError
    ├── ManifestError            a manifest or an option is wrong: exit code 2, nothing was started
    │   └── NotYetError          the contract names it, this version does not do it
    ├── DeadlineExceeded         something that was waited for did not come in time
    ├── PeerLost                 the connection to a peer went away with calls in flight: try again
    ├── Elsewhere                not here, or not here any more: the controller knows where
    ├── Refused                  the other side understood and said no
    │   ├── Fenced               the caller belongs to an older attempt or an expired lease
    │   ├── StaleHandle          the row, version or lease named does not exist any more
    │   │   └── RowsLost         rows of a step that had begun are gone: the process must begin the step again
    │   └── Misdirected          another controller of the queue decides about it
    ├── ProtocolError            bytes that do not follow the protocol
    ├── RemoteError              a handler on the other side failed unexpectedly
    ├── LedgerCorrupt            a ledger record that was acknowledged cannot be read back
    ├── CheckpointError          a checkpoint is missing, incomplete or does not fit the job
    ├── Diverged                 training makes no progress any more: gradients are not finite
    ├── DiskError                a file cannot be read or written now: try again
    └── RoleFailed               a role ended when it should not have, and its restarts are used up

Invariant: an error that crosses a socket arrives as the same class with the same words (``to_wire``, ``from_wire``).
"""

from __future__ import annotations

from typing import ClassVar


class AsyncFlowError(Exception):
    """Base of all errors that AsyncFlow raises on purpose.

    what: what was wrong, with the offending value; where: path, role, address or field; hint: what to do; told: another
    process said so.
    """

    code: ClassVar[str] = "error"
    told = False

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
    """The contract names a feature that this version does not have."""

    code = "not_yet"


class DeadlineExceeded(AsyncFlowError):
    """Something that was waited for did not come in time."""

    code = "deadline"


class PeerLost(AsyncFlowError):
    """The connection to a peer went away with calls in flight; the call may be tried again."""

    code = "peer_lost"


class Elsewhere(AsyncFlowError):
    """The rows asked for are not here, or nothing new is taken here any more; the controller knows where they are."""

    code = "elsewhere"


class Refused(AsyncFlowError):
    """The other side understood and said no."""

    code = "refused"


class Fenced(Refused):
    """The caller belongs to an older attempt, or its lease has ended."""

    code = "fenced"


class StaleHandle(Refused):
    """The row, version or lease named does not exist any more."""

    code = "stale_handle"


class RowsLost(StaleHandle):
    """Rows of a step that had begun were lost with their storage unit: the step must be begun again."""

    code = "rows_lost"


class Misdirected(Refused):
    """Another controller of the queue decides about this; ``where`` ends with its number."""

    code = "misdirected"

    @classmethod
    def at(cls, controller: int, what: str) -> Misdirected:
        """Make the error that sends the caller to ``controller``."""
        return cls(what, where=f"controller {controller}", hint="Ask that one")

    @property
    def controller(self) -> int:
        """The number of the controller to ask."""
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
    """Training makes no progress any more: the gradients of several steps in a row are not finite."""

    code = "diverged"


class DiskError(AsyncFlowError):
    """A file cannot be read or written now; it may be possible later."""

    code = "disk"


class RoleFailed(AsyncFlowError):
    """A role ended when it should not have, and its restarts are used up."""

    code = "role_failed"


def _tree(root: type[AsyncFlowError]) -> list[type[AsyncFlowError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {error.code: error for error in _tree(AsyncFlowError)}


def from_wire(fields: dict[str, str]) -> AsyncFlowError:
    """Make again the error that ``to_wire`` described; an unknown code becomes a RemoteError."""
    kind = _BY_CODE.get(fields.get("code", ""), RemoteError)
    error = kind(fields.get("what", "unknown error"), where=fields.get("where", ""), hint=fields.get("hint", ""))
    error.told = True
    return error
