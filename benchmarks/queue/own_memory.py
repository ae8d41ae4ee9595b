"""Resident memory of a controller and a unit that have nothing to do."""

from __future__ import annotations

import argparse
import time

from lines import emit
from servers import servers


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--keys", action="store_true")
    chosen = options.parse_args()
    with servers(keys=chosen.keys, bytes_per_unit="256Mi") as made:
        time.sleep(3.0)
        held = {name: round(mb, 1) for name, mb in made.resident_mb().items()}
    emit({"bench": "memory", "peer": "asyncflow", "keys": chosen.keys, "resident_MB": held})


if __name__ == "__main__":
    main()
