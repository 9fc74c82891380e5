// The configuration, what differs between runs, and what each run ran in.
const gib = (bytes) => (isNumber(bytes) ? `, ${(bytes / 2 ** 30).toFixed(0)} GiB` : "");

function facetTable(rows) {
  return make("table", "facts-table", rows.filter(([, value]) => value !== "" && value !== null && value !== undefined).map(([name, value]) => make("tr", "", [make("th", "", name), make("td", "mono", String(value))])));
}

function devices(list) {
  return (list || []).map((device) => `${device.id}: ${device.name}${gib(device.total_bytes)}`).join("\n");
}

function environment(run) {
  const placement = run.placement || {}, record = run.environment;
  const threads = (count) => (count ? `${count} threads` : "");
  const rows = [
    ["Folder", run.path],
    ["Placement", placement.mode],
    ["Server", devices(placement.server) || threads(placement.server_threads)],
    ["Trainer", devices(placement.trainer) || threads(placement.trainer_threads)],
    ["Trainer processes", placement.ranks],
    ["Engine's share", isNumber(placement.memory_share) ? `${Math.round(placement.memory_share * 100)} % of GPU memory` : ""],
    ["Cores", placement.cores],
  ];
  if (!record) return [...rows, ["Versions", "not recorded by this run"]];
  const python = [record.python && `Python ${record.python}`, record.platform].filter(Boolean).join(", ");
  return [...rows, ["Tandem", record.tandem], ["Server half", record.server], ["Trainer half", record.trainer], ["System", python]];
}

function fold(title, content, open = false) {
  const details = make("details", "card", [make("summary", "", title), content]);
  details.open = open;
  return details;
}

function showSettings() {
  const place = byId("settings");
  if (several) {
    const head = make("tr", "", [make("th", "", "Setting"), ...runs.map((run) => make("th", "", run.label))]);
    const rows = report.differing.map(({ key, values }) => make("tr", "", [make("td", "mono", key), ...values.map((value) => make("td", "mono", value ?? "–"))]));
    const same = make("tr", "", make("td", "", "The settings are the same.", { colspan: runs.length + 1 }));
    const table = make("table", "", [make("thead", "", head), make("tbody", "", rows.length ? rows : same)], { id: "differing" });
    place.append(fold("Settings that differ", make("div", "scroll", table), true));
  }
  for (const run of runs) {
    const name = several ? `: ${run.label}` : "";
    place.append(fold(`Environment${name}`, facetTable(environment(run)), !several));
    place.append(fold(`config.toml${name}`, make("pre", "config", run.config || "There is no config.toml.")));
  }
}
