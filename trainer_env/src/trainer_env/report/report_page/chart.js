// One chart: axes, series, legend, and a read-out of the exact values at a step, shared by all charts.
//
// A series: {run, label, kind: "line" | "dots" | "markers" | "bars" | "strip", xs, ys, look, shape, read}.
// Bars are stacked in the order of the series; a strip's values are proof verdicts. silent: not read out.
const charts = [];
const tint = (series) => series.tint || colour(series.run); // What says its colour.
const SHAPES = {
  diamond: (x, y, r) => `M${x},${y - r}L${x + r},${y}L${x},${y + r}L${x - r},${y}Z`,
  circle: (x, y, r) => `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0Z`,
  square: (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  triangle: (x, y, r) => `M${x},${y - r}L${x + r},${y + r}L${x - r},${y + r}Z`,
};
const VERDICTS = { agrees: 0.45, inconclusive: 0.25, disagrees: 1 }; // Verdict -> its height, for eyes that see no colours.

class Chart {
  constructor(spec) {
    Object.assign(this, { height: 200, pick: () => {} }, spec);
    this.last = make("span", "last");
    this.plot = draw("svg", { class: "plot", role: "img", tabindex: 0, "aria-label": `${this.title}: curve by optimizer step` });
    this.tip = make("div", "tip hidden", [], { role: "status" });
    const head = make("div", "head", [make("h3", "", this.title), this.unit && make("span", "unit", this.unit), this.last]);
    this.card = make("figure", `card chart${this.wide ? " wide" : ""}`, [head, keys(this.keys), this.plot, this.tip], { "data-chart": this.id });
    this.plot.addEventListener("pointermove", (event) => this.follow(event));
    this.plot.addEventListener("pointerdown", (event) => this.follow(event));
    this.plot.addEventListener("pointerleave", () => point(null));
    this.plot.addEventListener("blur", () => point(null));
    this.plot.addEventListener("click", () => this.step !== null && this.pick(this.step));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.step = null;
    charts.push(this);
  }

  visible() {
    return this.series.filter((series) => shown[series.run]);
  }

  redraw(xs) {
    this.range = xs;
    this.card.classList.toggle("hidden", !this.visible().length);
    const width = Math.max(240, this.card.clientWidth - 28);
    const height = this.kind === "strip" ? 30 + 26 * Math.max(1, this.visible().length) : this.height;
    this.plot.replaceChildren();
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const series = this.visible();
    this.steps = [...new Set(series.flatMap((one) => one.xs))].sort((a, b) => a - b);
    const bottom = height - 22;
    const { low, high, marks, text } = this.kind === "strip" ? { low: 0, high: 1, marks: [], text: [] } : this.vertical(series);
    const left = this.kind === "strip" ? 6 : Math.max(22, ...text.map((label) => label.length * 6.7)) + 9;
    this.y = linear([low, high], [bottom, 8]);
    const half = this.kind ? (width - left) / Math.max(1, xs[1] - xs[0] + 1) / 2 : 0;
    this.x = linear(xs, [left + Math.min(half, 40) + (this.kind ? 0 : 4), width - 12 - Math.min(half, 40)]);
    marks.forEach((mark, index) => {
      draw("line", { class: mark === 0 ? "axis" : "grid", x1: left, x2: width, y1: this.y(mark), y2: this.y(mark) }, this.plot);
      draw("text", { x: left - 7, y: this.y(mark) + 4, "text-anchor": "end" }, this.plot).textContent = text[index];
    });
    for (const mark of ticks(xs[0], xs[1], Math.max(2, Math.floor(width / 90)), true)) {
      draw("text", { x: this.x(mark), y: height - 5, "text-anchor": "middle" }, this.plot).textContent = number(mark);
    }
    if (isNumber(this.reference)) {
      draw("line", { class: "reference", x1: left, x2: width, y1: this.y(this.reference), y2: this.y(this.reference) }, this.plot);
    }
    this.box = { width, height, left, bottom };
    if (this.kind === "bars") this.bars(series);
    else if (this.kind === "strip") series.forEach((one, row) => this.strip(one, row));
    else series.forEach((one) => this.curve(one));
    this.cross = draw("g", {}, this.plot);
    this.last.textContent = this.lastValue(series);
    if (this.step !== null) this.point(this.step);
  }

  vertical(series) {
    const values = this.kind === "bars" ? stacked(series).totals : series.flatMap((one) => one.ys.filter(isNumber));
    const [low, high] = values.length ? domain([...values, ...(this.also || [])], { zero: this.zero || this.kind === "bars", around: this.reference ?? null, whole: this.whole }) : [0, 1];
    const marks = ticks(low, high, this.height / 42, this.whole);
    const decimals = Math.max(0, ...marks.map((mark) => (String(mark).split("e")[0].split(".")[1] || "").length));
    const fine = high - low < 5e-3 || Math.max(Math.abs(low), Math.abs(high)) >= 1e7;
    return { low, high, marks, text: marks.map((mark) => (fine ? number(mark, 6) : plain(mark, { minimumFractionDigits: decimals, maximumFractionDigits: decimals }))) };
  }

  curve({ kind, xs, ys, look = "", shape, values, ...one }) {
    const many = xs.length > 150 ? "many" : "";
    let path = "", open = false;
    xs.forEach((step, index) => {
      if (!isNumber(ys[index])) return void (open = false);
      const x = this.x(step), y = this.y(ys[index]);
      if (kind === "dots") path += `M${x},${y}h0`;
      else if (kind === "markers") path += SHAPES[shape](x, y, 5);
      else path += open ? `L${x},${y}` : `M${x},${y}${isNumber(ys[index + 1]) ? "" : "h0"}`;
      open = true;
    });
    draw("path", { class: `${kind} ${look} ${many} ${tint(one)}`, d: path }, this.plot);
    if (!values) return;
    xs.forEach((step, index) => {
      if (!isNumber(ys[index])) return;
      const x = this.x(step), above = this.y(ys[index]) > 24;
      const anchor = x > this.box.width - 30 ? "end" : x < this.box.left + 20 ? "start" : "middle";
      draw("text", { class: "value", x, y: this.y(ys[index]) + (above ? -11 : 20), "text-anchor": anchor }, this.plot).textContent = score(ys[index]);
    });
  }

  // Columns of the steps, cut into paths: one for each part.
  bars(series) {
    const { bases } = stacked(series);
    const width = Math.max(0.6, this.barWidth());
    series.forEach((one, part) => {
      let path = "";
      one.xs.forEach((step, index) => {
        if (!isNumber(one.ys[index])) return;
        const top = this.y(bases[part][index] + one.ys[index]), foot = this.y(bases[part][index]);
        path += `M${this.x(step) - width / 2},${top}h${width}V${foot}h${-width}Z`;
      });
      draw("path", { class: `area ${tint(one)}`, d: path }, this.plot);
    });
  }

  strip({ xs, ys, run }, row) {
    const foot = 24 + row * 26, width = Math.max(0.8, this.barWidth());
    draw("line", { class: "grid", x1: this.box.left, x2: this.box.width, y1: foot, y2: foot }, this.plot);
    if (several) draw("circle", { class: `picked ${colour(run)}`, cx: this.box.left - 1, cy: foot - 5, r: 4 }, this.plot);
    for (const [verdict, share] of Object.entries(VERDICTS)) {
      const height = 20 * share;
      const path = xs.map((step, index) => (ys[index] === verdict ? `M${this.x(step) - width / 2},${foot}v${-height}h${width}v${height}Z` : ""));
      draw("path", { class: verdict, d: path.join("") }, this.plot);
    }
  }

  barWidth() {
    const pitch = Math.min(this.x(2) - this.x(1), 60);
    return pitch > 5 ? pitch - Math.min(3, pitch * 0.25) : pitch;
  }

  lastValue(series) {
    if (this.kind || shown.filter(Boolean).length > 1) return "";
    const one = series.find((each) => each.kind === "line");
    const value = one?.ys.findLast(isNumber);
    return isNumber(value) ? `${one.short || "last"} ${number(value)}` : "";
  }

  follow(event) {
    const box = this.plot.getBoundingClientRect();
    if (!this.steps.length) return;
    const place = ((event.clientX - box.left) / box.width) * this.box.width;
    const [first, last] = this.range;
    const step = linear([this.x(first), this.x(last)], [first, last])(place);
    point(nearest(this.steps, step), this);
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && this.step !== null) this.pick(this.step);
    if (!by || !this.steps.length) return;
    event.preventDefault();
    event.stopPropagation();
    const index = this.step === null ? (by < 0 ? this.steps.length : -1) : this.steps.indexOf(nearest(this.steps, this.step));
    point(this.steps[Math.min(this.steps.length - 1, Math.max(0, index + by))], this);
  }

  // Mark a step, or none; here: say its values beside it.
  point(step, here = false) {
    this.step = step;
    this.cross.replaceChildren();
    this.tip.classList.toggle("hidden", step === null || !here);
    if (step === null || !this.steps.length) return;
    const x = this.x(step);
    draw("line", { class: "cross", x1: x, x2: x, y1: 4, y2: this.box.bottom }, this.cross);
    const rows = [];
    for (const one of this.visible()) {
      const value = one.silent ? null : one.ys[one.xs.indexOf(step)];
      if (value === null || value === undefined) continue;
      if (!this.kind) draw("circle", { class: `picked ${tint(one)}`, cx: x, cy: this.y(value), r: 4 }, this.cross);
      const name = several ? `${runs[one.run].label}${one.label ? ` · ${one.label}` : ""}` : one.label || this.title;
      const text = this.kind === "strip" ? value : number(value, 6);
      rows.push(make("div", tint(one), [make("span", "dot"), make("span", "", name), make("i", "", text)]));
    }
    if (!here) return;
    this.tip.replaceChildren(make("b", "", `Step ${number(step)}`), ...(rows.length ? rows : [make("div", "", "no figure")]));
    const plot = this.plot.getBoundingClientRect(), card = this.card.getBoundingClientRect();
    const place = plot.left - card.left + (x * plot.width) / this.box.width, room = this.card.clientWidth;
    const beyond = place + 16 + this.tip.offsetWidth > room - 6;
    this.tip.style.left = `${beyond ? Math.max(6, place - 14 - this.tip.offsetWidth) : place + 14}px`;
    this.tip.style.top = `${plot.top - card.top + 6}px`;
  }
}

