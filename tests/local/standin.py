"""A stand-in for a role: ``standin.py BEHAVIOUR... -- REPLICA ATTEMPT``, which ends with its parent as real ones do."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from asyncflow.process import die_with_parent

die_with_parent()
behaviours, (replica, attempt) = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
stopping = False


def on_term(*_: object) -> None:
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, on_term)
sys.stdout.write(f"{replica} attempt {attempt} says hello\n")
sys.stdout.flush()
pids = [os.getpid()]
for behaviour in behaviours:
    name, _, value = behaviour.partition("=")
    match name:
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "children":
            pids.append(subprocess.Popen(sleep).pid)
            pids.append(subprocess.Popen(sleep, env={}).pid)
            pids.append(subprocess.Popen(sleep, start_new_session=True).pid)
        case "listen":
            server = socket.create_server(("127.0.0.1", int(value)))
        case "exit":
            Path(f"{replica}.{attempt}.json").write_text(json.dumps(pids))
            sys.exit(int(value))
        case "crash-below":
            if int(attempt) < int(value):
                sys.exit(f"attempt {attempt} crashes")
        case "done-after":
            Path(f"{replica}.{attempt}.json").write_text(json.dumps(pids))
            time.sleep(float(value))
            sys.exit(0)
Path(f"{replica}.{attempt}.tmp").write_text(json.dumps(pids))
Path(f"{replica}.{attempt}.tmp").rename(f"{replica}.{attempt}.json")
while not stopping:
    time.sleep(0.02)
with Path("ended.txt").open("a") as ended:
    ended.write(f"{replica}\n")
