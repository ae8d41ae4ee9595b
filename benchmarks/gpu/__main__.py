"""Compare the trainer with a plain loop: tokens per second, share of the device's peak, and memory, in one table.

    python benchmarks/gpu                                   # 0.6B and 1.7B at 16,384 tokens, plain and compiled
    python benchmarks/gpu --models tiny --tokens 512 --document 64 --compile no      # the small form, on a CPU

Both run one after the other on the same device, each alone in memory. A missed limit is printed but is not a failure:
only a failed run gives exit status 1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loops import PlainLoop, TrainerLoop
from shapes import SHAPES, peak_flops

BARS = {False: 0.95, True: 0.9}
"""The least speed of the trainer relative to the plain loop, by whether both are compiled."""
HEADER = (
    "model", "tokens", "document", "weights", "compile", "plain loop, tokens/s", "trainer, tokens/s", "ratio", "bar",
    "MFU of plain loop, trainer", "peak GB of plain loop, trainer",
)  # fmt: skip


class Measured(NamedTuple):
    """The figures of one loop.

    tokens_s: median over the repetitions; peak: peak bytes of a pass beyond the allocated memory before it, None on the
    CPU.
    """

    tokens_s: float
    peak: int | None
    parameters: int


def measure(kind: type[Any], repeats: int, *, device: torch.device, **case: Any) -> Measured:
    """Run one loop by itself: two passes as warm-up, then ``repeats`` measured passes."""
    loop = kind(device=device, **case)
    for _ in range(2):
        loop.step()
    seconds, accelerated, resting = [], device.type != "cpu", 0
    if accelerated:
        torch.accelerator.synchronize(device)
        resting = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
    for _ in range(repeats):
        began = time.perf_counter()
        loop.step()
        if accelerated:
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    peak = torch.accelerator.max_memory_allocated(device) - resting if accelerated else None
    measured = Measured(case["tokens"] / statistics.median(seconds), peak, loop.parameters)
    del loop
    gc.collect()
    torch.compiler.reset()
    if accelerated:
        torch.accelerator.empty_cache()
    return measured


def row(
    name: str, plain: Measured, trainer: Measured, *, tokens: int, document: int, weights: str, compiled: bool
) -> list[str]:
    """Return one line of the table."""
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    flops = SHAPES[name].flops_of_token(plain.parameters, document=document)
    used = [f"{each.tokens_s * flops / peak:.3f}" if peak else "–" for each in (plain, trainer)]
    memory = [f"{each.peak / 1e9:.1f}" if each.peak is not None else "–" for each in (plain, trainer)]
    return [
        name, f"{tokens:,}", f"{document:,}", weights, "yes" if compiled else "no", f"{plain.tokens_s:,.0f}",
        f"{trainer.tokens_s:,.0f}", f"{trainer.tokens_s / plain.tokens_s:.2f}", f"≥ {BARS[compiled]}",
        ", ".join(used), ", ".join(memory),
    ]  # fmt: skip


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the lines of a Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Measure the chosen cases, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["0.6B", "1.7B"])
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a micro-batch")
    parser.add_argument("--document", type=int, default=512, help="tokens of each document")
    parser.add_argument("--head-tokens", type=int, default=2048, help="tokens whose logits are in memory at once")
    parser.add_argument("--compile", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32", help="of the trainer")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    chosen = parser.parse_args()
    if chosen.tokens % chosen.document:
        parser.error(f"--tokens {chosen.tokens} is not a multiple of --document {chosen.document}")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    rows, missed = [], []
    for name in chosen.models:
        for compiled in {"no": [False], "yes": [True], "both": [False, True]}[chosen.compile]:
            case = {"tokens": chosen.tokens, "document": chosen.document, "compiled": compiled}
            setup = {"device": device, "shape": SHAPES[name], "head_tokens": chosen.head_tokens, **case}
            plain = measure(PlainLoop, chosen.repeats, **setup)
            trainer = measure(TrainerLoop, chosen.repeats, weights=chosen.weights, **setup)
            rows.append(row(name, plain, trainer, weights=chosen.weights, **case))
            if trainer.tokens_s < BARS[compiled] * plain.tokens_s:
                missed.append(
                    f"{name}, compile {compiled}: {rows[-1][7]} of the plain loop, the bar is {BARS[compiled]}"
                )
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    print("\n".join(missed), file=sys.stderr)
    if chosen.output:
        chosen.output.write_text(table(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
