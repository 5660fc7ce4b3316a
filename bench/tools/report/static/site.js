// Tables of many lines can be sorted and searched; their library asks for a class, where styles ask for the scheme.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
const scheme = () => document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", scheme);
scheme();
for (const table of document.querySelectorAll("table.sortable")) {
  new DataTable(table, { paging: table.rows.length > 60, pageLength: 25, order: [], autoWidth: false });
  const figure = table.closest("figure"), caption = figure.querySelector("figcaption").textContent;
  figure.querySelector("nav")?.setAttribute("aria-label", `Pages of ${caption}`);
}
