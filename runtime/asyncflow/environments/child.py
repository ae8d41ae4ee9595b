"""An environment's process: ``python -P -m asyncflow.environments.child``, told and confined as a reward process is."""

from __future__ import annotations

from pathlib import Path

from asyncflow.environments.functions import load
from asyncflow.rewards.child import serve

if __name__ == "__main__":
    serve(lambda told: load(told.function, workdir=Path(told.workdir), config=told.config))
