"""``python -m images NAME...``: build images; with ``--save FOLDER``, write each as an OCI layout in one tar."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from images.python import ImageError
from images.recipes import RECIPES, image
from kube.build import BuildError


def main() -> int:
    """Build the images that the command line names, and print a line about each."""
    parser = argparse.ArgumentParser(description="Build OCI images from locally installed files.")
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--save", type=Path, help="folder for NAME.tar, which `ctr images import` reads")
    arguments = parser.parse_args()
    try:
        for name in arguments.names:
            began = time.monotonic()
            made = image(name)
            if arguments.save is not None:
                arguments.save.mkdir(parents=True, exist_ok=True)
                with (arguments.save / f"{name}.tar").open("wb") as out:
                    made.write(out)
            size = sum(layer.size for layer in made.layers) / 1e6
            print(f"{made.name}  {size:,.0f} MB in {len(made.layers)} layers, {time.monotonic() - began:.1f} s")
    except (ImageError, BuildError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
