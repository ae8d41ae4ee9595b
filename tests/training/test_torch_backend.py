"""Tests of the torch backend beside its gradient: bits over a resume, exactness of what is left out, metrics."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from train_reference import HORIZON, TEMPERATURE, assert_same_bits, padded_logprobs, part, samples, weights
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils.logging import enable_progress_bar

from asyncflow.algorithms.correction import Correction
from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.losses import KlTarget
from asyncflow.errors import CheckpointError, DiskError, Diverged, ManifestError
from asyncflow.identity import Version
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints
from asyncflow.training.packing import LayoutName, pack_samples
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.model import LogprobModel, choose_kernels, open_model, smallest_pack


def backend(folder: Path, *, checkpoint: Path | None = None, loss: Loss | None = None, **more: Any) -> TorchBackend:
    optimizer = more.pop("optimizer", OptimizerSettings(learning_rate=1e-3, steps=8, warmup_steps=2, weight_decay=0.1))
    made = TorchBackend(
        BackendSettings(optimizer=optimizer, loss=loss or Loss(), threads=1, **more), group=SingleProcess()
    )
    made.load(folder, checkpoint=checkpoint)
    return made


def train(trainer: TorchBackend, first: int, last: int) -> dict[str, float]:
    batch, metrics = samples(), {}
    for step in range(first, last + 1):
        for start in range(0, len(batch), 6):
            trainer.micro_batch(part(batch, range(start, min(start + 6, len(batch)))), version=step - 1)
        metrics = trainer.finish_step(step)
    return metrics


def test_two_runs_and_a_resumed_one_have_the_same_bits(tiny_folder: Path, tmp_path: Path) -> None:
    loss = Loss(kl=0.1, entropy=0.01)
    runs = [backend(tiny_folder, loss=loss) for _ in range(2)]
    for run in runs:
        train(run, 1, 3)
    runs[0].snapshot()(tmp_path)
    resumed = backend(tiny_folder, loss=loss, checkpoint=tmp_path)
    assert_same_bits(weights(resumed), weights(runs[0]))
    metrics = [train(run, 4, 6) for run in (*runs, resumed)]
    assert_same_bits(weights(runs[0]), weights(runs[1]))
    assert_same_bits(weights(runs[0]), weights(resumed))
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0]["kl"] > 0


def test_what_was_not_computed_is_no_metric(tiny_folder: Path) -> None:
    trainer, means = backend(tiny_folder), {"kl", "entropy", "surprise", "ratio", "approx_kl", "clip_low"}
    assert means - train(trainer, 1, 1).keys() == {"kl", "entropy"}
    nothing = trainer.finish_step(2)
    assert not nothing.keys() & (means | {"ratio_max", "logprob_gap", "logprob_gap_p99"})
    assert (nothing["loss"], nothing["grad_norm"], nothing["computed_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
@pytest.mark.parametrize("old", ["behaviour", "recompute"])
def test_observation_tokens_have_no_gradient_to_the_bit(tiny_folder: Path, layout: LayoutName, old: Any) -> None:
    """Nothing that is known of a masked token but its id enters, and the id only where later tokens see it."""
    correction = Correction(kind="mask", level="sequence", high=100.0)
    loss = Loss(old=old, correction=correction, kl=0.1, entropy=0.01)
    batch = samples()
    assert batch.loss_mask is not None
    masked = ~batch.loss_mask.values
    last = batch.responses.offsets[1:][batch.responses.lengths > 0] - 1
    unseen = last[masked[last]]
    assert len(unseen), "a response ends in an observation"
    logprobs, ids = batch.logprobs.values.copy(), batch.responses.values.copy()
    logprobs[masked] = np.nan
    ids[unseen] = (ids[unseen] + 7) % 64
    offsets = batch.responses.offsets
    other = replace(batch, logprobs=Jagged(logprobs, offsets), responses=Jagged(ids, offsets))
    made = []
    for each in (batch, other):
        trainer = backend(tiny_folder, loss=loss, layout=layout)
        prepared = trainer.prepare(each)
        trainer.micro_batch(prepared, version=0)
        trainer.measure(each, weights=weights(trainer))
        made.append((weights(trainer), trainer.finish_step(1), weights(trainer)))
    (start, figures, end), (other_start, other_figures, other_end) = made
    assert_same_bits(start, other_start)
    assert_same_bits(end, other_end)
    assert figures == other_figures
    assert figures["logprob_gap_tokens"] >= batch.loss_lengths().sum()


def test_micro_batches_leave_the_weights_alone_and_restart_cleanly(tiny_folder: Path) -> None:
    trainer, fresh = backend(tiny_folder), backend(tiny_folder)
    before = weights(trainer)
    trainer.micro_batch(samples(), version=0)
    assert_same_bits(weights(trainer), before)
    trainer.load(tiny_folder, checkpoint=None)
    train(trainer, 1, 1)
    train(fresh, 1, 1)
    assert_same_bits(weights(trainer), weights(fresh))


def test_a_silent_sample_counts_and_costs_nothing(tiny_folder: Path) -> None:
    quiet = samples()
    quiet.advantages[:8] = 0
    computed, everything = backend(tiny_folder), backend(tiny_folder, loss=Loss(entropy=1e-30))
    for trainer in (computed, everything):
        trainer.micro_batch(quiet, version=0)
    metrics, other = computed.finish_step(1), everything.finish_step(1)
    assert metrics["computed_tokens"] < other["computed_tokens"]
    assert metrics["silent_samples"] == other["silent_samples"] == 8
    assert metrics["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_a_step_without_any_gradient_is_still_a_step(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder, optimizer=OptimizerSettings(learning_rate=1e-3, steps=2))
    before = weights(trainer)
    metrics = trainer.finish_step(1)
    assert metrics["grad_norm"] == 0
    assert_same_bits(weights(trainer), before)


def test_a_gradient_that_is_not_finite_moves_nothing(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder)
    before, batch = weights(trainer), samples()
    batch.advantages[3] = np.inf
    trainer.micro_batch(batch, version=0)
    metrics = trainer.finish_step(1)
    assert metrics["skipped"] == 1
    assert all(np.isfinite(value) for value in metrics.values())
    assert_same_bits(weights(trainer), before)
    train(trainer, 2, 2)
    assert all(np.isfinite(array).all() for array in weights(trainer).values())


def test_a_gradient_that_is_not_finite_three_steps_in_a_row_ends_the_training(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder, loss=Loss(kl=0.1, target=KlTarget(value=1e-6, horizon=2.0)))
    broken = samples()
    broken.advantages[3] = np.nan

    def step(number: int, batch: MicroBatch) -> float:
        trainer.micro_batch(batch, version=0)
        return trainer.finish_step(number)["skipped"]

    assert [step(1, broken), step(2, broken), step(3, samples()), step(4, broken), step(5, broken)] == [1, 1, 0, 1, 1]
    completed = trainer._coefficient().tensor.item()
    with pytest.raises(Diverged, match="steps 4 to 6"):
        step(6, broken)
    assert trainer._coefficient().tensor.item() == completed, "the checkpoint that follows is that of step 5"


def test_clipping_bounds_the_step(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder, optimizer=OptimizerSettings(learning_rate=1e-3, steps=2, max_grad_norm=1e-3))
    seen = []
    step = trainer._optimizer._adam.step
    trainer._optimizer._adam.step = lambda: (seen.append(trainer._optimizer.gradient.norm().item()), step())
    metrics = train(trainer, 1, 1)
    assert metrics["grad_norm"] > 1e-3
    assert seen == [pytest.approx(1e-3, rel=1e-4)]


@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
def test_the_engine_is_measured_against_the_older_weights_that_made_a_sample(
    tiny_folder: Path, layout: LayoutName
) -> None:
    trainer = backend(tiny_folder, layout=layout, temperature=TEMPERATURE)
    older, batch = weights(trainer), samples()
    with torch.no_grad():
        exact = padded_logprobs(
            AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager"),
            batch,
            HORIZON,
        )
    rows = [exact[i, : len(batch.responses.row(i))].numpy() for i in range(len(batch))]
    made = replace(batch, logprobs=Jagged.from_rows(rows, "float32"))
    newer = Version(0, 1).packed
    trainer.micro_batch(made, version=newer)
    unmeasured = trainer.finish_step(1)
    assert unmeasured["logprob_gap_tokens"] == 0
    assert "logprob_gap_p99" not in unmeasured
    trainer.micro_batch(made, version=newer)
    before = weights(trainer)
    trainer.measure(made, weights=older)
    assert_same_bits(weights(trainer), before)
    measured = trainer.finish_step(2)
    assert measured["logprob_gap_tokens"] == batch.loss_lengths().sum()
    assert measured["logprob_gap_p99"] < 1e-4
    trainer.measure(made, weights=weights(trainer))
    assert trainer.finish_step(3)["logprob_gap_p99"] > 1e-3


def test_rounded_weights_are_the_bits_of_bfloat16_and_measure_as_such(tiny_folder: Path) -> None:
    trainer, batch = backend(tiny_folder), samples()
    bits = dict(trainer.tensors(dtype="bfloat16"))
    as_is = weights(trainer)
    for name, array in as_is.items():
        assert bits[name].dtype == np.uint16
        assert bits[name].tobytes() == torch.from_numpy(array).bfloat16().view(torch.uint16).numpy().tobytes()
    gaps = []
    for rounded in (
        bits,
        {name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in bits.items()},
        as_is,
    ):
        trainer.measure(batch, weights=rounded)
        gaps.append(trainer.finish_step(1)["logprob_gap"])
    assert gaps[0] == gaps[1] != gaps[2]


def test_bfloat16_computes_nearly_the_same_and_keeps_float32_weights(tiny_folder: Path) -> None:
    exact, half = backend(tiny_folder), backend(tiny_folder, compute="bfloat16")
    a, b = train(exact, 1, 1), train(half, 1, 1)
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1)
    assert {array.dtype for array in weights(half).values()} == {np.dtype(np.float32)}


def test_tied_weights_are_published_once(tmp_path: Path) -> None:
    config = Qwen3Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        vocab_size=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    trainer = backend(tmp_path / "model")
    train(trainer, 1, 1)
    assert "lm_head.weight" not in weights(trainer)
    (tmp_path / "saved").mkdir()
    trainer.snapshot()(tmp_path / "saved")
    assert_same_bits(weights(backend(tmp_path / "model", checkpoint=tmp_path / "saved")), weights(trainer))


def test_a_full_disk_is_said_and_commits_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    trainer, checkpoints = backend(tiny_folder), Checkpoints(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(DiskError, match="cannot be written"):
            checkpoints.write(CheckpointManifest(attempt=0, step=1, samples=0), trainer.snapshot())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


FAMILIES = {
    "llama": lambda **sizes: LlamaConfig(**sizes),
    "qwen2": lambda **sizes: Qwen2Config(**sizes),
    "mistral": lambda **sizes: MistralConfig(**sizes, sliding_window=None),
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def opened(folder: Path, *, rows: int, compute: torch.dtype = torch.float32) -> LogprobModel:
    model = open_model(folder, weights=True, device=torch.device("cpu"))
    return LogprobModel(model, temperature=TEMPERATURE, compute=compute, rows=rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
def test_other_families_have_the_same_logprobs_in_packs(family: str, layout: LayoutName, tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES)).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    batch = samples()
    prompts, responses = ([c.row(i) for i in range(len(batch))] for c in (batch.prompts, batch.responses))
    with torch.no_grad():
        expected = padded_logprobs(plain, batch, HORIZON)
        logprobs = opened(tmp_path, rows=7)
        for pack in pack_samples(prompts, responses, [key.serial for key in batch.keys], layout=layout, budget=64):
            got, _ = logprobs(pack, entropy=False)
            torch.testing.assert_close(got, expected[pack.samples, pack.offsets], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [LlamaConfig, GraniteConfig], ids=["plain", "scaled-logits"])
def test_logits_of_a_pack_exist_a_chunk_at_a_time_unless_the_model_changes_them(family: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    scaled = {"logits_scaling": 4.0, "pad_token_id": 0} if family is GraniteConfig else {}
    AutoModelForCausalLM.from_config(family(**SIZES, **scaled)).save_pretrained(tmp_path)
    batch = samples()
    columns = ([column.row(i) for i in range(len(batch))] for column in (batch.prompts, batch.responses))
    pack = next(iter(pack_samples(*columns, [0] * len(batch), layout="separate", budget=1000)))
    found: list[tuple[torch.Tensor, ...]] = []
    largest: list[int] = []
    for rows in (len(pack.targets), 5):
        model = opened(tmp_path, rows=rows)
        model.evaluate(smallest_pack())
        sizes: list[int] = []
        model.model.get_output_embeddings().register_forward_hook(
            lambda _m, _i, out, sizes=sizes: sizes.append(out.shape[-2])
        )
        logprobs, entropy = model(pack, entropy=True)
        assert entropy is not None
        (logprobs - 0.1 * entropy).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((logprobs, entropy, *gradients))
        largest.append(max(sizes))
    whole = len(pack.targets)
    assert largest == [whole, whole if scaled else 5]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_chunks_in_bfloat16_add_up_the_gradient_of_the_head_in_float32(tiny_folder: Path) -> None:
    batch = samples()
    columns = ([column.row(i) for i in range(len(batch))] for column in (batch.prompts, batch.responses))
    pack = next(iter(pack_samples(*columns, [0] * len(batch), layout="separate", budget=1000)))
    gradients = []
    for rows, compute in ((1000, torch.float32), (1000, torch.bfloat16), (1, torch.bfloat16)):
        model = opened(tiny_folder, rows=rows, compute=compute)
        logprobs, _ = model(pack, entropy=False)
        logprobs.sum().backward()
        gradients.append(model.model.get_output_embeddings().weight.grad)
    exact, whole, chunks = gradients
    assert torch.linalg.norm(chunks - exact) < 1.2 * torch.linalg.norm(whole - exact)


@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
def test_the_gradient_of_a_model_with_a_window_is_that_of_a_padded_batch(layout: LayoutName, tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=3)).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    batch = samples()
    columns = ([column.row(i) for i in range(len(batch))] for column in (batch.prompts, batch.responses))
    (pack,) = pack_samples(*columns, [key.serial for key in batch.keys], layout=layout, budget=1000)
    padded_logprobs(plain, batch, HORIZON)[pack.samples, pack.offsets].sum().backward()
    packed = opened(tmp_path, rows=7)
    packed(pack, entropy=False)[0].sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in packed.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
def test_a_model_without_packs_is_trained_as_one_with_packs(layout: LayoutName, tmp_path: Path) -> None:
    """A cap that no attention score comes near changes nothing but the way in which a batch is computed."""
    trained = []
    for cap in (None, 1e6):
        folder = tmp_path / f"cap-{cap}"
        torch.manual_seed(0)
        config = Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=cap)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        trainer = backend(folder, loss=Loss(kl=0.1, entropy=0.01), layout=layout, pack_tokens=64)
        metrics = train(trainer, 1, 2)
        del metrics["packed_tokens"]  # shared prompts are computed once only in packs
        trained.append((metrics, weights(trainer)))
    (packed, end), (padded, other_end) = trained
    assert packed["grad_norm"] > 0
    assert padded == pytest.approx(packed, rel=1e-3, abs=1e-5)
    for name, values in end.items():
        np.testing.assert_allclose(other_end[name], values, atol=1e-5, err_msg=name)


def test_what_does_not_fit_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no model"):
        backend(tmp_path)
    trainer = backend(tiny_folder)
    trainer.snapshot()(tmp_path)
    stored = dict(trainer.tensors())
    from safetensors.torch import save_file

    save_file({name: torch.zeros(3) for name in stored}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not fit"):
        backend(tiny_folder, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pack_token": 8}, "unknown option pack_token"),
        ({"head_tokens": 0}, "head_tokens"),
        ({"gradient_checkpointing": "yes"}, "gradient_checkpointing"),
        ({"collective_timeout_s": "long"}, "collective_timeout_s"),
    ],
)
def test_options_that_mean_nothing_are_refused(tiny_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        backend(tiny_folder, options=options)


def test_a_machine_that_cannot_compile_is_told_before_anything_is_trained(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "force_disable_caches", True)
    monkeypatch.setattr(inductor.cpp, "cxx", ("/nowhere/g++",))
    torch.compiler.reset()
    with pytest.raises(ManifestError, match=r"torch\.compile does not work here") as refused:
        backend(tiny_folder, options={"compile": True})
    assert refused.value.where == "spec.trainer.backend.options.compile"


def test_layers_that_are_computed_again_have_no_dropout(tmp_path: Path) -> None:
    # OPT's layers apply dropout themselves, to the results of their modules.
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 32, "max_position_embeddings": 64}
    config = OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    assert config.dropout > 0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    plain, again = backend(tmp_path), backend(tmp_path, options={"gradient_checkpointing": True})
    assert train(plain, 1, 2) == train(again, 1, 2)
    assert_same_bits(weights(plain), weights(again))


def test_a_model_is_opened_without_a_progress_bar_in_the_log(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    enable_progress_bar()
    open_model(tiny_folder, weights=True, device=None)
    assert capfd.readouterr().err == ""


def test_packs_that_are_filled_up_say_the_same(tiny_folder: Path) -> None:
    model = open_model(tiny_folder, weights=True, device=torch.device("cpu"))
    ids = [np.arange(n) % 64 for n in (5, 5, 11, 3)]
    for layout in ("separate", "shared-prompt"):
        (pack,) = pack_samples(ids, [i[::-1] for i in ids], [0, 0, 1, 2], layout=layout, budget=99)
        found = [
            LogprobModel(model, temperature=1.0, compute=torch.float32, rows=99, few_sizes=filled)(pack, entropy=True)
            for filled in (False, True)
        ]
        for plain, filled in zip(*found, strict=True):
            torch.testing.assert_close(filled, plain)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without devices")
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_a_device_that_is_not_there_is_refused_and_the_cpu_does_not_take_its_place(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(ManifestError, match=f"no {device} device") as refused:
        TorchBackend(
            BackendSettings(optimizer=OptimizerSettings(learning_rate=1, steps=1), device=device), group=SingleProcess()
        )
    assert refused.value.where == "spec.trainer.accelerator"


@pytest.mark.parametrize(
    ("device", "deterministic", "on", "warns"),
    [
        ("cpu", False, True, False),
        ("cuda", True, True, False),
        ("cuda", False, False, False),
        ("npu", True, True, True),
    ],
)
def test_deterministic_kernels_are_demanded_where_attention_has_them_only_then(
    monkeypatch: pytest.MonkeyPatch, device: str, deterministic: bool, on: bool, warns: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        choose_kernels(cast("torch.device", SimpleNamespace(type=device)), deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() is on
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is (device == "cuda" and deterministic)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
