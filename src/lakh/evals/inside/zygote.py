"""The processes that stay inside a cell from program to program, and the one that is forked for each.

    first       waits for the others; in a PID namespace it is process 1, and its end is the end of everything there
    examiner    holds the tests, one program after another: it runs only the benchmark's own code (examiner.py)
    zygote      forks a candidate for every program, watches its limits, and reports

Forking an interpreter that has its imports done is what makes a program cheap: about a millisecond instead of a start.

What a candidate can find in its memory is what was in the zygote when it was forked, so nothing worth finding ever
comes there: source, test and verdict travel in descriptors that are only handed on.

Orders and reports are packets of JSON on descriptor 0. Its end means that whoever ordered is gone, and everything ends.
A report says whether this place is as clean as before: no process left, nothing in /tmp. Where it is not, the whole of
it is thrown away from outside, and nobody has to clean up after a hostile program.
"""

from __future__ import annotations

import _socket as socket  # not socket: what the zygote does not have in memory is not copied for every program
import array
import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from lakh.evals.inside import candidate, commands, examiner

# Imported here once, so that no program pays for them; rarer ones would cost every program more than they save.
COMMON = "bisect copy functools heapq itertools math operator re string typing"

# Behind walls that a program puts up by itself, a Python in root's home cannot be read any more, nor /etc, which
# OpenSSL reads when it starts: what programs of benchmarks use has to be there.
BEHIND_OWN_WALLS = "cmath collections datetime decimal fractions hashlib random socket statistics sys time"

PACKET_BYTES = 1 << 16
OUTPUT_BLOCK_BYTES = 1 << 16
REAP_TIMEOUT_S = 5.0
# Its CPU limit is set anew for every program; the rest is for what a candidate may send.
EXAMINER_LIMITS = {"cpu_s": 3600, "memory_MiB": 2048, "file_MiB": 1, "processes": 4}
ORDER = 0  # the descriptor
WARM_UPS = 10  # from then on a candidate's first steps change less of the memory that it shares, and copy less

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 22, 36
SECCOMP_MODE_FILTER = 2
LANDLOCK_RESTRICT_SELF = 446  # the same number on every kind of machine


def main() -> None:
    for name in COMMON.split():
        __import__(name)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal without a handler does not reach process 1
    order_line = socket.socket(fileno=os.dup(ORDER))
    setup, descriptors = receive(order_line)
    place = Place(setup, descriptors)
    place.hide()
    if place.own_walls:
        for name in BEHIND_OWN_WALLS.split():
            __import__(name)
    for _ in range(WARM_UPS):
        candidate.rehearse()
    gc.collect()
    gc.freeze()
    to_examiner, from_zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = from_zygote.fileno()
    asks = _fork(place, place.uids[1], None, [end], EXAMINER_LIMITS, lambda: examiner.serve(from_zygote, receive))
    from_zygote.close()
    zygote = os.fork()
    if zygote == 0:
        try:
            _serve(order_line, to_examiner, place)
        finally:
            os._exit(1)
    while True:
        child, _ = os.wait()
        asks = 0 if child == asks else asks
        if child == zygote:
            if asks:
                with contextlib.suppress(OSError):
                    os.kill(asks, signal.SIGKILL)
                    os.waitpid(asks, 0)  # so that its CPU time is counted: what merely dies with process 1 is not
            os._exit(0)


