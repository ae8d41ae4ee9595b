"""Measure the cost of each update mode behind a slow link: sync, delayed and staggered, each also behind a fast link.

    sudo python benchmarks/update_modes.py [--engine simulated|transformers|vllm] [--modes sync delayed staggered]

The network is that of ``delayed_update``: real processes, real bytes, and links on which a version takes ``--transfer``
seconds. With ``transformers`` and ``vllm``, a tiny model really generates and learns, and its own weights are
transferred. The model is widened to 6 MB, so that rows need only a small share of a link's bandwidth, and it never ends
a response, so that a step takes longer than a transfer. Its engines have more slots than a group has samples, so that
the next group is claimed while one runs, since calls to the queue are slower during a transfer. ``staggered`` runs once
more with a rollout that is stopped from the middle of a transfer to the end.

Prints a table. The exit status is 1 if a limit is missed, and 2 if this machine cannot create the network.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from pathlib import Path
from statistics import fmean

import capped_links
from delayed_update import HERE, Setting, judge, run, weights_bytes
from swap_figures import Bar, Figures

from asyncflow.api.job import RLJob
from asyncflow.commands.preflight import runnable_job
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.models.tiny import PAD

TINY = "tiny://reverse-digits"
FAST_S = 0.02
"""Seconds of a transfer over the fast link."""
MODES = {
    "sync": ["schedule.mode=sync", "schedule.update=sync", "schedule.maxStaleness=0"],
    "delayed": [],
    "staggered": ["schedule.update=staggered", "schedule.swapAt=sequence", "schedule.stalenessThreshold=0.5"],
}
WIDE = 4096
"""The width of the tiny model's feed-forward layers."""
LEARNING = {
    "model": [
        "rollout.replicas=2",
        "algorithm.groupSize=4",
        "algorithm.steps=6",
        "sampling.maxTokens=192",
        "reward.function=task_functions:begins",
    ],
    "trainer": ["trainer.backend.name=torch", "trainer.backend.options={}", "trainer.backend.tokensPerMicroBatch=4096"],
}
ENGINES = {
    "simulated": ["algorithm.promptsPerStep=48", "algorithm.steps=6"],
    "transformers": [
        *LEARNING["model"],
        *LEARNING["trainer"],
        "algorithm.promptsPerStep=144",
        "rollout.engine={name: transformers, slots: 6}",
        "transferQueue.bytesPerUnit=512Mi",
    ],
    "vllm": [
        *LEARNING["model"],
        *LEARNING["trainer"],
        "algorithm.promptsPerStep=72",
        "rollout.engine={name: vllm, slots: 6, dtype: float32}",
        "transferQueue.bytesPerUnit=512Mi",
    ],
}
EXPOSED_S = 0.1
"""The largest accepted time for which an instance generates nothing because of an update, in seconds."""
SLOWER = 1.05
NEAR_TRANSFER = 0.95
"""The least share of a transfer by which a synchronous step must be longer; runs on a busy machine vary a little."""
NEAR = 0.05
"""The largest accepted difference between the mean lag and 1 - f."""


def wide_model(folder: Path) -> Path:
    """Write the tiny model with wider feed-forward layers, which compute the same until the model is trained.

    The token that ends a response is the padding token, which the model never generates.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = materialize_config(TINY, folder / "narrow")
    materialize_weights(TINY, source)
    narrow = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source)
    config.intermediate_size = WIDE
    config.eos_token_id = config.pad_token_id
    torch.manual_seed(0)
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in wide.state_dict().items():
            known = narrow.state_dict()[name]
            weights[tuple(map(slice, known.shape))] = known
            if name.endswith("down_proj.weight"):
                weights[:, known.shape[1] :] = 0
    made = folder / "wide"
    shutil.copytree(source, made, dirs_exist_ok=True)
    wide.save_pretrained(made)
    named = made / "tokenizer_config.json"
    named.write_text(json.dumps({**json.loads(named.read_text()), "eos_token": PAD}))
    return made


def cycle(figures: Figures) -> float:
    """Return the mean seconds of a step, without the first two steps, which have nothing to overlap with."""
    return fmean(line["wall_s"] for line in figures.steps if line["step"] > 2)


def fresh_share(figures: Figures) -> float:
    """Return f: the share of the responses of D_k, k > 2, whose oldest token is of θ_{k-1}, from their cells."""
    rows = [row for row in figures.rows if "versions" in row and row["step"] > 2]
    return fmean(min(row["versions"]) == row["step"] - 1 for row in rows)


def mean_lag(figures: Figures) -> float:
    """Return the mean staleness of the oldest token in the steps after the second, from the trainer's figures."""
    return fmean(line["staleness_start_mean"] for line in figures.steps if line["step"] > 2)


def exactly_once(name: str, figures: Figures) -> Bar:
    """Return the audit of a run as a limit."""
    audit = figures.audit
    return Bar(
        what=f"{name}: trained; lost; duplicated",
        limit=f"{figures.samples}; 0; 0",
        measured=f"{audit.trained}; {audit.lost}; {audit.duplicated}",
        met=audit.ok and audit.trained == figures.samples,
    )


