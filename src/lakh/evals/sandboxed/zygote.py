"""The processes that stay in a sandbox from program to program, and the fork of one for each program.

    first       waits for the others; in a PID namespace it is process 1, and its end ends everything there
    examiner    holds the tests of one program after another; runs only the benchmark's own code (examiner.py)
    zygote      forks a candidate for every program, enforces its limits, and reports

Forking an interpreter that has done its imports makes a program cheap: about a millisecond instead of a start.

A candidate can find in its memory whatever the zygote had when it forked. So nothing secret ever gets there: source,
test and outcome travel in descriptors that the zygote only passes on.

Requests and responses are JSON packets on descriptor 0. When it closes, everything ends. A response reports whether the
sandbox is as clean as before: no process left, nothing in /tmp. If not, the host discards the whole sandbox, so nothing
has to clean up after a hostile program.
"""

from __future__ import annotations

import _socket as socket  # not socket: what the zygote does not have in memory is not copied for every program
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

from lakh.evals.sandboxed import candidate, commands, examiner, messages

# Imported once, so that no program pays for them. Rarer modules would cost every program more than they save.
COMMON = "bisect copy functools heapq itertools math operator re string typing"

# Under landlock /etc cannot be read, which OpenSSL reads when it starts: these have to be imported before.
BEFORE_LANDLOCK = "cmath collections datetime decimal fractions hashlib random socket statistics sys time"
# With another uid, a Python in root's home cannot be read at all: so does what programs may use.
IF_UNREADABLE = """
    abc argparse array ast asyncio base64 binascii bz2 calendar codecs concurrent.futures configparser
    contextlib copyreg csv dataclasses difflib email.message enum errno fnmatch getopt glob graphlib gzip hmac
    html http.client inspect io ipaddress json keyword linecache locale logging lzma mimetypes multiprocessing
    numbers optparse os pathlib pickle platform pprint profile pstats queue reprlib sched secrets selectors
    shelve shlex shutil signal stat struct subprocess symtable tempfile textwrap threading timeit token
    tokenize trace traceback types unicodedata unittest unittest.mock urllib.parse uuid warnings weakref
    xml.etree.ElementTree zipfile zlib zoneinfo
"""

OUTPUT_BLOCK_BYTES = 1 << 16
REAP_TIMEOUT_S = 5.0
# Its limits on CPU time and memory are set again for every program; the others bound what a candidate can make it do.
EXAMINER_LIMITS = {
    "cpu_s": 3600,
    "memory_MiB": 2048,
    "file_MiB": 1,
    "processes": 4,
    "hard_cpu_s": resource.RLIM_INFINITY,
    "hard_memory_bytes": resource.RLIM_INFINITY,
}
REQUEST_FD = 0
WARM_UPS = 10  # after these, a candidate's first steps change, and so copy, less of the shared memory

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 22, 36
SECCOMP_MODE_FILTER = 2
LANDLOCK_RESTRICT_SELF = 446  # the same number on every architecture


def main() -> None:
    for name in COMMON.split():
        __import__(name)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal without a handler does not reach process 1
    channel = socket.socket(fileno=os.dup(REQUEST_FD))
    isolation = ChildIsolation(*messages.receive_packet(channel))
    isolation.prctl(PR_SET_DUMPABLE, 0)  # unreadable to other processes, as after a change of uid
    if isolation.use_landlock:
        names = BEFORE_LANDLOCK + (IF_UNREADABLE if isolation.uids[0] and not _is_readable_to_all(os.__file__) else "")
        for name in names.split():
            with contextlib.suppress(ImportError):  # a build of Python may lack some
                __import__(name)
    isolation.import_packages()
    for _ in range(WARM_UPS):
        candidate.warm_up()
    gc.collect()
    gc.freeze()
    to_examiner, from_zygote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keep = [from_zygote.fileno()]
    limits = EXAMINER_LIMITS | {"limit_data": bool(isolation.package_modules)}
    examiner_pid = _fork(isolation, isolation.uids[1], None, keep, limits, lambda: examiner.serve(from_zygote))
    from_zygote.close()
    zygote_pid = os.fork()
    if zygote_pid == 0:
        try:
            _serve(channel, to_examiner, isolation)
        finally:
            os._exit(1)
    while True:
        child, _ = os.wait()
        examiner_pid = 0 if child == examiner_pid else examiner_pid
        if child == zygote_pid:
            if examiner_pid:
                with contextlib.suppress(OSError):
                    os.kill(examiner_pid, signal.SIGKILL)
                    os.waitpid(examiner_pid, 0)  # counts its CPU time, which dying with process 1 would not
            os._exit(0)


