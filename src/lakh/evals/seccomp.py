"""A seccomp filter as bytes: system calls that a test program has no need of are refused.

It closes what namespaces leave open: nested user namespaces (whose root may mount memory without bound), sockets of
families that no network namespace holds back (vsock), looking into the harness process, and the kernel interfaces with
the longest record of holes. A refused call fails with EPERM; the program may go on.

Where no namespace stands beside it (`alone`), it also refuses what would reach other processes of the same user, or
files by their name without opening them, which landlock does not see.

Knows x86_64 and aarch64; elsewhere there is no filter, and the sandbox says so in its description.
"""

from __future__ import annotations

import platform
import struct

__all__ = ["filter_bytes"]

# name -> number on (x86_64, aarch64)
REFUSED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "process_madvise": (440, 440),
}
# name -> number, where no namespace holds them back; None where that kind of machine has no such call
REFUSED_ALONE = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "landlock_restrict_self": (446, 446),
}
PRLIMIT = (302, 261)  # of oneself (first argument 0) only
CLONE = (56, 220)
CLONE3 = 435  # its flags lie in memory, where a filter cannot look: say ENOSYS, and libc falls back to clone
CLONE_NEWUSER = 0x10000000
X32_CALLS = 0x40000000  # x86_64 has a second table of calls from this number on

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 1, 38

# Offsets in struct seccomp_data, and the classic-BPF operations used.
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def filter_bytes(machine: str | None = None, *, alone: bool = False) -> bytes | None:
    """The filter for this kind of machine, or None where its call numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        return None
    column = list(AUDIT_ARCH).index(machine)
    refuse = _step(RETURN, ERRNO | EPERM)
    steps = [_step(LOAD, ARCH), _step(IF_EQUAL, AUDIT_ARCH[machine], yes=1), refuse, _step(LOAD, NUMBER)]
    if machine == "x86_64":
        steps += [_step(IF_AT_LEAST, X32_CALLS, no=1), refuse]
    for numbers in REFUSED.values():
        steps += [_step(IF_EQUAL, numbers[column], no=1), refuse]
    if alone:
        for one in REFUSED_ALONE.values():
            if (number := one[column]) is not None:
                steps += [_step(IF_EQUAL, number, no=1), refuse]
        limit = [_step(LOAD, FIRST_ARGUMENT), _step(IF_EQUAL, 0, yes=1), refuse, _step(RETURN, ALLOW)]
        steps += [_step(IF_EQUAL, PRLIMIT[column], no=len(limit)), *limit]
    steps += [_step(IF_EQUAL, CLONE3, no=1), _step(RETURN, ERRNO | ENOSYS)]
    steps += [_step(IF_EQUAL, CLONE[column], no=3), _step(LOAD, FIRST_ARGUMENT), _step(IF_ANY_BIT, CLONE_NEWUSER, no=1)]
    steps += [refuse, _step(RETURN, ALLOW)]
    return b"".join(steps)


def _step(operation: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` say how many to skip."""
    return struct.pack("<HBBI", operation, yes, no, value)
