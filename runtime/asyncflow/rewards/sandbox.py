"""Sandbox of a process that runs untrusted code, which must not read a secret or affect other processes.

Before the process loads that code it restricts itself irreversibly: no new privileges, no capabilities, resource
limits, Landlock for files and signals, and a seccomp filter for sockets, other processes, attributes of files, and
system calls that can bypass a sandbox. If a kernel lacks one of these mechanisms, the others still hold, and ``enter``
reports the missing one. On kernels before 6.2, whose Landlock allows to empty files, the filter denies it.

Invariant: an access that ``Sandbox`` does not allow is denied. A change of owner, mode, times or attributes of a file
has no effect, because Landlock does not restrict it, and programs that copy files fail if it is denied. A process that
may start others can only grant rights by a mode, because a linker makes its output executable.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from asyncflow.process import adopt_orphans, prctl

_SYSTEM: Final = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group"),
    *("/etc/ssl", "/etc/pki", "/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/gai.conf"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system"),
    *("/dev/urandom", "/dev/random", "/dev/zero"),
)
"""System paths that a Python process reads; they contain no user's data."""
_DEVICES: Final = ("/dev/null",)
_COMPUTE_FACTOR: Final = 2.0
"""CPU time of a call as a multiple of its deadline, which it may exceed with several threads."""
_OPEN_FILES: Final = 256
_FILE_BYTES: Final = 256 << 20
MOST_THREADS: Final = 256
"""Most threads, in addition to the allowed processes."""
_OTHERS: Final = 4096
"""Threads that the user's other programs may start later without preventing this process from starting its own."""
_OWN_THREADS: Final = "/proc/self/task"
"""Folder in which a process names its threads; without access NVIDIA's driver fails with error 304."""
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial PID namespace of the machine (the kernel's proc_ns.h)."""


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions of a sandboxed process.

    readable, writable: files and folders, in addition to the paths that Python itself needs; hidden: resolved folders
    inside readable ones whose files cannot be read; network: whether internet sockets may be opened; processes: number
    of processes that may be started; memory: bytes of address space of each process; devices: device files of
    accelerators.

    The driver of an accelerator reserves address space for all memory of the machine, shares memory with the device in
    files without a name, and names its threads. With ``devices``, ``memory`` therefore limits private memory
    (RLIMIT_DATA), and such files and thread names are allowed.
    """

    readable: list[str]
    writable: list[str]
    memory: int
    hidden: list[bytes] = []
    network: bool = False
    processes: int = 0
    devices: list[str] = []


def enter(sandbox: Sandbox) -> list[str]:
    """Restrict this process, which must have one thread, permanently.

    A process that may start others also adopts orphaned descendants, so that its parent can find them. Return a message
    for each restriction that the kernel does not support: [] on Linux 6.12 or newer. Raises OSError if the kernel
    refuses a limit that every kernel has.
    """
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if sandbox.processes:
        adopt_orphans(enabled=True)
    _limit(sandbox)
    _drop_capabilities()
    return [*_restrict_files(sandbox), *_filter_calls(sandbox)]


def limit_cpu(seconds: float) -> None:
    """Limit the CPU time of a call with a deadline of ``seconds``, which begins now; the kernel ends it (SIGXCPU)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = used.ru_utime + used.ru_stime + _COMPUTE_FACTOR * seconds
    resource.setrlimit(resource.RLIMIT_CPU, (int(most) + 1, resource.RLIM_INFINITY))


def _limit(sandbox: Sandbox) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA if sandbox.devices else resource.RLIMIT_AS: sandbox.memory,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
    }
    if os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE:
        limits[resource.RLIMIT_NPROC] = _tasks_of_user() + MOST_THREADS + sandbox.processes + _OTHERS
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))


def _tasks_of_user() -> int:
    """Count the threads of this user, which RLIMIT_NPROC counts, too.

    RLIMIT_NPROC also counts threads in other containers, so a process in a container cannot determine the number.
    """
    count, user = 0, os.getuid()
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
        except OSError:
            continue
    return count


