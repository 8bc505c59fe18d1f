"use strict";
// The page's rows, filters, pictures and tables. Everything is computed from the rows that the filters leave.
const data = JSON.parse(document.getElementById("data").textContent);
const FIELDS = ["suite", "op", "kernel", "dtype", "peer", "shape"];
const NUMBERS = ["us", "peer_us", "ratio", "floor_us", "fraction"];
const SIZES = ["m", "tokens", "batch", "seqlen_q", "rows", "width", "seqlen_k"]; // what a picture's x may be, in this order
const PAGE = 100;

const rows = data.rows.map((row) => {
  const file = data.files[row[0]], own = { file: row[0], index: row[1], device: file.device, family: file.family };
  FIELDS.forEach((name, i) => (own[name] = data.texts[row[2 + i]]));
  NUMBERS.forEach((name, i) => (own[name] = row[8 + i]));
  own.more = row[13] || {};
  own.source = `${file.path}#${row[1]}`;
  own.commit = own.more.commit || file.commit;
  own.sizes = Object.fromEntries(own.shape.split(" ").map((part) => part.split("=")).filter((x) => x.length === 2));
  return own;
});

const SELECTS = ["device", "family", "suite", "op", "dtype", "peer"];
const element = (id) => document.getElementById(id);
const state = { page: 0, sort: null, descending: false };

function passes(row, without) {
  const text = element("text").value.trim().toLowerCase();
  if (text && !text.split(/\s+/).every((word) => `${row.shape} ${row.kernel}`.toLowerCase().includes(word))) return false;
  return SELECTS.every((name) => name === without || !element(name).value || row[name] === element(name).value);
}

// Each list offers what the other filters leave.
function fill() {
  for (const name of SELECTS) {
    const select = element(name), chosen = select.value;
    const counts = new Map();
    for (const row of rows) if (passes(row, name)) counts.set(row[name], (counts.get(row[name]) || 0) + 1);
    if (chosen && !counts.has(chosen)) counts.set(chosen, 0);
    const options = [...counts.keys()].filter((x) => x !== "").sort();
    select.replaceChildren(new Option("all", ""), ...options.map((x) => new Option(`${x} (${counts.get(x)})`, x)));
    select.value = chosen;
  }
}

const format = (x, digits = 3) => (x === null || x === undefined || x === "" ? "" : Number(x.toPrecision(digits)).toString());
const geomean = (values) => Math.exp(values.reduce((sum, x) => sum + Math.log(x), 0) / values.length);
const compared = (row) => row.ratio > 0 && row.peer && !row.peer.startsWith("ours:") && row.peer !== "none";

// Rows of one problem have the fastest peer's ratio in common.
function cells(found) {
  const best = new Map();
  for (const row of found) {
    if (!compared(row)) continue;
    const key = [row.file, row.suite, row.op, row.dtype, row.shape].join("|");
    if (!best.has(key) || row.ratio < best.get(key).ratio) best.set(key, row);
  }
  return [...best.values()];
}

function card(value, words, title = "") {
  const box = document.createElement("div");
  box.className = "number";
  box.title = title;
  box.append(Object.assign(document.createElement("b"), { textContent: value }), Object.assign(document.createElement("span"), { textContent: words }));
  return box;
}

function numbers(found) {
  const best = cells(found), lost = best.filter((row) => row.ratio < 1);
  const cards = [card(found.length.toLocaleString(), "rows"), card(best.length.toLocaleString(), "cells with a peer")];
  if (best.length) {
    const worst = best.reduce((a, b) => (a.ratio < b.ratio ? a : b));
    cards.push(card(`${geomean(best.map((row) => row.ratio)).toFixed(2)}x`, "geometric mean over the fastest peer"));
    cards.push(card(`${lost.length} (${Math.round((100 * lost.length) / best.length)} %)`, "cells lost"));
    cards.push(card(`${worst.ratio.toFixed(2)}x`, `worst: ${worst.peer}, ${worst.shape}`, worst.source));
  }
  element("numbers").replaceChildren(...cards);
}

// ---- pictures ----

