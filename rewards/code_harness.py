"""Runs a candidate program inside the sandbox, where only the standard library is; nothing of Limen may be imported here.

``program.py`` in the working directory is compiled first. What it gives to the outside goes to descriptor 3, a line each:

    stdio   "compiled"; then the program runs as a script, on the given standard input, and nothing more is written
    calls   "compiled"; "loaded" once it has run as a module named ``program``; then a JSON object a test:
            {"value": ...}, or {"failed": an outcome, "detail": words}

The tests of ``calls`` wait unread in a pipe, so that the program finds them neither in a frame nor in a file when it starts. Each is a
frame, 4 bytes of length and then JSON:

    {"args", "kwargs"}      for a call of the named function
    {"code", "expression"}  to run and then to evaluate in the program's namespace
    {"code"}                to run there; the value is in a frame of its own that follows, read only when the code got to its end

A test that takes too long ends the process with exit code 1, after a line on stderr that says Timeout and where it stood. (No
signal: it must end work in one call of C code, too, and process 1 of a namespace is sent none.)
"""

import _sitebuiltins
import builtins
import faulthandler
import posix  # `os` is a quarter of an interpreter's start, and a script is a start a test
import sys

RESULTS = 3
ANNOTATIONS = 0x1000000  # `from __future__ import annotations`, without the import


def run_program(name: str) -> dict:
    """The namespace of the program after it has run in a module of its own."""
    with open("program.py", "rb") as file:
        source = file.read()
    # What is imported need not import the names of its annotations: tasks that have `class Solution` give them, and from Python
    # 3.14 on annotations are not evaluated anyway.
    flags = 0 if name == "__main__" else ANNOTATIONS
    try:
        code = compile(source, "program.py", "exec", flags, dont_inherit=True)
    except (MemoryError, OverflowError, RecursionError, ValueError) as error:  # nested too deep, null bytes
        raise SyntaxError(f"cannot be compiled: {error or type(error).__name__}") from None
    posix.write(RESULTS, b"compiled\n")
    if name == "__main__":
        posix.close(RESULTS)
    sys.argv = ["program.py"]
    module = sys.modules["__main__"] = sys.modules[name] = type(sys)(name)
    module.__file__ = "program.py"
    exec(code, module.__dict__)
    return module.__dict__


def run_tests(function: str, limit_s: float) -> None:
    import json  # noqa: PLC0415  (a script does not wait for what only tests need)

    encode, set_digits = json.JSONEncoder().encode, sys.set_int_max_str_digits
    hooks = (sys.settrace, sys.setprofile)
    saved = [(space, dict(space)) for space in (vars(builtins), globals())]
    results = open(RESULTS, "wb")  # noqa: SIM115  (until the process ends)
    tests = posix.dup(0)
    empty, end = posix.pipe()
    posix.dup2(empty, 0)
    posix.close(empty)
    posix.close(end)

    namespace = run_program("program")
    results.write(b"loaded\n")
    results.flush()
    # No wall: a program that wants to can change what later code sees. This undoes what an easy cheat would overwrite.
    for space, content in saved:
        space.clear()
        space.update(content)
    for hook in hooks:
        hook(None)
    while frame := read_frame(tests):
        faulthandler.dump_traceback_later(limit_s, exit=True)
        test = json.loads(frame)
        digits = sys.get_int_max_str_digits()
        outcome = "crash"
        try:
            if "args" in test:
                value = call(namespace, function, test)
            else:
                exec(compile(test["code"], "test", "exec", dont_inherit=True), namespace)
                value = eval(test["expression"], namespace) if "expression" in test else read_frame(tests).decode()
            outcome = "wrong"  # from here on what fails is that the value cannot be written
            set_digits(0)
            line = encode({"value": plain(value)})
        except BaseException as error:
            if test.keys() == {"code"}:
                outcome = "wrong" if isinstance(error, AssertionError) else outcome
                read_frame(tests)
            line = encode(describe(error, outcome))
        set_digits(digits)
        results.write(line.encode() + b"\n")
        results.flush()
        faulthandler.cancel_dump_traceback_later()
    posix._exit(0)  # threads that the program left do not hold it up


def read_frame(tests: int) -> bytes:
    """The next frame, empty at the end."""
    return read(tests, int.from_bytes(read(tests, 4), "little"))


def read(tests: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := posix.read(tests, size - len(data))):
        data += part
    return bytes(data)


def call(namespace: dict, function: str, test: dict) -> object:
    if function in namespace:
        target = namespace[function]
    elif hasattr(namespace.get("Solution"), function):  # as some tasks have it
        target = getattr(namespace["Solution"](), function)
    else:
        raise NameError(f"the program defines no {function!r}")
    return target(*test["args"], **test["kwargs"])


def plain(value: object) -> object:
    """The value as JSON has it: tuples and sets as lists, sets in order, keys as text. Raises TypeError or ValueError
    where JSON cannot hold it, so that no reference answer can be it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        items: list = [plain(item) for item in value]
        try:
            return sorted(items)
        except TypeError:  # numbers beside text
            return sorted(items, key=repr)
    if isinstance(value, dict):
        result = {key_text(key): plain(item) for key, item in value.items()}
        if len(result) != len(value):
            raise ValueError("returned a dict with two keys that are the same as text")
        return result
    if type(value).__module__ in ("decimal", "fractions"):
        return int(value) if value == int(value) else float(value)  # type: ignore[call-overload, arg-type]
    raise TypeError(f"returned a value of type {type(value).__name__}")


def key_text(key: object) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, (int, float)):
        return repr(key)
    raise TypeError(f"returned a dict with a key of type {type(key).__name__}")


def describe(error: BaseException, outcome: str) -> dict[str, str]:
    """What became of a test that raised."""
    try:
        words = f"{type(error).__name__}: {error}"[:1000]
    except BaseException:
        words = type(error).__name__
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is not None and place.tb_frame.f_code.co_filename in ("program.py", "test"):
        words += f" ({place.tb_frame.f_code.co_filename}, line {place.tb_lineno})"
    return {"failed": "memory_limit" if isinstance(error, MemoryError) else outcome, "detail": words}


if __name__ == "__main__":
    for word in ("exit", "quit"):  # what `site` would add
        setattr(builtins, word, _sitebuiltins.Quitter(word, "Ctrl-D"))
    mode, *settings = sys.argv[1:]
    if mode == "stdio":
        run_program("__main__")
    else:
        run_tests(settings[0], float(settings[1]))