def _empty(folder: str) -> None:
    import shutil  # only where there are packages, which are far larger

    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.remove(entry.path)  # noqa: PTH107


def _is_readable_to_all(path: str) -> bool:
    while (path := os.path.dirname(path)) != "/":  # noqa: PTH120
        if not os.stat(path).st_mode & 1:  # noqa: PTH116
            return False
    return True


def _serve(channel: socket.socket, to_examiner: socket.socket, isolation: ChildIsolation) -> None:
    isolation.become_subreaper()
    channel.send(b"{}")
    while True:
        request, descriptors = messages.receive_packet(channel)
        response = run(request, descriptors, to_examiner, isolation)
        try:
            channel.send(json.dumps(response).encode())
        except OSError:
            os._exit(0)


class ChildIsolation:
    """What a child has to apply to itself, from the setup message (sandbox/isolation.py)."""

    def __init__(self, setup: dict[str, Any], descriptors: list[int]) -> None:
        self.use_landlock: bool = setup["use_landlock"]
        self.pid_namespace: bool = setup["pid_namespace"]
        self.tmp: str | None = setup["tmp"]
        self.tmp_mode = os.stat(self.tmp).st_mode if self.tmp else 0  # noqa: PTH116
        self.uids: list[int] = setup["uids"]
        self.filter = bytes.fromhex(setup["seccomp_filter"])
        self.processes_before: int = setup["processes_before"]
        self.package_folders: list[str] = setup["package_folders"]
        self.package_modules: list[str] = setup["package_modules"]
        self.is_subreaper = True
        self.null = os.open("/dev/null", os.O_RDWR)  # once for all children
        self.ruleset = descriptors[0] if descriptors else -1
        self.libc = ctypes.CDLL(None, use_errno=True)

    def import_packages(self) -> None:
        """Once for all programs. What cannot be imported ends the process, and stderr says why."""
        sys.path += self.package_folders
        for name in self.package_modules:
            try:
                __import__(name)
            except Exception as error:  # noqa: BLE001 - whatever a package may raise
                sys.exit(f"cannot import {name}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
        if self.package_modules and self.tmp:
            _empty(self.tmp)  # some write settings or caches there

    def become_subreaper(self) -> None:
        """Adopt every descendant that loses its parent: that is how a leftover process is detected.

        gVisor gives such children to process 1 only; there leftovers are found by their uid.
        """
        self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            self.prctl(PR_SET_CHILD_SUBREAPER, 1)
        except OSError:
            if not (self.pid_namespace and self.uids[0]):
                raise
            self.is_subreaper = False

    def tmp_is_clean(self) -> bool:
        """Empty, and as accessible as before: the owner of a program may be the owner of /tmp."""
        if self.tmp is None:
            return True
        return os.stat(self.tmp).st_mode == self.tmp_mode and not os.listdir(self.tmp)  # noqa: PTH116, PTH208

    def apply(self, uid: int) -> None:
        """In a child, before anything of a program is read."""
        if self.use_landlock:
            os.setpgid(0, 0)
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        if not self.pid_namespace:  # with one, all end with its process 1; and every call through ctypes costs
            self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.use_landlock:
            self.prctl(PR_SET_NO_NEW_PRIVS, 1)
            if self.libc.syscall(LANDLOCK_RESTRICT_SELF, self.ruleset, 0) != 0:
                raise OSError(ctypes.get_errno(), "landlock")
        if self.filter:
            self.prctl(PR_SET_NO_NEW_PRIVS, 1)
            code = ctypes.create_string_buffer(self.filter, len(self.filter))
            program = struct.pack("HxxxxxxP", len(self.filter) // 8, ctypes.addressof(code))
            self.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program))
        os.chdir(self.tmp or "/")

    def prctl(self, option: int, *arguments: Any) -> None:
        padded = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
        if self.libc.prctl(option, *padded, *[ctypes.c_ulong(0)] * (4 - len(arguments))) != 0:
            raise OSError(ctypes.get_errno(), f"prctl {option}")


