// Samples by step, and the answers of two evaluations side by side.
const FEW = 6; // Shown at once; the rest on demand.
const ORDER = { eval_before: 0, train: 1, eval: 2, eval_after: 3 };
let showStep = () => {}; // Show the samples of a step, from elsewhere on the page.

function groupsOf(run) {
  const found = new Map();
  for (const sample of run.samples) {
    const key = `${sample.step} ${sample.phase}`;
    if (!found.has(key)) found.set(key, { step: sample.step, phase: sample.phase, samples: [] });
    found.get(key).samples.push(sample);
  }
  return [...found.values()].sort((a, b) => a.step - b.step || ORDER[a.phase] - ORDER[b.phase]);
}

function rewardRange(run) {
  const all = run.samples.map((sample) => sample.reward).filter(isNumber);
  return all.length ? all.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [0, all[0]]) : [0, 1];
}

// A sample's reward, the score of each reward function, and how it ended.
function facts(sample, run, index, range) {
  const share = range[1] > range[0] ? (sample.reward - range[0]) / (range[1] - range[0]) : 0;
  const bar = make("div");
  bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  const chip = (text, odd = false) => make("span", `chip${odd ? " odd" : ""}`, text);
  return make("div", `facts ${colour(index)}`, [
    make("span", "score", score(sample.reward)),
    make("div", "meter", bar, { title: `between ${score(range[0])} and ${score(range[1])}, the run's least and most` }),
    ...Object.entries(sample.rewards).map(([name, value]) => chip(`${name} ${number(value)}`)),
    sample.finish ? chip(sample.finish === "length" ? "cut off: length" : sample.finish, sample.finish !== "stop") : null,
    chip(`version ${sample.version}`),
  ]);
}

// An answer of a line has its label beside it.
function answerOf(sample) {
  if (sample.answer === null) return [];
  if (sample.answer.length > 60 || sample.answer.includes("\n")) return labelled("Answer", sample.answer, "answer");
  return [make("div", "label", ["Answer ", make("code", "answer", sample.answer)])];
}

const labelled = (label, text, look = "") => [make("div", "label", label), make("pre", `text ${look}`, text)];

function sampleCard(sample, run, index, range) {
  return make("article", "card sample", [
    facts(sample, run, index, range),
    ...labelled("Prompt", run.prompts[sample.prompt]),
    ...labelled("Completion", sample.completion, "said completion"),
    ...answerOf(sample),
  ]);
}

// Put the first few items of a long list into an element, and a button for more.
function fill(place, items, card) {
  let next = 0;
  const more = make("button", "more", "", { type: "button" });
  const grow = () => {
    place.append(...items.slice(next, next + FEW).map(card));
    next += FEW;
    more.textContent = `Show ${Math.min(FEW, items.length - next)} more of ${items.length}`;
    more.classList.toggle("hidden", next >= items.length);
  };
  more.addEventListener("click", grow);
  place.replaceChildren();
  grow();
  return more;
}

function showSamples() {
  const place = byId("samples");
  const having = runs.map((_, index) => index).filter((index) => runs[index].samples.length);
  if (!having.length) return void place.append(make("p", "muted", "No samples were recorded."));
  const state = { run: having[0], phase: "all", at: 0 };
  const groups = runs.map(groupsOf), ranges = runs.map(rewardRange);
  const cards = make("div", "cards"), foot = make("div");
  const where = make("span", "where", "", { "aria-live": "polite" });
  const slider = make("input", "", [], { type: "range", min: 0, step: 1, "aria-label": "Step" });
  const back = make("button", "", "‹ Back", { type: "button", title: "Left arrow" });
  const next = make("button", "", "Next ›", { type: "button", title: "Right arrow" });
  const filters = make("div", "group", [], { role: "group", "aria-label": "Phase" });
  const current = () => groups[state.run].filter((group) => state.phase === "all" || group.phase === state.phase);

  function show() {
    const list = current();
    state.at = Math.max(0, Math.min(list.length - 1, state.at));
    slider.max = list.length - 1;
    slider.value = state.at;
    [back.disabled, next.disabled] = [state.at === 0, state.at >= list.length - 1];
    const phases = [...new Set(groups[state.run].map((group) => group.phase))].sort((a, b) => ORDER[a] - ORDER[b]);
    filters.replaceChildren(...["all", ...phases].map((phase) => toggle(PHASES[phase] || "all", state.phase === phase, () => {
      const step = current()[state.at]?.step;
      state.phase = phase;
      seek(step);
    })));
    filters.classList.toggle("hidden", phases.length < 2);
    const group = list[state.at];
    where.textContent = `Step ${number(group.step)} · ${PHASES[group.phase]} · ${group.samples.length} kept`;
    foot.replaceChildren(fill(cards, group.samples, (sample) => sampleCard(sample, runs[state.run], state.run, ranges[state.run])));
  }
  function seek(step) {
    const list = current();
    if (!list.length) return void ((state.phase = "all"), seek(step));
    state.at = list.findIndex((group) => group.step === nearest(list.map((one) => one.step), step));
    show();
  }
  const move = (by) => {
    state.at += by;
    show();
  };
  back.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  slider.addEventListener("input", () => move(Number(slider.value) - state.at));
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const typing = event.target instanceof HTMLElement && event.target.matches("input, select, textarea, pre");
    if (!by || typing || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    move(by);
  });
  showStep = (step) => {
    const training = groups[state.run].some((group) => group.phase === "train" && group.step === step);
    if (training && state.phase !== "all") state.phase = "train";
    seek(step);
    place.scrollIntoView();
  };
  const picker = having.length > 1 ? choice(having.map((index) => runs[index].label), 0, (at) => {
    const step = current()[state.at]?.step ?? 0;
    state.run = having[at];
    seek(step);
  }, "Run") : null;
  place.append(make("div", "card controls", [picker, filters, make("div", "steps", [back, slider, next]), where]), cards, foot);
  show();
}