const dark = matchMedia("(prefers-color-scheme: dark)");
function config() {
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  const line = getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  return {
    background: "transparent", view: { stroke: line }, axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line },
    legend: { labelColor: ink, titleColor: ink, orient: "bottom", columns: 3, labelLimit: 220 }, header: { labelColor: ink, titleColor: ink },
  };
}
const BOUNDS = { width: "container", height: 300, autosize: { type: "fit", contains: "padding" } };
const TIPS = ["op", "shape", "dtype", "kernel", "peer", "us", "peer_us", "ratio", "fraction", "source", "commit"];
const tooltip = (names) => names.map((field) => ({ field, type: typeof field === "string" && NUMBERS.includes(field) ? "quantitative" : "nominal" }));

function draw(id, values, spec) {
  const place = element(id);
  if (!values.length) {
    place.replaceChildren(Object.assign(document.createElement("p"), { className: "none", textContent: "no row of the filters has this" }));
    return;
  }
  vegaEmbed(place, { ...BOUNDS, config: config(), data: { values }, ...spec }, { actions: false, renderer: "canvas" });
}

function sizeOf(found) {
  return SIZES.find((name) => found.some((row) => row.sizes[name] > 0)) || "m";
}

function pictures(found) {
  const withRatio = found.filter((row) => row.ratio > 0 && row.peer !== "none"), name = sizeOf(withRatio);
  element("over-caption").textContent = `Ratio to each peer over ${name}`;
  const points = withRatio.filter((row) => row.sizes[name] > 0).map((row) => ({ ...row, size: Number(row.sizes[name]) }));
  const low = Math.max(0.25, Math.min(0.8, ...points.map((row) => row.ratio))), high = Math.min(20, Math.max(1.5, ...points.map((row) => row.ratio)));
  const ratio = { field: "ratio", type: "quantitative", scale: { type: "log", domain: [low, high], clamp: true, nice: false }, axis: { title: "ratio", format: "~g", tickCount: 6 } };
  draw("over", points, {
    layer: [
      { mark: { type: "rule", strokeDash: [4, 4], color: "#888" }, encoding: { y: { datum: 1 } } },
      {
        mark: { type: "point", filled: true, size: 28, opacity: 0.55 },
        encoding: {
          x: { field: "size", type: "quantitative", scale: { type: "log" }, axis: { title: name, format: "~s", tickCount: 6 } },
          y: ratio, color: { field: "peer", type: "nominal", title: null }, tooltip: tooltip(TIPS),
        },
      },
    ],
  });
  draw("spread", withRatio, {
    transform: [
      { window: [{ op: "cume_dist", as: "share" }], sort: [{ field: "ratio" }], groupby: ["peer"] },
      { filter: `datum.ratio > ${low / 2} && datum.ratio < ${high * 2}` },
    ],
    layer: [
      { mark: { type: "rule", strokeDash: [4, 4], color: "#888" }, encoding: { x: { datum: 1 } } },
      {
        mark: { type: "line", interpolate: "step-after" },
        encoding: {
          x: { ...ratio, axis: { ...ratio.axis } }, y: { field: "share", type: "quantitative", axis: { title: "share of rows", format: "%" } },
          color: { field: "peer", type: "nominal", title: null }, tooltip: tooltip(["peer", "ratio", "shape", "source"]),
        },
      },
    ],
  });
  const once = new Map();
  for (const row of found) if (row.fraction > 0 && row.us > 0) once.set([row.file, row.suite, row.op, row.dtype, row.shape].join("|"), row);
  draw("roof", [...once.values()], {
    mark: { type: "point", filled: true, size: 28, opacity: 0.55 },
    encoding: {
      x: { field: "us", type: "quantitative", scale: { type: "log" }, axis: { title: "us", format: "~s", tickCount: 6 } },
      y: { field: "fraction", type: "quantitative", scale: { domain: [0, 1.25], clamp: true }, axis: { title: "of the floor", format: "%" } },
      color: { field: "op", type: "nominal", title: null }, tooltip: tooltip(TIPS),
    },
  });
  models(found);
}