def _serve(order_line: socket.socket, to_examiner: socket.socket, place: Place) -> None:
    place.adopt()
    order_line.send(b"{}")
    while True:
        order, descriptors = receive(order_line)
        report = run(order, descriptors, to_examiner, place)
        try:
            order_line.send(json.dumps(report).encode())
        except OSError:
            os._exit(0)


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A packet and the descriptors that came with it; the end of the line is our end."""
    numbers = array.array("i")
    data, extra, _, _ = line.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(8 * numbers.itemsize))
    if not data:
        os._exit(0)
    for level, kind, body in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(body[: len(body) - len(body) % numbers.itemsize])
    return json.loads(data), list(numbers)


class Place:
    """What is special about where we are: the walls that a child has to put up by itself, and whose it becomes."""

    def __init__(self, setup: dict[str, Any], descriptors: list[int]) -> None:
        self.own_walls: bool = setup["own_walls"]
        self.own_pids: bool = setup["own_pids"]
        self.tmp: str | None = setup["tmp"]
        self.uids: list[int] = setup["uids"]
        self.filter = bytes.fromhex(setup["filter"])
        self.processes_before: int = setup.get("processes_before", 0)
        self.adopts = True
        self.null = os.open("/dev/null", os.O_RDWR)  # once for all children
        self.ruleset = descriptors[0] if descriptors else -1
        self.libc = ctypes.CDLL(None, use_errno=True)

    def hide(self) -> None:
        """From here on nobody can look into us or our children, who inherit it; a change of uid hides as well."""
        self._prctl(PR_SET_DUMPABLE, 0)

    def adopt(self) -> None:
        """From here on, whoever loses its parent below us becomes our child: that is how a leftover is noticed.

        gVisor gives such children to process 1 only; there leftovers are found by their uid.
        """
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        except OSError:
            if not (self.own_pids and self.uids[0]):
                raise
            self.adopts = False

    def enter(self, uid: int) -> None:
        """In a child, before anything of a program is read."""
        if self.own_walls:
            os.setpgid(0, 0)
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if not self.own_pids:  # where process 1 is ours, its end is theirs; and every call through ctypes costs
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.own_walls:
            self._prctl(PR_SET_NO_NEW_PRIVS, 1)
            if self.libc.syscall(LANDLOCK_RESTRICT_SELF, self.ruleset, 0) != 0:
                raise OSError(ctypes.get_errno(), "landlock")
        if self.filter:
            self._prctl(PR_SET_NO_NEW_PRIVS, 1)
            self._load_filter()
        os.chdir(self.tmp or "/")

    def is_clean(self) -> bool:
        return self.tmp is None or not os.listdir(self.tmp)  # noqa: PTH208

    def _load_filter(self) -> None:
        code = ctypes.create_string_buffer(self.filter, len(self.filter))
        program = struct.pack("HxxxxxxP", len(self.filter) // 8, ctypes.addressof(code))
        self._prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program))

    def _prctl(self, *words: Any) -> None:
        padded = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in words[1:]]
        if self.libc.prctl(words[0], *padded, *[ctypes.c_ulong(0)] * (5 - len(words))) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {words[0]}")


def run(order: dict[str, Any], descriptors: list[int], to_examiner: socket.socket, place: Place) -> dict[str, Any]:
    """One program, from its descriptors to its report."""
    limits = order["limits"]
    output, child_output = os.pipe()
    started_s = time.monotonic()
    if order["mode"] == "commands":
        order_fd, verdict = descriptors
        child = _fork(
            place, place.uids[0], child_output, [order_fd, verdict], limits, lambda: commands.run(order_fd, verdict)
        )
        _close(order_fd, verdict)
        finished = os.pidfd_open(child)
    else:
        source, test, verdict = descriptors
        requests, ask = os.pipe()
        hear, replies = os.pipe()
        rights = array.array("i", [test, verdict, ask, hear])
        packet = json.dumps({"cpu_s": 4 * limits["cpu_s"] + 30}).encode()
        to_examiner.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        _close(test, verdict, ask, hear)
        child = _fork(
            place, place.uids[0], child_output, [source, requests, replies], limits,
            lambda: candidate.answer_calls(source, requests, replies),
        )  # fmt: skip
        _close(source, requests, replies)
        finished = to_examiner.fileno()
    os.close(child_output)
    stopped = _watch(finished, output, started_s + limits["wall_s"], limits)
    wall_s = time.monotonic() - started_s
    os.close(output)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if place.own_walls:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # setsid and setpgid are refused there: all that it started is in it
    gone = _reap(wait=place.own_walls) if place.adopts else _end_all_of(place.uids[0])
    clean = gone and place.is_clean()
    if order["mode"] == "commands":
        os.close(finished)
    elif stopped and not gone:
        pass  # what is left may hold the candidate's end of the examiner's line; all of it ends with this place
    elif not _examiner_is_done(to_examiner):
        stopped, clean = stopped or "examiner", False
    return {
        "stopped": stopped,
        "wall_s": wall_s,
        "candidate": [status, usage.ru_utime + usage.ru_stime],
        "clean": clean,
    }


def _examiner_is_done(line: socket.socket) -> bool:
    """Whether it waits for the next program. With the candidate gone it has nothing left to wait for."""
    line.settimeout(REAP_TIMEOUT_S)
    try:
        return bool(line.recv(PACKET_BYTES))
    except OSError:
        return False
    finally:
        line.settimeout(None)


def _fork(
    place: Place, uid: int, output: int | None, keep: list[int], limits: dict[str, Any], work: Callable[[], None]
) -> int:
    child = os.fork()
    if child:
        return child
    try:
        for number in (0, 1, 2):
            os.dup2(place.null if number == 0 or output is None else output, number)
        kept = sorted([*keep, *([place.ruleset] if place.own_walls else [])])
        for low, high in zip([2, *kept], [*kept, 1024], strict=True):
            os.closerange(low + 1, high)
        place.enter(uid)
        if place.ruleset >= 0:
            os.close(place.ruleset)
        _limit(limits, place.processes_before)
        random.seed(0)  # the same program, the same verdict
        work()
        os._exit(0)
    except BaseException as error:  # noqa: BLE001
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(1)


def _limit(limits: dict[str, Any], processes_before: int) -> None:
    cpu_s, memory_bytes, file_bytes = limits["cpu_s"], limits["memory_MiB"] << 20, limits["file_MiB"] << 20
    hard_s = resource.RLIM_INFINITY if limits is EXAMINER_LIMITS else cpu_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, hard_s))  # SIGXCPU, and a second later SIGKILL
    # Other languages' machines reserve far more addresses than they use: there, written-to memory is what counts.
    space = resource.RLIMIT_DATA if limits.get("by_data") else resource.RLIMIT_AS
    resource.setrlimit(space, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    processes = limits["processes"] + processes_before
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _watch(finished: int, output: int, deadline_s: float, limits: dict[str, Any]) -> str | None:
    """Wait until the verdict is said. Says why, where a program had to be stopped."""
    poller = select.poll()
    poller.register(ORDER, 0)  # only its closing is of interest, and that is always reported
    poller.register(output, select.POLLIN)
    poller.register(finished, select.POLLIN)
    written = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return "wall"
        events = [descriptor for descriptor, _ in poller.poll(left_s * 1000)]
        if ORDER in events:
            return "nobody waits for it"
        if output in events:
            block = os.read(output, OUTPUT_BLOCK_BYTES)
            written += len(block)
            if not block:
                poller.unregister(output)
            if written > limits["output_KiB"] << 10:
                return "output"
        elif finished in events:
            return None


def _reap(*, wait: bool) -> bool:
    """Collect processes that lost their parent. False where one is still alive."""
    deadline_s = time.monotonic() + REAP_TIMEOUT_S
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if child == 0:
            if not wait or time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)


def _end_all_of(uid: int) -> bool:
    """End every process of a uid that only candidates have, from a process of that uid. False where one stays alive."""
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            deadline_s = time.monotonic() + REAP_TIMEOUT_S
            while time.monotonic() < deadline_s:
                os.kill(-1, signal.SIGKILL)  # all but ourselves
                time.sleep(0.001)
        except ProcessLookupError:  # there is none
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
