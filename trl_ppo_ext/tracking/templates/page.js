"use strict";

// A plot is drawn when it scrolls into view, or when the browser has nothing else to do: a print has them all.
const plots = [...document.querySelectorAll("[data-plot]")];
const draw = async (box) => {
  if (box.dataset.state) return;
  box.dataset.state = "drawing";
  try {
    await Bokeh.embed.embed_item(JSON.parse(box.dataset.plot), box.id);
    box.dataset.state = "drawn";
  } catch (error) {
    box.dataset.state = "failed";
    box.textContent = "This plot could not be drawn.";
    console.error(error);
  }
};
const inView = (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target));
const observer = new IntersectionObserver(inView, { rootMargin: "400px" });
plots.forEach((box, index) => {
  box.id = "plot-" + index;
  observer.observe(box);
});
addEventListener("beforeprint", () => plots.forEach(draw));
const idle = window.requestIdleCallback || ((task) => setTimeout(task, 100));
const drawNext = async () => {
  const box = plots.find((plot) => !plot.dataset.state);
  if (!box) return;
  await draw(box);
  idle(drawNext);
};
idle(drawNext);

// Search and sort the completions.
const search = document.getElementById("search");
const order = document.getElementById("order");
if (search) {
  const cards = [...document.querySelectorAll(".card")];
  search.addEventListener("input", () => {
    const query = search.value.toLowerCase();
    for (const card of cards) {
      const texts = [...card.querySelectorAll("p")];
      card.hidden = !texts.some((text) => text.textContent.toLowerCase().includes(query));
    }
  });
  order.addEventListener("change", () => {
    const sign = { best: -1, worst: 1 }[order.value];
    const score = (card) => (Number.isNaN(+card.dataset.score) ? Infinity : sign * card.dataset.score);
    const sorted = sign ? [...cards].sort((a, b) => score(a) - score(b) || 0) : cards;
    sorted.forEach((card) => card.parentElement.append(card));
  });
}
document.documentElement.dataset.ready = String(Math.round(performance.now())); // milliseconds
