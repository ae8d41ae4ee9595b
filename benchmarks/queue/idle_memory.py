"""Resident memory of an idle controller and an idle unit."""

from __future__ import annotations

import argparse
import time

from report import SECURED
from samples import emit
from servers import servers


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("implementation")
    chosen = options.parse_args()
    with servers(secured=chosen.implementation == SECURED, bytes_per_unit="256Mi") as made:
        time.sleep(3.0)
        held = {name: round(mb, 1) for name, mb in made.resident_mb().items()}
    emit({"case": "idle memory", "implementation": chosen.implementation, "resident_MB": held})


if __name__ == "__main__":
    main()
