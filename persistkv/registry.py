"""Classes by name: the built-in ones, and plug-ins found by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from persistkv.errors import ConfigurationError

T = TypeVar("T")


class Registry(Generic[T]):
    """Subclasses of one base class by name.

    Plug-ins are looked up on each call and imported only when they are requested. They cannot replace a built-in class.
    """

    def __init__(
        self, group: str, field: str, base: type[Any], built_in: Mapping[str, type[T]] = MappingProxyType({})
    ) -> None:
        """
        :param group: the entry-point group of the plug-ins.
        :param field: the setting that holds the name, for errors.
        :param base: required base class of all classes.
        """
        self._group = group
        self._field = field
        self._base = base
        self._built_in = built_in

    def names(self) -> list[str]:
        """Return the names of the built-in classes and of the installed plug-ins, sorted."""
        return sorted({*self._built_in, *self._plugins()})

    def get(self, name: object) -> type[T]:
        """Return the class of a name from the user's configuration.

        :raises ConfigurationError: no such name (the error lists the known ones), a plug-in that cannot be imported
            (the error names its distribution), or one of another kind.
        """
        if not isinstance(name, str):
            raise self._unknown(name)
        if name in self._built_in:
            return self._built_in[name]
        point = self._plugins().get(name)
        if point is None:
            raise self._unknown(name)
        source = f"{point.value} of {point.dist.name if point.dist else 'an unnamed distribution'}"
        try:
            found: Any = point.load()
        except Exception as error:
            expected = f"a plug-in that can be imported; {source} raised {type(error).__name__}: {error}"
            raise ConfigurationError(self._field, name, expected) from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigurationError(self._field, name, f"a plug-in; {source} is no {self._base.__name__}")
        return found

    def _plugins(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group)}

    def _unknown(self, name: object) -> ConfigurationError:
        known = ", ".join(self.names())
        return ConfigurationError(self._field, name, f"one of {known}" if known else f"a plug-in of {self._group}")
