"""Functions by name, dotted path and file, and what is said of each way to get them or their parameters wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Literal

import pytest

from configs.errors import ConfigError
from configs.functions import check_params, resolve_function

pytestmark = pytest.mark.timeout(30)


def scale(
    values, *, factor: float = 1.0, power: int = 2, mode: Literal["a", "b"] = "a", name: str | None = None, flag: bool = False
):
    return values


def needs(values, plain=1, *, window: int, extra=None):
    return values


def open_ended(values, *, factor: float = 1.0, **rest):
    return values


TABLE = {"scale": scale}


def test_a_name_of_ours():
    assert resolve_function("scale", TABLE, "weighting") is scale
    with pytest.raises(ConfigError, match=r"^weighting: there is no 'scal'; there are scale; .* did you mean 'scale'\?$"):
        resolve_function("scal", TABLE, "weighting")


def test_a_dotted_path():
    assert resolve_function("pickle.dumps", TABLE, "weighting") is pickle.dumps
    with pytest.raises(ConfigError, match=r"'dump_' is not there in pickle; did you mean 'dump'\?"):
        resolve_function("pickle.dump_", TABLE, "weighting")
    with pytest.raises(
        ConfigError, match=r"no module 'no_such_package_x' is installed here; a file is given as file.py:function"
    ):
        resolve_function("no_such_package_x.f", TABLE, "weighting")
    with pytest.raises(ConfigError, match=r"'HIGHEST_PROTOCOL' is not a function in pickle"):
        resolve_function("pickle.HIGHEST_PROTOCOL", TABLE, "weighting")


def test_a_file_is_run_once_and_its_functions_survive_pickling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "own file.py"
    path.write_text("calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)\ndef g():\n    return list(calls)\n")
    f = resolve_function(f"{path}:f", TABLE, "weighting")
    monkeypatch.chdir(tmp_path)
    g = resolve_function("own file.py:g", TABLE, "weighting")
    assert (f(7), f(8)) == (1, 2)
    assert g() == [7, 8]
    assert pickle.loads(pickle.dumps(f)) is f


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(f"def f():\n    return {value}\n")
    assert [resolve_function(f"{tmp_path}/{folder}/r.py:f", TABLE, "x")() for folder in "ab"] == [1, 2]


def test_mistakes_in_a_users_file(tmp_path: Path):
    def error_of(text: str, name: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            resolve_function(f"{path}:f", TABLE, "reward.parts.x.function")
        message = str(caught.value)
        assert message.startswith(f"reward.parts.x.function: '{path}:f': ")
        assert "\n" not in message
        return message

    assert error_of("x = 1\ny = 1 / 0\n", "raises").endswith("raises.py, line 2: ZeroDivisionError: division by zero")
    assert "syntax.py, line 2: SyntaxError" in error_of("x = 1\ndef f(:\n", "syntax")
    assert "ModuleNotFoundError: No module named 'no_such_package_x'" in error_of("import no_such_package_x\n", "imports")
    assert error_of("def ff(): ...\n", "renamed").endswith(
        "'f' is not there in " + f"{tmp_path}/renamed.py; there are ff; did you mean 'ff'?"
    )
    with pytest.raises(ConfigError, match=r"no file '/nowhere/r\.py'"):
        resolve_function("/nowhere/r.py:f", TABLE, "x")


def test_what_a_file_has_and_which_files_there_are(tmp_path: Path):
    (tmp_path / "my_reward.py").write_text("from math import sqrt\n_hidden = sqrt\ndef score(): ...\ndef brief(): ...\n")
    (tmp_path / "constants.py").write_text("from math import sqrt\nLEVEL = 3\n")

    def ending(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            resolve_function(f"{tmp_path}/{name}", TABLE, "x")
        return str(caught.value).partition(f"x: '{tmp_path}/{name}': ")[2].replace(str(tmp_path), "")

    assert ending("my_reward.py:missing") == "'missing' is not there in /my_reward.py; there are score, brief"
    assert ending("constants.py:score") == "'score' is not there in /constants.py; it has no public function of its own"
    assert ending("constants.py:LEVEL") == "'LEVEL' is not a function in /constants.py; it has no public function of its own"
    assert ending("my_reward:score") == "no file '/my_reward'; did you mean 'my_reward.py'?"
    assert ending("my_rewrd.py:score") == "no file '/my_rewrd.py'; did you mean 'my_reward.py'?"
    assert ending("elsewhere.py:score") == "no file '/elsewhere.py'"
    advice = "; a file's name ends in .py, and a function of a module is written MODULE.FUNCTION"
    assert ending("package.module:f") == f"no file '/package.module'{advice}"


def test_a_file_that_failed_is_read_again_when_it_was_mended(tmp_path: Path):
    path = tmp_path / "mended.py"
    path.write_text("1 / 0\n")
    with pytest.raises(ConfigError):
        resolve_function(f"{path}:f", TABLE, "x")
    path.write_text("def f():\n    return 'mended now'\n")
    assert resolve_function(f"{path}:f", TABLE, "x")() == "mended now"


@pytest.mark.parametrize(
    "params", [{}, {"factor": 2}, {"factor": 0.5, "power": 3, "mode": "b", "name": None, "flag": True}, {"name": "n"}]
)
def test_parameters_that_fit(params: dict):
    check_params(scale, params, "weighting.params")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"facter": 1},
            "weighting.params.facter: scale has no such parameter; it takes factor, flag, mode, name, power; did you mean 'factor'?",
        ),
        ({"factor": "2"}, "weighting.params.factor: '2' is not a number; write it without quotes"),
        ({"factor": True}, "weighting.params.factor: True is not a number"),
        ({"factor": float("nan")}, "weighting.params.factor: nan is not a number"),
        ({"power": 2.5}, "weighting.params.power: 2.5 is not a whole number"),
        ({"mode": "c"}, "weighting.params.mode: 'c' is not 'a' or 'b'"),
        ({"flag": 1}, "weighting.params.flag: 1 is not a bool (true or false)"),
        ({"name": 3}, "weighting.params.name: 3 is not a text"),
        ({"values": 3}, "weighting.params.values: is not a keyword-only parameter of scale; put a * before it in the signature"),
    ],
)
def test_parameters_that_do_not_fit(params: dict, message: str):
    with pytest.raises(ConfigError) as caught:
        check_params(scale, params, "weighting.params")
    assert str(caught.value) == message


def test_required_and_given_parameters():
    with pytest.raises(ConfigError, match=r"^selection.params.window: needs needs it; set selection.params.window=\.\.\.$"):
        check_params(needs, {}, "selection.params")
    check_params(needs, {}, "selection.params", given=["window"])
    with pytest.raises(ConfigError, match="window: is supplied by the framework and cannot be set"):
        check_params(needs, {"window": 3}, "selection.params", given=["window"])
    check_params(open_ended, {"anything": 1}, "selection.params")
    with pytest.raises(ConfigError, match="factor: 'x' is not a number"):
        check_params(open_ended, {"factor": "x"}, "selection.params")


def test_a_dotted_path_in_the_table_is_imported_when_it_is_asked_for():
    assert resolve_function("ship", {"ship": "pickle.dumps", "broken": "no_such_package_x.f"}, "reward") is pickle.dumps


def test_a_package_offers_what_it_can_not_give_or_what_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    info = tmp_path / "shadow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shadow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[limen.shadow]\ngone = shadow_gone:f\nrenamed = shadow_module:g\nneeds = shadow_needs:f\nship = shadow_module:f\n"
    )
    (tmp_path / "shadow_module.py").write_text("def f(completion):\n    return 0.25\n")
    (tmp_path / "shadow_needs.py").write_text("\nimport no_such_package_x\n")
    monkeypatch.syspath_prepend(tmp_path)

    def resolve(name: str):
        return resolve_function(name, {"ship": "pickle.dumps"}, "x", entry_points="limen.shadow")

    def error(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            resolve(name)
        return str(caught.value)

    fails = "which fails: "
    assert error("gone") == f"x: 'gone': shadow offers shadow_gone:f, {fails}ModuleNotFoundError: No module named 'shadow_gone'"
    attribute = "AttributeError: module 'shadow_module' has no attribute 'g'"
    assert error("renamed") == f"x: 'renamed': shadow offers shadow_module:g, {fails}{attribute}"
    line = f"{tmp_path}/shadow_needs.py, line 2: ModuleNotFoundError: No module named 'no_such_package_x'"
    assert error("needs") == f"x: 'needs': shadow offers shadow_needs:f, {fails}{line}"
    assert caplog.messages == []
    assert (resolve("ship"), resolve("ship")) == (pickle.dumps, pickle.dumps)
    assert caplog.messages == [
        "ship: the one that ships is used; shadow offers another of this name, which is to be had as shadow_module.f"
    ]
    assert resolve("shadow_module.f")("text") == 0.25


def test_a_package_offers_functions_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[limen.tests]\nrude = mine_module:rude\nfails = mine_broken:f\nnumber = mine_module:number\n"
    )
    (tmp_path / "mine_module.py").write_text("def rude(completion):\n    return 0.25\nnumber = 3\n")
    (tmp_path / "mine_broken.py").write_text("x = 1\ny = 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def resolve(name: str):
        return resolve_function(name, TABLE, "reward.parts.x.function", entry_points="limen.tests")

    assert resolve("rude")("text") == 0.25
    assert resolve("scale") is scale
    with pytest.raises(ConfigError, match=r"there is no 'rud'; there are fails, number, rude, scale; .* did you mean 'rude'\?"):
        resolve("rud")
    with pytest.raises(
        ConfigError, match=r"'fails': mine offers mine_broken:f, which fails: .*mine_broken.py, line 2: ZeroDivisionError"
    ):
        resolve("fails")
    with pytest.raises(ConfigError, match=r"'number': mine offers mine_module:number, which is not a function"):
        resolve("number")
    with pytest.raises(ConfigError, match=r"there is no 'rude'; there are scale;"):
        resolve_function("rude", TABLE, "weighting")