// Each part's lower edges and the heights of the whole columns.
function stacked(series) {
  const totals = (series[0]?.xs || []).map(() => 0);
  const bases = series.map((one) => one.ys.map((value, index) => {
    const base = totals[index];
    totals[index] += isNumber(value) ? value : 0;
    return base;
  }));
  return { bases, totals };
}

// What the kinds of series in a chart look like: [[label, class, kind, shape]].
function keys(entries = []) {
  if (!entries.length) return null;
  return make("div", "keys", entries.map(([label, look, kind, shape]) => {
    const sign = draw("svg", { width: 18, height: 12, viewBox: "0 0 18 12" });
    if (kind === "line") draw("path", { class: `line ${look}`, d: "M1,6H17" }, sign);
    else if (kind === "dots") draw("path", { class: `dots ${look}`, d: "M9,6h0" }, sign);
    else if (kind === "markers") draw("path", { class: `markers ${look}`, d: SHAPES[shape](9, 6, 4.5) }, sign);
    else draw("rect", { class: look, x: 4, y: 1 + 10 * (1 - (VERDICTS[label.split(" ")[0]] || 1)), width: 10, height: 10 * (VERDICTS[label.split(" ")[0]] || 1), rx: 1.5 }, sign);
    return make("span", "", [sign, label]);
  }));
}

// Mark a step in every chart, and say its values in one of them.
function point(step, here = null) {
  for (const chart of charts) chart.point(step, chart === here);
}
