"""Tests of what the trainer's backend is told of a job."""

from pathlib import Path

import numpy as np
import pytest

from asyncflow.api.job import RLJob
from asyncflow.errors import ManifestError
from asyncflow.models import tiny
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.roles.backend import backend_settings, export_best, export_checkpoint
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints
from asyncflow.training.ranks import GroupLeft, SingleProcess


def job(**spec: object) -> RLJob:
    source = {"source": "tiny://reverse-digits"}
    usual = {"model": source, "data": {"train": source}, "reward": {"function": "task"}, "sampling": {"maxTokens": 16}}
    return RLJob.model_validate({"metadata": {"name": "little"}, "spec": usual | spec})


@pytest.mark.parametrize(
    ("curve", "halfway"), [("constant", 1e-3), ("linear", (1e-3 + 1e-5) / 2), ("cosine", (1e-3 + 1e-5) / 2)]
)
def test_the_learning_rate_follows_its_curve_to_the_last_step(curve: str, halfway: float) -> None:
    algorithm = {"steps": 110, "learningRate": 1e-3, "warmupSteps": 10, "entropy": 0.02}
    algorithm |= {"learningRateCurve": curve} | ({} if curve == "constant" else {"finalLearningRate": 1e-5})
    settings = backend_settings(job(algorithm=algorithm).spec, host="127.0.0.1")
    rate = settings.optimizer.rate
    assert [rate(5), rate(10)] == pytest.approx([5e-4, 1e-3])
    assert [rate(60), rate(110)] == pytest.approx([halfway, 1e-3 if curve == "constant" else 1e-5])
    assert settings.loss.entropy == 0.02


@pytest.mark.parametrize(
    ("precision", "compute", "held"),
    [("float32", "float32", "float32"), ("bf16", "bfloat16", "float32"), ("bf16-stochastic", "bfloat16", "bfloat16")],
)
def test_the_precision_says_what_computes_what_is_held_and_what_is_published(
    precision: str, compute: str, held: str
) -> None:
    spec = job(algorithm={"steps": 1}, trainer={"backend": {"precision": precision}}).spec
    settings = backend_settings(spec, host="127.0.0.1")
    assert (settings.compute, settings.weights, spec.published_dtype) == (compute, held, held)


def test_a_trainer_uses_its_share_of_the_device() -> None:
    trainer = {"accelerator": {"profile": "nvidia", "count": 1, "share": 0.6}}
    settings = backend_settings(job(algorithm={"steps": 1}, trainer=trainer).spec, host="127.0.0.1")
    assert (settings.device, settings.share) == ("cuda", 0.6)


def test_a_device_that_torch_does_not_see_is_refused() -> None:
    from asyncflow.training.torch.backend import TorchBackend

    trainer = {"accelerator": {"profile": "nvidia", "count": 1}}
    settings = backend_settings(job(algorithm={"steps": 1}, trainer=trainer).spec, host="127.0.0.1")
    with pytest.raises(ManifestError, match=r"spec\.trainer\.accelerator: there is no cuda device here"):
        TorchBackend(settings, group=SingleProcess())


def test_the_best_checkpoint_is_exported_unless_it_is_the_last_one_or_the_first_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from asyncflow.training.torch.backend import TorchBackend

    monkeypatch.setattr(tiny, "STEPS", 1)
    spec = job(algorithm={"steps": 3}).spec
    model = materialize_config(spec.model.source, tmp_path)
    materialize_weights(spec.model.source, model)
    backend = TorchBackend(backend_settings(spec, host="127.0.0.1"), group=SingleProcess())
    backend.load(model, checkpoint=None)
    held, checkpoints = {}, Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2, 3):
        for _, array in backend.tensors():
            np.asarray(array)[...] += 1.0
        held[step] = {name: np.array(array) for name, array in backend.tensors()}
        checkpoints.write(CheckpointManifest(attempt=0, step=step, samples=0), backend.snapshot())
    places = {"checkpoints": checkpoints, "last": 3, "run": tmp_path, "target": tmp_path / "export-best"}
    for best in (None, 0, 3):
        assert export_best(spec, backend, model, best=best, **places) is None

    def leaving(array: np.ndarray, *, what: str) -> np.ndarray:
        raise GroupLeft

    with monkeypatch.context() as patched:
        patched.setattr(backend.group, "gather", leaving)
        assert export_best(spec, backend, model, best=2, **places) is None
    assert not (tmp_path / "export-best").exists()
    assert export_best(spec, backend, model, best=2, **places) == 2
    exported = load_file(tmp_path / "export-best" / "model.safetensors")
    assert all(np.array_equal(tensor.numpy(), held[2][name]) for name, tensor in exported.items())


def test_a_checkpoint_is_exported_as_the_trainer_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    from asyncflow.training.torch.backend import TorchBackend

    monkeypatch.setattr(tiny, "STEPS", 1)
    for precision in ("bf16", "bf16-stochastic"):
        trainer = {"backend": {"precision": precision}}
        spec = job(algorithm={"steps": 1}, trainer=trainer).spec
        model = materialize_config(spec.model.source, tmp_path)
        materialize_weights(spec.model.source, model)
        backend = TorchBackend(backend_settings(spec, host="127.0.0.1"), group=SingleProcess())
        backend.load(model, checkpoint=None)
        held = {name: np.array(array) for name, array in backend.tensors()}
        manifest = CheckpointManifest(attempt=0, step=1, samples=0)
        Checkpoints(tmp_path / "checkpoints").write(manifest, backend.snapshot())
        target = tmp_path / precision
        assert export_checkpoint(spec, run=tmp_path, step="newest", target=target) == 1
        exported = load_file(target / "model.safetensors")
        assert {str(tensor.dtype) for tensor in exported.values()} == {f"torch.{backend.settings.weights}"}
        assert exported.keys() == held.keys()
        assert all(np.array_equal(tensor.float().numpy(), held[name]) for name, tensor in exported.items())
