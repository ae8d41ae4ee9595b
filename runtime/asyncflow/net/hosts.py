"""Which host others dial to reach a socket that is bound here.

Invariant: an address that is given to others never says "all interfaces".
"""

from __future__ import annotations

import socket

from asyncflow.errors import Refused

_ALL = ("0.0.0.0", "*", "")  # noqa: S104 - these are compared with, not bound to


def dialled(bound: str, advertise: str = "") -> str:
    """Give ``advertise`` if it is set, else ``bound``, or this machine's own address if that is all interfaces.

    Raises Refused where this machine's own name has no address.
    """
    if advertise or bound not in _ALL:
        return advertise or bound
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        hint = "Say which address others dial (advertise)"
        raise Refused(f"this machine's name {name!r} has no address: {error}", hint=hint) from error
