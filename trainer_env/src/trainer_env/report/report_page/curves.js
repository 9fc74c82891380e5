// Which curves there are. A chart that has no figure in any run is named in a line instead.
const ofRuns = (make) => runs.flatMap((run, index) => make(run, index) || []);
const has = (ys) => ys.some((value) => value !== null && value !== undefined);

function figure(name, label = "", look = "") {
  return ofRuns((run, index) => {
    const ys = column(run, name);
    return has(ys) ? [{ run: index, label, kind: "line", look, xs: run.columns.step, ys }] : [];
  });
}

function rewardChart() {
  const ks = [...new Set(ofRuns((run) => run.evaluations.flatMap((item) => Object.keys(item.pass_at || {}))))].sort((a, b) => a - b);
  const tints = several ? {} : { held: colour(1), pass: [colour(2), colour(3), colour(4)] }; // Several runs are told apart by colour.
  const shapes = ["circle", "square", "triangle"];
  const series = ofRuns((run, index) => {
    const xs = column(run, "step"), ys = column(run, "reward_mean");
    const held = [...run.evaluations].sort((a, b) => a.step - b.step);
    const places = held.map((item) => item.step);
    const of = (label, kind, look, values, more = {}) => ({ run: index, label, kind, look, xs: places, ys: values, ...more });
    const found = [];
    if (has(ys)) {
      found.push({ run: index, label: "each step", kind: "dots", xs, ys });
      found.push({ run: index, label: "mean of 4", short: "mean of last 4", kind: "line", look: "thick", xs, ys: movingMean(ys, 4) });
    }
    if (held.length) {
      const rewards = held.map((item) => item.reward_mean);
      found.push(of("", "line", "thin second", rewards, { silent: true, tint: tints.held }));
      found.push(of("held-out", "markers", "full", rewards, { shape: "diamond", tint: tints.held, values: !several && held.length < 9 }));
    }
    ks.forEach((k, at) => {
      const rates = held.map((item) => item.pass_at?.[k] ?? null);
      if (has(rates)) found.push(of(`pass@${k}`, "markers", "", rates, { shape: shapes[at % 3], tint: tints.pass?.[at % 3] }));
    });
    return found;
  });
  const kinds = new Map(series.filter((one) => !one.silent).map((one) => [one.label, [one.label, `${one.look || ""} ${several ? colour(7) : tint(one)}`, one.kind, one.shape]]));
  return { id: "reward", title: "Reward", unit: "mean of a batch", wide: true, height: 300, series, keys: [...kinds.values()] };
}

const PARTS = [["rollout", "rollout_s", 1], ["sleep", "sleep_s", 1], ["wake", "wake_s", 1], ["train", "train_s", 1], ["publish", "publish_ms", 1000]];

// One chart a run, all to one scale.
function secondsCharts() {
  const found = ofRuns((run, index) => {
    const parts = PARTS.map(([label, name, unit]) => ({ label, tint: `part-${label}`, run: index, kind: "bars", xs: column(run, "step"), ys: column(run, name).map((value) => (value === null ? null : value / unit)) })).filter((one) => has(one.ys));
    const legend = parts.map((one) => [one.label, `area ${one.tint}`, "bar"]);
    return [{ id: several ? `seconds-${index}` : "seconds", kind: "bars", title: several ? `Seconds by part: ${run.label}` : "Seconds by part", unit: "s a step", series: parts, keys: legend, wide: !several }];
  });
  const most = found.flatMap((spec) => stacked(spec.series).totals).reduce((high, value) => Math.max(high, value), 0);
  return found.map((spec) => ({ ...spec, also: [most] }));
}

function proofChart() {
  const series = ofRuns((run, index) => {
    const ys = column(run, "proof");
    return has(ys) ? [{ run: index, label: "", kind: "strip", xs: run.columns.step, ys }] : [];
  });
  const count = (verdict) => runs.reduce((sum, run) => sum + (run.overview.proof[verdict] || 0), 0); // Of all steps, drawn or not.
  return { id: "proof", kind: "strip", title: "Proof of sync", unit: "verdict on the version that sampled", wide: true, series, keys: Object.keys(VERDICTS).map((verdict) => [`${verdict} ${count(verdict)}`, verdict, "bar"]) };
}

function curves() {
  const of = (id, title, unit, more = {}) => ({ id, title, unit, series: figure(id), ...more });
  const one = colour(several ? 7 : 0);
  return [
    rewardChart(),
    of("completion_length", "Completion length", "tokens, mean", { zero: true }),
    of("reward_std", "Spread of rewards", "standard deviation in a group", { zero: true }),
    of("ratio_mean", "Ratio", "trainer's / server's probability, before the step", { reference: 1 }),
    of("dlogp_mean_abs", "Logprob difference", "mean |trainer − server|", { zero: true }),
    proofChart(),
    of("loss", "Loss", ""),
    of("grad_norm", "Gradient norm", "", { zero: true }),
    of("learning_rate", "Learning rate", "", { zero: true }),
    of("staleness", "Staleness", "optimizer steps", { zero: true, whole: true }),
    ...secondsCharts(),
    of("generated_tokens_per_s", "Tokens per second", "while sampling", { zero: true }),
    { id: "publish_ms", title: "Publish", unit: "ms", zero: true, series: [...figure("publish_ms", "until it serves"), ...figure("load_ms", "engine's load", "second")], keys: [["until it serves", one, "line"], ["engine's load", `second ${one}`, "line"]] },
    of("overlap", "Overlap", "share of sampling that nobody waited for", { zero: true }),
  ];
}

function showCurves() {
  const all = curves();
  const place = byId("curves");
  const drawn = all.filter((spec) => spec.series.length);
  const missing = [...new Set(all.filter((spec) => !spec.series.length).map((spec) => spec.title))];
  const steps = runs.flatMap((run) => [...column(run, "step"), ...run.evaluations.map((item) => item.step)]);
  const range = steps.length ? [Math.min(...steps.map(Number)), Math.max(...steps.map(Number))] : [0, 1];
  if (range[0] === range[1]) range[1] += 1;
  const grid = make("div", "charts");
  for (const spec of drawn) grid.append(new Chart({ ...spec, pick: (step) => showStep(step) }).card);
  if (runs.some((run) => run.samples.length) && drawn.length) place.append(make("p", "hint", "Point at a curve for its values; click for the samples of that step."));
  place.append(grid);
  if (missing.length) place.append(make("p", "hint missing", `Without figures: ${missing.join(", ")}.`));
  const redraw = () => charts.forEach((chart) => chart.redraw(range));
  let width = 0;
  new ResizeObserver(() => {
    if (Math.abs(grid.clientWidth - width) < 2) return;
    width = grid.clientWidth;
    requestAnimationFrame(redraw);
  }).observe(grid);
  redraw();
  return redraw;
}

// The runs with their colours; each can be taken out of the curves.
function showLegend(redraw) {
  if (!several) return;
  runs.forEach((run, index) => {
    const button = toggle([make("i", "dot"), make("span", "", run.label)], true, () => {
      shown[index] = !shown[index];
      button.setAttribute("aria-pressed", shown[index]);
      redraw();
    }, colour(index));
    button.title = run.label;
    byId("legend").append(button);
  });
}
