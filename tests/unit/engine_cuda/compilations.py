"""What a GPU would have had to compile for the kernels that are launched.

Triton compiles a kernel once for all launches that are alike in what is recorded here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

Compilation: TypeAlias = tuple[str, frozenset[tuple[str, object]]]  # kernel, arguments and options


@contextmanager
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Compilation]]:
    """Yield the set of those of what is launched meanwhile."""
    found: set[Compilation] = set()
    run = InterpretedFunction.run

    def recorded(kernel: Any, *args: Any, **options: Any) -> None:
        own = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        given = dict(zip(kernel.arg_names, args, strict=False)) | own
        kept = {name: _kind(kernel, name, value) for name, value in given.items()}
        found.add((kernel.__name__, frozenset(kept.items())))
        run(kernel, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", recorded)
        yield found


def _kind(kernel: Any, name: str, value: Any) -> object:
    """What of an argument is compiled in."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    parameter = inspect.signature(kernel.fn).parameters.get(name)
    if parameter is None or "constexpr" in str(parameter.annotation):
        return value
    if not isinstance(value, int) or name in (kernel.kwargs.get("do_not_specialize") or ()):
        return type(value)
    return "1" if value == 1 else "a multiple of 16" if value % 16 == 0 else "any"
