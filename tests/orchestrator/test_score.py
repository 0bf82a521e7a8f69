"""`limen score` as a user runs it: a child process, its files and its pipes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.compose import load_config
from configs.errors import InputError
from orchestrator.score_lines import LineParser

pytestmark = pytest.mark.timeout(150)

LIMEN = str(Path(sys.executable).with_name("limen"))
CASES = Path(__file__).parents[1] / "cases"
KEYS = ["value", "accuracy", "status", "outcome", "parts", "extracted", "time_s", "detail"]
MINE = '''
import time

from rewards.contract import Abstain, Verdict


def obey(completion, answer, prompt, prompt_id, *, scale: float = 1.0, mode: str = "plain"):
    """Does what the completion says."""
    if completion == "sleep":
        time.sleep(3600)
    if completion == "abstain":
        raise Abstain("not today")
    if completion == "tell":
        return Verdict(scale, extracted=f"{prompt}|{prompt_id}|{answer}", measures={"length": 4.0})
    return scale * (completion == answer)
'''


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def score(*arguments, lines=b"", cwd=None, timeout=100):
    """The exit code, the rows written and what was said on stderr."""
    done = subprocess.run([LIMEN, "score", *arguments], input=lines, cwd=cwd, capture_output=True, timeout=timeout, check=False)
    return done.returncode, [strict(line) for line in done.stdout.splitlines()], done.stderr.decode()


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def mine(tmp_path):
    """A folder with verifiers of the user's own; the overrides that choose one."""
    (tmp_path / "mine.py").write_text(MINE)
    return ["~reward.parts.exact_integer", "reward.parts.own.function=mine.py:obey"]


# ---- the handed cases -----------------------------------------------------------------------------------------------


def cases(verifier):
    """The lines of a verifier: the expectation of each by its id, and the input. Where a case holds under both settings of
    ``require_box`` it is asked under both."""
    expected, rows = {}, []
    for line in (CASES / f"{verifier}.jsonl").read_text().splitlines():
        case = json.loads(line)
        options = case.get("options") or {}
        if "run_in" in options:
            continue
        prompt = {"prompt": options.pop("prompt_end")} if "prompt_end" in options else {}
        both = verifier == "math" and "require_box" not in options
        for more in [{"require_box": True}, {"require_box": False}] if both else [{}]:
            name = f"{case['id']}{more or ''}"
            expected[name] = case
            row = {"id": name, "completion": case["completion"], "answer": case["answer"], "options": options | more}
            rows.append(row | prompt)
    return expected, rows


def mistakes(verifier, *overrides):
    """What ``limen score`` gets wrong of a verifier's cases."""
    expected, rows = cases(verifier)
    code, found, errors = score(f"reward={verifier}", "reward.num_workers=2", *overrides, lines=as_lines(rows))
    assert code == 0, errors
    assert [row["id"] for row in found] == list(expected)
    return [(row, expected[row["id"]]) for row in found if not agrees(row, expected[row["id"]])]


def agrees(row, case):
    expect = case["expect"]
    if row["time_s"] > 3 * case.get("max_seconds", 20):
        return False
    if not isinstance(expect, dict):
        return row["status"] == "ok" and row["value"] == expect
    if "one_of" in expect:
        return row["status"] == "ok" and row["value"] in expect["one_of"]
    if expect["status"] == "ok":
        return (row["status"], row["outcome"], row["value"]) == ("ok", expect["outcome"], expect["score"])
    return row["status"] == expect["status"] and row["value"] is None


def test_every_case_of_math():
    assert mistakes("math") == []


def test_every_case_of_code(rung):
    assert mistakes("code", f"reward.parts.code.params.isolation={rung}") == []


def test_every_case_of_format():
    assert mistakes("format") == []


# ---- what goes in and comes out -------------------------------------------------------------------------------------


