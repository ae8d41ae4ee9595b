"""A publisher and its followers, over real sockets: each newer model is a version, and nothing else is."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncflow.api.weights import WeightSync
from asyncflow.errors import ManifestError
from asyncflow.identity import Version
from asyncflow.local.placement import PortReservation
from asyncflow.models.folder import whole_folder
from asyncflow.models.stored import ModelWatch
from asyncflow.roles import publisher
from asyncflow.roles.context import RoleOptions, SyncContext
from asyncflow.weights.follower import Follower, follow

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(90)]

WITHIN_S = 60.0
SETTLE_S = 0.1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "POLL_S", 0.02)
    monkeypatch.setattr(publisher, "ModelWatch", partial(ModelWatch, settle_s=SETTLE_S))


def write(folder: Path, value: float, *, rows: int = 4) -> None:
    """Write a model, all of whose numbers are ``value`` but a large tensor, which never changes."""
    with whole_folder(folder, replace=True) as made:
        (made / "config.json").write_text("{}")
        tensors = {"w": np.full((rows, 3), value, np.float32), "large": np.arange(1 << 16, dtype=np.float32)}
        save_file(tensors, made / "model.safetensors")


class Published:
    """A publisher in this process. http: port of its metrics and status."""

    def __init__(self, address: str, http: int, task: asyncio.Task[None]) -> None:
        self.address, self.http, self.task = address, http, task

    async def status(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.http}/v1/status"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            said: dict[str, Any] = await answer.json()
            return said

    async def until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        async with asyncio.timeout(WITHIN_S):
            while True:
                with contextlib.suppress(aiohttp.ClientConnectorError):  # it may not serve yet
                    if holds(status := await self.status()):
                        return status
                await asyncio.sleep(0.02)

    async def until_waits(self, words: str) -> None:
        await self.until(lambda status: words in status["waitingFor"])


@asynccontextmanager
async def publishing(tmp_path: Path, ports: list[int], *, attempt: int = 0, **spec: Any) -> AsyncIterator[Published]:
    sync = WeightSync.model_validate({"metadata": {"name": "weights"}, "spec": spec})
    address, http = f"tcp://127.0.0.1:{ports[0]}", ports[1 + attempt]
    options = RoleOptions(
        role="publisher",
        job=tmp_path / "weights.yaml",
        driver=address,
        index=0,
        attempt=attempt,
        workdir=tmp_path,
        http_port=http,
    )
    context = SyncContext(options=options, resource=sync)
    task = asyncio.create_task(publisher.serve(context))
    yield Published(address, http, task)
    context.stopping.set()
    async with asyncio.timeout(WITHIN_S):
        await task


async def taken(versions: Follower) -> tuple[Version, float]:
    async with asyncio.timeout(WITHIN_S):
        version, tensors = await anext(versions)
    return version, float(tensors["w"][0, 0])


async def test_each_newer_model_of_a_watched_folder_reaches_its_followers(tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    with PortReservation(2) as ports:
        source = {"model": str(folder), "watch": True}
        async with publishing(tmp_path, ports, source=source) as published, follow(published.address) as versions:
            await published.until_waits("config.json is missing")
            write(folder / "step-10", 1.0)
            assert await taken(versions) == (Version(0, 10), 1.0)
            write(folder / "step-20", 2.0)
            assert await taken(versions) == (Version(0, 20), 2.0)
            write(folder / "step-30", 3.0, rows=5)
            await published.until_waits("step-30 has other tensors than the previous version")
            write(folder / "step-40", 2.0)
            write(folder / "step-50", 5.0)
            while (newest := await taken(versions)) == (Version(0, 40), 2.0):
                pass  # it was looked for between the two
            assert newest == (Version(0, 50), 5.0)
            last = versions.receiver.transfers[-1]
            assert (last.sent, last.faults) == (4 * 3 * 4, 0), "what has not changed does not travel"
            status = await published.until(
                lambda status: status["versions"]["followers"] == 1 and status["versions"]["seconds"]["publish"]
            )
            assert status["version"] == 50
            assert status["versions"]["bytes"] == 4 * 3 * 4 + 4 * (1 << 16)


async def test_followers_pull_from_each_other_and_versions_go_when_keep_says_so(tmp_path: Path) -> None:
    write(tmp_path / "model", 0.0)
    source = {"model": str(tmp_path / "model"), "watch": True}
    with PortReservation(2) as ports:
        async with (
            publishing(tmp_path, ports, source=source, keep=1) as published,
            follow(published.address) as first,
            follow(published.address) as second,
        ):
            for value in (0.0, 1.0, 2.0):
                write(tmp_path / "model", value)
                for versions in (first, second):
                    assert (await taken(versions))[1] == value
            async with follow(published.address) as late:
                assert await taken(late) == (Version(0, 2), 2.0)
                holders = late.receiver.transfers[-1].holders
                assert all(worker.startswith("follower-") for worker in holders), holders
                assert [known.version for known in late.receiver.view.versions] == [Version(0, 2).packed]


async def test_a_model_that_stays_is_one_version_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "model", 1.5)
    source = {"model": str(tmp_path / "model")}
    with PortReservation(2) as ports:
        async with (
            publishing(tmp_path, ports, source=source, dtype="bfloat16") as published,
            follow(published.address) as versions,
        ):
            async with asyncio.timeout(WITHIN_S):
                version, tensors = await anext(versions)
            assert (version, tensors["w"].dtype) == (Version(0, 0), np.uint16)
            assert (tensors["w"].astype(np.uint32) << 16).view(np.float32)[0, 0] == 1.5


async def test_a_follower_goes_on_with_the_publisher_that_comes_again(tmp_path: Path) -> None:
    write(tmp_path / "model", 1.0)
    source = {"model": str(tmp_path / "model")}
    with PortReservation(3) as ports:
        async with publishing(tmp_path, ports, source=source) as published:
            following = follow(published.address)
            versions = await following.__aenter__()
            assert await taken(versions) == (Version(0, 0), 1.0)
        async with publishing(tmp_path, ports, attempt=1, source=source):
            assert await taken(versions) == (Version(1, 0), 1.0)
            assert versions.receiver.transfers[-1].sent == 0, "the bytes are here already"
            async with asyncio.timeout(WITHIN_S):
                while versions.receiver.nbytes > versions.receiver.transfers[-1].nbytes:
                    await asyncio.sleep(0.02)
            await following.__aexit__(None, None, None)


@pytest.mark.parametrize("lacks", ["config.json", "model.safetensors", ""])
async def test_a_model_that_stays_and_is_not_whole_is_refused_at_once(tmp_path: Path, lacks: str) -> None:
    folder = tmp_path / "model"
    write(folder, 1.0)
    if lacks:
        (folder / lacks).unlink()
    else:
        shutil.rmtree(folder)
    with PortReservation(2) as ports, pytest.raises(ManifestError, match=r"has no (weights|config)"):
        async with publishing(tmp_path, ports, source={"model": str(folder)}) as published:
            await asyncio.wait([published.task], timeout=WITHIN_S)