# --- prctl and capabilities

_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITIES: Final = 64
_CAPABILITY_VERSION: Final = 0x20080522

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _drop_capabilities() -> None:
    """Drop all capabilities, including those of programs that this process executes as root."""
    for capability in range(_CAPABILITIES):
        try:
            if prctl(_PR_CAPBSET_READ, capability):
                prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:
                break
            if error.errno != errno.EPERM:
                raise
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)
    if _libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


# --- Landlock: https://docs.kernel.org/userspace-api/landlock.html

_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION_FLAG: Final = 1
_RULE_PATH_BENEATH: Final = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_REFER, _TRUNCATE, _IOCTL_DEVICE = (1 << bit for bit in (13, 14, 15))
_RIGHTS_BY_VERSION: Final = {1: (1 << 13) - 1, 2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEVICE}
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_TRUNCATE_VERSION, _TCP_VERSION, _SCOPE_VERSION = 3, 4, 6
_BIND_AND_CONNECT: Final = 3
_ABSTRACT_SOCKETS_AND_SIGNALS: Final = 3


def _landlock_version() -> int:
    version: int = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION_FLAG)
    return version


def _restrict_files(sandbox: Sandbox) -> list[str]:
    version = _landlock_version()
    if version < 1:
        return [f"files are not restricted: the kernel has no Landlock ({os.strerror(ctypes.get_errno())})"]
    handled = sum(rights for since, rights in _RIGHTS_BY_VERSION.items() if since <= version)
    network = _BIND_AND_CONNECT if version >= _TCP_VERSION and not sandbox.network else 0
    scoped = _ABSTRACT_SOCKETS_AND_SIGNALS if version >= _SCOPE_VERSION else 0
    attributes = struct.pack("QQQ", handled, network, scoped)
    size = 24 if version >= _SCOPE_VERSION else 16 if version >= _TCP_VERSION else 8
    ruleset = _landlock(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    try:
        hidden = {Path(os.fsdecode(folder)) for folder in sandbox.hidden}
        above = {parent for folder in hidden for parent in folder.parents}
        for path in (*_SYSTEM, *_python(), *sandbox.readable):
            for shown, rights in _without(Path(path).resolve(), hidden, above):
                _allow(ruleset, str(shown), rights & handled)
        for path in (*_DEVICES, *sandbox.devices, *sandbox.writable):
            _allow(ruleset, path, handled)
        if sandbox.devices:
            _allow(ruleset, _OWN_THREADS, (_WRITE_FILE | _TRUNCATE) & handled)
        _landlock(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    if sandbox.processes and version < _SCOPE_VERSION:
        return ["signals to other processes of this user are not restricted: the kernel is older than 6.12"]
    return []


def _python() -> Iterator[str]:
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix}
    yield str(Path(__file__).parents[1])
    yield from (path for path in sys.path if path)


def _without(path: Path, hidden: Set[Path], above: Set[Path]) -> Iterator[tuple[Path, int]]:
    """Yield paths and read rights, which together allow to read ``path`` except the files in ``hidden``.

    above: all parents of the folders in ``hidden``. A right on a folder includes everything below it, so file names in
    ``hidden`` can be listed if a parent can be listed. A symbolic link gives no right to read its target.
    """
    if not hidden.isdisjoint((path, *path.parents)):
        return
    if path not in above:
        yield path, _READ
        return
    yield path, _READ_DIR
    try:
        entries = [Path(entry.path) for entry in os.scandir(path) if not entry.is_symlink()]
    except OSError:
        return
    for inside in entries:
        yield from _without(inside, hidden, above)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        folder = Path(path).is_dir()
        rule = struct.pack("=Qi", rights if folder else rights & _OF_FILES, descriptor)
        _landlock(_LANDLOCK_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


def _landlock(call: int, *arguments: object) -> int:
    result: int = _libc.syscall(call, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock (system call {call}): {os.strerror(ctypes.get_errno())}")
    return result


# --- seccomp: https://docs.kernel.org/userspace-api/seccomp_filter.html


class _Machine(NamedTuple):
    """Numbers of a processor architecture.

    audit: its AUDIT_ARCH value; seccomp: the number of the system call ``seccomp``; numbers: numbers of other system
    calls by name.
    """

    audit: int
    seccomp: int
    numbers: dict[str, int]


_NUMBERS: Final = {
    "x86_64": """
        open 2 ioctl 16 shmget 29 shmat 30 shmctl 31 socket 41 connect 42 socketpair 53 clone 56 fork 57 vfork 58
        kill 62 semget 64 semop 65 semctl 66 msgget 68 msgsnd 69 msgrcv 70 msgctl 71 fcntl 72 truncate 76 chmod 90
        fchmod 91 chown 92 fchown 93 lchown 94 ptrace 101 rt_sigqueueinfo 129 utime 132 setpriority 141
        sched_setparam 142 sched_setscheduler 144 setxattr 188 lsetxattr 189 fsetxattr 190 removexattr 197
        lremovexattr 198 fremovexattr 199 tkill 200 sched_setaffinity 203 semtimedop 220 tgkill 234 utimes 235
        mq_open 240 mq_unlink 241 add_key 248 request_key 249 keyctl 250 ioprio_set 251 openat 257 fchownat 260
        futimesat 261 fchmodat 268 unshare 272 utimensat 280 rt_tgsigqueueinfo 297 perf_event_open 298 prlimit64 302
        open_by_handle_at 304 setns 308 process_vm_readv 310 process_vm_writev 311 kcmp 312 sched_setattr 314
        memfd_create 319 bpf 321 userfaultfd 323
    """,
    "aarch64": """
        setxattr 5 lsetxattr 6 fsetxattr 7 removexattr 14 lremovexattr 15 fremovexattr 16 fcntl 25 ioctl 29
        ioprio_set 30 truncate 45 fchmod 52 fchmodat 53 fchownat 54 fchown 55 openat 56 utimensat 88 unshare 97
        ptrace 117 sched_setparam 118 sched_setscheduler 119 sched_setaffinity 122 kill 129 tkill 130 tgkill 131
        rt_sigqueueinfo 138 setpriority 140 mq_open 180 mq_unlink 181 msgget 186 msgctl 187 msgrcv 188 msgsnd 189
        semget 190 semctl 191 semtimedop 192 semop 193 shmget 194 shmctl 195 shmat 196 socket 198 socketpair 199
        connect 203 add_key 217 request_key 218 keyctl 219 clone 220 rt_tgsigqueueinfo 240 perf_event_open 241
        prlimit64 261 open_by_handle_at 265 setns 268 process_vm_readv 270 process_vm_writev 271 kcmp 272
        sched_setattr 274 memfd_create 279 bpf 280 userfaultfd 282
    """,
    "all": """
        pidfd_send_signal 424 io_uring_setup 425 io_uring_enter 426 io_uring_register 427 clone3 435 openat2 437
        pidfd_getfd 438 memfd_secret 447 fchmodat2 452 setxattrat 463 removexattrat 466 file_setattr 469
    """,
}
"""System calls by processor, each followed by its number (the kernel's unistd.h)."""


def _numbers(*tables: str) -> dict[str, int]:
    words = " ".join(_NUMBERS[table] for table in tables).split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


_MACHINES: Final = {
    "x86_64": _Machine(audit=0xC000003E, seccomp=317, numbers=_numbers("x86_64", "all")),
    "aarch64": _Machine(audit=0xC00000B7, seccomp=277, numbers=_numbers("aarch64", "all")),
}
_ALWAYS: Final = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "open_by_handle_at", "unshare"),
    *("setns", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "memfd_secret", "shmget", "shmat", "shmctl", "semget", "semop", "semctl"),
    *("semtimedop", "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink", "setpriority", "ioprio_set"),
)
"""System calls that are always denied: they inspect other processes or delay them, use what these share, get new
rights, bypass the filter, or allocate memory outside of the address space."""
_OPENS: Final = {"open": 1, "openat": 2}
"""System calls that open a file, and which of their arguments is the flags."""
_READ_AND_TRUNCATE: Final = 0x200
"""The bit O_TRUNC of the flags without a bit of ``_ACCESS``: a right to read is then enough to empty a file."""
_ACCESS: Final = 0x3
_OWNERS: Final = {"fcntl": (8, 15), "ioctl": (0x8901, 0x8902)}
"""Commands (F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP) that name a process: the kernel sends it a signal, of any
number, when a file has data."""
_SCHEDULING: Final = ("sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
_ATTRIBUTES: Final = (
    *("chown", "fchown", "lchown", "fchownat", "utime", "utimes", "futimesat", "utimensat", "file_setattr"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr"),
    "removexattrat",
)
_MODES: Final = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2}
"""System calls that change the mode of a file, and which of their arguments is the mode."""
_OWNERS_RIGHTS: Final = 0o700
_NAMELESS_FILE: Final = "memfd_create"
"""System call that also allocates memory outside of the address space; CUDA needs it (error 304 since driver 570)."""
_SIGNALS: Final = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_INTERNET: Final = (2, 10, 16)
"""AF_INET, AF_INET6, and AF_NETLINK, with which the resolver queries addresses."""
_UNIX: Final = 1
_STREAM, _PACKETS = 1, 5
"""SOCK_STREAM and SOCK_SEQPACKET: such sockets send only to the peer that they are connected to."""
_SOCKET_TYPE: Final = 0xF
_CLONE_THREAD: Final = 0x00010000
_NEW_NAMESPACES: Final = 0x7E020000
_CLONE_PARENT: Final = 0x00008000
"""Flag of a new process that is no descendant of the one that starts it, so that it would not be found and ended."""
_X32: Final = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER_AT, _AUDIT_AT, _FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT = 0, 4, 16, 24
_ARGUMENT_BYTES = 8
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_SET_FILTER, _ALL_THREADS = 1, 1


def _error(number: int) -> int:
    return 0x00050000 | number


_Filter = list[tuple[int, int, int, int]]


def _filter_calls(sandbox: Sandbox) -> list[str]:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return [f"system calls are not filtered: no table of them for {platform.machine()}"]
    instructions = _program(machine, sandbox, pid=os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in instructions))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code))
    if _libc.syscall(machine.seccomp, _SET_FILTER, _ALL_THREADS, program) != 0:
        return [f"system calls are not filtered: the kernel has no seccomp ({os.strerror(ctypes.get_errno())})"]
    return []


