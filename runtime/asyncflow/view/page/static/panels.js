// The current state: figures, the queue by task, rollouts with their versions, events, and the use of time.

const PHASE_WORDS = { Succeeded: "succeeded", Failed: "failed", Suspended: "suspended", Running: "running",
  Starting: "starting", Pending: "pending", Paused: "paused", Suspending: "suspending" };

function drawHeader(run) {
  const { job } = run;
  say(byId("name"), visible(job.name ?? "AsyncFlow"));
  document.title = `${visible(job.name ?? "run")} – AsyncFlow`;
  const kind = run.status?.phase ?? run.end;
  say(byId("phase"), kind ? PHASE_WORDS[kind] ?? kind : run.read ? "silent" : "");
  byId("phase").dataset.phase = kind || "silent";
  const rollouts = run.status?.rollouts?.length ?? job.rollouts;
  say(byId("facts"), job.algorithm ? visible([job.algorithm, job.model, `${job.mode}, staleness ≤ ${job.staleness}`,
    plural(rollouts, "rollout"), plural(job.ranks, "trainer rank")].join("  ·  ")) : "");
  const bar = byId("progress"), { step, steps } = run, now = run.status?.stepProgress;
  bar.setAttribute("aria-valuemax", steps);
  bar.setAttribute("aria-valuenow", step);
  bar.setAttribute("aria-valuetext", `step ${step} of ${steps}`);
  bar.children[0].style.width = `${steps ? (100 * step) / steps : 0}%`;
  bar.children[1].style.width = `${steps && now ? (100 / steps) * Math.min(1, now.trained / Math.max(1, now.samples)) : 0}%`;
}

/** Show what the job waits for, and the progress of the current step. */
function drawWaits(run) {
  const { status } = run, place = byId("waits"), now = status?.stepProgress;
  const words = [];
  if (status?.waitingFor) words.push(`It waits for ${visible(status.waitingFor)}.`);
  if (!run.end && now) {
    words.push(`Step ${now.step}: ${number(now.generated)} of ${number(now.samples)} samples generated, ${number(now.trained)} trained`
      + `${now.running ? `, ${plural(now.running, "sequence")} running` : ""}`
      + `${now.tokensPerSecond ? `, ${number(now.tokensPerSecond)} tokens/s generated` : ""}`
      + `${now.publishing !== undefined && now.publishing !== null ? `, θ${subscript(now.publishing)} is being published` : ""}${now.saving ? ", a checkpoint is being written" : ""}.`);
  }
  if (status?.rewards?.firstFailure && Object.keys(status.rewards.failed ?? {}).length) {
    const count = Object.values(status.rewards.failed).reduce((a, b) => a + b, 0);
    words.push(`${plural(count, "sample has", "samples have")} no reward: ${visible(status.rewards.firstFailure.trim().split("\n").at(-1))}`);
  }
  if (!status && !run.end && run.lines.length + run.events.length > 0) {
    words.push(`The driver does not answer, and the files do not record an end of the run. The last entry is from ${clock(run.seen)}. `
      + "If the run was killed, asyncflow run --resume continues it.");
  }
  say(place, words.join(" "));
  place.classList.toggle("stuck", Boolean(status?.waitingFor) || (!status && !run.end));
  place.hidden = words.length === 0;
}

const AUDITED = [["samples_dispatched", "dispatched"], ["samples_trained", "trained"], ["samples_filtered", "filtered"],
  ["samples_dropped", "dropped"], ["samples_unfinished", "unfinished"], ["samples_lost", "lost"], ["samples_duplicated", "trained twice"]];

const subscript = (value) => [...String(value)].map((digit) => "₀₁₂₃₄₅₆₇₈₉"[digit] ?? digit).join("");

