"""Programs that want out. Each attack is run outside too, where it must succeed: one that cannot work anywhere proves nothing."""

import json
import os
import platform
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rewards.sandbox import Limits, run_python

pytestmark = pytest.mark.timeout(60)

LIMITS = Limits(cpu_s=5, wall_s=15, memory_bytes=2**29, output_bytes=2**16, file_bytes=2**20, num_files=50)
SECRET = "sentinel123"

# `w` describes the world outside. What an attack leaves in `out` it has got hold of; refusals are OSErrors.
ATTACKS = {
    "read": "out = open(w['secret']).read()",
    "read in the working directory": "out = open(w['here'] + '/secret-here').read()",
    "read by ..": "out = open('../' * 30 + w['secret'][1:]).read()",
    "read by a symbolic link": "os.symlink(w['secret'], 'link'); out = open('link').read()",
    "read by a hard link": "os.link(w['secret'], w['secret'] + '2'); out = open(w['secret'] + '2').read()",
    "read by /proc/self/root": "out = open('/proc/self/root' + w['secret']).read()",
    "read by the parent's descriptor": 'out = open(f\'/proc/{w["parent"]}/fd/{w["fd"]}\').read()',
    "read by the parent's folder": "out = open(f'/proc/{w[\"parent\"]}/cwd/secret-here').read()",
    "read the parent's environment": "out = open(f'/proc/{w[\"parent\"]}/environ').read()",
    "read the parent's memory": "out = open(f'/proc/{w[\"parent\"]}/mem', 'rb').seek(0)",
    "list": "out = os.listdir(w['outside'])",
    "list the system's files": "out = 'passwd' in os.listdir('/etc') or 1 / 0",
    "list by an open folder": "os.chdir('/'); out = os.listdir(w['outside'][1:])",
    "watch": "if libc.inotify_add_watch(libc.inotify_init(), w['outside'].encode(), 2) < 0: raise OSError",
    "write": "open(w['outside'] + '/mark', 'w').write('x')",
    "append": "open(w['secret'], 'a').write('x')",
    "truncate": "os.truncate(w['secret'], 0)",
    "remove": "os.unlink(w['secret'])",
    "make a folder": "os.mkdir(w['outside'] + '/mark')",
    "move in": "os.rename(w['secret'], 'mine')",
    "change the mode": "os.chmod(w['secret'], 0o777)",
    "change the owner": "os.chown(w['secret'], os.getuid(), os.getgid())",
    "change the times": "os.utime(w['secret'], (1, 1))",
    "change the interpreter": "os.utime(os.__file__)",
    "a pipe outside": "os.mkfifo(w['outside'] + '/mark')",
    "TCP": "socket.create_connection(('127.0.0.1', w['port']), 2).send(b'x')",
    "TCP without blocking": "s = socket.socket(); s.setblocking(False); s.connect_ex(('127.0.0.1', w['port']))",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', w['port']))",
    "names": "socket.getaddrinfo('localhost', 80)",
    "a Unix socket": "socket.socket(socket.AF_UNIX).connect(w['unix'])",
    "an abstract Unix socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + w['abstract'])",
    "a pair sent elsewhere": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', chr(0) + w['datagram'])",
    "the kernel's messages": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "kill": "os.kill(w['victim'], 9)",
    "signal 0": "os.kill(w['victim'], 0)",
    "kill by a pidfd": "signal.pidfd_send_signal(os.pidfd_open(w['victim']), 9)",
    "kill by the owner of a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, w['victim'])",
    "trace": "if libc.ptrace(16, w['victim'], 0, 0): raise OSError",
    "its limits": "resource.prlimit(w['victim'], resource.RLIMIT_NOFILE, (9, 9))",
    "its priority": "os.setpriority(os.PRIO_PROCESS, w['victim'], 9)",
    "its cores": "os.sched_setaffinity(w['victim'], {0})",
    "a shell": "os.execv('/bin/sh', ['sh', '-c', 'echo BROKE'])",
    "a process": "subprocess.run(['/bin/true'])",
    "a fork": "os.fork() or os._exit(0)",
    "a fork by the raw call": "if libc.syscall(w['fork'], 17, 0, 0, 0, 0) == -1: raise OSError",
    "a session": "os.setsid()",
    "a namespace": "if libc.unshare(0x10000000): raise OSError",
    "a thread in a namespace": "if libc.unshare(0x400): raise OSError",
    "memory as a file": "os.memfd_create('x')",
    "shared memory": "if libc.shmget(0, 4096, 0o1600) < 0: raise OSError",
    "a personality": "if libc.personality(0x40000) < 0: raise OSError",
    "the CPU time of others": "out = time.clock_gettime(~w['victim'] << 3 | 2)",
    "room beyond a file's end": "if libc.fallocate(os.open('room', 66), 1, ctypes.c_long(0), ctypes.c_long(2**22)): raise OSError",
    "open to neither read nor write": "os.open(w['secret'], 3)",
    "open to read, and truncate": "os.open(w['secret'], os.O_RDONLY | os.O_TRUNC)",
    "an open file sent away": "pair = socket.socketpair(); socket.send_fds(pair[0], [b'x'], [0])",
    "a module of the kernel's": "if libc.socketpair(30, 1, 0, ctypes.c_longlong()) and ctypes.get_errno() == 1: raise OSError",
    "a thread with files of its own": "stack = ctypes.create_string_buffer(2**16)\n"
    "if libc.clone(libc.pause, ctypes.c_void_p(ctypes.addressof(stack) + 65000 & -64), 0x10900, None) < 0: raise OSError",
    "the end of the parent's bond": "if libc.prctl(1, 0, 0, 0, 0): raise OSError",
    "a secret of the kernel's": "if libc.syscall(w['add_key'], b'user', b'limen-test', b'x', 1, -2) < 0: raise OSError",
}
# Other defences, of a container or for whoever is not root, refuse these outside as well.
MAY_BE_REFUSED_OUTSIDE = {
    "read the parent's memory",
    "change the interpreter",
    "trace",
    "a namespace",
    "a secret of the kernel's",
    "kill by a pidfd",
}
PROGRAM = """
import ctypes, fcntl, json, os, resource, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
home = os.getcwd()
w, *attacks = json.load(sys.stdin)
for attack in attacks:
    out = None
    os.chdir(home)
    try:
        exec(attack)
    except (OSError, ZeroDivisionError) as error:
        print("refused", repr(error), flush=True)
    else:
        print("BROKE", out, flush=True)
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Files that every user may read, sockets that listen, a process to be attacked, a secret in our environment."""
    monkeypatch.setenv("FAKE_API_KEY", SECRET)
    outside = tmp_path / "outside"
    here = tmp_path / "here"
    for folder in (outside, here):
        folder.mkdir()
        folder.chmod(0o777)
    for folder in (
        tmp_path,
        tmp_path.parent,
        tmp_path.parent.parent,
    ):  # pytest's folders are closed: ours must not be safe by that
        folder.chmod(0o755)
    monkeypatch.chdir(here)
    secret = outside / "secret"
    for file in (secret, here / "secret-here"):
        file.write_text(SECRET)
        file.chmod(0o666)
    name = f"limen-test-{os.getpid()}"
    unix = str(outside / "unix")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        secret.open() as opened,
        subprocess.Popen(["sleep", "60"]) as victim,
    ):
        for listener, address in ((by_path, unix), (by_name, f"\0{name}")):
            listener.bind(address)
            listener.listen()
        os.chmod(unix, 0o777)
        datagrams.bind(f"\0{name}-datagrams")
        listeners = (tcp, by_path, by_name, datagrams)
        for listener in listeners:
            listener.setblocking(False)
        x86 = platform.machine() == "x86_64"
        described = {
            "secret": str(secret),
            "here": str(here),
            "outside": str(outside),
            "parent": os.getpid(),
            "fd": opened.fileno(),
            "port": tcp.getsockname()[1],
            "unix": unix,
            "abstract": name,
            "datagram": f"{name}-datagrams",
            "victim": victim.pid,
            "fork": 56 if x86 else 220,
            "add_key": 248 if x86 else 217,
        }
        try:
            yield described, victim, listeners
        finally:
            victim.kill()


