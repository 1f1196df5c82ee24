"use strict";
// Texts of subjects only ever become text nodes. #show=N in the address opens cell N, so that it can be linked to.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Filters

const rows = [...document.querySelectorAll("tr[data-check]")].map((row) => ({
  row,
  text: row.dataset.check.toLowerCase(),
  bad: row.querySelector(".wrong, .crash, .ran-though-not-claimed, .claimed-but-refused") !== null,
}));

function filter() {
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const only = byId("onlybad").checked;
  let shown = 0;
  for (const { row, text, bad } of rows) {
    const fits = words.every((word) => text.includes(word)) && (bad || !only);
    row.dataset.fits = fits;
    shown += fits;
  }
  for (const body of document.querySelectorAll("tbody")) {
    const open = body.querySelector("button").getAttribute("aria-expanded") === "true";
    const mine = [...body.querySelectorAll("tr[data-check]")];
    mine.forEach((row) => { row.hidden = !open || row.dataset.fits !== "true"; });
    body.hidden = !mine.some((row) => row.dataset.fits === "true");
  }
  byId("none").hidden = shown > 0;
  byId("found").textContent = `${shown} of ${rows.length} checks`;
}

function dim() {
  for (const box of document.querySelectorAll("input[data-verdict]")) {
    document.querySelectorAll(`td.${box.dataset.verdict}`).forEach((cell) => cell.classList.toggle("dim", !box.checked));
  }
}

byId("find").addEventListener("input", filter);
byId("onlybad").addEventListener("change", filter);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
document.querySelector(".legend").addEventListener("change", dim);
byId("matrix").addEventListener("click", (event) => {
  const button = event.target.closest(".law button");
  if (button) {
    button.setAttribute("aria-expanded", button.getAttribute("aria-expanded") !== "true");
    filter();
  }
});

// Heat maps: a share of what is allowed. Up to 1 is right; beyond, the colour is the logarithm, over the last three
// decades below the map's worst, so that a map in float32 (errors of a million times) shows as much as one in bfloat16

const RAMP = [[254, 232, 200], [252, 141, 89], [215, 48, 31], [94, 0, 0]];
const RIGHT = "var(--right)", BROKEN = "#7b3fa0";

function mixed(part) {
  const at = Math.min(Math.max(part, 0), 1) * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  const mix = RAMP[low].map((x, i) => Math.round(x + (RAMP[low + 1][i] - x) * (at - low)));
  return `rgb(${mix.join(", ")})`;
}

function scale(values) {
  const wrong = values.flat().filter((x) => typeof x !== "string" && x > 1);
  const high = Math.max(1, ...wrong), low = Math.max(1, high / 1000, Math.min(high, ...wrong) / 1.5);
  const wide = Math.log(high / low) || 1;
  return { low, high, colour: (x) => (typeof x === "string" ? BROKEN : x <= 1 ? RIGHT : mixed(Math.log(x / low) / wide)) };
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    node.setAttribute(name, value);
  }
  return node;
}

