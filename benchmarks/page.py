"""Measure the loading time of the page of a long run: ``make page``.

The project's own recorder and journal write a synthetic run, ``asyncflow ui`` serves it, and headless Chromium opens
it. Measured are the times until the curves and until the timeline with its causes are drawn; the limit is 3 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from made_run import make_run
from playwright.sync_api import sync_playwright

import browser as chromium

BAR_S = 3.0


def main() -> int:
    """Run the benchmark and print the result; return 1 if the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "made"
        started = time.monotonic()
        make_run(run, rollouts=options.rollouts, seconds=60 * options.minutes)
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        print(f"made in {time.monotonic() - started:.1f} s: {size / 1e6:.1f} MB")
        print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        worst = max(_opened(run) for _ in range(options.repeats))
    print(f"slowest opening {worst:.2f} s, bar {BAR_S} s")
    return int(worst > BAR_S)


def _opened(run: Path) -> float:
    """Start a server for ``run``, open its page, and return the seconds until the timeline is drawn."""
    command = [sys.executable, "-m", "asyncflow", "ui", str(run)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving,
        sync_playwright() as playwright,
    ):
        try:
            assert serving.stdout is not None
            url = serving.stdout.readline().split()[-1]
            browser = playwright.chromium.launch(executable_path=chromium.find(), args=chromium.FLAGS)
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            started, used = time.monotonic(), _cpu_s()
            page.goto(url)
            page.wait_for_selector("#curves svg path")
            curves = time.monotonic() - started
            page.wait_for_selector("#tracks canvas")
            whole, spent = time.monotonic() - started, _cpu_s() - used
            browser.close()
        finally:
            serving.terminate()
    print(f"curves after {curves:.2f} s, timeline after {whole:.2f} s; {spent:.2f} s of CPU, server and browser")
    return whole


def _cpu_s() -> float:
    """Return the CPU time of all descendants of this process, in seconds."""
    children = psutil.Process().children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in children)


if __name__ == "__main__":
    sys.exit(main())