def sync_bars(slow: Figures, fast: Figures) -> list[Bar]:
    """Return the limits of ``sync``, which must wait for each transfer."""
    transfer = fmean(change.transfer_s for change in slow.all_changes)
    waited = cycle(slow) - cycle(fast)
    return [
        Bar(what="sync: a transfer", measured=f"{transfer:.2f} s"),
        Bar(
            what="sync: a step behind the slow link, less one behind the fast link",
            limit="at least the transfer",
            measured=f"{cycle(slow):.2f} - {cycle(fast):.2f} = {waited:.2f} s",
            met=waited >= NEAR_TRANSFER * transfer,
        ),
        exactly_once("sync", slow),
    ]


def hidden_bars(name: str, slow: Figures, fast: Figures) -> list[Bar]:
    """Return the limits of a mode that receives during generation. fast: the same mode behind the fast link."""
    exposed = fmean(change.stall_s for change in slow.all_changes)
    transfer = fmean(change.transfer_s for change in slow.all_changes)
    return [
        Bar(
            what=f"{name}: a transfer",
            measured=f"{transfer:.2f} s, {len(slow.all_changes)} of them",
        ),
        Bar(
            what=f"{name}: nothing made because of an update, mean",
            limit=f"at most {EXPOSED_S} s",
            measured=f"{exposed:.3f} s",
            met=exposed <= EXPOSED_S,
        ),
        Bar(
            what=f"{name}: a step behind the slow link, of one behind the fast link",
            limit=f"below {SLOWER:.0%}",
            measured=f"{cycle(slow):.2f} of {cycle(fast):.2f} s, {cycle(slow) / cycle(fast):.1%}",
            met=cycle(slow) < SLOWER * cycle(fast),
        ),
        exactly_once(name, slow),
    ]


def staggered_bars(name: str, figures: Figures) -> list[Bar]:
    """Return the limits of a staggered run: its lag must agree with the versions of its responses."""
    lag, fresh = mean_lag(figures), fresh_share(figures)
    most = max(line["staleness_start_max"] for line in figures.steps)
    return [
        Bar(
            what=f"{name}: mean lag; 1 - f, f the share of D_k from θ_(k-1)",
            limit=f"within {NEAR}, below 1",
            measured=f"{lag:.3f}; {1 - fresh:.3f}",
            met=abs(lag - (1 - fresh)) <= NEAR and lag < 1,
        ),
        Bar(what=f"{name}: greatest lag", limit="1", measured=f"{most:g}", met=most <= 1),
    ]


def stopped_bars(figures: Figures, usual: Figures) -> list[Bar]:
    """Return the limits of a staggered run with a stopped rollout. usual: the undisturbed run."""
    incident = figures.incident
    if incident is None:
        return [Bar(what="one rollout was stopped", limit="yes", measured="no", met=False)]
    after = [change for change in figures.all_changes if incident.stopped < change.swapped < incident.continued]
    versions = {change.version for change in after}
    before, now = max(usual.arrivals(usual.all_changes)), max(figures.arrivals(after), default=float("inf"))
    return [
        Bar(
            what=f"stopped: rollout {incident.victim} while it received θ{incident.during}, and to the end",
            measured=f"{incident.continued - incident.stopped:.1f} s, {incident.held} rows, leased by others after "
            f"{max(incident.again, default=0.0):.1f} s at most",
        ),
        Bar(
            what="stopped: the others, from publication to staged, worst",
            limit=f"at most {1.1 * before:.2f} s",
            measured=f"{now:.2f} s",
            met=now <= 1.1 * before,
        ),
        Bar(
            what="stopped: versions to which the others changed meanwhile",
            limit=f"{incident.during} to {figures.last - 1}",
            measured=", ".join(map(str, sorted(versions))),
            met=set(range(incident.during, figures.last)) <= versions,
        ),
        exactly_once("stopped", figures),
    ]


def main() -> int:
    """Carry out the runs and check their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(ENGINES), default="simulated")
    parser.add_argument("--output", type=Path, default=Path("runs/update-modes"))
    parser.add_argument("--transfer", type=float, default=5.0, help="seconds of a transfer on the slow link")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--set", nargs="+", metavar="FIELD=VALUE", default=[], help="fields of spec, in all runs")
    options = parser.parse_args()
    if lacks := capped_links.missing():
        print(f"this needs {', '.join(lacks)}", file=sys.stderr)
        return 2

    model = []
    if options.engine != "simulated":
        model = [f"model.source={wide_model(options.output.absolute() / 'model')}"]

    def job(mode: str) -> RLJob:
        fields = [*ENGINES[options.engine], *MODES[mode], *model, *options.set]
        return runnable_job(HERE / "delayed_update.yaml", [f"spec.{field}" for field in fields])

    def make(mode: str, seconds: float, *, nbytes: int, stop: bool = False) -> Figures:
        how = "stopped" if stop else "fast" if seconds == FAST_S else "slow"
        folder = options.output / f"{options.engine}-{mode}-{how}"
        setting = Setting(job=job(mode), folder=folder, nbytes=nbytes, transfer_s=seconds, stop=stop)
        return asyncio.run(run(setting))

    good = True
    for mode in options.modes:
        fast = make(mode, FAST_S, nbytes=weights_bytes(job(mode)) if options.engine == "simulated" else 1 << 20)
        nbytes = fast.all_changes[0].nbytes
        slow = make(mode, options.transfer, nbytes=nbytes)
        bars = sync_bars(slow, fast) if mode == "sync" else hidden_bars(mode, slow, fast)
        if mode == "staggered":
            bars += staggered_bars(mode, slow)
            bars += stopped_bars(make(mode, options.transfer, nbytes=nbytes, stop=True), slow)
        good = judge(bars) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
