// Draws the charts of a page in the reader's light or dark scheme, and lets its choices choose.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");

  // Errors are shown; warnings of Vega-Lite are about scales without data and sizes that it decides itself
  const logger = {
    level() { return this; },
    error(...text) { console.error(...text); return this; },
    warn() { return this; },
    info() { return this; },
    debug() { return this; },
  };

  function config() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const ink = colour("--ink"), soft = colour("--soft"), line = colour("--line");
    return {
      background: "transparent",
      aria: false, // the drawing has one label, and a table behind it
      font: style.getPropertyValue("--font").trim() || "sans-serif",
      view: { stroke: null },
      axis: { labelColor: soft, titleColor: ink, gridColor: line, domainColor: soft, tickColor: soft,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelLimit: 220 },
      legend: { labelColor: ink, titleColor: ink, labelFontSize: 12, titleFontSize: 12,
        titleFontWeight: "normal", orient: "bottom", columns: { expr: "max(1, floor(width / 150))" }, labelLimit: 260, symbolStrokeWidth: 2 },
      title: { color: ink, fontSize: 13, fontWeight: "normal", anchor: "start" },
      text: { color: ink },
      rule: { color: soft },
      header: { labelColor: ink, titleColor: ink },
    };
  }

  class Drawn {
    constructor(figure) {
      this.figure = figure;
      this.panels = [...figure.querySelectorAll(".panel")].map((panel) => ({
        place: panel.querySelector(".drawing"),
        spec: JSON.parse(panel.querySelector("script.spec").textContent),
      }));
      this.selects = [...figure.querySelectorAll(".selectors select")];
      this.rows = [...figure.querySelectorAll("details tbody tr")];
      this.restore();
      for (const select of this.selects) select.addEventListener("change", () => this.chosen());
      for (const button of figure.querySelectorAll("[data-save]"))
        button.addEventListener("click", () => this.save(button.dataset.save));
    }

    async draw() {
      for (const panel of this.panels) await this.drawPanel(panel);
    }

    async drawPanel(panel) {
      const spec = { autosize: { type: "fit-x", contains: "padding" }, ...structuredClone(panel.spec) };
      for (const param of spec.params ?? []) {
        const select = this.selects.find((one) => one.dataset.field === param.name);
        if (select) param.value = select.value;
      }
      const rows = spec.usermeta?.rows;
      if (rows) spec.height = rows.height * new Set(this.chosenValues(spec.data.values).map((value) => value[rows.field])).size;
      this.entries(spec.data?.values);
      const options = { actions: false, logger, renderer: "svg", config: config(), tooltip: { theme: dark.matches ? "dark" : "light" } };
      panel.result?.finalize();
      panel.result = await vegaEmbed(panel.place, spec, options);
      panel.place.querySelector("svg").setAttribute("aria-hidden", "true"); // the chart's label says what it shows
    }

    // Above a heat map, only the methods that the choices leave
    entries(values) {
      if (!this.selects.length || !values) return;
      const methods = new Set(this.chosenValues(values).map((value) => value.method));
      for (const item of this.figure.querySelectorAll(".legend li:has(svg.square)")) item.hidden = !methods.has(item.textContent.trim());
    }

    chosenValues(values) {
      return values.filter((value) => this.selects.every((select) => String(value[select.dataset.field]) === select.value));
    }

    async chosen() {
      this.narrow();
      this.keep();
      await this.draw();
    }

    // Disables the choices for which there are no data beside those above, and shows the rows of what is chosen
    narrow() {
      let left = this.rows;
      for (const select of this.selects) {
        const field = select.dataset.field, name = this.attribute(field);
        const there = new Set(left.map((row) => row.getAttribute(name)));
        for (const option of select.options) option.disabled = option.hidden = !there.has(option.value);
        if (!there.has(select.value)) select.value = [...select.options].find((one) => !one.disabled)?.value ?? "";
        left = left.filter((row) => row.getAttribute(name) === select.value);
      }
      if (this.selects.length) for (const row of this.rows) row.hidden = !left.includes(row);
    }

    attribute(field) { return "data-" + field.replaceAll("_", "-"); }

    // The choices stand in the address, so that a link keeps them
    keep() {
      const state = new URLSearchParams(location.hash.slice(1));
      for (const select of this.selects) state.set(`${this.figure.id}.${select.dataset.field}`, select.value);
      history.replaceState(null, "", "#" + state);
    }

    restore() {
      const state = new URLSearchParams(location.hash.slice(1));
      for (const select of this.selects) {
        const value = state.get(`${this.figure.id}.${select.dataset.field}`);
        if ([...select.options].some((option) => option.value === value)) select.value = value;
      }
      this.narrow();
    }

    async save(kind) {
      const link = document.createElement("a");
      link.href = await this.panels[0].result.view.toImageURL(kind, kind === "png" ? 2 : 1);
      link.download = `${this.figure.id}.${kind}`;
      link.click();
    }
  }

  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Drawn(figure));
  async function drawAll() {
    for (const chart of charts) await chart.draw();
    document.documentElement.dataset.drawn = String(charts.length);
  }
  dark.addEventListener("change", drawAll);
  print.addEventListener("change", drawAll);
  drawAll();
})();
