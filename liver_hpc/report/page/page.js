const rows = JSON.parse(document.getElementById("steps").textContent);
const svg = document.querySelector("svg[data-seconds]");
const [left, right, high] = ["left", "right", "seconds"].map((name) => Number(svg.dataset[name]));
showSteps(svg, () => ({ svg, left, right, low: 0, high, rows }));
