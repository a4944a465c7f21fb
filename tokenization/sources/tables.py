"""Rows of CSV, TSV, Parquet and Arrow files, as dictionaries."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from tokenization.corpus import Unreadable
from tokenization.documents import key_of

Row = dict[str, Any]
LONGEST_CELL = 1_000_000_000  # characters
ROWS_AT_A_TIME = 64  # of Parquet: a row may be a book


def csv_rows(file: BinaryIO) -> Iterator[Row]:
    """Of UTF-8. The separator is the one of comma, semicolon and tab that the first line has most of."""
    csv.field_size_limit(LONGEST_CELL)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        header = text.readline()
        separator = max(",;\t", key=header.count)
        names = next(csv.reader([header], delimiter=separator), [])
        yield from csv.DictReader(text, names, delimiter=separator)
    except (csv.Error, UnicodeDecodeError) as error:
        raise Unreadable(f"it is not a whole table ({error})") from None


def parquet_rows(file: BinaryIO, key: str) -> Iterator[Row]:
    """With the column of the text alone, if there is one."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        column = key_of(table.schema_arrow.names, key)
        for batch in table.iter_batches(ROWS_AT_A_TIME, columns=[column] if column else None):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(error, "Parquet") from None


def arrow_rows(file: BinaryIO) -> Iterator[Row]:
    """Of an IPC stream, which `datasets` writes, or an IPC file."""
    from pyarrow import ArrowException, ipc

    try:
        try:
            reader = ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        except ArrowException:
            file.seek(0)
            batches = ipc.open_stream(file)
        for batch in batches:
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise damaged(error, "Arrow") from None


def damaged(error: Exception, kind: str) -> Exception:
    """Errors of a download are of a kind of their own, and another try may succeed."""
    if isinstance(error, OSError) and type(error) is not OSError:
        return error
    return Unreadable(f"it is not a whole {kind} file ({error})")
