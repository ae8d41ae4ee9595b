"""Loader of Mooncake's library, whose Store holds cells of the queue and whose Transfer Engine moves weights.

Invariant: the environment variables that Mooncake reads when it is loaded are set before, unless the user has set them.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from asyncflow.errors import ManifestError

_ENVIRONMENT = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}


def load_mooncake(part: str, *, where: str, log_level: int) -> ModuleType:
    """Import a part of Mooncake, ``mooncake.store`` or ``mooncake.engine``.

    where: the field of the manifest that requires it; log_level: the lowest level that it logs (2: errors, 3: fatal
    errors). Raises ManifestError if it is not installed.
    """
    for name, value in {**_ENVIRONMENT, "GLOG_minloglevel": str(log_level)}.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(part)
    except ImportError as error:
        hint = "Run pip install 'asyncflow[mooncake]', and the system's libibverbs1, libnuma1 and libcurl4"
        raise ManifestError(f"Mooncake cannot be loaded: {error}", where=where, hint=hint) from error