// Of whole models: tokens a second by batch, or perplexity by format.
function models(found) {
  const steps = new Map();
  for (const row of found) if (row.suite === "decode" && row.more.tokens_per_second) steps.set(`${row.file}|${row.shape}`, row);
  const quality = found.filter((row) => row.more.perplexity);
  element("models-figure").hidden = !steps.size && !quality.length;
  if (steps.size) {
    element("models-caption").textContent = "Whole models: tokens a second of decoding";
    const values = [...steps.values()].map((row) => ({
      ...row, model: row.sizes.model, batch: Number(row.sizes.batch), tokens: row.more.tokens_per_second, launches: row.more.launches, memory: row.more.peak_gb,
      series: `${row.sizes.model} ${row.dtype}`,
    }));
    draw("models", values, {
      mark: { type: "line", point: true },
      encoding: {
        x: { field: "batch", type: "quantitative", scale: { type: "log" }, axis: { title: "batch", format: "~s", tickCount: 5 } },
        y: { field: "tokens", type: "quantitative", scale: { type: "log" }, axis: { title: "tokens / s", format: "~s", tickCount: 5 } },
        color: { field: "series", type: "nominal", title: null },
        tooltip: tooltip(["model", "dtype", "batch", "tokens", "us", "fraction", "launches", "memory", "source", "commit"]),
      },
    });
  } else if (quality.length) {
    element("models-caption").textContent = "Perplexity by format, of 16 bits the line";
    const values = quality.map((row) => ({ ...row, format: row.sizes.format || row.peer, perplexity: row.more.perplexity, agreement: row.more.agreement, kl: row.more.kl }));
    const exact = values.find((row) => row.peer === "16 bits");
    draw("models", values, {
      layer: [
        { mark: { type: "point", filled: true, size: 70 }, encoding: { x: { field: "perplexity", type: "quantitative", scale: { zero: false } }, y: { field: "peer", type: "nominal", title: null, sort: null }, tooltip: tooltip(["peer", "perplexity", "agreement", "kl", "source", "commit"]) } },
        ...(exact ? [{ mark: { type: "rule", strokeDash: [4, 4], color: "#888" }, encoding: { x: { datum: exact.perplexity } } }] : []),
      ],
    });
  }
}

// ---- tables ----

function table(id, columns, lines) {
  const head = document.createElement("tr");
  for (const column of columns) {
    const cell = Object.assign(document.createElement("th"), { textContent: column.title, className: column.number ? "number-cell" : "" });
    if (column.sorts) {
      cell.className += " sorts";
      cell.onclick = column.sorts;
    }
    head.append(cell);
  }
  const body = lines.map((line) => {
    const tr = document.createElement("tr");
    for (const column of columns) {
      const value = column.value(line);
      const cell = Object.assign(document.createElement("td"), { textContent: value, className: column.number ? "number-cell" : "" });
      if (column.mark) cell.className += ` ${column.mark(line)}`;
      tr.append(cell);
    }
    return tr;
  });
  const parts = [document.createElement("thead"), document.createElement("tbody")];
  parts[0].append(head);
  parts[1].append(...body);
  element(id).replaceChildren(...parts);
}

const verdict = (ratio) => (ratio > 0 ? (ratio < 1 ? "loss" : "win") : "");

