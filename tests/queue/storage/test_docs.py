"""The back end that the guide shows is a back end."""

import re
from pathlib import Path

from asyncflow.queue.storage.backend import Place, Site
from asyncflow.queue.values import encode
from asyncflow.rpc.columns import Jagged

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "queue-backends.md"


async def test_the_store_of_the_guide_gives_back_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLS", str(tmp_path))
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names = {}
    exec(source, names)
    for incarnation in ("first", "second"):
        site = Site(unit=3, incarnation=incarnation, host="127.0.0.1", find=lambda *_: None)
        backend = names["FolderBackend"].made(site)
        await backend.open()
        assert list(tmp_path.iterdir()) == []
        put = {"x": Jagged.from_rows([[1, 2], [], [3]], "int64"), "y": encode(["a", "b", ""])}
        await backend.put(1, put)
        assert await backend.get([Place(1, row) for row in range(3)], ["y", "x"]) == put
        await backend.free([Place(1, 0)], ["x", "y"])
        assert len(list(tmp_path.iterdir())) == 2
        await backend.close()
