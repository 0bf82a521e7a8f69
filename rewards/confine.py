"""What a confined process may still do: the seccomp filter and the Landlock rules, and both on the calling process.

The filter is a list of what is allowed, everything else fails with EPERM: no sockets to anyone, no new processes or programs,
no signal, trace, priority or limit for anyone but the process itself. Changing modes, owners, times and links is left out as
well, because Landlock does not govern it: where the sandbox runs as the user of the run it could spoil the run's own files. So is
what takes up a disk unseen: to reserve room beyond a file's end, which no limit bounds, and to send open files away.
Landlock then allows the files. Sources: the kernel's ``Documentation/userspace-api`` on Landlock and seccomp.
"""

from __future__ import annotations

import functools
import os
import platform
import struct
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from rewards import launcher
from rewards.contract import RewardError

# System call, its number on x86-64 and on aarch64 ("-": it does not exist there).
_ALLOWED = """
read 0 63 write 1 64 readv 19 65 writev 20 66 pread64 17 67 pwrite64 18 68 preadv 295 69 pwritev 296 70 preadv2 327 286
pwritev2 328 287 creat 85 - close 3 57 close_range 436 436 stat 4 - fstat 5 80 lstat 6 -
newfstatat 262 79 statx 332 291 statfs 137 43 fstatfs 138 44 access 21 - faccessat 269 48 faccessat2 439 439 readlink 89 -
readlinkat 267 78 getdents 78 - getdents64 217 61 lseek 8 62 flock 73 32 fsync 74 82 fdatasync 75 83 ftruncate 77 46
fadvise64 221 223 sendfile 40 71 copy_file_range 326 285 mkdir 83 - mkdirat 258 34 rmdir 84 - unlink 87 -
unlinkat 263 35 rename 82 - renameat 264 38 renameat2 316 276 chdir 80 49 fchdir 81 50 getcwd 79 17 umask 95 166 dup 32 23
dup2 33 - dup3 292 24 pipe 22 - pipe2 293 59 poll 7 - ppoll 271 73 select 23 - pselect6 270 72 epoll_create 213 -
epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 - epoll_pwait 281 22 epoll_pwait2 441 441 eventfd2 290 19
mmap 9 222 munmap 11 215 mremap 25 216 mprotect 10 226 madvise 28 233 msync 26 227 mincore 27 232 brk 12 214 membarrier 324 283
futex 202 98 set_robust_list 273 99 rseq 334 293 set_tid_address 218 96 sched_yield 24 124 sched_getaffinity 204 123
getcpu 309 168 exit 60 93 exit_group 231 94 gettid 186 178 getpid 39 172 getppid 110 173 getpgrp 111 - getpgid 121 155
getsid 124 156 getuid 102 174 geteuid 107 175 getgid 104 176 getegid 108 177 getresuid 118 148 getresgid 120 150
getgroups 115 158 wait4 61 260 waitid 247 95 rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136
rt_sigtimedwait 128 137 rt_sigsuspend 130 133 sigaltstack 131 132 pause 34 - alarm 37 - setitimer 38 103 getitimer 36 102
restart_syscall 219 128 time 201 - gettimeofday 96 169 
nanosleep 35 101 times 100 153 getrusage 98 165 getrlimit 97 163 setrlimit 160 164 sysinfo 99 179 uname 63 160
getrandom 318 278 recvfrom 45 207 sendto 44 206 shutdown 48 210 getsockopt 55 209
getsockname 51 204 getpeername 52 205
"""
_SOCKETS = """
socket 41 198 connect 42 203 bind 49 200 listen 50 201 accept 43 202 accept4 288 242 setsockopt 54 208 sendmmsg 307 269
recvmmsg 299 243 recvmsg 47 212 sendmsg 46 211
"""
_MODES = """
chmod 90 - fchmod 91 52 fchmodat 268 53
"""
_CONDITIONAL = """
clone 56 220 clone3 435 435 kill 62 129 tgkill 234 131 prlimit64 302 261 fcntl 72 25 ioctl 16 29 prctl 157 167
socketpair 53 199 open 2 - openat 257 56 clock_gettime 228 113 clock_getres 229 114 clock_nanosleep 230 115
"""
_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of the tables, AUDIT_ARCH
_X32 = 0x40000000  # bit of the calls of x86-64's third interface
_THREAD, _NEW_NAMESPACES = 0x10400, 0x7E020000  # flags of clone; a thread shares its open files, which are bounded and looked at
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # no F_SETOWN, F_SETSIG: they make the kernel send signals
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, FIONREAD, FIONBIO, close on exec
_CLOCKS = (*range(12), 2**32 - 6, 2**32 - 2)  # the others tell the CPU time of other processes; these two: our own, our thread's
# To read, to write, and to truncate what is written: for mode 3 Landlock wants no right at all, and its first two versions let a
# file be truncated that is opened to be read.
_OPEN_MASK, _OPEN = (
    os.O_ACCMODE | os.O_TRUNC,
    (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC),
)
_PRCTL = (15, 16, 0x53564D41)  # the thread's name, names of memory
_EPERM, _ENOSYS = 1, 38
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06

