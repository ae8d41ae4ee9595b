"""Functions of users: plain ones in processes that can be killed, awaited ones here; each row has its outcome."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from leased_batch import batch

from asyncflow.errors import DeadlineExceeded, ManifestError
from asyncflow.functions import find_function
from asyncflow.process import adopt_orphans
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.child import FunctionProcess
from asyncflow.tasks.functions import TaskFunction
from asyncflow.tasks.rows import OutputColumn, Result, RowFailure

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
LENGTH = OutputColumn(name="length", dtype="int32", most=4)


@asynccontextmanager
async def function(name: str, **more: Any) -> AsyncIterator[TaskFunction]:
    given: dict[str, Any] = {"config": {}, "outputs": (LENGTH,), **more}
    made = TaskFunction(f"functions_of_users:{name}", workdir=HERE, **given)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def said(results: list[Result]) -> list[object]:
    return [one.kind if isinstance(one, RowFailure) else one["length"].tolist() for one in results]


async def test_a_plain_function_is_called_in_a_process_of_its_own() -> None:
    async with function("seen", decode=lambda ids: "x" * len(ids)) as made:
        (process,) = made._alive
        assert process.pid != os.getpid()
        assert said(await made.compute(*batch(3))) == [[3, 0, 0, 4], [3, 1, 1, 4], [3, 2, 2, 4]]
    assert not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


async def test_what_it_is_given_is_its_own_and_what_it_prints_or_reads_is_not_the_pipe() -> None:
    rows, columns = batch(4)
    row = msgspec.structs.replace(rows[3], meta=msgspec.structs.replace(rows[3].meta, tags={"x": 2}))
    given = {name: Jagged.from_rows([column.row(3)], column.dtype) for name, column in columns.items()}
    async with function("plain", config={"reads": False}) as made:
        assert said(await made.compute([row], given)) == [[4, 1 + 2 + 3, 2, 4]]
        assert given["response_ids"].row(0).tolist() == [0, 1, 2]
        made._config = {"reads": True}
        (result,) = await made.compute([row], given)
        assert isinstance(result, RowFailure)
        assert "EOFError" in result.detail


async def test_a_process_that_says_something_else_is_asked_no_more() -> None:
    async with function("lengths") as made:
        (process,) = made._alive
        process._outputs = [OutputColumn(name="length", dtype="float64", most=4)]
        assert said(await made.compute(*batch(1))) == ["died"]
        assert not process.usable
        assert said(await made.compute(*batch(1))) == [[0]], "by another one"


async def test_an_async_function_is_awaited_here_many_at_once() -> None:
    async with function("together", config={"calls": 8, "more": 5}, parallel=8) as made:
        assert not made._alive
        found = await asyncio.gather(*(made.compute(*batch(2)) for _ in range(8)))
        assert [said(one) for one in found] == [[[5], [6]]] * 8
    async with function("awaited", config={"seconds": 60}, timeout_s=0.01) as made:
        assert said(await made.compute(*batch(1))) == ["timeout"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("odd_raises", "raised"),
        ("odd_exits", "raised"),
        ("awaited_odd_exits", "raised"),
        ("odd_dies", "died"),
        ("odd_is_wrong", "invalid"),
    ],
)
async def test_a_bad_row_takes_no_other_with_it(name: str, kind: str) -> None:
    async with function(name, timeout_s=30.0) as made:
        results = said(await made.compute(*batch(4)))
        assert [one if isinstance(one, str) else "done" for one in results] == ["done", kind, "done", kind]
        assert said(await made.compute(*batch(1))) != [kind], "it goes on in another process"


async def test_a_function_that_hangs_is_killed_at_its_deadline_with_what_it_started() -> None:
    adopt_orphans(enabled=True)
    before = set(psutil.Process().children())
    async with function("odd_hangs", timeout_s=0.5) as made:
        assert said(await made.compute(*batch(2))) == [[0], "timeout"]
    assert set(psutil.Process().children()) <= before, "no zombie either"


async def test_a_process_that_does_not_end_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(process: FunctionProcess) -> None:
        raise DeadlineExceeded(f"process {process.pid}, killed, did not end")

    async with function("lengths") as made:
        (process,) = made._alive
        process.kill()
        with monkeypatch.context() as patch:
            patch.setattr(FunctionProcess, "end", late)
            assert said(await made.compute(*batch(1))) == [[0]]
        await process.end()


async def test_a_group_is_given_whole_or_not_at_all() -> None:
    async with function("odd_raises", groups=True) as made:
        results = await made.compute(*batch(3))
        assert said(results) == ["raised"] * 3
        assert isinstance(results[0], RowFailure)
        assert "ValueError: an odd sample" in results[0].detail


async def test_what_cannot_be_called_is_refused_with_the_reason() -> None:
    for name, says in (("needs_more", "missing a required argument: 'other'"), ("absent", "has no function 'absent'")):
        with pytest.raises(ManifestError, match=says):
            async with function(name):
                pass
    find_function("functions_of_users:lengths", workdir=HERE, where="spec.tasks[0].function")
    with pytest.raises(ManifestError, match="no module 'nowhere'"):
        find_function("nowhere:lengths", workdir=HERE, where="spec.tasks[0].function")


async def test_a_program_that_ends_at_once_is_refused_with_the_place_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text("import sys\n\n\ndef end(rows, config):\n    return []\n\n\nsys.exit()\n")
    made = TaskFunction("ending:end", workdir=tmp_path, outputs=(LENGTH,), config={})
    with pytest.raises(
        ManifestError, match=r"spec\.tasks: 'ending:end' cannot be loaded: SystemExit \(ending\.py:8\)\. "
    ):
        await made.start()
    await made.close()


async def test_a_function_that_cannot_be_loaded_again_is_a_failure_of_its_rows(tmp_path: Path) -> None:
    module = tmp_path / "leaving.py"
    module.write_text("import os\n\n\ndef leave(rows, config):\n    os._exit(3)\n")
    made = TaskFunction("leaving:leave", workdir=tmp_path, outputs=(LENGTH,), config={})
    await made.start()
    module.unlink()
    ended = await made.compute(*batch(1))
    unloaded = await made.compute(*batch(1))
    await made.close()
    assert [result.kind for result in (*ended, *unloaded) if isinstance(result, RowFailure)] == ["died", "died"]
