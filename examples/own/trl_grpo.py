"""TRL's GRPOTrainer as the trainer of a job: it reads samples from the queue and sends weights to the rollouts."""

import sys
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import asyncflow


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    """Return all samples of the next step in the order of their groups; the prompts that TRL passes are ignored."""
    samples = []
    while (batch := engines.get_experience_data()) is not None:
        for row, key in enumerate(batch.keys):
            response = batch.versions[row] >= 0
            prompt = batch.ids[row][batch.attention[row] & ~response].tolist()
            logprobs, reward = batch.logprobs[row][response].tolist(), float(batch.rewards[row])
            samples.append((key, prompt, batch.ids[row][response].tolist(), logprobs, reward))
    _, asked, answers, logprobs, rewards = map(list, zip(*sorted(samples), strict=True))
    return {"prompt_ids": asked, "completion_ids": answers, "logprobs": logprobs, "scored": rewards}


def scored(scored: list[float], **_: Any) -> list[float]:
    return scored


class Notify(TrainerCallback):
    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        if engines.state is not None:
            optimizer.load_state_dict(engines.state["optimizer"])

    def on_step_end(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        engines.weight_sync_notify(model, state=state)


if len(sys.argv) < 3:
    sys.exit("usage: python trl_grpo.py JOB.yaml FOLDER [PATH=VALUE ...]")
sync = "schedule={mode: sync, update: sync, maxStaleness: 0}"
with asyncflow.init_engines(sys.argv[1], output=sys.argv[2], overrides=[sync, *sys.argv[3:]]) as engines:
    algorithm, sampling = engines.job.spec.algorithm, engines.job.spec.sampling
    model = AutoModelForCausalLM.from_pretrained(engines.model)
    if engines.state is not None:
        model.load_state_dict(engines.state["model"])
    engines.weight_sync_notify(model)
    samples = algorithm.prompts_per_step * algorithm.group_size
    GRPOTrainer(
        model,
        reward_funcs=scored,
        rollout_func=rollouts,
        train_dataset=Dataset.from_dict({"prompt": [""] * algorithm.prompts_per_step}),
        processing_class=AutoTokenizer.from_pretrained(engines.model),
        callbacks=[Notify()],
        args=GRPOConfig(
            output_dir=f"{sys.argv[2]}/trl",
            max_steps=engines.steps - engines.step,
            per_device_train_batch_size=samples,
            num_generations=algorithm.group_size,
            steps_per_generation=1,
            learning_rate=algorithm.learning_rate,
            lr_scheduler_type="constant",
            adam_epsilon=algorithm.epsilon,
            max_completion_length=sampling.max_tokens,
            temperature=sampling.temperature,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
    ).train()
