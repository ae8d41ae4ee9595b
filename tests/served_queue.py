"""A queue that is served in processes that have installed packages."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from asyncflow.queue.blocking import BlockingQueue, connect


@contextmanager
def served(folder: Path, *flags: str, packages: Path, env: Mapping[str, str] | None = None) -> Iterator[BlockingQueue]:
    """Serve the queue of ``folder`` with the packages in a folder of theirs, and end it as Ctrl-C does."""
    path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    serving = subprocess.Popen(
        [sys.executable, "-m", "asyncflow", "queue", "serve", *flags, "--port", "0"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert serving.stdout is not None
        said = next(line for line in serving.stdout if "serving at " in line)
        with connect(said.partition("serving at ")[2].partition(": ")[0]) as queue:
            yield queue
        serving.send_signal(signal.SIGINT)
        rest, _ = serving.communicate(timeout=30)
        assert serving.returncode == 128 + signal.SIGINT, rest
    finally:
        serving.kill()
        serving.communicate()
