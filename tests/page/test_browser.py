"""The page in headless Chromium, by what it shows: of a finished run, in a file, and of a job that goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watched_page import Watched, shown

from asyncflow import cli
from asyncflow.api.status import DriverStatus, RolloutState
from asyncflow.driver.sample_files import SampleText, write_samples

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

STEPS = 40
HOSTILE = (
    "<script>document.title = 'taken'</script><img src='http://192.0.2.1/x' onerror='alert(1)'></pre>"
    "</script><!--<script>@@DATA@@\u202egnp\x1b[2J{{constructor}} &lt;b&gt;"
)
OpenPage = Callable[..., Watched]


def hostile(reward: float) -> SampleText:
    return SampleText(
        purpose="train", step=STEPS, serial=0, sample=0, drawn=True, prompt=HOSTILE, response=HOSTILE * 20,
        answer=json.dumps(HOSTILE), reward=reward, prompt_tokens=3, response_tokens=9, version_min=1, version_max=3,
        finish=HOSTILE, details={HOSTILE: HOSTILE, "right": 0.25},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended, of 40 steps in 80 seconds."""
    from made_run import make_run

    folder = tmp_path_factory.mktemp("page") / "run"
    make_run(folder, name="made", rollouts=4, seconds=80.0, step_s=2.0)
    kept = [hostile(9.0), *_others()]
    write_samples(folder, kept, purpose="train", step=STEPS, form="jsonl")
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": HOSTILE, "at": 1_790_000_000.0, "why": HOSTILE}) + "\n")
        events.write(json.dumps({"event": "Succeeded", "at": 1_790_000_100.0}) + "\n")
    return folder


def _others() -> Iterator[SampleText]:
    for number in range(1, 30):
        fields = {
            "serial": number,
            "reward": number / 40,
            "response": f"said {number}",
            "finish": "stop",
            "details": {},
        }
        yield SampleText(**{**{f: getattr(hostile(0.0), f) for f in SampleText.__struct_fields__}, **fields})


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with shown(run) as (url, _):
        yield url


def test_a_finished_run_is_shown_whole(address: str, open_page: OpenPage) -> None:
    at = open_page(address)
    at.page.wait_for_selector("#tracks canvas")
    assert at.page.title() == "made – AsyncFlow"
    assert at.text("#phase") == "succeeded"
    assert at.text("#link") == "the run has ended: succeeded"
    assert "grpo" in at.text("#facts")
    assert "4 rollouts" in at.text("#facts")
    tiles = at.text("#tiles")
    for words in (f"{STEPS} of {STEPS}", "Accuracy, held out", "1 version", "Trainer waits"):
        assert words in tiles
    charts = at.page.locator(".chart h3").all_inner_texts()
    assert {"Reward and evaluation", "Loss", "KL divergence", "Clipped tokens", "Time of a step"} <= set(charts)
    assert at.page.locator(".chart path.line").count() > 10
    at.until("() => document.querySelector('#shares').innerText.includes('idle: starved')")
    shares = at.text("#shares")
    for words in ("trainer", "rollout", "generate", "backward", "idle: starved by rollout"):
        assert words in shares
    assert "killed" in at.text("#rollouts")
    assert "rollout-3" in at.text("#tracks")
    painted = """() => { const c = document.querySelector('#tracks canvas');
      const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
      for (let i = 0; i < d.length; i += 4) if (d[i + 3]) seen.add(d.slice(i, i + 3).join());
      return seen.size; }"""
    assert at.page.evaluate(painted) > 8
    now = DriverStatus(rollouts=(RolloutState(id="only"),)).model_dump(mode="json", by_alias=True)
    at.page.route("**/changes*", lambda route: route.fulfill(json={**route.fetch().json(), "status": now}))
    at.page.reload()
    at.until("() => document.querySelector('#facts').innerText.includes(' 1 rollout ')")
    assert "evaluation" in at.text("#event-list")
    at.page.locator("input[value=cause]").check(force=True)
    for cause in ("at work", "starved", "tail", "back-pressure"):
        assert cause in at.text("#tracks .legend")


