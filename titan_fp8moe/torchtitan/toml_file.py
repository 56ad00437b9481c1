"""Loads a job's TOML file as torchtitan 0.2.2 does, with one sentence for a mistake in it.

torchtitan reads the file, makes dataclasses of its tables and hands them to tyro, which ends in a traceback for a wrong
name or type. This module compares the file with torchtitan's ``JobConfig`` first.
"""

import dataclasses
import difflib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.manager import tomllib  # tomli on Python 3.10


def load(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of a TOML file and of torchtitan's own arguments.

    Raises:
        ValueError: for a mistake in the file. The message begins with the file and names the setting and the remedy.
    """
    with open(path, "rb") as file:
        try:
            values = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML file: {error}") from error
    args, manager = [f"--job.config_file={path}", *overrides], ConfigManager()
    try:
        check_table(_config_class(manager, args, values), values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return manager.parse_args(args)


def _config_class(manager: ConfigManager, args: list[str], values: dict[str, Any]) -> type[JobConfig]:
    """torchtitan's ``JobConfig``, extended by that of the config module."""
    try:
        return manager._maybe_add_custom_config(args, values)
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"job.custom_config_module cannot be used ({error}); set it to titan_fp8moe.torchtitan, or to a module of "
            "your own, with a dataclass JobConfig, in a folder where Python finds it"
        ) from error


def check_table(config_class: type, values: dict[str, Any], table: str = "") -> None:
    """Every key and value of a TOML table against a dataclass. ``table`` is its name, with a dot at the end."""
    hints = get_type_hints(config_class)
    known = [field.name for field in dataclasses.fields(config_class)]
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            if name == "fp8_flow_moe":
                remedy = 'set job.custom_config_module = "titan_fp8moe.torchtitan"'
            if (table, name) == ("fp8_flow_moe.", "emulate"):  # a setting of 0.2
                remedy = "since 0.3.0 TITAN_FP8MOE_EMULATE=1 in the environment takes its place"
            raise ValueError(f"{table}{name} is unknown; {remedy}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            check_table(hint, value, f"{table}{name}.")
        elif not any(fits(value) for fits, _ in _alternatives(hint)):
            words = " or ".join(words for _, words in _alternatives(hint))
            raise ValueError(f"{table}{name} = {value!r}; set it to {words}")


_KINDS = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def _alternatives(hint: Any) -> Iterator[tuple[Callable[[Any], bool], str]]:
    """Yields a test and its words for each kind of TOML value that a field of this type takes."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for arg in args:
            yield from _alternatives(arg)
    elif origin is Literal:
        yield args.__contains__, "one of " + ", ".join(map(repr, args))
    elif origin is list:
        ((fits, words),) = _alternatives(args[0])
        words = f'a list, each item {words}: ["..."]' if args[0] is str else "a list"
        yield lambda value: isinstance(value, list) and all(map(fits, value)), words
    elif hint in _KINDS:
        kinds, words = _KINDS[hint]
        yield lambda value: type(value) in kinds, words
    elif hint is not types.NoneType:
        yield lambda _: not dataclasses.is_dataclass(hint), "a table of settings"
