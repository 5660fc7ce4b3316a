// Tables of many lines can be sorted and searched.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  new DataTable(table, { paging: table.rows.length > 60, pageLength: 25, order: [], autoWidth: false });
  const figure = table.closest("figure"), caption = figure?.querySelector("figcaption")?.textContent;
  figure?.querySelector("nav")?.setAttribute("aria-label", `Pages of ${caption}`);
}