def test_what_a_model_wrote_is_shown_and_not_obeyed(address: str, open_page: OpenPage) -> None:
    at = open_page(address)
    first = at.page.locator(".sample").first
    first.wait_for()
    shown_text = first.locator("pre").first.inner_text()
    assert shown_text == HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b")
    assert "reward 9" in first.inner_text()
    assert "θ₁ to θ₃" in first.inner_text()
    first.get_by_role("button", name="Show all").click()
    assert first.locator("pre").nth(1).inner_text().count("onerror") == 20
    assert at.page.title() == "made – AsyncFlow"
    assert at.page.locator("main img, main script").count() == 0
    assert HOSTILE[:30] in at.text("#event-list")


def test_samples_are_put_in_order_and_steps_turned(address: str, open_page: OpenPage) -> None:
    at = open_page(address)
    at.page.wait_for_selector(".sample")
    assert at.page.locator(".sample").count() == 8
    at.page.get_by_role("button", name="Show 16 more").click()
    assert at.page.locator(".sample").count() == 24
    at.page.get_by_label("Order").select_option("worst")
    assert "reward 0.025" in at.page.locator(".sample").first.inner_text()
    at.page.get_by_label("Order").select_option("prompt")
    at.page.get_by_role("button", name="Samples of the previous step").click()
    at.until(f"() => document.querySelector('.sample').innerText.includes('prompt {16 * (STEPS - 2)}')")
    at.page.locator("input[value=eval]").check(force=True)
    assert "No samples of an evaluation are kept" in at.text("#sample-list")


def test_charts_are_chosen_and_read_by_keyboard(address: str, open_page: OpenPage) -> None:
    at = open_page(address)
    at.page.wait_for_selector(".chart")
    assert at.page.locator(".chart", has_text="Learning rate").count() == 0
    at.page.get_by_text("Charts", exact=True).click()
    at.page.get_by_label("Learning rate").check()
    assert at.page.locator(".chart", has_text="Learning rate").count() == 1
    reward = at.page.locator(".chart svg").first
    reward.focus()
    reward.press("Home")
    reward.press("ArrowRight")
    assert at.text("#said").startswith("step 2: reward 0.")
    assert at.page.locator(".cross line").count() > 10
    at.page.locator("input[value=time]").check(force=True)
    at.until("() => [...document.querySelectorAll('.chart text')].some((text) => text.textContent === '1 min')")
    table = at.page.locator("#figures")
    table.locator("summary").click()
    at.until(f"() => document.querySelectorAll('#figures tbody tr').length === {STEPS}")


def test_a_part_of_the_timeline_is_shown_in_detail(address: str, open_page: OpenPage) -> None:
    at = open_page(address)
    canvas = at.page.locator("#tracks canvas")
    canvas.focus()
    for key in ("+", "+", "+", "ArrowRight"):
        canvas.press(key)
    at.until("() => performance.getEntriesByType('resource').filter((e) => /begin=/.test(e.name)).length > 0")
    assert at.text("#said").startswith("from ")
    canvas.hover(position={"x": 60, "y": 30})
    at.until("() => /^(trainer-0: |rollout)/.test(document.querySelector('.readout').textContent)")
    canvas.press("0")
    at.page.mouse.move(0, 0)
    at.until("() => document.querySelector('.readout').textContent.startsWith('Point at a span')")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (400, "light")])
def test_nothing_is_cut_off(address: str, open_page: OpenPage, width: int, scheme: str) -> None:
    at = open_page(address, width=width, scheme=scheme)
    at.page.wait_for_selector("#tracks canvas")
    at.page.wait_for_selector(".sample")
    beyond = """() => [...document.querySelectorAll('main *, header *')].filter((e) => {
      if (e.closest('.scroll, nav, pre, .picker, svg, .visually-hidden')) return false;
      const box = e.getBoundingClientRect(); return box.width > 1 && (box.right > innerWidth + 1 || box.left < -1); })
      .map((e) => e.outerHTML.slice(0, 120))"""
    assert at.page.evaluate(beyond) == []
    assert at.page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_the_key_nothing_of_the_run_is_shown(address: str, open_page: OpenPage) -> None:
    at = open_page(address.partition("#")[0], shows="#link[data-kind=lost]")
    assert "ends with the key" in at.text("#link")
    assert "made" not in at.text("body")
    at.expected.append("401")


