"""Values of types that JSON does not have: how they are encoded in messages and results, and made from JSON again.

msgspec knows most of them. This module adds paths and the models of pydantic, which is used only if the app uses it.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import PurePath
from typing import Any

import msgspec

__all__ = ["convert", "decode_json", "encode", "from_json", "is_known", "pack", "to_builtins", "to_json"]


def is_known(kind: type[Any]) -> bool:
    """Return whether values of a class that msgspec does not know can be encoded and made from JSON."""
    return issubclass(kind, PurePath) or _is_model(kind)


def _is_model(kind: type[Any]) -> bool:
    # Without the module there can be no such class.
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def to_json(value: Any) -> Any:
    """Return what msgspec can encode, for a value of a class that it does not know.

    Raises:
        TypeError: The value has no place in JSON.
    """
    kind: Any = value.__class__
    if isinstance(value, PurePath):
        return str(value)
    if _is_model(kind):
        # By names of fields and without computed ones: what `from_json` takes.
        return value.model_dump(mode="json", round_trip=True)
    raise TypeError(f"a value of the type {kind.__qualname__} has no place in JSON")


def from_json(kind: Any, value: Any) -> Any:
    """Return a value of a class that msgspec does not know. msgspec checks its type.

    Raises:
        ValueError: It does not fit.
    """
    # msgspec asks for generic classes too.
    if not inspect.isclass(kind) or isinstance(value, kind):
        return value
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    return _validated(kind, value) if _is_model(kind) else value


def _validated(kind: Any, value: Any) -> Any:
    from pydantic import ValidationError

    try:
        # Not `model_validate`: a strict model takes a date as text only from JSON.
        return kind.model_validate_json(msgspec.json.encode(value), by_alias=True, by_name=True)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc'])) or kind.__name__}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(wrong)) from error


encode = msgspec.json.Encoder(enc_hook=to_json).encode
pack = msgspec.msgpack.Encoder(enc_hook=to_json).encode


def to_builtins(value: Any) -> Any:
    """Return a value as JSON holds it."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=to_json)


def convert(value: Any, wanted: Any, *, strict: bool = True) -> Any:
    """Make a value of a type from JSON values.

    Raises:
        msgspec.ValidationError: It does not fit.
    """
    return msgspec.convert(value, wanted, strict=strict, str_keys=True, dec_hook=from_json)


def decode_json(body: bytes | msgspec.Raw, wanted: Any) -> Any:
    """Make a value of a type from JSON.

    Raises:
        msgspec.ValidationError: It does not fit.
    """
    return msgspec.json.decode(body, type=wanted, dec_hook=from_json)
