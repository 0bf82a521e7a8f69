"""The scorers of reasoning-gym, and what a cheat would write for them."""

import json
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from configs.compose import load_config
from configs.schema import RewardPart, SourceConfig, SourceKind
from rewards.contract import InvalidItem, RewardError, RewardItem
from rewards.gym import _is_harmless, reasoning_gym
from rewards.pool import RewardPool
from rewards.verifiers import load_verifier
from rollout.sources import load_rows

pytestmark = pytest.mark.timeout(120)
EXECUTING = {
    *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
    *("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
}


def items(task, num_prompts=1, **settings):
    """Reference items as they come back from a file."""
    params = {"task": task, "num_prompts": num_prompts, "entry": True, **settings}
    rows = load_rows("g", SourceConfig(kind=SourceKind.reasoning_gym, params=params), ())
    return [json.loads(json.dumps(row.answer)) for row in rows]


def test_every_task_pays_its_reference_answer_and_neither_silence_nor_junk():
    num_judged = 0
    for task in sorted(DATASETS.keys() - {"composite"}):
        (item,) = items(task)
        if item["answer"] is None:
            continue
        num_judged += 1
        for completion in (item["answer"], f"<think>0?</think>\n<answer>{item['answer']}</answer>"):
            verdict = reasoning_gym(completion, item, allow_loose=True)
            assert (verdict.value, verdict.accuracy, verdict.outcome) == (1.0, 1.0, "right"), task
        for completion in ("", " ", "<answer></answer>", "<think>so it is"):
            verdict = reasoning_gym(completion, item, allow_loose=True, partial=True)
            assert (verdict.value, verdict.accuracy, verdict.outcome) == (0.0, 0.0, "unparsed"), task
        if task != "game_of_life_halting":
            for completion in ("I do not know.", "[", "{}", "1 2 3 4 5 6 7 8 9", "\N{SNOWMAN}" * 3, "9" * 6000):
                assert reasoning_gym(completion, item, allow_loose=True).value == 0.0, (task, completion)
    assert num_judged == 100


def test_marks_above_those_of_an_empty_answer_by_setting():
    (item,) = items("prime_factorization")  # half marks for a product, 0.01 for any number, that of the empty answer too
    product = str(eval(item["answer"].replace("\N{MULTIPLICATION SIGN}", "*")))
    assert reasoning_gym(item["answer"], item, partial=True).value == 1.0
    part = reasoning_gym(product, item, partial=True)
    assert (part.value, part.accuracy, part.outcome, part.measures) == (0.5, 0.0, "wrong", {"marks": 0.5})
    assert reasoning_gym(product, item).value == 0.0
    low = reasoning_gym("2", item, partial=True)
    assert (low.value, low.measures) == (0.0, {"marks": 0.01})
    raised = reasoning_gym("seven", item, partial=True)  # ValueError in the scorer
    assert (raised.value, raised.accuracy, raised.outcome) == (0.0, 0.0, "unparsed")


def test_where_the_answer_is_sought():
    (item,) = items("gcd")
    answer = item["answer"]
    assert reasoning_gym(f"<think>{answer}</think> none", item).value == 0.0
    assert reasoning_gym(f"<answer>none</answer> no, <answer>{answer}</answer>", item).value == 1.0
    assert reasoning_gym(answer, item, require_tag=True).outcome == "unparsed"
    assert reasoning_gym(f"<think><answer>{answer}</answer></think> {answer}", item, require_tag=True).outcome == "unparsed"
    assert reasoning_gym(f"so <answer>{answer}</answer>", item, require_tag=True).value == 1.0


def test_a_task_without_a_reference_answer_and_one_with_settings():
    (item,) = items("graph_color")
    colours = {vertex: colour for vertex, colour in item["metadata"]["possible_answer"].items()}
    assert reasoning_gym(json.dumps(colours), item).value == 1.0
    assert reasoning_gym(json.dumps(dict.fromkeys(colours, 1)), item).value == 0.0
    (item,) = items("decimal_arithmetic", min_num_decimal_places=8, max_num_decimal_places=8)
    assert item["settings"] == {"min_num_decimal_places": 8, "max_num_decimal_places": 8}
    assert reasoning_gym(item["answer"], item).value == 1.0


@pytest.mark.parametrize("task", sorted(EXECUTING))
def test_answers_that_scorers_would_execute(task, tmp_path):
    """What reaches a scorer that executes it are plain answers alone."""
    drawn = items(task, 8)
    # A reference answer that was left an unevaluated integral counts as written there and nowhere else.
    assert all(_is_harmless(task, item["answer"]) for item in drawn if "Integral" not in item["answer"])
    marker = tmp_path / "executed"
    for attack in (
        f"open({str(marker)!r}, 'w').close()",
        f"__import__('pathlib').Path({str(marker)!r}).touch()",
        f"[open({str(marker)!r}, 'w') for _ in [1]]",
        "oracle_answer",
        "[oracle_answer]",
        "valid_solutions",
        "entry['answer']",
        "self.score_answer.__func__.__globals__",
        "setattr(type(self), 'score_answer', lambda *_: 1.0)",
        "9**9**9**9",
        "(((2**99)**99)**99)**99",
        "2**(9**9)",
        "factorial(10**9)",
        "10000000000!",
        "1e99999999 + 1",
        "x" * 5,
        "[0 for _ in [[0] * 9**9]]",
        "(" * 10**6,
        "[" * 1500,
        "-" * 10**6,
        "sin(" * 400 + "x" + ")" * 400,
    ):
        verdict = reasoning_gym(attack, drawn[0], partial=True, allow_loose=True)
        assert (verdict.value, verdict.accuracy, verdict.outcome) == (0.0, 0.0, "wrong"), attack[:99]
        assert "would execute it" in verdict.detail, attack[:99]
    assert not marker.exists()
    assert reasoning_gym(drawn[0]["answer"], drawn[0], allow_loose=True).value == 1.0


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("spiral_matrix", "[1, 2, 3]"),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]"),
        ("simple_integration", "-3*x**4/2 + sin(2*x) + exp(-x)/3 + C"),
        ("simple_integration", "sqrt(x)*x**(1/2) + pi*log(x)"),
        ("polynomial_multiplication", "15*x**20 - 6*x*y + (x + 1)**3"),
        ("countdown", "(4 + 12) * 3 - 7 / 2"),
    ],
)
def test_plain_answers_reach_the_scorer(task, text):
    assert _is_harmless(task, text)