function drawTiles(run) {
  const { status, summary, last } = run, evaluation = run.evaluations.at(-1);
  const first = run.lines[0], before = run.evaluations[0];
  const elapsed = run.seen - run.began;
  const recent = run.lines.slice(-10);
  const sum = (name) => recent.reduce((total, line) => total + (line[name] ?? 0), 0);
  const waited = status?.trainerWaitShare ?? (sum("wall_s") ? sum("wait_s") / sum("wall_s") : null);
  const rate = status?.tokensPerSecond || (sum("wall_s") ? sum("tokens") / sum("wall_s") : null);
  const tiles = [
    ["Step", `${number(run.step)} of ${number(run.steps)}`, recent.length ? `${seconds(sum("wall_s") / recent.length)} a step, over the last ${recent.length}` : "none is done yet"],
    ["Reward", number(last.reward), first && run.lines.length > 1 ? `from ${number(first.reward)} at step ${first.step}` : "mean of a step's samples"],
    ["Accuracy, held out", evaluation ? percent(evaluation.accuracy) : ABSENT, evaluation
      ? `θ${subscript(evaluation.step)}${evaluation.greedy === null || evaluation.greedy === undefined ? "" : `, greedy ${percent(evaluation.greedy)}`}${before !== evaluation ? `, from ${percent(before.accuracy)}` : ""}` : "no evaluation is complete"],
    ["Tokens trained", rate ? `${number(rate)} /s` : ABSENT, summary?.tokens_trained ? `${number(summary.tokens_trained)} in all` : "prompts and responses"],
    ["Staleness", last.staleness_start_max === undefined ? ABSENT : `${number(last.staleness_start_max)} version${last.staleness_start_max === 1 ? "" : "s"}`, last.staleness_token_mean === undefined ? "of the oldest token" : `oldest token; mean ${number(last.staleness_token_mean)}`],
    ["Trainer waits", percent(waited), "share of its time, for samples"],
    run.end || status?.etaSeconds === null || status?.etaSeconds === undefined
      ? ["Time", seconds(summary?.wall_s ?? elapsed), run.end ? "from start to end" : "since the start"]
      : ["Time left", seconds(status.etaSeconds), `${seconds(run.read - run.began)} so far`],
  ];
  const place = byId("tiles");
  if (place.children.length !== tiles.length) {
    place.replaceChildren(...tiles.map(() => el("div", {}, el("dt"), el("dd"), el("dd", { class: "quiet" }))));
  }
  tiles.forEach((texts, i) => texts.forEach((text, n) => say(place.children[i].children[n], text)));
}

/** Return a table; the first cell of each row is its header. */
function table(caption, head, rows) {
  return el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head.map((words) => el("th", { scope: "col" }, words)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell))))));
}

function drawTasks(run) {
  const place = byId("tasks"), { status } = run;
  if (!status) {
    const counts = run.summary ? AUDITED.filter(([name]) => Number.isFinite(run.summary[name])) : [];
    refresh(place, counts.length ? table("Samples of the run, by the audit of the ledger", ["", "samples"],
      counts.map(([name, words]) => [words, number(run.summary[name])])) : el("h3", {}, "Queue by task"),
    el("p", { class: "quiet note" }, run.end ? "The run is over, so its queue no longer exists. During a run, this shows the ready, leased and staged samples."
      : "The driver does not answer, so the state of the queue is unknown."));
    return;
  }
  const { queue, tasks, stepProgress: now } = status;
  const counted = (value) => el("span", { class: "count" }, number(value ?? 0));
  const rows = [["rollout", ABSENT, counted(queue.leased), now ? `${number(now.generated)} of ${number(now.samples)} of step ${now.step}` : ABSENT]];
  for (const [name, task] of Object.entries(tasks ?? {})) {
    const failed = Object.values(task.failed ?? {}).reduce((a, b) => a + b, 0);
    rows.push([visible(name), counted(task.ready), counted(task.leased), `${number(task.done)} done${failed ? `, ${number(failed)} failed` : ""}`]);
  }
  rows.push(["train", counted(queue.ready), ABSENT, `${number(queue.staged)} staged`]);
  const room = queue.limit ? [el("p", { class: "quiet" }, `${bytes(queue.bytes)} of ${bytes(queue.limit)} are in use`), meter(queue.bytes / queue.limit)] : [];
  refresh(place, table("Queue by task", ["task", "ready", "leased", "done"], rows), ...room, depthCurve(run),
    el("p", { class: "quiet note" }, "ready: available to the task; leased: in work; staged: trained, but not yet in a checkpoint"));
}

