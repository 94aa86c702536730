(() => {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);

  // ---- plots: each is drawn when it comes into sight ----
  const items = read("plots-data");
  const boxes = [...document.querySelectorAll("[data-plot]")];
  const draw = async (box) => {
    if (box.dataset.state) return;
    box.dataset.state = "drawing";
    try {
      await Bokeh.embed.embed_item(items[Number(box.dataset.plot)], box.id);
      box.dataset.state = "drawn";
    } catch (error) {
      box.dataset.state = "failed";
      box.textContent = "This plot could not be drawn.";
      console.error(error);
    }
  };
  if ("IntersectionObserver" in window) {
    const seen = (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target));
    const observer = new IntersectionObserver(seen, { rootMargin: "400px" });
    boxes.forEach((box) => observer.observe(box));
  } else {
    boxes.forEach(draw);
  }
  window.addEventListener("beforeprint", () => boxes.forEach(draw));

  // ---- completions: columns side by side; what a model wrote is only ever set as text ----
  const sheets = read("sheets-data");
  const columns = document.getElementById("columns");
  if (columns) {
    const search = document.getElementById("search");
    const order = document.getElementById("order");
    const found = document.getElementById("found");
    const runs = [...new Set(sheets.map((sheet) => sheet.run))];
    const chosen = [];

    const make = (tag, className, text) => {
      const element = document.createElement(tag);
      if (className) element.className = className;
      if (text !== undefined) element.textContent = text;
      return element;
    };
    const label = (sheet) =>
      (runs.length > 1 ? sheet.run + ": " : "") + "step " + sheet.step + (sheet.mode === "eval" ? ", evaluation" : "");
    const shown = (value) => (value === null ? "–" : String(value));

    const marked = (tag, className, text, query) => {
      const element = make(tag, className);
      const lower = text.toLowerCase();
      // a letter whose small form is longer would shift the marks
      if (!query || lower.length !== text.length) {
        element.textContent = text;
        return element;
      }
      let from = 0;
      for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, from)) {
        element.append(text.slice(from, at), make("mark", "", text.slice(at, at + query.length)));
        from = at + query.length;
      }
      element.append(text.slice(from));
      return element;
    };

    const card = (row, query) => {
      const box = make("div", "card");
      const scores = make("div", "scores");
      const score = (name, value) => {
        const span = make("span", "", name + " ");
        span.append(make("b", "", shown(value)));
        scores.append(span);
      };
      score("score", row.score);
      if (row.rewards.length > 1) row.rewards.forEach(([name, value]) => score(name, value));
      row.monitors.forEach(([name, value]) => score("monitored " + name, value));
      score("KL", row.kl);
      score("tokens", row.tokens);
      if (!row.ended) scores.append(make("span", "cut", "cut off"));
      box.append(scores, marked("p", "prompt", row.prompt, query), marked("p", "completion", row.completion, query));
      row.extra.forEach(([name, text]) => box.append(marked("p", "prompt", name + ": " + text, query)));
      return box;
    };

    const rowsOf = (sheet, everywhere, query) => {
      const has = (row) => (row.prompt + "\n" + row.completion).toLowerCase().includes(query);
      const rows = query ? sheet.rows.filter(has) : [...sheet.rows];
      const sign = { best: -1, worst: 1 }[order.value];
      if (sign) return rows.sort((a, b) => sign * ((a.score ?? -sign * Infinity) - (b.score ?? -sign * Infinity)) || 0);
      const place = (row) => (everywhere.has(row.prompt) ? everywhere.get(row.prompt) : everywhere.size);
      return rows.sort((a, b) => place(a) - place(b));
    };

    const show = () => {
      const query = search.value.toLowerCase();
      const prompts = chosen.map((index) => new Set(sheets[index].rows.map((row) => row.prompt)));
      const common = [...(prompts[0] ?? [])].filter((prompt) => prompts.every((set) => set.has(prompt)));
      const everywhere = new Map(common.map((prompt, place) => [prompt, place]));
      let count = 0;
      columns.replaceChildren(
        ...chosen.map((index, at) => {
          const column = make("div", "column");
          const bar = make("div");
          const select = make("select");
          select.setAttribute("aria-label", "Step of column " + (at + 1));
          sheets.forEach((sheet, number) => {
            const option = make("option", "", label(sheet));
            option.value = number;
            option.selected = number === index;
            select.append(option);
          });
          select.addEventListener("change", () => { chosen[at] = Number(select.value); show(); });
          bar.append(select);
          if (chosen.length > 1) {
            const remove = make("button", "", "×");
            remove.setAttribute("aria-label", "Remove column " + (at + 1));
            remove.addEventListener("click", () => { chosen.splice(at, 1); show(); });
            bar.append(remove);
          }
          const rows = rowsOf(sheets[index], everywhere, query);
          count += rows.length;
          column.append(bar, ...rows.map((row) => card(row, query)));
          return column;
        }),
      );
      found.textContent = query ? count + " found" : "";
    };

    // one run: its first, middle and last step; several: the last step of each
    if (runs.length > 1) {
      runs.slice(0, 4).forEach((run) => chosen.push(sheets.findLastIndex((sheet) => sheet.run === run)));
    } else {
      const trained = sheets.map((sheet, index) => index).filter((index) => sheets[index].mode !== "eval");
      const from = trained.length ? trained : sheets.map((sheet, index) => index);
      [0, Math.floor((from.length - 1) / 2), from.length - 1].forEach((at) => {
        if (!chosen.includes(from[at])) chosen.push(from[at]);
      });
    }
    search.addEventListener("input", show);
    order.addEventListener("change", show);
    document.getElementById("add").addEventListener("click", () => {
      chosen.push(Math.min(chosen[chosen.length - 1] + 1, sheets.length - 1));
      show();
      columns.scrollLeft = columns.scrollWidth;
    });
    show();
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now())); // milliseconds
})();
