"""Write prepared objects by server-side apply as fast as possible: the baseline of ``scale.py``.

    python benchmarks/operator/bare.py KUBECONFIG MANIFESTS.jsonl

Each line of the file is one job: a list of stages, each a list of objects. The program uses the operator's own client,
and as many concurrent jobs and actions as the operator, so the difference is the operator's work other than writing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from asyncflow_operator.cluster.apply import AT_ONCE
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.kinds import BY_NAME

JOBS_AT_ONCE = 16


async def main(kubeconfig: Path, jobs: list[Any]) -> None:
    api = await Api.connect(kubeconfig=kubeconfig, connections=64)
    slots = asyncio.Semaphore(JOBS_AT_ONCE)
    await asyncio.gather(*(write(api, stages, slots) for stages in jobs))
    await api.close()


async def write(api: Api, stages: list[list[dict[str, Any]]], slots: asyncio.Semaphore) -> None:
    actions = asyncio.Semaphore(AT_ONCE)

    async def one(manifest: dict[str, Any]) -> None:
        async with actions:
            namespace = manifest["metadata"]["namespace"]
            await api.apply(BY_NAME[manifest["kind"]], namespace, manifest, force=True)

    async with slots:
        for stage in stages:
            await asyncio.gather(*(one(manifest) for manifest in stage))


if __name__ == "__main__":
    lines = Path(sys.argv[2]).read_text().splitlines()
    asyncio.run(main(Path(sys.argv[1]), [json.loads(line) for line in lines]))