/** Return a chart of the queue's depths since this page was opened. */
function depthCurve(run) {
  const points = run.depths;
  if (points.length < 3) return el("p", { class: "quiet" }, "A curve of the queue appears here after a few seconds.");
  const width = 400, height = 56, begin = points[0].at, span = points.at(-1).at - begin || 1;
  const most = Math.max(1, ...points.flatMap((p) => [p.ready, p.leased, p.staged]));
  const x = (at) => ((at - begin) / span) * width, y = (value) => height - 2 - (value / most) * (height - 6);
  const drawing = svg("svg", { class: "depths", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Samples ready, leased and staged over the last ${seconds(span)}; at most ${most}` });
  [["leased", 0], ["ready", 2], ["staged", 3]].forEach(([name, colour]) => drawing.append(
    svg("path", { class: `line s${colour}`, d: through(points.map((p) => p.at), points.map((p) => p[name]), x, y) })));
  return el("div", {}, drawing, el("div", { class: "legend" },
    ...[["leased", 0], ["ready", 2], ["staged", 3]].map(([name, colour]) => entry(`c${colour}`, name)),
    el("span", { class: "quiet" }, `over the last ${seconds(span)}; at most ${number(most)}`)));
}

function drawRollouts(run, timeline) {
  const place = byId("rollouts"), { status } = run;
  if (!status) {
    const lives = timeline?.tracks.filter((track) => track.role === "rollout") ?? [];
    if (lives.length === 0) {
      refresh(place, el("h3", {}, "Versions by rollout"), empty(run.end
        ? "The run is over. During a run, this shows the version that each rollout serves."
        : "The driver does not answer, so the versions of the rollouts are unknown."));
      return;
    }
    const rows = lives.map((track) => [`rollout ${track.index}${track.attempt ? `, attempt ${track.attempt}` : ""}`, versionsOf(track),
      seconds(track.end - track.begin), track.killed ? "killed" : "ended in order"]);
    refresh(place, el("div", { class: "scroll", tabindex: "0" }, table("Versions by rollout", ["rollout", "versions served", "lifetime", "end"], rows)));
    return;
  }
  const newest = status.version;
  const rows = status.rollouts.map((rollout) => {
    const behind = newest - rollout.version;
    return [`rollout ${rollout.index}`, rollout.state, `θ${subscript(rollout.version)}`,
      el("span", { class: behind > 1 ? "late" : "" }, behind > 0 ? plural(behind, "version") : "newest"), number(rollout.inflight)];
  });
  const { versions } = status, spent = versions?.seconds ?? {};
  const phases = ["publish", "transfer", "stage", "swap"].filter((name) => Number.isFinite(spent[name])).map((name) => `${name} ${seconds(spent[name])}`);
  refresh(place, 
    rows.length ? el("div", { class: "scroll", tabindex: "0" }, table("Versions by rollout", ["rollout", "state", "serves", "behind", "sequences"], rows))
      : el("div", {}, el("h3", {}, "Versions by rollout"), empty("There is no rollout.")),
    el("p", { class: "quiet note" }, [`The newest version is θ${subscript(newest)}${versions?.bytes ? `, ${bytes(versions.bytes)}` : ""}.`,
      phases.length ? `Median durations of an update: ${phases.join(", ")}.` : "",
      status.desiredRollouts !== null && status.desiredRollouts !== undefined ? `The built-in policy wants ${plural(status.desiredRollouts, "rollout")}.` : ""].filter(Boolean).join(" ")));
}

function versionsOf(track) {
  const known = track.versions ?? [];
  if (known.length === 0) return ABSENT;
  return known.length === 1 ? `θ${subscript(known[0])}` : `θ${subscript(known[0])} to θ${subscript(known.at(-1))}, ${plural(known.length, "version")}`;
}

/** Return an event's description as text. */
function describeEvent(event) {
  if (event.event === "evaluation") {
    const sets = Object.entries(event.sets ?? {}).map(([name, set]) => `; ${visible(name)} ${percent(set.accuracy)}`).join("");
    const passes = Object.entries(event.pass_at ?? {}).map(([k, share]) => `, pass@${k} ${percent(share)}`).join("");
    return `θ${subscript(event.step)}: accuracy ${percent(event.accuracy)}${event.greedy === null || event.greedy === undefined ? "" : `, greedy ${percent(event.greedy)}`}${passes}${sets}, ${plural(event.prompts ?? 0, "prompt")}`;
  }
  if (event.event === "step made again") return `from step ${event.step} on, by a trainer that resumed from its checkpoint`;
  return Object.entries(event).filter(([name]) => !["event", "at"].includes(name))
    .map(([name, value]) => `${visible(name)}: ${visible(typeof value === "object" ? JSON.stringify(value) : value)}`).join(", ");
}

function drawEvents(run) {
  const place = byId("event-list");
  if (run.events.length === 0) {
    refresh(place, empty("There are no events yet."));
    return;
  }
  const rows = run.events.slice(-500).reverse().map((event) => [
    el("time", { datetime: new Date(event.at * 1000).toISOString(), title: clock(event.at) }, seconds(event.at - run.began)), visible(event.event), describeEvent(event)]);
  refresh(place, table(`${plural(run.events.length, "event")}, newest first`, ["after", "event", ""], rows));
}

function drawShares(run, timeline) {
  const place = byId("shares"), roles = Object.entries(timeline?.shares ?? {});
  if (roles.length) {
    const ordered = roles.sort((a, b) => placeOf(a[0]) - placeOf(b[0]) || a[0].localeCompare(b[0]));
    refresh(place, ...ordered.map(([role, parts]) => shareBar(role, parts)));
    return;
  }
  const idle = Object.entries(run.status?.idleShare ?? run.summary?.idle_share ?? {});
  if (idle.length === 0) {
    refresh(place, empty("The use of time is not known yet."));
    return;
  }
  refresh(place, ...idle.map(([role, value]) => el("div", { class: "share" }, el("b", {}, visible(role)),
    meter(1 - value), el("span", {}, `${percent(1 - value)} at work, ${percent(value)} idle`))));
}

/** Return a bar of a role's use of time: work first, then, at half height, idle time by cause. parts: [kind, cause, by, seconds]. */
function shareBar(role, parts) {
  const total = parts.reduce((sum, part) => sum + part[3], 0) || 1;
  const sorted = [...parts].filter((part) => part[3] > 0).sort((a, b) => (a[0] === "idle") - (b[0] === "idle") || b[3] - a[3]);
  const drawing = svg("svg", { class: "sharebar", viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": "true" });
  const colour = ([kind, cause]) => (kind === "idle" ? CAUSE_COLOURS[cause] ?? 13 : KIND_COLOURS[kind] ?? 2);
  let at = 0;
  for (const part of sorted) {
    const width = (1000 * part[3]) / total, idle = part[0] === "idle";
    drawing.append(svg("rect", { x: at, width: Math.max(0.5, width - 1), y: idle ? 8 : 0, height: idle ? 8 : 16, class: `f${colour(part)}` }));
    at += width;
  }
  const spent = (kind) => sorted.filter((part) => part[0] === kind).reduce((sum, part) => sum + part[3], 0) / total;
  const idle = spent("idle"), starting = spent("starting");
  const words = sorted.map((part) => entry(`c${colour(part)}${part[0] === "idle" ? " low" : ""}`,
    part[0] === "idle" ? `idle: ${part[1] || "not known"}${part[2] ? ` by ${visible(part[2])}` : ""} ` : `${part[0]} `,
    el("b", {}, percent(part[3] / total)), el("span", { class: "quiet" }, ` ${seconds(part[3])}`)));
  return el("div", { class: "share" }, el("div", { class: "head" }, el("b", {}, visible(role)), el("span", { class: "quiet" }, `${percent(1 - idle - starting)} at work, ${percent(idle)} idle${starting ? `, ${percent(starting)} starting` : ""}`)),
    drawing, el("div", { class: "legend" }, ...words));
}