def test_a_line_in_is_a_line_out_with_its_other_keys(mine, tmp_path):
    rows = [
        {
            "completion": "tell",
            "answer": {"a": [1, None]},
            "prompt": "Q:",
            "id": "x/1",
            "num_tokens": 7,
            "source": "s",
            "extra": [1.5],
        },
        {"completion": "4", "answer": "4", "options": {"scale": 0.25}},
        {"completion": "\ud800\u2028\x00\U0001f600\ufeff", "answer": "\ud800\u2028\x00\U0001f600\ufeff", "note": "\udfff\u2029"},
        {"completion": "abstain", "answer": None, "id": 3},
        {"completion": "4", "answer": None},
    ]
    lines = b"\xef\xbb\xbf" + as_lines(rows[:2]) + b"\n \t\r\n" + as_lines(rows[2:]).rstrip().replace(b"\n", b"\r\n")
    code, found, errors = score(*mine, lines=lines, cwd=tmp_path)
    assert code == 0, errors
    told, scaled, odd, declined, wrong = found
    assert list(told) == ["id", "num_tokens", "source", "extra", *KEYS]
    assert told["extracted"] == "Q:|x/1|{'a': [1, None]}"
    assert told["parts"] == {"own": 1.0, "own.length": 4.0}
    assert (scaled["value"], scaled["accuracy"], scaled["outcome"]) == (0.25, 0.25, "wrong")
    assert odd["value"] == 1.0, "every text reaches the verifier as it was"
    assert odd["note"] == "\udfff\u2029"
    assert (declined["status"], declined["value"], declined["id"]) == ("abstain", None, 3)
    assert "not today" in declined["detail"]
    assert (wrong["status"], wrong["value"]) == ("ok", 0.0)
    assert "5 lines in" in errors
    assert "status: ok 4, abstain 1" in errors
    assert "outcome: right 2, wrong 2; mean value 0.5625, mean accuracy 0.5625" in errors  # 1, 0.25, 1 and 0, of four
    assert "mean of each part: own 0.5625" in errors
    assert "judged none" not in errors
    assert re.search(r"6 +3 +1 +abstain +.*not today", errors), "the line, its id, how often, the status: " + errors


BAD = {
    b'{"completion": "4", "answer": 4': "is not valid JSON",
    b'{"completion": "4", "x": NaN}': "NaN is no JSON number",
    b'{"completion": "4", "x": 1e999}': "the number 1e999 is too large",
    b'{"completion": "4", "x": ' + b"9" * 5000 + b"}": "is not valid JSON",
    b'{"x": ' + b"[" * 100_000: "is nested too deeply",
    b'{"completion": "4", "answer": {"a": 1, "b": 2, "a": 3}}': "the key 'a' stands twice in an object",
    b'{"completion": "\xff"}': "is not UTF-8 (byte 17)",
    b'["4", 4]': 'is not a JSON object; write {"completion": ..., "answer": ...}',
    b'{"answer": 4}': "has no 'completion'",
    b'{"completions": "4"}': "has no 'completion'; did you mean 'completions'?",
    b'{"completion": "4"}': "has no 'answer', which the reward part 'own' takes; where there is none write \"answer\": null",
    b'{"completion": "4", "answr": 4}': "has no 'answer'; did you mean 'answr'?",
    b'{"completion": 4, "answer": 4}': "'completion' is a number, not a text",
    b'{"completion": null, "answer": 4}': "has no 'completion'",
    b'{"completion": "4", "prompt": ["a"]}': "'prompt' is a list, not a text",
    b'{"completion": "4", "source": {}}': "'source' is an object, not a text",
    b'{"completion": "4", "num_tokens": true}': "'num_tokens' is not a whole number from 0",
    b'{"completion": "4", "num_tokens": -1}': "'num_tokens' is not a whole number from 0",
    b'{"completion": "4", "value": 1}': "the key 'value' is one that limen score writes; rename it in the input",
    b'{"completion": "4", "options": 3}': "'options' is a number, not an object",
    b'{"completion": "4", "options": {"scal": 2}}': "options.scal: obey has no such parameter; it takes mode, scale; did you mean 'scale'?",
    b'{"completion": "4", "options": {"scale": "2"}}': "options.scale: '2' is not a number; write it without quotes",
    b'{"completion": "4", "options": {"mode": 2}}': "options.mode: 2 is not a text",
    b'{"completion": "4", "options": {"answer": 2}}': "options.answer: is supplied by the framework and cannot be set",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line[:40]))
