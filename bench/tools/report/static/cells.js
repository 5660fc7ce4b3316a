// The table of cells. Its filters, order, search and columns stand in the address.
"use strict";
const { columns, shown, values } = window.spbenchCells;
const byColumn = values.map(({ values, of, at }) => values ?? at.map((place) => of[place]));
const rows = (byColumn[0] ?? []).map((_, line) => byColumn.map((column) => column[line]));
const details = window.spbenchDetails;
const form = document.querySelector("form.filters"), selects = [...form.querySelectorAll("select")];

function spelled(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  return Number.isInteger(value) || Math.abs(value) >= 10000 ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : String(Number(value.toPrecision(5)));
}

function element(name, attributes, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

const escaped = (text) => element("p", { textContent: text }).innerHTML.replaceAll('"', "&quot;");

// What the address says: q, sort, columns, and a value of each filter
const state = new URLSearchParams(location.hash.slice(1));
const visible = state.get("columns")?.split(",") ?? shown;
const [sorted, direction] = (state.get("sort") ?? "").split(":");
for (const select of selects) {
  const value = state.get(select.dataset.column);
  if ([...select.options].some((option) => option.value === value)) select.value = value;
}

const numeric = (index) => rows.some((row) => typeof row[index] === "number");
const table = new DataTable("#cells", {
  data: rows.map((row, index) => [...row, index]),
  columns: [
    { title: '<span class="hidden">Details</span>', data: columns.length, orderable: false, searchable: false, className: "opener noVis",
      render: (index) => `<button type="button" aria-expanded="false" aria-label="Details of ${escaped(spelled(rows[index][columns.indexOf("key")]))}">+</button>` },
    ...columns.map((name, index) => ({ title: name.replaceAll("_", " "), name, data: index, visible: visible.includes(name),
      render: (value, kind) => kind === "display" ? escaped(spelled(value)) : value ?? "",
      className: numeric(index) ? "number" : "", type: numeric(index) ? "num" : "string" }))],
  order: columns.includes(sorted) ? [[columns.indexOf(sorted) + 1, direction === "desc" ? "desc" : "asc"]] : [],
  search: { search: state.get("q") ?? "" },
  pageLength: 25,
  deferRender: true,
  autoWidth: false,
  layout: { topStart: { buttons: [{ extend: "colvis", text: "Columns", columns: ":not(.noVis)" }] }, topEnd: "search",
    bottomStart: ["pageLength", "info"], bottomEnd: "paging" },
});

function filter() {
  for (const select of selects)
    table.column(`${select.dataset.column}:name`).search(select.value ? (value) => value === select.value : "");
  table.draw();
}

function keep() {
  const kept = new URLSearchParams();
  for (const select of selects) if (select.value) kept.set(select.dataset.column, select.value);
  if (table.search()) kept.set("q", table.search());
  const [order] = table.order();
  if (order?.[1]) kept.set("sort", `${columns[order[0] - 1]}:${order[1]}`);
  const now = columns.filter((name) => table.column(`${name}:name`).visible());
  if (now.join() !== columns.filter((name) => shown.includes(name)).join()) kept.set("columns", now.join());
  history.replaceState(null, "", kept.size ? "#" + kept : location.pathname + location.search);
  document.getElementById("matching").textContent = `${table.rows({ search: "applied" }).count()} of ${rows.length} cells`;
}

// Text that a spreadsheet would run as a formula gets an apostrophe, as in cells.csv
const isFormula = (value) => typeof value === "string" && /^[=+\-@\t\r]/.test(value) && !/^[+-]?[\d.,]+(e[+-]?\d+)?%?$/i.test(value);

function field(value) {
  const text = isFormula(value) ? `'${value}` : typeof value === "boolean" ? (value ? "True" : "False") : String(value ?? "");
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function download() {
  const lines = table.rows({ search: "applied", order: "applied" }).data().toArray().map((line) => line.slice(0, -1));
  const text = [columns, ...lines].map((line) => line.map(field).join(",") + "\n").join("");
  const href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  element("a", { href, download: "cells-filtered.csv" }).click();
  URL.revokeObjectURL(href);
}

// Of a part of the details: a table, or names with values
function part(title, [head, content]) {
  const { names, table } = details.heads[head];
  if (!content.length) return "";
  const row = (values, name) => element("tr", {}, ...values.map((value) => element(name, { textContent: name === "th" ? value.replaceAll("_", " ") : spelled(value) })));
  const shown = table
    ? element("div", { className: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, row(names, "th")), element("tbody", {}, ...content.map((line) => row(line, "td")))))
    : element("dl", {}, ...names.flatMap((name, at) => [element("dt", {}, name.replaceAll("_", " ")), element("dd", {}, spelled(content[at]))]));
  return element("section", {}, title ? element("h2", {}, title) : "", shown);
}

table.on("click", "td.opener button", (event) => {
  const button = event.target, row = table.row(button.closest("tr")), open = row.child.isShown();
  if (open) row.child.hide();
  else row.child(element("div", { className: "detail" }, ...details.cells[row.data().at(-1)].map((at, n) => part(details.titles[n], details.parts[at])))).show();
  button.setAttribute("aria-expanded", String(!open));
  button.textContent = open ? "+" : "\u2212";
});
table.on("draw column-visibility", keep);
for (const select of selects) select.addEventListener("change", filter);
form.addEventListener("reset", () => setTimeout(() => { table.search(""); table.order([]); filter(); }));
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("filtered-csv").addEventListener("click", download);
filter();
document.documentElement.dataset.cells = "ready";