def run(
    request: dict[str, Any], descriptors: list[int], to_examiner: socket.socket, isolation: ChildIsolation
) -> dict[str, Any]:
    """Run one program, whose texts are in the descriptors, and return the response."""
    limits, of_commands = request["limits"], request["mode"] == "commands"
    output, child_output = os.pipe()
    started_s = time.monotonic()
    work: Callable[[], None]
    if of_commands:
        keep = descriptors
        work = lambda: commands.run(*keep)  # noqa: E731
    else:
        source, test, outcome = descriptors
        requests, request_writer = os.pipe()
        reply_reader, replies = os.pipe()
        for_examiner = [test, outcome, request_writer, reply_reader]
        memory_MiB = max(limits["memory_MiB"], EXAMINER_LIMITS["memory_MiB"])  # it holds the answer and the reference's
        allowed = {"cpu_s": 4 * limits["cpu_s"] + 30, "memory_bytes": memory_MiB << 20}
        messages.send_packet(to_examiner, allowed, for_examiner)
        messages.close(*for_examiner)
        keep = [source, requests, replies]
        work = lambda: candidate.serve(*keep)  # noqa: E731
    child = _fork(isolation, isolation.uids[0], child_output, keep, limits, work)
    messages.close(child_output, *keep)
    finished = os.pidfd_open(child) if of_commands else to_examiner.fileno()
    stopped = _watch(finished, output, started_s + limits["wall_s"], limits)
    wall_s = time.monotonic() - started_s
    os.close(output)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    if isolation.use_landlock:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # setsid and setpgid are refused there: it holds all that was started
    gone = _reap(wait=isolation.use_landlock) if isolation.is_subreaper else _kill_all_of(isolation.uids[0])
    clean = gone and isolation.tmp_is_clean()
    if of_commands:
        os.close(finished)
    elif stopped and not gone:
        pass  # a leftover may hold the candidate's end of the examiner's pipes; all of it ends with this sandbox
    elif not _examiner_is_done(to_examiner):
        stopped, clean = stopped or "examiner", False
    candidate_usage = [status, usage.ru_utime + usage.ru_stime]
    return {"stopped": stopped, "wall_s": wall_s, "candidate": candidate_usage, "clean": clean}


def _examiner_is_done(connection: socket.socket) -> bool:
    """Whether it waits for the next program. With the candidate gone, nothing else keeps it."""
    connection.settimeout(REAP_TIMEOUT_S)
    try:
        return bool(connection.recv(messages.PACKET_BYTES))
    except OSError:
        return False
    finally:
        connection.settimeout(None)


def _fork(
    isolation: ChildIsolation, uid: int, output: int | None, keep: list[int], limits: dict[str, Any],
    work: Callable[[], None],
) -> int:  # fmt: skip
    child = os.fork()
    if child:
        return child
    try:
        for number in (0, 1, 2):
            os.dup2(isolation.null if number == 0 or output is None else output, number)
        kept = sorted([*keep, *([isolation.ruleset] if isolation.use_landlock else [])])
        for low, high in zip([2, *kept], [*kept, 1024], strict=True):
            os.closerange(low + 1, high)
        isolation.apply(uid)
        if isolation.ruleset >= 0:
            os.close(isolation.ruleset)
        _limit(limits, isolation.processes_before)
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
    hard_s = limits.get("hard_cpu_s", cpu_s + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, hard_s))  # SIGXCPU, and a second later SIGKILL
    # Runtimes of other languages reserve far more addresses than they use: there, writable memory is what counts.
    space = resource.RLIMIT_DATA if limits["limit_data"] else resource.RLIMIT_AS
    resource.setrlimit(space, (memory_bytes, limits.get("hard_memory_bytes", memory_bytes)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    processes = limits["processes"] + processes_before
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _watch(finished: int, output: int, deadline_s: float, limits: dict[str, Any]) -> str | None:
    """Wait for the outcome. Returns why the program had to be stopped, if it had to be."""
    poller = select.poll()
    poller.register(REQUEST_FD, 0)  # reports only that it was closed
    poller.register(output, select.POLLIN)
    poller.register(finished, select.POLLIN)
    written = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return "wall"
        events = [descriptor for descriptor, _ in poller.poll(left_s * 1000)]
        if REQUEST_FD in events:
            return "channel closed"
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
    """Collect processes that lost their parent. False if one is still alive."""
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


def _kill_all_of(uid: int) -> bool:
    """Kill every process of a uid that only candidates have, from a process of that uid. False if one stays alive."""
    child = os.fork()
    if child == 0:
        try:
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            deadline_s = time.monotonic() + REAP_TIMEOUT_S
            while time.monotonic() < deadline_s:
                os.kill(-1, signal.SIGKILL)  # all but ourselves
                time.sleep(0.001)
        except ProcessLookupError:  # there is none left
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