def test_the_attacks_are_refused(world, rung):
    described, victim, listeners = world
    before = sorted(os.listdir(described["outside"]))
    attacks = json.dumps([described, *ATTACKS.values()])
    ran = run_python(PROGRAM, stdin=attacks.encode(), limits=LIMITS, rung=rung)

    words = [line.split()[0] for line in ran.stdout.decode().splitlines()]
    assert dict(zip(ATTACKS, words, strict=True)) == dict.fromkeys(ATTACKS, "refused"), ran
    assert (ran.outcome, ran.exit_code, ran.stderr) == ("exited", 0, b"")
    assert SECRET.encode() not in ran.stdout + ran.stderr + ran.result
    assert sorted(os.listdir(described["outside"])) == before
    assert Path(described["secret"]).read_text() == SECRET
    assert os.stat(described["secret"]).st_mode & 0o777 == 0o666
    assert victim.poll() is None
    for listener in listeners:
        with pytest.raises(BlockingIOError):  # nobody has called
            listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_same_attack_works_outside(attack, world, tmp_path):
    described, *_ = world
    attacks = json.dumps([described, ATTACKS[attack]])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, input=attacks.encode(), capture_output=True, timeout=30, check=False
    )
    if attack in MAY_BE_REFUSED_OUTSIDE and ran.stdout.startswith(b"refused"):
        pytest.skip("this machine refuses it outside as well")
    assert ran.stdout.startswith(b"BROKE"), ran


