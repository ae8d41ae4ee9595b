"""Process of an environment: ``python -P -m asyncflow.environments.child``, run and confined like a reward process."""

from __future__ import annotations

from pathlib import Path

from asyncflow.environments.functions import load
from asyncflow.rewards.child import serve

if __name__ == "__main__":
    serve(lambda request: load(request.function, workdir=Path(request.workdir), config=request.config))
