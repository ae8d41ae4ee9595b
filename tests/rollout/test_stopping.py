from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ManifestError
from asyncflow.models import tiny
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.rollout.engines.base import StopTexts

from .conftest import random_weights
from .test_engine_transformers import V1, make_engine, request

TOKENIZER = Tokenizer(tiny.byte_tokenizer(), eos_ids=[1], pad_id=0)


@given(before=st.text(max_size=30), stop=st.text(min_size=1, max_size=6), after=st.text(max_size=5))
def test_a_text_is_met_by_the_token_that_completes_it(before: str, stop: str, after: str) -> None:
    ids = TOKENIZER.encode(before + stop + after)
    stops = StopTexts([stop, "never said"], decode=TOKENIZER.decode)
    first = next(n for n in range(1, len(ids) + 1) if stop in TOKENIZER.decode(ids[:n]))
    assert [stops.met(ids[:n]) for n in range(1, first + 1)] == [False] * (first - 1) + [True]
    assert [stops.end(ids[n:], before=ids[:n]) for n in range(first)] == list(range(first, 0, -1))
    assert stops.end(ids[: first - 1], before=[]) is None


async def test_a_response_ends_with_its_stop_text_and_is_the_same_up_to_it(tiny: Path) -> None:
    engine = make_engine(tiny)
    await engine.start()
    await engine.load(V1, random_weights(tiny, seed=1))
    whole = await engine.generate(request(3, stop_ids=()))
    engine.decode = lambda ids: "".join(f"<{id_}>" for id_ in ids)
    text = "".join(f"<{id_}>" for id_ in whole.ids[8:10].tolist())
    cut = await engine.generate(request(3, stop_ids=(), stop_texts=(text, "<>")))
    assert cut.finish == "stop"
    assert cut.ids.tolist() == whole.ids[: len(cut.ids)].tolist()
    assert cut.logprobs.tolist() == whole.logprobs[: len(cut.ids)].tolist()
    assert engine.decode(cut.ids.tolist()).endswith(text)
    engine.decode = None
    with pytest.raises(ManifestError, match="stop texts need a tokenizer"):
        await engine.generate(request(3, stop_texts=(text,)))
    await engine.close()


def test_special_tokens_are_known_by_name_and_no_others() -> None:
    assert TOKENIZER.special_id("<|end|>") == 1
    assert TOKENIZER.special_id("a") is None