def test_a_file_shows_the_run_and_asks_nobody(run: Path, tmp_path: Path, open_page: OpenPage) -> None:
    file = tmp_path / "run.html"
    assert cli.invoke(["ui", str(run), "--export", str(file)]) == 0
    at = open_page(file.as_uri())
    at.page.wait_for_selector("#tracks canvas")
    at.page.wait_for_selector(".sample")
    assert at.text("#link").startswith("a copy of ")
    assert at.page.locator(".sample pre").first.inner_text().startswith(HOSTILE[:40])
    assert [url for url in at.asked if not url.startswith("data:")] == [file.as_uri()]
    assert cli.invoke(["ui", str(run), "--export", str(file), "--without-texts"]) == 0
    assert "said 29" not in file.read_text()


def test_a_chart_shows_the_timeline_alone(run: Path, tmp_path: Path, open_page: OpenPage) -> None:
    assert cli.invoke(["timeline", str(run), "--output", str(tmp_path)]) == 0
    file = tmp_path / "timeline.html"
    at = open_page(file.as_uri(), shows="#tracks canvas")
    assert at.text("#name").startswith(f"{run.name}: ")
    at.until("() => /trainer[^]*% at work/.test(document.querySelector('#shares').innerText)")
    for hidden in ("#learning", "#tiles", "#samples", "nav"):
        assert not at.page.locator(hidden).is_visible(), hidden
    at.page.locator("input[value=step]").last.check(force=True)
    assert "each step has a colour of its own" in at.text("#tracks")
    canvas = at.page.locator("#tracks canvas")
    canvas.hover(position={"x": 60, "y": 30})
    at.until("() => /^trainer-0: /.test(document.querySelector('.readout').textContent)")
    canvas.press("+")
    assert at.text("#said").startswith("from ")
    assert [url for url in at.asked if not url.startswith("data:")] == [file.as_uri()]


def test_a_live_job_is_followed_beyond_its_driver_and_to_its_end(tmp_path: Path, open_page: OpenPage) -> None:
    from one_run import bearer, direct, kill, start, wait_for_step

    folder = tmp_path / "run"
    settings = [
        "algorithm.steps=9000", "evaluation=null", "rollout.engine.options={token_s: 0.1}", "rollout.replicas=1",
        "transferQueue.storageUnits=1", "failurePolicy.driver.backoffSeconds=10",
    ]  # fmt: skip
    job = start("counting.yaml", folder, settings)
    try:
        wait_for_step(folder, 2, job)
        driver = json.loads((folder / "run" / "processes.json").read_text())["http"]
        with shown(folder) as (url, serving):
            at = open_page(url)
            at.until("() => document.querySelector('#link').textContent === 'live'")
            at.until("() => document.querySelector('#tasks').innerText.includes('staged')")
            at.until("() => document.querySelector('#rollouts').innerText.includes('rollout 0')")
            step = "() => Number(document.querySelector('#tiles dd').textContent.split(' ')[0])"
            seen = at.page.evaluate(step)
            at.until(f"() => ({step})() > {seen}")
            open_to_all = open_page(driver)
            open_to_all.page.wait_for_selector(".sample")
            assert "This page shows no texts" in open_to_all.text("#sample-list")
            assert open_to_all.page.locator("pre").count() == 0
            open_to_all.expected.append("ERR_CONNECTION")
            for each in (at, open_to_all):
                each.remember_changes("#link")
            kill(folder, "driver", by=signal.SIGKILL)
            open_to_all.until("() => window.changes.some(({ kind }) => kind === 'lost')")
            at.until("() => window.changes.some(({ text }) => text === 'the driver does not answer')")
            open_to_all.until("() => document.querySelector('#link').textContent === 'live'")
            open_to_all.page.close()
            steps = len((folder / "metrics.jsonl").read_text().splitlines())
            wait_for_step(folder, steps + 1, job)
            token = (folder / "run" / "token").read_text().strip()
            assert direct(folder, "/v1/suspend", headers=bearer(token)) == 202
            job.communicate(timeout=120)
            at.until("() => document.querySelector('#link').textContent === 'the run has ended: suspended'")
            at.expected.append("ERR_CONNECTION")
            serving.terminate()
            at.until("() => document.querySelector('#link').textContent.includes('No answer since')")
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=120)