function summary(found) {
  const groups = new Map();
  for (const row of found) {
    if (!(row.ratio > 0) || row.peer === "none") continue;
    const key = [row.device, row.family, row.suite, row.op, row.peer].join("|");
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  let lines = [...groups.values()].map((own) => ({
    ...own[0], count: own.length, mean: geomean(own.map((row) => row.ratio)), lost: own.filter((row) => row.ratio < 1).length,
    worst: own.reduce((a, b) => (a.ratio < b.ratio ? a : b)),
  }));
  if (element("losses").checked) lines.sort((a, b) => a.mean - b.mean);
  const plain = (title, value) => ({ title, value });
  table("summary", [
    plain("GPU", (x) => x.device), plain("family", (x) => x.family), plain("suite", (x) => x.suite), plain("operator", (x) => x.op), plain("peer", (x) => x.peer),
    { title: "rows", number: true, value: (x) => x.count },
    { title: "geomean", number: true, value: (x) => x.mean.toFixed(2), mark: (x) => verdict(x.mean) },
    { title: "below 1", number: true, value: (x) => x.lost },
    { title: "worst", number: true, value: (x) => x.worst.ratio.toFixed(2), mark: (x) => verdict(x.worst.ratio) },
    plain("where", (x) => x.worst.shape), { title: "row", value: (x) => x.worst.source, mark: () => "source" },
  ], lines);
}

function list(found) {
  const sort = (name) => () => {
    state.descending = state.sort === name && !state.descending;
    state.sort = name;
    state.page = 0;
    list(found);
  };
  let ordered = [...found];
  const by = state.sort || (element("losses").checked ? "ratio" : null);
  if (by) {
    const sign = state.descending ? -1 : 1, last = (x) => x === null || x === undefined || x === "";
    ordered.sort((a, b) => (last(a[by]) ? 1 : last(b[by]) ? -1 : sign * (a[by] < b[by] ? -1 : a[by] > b[by] ? 1 : 0)));
  }
  const pages = Math.max(1, Math.ceil(ordered.length / PAGE));
  state.page = Math.min(state.page, pages - 1);
  const more = (row) => Object.entries(row.more).filter(([name]) => name !== "commit").map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  const column = (title, name, number) => ({ title, number, sorts: sort(name), value: (row) => (number ? format(row[name], 4) : row[name]) });
  table("rows", [
    column("GPU", "device"), column("suite", "suite"), column("operator", "op"), column("shape", "shape"), column("type", "dtype"), column("us", "us", true),
    column("peer", "peer"), column("peer's us", "peer_us", true), { ...column("ratio", "ratio", true), mark: (row) => verdict(row.ratio) },
    { ...column("of the floor", "fraction", true), value: (row) => (row.fraction > 0 ? `${Math.round(100 * row.fraction)} %` : "") },
    column("kernel", "kernel"), { title: "more", value: more }, { ...column("row", "source"), mark: () => "source" }, column("commit", "commit"),
  ], ordered.slice(state.page * PAGE, (state.page + 1) * PAGE));
  const turn = (words, step) => Object.assign(document.createElement("button"), { type: "button", textContent: words, disabled: state.page + step < 0 || state.page + step >= pages, onclick: () => { state.page += step; list(found); } });
  element("pager").replaceChildren(turn("previous", -1), turn("next", 1), `page ${state.page + 1} of ${pages}, ${ordered.length.toLocaleString()} rows; a column's title sorts`);
}

function files() {
  const plain = (title, name) => ({ title, value: (x) => x[name] });
  table("files", [plain("file", "path"), plain("GPU", "device"), plain("commit", "commit"), plain("date", "date"), plain("torch", "torch"), plain("CUDA", "cuda"), plain("driver", "driver"), plain("protocol", "protocol")], data.files);
}

// ---- state in the address, so that a view can be sent ----

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of SELECTS) {
    const value = given.get(name) || "";
    element(name).replaceChildren(new Option("all", ""), ...(value ? [new Option(value, value)] : []));
    element(name).value = value;
  }
  element("text").value = given.get("text") || "";
  element("losses").checked = given.get("losses") === "1";
}

function update() {
  fill();
  const found = rows.filter((row) => passes(row));
  numbers(found);
  pictures(found);
  summary(found);
  list(found);
  const own = new URLSearchParams();
  for (const name of [...SELECTS, "text"]) if (element(name).value) own.set(name, element(name).value);
  if (element("losses").checked) own.set("losses", "1");
  history.replaceState(null, "", `#${own}`);
}

const changed = () => {
  state.page = 0;
  state.sort = null;
  update();
};
let waiting;
for (const name of SELECTS) element(name).onchange = changed;
element("losses").onchange = changed;
element("text").oninput = () => {
  clearTimeout(waiting);
  waiting = setTimeout(changed, 250);
};
element("clear").onclick = () => {
  for (const name of [...SELECTS, "text"]) element(name).value = "";
  element("losses").checked = false;
  changed();
};
dark.onchange = update;
if (location.hash.length < 2 && rows.some((row) => row.family === "gemm")) location.hash = "family=gemm";
read();
files();
update();