function heat({ name, values, stretch }) {
  const columns = values[0].length, left = 34, bottom = 16;
  const wide = Math.min(40, 560 / columns), high = Math.max(6, Math.min(18, 240 / values.length));
  const width = left + Math.max(wide * columns, 220), height = high * values.length + bottom;
  const worst = Math.max(...values.flat().map((x) => (typeof x === "string" ? Infinity : x)));
  const told = worst === Infinity ? "not finite somewhere" : `at worst ${Number(worst.toPrecision(3))} x what is allowed`;
  const { low, high: top, colour } = scale(values);
  const map = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}: ${told}` });
  map.style.maxWidth = `${width}px`;
  values.forEach((row, head) => row.forEach((value, column) => {
    const cell = svg("rect", {
      x: left + wide * column, y: high * head, width: Math.max(1, wide - 0.6), height: high - 0.6, fill: colour(value),
    });
    const first = column * stretch;
    const place = stretch > 1 ? `positions ${first} to ${first + stretch - 1}` : `position ${first}`;
    cell.append(svg("title", {}));
    cell.firstChild.textContent = `head ${head}, ${place}: ${value} x`;
    map.append(cell);
  }));
  const label = (x, y, text, anchor) => {
    const node = svg("text", { x, y, "text-anchor": anchor });
    node.textContent = text;
    map.append(node);
  };
  const every = Math.ceil(12 / high);
  values.forEach((_, head) => { if (head % every === 0) label(left - 4, high * (head + 0.5) + 3.5, head, "end"); });
  const step = Math.max(1, Math.ceil(28 / wide));
  for (let column = 0; column < columns; column += step) {
    label(left + wide * (column + 0.5), height - 4, column * stretch, "middle");
  }
  const caption = make("figcaption", {}, make("b", {}, name), ` ${told}`);
  return make("figure", { "data-map": name }, caption, map, legend(low, top, values));
}

function legend(low, top, values) {
  const all = values.flat(), parts = [];
  const swatch = (fill, ...texts) => {
    const box = make("i");
    box.style.background = fill;
    parts.push(make("span", {}, ...texts.slice(0, -1), box, texts.at(-1)));
  };
  if (all.some((x) => x <= 1)) swatch(RIGHT, "within bounds");
  if (all.some((x) => typeof x === "string")) swatch(BROKEN, "inf or NaN");
  if (top > 1) {
    const text = (x) => `${Number(x.toPrecision(2))} x`;
    swatch(`linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(mixed).join(", ")})`, text(low), text(top));
    parts.at(-1).className = "wide";
  }
  return make("div", { class: "ramp" }, ...parts);
}

// Details

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // a page opened from a file may not be given the clipboard
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

function copied(title, text, kind) {
  const button = make("button", { type: "button", "data-copy": kind, "aria-label": `copy: ${title}` }, "copy");
  button.addEventListener("click", () => copy(text, button));
  return [make("div", { class: "copied" }, make("h3", {}, title), button), make("pre", { "data-text": kind, tabindex: "0" }, text)];
}

function quantities(found) {
  const head = ["", "2-norm of error", "allowed", "largest error", "allowed", "share"];
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))));
  const body = make("tbody");
  for (const [name, ok, numbers, strain] of found) {
    const row = make("tr", ok ? {} : { class: "off" }, make("th", { scope: "row" }, `${ok ? "✓" : "✗"} ${name}`));
    if (typeof numbers === "string") {
      row.append(make("td", { colspan: "5", class: "problem" }, numbers));
    } else {
      row.append(...numbers.map((text) => make("td", {}, text)), make("td", {}, strain));
    }
    body.append(row);
  }
  table.append(body);
  return table;
}

function show(index) {
  const found = data[index], panel = byId("details");
  if (!found) {
    return;
  }
  document.querySelectorAll("a[aria-current]").forEach((link) => link.removeAttribute("aria-current"));
  document.querySelector(`a[href="#show=${index}"]`)?.setAttribute("aria-current", "true");
  const badge = make("span", { class: `badge ${found.slug}` }, `${found.sign} ${found.verdict}`);
  const parts = [
    make("h2", {}, found.check),
    make("p", { class: "what" }, badge, ` ${found.subject}, ${found.seconds} s`),
  ];
  if (found.diagnosis) parts.push(make("p", { class: "diagnosis" }, found.diagnosis));
  if (found.reason) parts.push(make("p", { class: "reason" }, found.reason));
  if (found.quantities) parts.push(make("h3", {}, "Errors against what is allowed"), quantities(found.quantities));
  if (found.maps) parts.push(make("h3", {}, "Where: heads (down) by positions (across)"), ...found.maps.map(heat));
  if (found.replay) parts.push(...copied("Run it again", found.replay, "replay"));
  if (found.snippet) parts.push(...copied("A script that shows it, without ringtrue's audit", found.snippet, "snippet"));
  panel.replaceChildren(...parts);
  panel.scrollTop = 0;
}

function follow() {
  const wanted = /^#show=(\d+)$/.exec(location.hash);
  if (wanted) {
    show(Number(wanted[1]));
  }
}

window.addEventListener("hashchange", follow);
filter();
follow();
