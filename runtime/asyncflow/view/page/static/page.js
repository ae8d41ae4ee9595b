// The page: requests changes, draws them, and shows the state of the connection. An exported file has all data embedded.

const EMBEDDED = JSON.parse(byId("data").textContent);
const KEY = new URLSearchParams(location.hash.slice(1)).get("key") ?? "";
const LIVE_MS = 1000, OVER_MS = 5000, TIMEOUT_MS = 10000;

async function ask(path, timeout = TIMEOUT_MS) {
  if (EMBEDDED) {
    if (!(path in EMBEDDED)) throw new Error("not included in this file");
    return EMBEDDED[path];
  }
  const answer = await fetch(path, { headers: KEY ? { Authorization: `Bearer ${KEY}` } : {}, signal: AbortSignal.timeout(timeout), cache: "no-store" });
  if (answer.ok) return answer.json();
  const problem = await answer.json().catch(() => ({}));
  throw new Error(problem.what ?? `the answer has status ${answer.status}`);
}

const run = new Run();
const board = new Board(run);
const tracks = new Tracks(byId("tracks"), ask);
const samples = new Samples(run, (purpose, step) => ask(`/v1/page/samples/${purpose}/${step}`));
let cursor = "", answered = 0, failure = "";

/** Request the changes once, and draw them. */
async function look() {
  try {
    const answer = await ask(EMBEDDED ? "/v1/page/changes" : `/v1/page/changes?since=${cursor}`);
    const changed = run.take(answer);
    cursor = answer.cursor;
    answered = Date.now();
    failure = "";
    draw(changed);
  } catch (error) {
    failure = error.name === "TimeoutError" ? "it does not answer in time" : error instanceof TypeError ? "it cannot be reached" : error.message;
  }
  drawLink();
}

function draw(changed) {
  drawHeader(run);
  drawWaits(run);
  drawTiles(run);
  drawTasks(run);
  drawRollouts(run, tracks.timeline);
  drawShares(run, tracks.timeline);
  if (changed) {
    board.update();
    drawEvents(run);
  }
  samples.update();
}

/** Show whether the data is current. */
function drawLink() {
  const place = byId("link");
  let words, kind = "over";
  if (EMBEDDED) words = `a copy of ${new Date(EMBEDDED["/v1/page/changes"].now * 1000).toLocaleString("en-GB")}`;
  else if (failure) {
    kind = "lost";
    words = answered ? `No answer since ${clock(answered / 1000)}: ${failure}. The data shown is from then; the page keeps trying.` : `No answer yet: ${failure}`;
  } else if (run.status && !run.end) { kind = "live"; words = "live"; }
  else words = run.end ? `the run has ended: ${PHASE_WORDS[run.end]}` : "the driver does not answer";
  say(place, words);
  place.dataset.kind = kind;
  document.body.dataset.link = kind;
}

/** Follow the run while the page is visible. */
async function follow() {
  for (;;) {
    if (!document.hidden || answered === 0) {
      await Promise.all([look(), tracks.follow(run)]);
    }
    if (EMBEDDED) return;
    await new Promise((resume) => setTimeout(resume, failure ? 2 * LIVE_MS : run.status && !run.end ? LIVE_MS : OVER_MS));
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && !EMBEDDED) look(); });
tracks.changed = () => { drawShares(run, tracks.timeline); drawRollouts(run, tracks.timeline); };

/** Show only the timeline, for a file that contains nothing else (for example of a simulation). */
function chart() {
  document.title = EMBEDDED.title;
  say(byId("name"), EMBEDDED.title);
  say(byId("link"), "");
  document.body.dataset.only = "timeline";
  tracks.follow(run);
}

if (EMBEDDED && "title" in EMBEDDED) chart();
else follow();
