"""Sampling: greedy, temperature, top-k, top-p, seeds."""

from collections import Counter

import pytest
import torch

from kvstore.errors import InvalidRequest
from kvstore_engine_adapter.generation import GenerateRequest
from kvstore_engine_adapter.sampling import Sampler, SamplingParams, log_probabilities

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


def test_min_p_keeps_tokens_near_the_likeliest():
    shares = LOGITS.softmax(0) / LOGITS.softmax(0).max()
    assert set(draws(SamplingParams(temperature=1.0, min_p=float(shares[2]) + 0.01, seed=1))) == {1}
    assert set(draws(SamplingParams(temperature=1.0, min_p=float(shares[2]) - 0.01, seed=1))) == {1, 2}
    assert set(draws(SamplingParams(temperature=1.0, min_p=1.0, seed=1))) == {1}


def test_a_presence_penalty_counts_a_token_of_the_answer_once():
    sampler = Sampler(SamplingParams(presence_penalty=1.5), prompt=[1])
    assert [sampler.choose(LOGITS) for _ in range(4)] == [1, 2, 1, 1]


def test_a_frequency_penalty_grows_with_each_time():
    sampler = Sampler(SamplingParams(frequency_penalty=1.2), prompt=[1])
    assert [sampler.choose(LOGITS) for _ in range(4)] == [1, 2, 1, 3]


def test_a_repetition_penalty_holds_for_the_prompt_too_and_lowers_negative_logits():
    assert Sampler(SamplingParams(repetition_penalty=2.0), prompt=[1]).choose(LOGITS) == 2
    negative = torch.tensor([-1.0, -1.1])
    assert Sampler(SamplingParams(repetition_penalty=2.0), prompt=[0]).choose(negative) == 1


def test_log_probabilities_are_the_models_own():
    logs = LOGITS.double().log_softmax(0)
    chosen, top = log_probabilities(LOGITS, 3, 2)
    assert chosen == float(logs[3])
    assert top == ((1, float(logs[1])), (2, float(logs[2])))
    assert log_probabilities(LOGITS, 1, 0) == (float(logs[1]), ())
    assert len(log_probabilities(LOGITS, 1, 20)[1]) == 5


@pytest.mark.parametrize("values", [{"logprobs": 21}, {"logprobs": -1}, {"priority": 2**31}])
def test_a_request_outside_its_ranges_is_refused(values):
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        GenerateRequest([1], **values)


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
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
    ],
)
def test_values_outside_their_range_are_refused(values):
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        SamplingParams(**values)


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(ArithmeticError):
        Sampler(SamplingParams()).choose(torch.tensor([1.0, float("nan")]))
