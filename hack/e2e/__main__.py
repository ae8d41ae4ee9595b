"""``python -m e2e``: run the end-to-end test; exit with 0 if every check held. Needs root (see ``node.machine``)."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from e2e import story
from e2e.scene import SYSTEM, Scene
from e2e.transcript import Transcript
from images.python import ImageError
from images.recipes import ROOT
from kube.build import BuildError
from kube.process import PlaneError
from node import machine
from node.node import Node

_CHAPTERS: Final = (story.load_images, story.install, story.train, story.disturb, story.clean)


def main() -> int:
    """Run the chapters on a fresh node."""
    parser = argparse.ArgumentParser(prog="e2e", description="Run the end-to-end test on a real node. Needs root.")
    parser.add_argument("--transcript", type=Path, default=ROOT / "runs" / "e2e.txt", help="file for the transcript")
    transcript = Transcript(parser.parse_args().transcript)
    began = time.monotonic()
    try:
        transcript.chapter("A node")
        with Node(audited=True, say=transcript.say) as node:
            folder = node.folder
            scene = Scene(node, transcript)
            try:
                for chapter in _CHAPTERS:
                    chapter(scene)
            except (PlaneError, subprocess.SubprocessError) as error:
                _autopsy(scene, error)
        transcript.chapter("The machine afterwards")
        left = machine.left(folder)
        transcript.check("links, routes, control groups, mounts and processes of the node", holds=not left, found=left)
    except (BuildError, ImageError, PlaneError) as error:
        transcript.check("the node and its images", holds=False, found=error)
    transcript.say(f"{time.monotonic() - began:.0f} s in all")
    return transcript.end()


def _autopsy(scene: Scene, error: Exception) -> None:
    """Record why the test ended early, with the output of commands that help to find the cause."""
    scene.transcript.check("the story goes on", holds=False, found=error)
    for look in (
        ("get", "pods", "--all-namespaces", "--output", "wide"),
        ("get", "events", "--all-namespaces", "--sort-by", ".lastTimestamp"),
        ("get", "rlj", "--all-namespaces", "--output", "wide"),
        ("--namespace", SYSTEM, "logs", "deployment/asyncflow-operator", "--tail", "40"),
    ):
        try:
            scene.kubectl(*look)
        except PlaneError as refused:
            scene.transcript.say(str(refused))


if __name__ == "__main__":
    sys.exit(main())
