"""How the page of a report looks: light or dark as its reader's system is, from 360 px upwards."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1d2430; --faint: #667085; --line: #e3e7ee; --card: #f6f8fb;
  --wait: #d1495b; --transfer: #3f8ec2; --augment: #a2659a; --compute: #3f9164; --warn: #c98a12;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161d; --ink: #e4e8ef; --faint: #94a0b3; --line: #2b3340; --card: #1a202a;
    --wait: #e2616f; --transfer: #5aa9dc; --augment: #bd85b6; --compute: #4fae7b; --warn: #e0a73c;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 40px; }
h1 { font-size: 22px; line-height: 1.35; margin: 4px 0 18px; font-weight: 600; }
h2 { font-size: 16px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 20px 0 6px; }
p { margin: 6px 0; }
ul { margin: 8px 0; padding-left: 20px; color: var(--faint); }
.run, .hint { color: var(--faint); margin: 0; }
.hint { font-size: 13px; }
.badge { color: #fff; background: var(--faint); padding: 2px 10px; border-radius: 4px;
  text-transform: uppercase; font-size: 15px; letter-spacing: .04em; white-space: nowrap; }
.badge.data-bound { background: #c0374a; }
.badge.balanced { background: #96660a; }
.badge.paused, .badge.starved, .badge.held { background: #7a3d94; }
.badge.compute-bound { background: #2f7a52; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.figures div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.figures b { display: block; font-size: 24px; line-height: 1.25; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.figures span { color: var(--faint); font-size: 13px; }
article { border-left: 4px solid var(--line); background: var(--card); padding: 10px 16px;
  margin: 10px 0; border-radius: 0 8px 8px 0; overflow-wrap: anywhere; }
article.high { border-color: var(--wait); }
article.moderate { border-color: var(--warn); }
article.fine { border-color: var(--compute); }
.cause { margin: 0; }
.code { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; color: var(--faint);
  border: 1px solid var(--line); border-radius: 4px; padding: 1px 5px; margin-right: 4px; }
dl { display: grid; grid-template-columns: 44px 1fr; gap: 4px 8px; margin: 8px 0 0; }
dl:empty { display: none; }
dt { color: var(--faint); }
dd { margin: 0; min-width: 0; }
dd.try { font-weight: 600; }
dd.skip { color: var(--faint); }
.before-after { display: block; max-width: 420px; margin-top: 5px; }
.before-after .bar { height: 6px; margin-bottom: 2px; }
i { font-style: normal; }
.bar { display: block; height: 12px; min-width: 1px; border-radius: 2px; }
.stack { display: flex; height: 26px; border-radius: 4px; overflow: hidden; margin-bottom: 10px; }
.stack .bar { height: 100%; border-radius: 0; flex: none; }
.back-gap { background: var(--faint); }
.back-wait { background: var(--wait); } .fill-wait { fill: var(--wait); }
.back-transfer { background: var(--transfer); } .fill-transfer { fill: var(--transfer); }
.back-augment { background: var(--augment); } .fill-augment { fill: var(--augment); }
.back-compute { background: var(--compute); } .fill-compute { fill: var(--compute); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; }
.legend i, td > span > i { display: inline-block; width: 11px; height: 11px; margin-right: 6px;
  border-radius: 2px; }
.legend .dots { width: 18px; height: 0; vertical-align: middle; border-radius: 0;
  border-top: 2px dotted var(--ink); }
.chart { display: grid; grid-template-columns: 42px 1fr; font-size: 12px; color: var(--faint);
  font-variant-numeric: tabular-nums; }
.y { position: relative; }
.y span { position: absolute; right: 8px; line-height: 1; transform: translateY(50%); }
.plot { height: 240px; border: solid var(--line); border-width: 0 0 1px 1px; }
.plot svg { display: block; width: 100%; height: 100%; }
.x { grid-column: 2; display: flex; justify-content: space-between; gap: 10px; padding-top: 3px; }
.floor { stroke: var(--ink); stroke-width: 1.5px; stroke-dasharray: 2 4;
  vector-effect: non-scaling-stroke; }
.epoch { stroke: var(--faint); stroke-width: 1px; opacity: .6; vector-effect: non-scaling-stroke; }
.step { fill: transparent; }
.step:hover { fill: var(--ink); opacity: .22; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--faint); font-weight: 500; font-size: 13px; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
td { overflow-wrap: anywhere; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
.parts td:first-child { width: 46%; }
.parts td:nth-child(2) { width: 34%; }
footer { margin-top: 36px; padding-top: 12px; border-top: 1px solid var(--line); font-size: 13px;
  color: var(--faint); display: flex; flex-wrap: wrap; gap: 2px 18px; }
footer b { font-weight: 500; color: var(--ink); }
@media (max-width: 560px) {
  main { padding: 14px 12px 30px; }
  h1 { font-size: 19px; }
  .figures { grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 8px; }
  .figures b { font-size: 20px; }
  .plot { height: 180px; }
  .parts td:nth-child(2), .parts th:nth-child(2) { display: none; }
  .parts td:first-child { width: 66%; }
}
@media print { article, .figures div { break-inside: avoid; } }
"""
