"""The rows of Parquet files and of folders that Hugging Face ``datasets`` saved, found again by their number.

Both are read as Arrow files mapped into memory. A Parquet file has no rows that could be read one by one, so its used
columns are written into such a file first, in a folder for what can be made again; ``datasets`` finds it there when the
same file is opened again. The package is imported where such a source is opened.

Invariant: what a row holds is JSON: a column of another type is refused when the source is opened, unless config.meta
leaves it out.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.data.files import FileConfig, Row, columns_used, empty
from asyncflow.errors import ManifestError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_BATCH = 1000


class Table:
    """The rows of a data set. Raises ManifestError for a column that is used and that JSON cannot hold."""

    def __init__(self, data: datasets.Dataset, config: FileConfig, *, name: str) -> None:
        self.name = name
        self.fields = list(data.column_names)
        used = columns_used(config, self.fields)
        _check_types(data.features.arrow_schema, used, name=name)
        self._data = data.select_columns(used).with_format("arrow")
        self._asked = [c for c in used if c in (config.prompt, config.prompt.partition(".")[0])] or used

    def scan(self) -> Iterator[Row]:
        """Yield the rows in order, with the column of the prompt; with all where there is no such column."""
        number = 0
        for batch in self._data.select_columns(self._asked).iter(_BATCH):
            for fields in batch.to_pylist():
                yield Row(number, f"{self.name}, row {number}", fields)
                number += 1

    def row(self, position: int) -> dict[str, Any]:
        """Return row ``position``."""
        row: dict[str, Any] = self._data[position].to_pylist()[0]
        return row


def open_parquet(path: Path, config: FileConfig, *, cache: Path, where: str) -> Table:
    """Open a Parquet file, or all ``*.parquet`` in a folder and below, in order of their paths.

    cache: folder for the Arrow file. Raises ManifestError where they cannot be read.
    """
    library = _library("parquet", where=where)
    parquet = importlib.import_module("pyarrow.parquet")
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ManifestError(f"there is no Parquet file at {path}", where=where, hint="Give a file, or a folder of them")
    try:
        if not any(parquet.read_metadata(file).num_rows for file in files):
            raise empty(str(path))
        columns = columns_used(config, parquet.read_schema(files[0]).names)
        paths = [str(file) for file in files]
        data = library.Dataset.from_parquet(paths, cache_dir=str(cache), columns=columns, batch_size=_BATCH)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = error.__cause__ or error
        raise ManifestError(
            f"cannot be read: {reason}", where=str(path), hint="Its files have to be Parquet, with the same columns"
        ) from error
    return Table(data, config, name=str(path))


def open_saved(path: Path, config: FileConfig, *, where: str) -> Table:
    """Open a folder that ``Dataset.save_to_disk`` wrote. Raises ManifestError where it is none, or holds several."""
    library = _library("dataset", where=where)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(file.parent.name for file in path.glob("*/state.json"))
        raise ManifestError(
            f"{path} holds the splits {', '.join(splits) or 'none'}", where=where, hint="Name one: dataset://PATH/SPLIT"
        )
    if not (path / "state.json").is_file():
        beside = sorted(file.parent.name for file in path.parent.glob("*/state.json"))
        near = f"; beside it: {', '.join(beside)}" if beside else ""
        raise ManifestError(
            f"{path} is no folder that save_to_disk of `datasets` wrote{near}",
            where=where,
            hint="Give one; Parquet files are opened by parquet://PATH",
        )
    try:
        data = library.load_from_disk(str(path), keep_in_memory=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"cannot be read: {error}", where=str(path), hint="Copy or save it again") from error
    return Table(data, config, name=str(path))


def _library(scheme: str, *, where: str) -> Any:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise ManifestError(
            f"`{scheme}://` needs the package datasets: {error}", where=where, hint="pip install 'asyncflow[data]'"
        ) from error
    library.disable_progress_bars()
    library.utils.logging.set_verbosity(logging.CRITICAL)
    return library


def _check_types(schema: pa.Schema, used: Sequence[str], *, name: str) -> None:
    types = importlib.import_module("pyarrow.types")
    if wrong := [field for field in schema if field.name in used and not _is_json(types, field.type)]:
        sound = [column for column in used if column not in {field.name for field in wrong}]
        raise ManifestError(
            f"column {wrong[0].name!r} is {wrong[0].type}, which JSON cannot hold",
            where=name,
            hint=f"List in config.meta the columns that the reward needs, of: {', '.join(sound) or 'none'}",
        )


def _is_json(types: Any, kind: Any) -> bool:
    if types.is_struct(kind):
        return all(_is_json(types, field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _is_json(types, kind.value_type)
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_boolean, types.is_integer)
    return types.is_floating(kind) or types.is_null(kind) or any(is_kind(kind) for is_kind in plain)
