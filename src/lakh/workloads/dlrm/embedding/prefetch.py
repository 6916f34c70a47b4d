"""The prefetch instruction for functions that numba compiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lakh.compiled import compiled

__all__ = ["prefetch_row"]

LINE_VALUES = 16  # f32 in a cache line of 64 bytes


@intrinsic
def _prefetch(typing_context: Any, array: Any, row: Any, column: Any) -> Any:
    """Ask for the cache line of `array[row, column]`, a 2-D array. It reads nothing, so a wrong address is harmless."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, row_type, column_type = signature.args
        view = context.make_array(array_type)(context, builder, arguments[0])
        indices = [
            context.cast(builder, arguments[1], row_type, types.intp),
            context.cast(builder, arguments[2], column_type, types.intp),
        ]
        address = cgutils.get_item_pointer(context, builder, array_type, view, indices, wraparound=False)
        flag, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        read, keep_in_all_caches, data = flag(0), flag(3), flag(1)
        builder.call(function, [builder.bitcast(address, pointer), read, keep_in_all_caches, data])
        return context.get_dummy_value()

    return types.void(array, row, column), generate


@compiled
def prefetch_row(array, row, width):
    """Ask for the cache lines of `array[row]`, `width` values of f32."""
    for column in range(0, width, LINE_VALUES):
        _prefetch(array, row, column)  # type: ignore[call-arg]  # the compiler passes its context