def _program(machine: _Machine, sandbox: Sandbox, *, pid: int) -> _Filter:
    """Return the filter: the first rule for a system call decides, and calls without a rule are allowed."""
    rules: _Filter = [
        (_LOAD, 0, 0, _AUDIT_AT),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine.audit == _MACHINES["x86_64"].audit:
        rules += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _error(errno.EPERM))]
    for name in _ALWAYS if sandbox.devices else (*_ALWAYS, _NAMELESS_FILE):
        rules += _on(machine, name, _deny())
    sockets = _unless_argument_in(_INTERNET) if sandbox.network else _deny()
    rules += _on(machine, "socket", _unix_packets_or(sockets) if sandbox.devices else sockets)
    rules += _on(machine, "socketpair", _unless_type_in((_STREAM, _PACKETS)))
    rules += [] if sandbox.network else _on(machine, "connect", _deny())
    rules += _on(machine, "clone3", _deny(errno.ENOSYS))
    for name in ("prlimit64", *_SCHEDULING):
        rules += _on(machine, name, _unless_argument_in((0, pid)))
    if _landlock_version() < _TRUNCATE_VERSION:
        rules += _on(machine, "truncate", _deny())
        rules += _on(machine, "openat2", _deny(errno.ENOSYS))
        for name, argument in _OPENS.items():
            rules += _on(
                machine, name, _deny_masked(argument, mask=_READ_AND_TRUNCATE | _ACCESS, value=_READ_AND_TRUNCATE)
            )
    for name, commands in _OWNERS.items():
        rules += _on(machine, name, _deny_second_in(commands))
    for name in _ATTRIBUTES:
        rules += _on(machine, name, _ignore())
    for name, argument in _MODES.items():
        rules += _on(machine, name, _ignore_without(_OWNERS_RIGHTS, argument) if sandbox.processes else _ignore())
    if sandbox.processes:
        return [*rules, *_on(machine, "clone", _deny_with(_NEW_NAMESPACES | _CLONE_PARENT)), (_RETURN, 0, 0, _ALLOW)]
    for name in ("fork", "vfork", "pidfd_send_signal"):
        rules += _on(machine, name, _deny())
    for name in _SIGNALS:
        rules += _on(machine, name, _unless_argument_in((pid,)))
    return [*rules, *_on(machine, "clone", _deny_without(_CLONE_THREAD)), (_RETURN, 0, 0, _ALLOW)]


