"""Every function and every preset of the objective has an entry in its page, with its knobs and its source."""

import inspect
import re
from pathlib import Path

import pytest
import yaml

from configs.compose import shipped_files
from configs.schema import AdaptiveEntropyConfig, KlConfig, KlKind
from learner.advantages import ADVANTAGES
from learner.corrections import CORRECTIONS
from learner.formulas import source_of
from learner.surrogates import SURROGATES
from learner.token_weights import TOKEN_WEIGHTINGS
from learner.weighting import WEIGHTINGS

ROOT = Path(__file__).parents[1]
PAGES = {
    "algorithm": ("surrogates.md", SURROGATES),
    "advantage": ("advantages.md", ADVANTAGES),
    "weighting": ("weighting.md", WEIGHTINGS),
    "token_weighting": ("token_weights.md", TOKEN_WEIGHTINGS),
    "correction": ("corrections.md", CORRECTIONS),
}
ARXIV = re.compile(r"\d{4}\.\d{5}")


def text(page):
    return (ROOT / "docs" / "algorithms" / page).read_text()


def entries(page):
    """The text below each heading, by the names in it."""
    found = {}
    for part in text(page).split("\n## ")[1:]:
        for name in re.findall(r"`(\w+)`", part.partition("\n")[0]):
            found[name] = part
    return found


@pytest.mark.parametrize("group", PAGES)
def test_every_function_has_an_entry_with_its_knobs_and_its_source(group):
    page, table = PAGES[group]
    described = entries(page)
    assert set(described) == set(table)
    for name, function in table.items():
        knobs = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
        missing = {knob for knob in knobs if f"`{knob}`" not in described[name]}
        assert not missing, f"{page}: {name} does not tell of {sorted(missing)}"
        assert set(ARXIV.findall(source_of(function))) <= set(ARXIV.findall(described[name])), name
        if name != "none":
            assert all(f"- {word}: " in described[name] for word in ("Knobs", "Helps", "Watch", "Source")), name
        assert ("(experimental)" in described[name].partition("\n")[0]) == getattr(function, "experimental", False), name


@pytest.mark.parametrize("group", PAGES)
def test_every_preset_is_named_in_its_page(group):
    page, _ = PAGES[group]
    for name in shipped_files()[group]:
        assert f"`{name}`" in text(page), f"{page} does not name the preset {name}"
        choice = yaml.safe_load((ROOT / "configs" / group / f"{name}.yaml").read_text())
        assert choice, name


def test_the_page_of_kl_and_entropy_tells_of_every_kind_and_knob():
    page = text("kl_and_entropy.md")
    for name in (
        *(kind.value for kind in KlKind if kind is not KlKind.off),
        *KlConfig.__annotations__,
        *AdaptiveEntropyConfig.__annotations__,
    ):
        assert f"`{name}`" in page, name
