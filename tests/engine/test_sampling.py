"""Sampling: greedy, temperature, top-k, top-p, seeds."""

from collections import Counter

import pytest
import torch

from kvstore.errors import InvalidRequest
from kvstore_engine_adapter.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])


def draws(params, count=400):
    sampler = Sampler(params)
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_temperature_zero_takes_the_largest():
    assert set(draws(SamplingParams())) == {1}


def test_one_seed_gives_one_sequence():
    params = SamplingParams(temperature=1.0, seed=5)
    assert draws(params) == draws(params)
    assert draws(params) != draws(SamplingParams(temperature=1.0, seed=6))


def test_without_a_seed_requests_differ():
    assert draws(SamplingParams(temperature=1.0)) != draws(SamplingParams(temperature=1.0))


def test_top_k_keeps_the_k_largest():
    assert set(draws(SamplingParams(temperature=2.0, top_k=2, seed=1))) == {1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    first = float(LOGITS.softmax(0)[1])
    assert set(draws(SamplingParams(temperature=1.0, top_p=first - 0.01, seed=1))) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=first + 0.01, seed=1))) == {1, 2}


def test_draws_follow_the_probabilities():
    counts = Counter(draws(SamplingParams(temperature=1.0, seed=2), 4000))
    found = torch.tensor([counts[token] / 4000 for token in range(5)])
    # Four standard deviations of a frequency near 0.6 out of 4000 draws.
    torch.testing.assert_close(found, LOGITS.softmax(0), atol=0.031, rtol=0)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"seed": 2**63},
    ],
)
def test_values_outside_their_range_are_refused(values):
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(ArithmeticError):
        Sampler(SamplingParams()).choose(torch.tensor([1.0, float("nan")]))
