"""Every change that this package makes to other packages, listed: print :func:`listed` to see those of a process.

A file that needs a change calls :func:`wrap`, :func:`put` or :func:`hook`; nothing else assigns into another package.
A change is identified by what it changes and by the module that makes it, never by attributes of the value in place:
``functools.wraps`` copies those to a user's own wrapper. So a second call changes nothing, and installers need no flag.
This module imports nothing of the package, so that every layer may use it.
"""

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
_MISSING = object()


class Change(NamedTuple):
    """One change.

    Attributes:
        what: ``module:attribute``, a mapping's key in brackets, or the function that registered a hook.
        by: the module of this package that made it.
        checked_on: the versions on which that module was tested with the change.
    """

    what: str
    by: str
    checked_on: str
    undo: Callable[[], None]


_changes: dict[tuple[str, str], Change] = {}
_logged: set[tuple[str, str]] = set()


def wrap(owner: Any, name: Any, wrapper: Callable[[Any], Any], *, checked_on: str) -> None:
    """Replaces ``owner.name`` by ``wrapper(owner.name)``, once.

    Args:
        owner: a module, a class, or either's name as ``module:attribute``.

    Raises:
        RuntimeError: there is no such attribute. Nothing is changed.
    """
    found, what = _found(owner, name, checked_on)
    if (key := (what, _caller())) not in _changes:
        _set(key, found, name, wrapper(getattr(found, name)), checked_on)


def put(owner: Any, name: Any, value: Any, *, checked_on: str) -> None:
    """Replaces ``owner.name`` by ``value``. Another call replaces it again. ``owner`` may be the name of a mapping, and
    ``name`` a key of it, which may be new."""
    found, what = _found(owner, name, checked_on)
    _set((what, _caller()), found, name, value, checked_on)


def hook(register: str, function: Callable[..., Any], *, checked_on: str) -> None:
    """Registers a global hook, once. ``register`` is the name of what returns a handle with ``remove()``."""
    if (key := (f"{register}({function.__qualname__})", _caller())) not in _changes:
        handle = resolve(register, checked_on)(function)
        _changes[key] = Change(*key, checked_on, handle.remove)


def listed() -> list[str]:
    """All changes of this process, in their order, one line each."""
    return [f"{change.what}, by {change.by}, checked on {change.checked_on}" for change in _changes.values()]


def log() -> None:
    """Logs the changes that have not been logged before, one line per package."""
    packages: dict[str, dict[str, None]] = {}
    for change in [change for key, change in _changes.items() if key not in _logged]:
        module, _, name = change.what.partition(":")
        packages.setdefault(module.partition(".")[0], {})[name] = None
    _logged.update(_changes)
    for package, names in packages.items():
        logger.info(f"FP8-Flow-MoE changes in this process of {package}: {', '.join(names)} (titan_fp8moe/patches.py)")


def undo_all() -> None:
    """Undoes every change, the last one first. For tests: a caller that has kept a changed function still has it."""
    for change in reversed(_changes.values()):
        change.undo()
    _changes.clear()
    _logged.clear()


def _found(owner: Any, name: Any, checked_on: str) -> tuple[Any, str]:
    """The owner itself, and what :attr:`Change.what` says of its attribute or item."""
    found = resolve(owner, checked_on) if isinstance(owner, str) else owner
    if isinstance(found, MutableMapping):
        return found, f"{owner}[{getattr(name, '__name__', name)}]"
    where = found.__name__ + ":" if isinstance(found, ModuleType) else f"{found.__module__}:{found.__qualname__}."
    if not hasattr(found, name):
        raise _gone(where + name, checked_on)
    return found, where + name


def _stored(owner: Any, name: Any) -> Any:
    """As it is stored, or _MISSING: a class has descriptors, and may inherit the attribute."""
    if isinstance(owner, MutableMapping):
        return owner.get(name, _MISSING)
    return vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name)


def _store(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        owner.pop(name, None) if value is _MISSING else owner.update({name: value})
    elif value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _set(key: tuple[str, str], owner: Any, name: Any, value: Any, checked_on: str) -> None:
    undo = _changes[key].undo if key in _changes else functools.partial(_store, owner, name, _stored(owner, name))
    _store(owner, name, value)
    _changes[key] = Change(*key, checked_on, undo)


def _caller() -> str:
    """The module that calls :func:`wrap`, :func:`put` or :func:`hook`."""
    return sys._getframe(2).f_globals["__name__"]


def resolve(name: str, checked_on: str) -> Any:
    """The object that ``module:attribute`` names. RuntimeError if there is no such thing."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise _gone(name, checked_on) from error


def _gone(what: str, checked_on: str) -> RuntimeError:
    return RuntimeError(
        f"{what.replace(':', '.')}, which titan_fp8moe needs, does not exist here; install a version that it was "
        f"checked on: {checked_on}"
    )
