"use strict";
// Sorting: a click on a column's head, or Enter on it, sorts up, then down, then back to the table's own order.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const difference = Number(a) - Number(b);
    return Number.isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference;
  };
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value ?? cell.textContent.trim();
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const sorted = [...rows];
      if (order) {
        sorted.sort((a, b) => {
          const [left, right] = [key(a, column), key(b, column)];
          // What is missing stays at the end in both directions.
          return (left === "" || right === "" ? 1 : sign) * compare(left, right);
        });
      }
      body.append(...sorted);
    });
  });
}
// A link into a folded part opens it.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details");
  if (folded) folded.open = true;
};
addEventListener("hashchange", unfold);
unfold();
