"""Denominators against ALGORITHMS 0.1 and the numeric cases, whatever the split into micro-batches."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import Aggregation
from learner.aggregation import StepCounts, count_step, denominators


def aggregate(mode, losses, *, max_tokens=4, counts=None):
    """The loss of responses given as lists of token losses, through our denominators."""
    lengths = torch.tensor([len(tokens) for tokens in losses])
    per_response = denominators(mode, lengths, counts or count_step(lengths), max_tokens)
    return sum(sum(tokens) / float(per_response[i]) for i, tokens in enumerate(losses) if tokens)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (Aggregation.token_mean, 1.75),
        (Aggregation.seq_mean_token_mean, 2.5),
        (Aggregation.seq_mean_token_sum, 3.5),
        (Aggregation.token_sum_norm, 0.875),
    ],
)
def test_0a_worked_by_hand(mode, expected):
    assert aggregate(mode, [[4.0], [1.0, 1.0, 1.0]]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", list(Aggregation))
def test_a_response_without_loss_tokens_counts_nowhere(mode):
    """Masked as a whole (truncated, verifier failed): as if it were not there."""
    assert aggregate(mode, [[4.0], [], [1.0, 1.0, 1.0], []]) == pytest.approx(aggregate(mode, [[4.0], [1.0, 1.0, 1.0]]), abs=1e-7)
    assert count_step(torch.tensor([1, 0, 3, 0])) == StepCounts(num_tokens=4, num_responses=2)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.floats(-5, 5, width=16), max_size=6), min_size=1, max_size=12).filter(any),
    st.sampled_from(list(Aggregation)),
    st.data(),
)
def test_no_split_into_micro_batches_changes_the_loss(losses, mode, data):
    whole = aggregate(mode, losses)
    order = data.draw(st.permutations(range(len(losses))))
    cut = data.draw(st.integers(0, len(losses)))
    parts = [[losses[i] for i in order[:cut]], [losses[i] for i in order[cut:]]]
    lengths = [torch.tensor([len(tokens) for tokens in part], dtype=torch.int64) for part in parts]
    counts = count_step(lengths[0]) + count_step(lengths[1])
    assert sum(aggregate(mode, part, counts=counts) for part in parts) == pytest.approx(whole, rel=1e-5, abs=1e-5)


def test_case_b75_token_mean_over_all_micro_batches(numeric_cases):
    case = numeric_cases["B75-1"]
    rows = [[m["loss_per_token"]] * m["tokens"] for m in case["inputs"]["micro_batches"]]
    counts = count_step(torch.tensor([len(row) for row in rows]))
    loss = sum(aggregate(Aggregation.token_mean, [row], counts=counts) for row in rows)
    assert loss == pytest.approx(case["expect"]["loss"], abs=1e-5)
    assert loss != pytest.approx(case["expect"]["not"], abs=1e-3)


def test_case_b77_masked_row_leaves_the_denominator(numeric_cases):
    case = numeric_cases["B77-1"]
    rows = [[row["loss_per_token"]] * row["tokens"] if not row["masked"] else [] for row in case["inputs"]["rows"]]
    for mode in (Aggregation.token_mean, Aggregation.seq_mean_token_mean):
        assert aggregate(mode, rows) == pytest.approx(case["expect"]["loss"], abs=1e-6)


def test_case_b86_every_mode_gives_another_number(numeric_cases):
    case = numeric_cases["B86-1"]
    rows = [[row["loss_per_token"]] * row["tokens"] for row in case["inputs"]["rows"]]
    losses = {mode: aggregate(mode, rows, max_tokens=16) for mode in Aggregation}
    assert losses[Aggregation.token_mean] == pytest.approx(case["expect"]["token_mean"], abs=1e-6)
    assert losses[Aggregation.seq_mean_token_mean] == pytest.approx(case["expect"]["sequence_mean"], abs=1e-6)
    # Where the only lossy response has length 1, its token mean is its token sum. With two such tokens every pair differs.
    rows[0] = rows[0] * 2
    losses = [aggregate(mode, rows, max_tokens=16) for mode in Aggregation]
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(losses, 2))


def test_case_b95_gradient_weight_of_a_token(numeric_cases):
    case = numeric_cases["B95-1"]
    lengths = torch.tensor(case["inputs"]["lengths"])
    counts = count_step(lengths)

    def weight(mode):
        return (-case["inputs"]["advantage"] / denominators(mode, lengths, counts, 256)).tolist()

    assert weight(Aggregation.seq_mean_token_mean) == pytest.approx(case["expect"]["sequence_mean"])
    assert weight(Aggregation.token_mean) == pytest.approx(case["expect"]["token_mean"])
    short, long = weight(Aggregation.token_sum_norm)
    assert short == long == pytest.approx(1 / (2 * 256))


def test_case_b103_normalised_by_what_is_left(numeric_cases):
    """8 groups of one response, 5 dropped: the same loss as the 3 alone, in every mode."""
    inputs, expect = numeric_cases["B103-1"]["inputs"], numeric_cases["B103-1"]["expect"]
    kept = [[1.0, 2.0], [3.0], [0.5, 0.5, 0.5]]
    batch = kept + [[]] * inputs["dropped"]
    assert len(batch) == inputs["groups"]
    assert count_step(torch.tensor([len(row) for row in batch])).num_responses == expect["kept"]
    for mode in Aggregation:
        assert aggregate(mode, batch) == aggregate(mode, kept)
