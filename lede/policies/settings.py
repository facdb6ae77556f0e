"""Policy settings from text (`key=value;key=value`) and from JSON, typed by the fields of the config dataclass."""

from __future__ import annotations

import dataclasses
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def settings_from_text(config_class: type[Config], text: str) -> Config:
    """A config from `key=value;key=value`; tuples are written 2,4,8 and None as none.

    Raises:
        ValueError: A key is unknown or given twice, or a value is not of the field's type or range.
    """
    given: dict[str, str] = {}
    for part in text.split(";") if text else ():
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign:
            raise ValueError(f"'{part}' is no setting; settings look like key=value;key=value")
        if key in given:
            raise ValueError(f"setting '{key}' is given twice")
        given[key] = value
    built: Config = _build(config_class, given, from_text=True)
    return built


def settings_from_json(config_class: type[Config], values: dict[str, Any]) -> Config:
    """A config from the dictionary that `dataclasses.asdict` and JSON made of one; missing fields take their defaults.

    Raises:
        ValueError: A key is unknown, or a value is not of the field's type or range.
    """
    built: Config = _build(config_class, values, from_text=False)
    return built


def _build(config_class: type[Any], values: dict[str, Any], from_text: bool) -> Any:
    hints = get_type_hints(config_class)
    names = [field.name for field in dataclasses.fields(config_class)]
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"there is no setting '{key}'; settings are {', '.join(names)}")
        try:
            read[key] = _read(value, hints[key], from_text)
        except _WrongTypeError:
            raise ValueError(f"setting '{key}' must be {_describe(hints[key])}, got {value!r}") from None
    return config_class(**read)


class _WrongTypeError(Exception):
    """The value is not of the type."""


def _read(value: Any, hint: Any, from_text: bool) -> Any:
    """The value as the hinted type says it, from text or from a JSON value."""
    kind, options = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        if NoneType in options and (value is None or (from_text and value.lower() == "none")):
            return None
        for option in options:
            try:
                return _read(value, option, from_text)
            except _WrongTypeError:
                continue
        raise _WrongTypeError
    if kind is Literal:
        if value in options:
            return value
        raise _WrongTypeError
    if kind is tuple:
        parts = [part.strip() for part in value.split(",")] if from_text else value
        if not isinstance(parts, (list, tuple)):
            raise _WrongTypeError
        return tuple(_read(part, options[0], from_text) for part in parts)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value, from_text)  # type: ignore[arg-type]  # a dataclass by now
    if from_text and hint is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if from_text and hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise _WrongTypeError from None
    # JSON writes 1.0 as 1.0, but a hand-edited file may say 1
    if hint in _WANTED and (type(value) is hint or (hint is float and type(value) is int)):
        return hint(value)
    raise _WrongTypeError


def _describe(hint: Any) -> str:
    kind, options = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join("none" if option is NoneType else _describe(option) for option in options)
    if kind is Literal:
        return " or ".join(map(str, options))
    if kind is tuple:
        return f"{_describe(options[0])} each, comma-separated"
    return _WANTED.get(hint, f"an object of {getattr(hint, '__name__', hint)}")
