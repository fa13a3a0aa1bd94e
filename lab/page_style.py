"""How a run's page looks: light and dark, on a phone, on a desk and on paper."""

CSS = '''
:root { --ground: #f6f7f9; --card: #ffffff; --ink: #1b2129; --soft: #5c6672; --line: #e1e5ea; --accent: #0b66a8;
  --good: #13795b; --good-ground: #e2f4ec; --warn: #8a5200; --warn-ground: #fff3dc; --code: #f1f3f6; --chart: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12161b; --card: #1a2027; --ink: #e7ebef; --soft: #9ba6b2; --line: #2c343d; --accent: #6db8f0;
    --good: #6fd6ad; --good-ground: #15342a; --warn: #f2c06a; --warn-ground: #392c12; --code: #222a32;
    --chart: #f4f5f7; } }
* { box-sizing: border-box; }
html { color-scheme: light dark; scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 72px; }
h1 { margin: 0; font-size: 2rem; line-height: 1.2; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { margin: 0 0 16px; font-size: 1.05rem; letter-spacing: -0.005em; }
h3 { margin: 22px 0 8px; font-size: 0.88rem; font-weight: 600; color: var(--soft); }
p { margin: 8px 0; }
a { color: var(--accent); }
header p { margin: 6px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.state { display: inline-block; margin: 0 8px 0 0; padding: 2px 12px; border-radius: 99px; font-weight: 600;
  font-size: 0.88rem; color: var(--good); background: var(--good-ground); }
.state.open { color: var(--warn); background: var(--warn-ground); }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 22px 0 0; padding: 12px 0 0;
  border-top: 1px solid var(--line); font-size: 0.88rem; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
section { margin: 20px 0 0; padding: 22px 24px; background: var(--card); border: 1px solid var(--line);
  border-radius: 14px; }
.warning { background: var(--warn-ground); border-color: transparent; color: var(--warn); padding: 14px 24px; }
.warning ul { margin: 0; padding: 0 0 0 18px; }
.missing { color: var(--soft); font-style: italic; }
.soft { color: var(--soft); font-size: 0.88rem; }
.scores { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }
.score { padding: 14px 16px; border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
.score.best { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); }
.score b { display: block; font-size: 1.4rem; font-weight: 600; line-height: 1.2; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.score span { display: block; font-size: 0.84rem; color: var(--soft); overflow-wrap: anywhere; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 14px; }
.curves figure { margin: 0; padding: 10px; background: var(--chart); border: 1px solid var(--line);
  border-radius: 10px; }
.curves svg { display: block; width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { .curves figure > svg { mix-blend-mode: multiply; } }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 16px; }
.pair { display: flex; gap: 8px; align-items: flex-start; }
.pair img { display: block; width: 100%; height: auto; border-radius: 8px; background: var(--code); }
.pair span, .name { display: block; margin-top: 4px; font-size: 0.8rem; color: var(--soft); overflow-wrap: anywhere; }
.name { color: var(--ink); font-weight: 600; }
.pair > div { flex: 1 1 0; min-width: 0; }
.pair > div > a { display: block; cursor: zoom-in; }
.pair > div > .close { display: none; }
.pair > div:target { position: fixed; inset: 0; z-index: 2; padding: 24px; display: flex; flex-direction: column;
  align-items: center; justify-content: center; background: rgba(10, 13, 17, 0.92); }
.pair > div:target img { width: auto; max-width: 94vw; max-height: 84vh; min-width: min(80vw, 60vh);
  image-rendering: auto; object-fit: contain; }
.pair > div:target span { color: #dfe4ea; }
.pair > div:target > .close { display: block; position: absolute; inset: 0; cursor: zoom-out; text-align: right;
  padding: 16px 22px; color: #dfe4ea; text-decoration: none; }
.bar { display: flex; height: 26px; margin: 4px 0 14px; border-radius: 7px; overflow: hidden; background: var(--code); }
.bar i { display: block; height: 100%; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 9px; border-radius: 3px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { padding: 6px 18px 6px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { font-weight: 500; color: var(--soft); }
thead th { font-size: 0.8rem; }
tr:last-child > * { border-bottom: 0; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.changed td { font-weight: 600; }
tr.changed th { color: var(--ink); font-weight: 600; }
tr.changed th::before { content: "\\2022"; margin-right: 7px; color: var(--accent); }
tr.best td:first-child::after { content: "best"; margin-left: 8px; padding: 1px 8px; border-radius: 99px;
  font-size: 0.75rem; color: var(--good); background: var(--good-ground); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 0 40px; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: 0.9em; }
pre { margin: 8px 0 14px; padding: 12px 14px; overflow-x: auto; border-radius: 9px; background: var(--code);
  font-size: 0.82rem; line-height: 1.5; }
pre.words { white-space: normal; }
pre.words span { white-space: pre; }
summary { cursor: pointer; color: var(--accent); font-size: 0.9rem; }
details > summary { margin: 10px 0 6px; }
footer { margin: 28px 0 0; color: var(--soft); font-size: 0.82rem; }
@media (max-width: 560px) {
  main { padding: 24px 14px 48px; }
  section { padding: 18px 16px; border-radius: 12px; }
  h1 { font-size: 1.6rem; }
  .scores { grid-template-columns: repeat(2, 1fr); }
  .score b { font-size: 1.45rem; } }
@media print {
  :root { --ground: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #ccc; --code: #f3f3f3; --chart: #fff; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  section { border: 0; padding: 0; margin-top: 22px; }
  h2, h3 { break-after: avoid; }
  figure, .score, .pair, tr { break-inside: avoid; }
  pre { white-space: pre-wrap; }
  nav { display: none; }
  .bar i, .swatch, .state { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
'''
