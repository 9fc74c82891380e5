// What the runs came to: tiles for one run, a table for any number.
const fromTo = (from, to) => (isNumber(from) || isNumber(to) ? `${score(from)} → ${score(to)}` : "–");
const VERDICT_ORDER = ["agrees", "inconclusive", "disagrees"];
const wall = (view) => (isNumber(view.wall_s) ? duration(view.wall_s) : isNumber(view.steps_s) ? `${duration(view.steps_s)} in steps` : "–");
const best = (view) => (isNumber(view.best_step) ? `${view.best_step} (${score(view.best_reward)})` : "–");

function verdicts(proof) {
  const found = VERDICT_ORDER.filter((verdict) => proof[verdict]);
  return found.length ? found.map((verdict) => make("div", "", `${number(proof[verdict])} ${verdict}`)) : "–";
}

const SUMMARY = [
  ["State", (view) => view.state],
  ["Backend", (view) => view.backend || "–"],
  ["Placement", (view) => view.placement || "–"],
  ["Steps", (view) => (isNumber(view.max_steps) ? `${number(view.steps)} of ${number(view.max_steps)}` : number(view.steps))],
  ["Reward\nfirst 4 → last 4", (view) => fromTo(view.reward_first4, view.reward_last4)],
  ["Held-out\nbefore → after", (view) => fromTo(view.eval_before, view.eval_after)],
  ["Best step", best],
  ["Wall time", wall],
  ["Restarts", (view) => number(view.restarts)],
  ["Proof of sync", (view) => verdicts(view.proof || {})],
];

function tile(name, value, more) {
  return make("div", "card tile", [make("div", "name", name), make("div", "value", value), make("div", "more", more)]);
}

function change(from, to) {
  return [make("span", "from", `${score(from)} → `), score(to)];
}

function showOverview() {
  const place = byId("overview");
  byId("title").textContent = runs.map((run) => run.label).join(", ");
  byId("made").textContent = `${report.tandem} · report of ${report.made.replace("T", " ").slice(0, 16)}`;
  const about = new Set(runs.map((run) => [run.overview.model, run.overview.data].filter(Boolean).join(" on ")));
  byId("subtitle").textContent = [...about].filter(Boolean).join(" · ");
  for (const run of runs) {
    const name = several ? `${run.label}: ` : "";
    if (run.overview.state === "going on") place.append(make("p", "note", `${name}this run was still going on when the page was made.`));
    for (const note of run.notes) place.append(make("p", "note", name + note));
  }
  if (!several) place.append(tiles(runs[0].overview));
  const head = make("tr", "", [make("th", "", "Run"), ...SUMMARY.map(([name]) => make("th", "", name))]);
  const rows = runs.map((run, index) => {
    const name = make("span", colour(index), [several ? make("span", "dot") : null, several ? " " : "", run.label]);
    const cells = SUMMARY.map(([, value]) => make("td", "tight", value(run.overview)));
    return make("tr", "", [make("td", "tight", name), ...cells]);
  });
  const table = make("table", "", [make("thead", "", head), make("tbody", "", rows)], { id: "summary" });
  place.append(make("div", "card scroll", table));
}

function tiles(view) {
  const planned = isNumber(view.max_steps) && view.max_steps !== view.steps ? `of ${number(view.max_steps)}, ${view.state}` : view.state;
  const held = isNumber(view.eval_after) || !isNumber(view.best_reward) ? view.eval_after : view.best_reward;
  return make("div", "tiles", [
    tile("Reward", change(view.reward_first4, view.reward_last4), "first four steps → last four"),
    tile("Held-out examples", change(view.eval_before, held), held === view.eval_after ? "before → after training" : `before → best so far, step ${view.best_step}`),
    tile("Optimizer steps", number(view.steps), planned),
    tile("Wall time", duration(view.wall_s ?? view.steps_s), isNumber(view.wall_s) ? `${number(view.restarts)} restarts of an engine` : "in the steps recorded so far"),
  ]);
}
