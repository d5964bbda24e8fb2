from __future__ import annotations

import pytest
import torch

from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.sampling import Sampling

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 3.0, 2.9, -5.0])


def draw(count=200, **options):
    chooser = Sampling(**options).chooser(CPU)
    return [chooser.choose(LOGITS) for _ in range(count)]


def test_temperature_0_takes_the_most_likely():
    assert set(draw()) == {1}


def test_equal_seeds_draw_equal_tokens():
    assert draw(temperature=1.0, seed=3) == draw(temperature=1.0, seed=3)
    assert draw(temperature=1.0, seed=3) != draw(temperature=1.0, seed=4)


def test_draws_by_probability():
    drawn = draw(4000, temperature=1.0)
    expected = LOGITS.softmax(-1)
    for token in range(4):
        assert drawn.count(token) / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_top_p_keeps_the_likely_and_at_least_one():
    assert set(draw(temperature=1.0, top_p=0.6)) == {1, 2}
    assert set(draw(temperature=1.0, top_p=1e-9)) == {1}


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_refuses_options_by_name(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Sampling(**options)
