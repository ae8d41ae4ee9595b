"""A program that watches the pods of a namespace and prints the time, name and phase of each change.

python benchmarks/operator/onlooker.py KUBECONFIG NAMESPACE
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.kinds import POD


async def main(kubeconfig: Path, namespace: str) -> None:
    api = await Api.connect(kubeconfig=kubeconfig, connections=8)
    page = [page async for page in api.pages(POD, namespace=namespace)][-1]
    version = page["metadata"]["resourceVersion"]
    print("watching", flush=True)
    while True:
        async for changes in api.watch(POD, since=version, namespace=namespace, idle_s=300.0):
            now = time.time()
            for change in changes:
                raw = change["object"]
                version = raw["metadata"]["resourceVersion"]
                if change["type"] == "BOOKMARK":
                    continue
                phase = "Deleted" if change["type"] == "DELETED" else raw["status"]["phase"]
                print(f"{now:.3f} {raw['metadata']['name']} {phase}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
