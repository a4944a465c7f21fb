"""Validate settings and files with pydantic dataclasses, and turn their errors into readable sentences."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # "64" and true are not numbers


def require_text(value: Any) -> str:
    """Accept any text except an empty one. Unlike pydantic's strings, it may hold bytes that are not UTF-8, as file
    names may."""
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("string_type", "a text is needed")
    return value


NonEmptyText = Annotated[str, PlainValidator(require_text)]
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
LIMIT_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
# Names of these settings in other programs.
ALIASES = {
    "lr": "learning_rate", "bs": "batch_size", "wd": "weight_decay", "clip": "grad_clip", "warmup": "warmup_steps",
    "layers": "num_layers", "n_layer": "num_layers", "depth": "num_layers",
    "heads": "num_heads", "n_head": "num_heads", "dim": "embed_dim", "n_embd": "embed_dim", "d_model": "embed_dim",
    "width": "embed_dim", "hidden_size": "embed_dim", "vocab": "vocab_size",
    "ctx": "max_seq_len", "context": "max_seq_len", "block_size": "max_seq_len", "seq_len": "max_seq_len",
    "steps": "max_steps", "iters": "max_steps", "max_iters": "max_steps", "accum": "gradient_accumulation_steps",
    "gpu": "use_gpu", "cuda": "use_gpu", "dtype": "precision", "scheduler": "use_lr_scheduler", "data": "data_dir",
    "dataset": "data_dir", "text": "input", "file": "input", "out": "output_dir", "out_dir": "output_dir",
    "temp": "temperature", "max_tokens": "max_new_tokens", "length": "max_new_tokens", "model": "checkpoint",
}  # fmt: skip


def option(default: Any, group: str, help: str, **more: Any) -> Any:
    """Declare a field that is also a flag of the same name, below the heading `group` in --help; with "" it is no flag.

    `more` may hold:
    word: name in --help of a positional argument, instead of a flag
    metavar: name of the value in --help
    many: the flag takes several values (without it, the flag of a tuple is repeated)
    switch: the values for a bare flag (or JSON true) and for JSON false
    of: the (key, value) without which the field has no effect
    scope: "command" (not part of a run), "place" (where it runs: a path, memory), "fixed" (may not change during a run)
    ge, gt, le, lt, min_length: limits of pydantic's Field
    """
    limits = {key: more.pop(key) for key in ("ge", "gt", "le", "lt", "min_length") if key in more}
    return Field(default, description=help, json_schema_extra={"group": group, **more}, **limits)


def fields_of(model: Any) -> dict[str, FieldInfo]:
    """Return the fields of a pydantic dataclass, by name."""
    fields: dict[str, FieldInfo] = model.__pydantic_fields__
    return fields


def options_of(model: Any) -> dict[str, FieldInfo]:
    """Return the fields that are flags."""
    return {key: f for key, f in fields_of(model).items() if f.description and extras(f).get("group", "model")}


def extras(f: FieldInfo) -> dict[str, Any]:
    """Return the `more` of `option` without its limits."""
    return f.json_schema_extra if isinstance(f.json_schema_extra, dict) else {}


def _parts_of(annotation: Any) -> Any:
    """Return an annotation without None and without pydantic's metadata."""
    if get_origin(annotation) is Annotated:
        return _parts_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _parts_of(next(item for item in get_args(annotation) if item is not NoneType))
    return annotation


def is_tuple(f: FieldInfo) -> bool:
    return get_origin(_parts_of(f.annotation)) is tuple


def kind_of(f: FieldInfo) -> type:
    """Return int, float, bool or str; for a tuple, the type of its items."""
    kind = _parts_of(f.annotation)
    if get_origin(kind) is tuple:
        kind = _parts_of(get_args(kind)[0])
    return str if get_origin(kind) is Literal else kind


def choices_of(f: FieldInfo) -> tuple[str, ...]:
    """Return the allowed values of a Literal field, else ()."""
    kind = _parts_of(f.annotation)
    if get_origin(kind) is tuple:
        kind = _parts_of(get_args(kind)[0])
    return get_args(kind) if get_origin(kind) is Literal else ()


