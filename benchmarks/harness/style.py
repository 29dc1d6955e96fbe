"""How the page of a report looks."""

STYLE = """
:root {
  --sans: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif;
  --back: #ffffff; --raised: #f6f8fa; --ink: #1b1f24; --muted: #5b6570; --grid: #d5dae0;
  --met: #0063a0; --missed: #b34700; --met-fill: #0072b2; --missed-fill: #d55e00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14171b; --raised: #1c2026; --ink: #e8ebee; --muted: #a3adb8; --grid: #3a424c;
    --met: #62b5ee; --missed: #ff9a52; --met-fill: #2f8fd0; --missed-fill: #d55e00;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 var(--sans); }
main { max-width: 1400px; margin: 0 auto; padding: 16px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 16px 0; }
h2 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
h3 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
h4 { font-size: 13px; margin: 16px 0 4px; color: var(--muted); font-weight: 600; }
p { margin: 4px 0; overflow-wrap: anywhere; }
section { margin: 40px 0 0; padding-top: 20px; border-top: 1px solid var(--grid); }
code { font: 0.85em ui-monospace, "DejaVu Sans Mono", monospace; color: var(--muted); overflow-wrap: anywhere; }
dl { margin: 0; display: grid; gap: 2px; }
dl div { display: grid; grid-template-columns: 110px minmax(0, 1fr); gap: 12px; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
nav { margin-top: 20px; display: flex; flex-wrap: wrap; gap: 6px 16px; }
a { color: var(--met); }
@media (min-width: 1100px) {
  .top {
    display: grid; grid-template-columns: minmax(0, 700px) minmax(0, 1fr); column-gap: 48px;
    border-top: 1px solid var(--grid);
  }
  .top section { border-top: 0; }
  .top, main > section { margin-top: 40px; }
  .top section { margin-top: 0; }
}
.read p { max-width: 95ch; margin: 8px 0; }
.wrong { color: var(--missed); }
.aside { color: var(--muted); font-size: 13px; margin: 8px 0; overflow-wrap: anywhere; }
.aside ul { margin: 0; padding-left: 18px; }
.aside b { color: var(--ink); font-weight: 600; }
.pictures {
  display: grid; gap: 36px 28px; margin: 20px 0; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr));
}
figure { margin: 0; min-width: 0; break-inside: avoid; }
figcaption { margin-bottom: 6px; }
figcaption p { color: var(--muted); font-size: 13px; margin: 0; }
svg { display: block; width: calc(100% + 28px); max-width: 520px; height: auto; margin: 0 -14px; overflow: visible; }
svg text { font-variant-numeric: tabular-nums; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--muted); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--muted); vertical-align: bottom; }
td { text-align: right; white-space: nowrap; vertical-align: top; border-top: 1px solid var(--grid); }
th, td { padding: 3px 14px 3px 0; }
tbody th { text-align: left; color: var(--ink); padding-top: 14px; }
tbody tr:first-child th { padding-top: 3px; }
th:first-child, td:first-child, .words th, .words td, .two th:nth-child(2), .two td:nth-child(2) { text-align: left; }
tbody tr:hover { background: var(--raised); }
.two td:nth-child(2) { white-space: normal; min-width: 190px; }
.words td:nth-child(2), .aims td:first-child { white-space: normal; min-width: 180px; }
.aims { width: 100%; }
.aims td:last-child { text-align: left; width: 230px; min-width: 150px; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
span.met { color: var(--met); } span.missed { color: var(--missed); font-weight: 600; }
.track {
  display: block; height: 8px; margin-top: 3px;
  background: linear-gradient(var(--ink) 0 100%) center / 2px 100% no-repeat, var(--grid);
}
.fill { display: block; height: 4px; position: relative; top: 2px; }
.cut {
  height: 8px; top: 0; --head: calc(100% - 7px);
  clip-path: polygon(0 25%, var(--head) 25%, var(--head) 0, 100% 50%, var(--head) 100%, var(--head) 75%, 0 75%);
}
.fill.met { background: var(--met-fill); } .fill.missed { background: var(--missed-fill); }
@media (max-width: 600px) {
  main { padding: 8px 14px 48px; }
  dl div { grid-template-columns: 1fr; gap: 0; margin-bottom: 6px; }
  .aims, .aims thead, .aims tbody { display: block; }
  .aims tr { display: grid; grid-template-columns: minmax(0, 1fr) 64px 54px; border-top: 1px solid var(--grid); }
  .aims th, .aims td { border: 0; padding-right: 0; }
  .aims td:first-child { min-width: 0; }
  .aims td:last-child { grid-column: 1 / -1; width: auto; padding-bottom: 8px; }
}
@media print {
  :root {
    --back: #ffffff; --raised: #ffffff; --ink: #1b1f24; --muted: #5b6570; --grid: #d5dae0;
    --met: #0063a0; --missed: #b34700; --met-fill: #0072b2; --missed-fill: #d55e00;
  }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 11px; }
  nav { display: none; }
  main { max-width: none; padding: 0; }
  .pictures { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; }
  table { font-size: 10px; }
  th, td { padding: 2px 8px 2px 0; }
  tr { break-inside: avoid; }
  tr:has(th[colspan]) { break-after: avoid; }
  h2, h3, h4 { break-after: avoid; }
}
"""
"""``--ink``, ``--muted`` and ``--grid`` are the pictures' neutral colours too."""
