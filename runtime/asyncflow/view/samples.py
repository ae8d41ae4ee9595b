"""Pure rendering of samples, one panel each.

Invariant: control characters in texts of a model or a data source are escaped, so they have no effect on the terminal.
"""

from __future__ import annotations

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncflow.driver.sample_files import SampleText
from asyncflow.plan.describe import ABSENT
from asyncflow.view.render import plain, score


def sample_panel(sample: SampleText) -> Panel:
    """Render one sample: its title, prompt, response, and details of the reward."""
    body = Table.grid(padding=(0, 1))
    body.add_column(style="dim")
    body.add_column(overflow="fold")
    body.add_row("prompt", Text(plain(sample.prompt)))
    body.add_row("response", Text(plain(sample.response) or ABSENT, style="bold"))
    if sample.answer:
        body.add_row("answer", Text(plain(sample.answer)))
    for name, value in sample.details.items():
        body.add_row(Text(plain(name)), Text(plain(f"{value:.4g}" if isinstance(value, float) else str(value))))
    return Panel(body, title=_title(sample), title_align="left", subtitle=_subtitle(sample), subtitle_align="right")


def _title(sample: SampleText) -> Text:
    reward = f"no reward: {plain(sample.failure)}" if sample.failure else f"reward {score(sample.reward)}"
    advantage = "" if sample.advantage is None else f"  advantage {sample.advantage:+.3f}"
    place = f"θ{sample.step}" if sample.purpose == "eval" else f"step {sample.step}"
    name = f" of {plain(sample.set)}" if sample.set else ""
    return Text(f"{place}  prompt {sample.serial}{name}, sample {sample.sample}  {reward}{advantage}")


def _subtitle(sample: SampleText) -> Text:
    low, high = sample.version_min, sample.version_max
    made = f"θ{low}" if low == high else f"θ{low} to θ{high}"
    drawn = "" if sample.drawn else "  kept for its reward"
    tokens = f"{sample.prompt_tokens} + {sample.response_tokens} tokens"
    return Text(f"made by {made}  {tokens}  {plain(sample.finish)}{drawn}", style="dim")
