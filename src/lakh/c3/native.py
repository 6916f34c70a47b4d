"""ctypes bindings of the native core (native/, a C ABI), and the mapping of its statuses to errors.

`open_library` returns None if the library was not built (no compiler at install time); `require_library` raises.
LAKH_C3_LIBRARY selects another file, for development builds.
"""

from __future__ import annotations

import ctypes
import enum
import functools

from lakh.errors import LakhError, PeerLost, PeerTimeout, UserError
from lakh.native_library import open_native_library

__all__ = [
    "ABI",
    "CODECS",
    "COUNTERS",
    "DTYPES",
    "OPERATIONS",
    "OPS",
    "FailureCause",
    "NativeCall",
    "NativeCounters",
    "NativeStep",
    "cause_of",
    "cpu_features",
    "error_for",
    "host_identity",
    "last_error",
    "open_library",
    "require_library",
]

ABI = 6

# The values in native/include/lakh_c3.h.
DTYPES = {"f32": 0, "f64": 1, "f16": 2, "bf16": 3, "i32": 4, "i64": 5, "u8": 6, "i8": 7}
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4}
OPERATIONS = {
    name: number
    for number, name in enumerate(
        [
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "broadcast",
            "reduce",
            "gather",
            "scatter",
            "all_to_all",
            "barrier",
            "schedule",
        ]
    )
}
CODECS = {"none": 0, "bf16": 1, "int8": 2, "int4": 3}


class FailureCause(enum.StrEnum):
    """Why a call or a group failed; the `cause` of the raised error."""

    INVALID = "invalid"
    """The ranks call different operations, or an argument is invalid."""
    DISCONNECTED = "disconnected"
    """A rank closed or lost its connection: it died, or has left a failed group."""
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    SYSTEM = "system"
    CLOSED = "closed"
    DIED = "died"
    UNREACHABLE = "unreachable"
    LEFT = "left"
    """A rank closed its group in order."""


# The statuses of lakh_c3.h are numbered from 1 in this order.
_CAUSES = dict(enumerate(FailureCause, start=1))
SYSTEM_STATUS = next(status for status, cause in _CAUSES.items() if cause == FailureCause.SYSTEM)
_PEER_LOSSES = {
    FailureCause.DISCONNECTED,
    FailureCause.ABORTED,
    FailureCause.DIED,
    FailureCause.UNREACHABLE,
    FailureCause.LEFT,
}


_i32, _i64, _u64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p


class NativeStep(ctypes.Structure):
    """lakh_c3_step."""

    _fields_ = [(name, _i32) for name in ("stage", "kind", "peer", "src", "dst", "fan")] + [
        (name, _i64) for name in ("src_offset", "dst_offset", "count")
    ]


class NativeCall(ctypes.Structure):
    """lakh_c3_call."""

    _fields_ = [
        ("operation", _i32),
        ("dtype", _i32),
        ("op", _i32),
        ("root", _i32),
        ("input", _pointer),
        ("output", _pointer),
        ("count", _i64),
        ("splits", ctypes.POINTER(_i64)),
        ("steps", ctypes.POINTER(NativeStep)),
        ("num_steps", _i64),
        ("scratch_count", _i64),
        ("wire_bytes", _i64),
        ("codec", _i32),
        ("residual", _pointer),
        ("seed", _u64),
    ]


COUNTERS = (
    "operations",
    "bytes_in",
    "bytes_sent",
    "bytes_received",
    "wait_us",
    "futex_waits",
    "connections",
    "single_copy_bytes",
)


class NativeCounters(ctypes.Structure):
    """lakh_c3_counters."""

    _fields_ = [(name, _u64) for name in COUNTERS]


