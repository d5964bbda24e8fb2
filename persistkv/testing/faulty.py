"""A wrapper of a backend that makes chosen calls fail, delays them or changes their results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from itertools import repeat
from operator import attrgetter
from typing import Any, Generic, TypeAlias, TypeVar

from persistkv.storage.backend import Backend

B = TypeVar("B", bound=Backend)

_Faults: TypeAlias = dict[str, list[Callable[..., Any]]]
"""Functions to call, by the name of the method whose calls they change."""


class FaultyBackend(Backend, Generic[B]):
    """Wrapper of an open backend that injects faults into its calls.

    It has every public method and attribute of the wrapped backend's class, and forwards all calls.
    Faults can be added and removed at any time, from any thread:

        backend = FaultyBackend.of(MemoryBackend())
        # the next commit fails, and commits nothing
        backend.fail("commit", StoreFullError("no room"), times=1)
        # reads are slow, and find nothing
        backend.before("read", lambda namespace, spans: time.sleep(5))
        backend.after("read", lambda filled, namespace, spans: [False for _ in filled])
        backend.clear_faults()

    Calls that the wrapped backend makes to itself have no faults: one on ``read`` does not reach
    the backend's own ``scan``, even if that calls ``read``. Naming a method that it lacks raises
    ValueError.
    """

    inner: B
    """The wrapped backend."""
    calls: list[str]
    """Names of the methods called through the wrapper since its creation, in order, including
    failed calls."""

    @classmethod
    def of(cls, inner: B) -> FaultyBackend[B]:
        """Return a wrapper of an open backend, without faults. The wrapper's ``close`` closes the
        backend."""
        kind = type(inner)
        members = {}
        for name in dir(kind):
            is_public = not name.startswith("_")
            if is_public and name not in vars(FaultyBackend):
                members[name] = _forwarding_member(kind, name)
        # Make a subclass that has these members. ``__getattr__`` could not forward them: a class
        # with abstract methods cannot be instantiated.
        class_name = f"Faulty{kind.__name__}"
        bases = (cls,)
        wrapper: type[FaultyBackend[B]] = type(class_name, bases, members)
        return wrapper(inner)

    def __init__(self, inner: B) -> None:
        """Not for users: call ``of``, which makes a subclass with the backend's methods."""
        self.inner = inner
        self.calls = []
        self._before: _Faults = defaultdict(list)
        """Faults to run before a call of their method (``before``)."""
        self._after: _Faults = defaultdict(list)
        """Faults that get the result of a call, and return another one (``after``)."""

    def before(
        self,
        method: str,
        call: Callable[..., object],
    ) -> None:
        """Run ``call(*arguments)`` before each call of the method; if it raises, the method is not
        called."""
        self._check(method)
        self._before[method].append(call)

    def after(
        self,
        method: str,
        call: Callable[..., Any],
    ) -> None:
        """Run ``call(result, *arguments)`` after each call of the method that returned. Its return
        value replaces the result.
        """
        self._check(method)
        self._after[method].append(call)

    def fail(
        self,
        method: str,
        error: BaseException,
        times: int | None = None,
    ) -> None:
        """Make calls of the method raise an error instead of reaching the backend.

        :param error: each call raises a copy, because the traceback of an error references the
            buffers of its call.
        :param times: number of calls that fail; None: all, until ``clear_faults``.
        """
        # an iterator that ends after ``times`` errors: then calls reach the backend again
        errors = repeat(error) if times is None else repeat(error, times)

        def raise_next_error(*_: object, **__: object) -> None:
            next_error = next(errors, None)
            if next_error is not None:
                raise copy(next_error)

        self.before(method, raise_next_error)

    def clear_faults(self, method: str | None = None) -> None:
        """Remove all faults of a method; None: of all methods. Calls that are already running keep
        their faults."""
        for faults in (self._before, self._after):
            if method is None:
                faults.clear()
            else:
                faults.pop(method, None)

    def _check(self, method: str) -> None:
        kind = type(self.inner)
        member = getattr(kind, method, None)
        if not callable(member):
            raise ValueError(f"{kind.__name__} has no method {method!r}")


def _forwarding_member(
    backend_class: type[Backend],
    name: str,
) -> Callable[..., Any] | property:
    """Return the method of a wrapper's class that calls the backend's method of this name; if the
    name is that of an attribute, a property that returns the backend's value."""
    if not callable(getattr(backend_class, name)):
        return property(attrgetter(f"inner.{name}"))

    def call(
        self: FaultyBackend[Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Record the call, run the faults before it, forward it, and let the faults after it
        replace its result."""
        self.calls.append(name)
        # copy the lists, because other threads may add or remove faults during the call
        faults_before = list(self._before[name])
        faults_after = list(self._after[name])
        for fault in faults_before:
            fault(*arguments, **named)
        method = getattr(self.inner, name)
        result = method(*arguments, **named)
        for replace_result in faults_after:
            result = replace_result(result, *arguments, **named)
        return result

    return call
