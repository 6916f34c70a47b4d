"""The process inside the sandbox: runs one program in a child and says how it ended, in one line.

This file is not imported: its text is handed to a bare interpreter (`python -c`) inside the walls, so it may use the
standard library only, and little of it, because every program pays for its imports.

The order comes over stdin, which then stays open: its end means that whoever ordered is gone, and everything here ends
too. As process 1 of its own PID namespace the harness cannot be signalled by the program, and whatever the program
started dies with it.

How a pass is proven. The child runs the candidate's text, and only then reads the test, and after the test a random
nonce, from a sealed memory file; it returns the nonce over a pipe and the harness compares. Printing, exit code 0, or
ending early therefore prove nothing. The verdict goes to the harness's stdout, which the child does not have.

What is left: test and candidate share a process, so a program written against this very harness can still find the two
descriptors, or hand the test objects that equal everything. That is forgery, not escape: it stays inside the walls.

Answer: kind TAB cpu_s TAB wall_s TAB detail.
"""

import fcntl
import marshal
import os
import resource
import select
import signal
import sys
import time

NONCE_BYTES = 16
DETAIL_CHARS = 300
TALK_BYTES = 4096
BLOCK_BYTES = 1 << 16


def main() -> None:
    order = marshal.load(sys.stdin.buffer)
    _become(order["uid"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal without a handler does not reach process 1
    limits = order["limits"]
    test = order.pop("test").encode("utf-8", "surrogatepass")
    sealed = _seal(test)
    talk, child_talk = os.pipe()
    output, child_output = os.pipe()
    size = len(test)
    del test
    started_s = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _be_candidate(order["source"], sealed, size, child_talk, child_output, limits)
        finally:
            os._exit(1)
    os.close(child_talk)
    os.close(child_output)
    stopped, said = _watch(child, talk, output, started_s + limits["wall_s"], limits)
    _, status, usage = os.wait4(child, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    nonce = os.pread(sealed, NONCE_BYTES, size)
    kind, detail = stopped or _judge(status, said, nonce, cpu_s, limits)
    _answer(kind, cpu_s, time.monotonic() - started_s, detail)


def _become(uid: int) -> None:
    """Drop root for good. Root is exempt from the process limit, whatever its user namespace calls it."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def _seal(test: bytes) -> int:
    """Test, then nonce, in a memory file that nobody can change any more."""
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with os.fdopen(os.dup(sealed), "wb") as file:
        file.write(test + os.urandom(NONCE_BYTES))
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, seals)
    return sealed


def _be_candidate(source: str, sealed: int, size: int, talk: int, output: int, limits: dict) -> None:
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    low, high = sorted((sealed, talk))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, 1024)
    _limit(limits)
    module = type(sys)("solution")
    sys.modules["solution"] = module
    try:
        exec(compile(source, "<solution>", "exec", dont_inherit=True), vars(module))
        exec(compile(_pread(sealed, size, 0), "<test>", "exec", dont_inherit=True), vars(module))
        said = b"passed " + os.pread(sealed, NONCE_BYTES, size)
    except MemoryError:
        said = b"memory MemoryError"
    except BaseException as error:  # noqa: BLE001 - whatever a program may raise, SystemExit too
        said = b"failed " + _describe(error)
    os.write(talk, said + b"\n")
    os._exit(0)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    parts = []
    while size > 0 and (part := os.pread(descriptor, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def _limit(limits: dict) -> None:
    cpu_s = limits["cpu_s"]
    memory_bytes, file_bytes = limits["memory_MiB"] << 20, limits["file_MiB"] << 20
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, and a second later SIGKILL
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))


def _describe(error: BaseException) -> bytes:
    """Type, words and line of an error. The words are the program's own code, so anything may happen here."""
    try:
        where, trace = "", error.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if name in ("<solution>", "<test>"):
                where = f" ({name[1:-1]} line {trace.tb_lineno})"
            trace = trace.tb_next
        words = str(error)[:DETAIL_CHARS]
        text = type(error).__name__ + (f": {words}" if words else "") + where
        return text.encode("ascii", "backslashreplace")
    except BaseException:  # noqa: BLE001
        return b"an error that cannot be described"


def _watch(child: int, talk: int, output: int, deadline_s: float, limits: dict) -> tuple:
    """Wait until the child has ended. Returns ((kind, detail) if it had to be stopped else None, what it said)."""
    ended = os.pidfd_open(child)
    poller = select.poll()
    poller.register(sys.stdin.fileno(), 0)  # only its closing is of interest, and that is always reported
    for descriptor in (talk, output, ended):
        poller.register(descriptor, select.POLLIN)
    said, written = b"", 0
    stopped = None
    while stopped is None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            stopped = ("timeout", f"wall limit of {limits['wall_s']:g} s")
            break
        events = [descriptor for descriptor, _ in poller.poll(left_s * 1000)]
        if sys.stdin.fileno() in events:
            os.kill(child, signal.SIGKILL)
            os._exit(1)
        if output in events:
            block = os.read(output, BLOCK_BYTES)
            written += len(block)
            if not block:
                poller.unregister(output)
            if written > limits["output_KiB"] << 10:
                stopped = ("output", f"wrote more than {limits['output_KiB']} KiB")
        if talk in events:
            block = os.read(talk, TALK_BYTES)
            said += block
            if not block or len(said) > TALK_BYTES:
                poller.unregister(talk)
        elif ended in events:  # and nothing is left in the pipe
            break
    os.kill(child, signal.SIGKILL)  # not yet waited for, so the number is still its own
    return stopped, said


def _judge(status: int, said: bytes, nonce: bytes, cpu_s: float, limits: dict) -> tuple:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # The limit is kept in whole ticks and cpu_s is exact: on a shared machine it was seen 15 % below the limit.
        if number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s > limits["cpu_s"] / 2):
            return "timeout", f"CPU limit of {limits['cpu_s']} s"
        return "failed", f"killed by signal {number} ({signal.strsignal(number)})"
    if said == b"passed " + nonce + b"\n" and status == 0:
        return "passed", ""
    # Processes that the program forked may have spoken too; the first word counts.
    kind, _, detail = said.partition(b"\n")[0].partition(b" ")
    if kind in (b"failed", b"memory"):
        return kind.decode(), detail.decode("ascii", "replace")
    return "failed", f"ended before its test did (exit code {os.waitstatus_to_exitcode(status)})"


def _answer(kind: str, cpu_s: float, wall_s: float, detail: str) -> None:
    words = " ".join(detail.split())[:DETAIL_CHARS]
    os.write(1, f"{kind}\t{cpu_s:.3f}\t{wall_s:.3f}\t{words}\n".encode("ascii", "replace"))


if __name__ == "__main__":
    main()
