"""Facts about text: what a folder says of ends and draws is taken, and what cannot be meant is one error."""

from __future__ import annotations

import pytest

from penstock.ir.graph import Module
from penstock.planning.decoding.folder import facts_of
from penstock.runtime.generation.facts import GenerationFacts
from penstock.support.errors import UsageError


def facts(generation: dict[str, object], **config: object) -> GenerationFacts:
    return facts_of({"vocab_size": 50, **config}, generation, 64, 2, (1, 4), Module("m", (), ()))


def test_a_folder_says_how_tokens_are_drawn():
    assert facts({"temperature": 0.5, "top_k": 7}).top_k == 0, "without do_sample the likeliest token is taken"
    drawn = facts({"do_sample": True, "temperature": 0.5, "top_k": None, "eos_token_id": [3, 49, 3]}, eos_token_id=1)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.ends) == (0.5, 0, 1.0, (3, 49))
    assert facts({}, eos_token_id=0).ends == (0,)
    assert facts({"eos_token_id": None}).ends == ()


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"eos_token_id": 50}, "eos_token_id 50"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id '2'"),
        ({"eos_token_id": -1}, "eos_token_id -1"),
        ({"eos_token_id": True}, "eos_token_id True"),
        ({"do_sample": "yes"}, "do_sample 'yes'"),
        ({"do_sample": True, "temperature": -0.5}, "temperature -0.5"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature nan"),
        ({"do_sample": True, "top_k": 2.5}, "top_k 2.5"),
        ({"do_sample": True, "top_p": 1.5}, "top_p 1.5"),
        ({"do_sample": True, "top_p": "0.5"}, "top_p '0.5'"),
    ],
)
def test_settings_that_cannot_be_meant_end_the_compile(generation: dict[str, object], said: str):
    with pytest.raises(UsageError, match="do not fit") as error:
        facts({**generation})
    assert said in str(error.value)


def test_all_problems_are_one_error():
    with pytest.raises(UsageError) as error:
        facts({"eos_token_id": 99, "do_sample": True, "top_p": 0, "top_k": -1})
    assert all(name in str(error.value) for name in ("eos_token_id 99", "top_p 0", "top_k -1"))
