"""A role of a run that is about the command line: the driver answers with a status a step, the others wait for it.

Where the number of steps is negative, the trainer refuses its input. A pause is so many seconds, or "asked": until
somebody has been told of the step.
"""

import http.server
import json
import signal
import sys
import threading
import time
from pathlib import Path

from asyncflow.process import die_with_parent

die_with_parent()
role, port, workdir, steps, pause_s = sys.argv[1:6]
if int(steps) < 0 and role == "trainer":
    sys.stderr.write("spec.trainer: it cannot be\n")
    sys.exit(2)
if role != "driver":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while not (Path(workdir) / "summary.json").exists():
        time.sleep(0.05)
    sys.exit(0)

from asyncflow.api.status import DriverStatus  # noqa: E402  the others need none of it

status = DriverStatus(phase="Starting", steps=int(steps))
told: set[int] = set()


def pause(step: int) -> None:
    """Wait as long as a step takes."""
    while pause_s == "asked" and step not in told:
        time.sleep(0.02)
    if pause_s != "asked":
        time.sleep(float(pause_s))


class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer, known = status, self.path == "/v1/status"
        body = answer.model_dump_json(by_alias=True).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if known:
            told.add(answer.step)

    def log_message(self, *_: object) -> None: ...


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Service)
threading.Thread(target=server.serve_forever, daemon=True).start()
for step in range(1, int(steps) + 1):
    pause(step - 1)
    with (Path(workdir) / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": step}) + "\n")
    status = DriverStatus(
        phase="Running", step=step, steps=int(steps), reward=step / 10, tokens_per_second=1234.5, eta_seconds=90
    )
if int(steps) < 0:
    time.sleep(60)
pause(int(steps))
summary = {"steps": int(steps), "wall_s": 3.5, "reward_first": 0.1, "reward_last": 0.5, "idle_share": {"rollout": 0.25}}
(Path(workdir) / "summary.json").write_text(json.dumps(summary))
