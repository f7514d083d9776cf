"use strict";
// The cursor on a chart over time: which step is under it, with its figures. chart: gives the SVG,
// the ends of its time axis, in its own units and in seconds, and a row for each step: when it
// ended, its number, its generation, its loss and its tokens/s.
function showSteps(place, chart) {
  const hover = document.getElementById("hover");
  let cursor = null;

  function hide() {
    hover.hidden = true;
    cursor?.remove();
  }

  function show(event) {
    const { svg, left, right, low, high, rows } = chart();
    if (!rows.length) return;
    const box = svg.getBoundingClientRect();
    const view = svg.viewBox.baseVal;
    const x = ((event.clientX - box.left) / box.width) * view.width;
    if (x < left || x > right) return hide();
    const seconds = low + ((x - left) / (right - left)) * (high - low);
    const row = rows.find(([ended]) => ended >= seconds) || rows.at(-1);
    const at = left + ((row[0] - low) / (high - low)) * (right - left);
    cursor ??= document.createElementNS(svg.namespaceURI, "path");
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("d", `M${at} 0V${view.height}`);
    svg.append(cursor);
    const [loss, rate] = [row[3] ?? "not finite", row[4] ?? "unknown"];
    hover.textContent = `step ${row[1]}, generation ${row[2]}: loss ${loss}, ${rate} tokens/s`;
    hover.hidden = false;
    const middle = box.left + (at / view.width) * box.width;
    const most = document.documentElement.clientWidth - hover.offsetWidth - 8;
    hover.style.left = `${Math.max(8, Math.min(middle - hover.offsetWidth / 2, most))}px`;
    hover.style.top = `${box.top + window.scrollY - 6}px`;
  }

  place.addEventListener("pointermove", show);
  place.addEventListener("pointerleave", hide);
}