_text_out = [ctypes.c_char_p, ctypes.c_size_t]
# name -> (result, arguments)
_FUNCTIONS = {
    "lakh_c3_cpu_features": (ctypes.c_size_t, _text_out),
    "lakh_c3_host_identity": (ctypes.c_size_t, _text_out),
    "lakh_c3_listen": (_i32, [ctypes.c_char_p]),
    "lakh_c3_open": (_pointer, [ctypes.c_char_p, ctypes.c_char_p, _i32, _i32, ctypes.POINTER(_i32)]),
    "lakh_c3_join": (
        _i32,
        [_pointer, *[ctypes.POINTER(_i32)] * 3, ctypes.POINTER(ctypes.c_char_p), _i64, _i32, _i64],
    ),
    "lakh_c3_wire": (_i32, [_pointer, _i32, _i32, _i64, _i64]),
    "lakh_c3_set_timeout": (None, [_pointer, _i64]),
    "lakh_c3_shape": (_i32, [_pointer, _i32, ctypes.c_char_p, _i32, ctypes.c_double, _i64]),
    "lakh_c3_run": (_i32, [_pointer, ctypes.POINTER(NativeCall), ctypes.POINTER(_i64)]),
    "lakh_c3_collective": (_i32, [_pointer, _i32, _i32, _i32, _i32, _pointer, _pointer, _i64]),
    "lakh_c3_wait": (_i32, [_pointer, _i64, _i64]),
    "lakh_c3_done": (_i32, [_pointer, _i64]),
    "lakh_c3_send": (_i32, [_pointer, _i32, _i32, _pointer, _i64, ctypes.POINTER(_i64)]),
    "lakh_c3_recv": (_i32, [_pointer, _i32, _i32, _pointer, _i64, ctypes.POINTER(_i32), ctypes.POINTER(_i64)]),
    "lakh_c3_wait_message": (_i32, [_pointer, _i64, _i64]),
    "lakh_c3_message_done": (_i32, [_pointer, _i64]),
    "lakh_c3_allocate": (_pointer, [ctypes.c_size_t]),
    "lakh_c3_free": (None, [_pointer]),
    "lakh_c3_error": (ctypes.c_size_t, _text_out),
    "lakh_c3_failure": (_i32, [_pointer, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(_i32), _i32]),
    "lakh_c3_abort": (None, [_pointer, ctypes.c_char_p]),
    "lakh_c3_close": (None, [_pointer]),
    "lakh_c3_read_counters": (None, [_pointer, ctypes.POINTER(NativeCounters)]),
    "lakh_c3_waited_us": (None, [_pointer, ctypes.POINTER(_u64)]),
    "lakh_c3_codec_bytes": (_i64, [_i32, _i64]),
    "lakh_c3_encode": (_i32, [_i32, _pointer, _i64, _u64, _pointer, _pointer]),
    "lakh_c3_decode": (_i32, [_i32, _pointer, _i64, _pointer, _i32]),
}


@functools.cache
def open_library() -> ctypes.CDLL | None:
    library = open_native_library("c3/liblakh_c3.so", ABI, variable="LAKH_C3_LIBRARY")
    if library is None:
        return None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def require_library() -> ctypes.CDLL:
    """The native core, or an error that explains how to build it."""
    library = open_library()
    if library is None:
        found = "the native core was not built: there was no C++ compiler when lakh was installed"
        raise UserError("c3", found, "install g++ and install lakh again, or use another backend, e.g. gloo")
    return library


def last_error(status: int, where: str) -> LakhError:
    """The error of this thread's last failing call."""
    buffer = ctypes.create_string_buffer(1024)
    require_library().lakh_c3_error(buffer, len(buffer))
    return error_for(cause_of(status), where, buffer.value.decode(errors="replace"))


def cause_of(status: int) -> FailureCause:
    return _CAUSES[status]


def error_for(cause: FailureCause, where: str, text: str) -> LakhError:
    error: LakhError
    if cause == FailureCause.TIMEOUT:
        error = PeerTimeout(where, text, "check that rank, or raise the timeout; the group must be created again")
    elif cause in _PEER_LOSSES:
        error = PeerLost(where, text, "continue without it (reconfigure), or restart from the last checkpoint")
    elif cause == FailureCause.INVALID:
        error = UserError(where, text, "call the same operation with the same sizes on every rank")
    elif cause == FailureCause.CLOSED:
        error = UserError(where, text, "create a new group")
    else:
        error = UserError(where, text, "see the c3 guide for the operating system features that c3 requires")
    error.cause = cause
    return error


def cpu_features() -> list[str]:
    """Vector extensions of this CPU that the native core detects."""
    return _text("lakh_c3_cpu_features").split()


def host_identity() -> str:
    """Equal for two processes if and only if they can share memory."""
    return _text("lakh_c3_host_identity")


def _text(function: str) -> str:
    library = open_library()
    if library is None:
        return ""
    buffer = ctypes.create_string_buffer(256)
    getattr(library, function)(buffer, len(buffer))
    return buffer.value.decode()
