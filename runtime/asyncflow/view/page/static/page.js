// The page: asks for what is new, draws it, and says where it comes from. In a file that was sent, everything is there.

const SENT = JSON.parse(byId("data").textContent);
const KEY = new URLSearchParams(location.hash.slice(1)).get("key") ?? "";
const LIVE_MS = 1000, OVER_MS = 5000, LATE_MS = 10000;

async function ask(path, late = LATE_MS) {
  if (SENT) {
    if (!(path in SENT)) throw new Error("they are not in this file");
    return SENT[path];
  }
  const answer = await fetch(path, { headers: KEY ? { Authorization: `Bearer ${KEY}` } : {}, signal: AbortSignal.timeout(late), cache: "no-store" });
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.what ?? `the answer has status ${answer.status}`);
}

const run = new Run();
const board = new Board(run);
const tracks = new Tracks(byId("tracks"), ask);
const samples = new Samples(run, (purpose, step) => ask(`/v1/page/samples/${purpose}/${step}`));
let cursor = "", answered = 0, failure = "";

/** Ask once for what is new, and draw it. */
async function look() {
  try {
    const answer = await ask(SENT ? "/v1/page/changes" : `/v1/page/changes?since=${cursor}`);
    const others = run.take(answer);
    cursor = answer.cursor;
    answered = Date.now();
    failure = "";
    draw(others);
  } catch (error) {
    failure = error.name === "TimeoutError" ? "it does not answer in time" : error instanceof TypeError ? "it cannot be reached" : error.message;
  }
  drawLink();
}

function draw(others) {
  drawHeader(run);
  drawWaits(run);
  drawTiles(run);
  drawTasks(run);
  drawRollouts(run, tracks.timeline);
  drawShares(run, tracks.timeline);
  if (others) {
    board.update();
    drawEvents(run);
  }
  samples.update();
}

/** Say whether what is shown is of now. */
function drawLink() {
  const place = byId("link");
  let words, kind = "over";
  if (SENT) words = `a copy of ${new Date(SENT["/v1/page/changes"].now * 1000).toLocaleString("en-GB")}`;
  else if (failure) {
    kind = "lost";
    words = answered ? `No answer since ${clock(answered / 1000)}: ${failure}. What is shown is of then; it is tried again.` : `No answer yet: ${failure}`;
  } else if (run.status && !run.end) { kind = "live"; words = "live"; }
  else words = run.end ? `the run has ended: ${PHASE_WORDS[run.end]}` : "the driver does not answer";
  say(place, words);
  place.dataset.kind = kind;
  document.body.dataset.link = kind;
}

/** Follow the run while somebody looks. */
async function follow() {
  for (;;) {
    if (!document.hidden || answered === 0) {
      await Promise.all([look(), tracks.follow(run)]);
    }
    if (SENT) return;
    await new Promise((resume) => setTimeout(resume, failure ? 2 * LIVE_MS : run.status && !run.end ? LIVE_MS : OVER_MS));
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden && !SENT) look(); });
tracks.changed = () => { drawShares(run, tracks.timeline); drawRollouts(run, tracks.timeline); };

/** Show the timeline alone: the file has nothing else, of a simulation, say. */
function chart() {
  document.title = SENT.title;
  say(byId("name"), SENT.title);
  say(byId("link"), "");
  document.body.dataset.only = "timeline";
  tracks.follow(run);
}

if (SENT && "title" in SENT) chart();
else follow();