def _on(machine: _Machine, name: str, action: _Filter) -> _Filter:
    """Return a rule for one system call. The accumulator holds the call's number, also afterwards if it is another."""
    number = machine.numbers.get(name)
    return [] if number is None else [(_EQUAL, 0, len(action), number), *action]


def _deny(reason: int = errno.EPERM) -> _Filter:
    return [(_RETURN, 0, 0, _error(reason))]


def _ignore() -> _Filter:
    """Return the rule that skips the call and reports success."""
    return [(_RETURN, 0, 0, _error(0))]


def _masked(argument: int, mask: int) -> _Filter:
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT + _ARGUMENT_BYTES * argument), (_AND, 0, 0, mask)]


def _ignore_without(bits: int, argument: int) -> _Filter:
    """Return the rule that ignores calls whose argument lacks one of ``bits``."""
    return [*_masked(argument, bits), (_EQUAL, 1, 0, bits), *_ignore(), (_RETURN, 0, 0, _ALLOW)]


def _deny_masked(argument: int, *, mask: int, value: int) -> _Filter:
    return [*_masked(argument, mask), (_EQUAL, 0, 1, value), *_deny(), (_RETURN, 0, 0, _ALLOW)]


def _unless_argument_in(allowed: Sequence[int]) -> _Filter:
    tests = [(_EQUAL, len(allowed) - index, 0, value) for index, value in enumerate(allowed)]
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), *tests, *_deny(), (_RETURN, 0, 0, _ALLOW)]


