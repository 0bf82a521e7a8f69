"""Rows of every kind of source, and every way in which a source can be wrong."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from configs.errors import ConfigError
from configs.schema import SourceConfig, SourceKind
from rollout import sources
from rollout.sources import DataError, load_rows, stable_id

GOOD = [{"prompt": "2+2", "answer": "4"}, {"prompt": "3+3", "answer": 6}]


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def jsonl(path: Path, records: list[Any], **keys: Any) -> SourceConfig:
    return SourceConfig(kind=SourceKind.jsonl, path=write_lines(path, records), **keys)


# Arithmetic


def test_arithmetic_strata_hold_operands_of_exactly_that_many_digits() -> None:
    rows = load_rows("sums", SourceConfig(params={"max_digits": 3, "num_prompts": 700}), ())
    by_stratum: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        a, b = row.id.split("+")
        assert row.question == f"{a}+{b}="
        assert row.answer == str(int(a) + int(b))
        assert len(a) == len(b)
        by_stratum.setdefault(row.stratum, []).append((int(a), int(b)))
    assert {name: len(pairs) for name, pairs in by_stratum.items()} == {"digits_1": 100, "digits_2": 700, "digits_3": 700}
    assert sorted(by_stratum["digits_1"]) == [(a, b) for a in range(10) for b in range(10)]
    assert {len(str(a)) for a, _ in by_stratum["digits_3"]} == {3}


def test_arithmetic_strata_do_not_depend_on_each_other() -> None:
    small = load_rows("sums", SourceConfig(params={"max_digits": 2, "num_prompts": 50}), ())
    large = load_rows("sums", SourceConfig(params={"max_digits": 4, "num_prompts": 50}), ())
    assert [row.id for row in small] == [row.id for row in large][: len(small)]


def test_arithmetic_mirror_images_share_a_split_key() -> None:
    rows = {row.id: row for row in load_rows("sums", SourceConfig(params={"max_digits": 1}), ())}
    assert rows["3+8"].split_key == rows["8+3"].split_key != rows["3+7"].split_key


@pytest.mark.parametrize(
    "params", [{"max_digit": 2}, {"max_digits": "two"}, {"max_digits": 0}, {"num_prompts": -1}, {"reward": "x"}]
)
def test_wrong_arithmetic_params_name_their_key(params: dict[str, Any]) -> None:
    with pytest.raises((DataError, ConfigError), match=rf"data\.sources\.sums\.params.*{next(iter(params))}"):
        load_rows("sums", SourceConfig(params=params), ())


# Files


def test_jsonl_and_parquet_of_the_same_rows_are_equal(tmp_path: Path) -> None:
    records = [{"q": f"{n}?", "gold": n, "key": f"k{n}", "level": n % 2} for n in range(5)]
    columns = {"prompt_column": "q", "answer_column": "gold", "id_column": "key", "stratum_column": "level"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    lines = load_rows("a", jsonl(tmp_path / "rows.jsonl", records, **columns), ())
    table = load_rows("a", SourceConfig(kind=SourceKind.parquet, path=str(tmp_path / "rows.parquet"), **columns), ())
    values = [(row.id, row.question, row.answer, row.stratum) for row in lines]
    assert values == [(row.id, row.question, row.answer, row.stratum) for row in table]
    assert values[3] == ("k3", "3?", 3, "1")
    assert lines[3].where == f"{tmp_path}/rows.jsonl:4"
    assert table[3].where == f"{tmp_path}/rows.parquet row 3"


def test_a_folder_gives_its_files_in_order_of_name_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", GOOD[1:])
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(GOOD[0]) + "\n\n")
    rows = load_rows("a", SourceConfig(kind=SourceKind.jsonl, path=str(tmp_path)), ())
    assert [(row.answer, row.where) for row in rows] == [("4", f"{tmp_path}/a.jsonl:2"), (6, f"{tmp_path}/b.jsonl:1")]


def test_ids_without_a_column_follow_prompt_and_answer(tmp_path: Path) -> None:
    first, second = load_rows("a", jsonl(tmp_path / "a.jsonl", GOOD), ())
    again = load_rows("b", jsonl(tmp_path / "b.jsonl", GOOD[::-1]), ())
    assert [row.id for row in again] == [second.id, first.id]
    assert stable_id("2+2", "5") != first.id != stable_id("2+3", "4")
    assert first.stratum == "a"


BAD_ROWS = {
    "missing column, nearest named": ({"promt": "2", "answer": 4}, r"x\.jsonl:3: no column 'prompt'; did you mean 'promt'"),
    "answer null": ({"prompt": "2", "answer": None}, r"x\.jsonl:3: column 'answer': the answer is missing"),
    "prompt a number": ({"prompt": 2, "answer": 4}, r"x\.jsonl:3: column 'prompt': 2 is neither"),
    "prompt empty": ({"prompt": " ", "answer": 4}, r"x\.jsonl:3: column 'prompt': the prompt is empty"),
    "message without content": ({"prompt": [{"role": "user"}], "answer": 4}, r"x\.jsonl:3: column 'prompt': the message"),
    "no messages": ({"prompt": [], "answer": 4}, r"x\.jsonl:3: column 'prompt': \[\] is neither"),
    "ends with the assistant": (
        {"prompt": [{"role": "assistant", "content": "4"}], "answer": 4},
        r"x\.jsonl:3: column 'prompt': the last message is the assistant's",
    ),
    "not an object": ([1], r"x\.jsonl:3: a list, where a JSON object is needed"),
    "same question and answer": (GOOD[0], r"x\.jsonl:1 and .*x\.jsonl:3 are the same prompt and answer; remove one"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    record, message = BAD_ROWS[name]
    with pytest.raises(DataError, match=message):
        load_rows("a", jsonl(tmp_path / "x.jsonl", [*GOOD, record]), ())


@pytest.mark.parametrize("line", [b'{"prompt": "2', b"\xff\xfe{}"])
def test_an_unreadable_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(json.dumps(GOOD[0]).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2: not (a JSON line|UTF-8)"):
        load_rows("a", SourceConfig(kind=SourceKind.jsonl, path=str(tmp_path / "x.jsonl")), ())


def test_duplicate_ids_name_both_rows(tmp_path: Path) -> None:
    records = [{"prompt": p, "answer": 1, "n": n} for p, n in [("a", 7), ("b", 8), ("c", 7)]]
    with pytest.raises(DataError, match=r"x\.jsonl:1 and .*x\.jsonl:3 have the same id '7'"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", records, id_column="n"), ())


@pytest.mark.parametrize("value", [None, "", 1.5, True, ["7"]])
def test_an_id_is_a_text_or_a_whole_number(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:1: column 'n'"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", [{**GOOD[0], "n": value}], id_column="n"), ())


def test_an_empty_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.a: the source has no rows \(.*x\.jsonl\)"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", []), ())
    with pytest.raises(DataError, match=r"data\.sources\.a\.path: there is no file .*y\.jsonl; did you mean 'x\.jsonl'"):
        load_rows("a", SourceConfig(kind=SourceKind.jsonl, path=str(tmp_path / "y.jsonl")), ())
    with pytest.raises(DataError, match=r"data\.sources\.a\.path: a jsonl source needs one"):
        load_rows("a", SourceConfig(kind=SourceKind.jsonl), ())
    with pytest.raises(DataError, match=r"has no \*\.parquet file"):
        load_rows("a", SourceConfig(kind=SourceKind.parquet, path=str(tmp_path)), ())


def test_parquet_errors_name_file_and_column(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    source = SourceConfig(kind=SourceKind.parquet, path=str(file))
    file.write_text("not parquet")
    with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file"):
        load_rows("a", source, ())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2"], "anwser": ["4"]}), file)
    with pytest.raises(DataError, match=r"x\.parquet: no column 'answer'; did you mean 'anwser'"):
        load_rows("a", source, ())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2", "3"], "answer": ["4", None]}), file)
    with pytest.raises(DataError, match=r"x\.parquet row 1: column 'answer': the answer is missing"):
        load_rows("a", source, ())


def test_a_key_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.a\.path: does not apply to kind=arithmetic"):
        load_rows("a", SourceConfig(path="x"), ())
    with pytest.raises(DataError, match=r"data\.sources\.a\.subset: does not apply to kind=jsonl"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", GOOD, subset="main"), ())


# Rewards (B64)


@pytest.mark.parametrize("value", ["", None, "someorg/gsm8k-mirror", "Math", ["math"]])
def test_b64_a_row_with_an_unknown_reward_is_refused(tmp_path: Path, value: Any) -> None:
    records = [{**row, "by": "math"} for row in GOOD] + [
        {"prompt": "a", "answer": 1, "by": value},
        {"prompt": "b", "answer": 1, "by": "code"},
    ]
    with pytest.raises(DataError, match=r"x\.jsonl:3: column 'by': no reward part .*reward\.parts has code, math"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", records, reward_column="by"), ("math", "code"))


def test_b64_a_row_without_the_reward_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.jsonl:2: no column 'by'"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", [{**GOOD[0], "by": "math"}, GOOD[1]], reward_column="by"), ("math",))


def test_b64_an_unknown_reward_of_a_source_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"data\.sources\.a\.reward: no reward part 'maths'; did you mean 'math'\?; reward\.parts has math"
    ):
        load_rows("a", SourceConfig(reward="maths"), ("math",))


def test_rewards_are_routed_by_source_or_by_row(tmp_path: Path) -> None:
    records = [{**GOOD[0], "by": "code"}, {**GOOD[1], "by": "math"}]
    by_row = load_rows("a", jsonl(tmp_path / "x.jsonl", records, reward_column="by"), ("math", "code"))
    by_source = load_rows("a", jsonl(tmp_path / "x.jsonl", records, reward="math"), ("math", "code"))
    assert [row.reward for row in by_row] == ["code", "math"]
    assert [row.reward for row in by_source] == ["math", "math"]
    with pytest.raises(DataError, match=r"reward and reward_column are both set"):
        load_rows("a", jsonl(tmp_path / "x.jsonl", records, reward="math", reward_column="by"), ("math",))


# Hugging Face datasets


def test_a_saved_dataset_and_a_dataset_of_splits(tmp_path: Path) -> None:
    train = datasets.Dataset.from_list([{"prompt": "2+2", "answer": "4", "unused": 1}])
    test = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "3+3"}], "answer": "6"}])
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "two")
    one = load_rows("a", SourceConfig(kind=SourceKind.datasets, path=str(tmp_path / "one")), ())
    two = load_rows("a", SourceConfig(kind=SourceKind.datasets, path=str(tmp_path / "two"), split="test"), ())
    assert [(row.question, row.answer) for row in one] == [("2+2", "4")]
    assert [(row.question, row.answer) for row in two] == [([{"role": "user", "content": "3+3"}], "6")]
    with pytest.raises(DataError, match=r"data\.sources\.a\.split: .* has no split 'tset'; it has train, test"):
        load_rows("a", SourceConfig(kind=SourceKind.datasets, path=str(tmp_path / "two"), split="tset"), ())
    with pytest.raises(DataError, match=r"no column 'question'.*the columns are answer, prompt, unused"):
        load_rows("a", SourceConfig(kind=SourceKind.datasets, path=str(tmp_path / "one"), prompt_column="question"), ())


def test_a_folder_of_plain_files_loads_as_a_dataset(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"prompt": "2+2", "answer": "4"}])
    rows = load_rows("a", SourceConfig(kind=SourceKind.datasets, path=str(tmp_path)), ())
    assert [(row.question, row.answer) for row in rows] == [("2+2", "4")]


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.a\.path: cannot load the data set"):
        load_rows("a", SourceConfig(kind=SourceKind.datasets, path=str(tmp_path / "none")), ())


# reasoning-gym


def gym(**params: Any) -> SourceConfig:
    return SourceConfig(kind=SourceKind.reasoning_gym, params=params)


def test_reasoning_gym_chain_sum_gives_sums_with_their_answers() -> None:
    rows = load_rows("g", gym(task="chain_sum", num_prompts=50, seed=3, min_terms=2, max_terms=2), ())
    assert len(rows) > 40
    for row in rows:
        expression = str(row.question).rsplit(":", 1)[1].strip().rstrip(" =?.")
        left, sign, right = expression.split()
        assert int(row.answer) == int(left) + int(right) * (1 if sign == "+" else -1)
    assert [row.id for row in rows] == [
        row.id for row in load_rows("g", gym(task="chain_sum", num_prompts=50, seed=3, min_terms=2, max_terms=2), ())
    ]


def test_the_whole_item_of_reasoning_gym_keeps_the_ids() -> None:
    plain = load_rows("g", gym(task="rotate_matrix", num_prompts=5), ())
    whole = load_rows("g", gym(task="rotate_matrix", num_prompts=5, entry=True, max_n=9), ())
    assert [row.id for row in whole] == [row.id for row in load_rows("g", gym(task="rotate_matrix", num_prompts=5, max_n=9), ())]
    plain_again = load_rows("g", gym(task="rotate_matrix", num_prompts=5, entry=True), ())
    assert [(row.id, row.split_key) for row in plain_again] == [(row.id, row.split_key) for row in plain]
    assert [row.answer["answer"] for row in plain_again] == [row.answer for row in plain]
    assert all((row.answer["task"], row.answer["settings"]) == ("rotate_matrix", {"max_n": 9}) for row in whole)
    assert all(row.answer["question"] == row.question and row.answer == json.loads(json.dumps(row.answer)) for row in whole)


def test_a_question_drawn_twice_is_one_row() -> None:
    rows = load_rows("g", gym(task="chain_sum", num_prompts=500, min_terms=2, max_terms=2, min_digits=1, max_digits=1), ())
    questions = [row.question for row in rows]
    assert len(questions) == len(set(map(str, questions))) < 500


def test_reasoning_gym_errors_are_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DataError, match=r"data\.sources\.g\.params: reasoning-gym has no task 'chain_sums'; did you mean 'chain_sum'"
    ):
        load_rows("g", gym(task="chain_sums"), ())
    with pytest.raises(DataError, match=r"refused its settings \{'min_term': 2\}"):
        load_rows("g", gym(task="chain_sum", min_term=2), ())
    with pytest.raises(ConfigError, match=r"data\.sources\.g\.params\.task"):
        load_rows("g", gym(), ())
    with pytest.raises(DataError, match=r"'rush_hour' has no reference answer"):
        load_rows("g", gym(task="rush_hour", num_prompts=2), ())
    assert load_rows("g", gym(task="rush_hour", num_prompts=2, entry=True), ())[0].answer["answer"] is None

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sources.importlib, "import_module", missing)
    with pytest.raises(DataError, match=r"pip install 'limen\[reasoning-gym\]'"):
        load_rows("g", gym(task="chain_sum"), ())