_ABI_FLAG = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# Beside both kinds of reading: write, remove and make files and folders, rename between folders, truncate.
_FOLDER = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
_HANDLED = {
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    4: (1 << 15) - 1,
    5: (1 << 16) - 1,
}  # by ABI; from 5 on all alike
_DEVICES = {"/dev/null": _READ_FILE | _WRITE_FILE, "/dev/zero": _READ_FILE, "/dev/urandom": _READ_FILE, "/dev/random": _READ_FILE}


def confine_here(read: Sequence[str], write: Sequence[str] = (), *, sockets: bool = False) -> None:
    """Confine the calling process for good: what it may do from now on, and all its threads to come.

    It may read below ``read``, the interpreter's standard library and the system's libraries (so pass `sys.path` where modules
    are still to be imported), read and write below ``write``; paths that do not exist are passed over. It opens no sockets
    unless ``sockets`` (those that are open stay usable), starts no process or program, and signals only itself.

    Raises `RewardError`, with nothing changed, where this machine has no Landlock or no seccomp, or where the process has other
    threads: Landlock would leave those free.
    """
    reason = missing()
    if reason:
        raise RewardError(f"this process can not be confined: {reason}")
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        raise RewardError(
            f"this process can not be confined: it has {num_threads} threads, and Landlock would bind only one of them; "
            "start no threads while the module is imported (OMP_NUM_THREADS=1 keeps numpy from it)"
        )
    ruleset = launcher.landlock_ruleset(*landlock(read, write, sockets=sockets))
    launcher.no_new_privileges()
    launcher.landlock_restrict(ruleset, landlock_flags())
    launcher.seccomp(seccomp_filter(os.getpid(), sockets=sockets))


@functools.cache
def missing() -> str:
    """Why a process can not be confined here, with what would help; empty where it can."""
    if landlock_abi() < 1:
        needs = "Linux 5.13 or newer with landlock among its security modules (boot with lsm=landlock,...)"
        return missing_filter() or f"the kernel has no Landlock: it needs {needs}"
    return missing_filter()


@functools.cache
def missing_filter() -> str:
    """The same for the system call filter alone."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return f"the system call filter is written for Linux on {' and '.join(_MACHINES)}, not {sys.platform} on {platform.machine()}"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return "the kernel has no seccomp filters (CONFIG_SECCOMP_FILTER)"
    return ""


@functools.cache
def landlock_abi() -> int:
    """The version of Landlock's interface; below 1 where there is none."""
    return int(launcher._call("syscall", launcher._LANDLOCK_CREATE, 0, 0, _ABI_FLAG)) if sys.platform == "linux" else 0


def landlock_flags() -> int:
    """From ABI 7 on denials are logged, and a program could fill the machine's log with them: not those of this program."""
    return 1 if landlock_abi() >= 7 else 0


def landlock(read: Sequence[str], write: Sequence[str], *, sockets: bool) -> tuple[bytes, list[tuple[str, int]]]:
    """The ruleset's attributes and its rules, as `rewards.launcher.landlock_ruleset` takes them."""
    abi = landlock_abi()
    handled = _HANDLED[min(abi, 5)]
    attributes = struct.pack("<Q", handled)
    if abi >= 4:  # TCP: to bind, to connect
        attributes += struct.pack("<Q", 0 if sockets else 3)
    if abi >= 6:  # abstract Unix sockets and signals stay inside
        attributes += struct.pack("<Q", 2 if sockets else 3)
    rules = [*_interpreter_rules(handled)]
    rules += [(path, _rights(path, _READ_FILE | _READ_DIR, handled)) for path in read]
    rules += [(path, _rights(path, _FOLDER, handled)) for path in write]
    return attributes, rules


