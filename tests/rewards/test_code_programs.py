"""The program in a completion."""

import pytest

from rewards.programs import Program, find_program

TICKS = "```"


def fenced(source, label="python"):
    return f"{TICKS}{label}\n{source}\n{TICKS}"


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        (fenced("a = 1"), "a = 1"),
        (fenced("a = 1", "py"), "a = 1"),
        (fenced("a = 1", "Python3"), "a = 1"),
        (fenced("a = 1", " python title=x"), "a = 1"),
        (fenced("a = 1", ""), "a = 1"),
        (f"First {TICKS} in words.\n{fenced('a = 1')}\nDone.", "a = 1"),
        ("~~~python\na = 1\n~~~", "a = 1"),
        (f"````python\ns = '''\n{TICKS}\n'''\n````", f"s = '''\n{TICKS}\n'''"),  # a shorter fence does not close a longer
        (f"Here it is: {TICKS}python\na = 1\n{TICKS}\nDone.", "a = 1"),
        (f"<answer>{TICKS}Python3\na = 1\n{TICKS}</answer>", "a = 1"),
        (f"Not {TICKS}text\n{fenced('a = 1')}", "a = 1"),
        (f"~~~py\n{TICKS}\n~~~", TICKS),  # nor one of the other character
        (f"{TICKS}python\r\nif 1:\r\n    a = 1\r\n{TICKS}\r\n", "if 1:\n    a = 1"),
        (f"1. Like this:\n   {TICKS}python\n   if 1:\n       a = 1\n   {TICKS}", "if 1:\n    a = 1"),
        (f"{TICKS}python\nif 1:\n    a = 1", "if 1:\n    a = 1"),  # never closed
        (f"{TICKS}python\na = 1{TICKS}", "a = 1"),  # closed at the end of a line
        (f"{TICKS}python\na = 1\n{TICKS}python", "a = 1\n```python"),  # a fence with a label closes nothing
        (f"{fenced('a = 1')}\nBetter:\n{fenced('a = 2')}", "a = 2"),
        (f"{fenced('a = 1')}\nIt prints\n{fenced('2', '')}", "a = 1"),  # a labelled one before one without
        (f"{fenced('a = 1')}\n{fenced('pip install x', 'bash')}", "a = 1"),
        (f"{fenced('a = 1', '')}\n{fenced('int a;', 'cpp')}", "a = 1"),
        (f"{fenced('a = 1')}\n{TICKS}python\na = 2", "a = 2"),  # the last counts, closed or not
        (f"<think>{fenced('a = 1')}</think>\n{fenced('a = 2', '')}", "a = 2"),
        (f"<think>Maybe\n{fenced('a = 1')}\n</think>\nAs above.", "a = 1"),  # none after it: the whole is searched
        (f'{TICKS}python\ndef f():\n    """\n    {TICKS}\n    f()\n    {TICKS}\n    """\n{TICKS}', None),
    ],
)
def test_the_fenced_program(completion, source):
    if source is None:  # fences in a docstring are part of the program
        source = f'def f():\n    """\n    {TICKS}\n    f()\n    {TICKS}\n    """'
    assert find_program(completion) == Program(source, fenced=True)


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("a = 1\n", "a = 1"),
        ("<think>b = 2</think>\n\nif 1:\n    a = 1\n", "if 1:\n    a = 1"),
        ("I do not know.", "I do not know."),
        (fenced("int a;", "cpp"), fenced("int a;", "cpp")),  # no Python anywhere: its compilation will say so
    ],
)
def test_text_without_a_fence_is_taken_whole(completion, source):
    assert find_program(completion) == Program(source, fenced=False)


@pytest.mark.parametrize("completion", ["", " \n\t\n", "<think>hm</think>\n"])
def test_no_text_is_no_program(completion):
    assert find_program(completion) is None


def test_an_example_of_its_use_may_follow_the_function():
    source = "def f(x):\n    return x"
    completion = f"{fenced(source)}\nUse it:\n{fenced('print(f(3))')}"
    assert find_program(completion, "f") == Program(source, fenced=True)
    assert find_program(completion, "g") == Program("print(f(3))", fenced=True)
    assert find_program(completion) == Program("print(f(3))", fenced=True)
    of_class = "class S:\n    a = 1"
    assert find_program(f"{fenced(of_class)}\n{fenced('S()')}", "S") == Program(of_class, fenced=True)


@pytest.mark.timeout(20)
def test_a_million_characters_of_fences_take_no_time_to_speak_of():
    assert find_program("`" * 10**6) == Program("", fenced=True)
    assert find_program(f"{TICKS}\n" * 200_001) is not None
    assert find_program((" " * 1000 + "x\n") * 1000) is not None
