"""``asyncflow.train`` with stand-ins for roles: ``standin_train.py STEPS PAUSE_S MANIFEST OUTPUT [RAISE_AT]``.

Prints as JSON what progress was told, what came of the run, and whether logging and signals are the caller's again.
"""

import json
import logging
import signal
import sys

from standin_launcher import install

import asyncflow
from asyncflow.errors import AsyncFlowError

steps, pause_s, manifest, output, *raise_at = sys.argv[1:]
install(steps, pause_s)
logging.basicConfig(level=logging.INFO)
handlers = logging.getLogger().handlers[:]
seen = []


def progress(status):
    seen.append(status.step)
    if raise_at and status.step >= int(raise_at[0]):
        sys.exit("that is enough")


def on_term(number, frame):
    pass


came = {}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
signal.signal(signal.SIGTERM, on_term)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
try:
    came["summary"] = asyncflow.train(asyncflow.load(manifest), output=output, progress=progress)
except (AsyncFlowError, SystemExit, KeyboardInterrupt) as error:
    came["error"] = type(error).__name__, str(error)
came["seen"] = seen
came["logging"] = logging.getLogger().handlers == handlers and logging.getLogger().level == logging.INFO
kept = map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
came["signals"] = list(kept) == [signal.default_int_handler, on_term, signal.SIG_IGN]
sys.stdout.write(json.dumps(came))
