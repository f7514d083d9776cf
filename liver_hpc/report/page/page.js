"use strict";
// The cursor on the first chart: which step is under it, with its figures.
const steps = JSON.parse(document.getElementById("steps").textContent);
const hover = document.getElementById("hover");

function nearest(seconds) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle][0] < seconds) low = middle + 1;
    else high = middle;
  }
  return steps[low];
}

function show(svg, event) {
  const { left, right, seconds } = svg.dataset;
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const span = Number(right) - Number(left);
  const x = (event.clientX - box.left) * scale;
  if (x < Number(left) || x > Number(right)) return hide(svg);
  const step = nearest(((x - left) / span) * Number(seconds));
  const at = Number(left) + (step[0] / Number(seconds)) * span;
  const cursor = svg.querySelector(".cursor");
  cursor.setAttribute("x1", at);
  cursor.setAttribute("x2", at);
  cursor.classList.add("shown");
  const loss = step[3] === null ? "not finite" : step[3];
  const rate = step[4] === null ? "unknown" : step[4];
  hover.textContent = `step ${step[1]}, generation ${step[2]}: loss ${loss}, ${rate} tokens/s`;
  hover.hidden = false;
  const width = hover.offsetWidth;
  const middle = box.left + at / scale;
  const most = document.documentElement.clientWidth - width - 8;
  hover.style.left = `${Math.max(8, Math.min(middle - width / 2, most))}px`;
  hover.style.top = `${box.top + window.scrollY - 6}px`;
}

function hide(svg) {
  hover.hidden = true;
  svg.querySelector(".cursor").classList.remove("shown");
}

for (const svg of document.querySelectorAll("svg[data-seconds]")) {
  svg.addEventListener("pointermove", (event) => show(svg, event));
  svg.addEventListener("pointerleave", () => hide(svg));
}
