"""How the page looks, and the little script that charts in folds and on paper need."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #d0d0d0; --soft: #f3f5f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #15181d; --line: #3a3f47; --soft: #20242b; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
       padding: 1rem; max-width: 62rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 0.3rem; }
.verdict { font-size: 1.1rem; background: var(--soft); border-left: 4px solid var(--ink); padding: 0.7rem 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.5rem 0; min-width: min(26rem, 100%); }
caption { text-align: left; font-size: 0.9rem; padding-bottom: 0.3rem; }
th, td { padding: 0.25rem 0.8rem; border-bottom: 1px solid var(--line); text-align: right; overflow-wrap: normal; }
td { white-space: nowrap; } thead th { vertical-align: bottom; }
th:first-child { text-align: left; } tbody th { font-weight: normal; max-width: 22rem; overflow-wrap: anywhere; }
.dense { font-size: 0.75rem; } .dense th, .dense td { padding: 0.1rem 0.35rem; }
details { margin: 0.4rem 0; } summary { cursor: pointer; } p.look { margin: 0.2rem 0; }
figure { margin: 0.8rem 0; } figcaption { font-weight: 600; }
.tree { width: 100%; min-width: 36rem; font-size: 13px; display: block; }
.tree rect { fill: var(--soft); stroke: var(--line); } .tree text { fill: var(--ink); }
.tree .level { font-weight: 600; }
.js-plotly-plot text:not(.hoverlayer text) { fill: var(--ink) !important; }
@media (max-width: 40rem) { body { padding: 0.6rem; } th, td { padding: 0.25rem 0.4rem; font-size: 0.9rem; }
                            .dense th, .dense td { font-size: 0.75rem; } }
@media print { .scroll { overflow: visible; } .dense { font-size: 0.4rem; } .dense th, .dense td { padding: 0 0.1rem; }
               .tree { min-width: 0; } [role=img], figure, tr { break-inside: avoid; }
               h2, summary, caption, .look { break-after: avoid; } }
"""

# A chart in a fold is drawn before it has a width; paper has another width than the screen, and shows every fold.
SCRIPT = """
const fit = (root) => root.querySelectorAll('.js-plotly-plot').forEach((plot) => {
  if (plot.offsetParent) Plotly.Plots.resize(plot);
});
document.addEventListener('toggle', (event) => fit(event.target), true);
let folds = [];
addEventListener('beforeprint', () => {
  folds = [...document.querySelectorAll('details:not([open])')];
  folds.forEach((fold) => { fold.open = true; });
});
addEventListener('afterprint', () => { folds.forEach((fold) => { fold.open = false; }); fit(document); });
matchMedia('print').addEventListener('change', () => fit(document));
"""
