// The table of cells. Its filters, order, search and page of lines stand in the address.
"use strict";
(() => {
  const { columns, shown, rows } = window.spbenchCells;
  const details = window.spbenchDetails;
  const form = document.querySelector("form.filters");
  const selects = [...form.querySelectorAll("select")];

  function number(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    const digits = Number.isInteger(value) ? 0 : Math.abs(value) >= 10000 ? 1 : undefined;
    return digits === undefined ? String(Number(value.toPrecision(5)))
      : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
  const render = (value, kind) => kind === "display" ? escaped(number(value)) : value ?? "";

  // The first column opens the details; those of the data follow
  const opener = {
    title: '<span class="hidden">Details</span>', name: "details", data: columns.length, orderable: false, searchable: false,
    className: "opener noVis",
    render: (index) => `<button type="button" class="plain" aria-expanded="false" aria-label="Details of ${escaped(rows[index][columns.indexOf("key")])}">+</button>`,
  };

  // What the address says: q, sort, columns, and a value of each filter
  const state = new URLSearchParams(location.hash.slice(1));
  const visible = state.has("columns") ? state.get("columns").split(",") : shown;
  const [sorted, direction] = (state.get("sort") ?? "").split(":");
  for (const select of selects) {
    const value = state.get(select.dataset.column);
    if ([...select.options].some((option) => option.value === value)) select.value = value;
  }

  const table = new DataTable("#cells", {
    data: rows.map((row, index) => [...row, index]),
    columns: [opener, ...columns.map((name, index) => ({
      title: name.replaceAll("_", " "), name, data: index, render, visible: visible.includes(name),
      className: rows.some((row) => typeof row[index] === "number") ? "number" : "",
      type: rows.some((row) => typeof row[index] === "number") ? "num" : "string",
    }))],
    order: columns.includes(sorted) ? [[columns.indexOf(sorted) + 1, direction === "desc" ? "desc" : "asc"]] : [],
    search: { search: state.get("q") ?? "" },
    pageLength: 25,
    lengthMenu: [10, 25, 50, 100, { label: "all", value: -1 }],
    deferRender: true,
    autoWidth: false,
    layout: { topStart: { buttons: [{ extend: "colvis", text: "Columns", columns: ":not(.noVis)" }] }, topEnd: "search",
      bottomStart: ["pageLength", "info"], bottomEnd: "paging" },
    language: { search: "Search", info: "_START_ to _END_ of _TOTAL_", infoFiltered: "(of _MAX_)", lengthMenu: "_MENU_ a page" },
  });

  function filter() {
    for (const select of selects) {
      const wanted = select.value;
      table.column(`${select.dataset.column}:name`).search(wanted ? (value) => value === wanted : "");
    }
    table.draw();
  }

  function keep() {
    const kept = new URLSearchParams();
    for (const select of selects) if (select.value) kept.set(select.dataset.column, select.value);
    if (table.search()) kept.set("q", table.search());
    const [order] = table.order();
    if (order && order[1]) kept.set("sort", `${columns[order[0] - 1]}:${order[1]}`);
    const now = columns.filter((name) => table.column(`${name}:name`).visible());
    if (now.join() !== columns.filter((name) => shown.includes(name)).join()) kept.set("columns", now.join());
    history.replaceState(null, "", kept.size ? "#" + kept : location.pathname + location.search);
    const count = table.rows({ search: "applied" }).count();
    document.getElementById("matching").textContent = `${count} of ${rows.length} cells`;
  }

  // Text that a spreadsheet would run as a formula gets an apostrophe, as in cells.csv
  const isFormula = (value) => typeof value === "string" && /^[=+\-@\t\r]/.test(value) && !/^[+-]?[\d.,]+(e[+-]?\d+)?%?$/i.test(value);

  function field(value) {
    const text = isFormula(value) ? `'${value}` : value === null || value === undefined ? "" : value === true ? "True" : value === false ? "False" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  function csv() {
    const lines = table.rows({ search: "applied", order: "applied" }).data().toArray();
    return [columns, ...lines.map((line) => line.slice(0, -1))].map((line) => line.map(field).join(",") + "\n").join("");
  }

  function download() {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "cells-filtered.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // Elements of details: a list of pairs, or a table of objects
  function element(name, ...children) {
    const made = document.createElement(name);
    made.append(...children);
    return made;
  }

  function pairs(title, found) {
    const entries = Object.entries(found);
    if (!entries.length) return "";
    const list = element("dl");
    for (const [name, value] of entries)
      list.append(element("dt", name.replaceAll("_", " ")), element("dd", typeof value === "object" ? JSON.stringify(value) : number(value)));
    return element("section", element("h3", title), list);
  }

  function lines(title, found) {
    if (!found.lines.length) return "";
    const head = element("tr", ...found.columns.map((name) => { const th = element("th", name.replaceAll("_", " ")); th.scope = "col"; return th; }));
    const body = found.lines.map((line) => element("tr", ...line.map((value) => {
      const cell = element("td", number(value));
      if (typeof value === "number") cell.className = "number";
      return cell;
    })));
    const box = element("div", element("table", element("thead", head), element("tbody", ...body)));
    box.className = "scroll"; box.tabIndex = 0; box.role = "region"; box.ariaLabel = title;
    return element("section", element("h3", title), box);
  }

  function detail(index) {
    const of = details[index];
    const box = element("div",
      of.reason ? element("p", of.reason) : "",
      lines("Sent bytes a rank, by phase and collective", of.sent),
      lines("The strategy's closed form", of.formula),
      pairs("Memory held at the peak, by category (bytes)", of.memory),
      pairs("Time of a step (s)", of.breakdown),
      pairs("Settings", of.settings),
      pairs("Provenance", of.provenance));
    box.className = "detail";
    return box;
  }

  table.on("click", "td.opener button", (event) => {
    const button = event.target.closest("button");
    const row = table.row(button.closest("tr"));
    const open = row.child.isShown();
    if (open) row.child.hide();
    else row.child(detail(row.data().at(-1)), "details").show();
    button.setAttribute("aria-expanded", String(!open));
    button.textContent = open ? "+" : "\u2212";
  });
  table.on("draw column-visibility", keep);
  for (const select of selects) select.addEventListener("change", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { table.search(""); table.order([]); filter(); }));
  document.getElementById("filtered-csv").addEventListener("click", download);
  filter();
  document.documentElement.dataset.cells = "ready";
})();