// Every evaluation of every run; its answers by prompt and by how often that prompt came before.
function evaluations() {
  return runs.flatMap((run, index) => groupsOf(run).filter((group) => group.phase !== "train").map((group) => {
    const times = new Map(), answers = new Map();
    for (const sample of group.samples) {
      const prompt = run.prompts[sample.prompt], time = times.get(prompt) || 0;
      times.set(prompt, time + 1);
      answers.set(JSON.stringify([prompt, time]), sample);
    }
    const name = `${PHASES[group.phase]} (step ${group.step})`;
    return { run: index, group, answers, label: several ? `${run.label}: ${name}` : name };
  }));
}

const SORTS = {
  "as recorded": () => 0,
  "most improved first": (a, b) => b.change - a.change,
  "most worsened first": (a, b) => a.change - b.change,
  "lowest reward on the right first": (a, b) => a.right.reward - b.right.reward,
};

function showHeldOut() {
  const place = byId("held-out");
  const all = evaluations();
  if (all.length < 2) {
    const text = all.length ? "One evaluation so far: there is nothing to put beside it yet." : "No held-out examples were answered.";
    return void place.append(make("p", "muted", text));
  }
  const last = all.findLastIndex((item) => item.run === all[0].run);
  const state = { left: 0, right: last > 0 ? last : 1, sort: 1 };
  const ranges = runs.map(rewardRange);
  const list = make("div"), foot = make("div"), tally = make("span", "where");
  const side = ({ run, label }, sample) => make("div", "", [
    make("div", "label", label),
    facts(sample, runs[run], run, ranges[run]),
    make("pre", "text said completion", sample.completion),
  ]);
  function show() {
    const [left, right] = [all[state.left], all[state.right]];
    const pairs = [...left.answers].filter(([key]) => right.answers.has(key)).map(([key, sample]) => {
      const other = right.answers.get(key);
      return { prompt: JSON.parse(key)[0], left: sample, right: other, change: other.reward - sample.reward };
    });
    const better = pairs.filter((pair) => pair.change > 0).length, worse = pairs.filter((pair) => pair.change < 0).length;
    tally.textContent = pairs.length ? `${better} better, ${worse} worse, ${pairs.length - better - worse} the same` : "no prompt in common";
    pairs.sort(Object.values(SORTS)[state.sort]);
    foot.replaceChildren(fill(list, pairs, (pair) => make("article", "card pair", [
      ...labelled("Prompt", pair.prompt),
      ...answerOf(pair.left),
      make("div", "sides", [side(left, pair.left), side(right, pair.right)]),
    ])));
  }
  const pick = (key) => (index) => {
    state[key] = index;
    show();
  };
  const labels = all.map((item) => item.label);
  place.append(make("div", "card controls", [
    choice(labels, state.left, pick("left"), "Left"),
    choice(labels, state.right, pick("right"), "Right"),
    choice(Object.keys(SORTS), state.sort, pick("sort"), "Order"),
    tally,
  ]), list, foot);
  show();
}
