"""The losses and gradients of whole batches are those of trl's trainers, where trl has the same algorithm.

trl's own trainer computes on the same tiny model and the same padded batch, that of AsyncFlow on streamed packs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_reference import HORIZON, REFERENCE_SCALE, TEMPERATURE, GradientKept, part, relative_error, samples
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncflow.algorithms.base import Algorithm
from asyncflow.algorithms.cispo import Cispo
from asyncflow.algorithms.dapo import Dapo
from asyncflow.algorithms.dpo import Dpo, DpoOptions
from asyncflow.algorithms.grpo import Grpo
from asyncflow.algorithms.gspo import Gspo
from asyncflow.algorithms.ipo import Ipo
from asyncflow.algorithms.loss import Aggregation, AggregationName, Loss
from asyncflow.algorithms.losses import Clip
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings

trl = pytest.importorskip("trl", reason="trl is an extra of its own: pip install 'asyncflow[trl]'")

PAD = 0
BETA = 0.3


def streamed(folder: Path, batch: MicroBatch, loss: Loss, *, temperature: float = TEMPERATURE) -> tuple[float, Any]:
    """Loss and gradient of the samples, streamed in two slots of whole groups."""
    optimizer = OptimizerSettings(learning_rate=1e-3, steps=1, max_grad_norm=0)
    settings = BackendSettings(optimizer=optimizer, loss=loss, temperature=temperature, threads=1, pack_tokens=40)
    backend = GradientKept(settings, group=SingleProcess())
    backend.load(folder, checkpoint=None)
    half = len(batch) // 4 * 2
    for slot in (range(half, len(batch)), range(half)):
        backend.micro_batch(part(batch, slot), version=None)
    return backend.finish_step(1)["loss"], backend.kept


def whole_samples() -> MicroBatch:
    """Samples without a response that is empty or masked, which trl counts in its divisor and we do not."""
    batch = samples()
    return part(batch, [i for i in range(len(batch)) if i not in (5, 9)])


def columns(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The batch as trl has it: prompts padded on the left, responses on the right."""
    n, longest = len(batch), int(batch.prompts.lengths.max())
    made = {name: torch.zeros(n, longest, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    made |= {name: torch.zeros(n, HORIZON, dtype=torch.long) for name in ("completion_ids", "completion_mask")}
    made |= {"tool_mask": torch.zeros(n, HORIZON, dtype=torch.long), "old_per_token_logps": torch.zeros(n, HORIZON)}
    assert batch.loss_mask is not None
    for i in range(n):
        prompt, response = batch.prompts.row(i), batch.responses.row(i)
        made["prompt_ids"][i, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        made["prompt_mask"][i, longest - len(prompt) :] = 1
        made["completion_ids"][i, : len(response)] = torch.from_numpy(response.astype(np.int64))
        made["completion_mask"][i, : len(response)] = 1
        made["tool_mask"][i, : len(response)] = torch.from_numpy(batch.loss_mask.row(i).astype(np.int64))
        made["old_per_token_logps"][i, : len(response)] = torch.from_numpy(batch.logprobs.row(i).copy())
    made["advantages"] = torch.from_numpy(batch.advantages.copy())
    made["num_items_in_batch"] = (made["completion_mask"] * made["tool_mask"]).sum()
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="1", unk_token="0")


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


GROUPED: dict[str, tuple[Algorithm[Any], AggregationName, dict[str, Any]]] = {
    "grpo": (Grpo(), "seq-mean-token-mean", {"loss_type": "grpo"}),
    "dr-grpo": (Grpo(estimator="dr-grpo"), "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}),
    "gspo": (Gspo(), "seq-mean-token-mean", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "cispo": (Cispo(), "token-mean", {"loss_type": "cispo", "epsilon_high": 1.28}),
    "dapo": (Dapo(), "token-mean", {"loss_type": "dapo"}),
}


@pytest.mark.parametrize("name", GROUPED)
def test_the_loss_of_a_group_relative_algorithm_is_trls(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    from datasets import Dataset

    algorithm, aggregation, theirs = GROUPED[name]
    settings = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "temperature": TEMPERATURE} | theirs
    trainer = trl.GRPOTrainer(
        model=model_of(tiny_folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            str(tmp_path),
            use_cpu=True,
            max_completion_length=HORIZON,
            report_to=[],
            num_generations=2,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            bf16=False,
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1"]}),
        processing_class=tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    batch = whole_samples()
    expected = trainer._compute_loss(trainer.model, columns(batch))
    expected.backward()
    # trl has no bound below for cispo.
    clip = Clip(low=0.999999 if name == "cispo" else 0.2, high=0.28)
    loss = Loss(algorithm=algorithm, clip=clip, aggregation=Aggregation(name=aggregation, horizon=HORIZON))
    got, kept = streamed(tiny_folder, batch, loss)
    assert got == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(kept, gradients(trainer.model)) < 1e-5


@pytest.mark.parametrize(("algorithm", "loss_type"), [(Dpo, "sigmoid"), (Ipo, "ipo")])
def test_the_loss_of_pairs_is_trls(tiny_folder: Path, tmp_path: Path, algorithm: Any, loss_type: str) -> None:
    from datasets import Dataset

    batch = whole_samples()
    batch = part(batch, [i for i, key in enumerate(batch.keys) if key.sample in (0, 3)])
    everything = [np.ones(n, np.bool_) for n in batch.responses.lengths]
    batch = replace(
        batch,
        advantages=np.array([1.0, -1.0] * (len(batch) // 2), np.float32),
        loss_mask=Jagged.from_rows(everything, "bool"),
    )
    reference = model_of(tiny_folder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(REFERENCE_SCALE)
    trainer = trl.DPOTrainer(
        model=model_of(tiny_folder),
        ref_model=reference,
        args=trl.DPOConfig(
            str(tmp_path),
            use_cpu=True,
            beta=BETA,
            loss_type=[loss_type],
            report_to=[],
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1"], "chosen": ["2"], "rejected": ["3"]}),
        processing_class=tokenizer(),
    )
    order = [*range(0, len(batch), 2), *range(1, len(batch), 2)]
    whole = [np.r_[batch.prompts.row(i), batch.responses.row(i)].astype(np.int64) for i in order]
    width = max(map(len, whole))
    inputs = {name: torch.zeros(len(order), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    inputs["completion_mask"] = torch.zeros(len(order), width, dtype=torch.long)
    for row, (i, ids) in enumerate(zip(order, whole, strict=True)):
        inputs["input_ids"][row, : len(ids)] = torch.from_numpy(ids)
        inputs["attention_mask"][row, : len(ids)] = 1
        inputs["completion_mask"][row, len(batch.prompts.row(i)) : len(ids)] = 1
    expected = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    expected.backward()
    loss = Loss(algorithm=algorithm(DpoOptions(beta=BETA)), aggregation=Aggregation(name="seq-mean-token-sum"))
    got, kept = streamed(tiny_folder, batch, loss, temperature=1.0)
    assert got == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(kept, gradients(trainer.model)) < 1e-5
