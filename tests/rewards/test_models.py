"""Reward models: a server that fails now and then, and a classifier of transformers in a reward process."""

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from deadlines import ends_late
from scoring_one import one

from asyncflow.api.rewards import RewardSpec
from asyncflow.errors import ManifestError
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.endpoint import Endpoint
from asyncflow.rewards.functions import BUILT_IN
from asyncflow.rewards.wire import Example


class RewardServer:
    """Answers with the lengths of responses, after as many failures as are wanted."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.answer: Any = None
        self.url = ""

    async def serve(self, request: web.Request) -> web.Response:
        if self.failures:
            return web.Response(status=self.failures.pop(), text="busy")
        body = await request.json()
        self.asked.append(body)
        told = {"rewards": [len(each) for each in body["responses"]], "details": [{"by": "x"}] * len(body["query"])}
        return web.json_response(told if self.answer is None else self.answer)


@asynccontextmanager
async def serving() -> AsyncIterator[RewardServer]:
    server = RewardServer()
    app = web.Application()
    app.router.add_post("/score", server.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/score"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def endpoint(server: RewardServer, **config: Any) -> AsyncIterator[Endpoint]:
    made = Endpoint(config={"url": server.url, **config})
    try:
        yield made
    finally:
        if made._session is not None:
            await made._session.close()


async def test_a_server_is_asked_once_for_each_pair_it_has_not_judged() -> None:
    async with serving() as server, endpoint(server, cache=3) as ask:
        told = await ask(prompts=["p", "q", "p"], responses=["a", "bb", "a"], answers=[1, 2, 1])
        assert [each["reward"] for each in told] == [1.0, 2.0, 1.0]
        assert told[0]["details"] == {"by": "x"}
        (body,) = server.asked
        assert body == {"query": ["pa", "qbb"], "prompts": ["p", "q"], "responses": ["a", "bb"], "labels": [1, 2]}
        await ask(prompts=["q", "q"], responses=["bb", "ccc"], answers=[2, 2])
        assert server.asked[1]["responses"] == ["ccc"]
        await ask(prompts=["q"] * 3, responses=["d", "e", "f"], answers=[0] * 3)
        await ask(prompts=["q"], responses=["bb"], answers=[2])
        assert server.asked[-1]["responses"] == ["bb"], "it was forgotten for newer ones"
        assert max(map(len, ask._known)) == 16, "long texts take no memory"


async def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not() -> None:
    async with serving() as server, endpoint(server, retry_seconds=5.0) as ask:
        server.failures = [503, 429, 500]
        assert (await ask(prompts=["p"], responses=["a"], answers=[0]))[0]["reward"] == 1.0
        server.failures = [404]
        with pytest.raises(ValueError, match="answered 404: busy"):
            await ask(prompts=["p"], responses=["b"], answers=[0])
    async with serving() as server:
        server.failures = [503] * 100

        async def ask_for(seconds: float) -> None:
            async with endpoint(server, retry_seconds=seconds) as ask:
                await ask(prompts=["p"], responses=["a"], answers=[0])

        await ends_late(ask_for, says=r"within [\d.]+ s; last: .*answered 503", within_s=0.2)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"rewards": [1.0, 2.0]}, "2 rewards and 2 details for 1"),
        ({"rewards": [None]}, "Expected `float`"),
        ([], "Expected `object`"),
    ],
)
async def test_a_wrong_answer_is_raised(answer: Any, why: str) -> None:
    async with serving() as server, endpoint(server) as ask:
        server.answer = answer
        with pytest.raises(ValueError, match=why):
            await ask(prompts=["p"], responses=["a"], answers=[0])


async def test_rewards_of_a_server_come_through_the_sandbox(tmp_path: Path) -> None:
    async with serving() as server:
        spec = RewardSpec.model_validate({"function": "http", "network": True, "config": {"url": server.url}})
        rewards = WeightedRewards.of(spec, workdir=tmp_path)
        await rewards.start()
        examples = [Example(prompt="p", response="x" * n) for n in range(1, 9)]
        results = await asyncio.gather(*(one(rewards, example) for example in examples))
        await rewards.close()
    assert [each.value for each in results] == [float(n) for n in range(1, 9)]
    assert json.loads(results[0].details) == {"by": "x"}
    assert len(server.asked) == 1, "samples that come together travel together"


CLASSIFIER = """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    from asyncflow.rewards.classifier import RewardModel

    class Compared(RewardModel):
        def __init__(self, *, config, device, share):
            import os
            config = {**config, "model": os.environ["TMPDIR"] + "/model"}
            write(config["model"])
            super().__init__(config=config, device=device, share=share)

        def __call__(self, *, responses, prompts):
            rewards = super().__call__(responses=responses, prompts=prompts)
            return [
                {"reward": reward, "details": {"alone": self.alone(prompt + response), "batch": len(responses)}}
                for reward, prompt, response in zip(rewards, prompts, responses)
            ]

        def alone(self, text):
            with torch.no_grad():
                ids = self._tokenizer(text, return_tensors="pt")["input_ids"]
                return self._model(input_ids=ids).logits[0, 1].item()

    def write(folder):
        words = {word: number for number, word in enumerate(["[pad]", "[unk]", "what", "is", "good", "bad"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"pad_token": "[pad]", "unk_token": "[unk]"}
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=len(words), num_labels=2, pad_token_id=0, **sizes, **heads)
        LlamaForSequenceClassification(config).save_pretrained(folder)
"""


REFUSING = """
    from asyncflow.errors import ManifestError

    class Refusing:
        def __init__(self, *, device):
            raise ManifestError(f"no room on {device}", where="spec.reward.role.accelerator")

        def __call__(self, *, response):
            return 0.0
"""


@pytest.mark.timeout(300)
async def test_a_classifier_scores_a_batch_as_it_scores_each_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(CLASSIFIER))
    spec = RewardSpec.model_validate(
        {
            "function": "mine:Compared",
            "config": {"label": 1},
            "memory": "8Gi",
            "timeout_seconds": 60.0,
            "start_seconds": 250.0,
        }
    )
    rewards = WeightedRewards.of(spec, workdir=tmp_path)
    await rewards.start()
    responses = ["good", "good good bad", "bad", ""]
    results = await asyncio.gather(*(one(rewards, Example(prompt="what is ", response=each)) for each in responses))
    await rewards.close()
    details = [json.loads(result.details) for result in results]
    assert [each["batch"] for each in details] == [4] * 4
    assert [result.value for result in results] == pytest.approx([each["alone"] for each in details], abs=1e-6)
    assert len({result.value for result in results}) == 4


def test_every_function_of_the_project_has_its_module() -> None:
    assert all(find_spec(place.partition(":")[0]) for place in BUILT_IN.values())


def test_a_classifier_reads_a_conversation_as_its_turns() -> None:
    from asyncflow.rewards.classifier import turns

    asked = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1"}]
    last = {"role": "assistant", "content": "2"}
    assert turns(json.dumps(asked), "2") == [*asked, last]
    for text in ("1+1", "[]", "[1, 1]", '{"role": "user", "content": "1+1"}'):
        assert turns(text, "2") == [{"role": "user", "content": text}, last]


@pytest.mark.parametrize("config", [{}, {"model": "nowhere"}])
def test_a_classifier_whose_folder_is_missing_is_not_looked_for_elsewhere(config: dict[str, str]) -> None:
    from asyncflow.rewards.classifier import RewardModel

    with pytest.raises(ManifestError, match=r"config\.model: there is no folder '(nowhere)?' that this"):
        RewardModel(config=config, device="cpu", share=1.0)


def test_a_classifier_that_is_to_have_a_device_never_computes_on_the_cpu_instead() -> None:
    from asyncflow.rewards.classifier import RewardModel

    with pytest.raises(ManifestError, match=r"spec\.reward\.role\.accelerator: there is no cuda device here"):
        RewardModel(config={"model": "judge"}, device="cuda", share=1.0)


async def test_a_function_is_told_its_device_and_what_it_refuses_then_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(REFUSING))
    spec = RewardSpec.model_validate(
        {"function": "mine:Refusing", "role": {"accelerator": {"profile": "nvidia", "count": 1}}}
    )
    with pytest.raises(ManifestError, match=r"spec\.reward\.role\.accelerator: no room on cuda"):
        await WeightedRewards.of(spec, workdir=tmp_path).start()