def test_an_unusable_line_is_named_with_its_fault(line, mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = LineParser("in.jsonl", [load_config(mine).reward])
    assert parser.parse(b" \r") is None
    assert parser.parse(b'{"completion": "4", "answer": null, "options": {"scale": 2}}').number == 2
    with pytest.raises(InputError) as caught:
        parser.parse(line)
    assert str(caught.value).startswith("in.jsonl, line 3: ")
    assert BAD[line] in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_unusable_line_ends_it_behind_the_lines_before_it(tmp_path):
    before = as_lines([{"completion": str(i), "answer": "1"} for i in range(100)]) + b"\n"
    path = tmp_path / "in.jsonl"
    path.write_bytes(before + b'{"completion": 4}\n' + before)
    code, found, errors = score(f"input={path}", cwd=tmp_path)
    assert code == 2
    assert errors.splitlines()[-1] == f"limen: {path}, line 102: 'completion' is a number, not a text"
    assert [row["value"] for row in found] == [0, 1] + [0] * 98


def test_options_of_several_parts_are_named_by_part(mine, tmp_path):
    two = [*mine, "reward.parts.other={function: mine.py:obey, weight: 10}"]
    rows = [
        {"completion": "4", "answer": "4", "options": {"other": {"scale": 0.5}}},
        {"completion": "4", "answer": "4"},
        {"completion": "4", "answer": "4", "options": {"scale": 0.5}},
    ]
    code, found, errors = score(*two, lines=as_lines(rows), cwd=tmp_path)
    assert [row["value"] for row in found] == [6.0, 11.0]
    assert found[0]["parts"] == {"own": 1.0, "other": 0.5}
    assert code == 2
    assert (
        "line 3: options: own, other judge this item, so write them as {part: {...}}; got {'scale': 0.5}"
        in errors.splitlines()[-1]
    )


def test_a_line_goes_to_the_parts_that_judge_its_source(mine, tmp_path):
    two = [*mine, "reward.parts.own.sources=[a]", "reward.parts.other={function: mine.py:obey, weight: 10, sources: [b]}"]
    rows = [
        {"completion": "4", "answer": "4", "source": "a", "options": {"scale": 0.5}},
        {"completion": "4", "answer": "4", "source": "b"},
        {"completion": "4", "answer": "4", "source": "c"},
    ]
    code, found, errors = score(*two, lines=as_lines(rows), cwd=tmp_path)
    assert [row["parts"] for row in found] == [{"own": 0.5}, {"other": 1.0}]
    assert code == 2
    assert "line 3: no reward part judges the source 'c'" in errors.splitlines()[-1]


def test_what_is_refused_before_a_line_is_read(tmp_path):
    there = write(tmp_path / "there.jsonl", [{"completion": "4", "answer": 4}])
    before = there.read_bytes()
    for arguments, words in {
        (f"input={there}", f"output={there}"): f"output={there}: this file exists; name a new one",
        ("input=none.jsonl",): f"input={tmp_path / 'none.jsonl'}: No such file or directory",
        (f"input={tmp_path}",): f"input={tmp_path}: Is a directory",
        (f"input={there}", "output=no/where.jsonl"): f"output={tmp_path / 'no/where.jsonl'}: No such file or directory",
        (
            "reward.parts.exact_integer.params.lats=1",
            "output=new",
        ): "reward.parts.exact_integer.params.lats: exact_integer has no",
        ("--compare", "reward.parts.exact_integer.params.lats=1", "output=new"): "reward.parts.exact_integer.params.lats: exact",
        ("--compare", "steps='"): "--compare steps=': No closing quotation",
        (
            "--compare",
            f"input={there}",
        ): f"--compare input={there}: input={there} is not of a reward; it wants the second reward, ",
        ("--compare", "reward=exact output=new"): "--compare reward=exact output=new: output=new is not of a reward; ",
        ("--compare", ""): "--compare : it is empty; it wants the second reward, ",
    }.items():
        code, found, errors = score(*arguments, cwd=tmp_path)
        assert (code, found) == (2, []), errors
        assert errors.splitlines()[-1].startswith(f"limen: {words}")
    assert there.read_bytes() == before
    assert list(tmp_path.iterdir()) == [there], "what is refused leaves no file"


def test_an_answer_is_wanted_of_the_lines_whose_verifiers_take_one(tmp_path):
    own = "def short(completion):\n    return len(completion) < 3\n\n\ndef free(completion, answer=None):\n    return answer is None\n"
    (tmp_path / "own.py").write_text(own)
    parts = ["reward.parts.exact_integer.sources=[a]", "reward.parts.short={function: own.py:short, sources: [b]}"]
    parts.append("reward.parts.free={function: own.py:free, sources: [b]}")
    rows = [{"completion": "4", "source": "b"}, {"completion": "4", "source": "a"}]
    code, found, errors = score(*parts, lines=as_lines(rows), cwd=tmp_path)
    assert code == 2
    assert [row["parts"] for row in found] == [{"short": 1.0, "free": 1.0}]
    assert "line 2: has no 'answer', which the reward part 'exact_integer' takes" in errors.splitlines()[-1]


def test_no_lines_and_no_verdicts_are_said(tmp_path):
    code, found, errors = score(lines=b"\n", cwd=tmp_path)
    assert (code, found, errors) == (0, [], "no lines were scored\n")
    rows = [{"completion": "4", "answer": answer} for answer in ("four", "five", "four")]
    code, found, errors = score(lines=as_lines(rows), cwd=tmp_path)
    assert (code, {row["status"] for row in found}) == (0, {"invalid"})
    last = errors.splitlines()[-1]
    assert last.startswith("the verifier judged none of the 3 lines; 2 times it said: ")
    assert "'four' is not an integer" in last


@pytest.mark.parametrize(("closed", "key"), [("<&-", "input"), (">&-", "output")])
def test_a_stream_that_is_closed_is_refused(closed, key, tmp_path):
    there = write(tmp_path / "there.jsonl", [{"completion": "4", "answer": 4}])
    command = f"{LIMEN} score {f'input={there}' if key == 'output' else ''} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.decode() == f"limen: standard {key} is closed; {key}=FILE works\n"


def test_nobody_need_read_the_summary(tmp_path):
    there = write(tmp_path / "there.jsonl", [{"completion": "4", "answer": 4}])
    done = subprocess.run(["bash", "-c", f"{LIMEN} score input={there} 2>&-"], capture_output=True, timeout=100, check=False)
    assert (done.returncode, json.loads(done.stdout)["value"]) == (0, 1.0)


def test_nothing_heavy_is_imported(tmp_path):
    probe = (
        "import sys; from orchestrator.main import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'ray', 'vllm', 'deepspeed', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", probe, "score", "--compare", "reward=exact", "output=out.jsonl"]
    line = as_lines([{"completion": "4", "answer": "4"}])
    done = subprocess.run(command, input=line, capture_output=True, cwd=tmp_path, timeout=100, check=False)
    assert done.stdout.decode().strip() == "0 []", done.stderr.decode()


def test_a_rung_that_is_missing_is_refused_before_a_line_is_judged(tmp_path, monkeypatch):
    """B181: bubblewrap is not on the PATH. The rung in use is told at the end."""
    monkeypatch.setenv("PATH", str(tmp_path))
    line = as_lines([{"completion": "print(3)", "answer": {"kind": "stdio", "tests": [{"stdin": "", "stdout": "3"}]}}])
    namespaces = "reward.parts.code.params.isolation=namespaces"
    code, found, errors = score("reward=code", namespaces, "output=out", lines=line, cwd=tmp_path)
    assert (code, found, list(tmp_path.iterdir())) == (2, [], [])
    assert errors.startswith("limen: reward.parts.code.params.isolation: namespaces is not to be had here: bubblewrap is missing")
    code, found, errors = score("reward=code", "reward.parts.code.params.isolation=rlimits", lines=line, cwd=tmp_path)
    assert (code, found[0]["value"], found[0]["parts"]["code.rung"]) == (0, 1.0, 1.0)
    assert "isolation of code: rlimits 1" in errors


# ---- two rewards ----------------------------------------------------------------------------------------------------


def test_two_rewards_and_where_they_disagree(tmp_path):
    """The last integer of the text against the text as a whole: worked by hand."""
    rows = [
        {"completion": "it is 4", "answer": 4, "id": "a"},  # right, unparsed
        {"completion": "4", "answer": 4, "id": "b"},  # right, right
        {"completion": "it is 5", "answer": 4, "id": "c"},  # wrong, wrong
        {"completion": "4", "answer": "four", "id": "d"},  # invalid, invalid
        {"completion": "so 4", "answer": "4", "id": "e", "options": {"last": False}},  # wrong, wrong
    ]
    whole = "reward.parts.exact_integer.params.last=false reward.parts.exact_integer.weight=2"
    code, found, errors = score("--compare", whole, lines=as_lines(rows), cwd=tmp_path)
    assert code == 0, errors
    first, second = found
    assert {key: first[key] for key in ("line", "id", "completion", "answer")} == {
        "line": 1,
        "id": "a",
        "completion": "it is 4",
        "answer": 4,
    }
    keys = ("value", "accuracy", "status", "outcome", "extracted")
    assert first["first"] == dict(zip(keys, (1.0, 1.0, "ok", "right", "4"), strict=True))
    assert first["second"] == dict(zip(keys, (0.0, 0.0, "ok", "unparsed", None), strict=True))
    assert (second["id"], second["first"]["value"], second["second"]["value"]) == ("b", 1.0, 2.0)
    table = [line.split() for line in errors.splitlines() if line.startswith("first ")]
    assert table == [["first", "invalid", "1", "0", "0"], ["first", "right", "0", "1", "1"], ["first", "wrong", "0", "0", "2"]]
    assert "mean difference in value, second less first: +0.0000 over 4 lines" in errors  # (0 - 1) + (2 - 1) + 0 + 0


def test_options_that_only_one_of_two_rewards_knows_are_its_own(tmp_path):
    rows = [
        {"completion": "it is 4", "answer": "4", "options": {"last": False}},
        {"completion": "4", "answer": "4", "options": {"lats": 1}},
    ]
    code, found, errors = score("--compare", "reward=exact", lines=as_lines(rows), cwd=tmp_path)
    assert code == 2
    assert errors.splitlines()[-1].startswith("limen: standard input, line 2: options.lats: exact_integer has no such parameter")
    assert found == [], "both find the whole text wrong"


# ---- pipes, signals, memory -----------------------------------------------------------------------------------------


class Child:
    """A running ``limen score`` with pipes."""

    def __init__(self, folder, *arguments):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([LIMEN, "score", *arguments], stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder)

    def ask(self, **row):
        self.process.stdin.write(as_lines([row]))
        self.process.stdin.flush()

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def family(self):
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def child(mine, tmp_path):
    child = Child(tmp_path, *mine, "reward.timeout_s=600")
    yield child
    child.process.kill()
    child.process.communicate()


def test_a_line_is_answered_while_the_input_stays_open(child):
    for number in range(3):
        child.ask(completion=str(number), answer="1")
        assert child.answer()["value"] == float(number == 1)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_what_is_done_and_no_process(child, sent, code):
    child.ask(completion="1", answer="1")
    assert child.answer()["value"] == 1.0
    child.ask(completion="sleep", answer="1")
    deadline = time.monotonic() + 20
    while not (family := child.family()):
        assert time.monotonic() < deadline
    time.sleep(0.5)  # the line has reached a verifier; were it not so, the test would only be weaker
    child.process.send_signal(sent)
    out, errors = child.process.communicate(timeout=30)
    assert child.process.returncode == code
    assert out == b""
    assert b"1 lines in" in errors
    assert b"Traceback" not in errors
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_a_reader_that_goes_away_ends_it(child):
    child.ask(completion="1", answer="1")
    child.answer()
    child.process.stdout.close()
    child.ask(completion="1", answer="1")
    child.process.stdin.close()
    assert child.process.wait(timeout=30) == 3
    assert child.process.stderr.read().decode().splitlines()[-1] == "limen: stopped: cannot write the output: Broken pipe"
    child.process.stdin = child.process.stdout = None  # so that the fixture does not talk to them


def test_a_policy_that_fails_ends_it_behind_the_line(mine, tmp_path):
    rows = [{"completion": word, "answer": "1"} for word in ("1", "abstain", "1")]
    code, found, errors = score(*mine, "reward.parts.own.on_abstain=fail", lines=as_lines(rows), cwd=tmp_path)
    assert code == 3
    assert [row["status"] for row in found] == ["ok", "abstain"]
    assert errors.splitlines()[-1].startswith("limen: stopped: line 2: status abstain, whose policy is `fail`: ")
    assert "not today" in errors.splitlines()[-1]


# From a small process: what one was forked from counts in its peak too, and pytest is large.
PEAK = "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True); print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss * 1024)"


def test_memory_does_not_grow_with_the_lines(tmp_path):
    """60 MB more of lines take less than 40 MB more: what is read is not kept."""
    peaks = []
    for count in (3_000, 15_000):
        path = tmp_path / f"{count}.jsonl"
        line = json.dumps({"completion": "4", "answer": "4", "note": "x" * 5_000}) + "\n"
        path.write_text(line * count)
        output = tmp_path / f"{count}.out"
        command = [sys.executable, "-c", PEAK, LIMEN, "score", f"input={path}", f"output={output}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert output.read_bytes().count(b'"value": 1.0') == count
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 40e6, peaks