def _deny_second_in(denied: Sequence[int]) -> _Filter:
    tests = [(_EQUAL, len(denied) - index, 0, value) for index, value in enumerate(denied)]
    return [(_LOAD, 0, 0, _SECOND_ARGUMENT_AT), *tests, (_RETURN, 0, 0, _ALLOW), *_deny()]


def _unless_type_in(allowed: Sequence[int]) -> _Filter:
    """Return the rule that denies socket types other than ``allowed``."""
    _, *tests = _unless_argument_in(allowed)
    return [(_LOAD, 0, 0, _SECOND_ARGUMENT_AT), (_AND, 0, 0, _SOCKET_TYPE), *tests]


def _unix_packets_or(others: _Filter) -> _Filter:
    """Return the rule for sockets that allows Unix sockets of packets; ``others`` is the rule for other families.

    CUDA listens at such a socket, to share its memory with other processes, and fails without it (error 304).
    """
    packets = _unless_type_in((_PACKETS,))
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_EQUAL, 0, len(packets), _UNIX), *packets, *others]


def _deny_with(bits: int) -> _Filter:
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_ANY_BIT, 0, 1, bits), *_deny(), (_RETURN, 0, 0, _ALLOW)]


def _deny_without(bits: int) -> _Filter:
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), (_ANY_BIT, 1, 0, bits), *_deny(), (_RETURN, 0, 0, _ALLOW)]
