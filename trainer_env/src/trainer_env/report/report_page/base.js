"use strict";
// What everything here uses: the data, elements, numbers as text.
const report = JSON.parse(document.getElementById("data").textContent);
const runs = report.runs;
const several = runs.length > 1;
const shown = runs.map(() => true); // Which runs the curves show.
const PHASES = { train: "training", eval_before: "before training", eval: "during training", eval_after: "after training" };
const byId = (id) => document.getElementById(id);
const colour = (index) => `run-${index % 8}`;

// An element with a class, children of text or elements, and attributes. Text is never markup.
function make(tag, className = "", children = [], attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const child of [children].flat()) if (child !== null && child !== undefined) element.append(child);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function draw(tag, attributes = {}, parent = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

// A button that stays pressed or not.
function toggle(children, pressed, onClick, className = "") {
  const button = make("button", className, children, { type: "button", "aria-pressed": pressed });
  button.addEventListener("click", onClick);
  return button;
}

// A list to choose from; `choose` gets the index.
function choice(labels, chosen, choose, name) {
  const select = make("select", "", labels.map((label, index) => make("option", "", label, { value: index })), { "aria-label": name });
  select.value = chosen;
  select.addEventListener("change", () => choose(Number(select.value)));
  return make("label", "", [name, select]);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

const plain = (value, format) => value.toLocaleString("en", format).replace("-", "−");

// A number with up to `digits` significant digits.
function number(value, digits = 4) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  const whole = Number.isInteger(value) || size >= 10 ** digits;
  return plain(value, whole ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

const score = (value) => (isNumber(value) ? value.toFixed(Math.abs(value) >= 100 ? 1 : 2) : "–");

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
}

function column(run, name) {
  return run.columns[name] || run.columns.step?.map(() => null) || [];
}