def test_its_environment_holds_nothing_of_ours(rung, world):
    described, *_ = world
    ran = run_python(
        """
        import os, json, sys
        print(json.dumps(dict(os.environ)))
        for path in ("/proc/self/environ", f"/proc/{os.getppid()}/environ", f"/proc/{sys.argv[1]}/environ", "/proc/1/environ"):
            try:
                print(open(path).read())
            except OSError as error:
                print(repr(error))
        """.replace("\n        ", "\n"),
        args=[str(described["parent"])],
        limits=LIMITS,
        rung=rung,
    )
    first, *others = ran.stdout.decode().splitlines()
    environment = json.loads(first)
    environment.pop("PWD", None)  # bubblewrap's; the same as HOME
    home = environment.pop("HOME")
    fixed = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
    assert environment == {"TMPDIR": home, **fixed}
    assert (ran.outcome, ran.exit_code, len(others)) == ("exited", 0, 4)
    assert SECRET.encode() not in ran.stdout


def test_it_is_nobody_in_particular(rung):
    """As root, a sample has a user id that no file belongs to, and none of root's groups and capabilities."""
    if os.geteuid() != 0:
        pytest.skip("a sample gets a user of its own only from root")
    ran = run_python("import os; print(os.getresuid(), os.getresgid(), os.getgroups())", limits=LIMITS, rung=rung)
    user = int(ran.stdout.split(b",")[0].strip(b"("))
    assert user >= 1000
    assert ran.stdout.decode().strip() == f"({user}, {user}, {user}) ({user}, {user}, {user}) []"


def test_no_descriptor_of_ours_is_inherited(rung, tmp_path):
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        source = """
            import os, stat
            for fd in range(3000):
                try:
                    mode = os.fstat(fd).st_mode
                except OSError:
                    continue
                print(fd, "pipe" if stat.S_ISFIFO(mode) else "other")
        """
        ran = run_python(textwrap.dedent(source), limits=LIMITS, rung=rung)
    # 4 is the way to an interpreter in a folder closed to others: a handle of that folder that can not be read from.
    assert ran.stdout.decode().splitlines()[:4] == ["0 pipe", "1 pipe", "2 pipe", "3 pipe"]
    assert ran.stdout.decode().splitlines()[4:] in ([], ["4 other"])


def test_the_way_to_the_interpreter_leads_nowhere_else(rung):
    source = """
        import os
        for path in ("..", "../..", "../../..", "../../../../etc/passwd", "../../../../etc"):
            try:
                print("BROKE", os.open(path, os.O_RDONLY, dir_fd=4))
            except OSError as error:
                print("refused", error)
    """
    ran = run_python(textwrap.dedent(source), limits=LIMITS, rung=rung)
    assert ran.stdout.count(b"refused") == 5, ran


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other interfaces of x86-64's kernel")
@pytest.mark.parametrize(
    "call",
    [
        "ctypes.CDLL(None).syscall(0x40000000 + 39)",  # getpid by the x32 numbers
        # mov eax, 20; int 0x80; ret: getpid by the 32-bit numbers
        """
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("b814000000cd80c3"))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
""",
    ],
    ids=["x32", "int 0x80"],
)
def test_calls_by_another_numbering_end_it(rung, call):
    program = f"import ctypes, mmap\n{call}\nprint('BROKE')"
    ran = run_python(program, limits=LIMITS, rung=rung)
    assert (ran.outcome, ran.signal, ran.stdout) == ("crash", "SIGSYS", b"")
    outside = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert b"BROKE" in outside.stdout or outside.returncode == -11  # a kernel without that interface


def test_every_call_that_is_not_known_is_refused(rung):
    """By number, up to well beyond the last one that exists: what the filter's table does not allow does not reach the kernel."""
    known = """
        import ctypes, os, sys
        libc = ctypes.CDLL(None, use_errno=True)
        refused = []
        for number in map(int, sys.argv[1:]):
            libc.syscall(number, -1, -1, -1, -1, -1, -1)
            refused.append(ctypes.get_errno())
        print(refused)
    """
    dangerous = {  # x86-64, aarch64
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "mount": (165, 40), "setns": (308, 268),
        "pivot_root": (155, 41), "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "io_uring_setup": (425, 425),
        "userfaultfd": (323, 282), "kexec_load": (246, 104), "swapon": (167, 224), "reboot": (169, 142), "init_module": (175, 105),
        "execve": (59, 221), "execveat": (322, 281), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "open_by_handle_at": (304, 265),
        "fsopen": (430, 430), "move_mount": (429, 429), "mount_setattr": (442, 442), "process_madvise": (440, 440),
        "landlock_create_ruleset": (444, 444), "seccomp": (317, 277), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
        "setuid": (105, 146), "setgroups": (116, 159), "capset": (126, 91), "chroot": (161, 51), "sethostname": (170, 161),
        "clock_settime": (227, 112), "syslog": (103, 116), "acct": (163, 89), "vhangup": (153, 58), "fanotify_init": (300, 262),
        "mq_open": (240, 180), "msgget": (68, 186), "semget": (64, 190), "setxattr": (188, 5), "mknodat": (259, 33),
        "a call of the future": (600, 600),
    }  # fmt: skip
    column = 0 if platform.machine() == "x86_64" else 1
    numbers = [str(pair[column]) for pair in dangerous.values()]
    ran = run_python(textwrap.dedent(known), args=numbers, limits=LIMITS, rung=rung)
    assert dict(zip(dangerous, json.loads(ran.stdout), strict=True)) == dict.fromkeys(dangerous, 1)  # EPERM
