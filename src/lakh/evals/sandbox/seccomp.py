"""A seccomp filter as bytes: refuses system calls that a test program does not need.

It closes what namespaces leave open: nested user namespaces (whose root may mount memory without bound), sockets of
families that no network namespace covers (vsock), access to the memory of the harness's processes, memory that belongs
to no process (memory files, shared segments), and the kernel interfaces with the longest record of vulnerabilities. It
refuses to change limits and priorities of other processes and to stop any: candidate, examiner and zygote may share a
uid. A refused call fails with EPERM and the program may continue.

`without_namespaces` also refuses calls that reach other processes of the same user, or change files by name without
opening them, which landlock does not cover.

For x86_64 and aarch64; elsewhere there is no filter, and the sandbox's description shows that.
"""

from __future__ import annotations

import platform
import struct

__all__ = ["filter_bytes"]


def _numbers(table: str) -> list[tuple[int | None, ...]]:
    rows = (row.split() for row in table.split(";"))
    return [tuple(None if number == "-" else int(number) for number in numbers) for _, *numbers in rows]


def _with_argument(table: str) -> list[tuple[tuple[int, int], int]]:
    rows = (row.split() for row in table.split(";"))
    return [((int(x86_64), int(aarch64)), int(argument)) for _, x86_64, aarch64, argument in rows]


# name, number on x86_64, number on aarch64 ("-": no such call)
REFUSED = _numbers("""
    socket 41 198; ptrace 101 117; chroot 161 51; mount 165 40; umount2 166 39; pivot_root 155 41;
    add_key 248 217; request_key 249 218; keyctl 250 219; unshare 272 97; perf_event_open 298 241;
    setns 308 268; process_vm_readv 310 270; process_vm_writev 311 271; kcmp 312 272; bpf 321 280;
    userfaultfd 323 282; io_uring_setup 425 425; open_tree 428 428; move_mount 429 429; fsopen 430 430;
    fsmount 432 432; pidfd_getfd 438 438; mount_setattr 442 442; shmget 29 194; msgget 68 186; semget 64 190;
    mq_open 240 180; io_uring_enter 426 426; io_uring_register 427 427; process_madvise 440 440;
    memfd_create 319 279; memfd_secret 447 447
""")
REFUSED_WITHOUT_NAMESPACES = _numbers("""
    kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138; rt_tgsigqueueinfo 297 240;
    pidfd_send_signal 424 424; pidfd_open 434 434; setsid 112 157; setpgid 109 154; migrate_pages 256 238;
    move_pages 279 239; chmod 90 -; fchmod 91 52; fchmodat 268 53;
    fchmodat2 452 452; chown 92 -; lchown 94 -; fchown 93 55; fchownat 260 54; utime 132 -; utimes 235 -;
    futimesat 261 -; utimensat 280 88; setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7; removexattr 197 14;
    lremovexattr 198 15; fremovexattr 199 16; setxattrat 463 463; removexattrat 466 466; file_setattr 469 469;
    inotify_add_watch 254 27; fanotify_init 300 262; syslog 103 116; landlock_restrict_self 446 446
""")
# name, numbers, and the argument that must be 0, the calling process
ONLY_OWN = _with_argument("""
    prlimit64 302 261 0; setpriority 141 140 1; ioprio_set 251 30 1; sched_setaffinity 203 122 0;
    sched_setscheduler 144 119 0; sched_setparam 142 118 0; sched_setattr 314 274 0
""")
# name, numbers, and the argument with the signal, which must not be one that stops a process
SIGNALS = _with_argument("""
    kill 62 129 1; tkill 200 130 1; tgkill 234 131 2; rt_sigqueueinfo 129 138 1; rt_tgsigqueueinfo 297 240 2;
    pidfd_send_signal 424 424 1
""")
SIGSTOP, SIGTTOU = 19, 22  # SIGTSTP and SIGTTIN lie between them
CLONE = (56, 220)
CLONE3 = 435  # its flags are in memory, out of a filter's reach: with ENOSYS, libc falls back to clone
CLONE_NEWUSER = 0x10000000
X32_CALLS = 0x40000000  # x86_64 has a second table of calls from this number on

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38

# Offsets in struct seccomp_data, and the classic-BPF operations used.
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def filter_bytes(machine: str | None = None, *, without_namespaces: bool = False) -> bytes | None:
    """The filter for this architecture; None for one that is not in the tables."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        return None
    column = list(AUDIT_ARCH).index(machine)
    refuse = _step(RETURN, ERRNO | EPERM)
    steps = [_step(LOAD, ARCH), _step(IF_EQUAL, AUDIT_ARCH[machine], yes=1), refuse, _step(LOAD, NUMBER)]
    if machine == "x86_64":
        steps += [_step(IF_AT_LEAST, X32_CALLS, no=1), refuse]
    for numbers in (*REFUSED, *(REFUSED_WITHOUT_NAMESPACES if without_namespaces else ())):
        if (number := numbers[column]) is not None:
            steps += [_step(IF_EQUAL, number, no=1), refuse]
    for own, argument in ONLY_OWN:
        check = [_load_argument(argument), _step(IF_EQUAL, 0, yes=1), refuse, _step(RETURN, ALLOW)]
        steps += [_step(IF_EQUAL, own[column], no=len(check)), *check]
    for signal, argument in () if without_namespaces else SIGNALS:
        check = [_load_argument(argument), _step(IF_AT_LEAST, SIGSTOP, no=2), _step(IF_AT_LEAST, SIGTTOU + 1, yes=1)]
        check += [refuse, _step(RETURN, ALLOW)]
        steps += [_step(IF_EQUAL, signal[column], no=len(check)), *check]
    steps += [_step(IF_EQUAL, CLONE3, no=1), _step(RETURN, ERRNO | ENOSYS)]
    steps += [_step(IF_EQUAL, CLONE[column], no=3), _load_argument(0), _step(IF_ANY_BIT, CLONE_NEWUSER, no=1)]
    steps += [refuse, _step(RETURN, ALLOW)]
    return b"".join(steps)


def _load_argument(index: int) -> bytes:
    return _step(LOAD, FIRST_ARGUMENT + 8 * index)


def _step(operation: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are the numbers of instructions to skip."""
    return struct.pack("<HBBI", operation, yes, no, value)
