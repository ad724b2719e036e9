"use strict";
(() => {
  const all = (query, root = document) => Array.from(root.querySelectorAll(query));

  // Sorting: numbers by value, texts by the alphabet, what is missing always last.
  const sortBy = (header) => {
    const table = header.closest("table");
    const column = header.cellIndex;
    const numeric = header.dataset.kind === "number";
    const down = header.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = numeric ? (Number(x) > Number(y)) - (Number(x) < Number(y)) : x.localeCompare(y);
      return down ? -order : order;
    };
    const body = table.tBodies[0];
    body.append(...Array.from(body.rows).sort(compare));
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
  };
  for (const button of all("thead button")) {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  }

  // Which workload's figures are shown, which lines of the table, which methods everywhere.
  const figures = document.getElementById("figures-of");
  const lines = document.getElementById("lines-of");
  const boxes = all("fieldset.methods input");
  const update = () => {
    for (const part of all("section.workload")) {
      part.classList.toggle("off", figures.value !== "" && part.dataset.workload !== figures.value);
    }
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
    for (const row of all("#results tbody tr")) {
      const other = lines.value !== "" && row.dataset.workload !== lines.value;
      row.classList.toggle("off", other || hidden.has(row.dataset.method));
    }
    for (const box of boxes) {
      for (const part of all(`svg [id*="m--${box.value}--"]`)) {
        part.classList.toggle("off", !box.checked);
      }
    }
  };
  figures.value = figures.options.length > 1 ? figures.options[1].value : "";
  for (const control of [figures, lines, ...boxes]) control.addEventListener("change", update);
  for (const button of all("button[data-methods]")) {
    button.addEventListener("click", () => {
      const names = button.dataset.methods.split(" ");
      for (const box of boxes) box.checked = button.dataset.methods === "*" || names.includes(box.value);
      update();
    });
  }
  update();
})();
