// From values to places: round ticks, a domain around values, the nearest step.
function niceStep(span, count) {
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const rest = raw / power;
  return power * (rest <= 1 ? 1 : rest <= 2 ? 2 : rest <= 2.5 ? 2.5 : rest <= 5 ? 5 : 10);
}

function ticks(low, high, count, whole = false) {
  const step = whole ? Math.max(1, Math.ceil(niceStep(high - low, count))) : niceStep(high - low, count);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let index = first; index * step <= high + step * 1e-9; index++) found.push(Number((index * step).toPrecision(12)));
  return found;
}

// Low and high that hold all values with some room. zero: 0 belongs to them. around: so does that value.
function domain(values, { zero = false, around = null, whole = false } = {}) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (around !== null) [low, high] = [Math.min(low, around), Math.max(high, around)];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) {
    const room = whole ? 1 : Math.abs(low) * 0.1 || 1;
    return zero || whole ? [Math.min(low, 0), Math.max(high, low + room)] : [low - room, high + room];
  }
  const room = (high - low) * 0.07;
  return [zero && low === 0 ? 0 : low - room, zero && high === 0 ? 0 : high + room];
}

function linear([low, high], [from, to]) {
  const factor = high === low ? 0 : (to - from) / (high - low);
  return (value) => Math.round((from + (value - low) * factor) * 100) / 100;
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? sorted[low - 1] : sorted[low];
}

// The mean of each value and up to `window` - 1 before it; nulls count as not there.
function movingMean(values, window) {
  const last = [];
  return values.map((value) => {
    if (!isNumber(value)) return null;
    last.push(value);
    if (last.length > window) last.shift();
    return last.reduce((sum, item) => sum + item, 0) / last.length;
  });
}
