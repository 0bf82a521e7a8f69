"""`limen explain --on RUN`: credit on recorded tokens, against numbers worked by hand from the record itself."""

import json
import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from orchestrator.explain_run import credit_on, scheme_config
from orchestrator.main import main
from orchestrator.replay import open_record
from rollout.tokenizer import character_tokenizer

pytestmark = pytest.mark.timeout(120)


def record_of(recorded):
    return open_record(recorded.folder, character_tokenizer())


def by_hand(recorded, step):
    """(advantage, recorded log-probability, token ids, prompt ids) of every completion with a score; GRPO over the group."""
    for line in (recorded.folder / "groups" / f"step-{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        valid = [c for c in row["completions"] if c["score"]["status"] == "ok"]
        values = np.array([c["score"]["value"] for c in valid])
        scale = values.std(ddof=1) + 1e-6
        for completion in row["completions"]:
            scored = completion["score"]["status"] == "ok"
            advantage = (completion["score"]["value"] - values.mean()) / scale if scored else math.nan
            yield advantage, completion["roll_logp"], completion["token_ids"], row["prompt_token_ids"]


def test_at_ratio_one_the_credit_is_minus_the_advantage(recorded):
    steps = credit_on(record_of(recorded), scheme_config(recorded.folder, [], None), recorded.model)
    assert len(steps) == 2
    for number, step in enumerate(steps, 1):
        expected = np.concatenate([np.full(len(ids), -a) for a, _, ids, _ in by_hand(recorded, number)])
        np.testing.assert_allclose(step.credit, expected, rtol=2e-5, atol=2e-6)
        assert (step.ratio == 1).all()
    assert np.isnan(steps[0].credit).any(), "the completion without a score is not trained on"


def test_with_a_model_the_ratio_is_that_model_against_the_record(recorded):
    config = scheme_config(recorded.folder, [f"checkpoint_dir={recorded.model}", "algorithm=grpo"], None)
    step = credit_on(record_of(recorded), config, recorded.model)[1]
    model, place, clipped = AutoModelForCausalLM.from_pretrained(recorded.model), 0, 0
    for advantage, roll_logp, ids, prompt in by_hand(recorded, 2):
        row = torch.tensor([*prompt, *ids])
        with torch.no_grad():
            logp = torch.log_softmax(model(row[None]).logits[0], -1)[len(prompt) - 1 : -1].gather(1, row[len(prompt) :, None])[
                :, 0
            ]
        for mine, theirs in zip(logp.tolist(), roll_logp, strict=True):
            ratio = math.exp(mine - theirs)
            masked = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
            assert step.ratio[place] == pytest.approx(ratio, rel=1e-4)
            assert step.credit[place] == pytest.approx(0 if masked else -advantage * ratio, rel=1e-4, abs=1e-6)
            clipped += masked
            place += 1
    assert place == len(step.credit)
    assert clipped > 0


def test_a_picked_file_takes_the_place_of_the_runs_group_and_keys_come_on_top(recorded, tmp_path):
    run = recorded.folder
    assert scheme_config(run, [], None).algorithm.name == "aspo"
    changed = scheme_config(
        run, ["algorithm=grpo", "algorithm.params.eps_high=0.5", "weighting=sign", "batch.num_passes=3"], None
    )
    assert (changed.algorithm.name, changed.algorithm.params["eps_high"]) == ("grpo", 0.5)
    assert (changed.weighting.name, changed.batch.num_passes, changed.batch.group_size) == ("sign", 3, 4)
    (tmp_path / "weighting").mkdir()
    (tmp_path / "weighting" / "mine.yaml").write_text("name: sign\nparams: {positive: 0.5}\n")
    assert scheme_config(run, ["weighting=mine"], tmp_path).weighting.params == {"positive": 0.5}
    with pytest.raises(ConfigError, match="model=embedded: of a recorded run only the objective can be changed"):
        scheme_config(run, ["model=embedded"], None)


def test_two_schemes_side_by_side(recorded, capsys):
    """Twice the weight on failures: normalised to mean 1, positives lose what negatives gain."""
    against = "weighting=sign weighting.params.positive=1.0 weighting.params.negative=2.0"
    assert main(["explain", "--on", str(recorded.folder), "--against", against]) == 0
    out = capsys.readouterr().out
    assert f"scheme 2: {against}: algorithm=aspo advantage=grpo weighting=sign" in out
    assert "r = 1: no model is given" in out
    sums = {sign: tuple(map(float, re.search(rf"sum of credit, A {sign} 0 +(\S+) +(\S+)", out).groups())) for sign in "<>"}
    assert sums["<"][1] > sums["<"][0] > 0
    assert sums[">"][0] < sums[">"][1] < 0
    table = out.split("largest difference in credit\n")[1].splitlines()
    assert len(table) == 13
    differences = [abs(float(line.split()[-1]) - float(line.split()[-2])) for line in table[1:]]
    assert differences == sorted(differences, reverse=True)
    assert differences[-1] > 0
    assert main(["explain", "--on", str(recorded.folder), "--against", ""]) == 0
    assert "the two schemes give every token the same credit" in capsys.readouterr().out


def test_what_is_no_run_is_told(recorded, tmp_path, capsys):
    assert main(["explain", "--on", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["explain", "--against", "algorithm=grpo"]) == 2
    assert "give it with --on RUN" in capsys.readouterr().err
    assert main(["explain", "--on", str(recorded.folder), "token_weighting=acpo"]) == 2
    assert "acpo reads the likeliest token, which is not on record: give checkpoint_dir=MODEL" in capsys.readouterr().err
