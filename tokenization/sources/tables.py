"""Read rows of CSV, TSV, Parquet and Arrow files as dictionaries."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from tokenization.corpus import UnreadableError
from tokenization.documents import BadRecord, find_text_key

Row = dict[str, Any]
MAX_CELL_CHARACTERS = 1_000_000_000
MAX_NAME_CHARACTERS = 60  # of a column
PARQUET_BATCH_ROWS = 64  # a row may be a book


def read_csv(file: BinaryIO) -> Iterator[Row | BadRecord]:
    """Yield the rows of a UTF-8 file. The separator is the most frequent of comma, semicolon, tab and bar in
    the first line, which names the columns."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    header = text.readline()
    separator = max(",;\t|", key=header.count)
    names = next(csv.reader([header], delimiter=separator), [])
    if any(len(name) > MAX_NAME_CHARACTERS for name in names):
        raise UnreadableError("its first line is a text, but should name the columns")
    rows = csv.reader(text, delimiter=separator, strict=True)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield BadRecord(f"line {rows.line_num + 1}", f"its quotes are not closed as in a table ({error})")
            continue
        except UnicodeDecodeError as error:
            raise UnreadableError(f"it is a damaged table ({error})") from None
        if row is None:
            return
        if len(row) > len(names):
            reason = (
                f"it has {len(row)} fields, not {len(names)} as the first line; a text with '{separator}' needs quotes"
            )
            yield BadRecord(f"line {rows.line_num + 1}", reason)
        elif row:
            yield dict(zip(names, row, strict=False))


def read_parquet(file: BinaryIO, key: str) -> Iterator[Row]:
    """Yield the rows, with only the text column if it is known."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        column = find_text_key(table.schema_arrow.names, key)
        for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[column] if column else None):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise _table_error(error, "Parquet") from None


def read_arrow(file: BinaryIO) -> Iterator[Row]:
    """Yield the rows of an IPC file, or of an IPC stream, which `datasets` writes."""
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
        raise _table_error(error, "Arrow") from None


def _table_error(error: Exception, kind: str) -> Exception:
    """Return the error to raise: that of a download as it is, because another try may succeed, or UnreadableError."""
    if isinstance(error, OSError) and type(error) is not OSError:
        return error
    return UnreadableError(f"it is a damaged {kind} file ({error})")
