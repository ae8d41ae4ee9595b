"""A user-defined training loop: GRPO on the quickstart's task, with AsyncFlow's session and plain torch."""

import sys

import torch
from transformers import AutoModelForCausalLM

import asyncflow

if len(sys.argv) < 3:
    sys.exit("usage: python loop.py JOB.yaml FOLDER [PATH=VALUE ...]")
with asyncflow.init_engines(sys.argv[1], output=sys.argv[2], overrides=sys.argv[3:]) as engines:
    model = AutoModelForCausalLM.from_pretrained(engines.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=5e-3, weight_decay=0.0)
    if engines.state is not None:  # killed, and started again
        model.load_state_dict(engines.state["model"])
        optimizer.load_state_dict(engines.state["optimizer"])
    engines.weight_sync_notify(model)
    while engines.step < engines.steps:
        tokens = 0
        while (batch := engines.get_experience_data()) is not None:
            logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
            ratio = (logprobs - batch.logprobs[:, 1:]).exp()
            advantages = batch.advantages[:, None]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            loss[batch.mask[:, 1:]].sum().backward()
            tokens += int(batch.mask.sum())
        for parameter in model.parameters():
            parameter.grad /= tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        engines.weight_sync_notify(model, state=state)
