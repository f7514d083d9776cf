"use strict";
// The cursor on the first chart: which step is under it, with its figures.
const steps = JSON.parse(document.getElementById("steps").textContent);
const hover = document.getElementById("hover");
const svg = steps.length ? document.querySelector("svg[data-seconds]") : null;
const cursor = document.createElementNS(svg?.namespaceURI, "path");
cursor.classList.add("cursor");

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

function show(event) {
  const { left, right, seconds } = svg.dataset;
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const span = Number(right) - Number(left);
  const x = (event.clientX - box.left) * scale;
  if (x < Number(left) || x > Number(right)) return hide();
  const step = nearest(((x - left) / span) * Number(seconds));
  const at = Number(left) + (step[0] / Number(seconds)) * span;
  cursor.setAttribute("d", `M${at} 0V${svg.viewBox.baseVal.height}`);
  svg.append(cursor);
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

function hide() {
  hover.hidden = true;
  cursor.remove();
}

svg?.addEventListener("pointermove", show);
svg?.addEventListener("pointerleave", hide);