def test_an_integral_in_another_form_is_right():
    import sympy

    (item,) = items("simple_integration")
    x = sympy.Symbol(item["metadata"]["variable"])
    other = sympy.integrate(sympy.sympify(item["metadata"]["integrand"]), x) + 7
    assert str(other) != item["answer"]
    assert reasoning_gym(f"<answer>{other}</answer>", item).value == 1.0
    assert reasoning_gym(f"<answer>{other} + {x}</answer>", item).value == 0.0
    unsolved = f"Integral({item['metadata']['integrand']}, {x})"  # the scorer alone pays in full for the question
    assert reasoning_gym(unsolved, item).value == 0.0


def test_an_answer_that_names_no_number_earns_nothing():
    (item,) = items("complex_arithmetic")  # the scorer alone pays in full for nan: min(1.0, nan) is 1.0
    for cheat in ("nan", "NaN", "nan + 3.0i", "-nan", "inf", "-Infinity", "1 + infj", "nanj"):
        for prefix in ("", "<think>t</think>"):
            verdict = reasoning_gym(f"{prefix}<answer>{cheat}</answer>", item, partial=True)
            assert (verdict.value, verdict.accuracy, verdict.outcome) == (0.0, 0.0, "wrong"), cheat
    (item,) = items("spell_backward")
    word = {**item, "answer": "nan", "metadata": {**item["metadata"], "word": "nan"}}
    assert reasoning_gym("nan", word).value == 1.0  # where it is the reference answer, it is a word


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("4", r"no reasoning-gym item \{task, question, answer, metadata\}; set data\.sources\.NAME\.params\.entry=true"),
        ({"metadata": None}, "no reasoning-gym item"),
        ({"task": "gdc"}, "no task 'gdc'"),
        ({"task": "composite"}, "'composite' to score by"),
        ({"task": "puzzle24"}, "puzzle24 pays in full for numbers that were not given; params.allow_loose=true"),
        ({"task": "coin_flip"}, "coin_flip pays in full for 0"),
        ({"task": "game_of_life_halting"}, "pays in full for any answer"),
        ({"settings": {"min_digit": 3}}, r"gcd refused its settings \{'min_digit': 3\}"),
        ({"task": "jugs", "metadata": {}}, "jugs does not accept the item's own reference answer"),
    ],
)
def test_unusable_items(change, message):
    (item,) = items("gcd")
    with pytest.raises(InvalidItem, match=message):
        reasoning_gym("4", change if isinstance(change, str) else {**item, **change})


def test_the_function_alone_is_refused_without_being_shut_in():
    with pytest.raises(RewardError, match=r"reward\.parts\.gym\.confined=true with reward\.parts\.gym\.num_processes=1"):
        load_verifier("gym", RewardPart(function="reasoning_gym"))


def test_the_shipped_configuration_scores_in_a_confined_process(tmp_path: Path):
    reward = load_config(["reward=reasoning_gym"]).reward
    marker = tmp_path / "executed"
    gcd, spiral, prime, words = (items(task)[0] for task in ("gcd", "spiral_matrix", "prime_factorization", "word_ladder"))
    asked = [
        (gcd["answer"], gcd),
        (f"open({str(marker)!r}, 'w')", spiral),
        ("seven", prime),
        (words["answer"], words),  # reads the package's data once the process is confined
        ("4", "4"),
    ]
    with RewardPool(reward) as pool:
        scores = pool.score([RewardItem("", text, answer, "id", None, None, None, {}) for text, answer in asked])
    assert [(score.status, score.outcome, score.value) for score in scores] == [
        ("ok", "right", 1.0),
        ("ok", "wrong", 0.0),
        ("ok", "unparsed", 0.0),
        ("ok", "right", 1.0),
        ("invalid", "none", None),
    ]
    assert not marker.exists()
