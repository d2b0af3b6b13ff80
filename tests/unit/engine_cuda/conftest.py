"""The Triton kernels run by Triton's interpreter, on CPU tensors (see tests/conftest.py).

Where there is a GPU, tests/gpu runs the same checks on what is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="package")
def interpreted() -> Iterator[None]:
    """For tests that launch kernels."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu runs the kernels on it")
    from triton.runtime import interpreter

    from pdserve.engine.cuda.attention import triton_kernels

    assert isinstance(triton_kernels.attend_chunks, interpreter.InterpretedFunction)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter, "_patch_lang", _once(interpreter._patch_lang))
        # A third of the time: it computes whether sums overflow, and tells nobody.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
    torch.set_num_threads(before)


def _once(put_into_language: Callable[[Any], object]) -> Callable[[Any], object]:
    """The interpreter puts itself into Triton's language at every call of every function, which
    takes longer than what most of them do; nothing is compiled in this process, so it may stay.
    """
    modules: set[str] = set()

    def put(function: Any) -> object:
        if function.__module__ not in modules:
            put_into_language(function)
            modules.add(function.__module__)
        return SimpleNamespace(restore=lambda: None)

    return put


def _dot(builder: Any, a: Any, b: Any, accumulator: Any, *_: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits, and would multiply those.

    It would use BLAS, too, where the bits of a row may depend on its place in the matrix. Sums of
    integers are of 32 bits.
    """
    if a.data.dtype == np.int8:
        wide = (each.data.astype(np.int32) for each in (a, b))
        return type(a)(np.matmul(*wide) + accumulator.data, accumulator.dtype.scalar)
    product = np.einsum("ik,kj->ij", _as_float32(a), _as_float32(b))
    return type(a)(product + accumulator.data, accumulator.dtype.scalar)


def _as_float32(operand: Any) -> np.ndarray:
    if operand.data.dtype != np.uint16:
        return operand.data.astype(np.float32, copy=False)
    return (operand.data.astype(np.uint32) << 16).view(np.float32)
