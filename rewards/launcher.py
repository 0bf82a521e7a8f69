"""What runs first in a sandboxed process: it gives up every right that the program must not have, then runs the program.

`rewards.sandbox` sends this file's compiled code to a fresh interpreter, so it may import nothing of ours, and only what starts
fast: a stdio task is one process a test, and `typing` alone, or `ctypes` for `_ctypes`, would make its start longer by half.
`rewards.confine` uses the same functions on the calling process.
"""

import _ctypes
import posix
import sys

RESULT_FD = 3
READY = b"R"  # the first byte on `RESULT_FD`: every restriction holds, the program starts now
PREFIX_FD = 4
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446  # the same numbers on every architecture
_CAPABILITIES_VERSION = 0x20080522.to_bytes(4, "little")
_O_PATH = 0o10000000
_SIGKILL = 9
_LIBC = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]


class _Byte(_ctypes._SimpleCData):
    _type_ = "B"


def start(settings: dict) -> None:
    """Confine this process as ``settings`` say (`rewards.sandbox_setup.payload` makes them), then run ``main.py`` as ``__main__``."""
    for given, fd in ((settings["result_fd"], RESULT_FD), (settings["prefix_fd"], PREFIX_FD)):
        if given is not None:
            posix.dup2(given, fd)
            posix.close(given)
    if settings["guard"]:
        _leave_guard()
    # Rules and folder while we still may reach them, files and limits when they count as the program's own.
    ruleset = landlock_ruleset(*settings["landlock"]) if settings["landlock"] is not None else None
    posix.chdir(settings["folder"])
    posix.umask(0o077)
    if settings["uid"] is not None:
        posix.chown(".", settings["uid"], settings["uid"])
        posix.setgroups([])
        posix.setresgid(settings["uid"], settings["uid"], settings["uid"])
        posix.setresuid(settings["uid"], settings["uid"], settings["uid"])
    # Another user has lost them already; the root of a container that has no other user has not.
    if _call("capset", _CAPABILITIES_VERSION + bytes(4), bytes(24)) != 0:
        raise OSError("capabilities can not be given up")
    if settings["prefix_fd"] is not None:
        _reach_interpreter(settings["prefix"], f"/proc/self/fd/{PREFIX_FD}")
    for name, content in settings["files"]:
        _write(name, content)
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if settings["parent"] not in (None, posix.getppid()):
        posix._exit(1)
    no_new_privileges()
    if ruleset is not None:
        landlock_restrict(ruleset, settings["landlock_flags"])
    for which, soft, hard in settings["limits"]:
        if _call("setrlimit", which, soft.to_bytes(8, "little") + hard.to_bytes(8, "little")) != 0:
            raise OSError(f"limit {which} can not be set")
    seccomp(settings["seccomp"])
    posix.write(RESULT_FD, READY)
    _run_main(settings["folder"], settings["args"])


def _leave_guard() -> None:
    """Go on in a child, which will be another user; this process waits for it as process 1 of the namespace.

    All die with process 1. It stays the user that bubblewrap is, which may thus kill it when we are killed, and signals end the child
    as they end any process, while process 1 would be deaf to many.
    """
    child = posix.fork()
    if child == 0:
        return
    for fd in range(PREFIX_FD):
        posix.close(fd)
    _, status = posix.waitpid(child, 0)
    code = posix.waitstatus_to_exitcode(status)
    posix._exit(128 - code if code < 0 else code)


def no_new_privileges() -> None:
    if _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError("no_new_privs can not be set")


def landlock_ruleset(attributes: bytes, rules: list[tuple[str, int]]) -> int:
    """A Landlock ruleset's descriptor. A rule is a path and the rights below it; a path that does not exist is passed over."""
    ruleset = _call("syscall", _LANDLOCK_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        raise OSError("Landlock: the ruleset can not be made")
    for path, rights in rules:
        try:
            fd = posix.open(path, _O_PATH | posix.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
        failed = _call("syscall", _LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
        posix.close(fd)
        if failed:
            raise OSError(f"Landlock: no rule for {path}")
    return ruleset


def landlock_restrict(ruleset: int, flags: int) -> None:
    if _call("syscall", _LANDLOCK_RESTRICT, ruleset, flags) != 0:
        raise OSError("Landlock: the ruleset can not be put in force")
    posix.close(ruleset)


def seccomp(program: bytes) -> None:
    """Put a BPF program in force for this thread and all that it starts. It needs `no_new_privileges`."""
    instructions = (_Byte * len(program)).from_buffer_copy(program)
    address = _ctypes.addressof(instructions)
    header = (len(program) // 8).to_bytes(8, "little") + address.to_bytes(8, "little")  # struct sock_fprog
    if _call("prctl", _PR_SET_SECCOMP, 2, header, 0, 0) != 0:
        raise OSError("seccomp: the filter can not be put in force")


def _call(function: str, *arguments: int | bytes) -> int:
    return _ctypes.call_function(_ctypes.dlsym(_LIBC, function), arguments)


def _write(name: str, content: bytes) -> None:
    folders = name.split("/")[:-1]
    for depth in range(1, len(folders) + 1):
        try:
            posix.mkdir("/".join(folders[:depth]), 0o700)
        except FileExistsError:
            continue
    fd = posix.open(name, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o600)
    written = 0
    while written < len(content):
        written += posix.write(fd, content[written:])
    posix.close(fd)


def _reach_interpreter(prefix: str, instead: str) -> None:
    """The standard library lies where this user may not go, such as below /root: reach it by an open descriptor of its prefix."""

    def moved(path: str) -> str:
        return instead + path[len(prefix) :] if path.startswith(prefix) else path

    for name in ("prefix", "base_prefix", "exec_prefix", "base_exec_prefix", "_stdlib_dir"):
        setattr(sys, name, moved(getattr(sys, name)))
    sys.path[:] = map(moved, sys.path)
    for module in sys.modules.values():
        if hasattr(module, "__path__"):
            module.__path__[:] = map(moved, module.__path__)
    sys.path_importer_cache.clear()


def _run_main(folder: str, args: list[str]) -> None:
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(__name__="__main__", __file__="main.py", __builtins__=__builtins__, __doc__=None, __spec__=None)
    sys.argv[:] = ["main.py", *args]
    sys.path.insert(0, folder)
    try:
        with open("main.py", "rb") as file:
            source = file.read()
        exec(compile(source, "main.py", "exec", dont_inherit=True), main)
    except SystemExit:
        raise
    except MemoryError as error:
        error.__traceback__ = None  # frees what the frames held, or nothing could be printed
        posix.write(2, b"MemoryError\n")
        posix._exit(1)
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # the program's own frames only
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