def _limits_of(f: FieldInfo) -> list[tuple[str, float]]:
    """Return the limits of a field: [("at least", 1), ("less than", 10)]."""
    return [
        (words, getattr(item, name))
        for name, words in LIMIT_WORDS.items()
        for item in f.metadata
        if hasattr(item, name)
    ]


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return " Did you mean X?" with the known name that is nearest to `name`; "" if none is near."""
    known = list(known)
    near = [word for word in known if word == ALIASES.get(name)] or [word for word in known if word.startswith(name)]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def check(
    model: type[T],
    values: Mapping[str, Any],
    problems: list[str],
    names: Mapping[str, str] | None = None,
    known: Mapping[str, FieldInfo] | None = None,
) -> T | None:
    """Build a `model` from the values; None if that fails. Append all problems to `problems`, each under the name of
    its key in `names` (default: the key). Contradictions are checked without the wrong values.

    `known`: the fields that may be given (None: all). null means the default for a field whose default is null.
    """
    names, fields = names or {}, fields_of(model) if known is None else known
    problems += [f"unknown key {names.get(key, key)}.{suggest(key, fields)}" for key in values if key not in fields]
    values = {key: value for key, value in values.items() if key in fields}
    result, wrong = attempt(model, values, names, fields)
    problems += [sentence for item in wrong.values() for sentence in item]
    if wrong and "" not in wrong:
        result, found = attempt(model, {key: values[key] for key in values if key not in wrong}, names, fields)
        problems += [sentence for key in found.keys() - wrong for sentence in found[key]]
    return result


def build(model: type[T], values: Any) -> T:
    """Build a `model` from a JSON object. Raises ValueError listing all problems."""
    if not isinstance(values, dict):
        raise ValueError(f"an object {{...}} is needed, not {quote(values)}")
    problems: list[str] = []
    result = check(model, values, problems)
    if problems or result is None:
        raise ValueError("; ".join(problems))
    return result


def attempt(
    model: type[T], values: Mapping[str, Any], names: Mapping[str, str], fields: Mapping[str, FieldInfo]
) -> tuple[T | None, dict[str, list[str]]]:
    """Return the model, or {key: problems}; problems of several keys together are under ""."""
    values = {key: normalize(value, fields[key]) for key, value in values.items()}
    values = {key: value for key, value in values.items() if value is not None or fields[key].default is not None}
    try:
        return model(**values), {}
    except ValidationError as error:
        wrong: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):  # a tuple has one per item; the first counts
            wrong.setdefault(str(item["loc"][0]) if item["loc"] else "", _describe_problem(item, names, fields))
        return None, wrong


def normalize(value: Any, f: FieldInfo) -> Any:
    """Return a value as the field needs it: a switch's value for true or false, a tuple for a list or single text."""
    if isinstance(value, bool) and "switch" in extras(f):
        return extras(f)["switch"][0 if value else 1]
    if is_tuple(f) and isinstance(value, str | list):
        return (value,) if isinstance(value, str) else tuple(value)
    return value


def _describe_problem(error: Any, names: Mapping[str, str], fields: Mapping[str, FieldInfo]) -> list[str]:
    """Describe one of pydantic's errors."""
    if error["type"] == "value_error":  # our own validators list their problems
        return str(error["ctx"]["error"]).splitlines()
    key, *inside = error["loc"]
    name = ".".join([names.get(str(key), str(key)), *(str(item) for item in inside if not isinstance(item, int))])
    if error["type"] == "missing":
        return [f"{name} is missing"]
    f = fields.get(key) if not [item for item in inside if not isinstance(item, int)] else None
    is_missing = name.startswith("--") and (error["input"] is True or error["input"] == ())
    return [f"{name} is {'missing' if is_missing else quote(error['input'])}; {_describe_needed(error, f)}"]


def quote(value: Any) -> str:
    words = json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= 100 else f"{words[:100]} ..."


def _describe_needed(error: Any, f: FieldInfo | None) -> str:
    """Describe the value that is needed."""
    kind, context = error["type"], error.get("ctx", {})
    if f is not None and (choices := choices_of(f)):
        near = suggest(error["input"], choices) if isinstance(error["input"], str) else ""
        return f"allowed: {', '.join(choices)}.{near}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        limits = _limits_of(f) if f else []
        limits = limits or [(words, context[name]) for name, words in LIMIT_WORDS.items() if name in context]
        return f"allowed: {' and '.join(f'{words} {limit:,}' for words, limit in limits)}"
    if kind == "too_short" and f is not None:
        return f"at least one {extras(f).get('metavar', 'value')} is needed"
    if kind == "finite_number":
        kind = "float_type"
    for of_kind, words in ((int, "int"), (float, "float"), (bool, "bool"), (str, "string")):
        if kind.startswith(f"{words}_"):
            return f"{TYPE_NAMES[of_kind]} is needed"
    if kind in ("dataclass_type", "dict_type"):
        return "an object {...} is needed"
    return str(error["msg"])