@functools.cache
def _interpreter_rules(handled: int) -> list[tuple[str, int]]:
    rules = [(path, _rights(path, _READ_FILE | _READ_DIR, handled)) for path in interpreter_paths()]
    return rules + [(path, _rights(path, rights, handled)) for path, rights in _DEVICES.items()]


def _rights(path: str, rights: int, handled: int) -> int:
    return rights & handled & (-1 if os.path.isdir(path) else _OF_FILES)


@functools.cache
def interpreter_paths() -> list[str]:
    """What a bare interpreter reads: itself, its standard library, the system's libraries, the time zones."""
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    own = [os.path.realpath(sys.executable), os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib")]
    own += [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})]
    return [path for path in dict.fromkeys([*libraries, *own]) if Path(path).exists()]


def seccomp_filter(pid: int, *, sockets: bool = False, modes: bool = False) -> bytes:
    """The BPF program for the process ``pid`` (as it sees itself). 8 bytes an instruction.

    ``modes``: it may change the modes of files, as ``shutil.copy`` does: for a process that can reach none of our user's.
    """
    column, arch = _MACHINES[platform.machine()]
    special = _numbers(_CONDITIONAL, column)
    program = _load(4) + _jump(_IF_EQUAL, arch, 1, 0) + _return(_KILL) + _load(0)
    program += _jump(_IF_AT_LEAST, _X32, 0, 1) + _return(_KILL)
    for number in _numbers(_ALLOWED + _SOCKETS * sockets + _MODES * modes, column).values():
        program += _jump(_IF_EQUAL, number, 0, 1) + _return(_ALLOW)
    everything = 0xFFFFFFFF
    rules: dict[str, list[tuple[int, int, Sequence[int]]]] = {
        "clone": [(0, _THREAD | _NEW_NAMESPACES, (_THREAD,))],
        "kill": [(0, everything, (pid,))],
        "tgkill": [(0, everything, (pid,))],
        "prlimit64": [(0, everything, (0, pid))],
        "fcntl": [(1, everything, _FCNTL)],
        "ioctl": [(1, everything, _IOCTL)],
        "prctl": [(0, everything, _PRCTL)],
        # A pair of Unix streams speaks to nobody else, and asyncio needs one; a datagram socket could be pointed elsewhere, and
        # to ask for another family loads its module into the kernel.
        "socketpair": [(0, everything, (1,)), (1, 0xF, (1,))],
        "open": [(1, _OPEN_MASK, _OPEN)],
        "openat": [(2, _OPEN_MASK, _OPEN)],
        "clock_gettime": [(0, everything, _CLOCKS)],
        "clock_getres": [(0, everything, _CLOCKS)],
        "clock_nanosleep": [(0, everything, _CLOCKS)],
    }
    for name, conditions in rules.items():
        if name in special:  # not every architecture has "open"
            program += _allowed_if(special[name], conditions)
    # The C library then takes clone instead, whose flags can be looked at.
    program += _jump(_IF_EQUAL, special["clone3"], 0, 1) + _return(_ERRNO | _ENOSYS)
    return program + _return(_ERRNO | _EPERM)


def _allowed_if(number: int, conditions: Sequence[tuple[int, int, Sequence[int]]]) -> bytes:
    """Allow a system call if each (argument, mask, values) holds: the masked argument is a value. Pass over every other call."""
    body = b""
    for argument, mask, values in conditions:
        body += _load(16 + 8 * argument) + _instruction(_AND, mask)  # the low half: what the kernel takes of these arguments
        for left, value in zip(range(len(values), 0, -1), values, strict=True):
            body += _jump(_IF_EQUAL, value, left, 0)  # over what is left of the values, and the refusal
        body += _return(_ERRNO | _EPERM)
    body += _return(_ALLOW)
    return _jump(_IF_EQUAL, number, 0, len(body) // 8) + body


@functools.cache
def _numbers(table: str, column: int) -> dict[str, int]:
    words = table.split()
    return {words[at]: int(words[at + column]) for at in range(0, len(words), 3) if words[at + column] != "-"}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    return _instruction(test, value, if_true, if_false)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, action)
