// The page's own script: draws a chart once it comes into sight, reads its numbers by keyboard, writes them as a table,
// switches the theme. Text that came from outside is never put in as markup.
'use strict';

const CONFIG = {responsive: true, displayModeBar: false, scrollZoom: false};
const charts = new Map([...document.querySelectorAll('.chart')].map((box) => [box, {
  ...JSON.parse(box.querySelector('script').textContent), chosen: -1, drawn: -1, row: 0, column: -1,
}]));

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return bytes;
}

// Rows of numbers from base64 of 16-bit integers: 65535 is no number.
function unpack({packed, columns, scale}) {
  const bytes = bytesOf(packed);
  const words = new DataView(bytes.buffer);
  return Array.from({length: bytes.length / 2 / columns}, (_, row) => Float32Array.from({length: columns}, (_, column) => {
    const word = words.getUint16(2 * (row * columns + column), true);
    return word === 65535 ? NaN : word * scale;
  }));
}

function picked(box) {
  return [...box.querySelectorAll('select')].reduce((at, list) => at * list.length + list.selectedIndex, 0);
}

function withVariant(chart, number) {
  if (!chart.variants.length) return [chart.data, chart.layout];
  const variant = chart.variants[number];
  const trace = {...chart.data[0], z: unpack(variant.z)};
  if (variant.x) Object.assign(trace, {x: variant.x, y: variant.y});
  if (variant.experts) {
    trace.experts = unpack(variant.experts).map((row) => Array.from(row, Math.round));
    trace.text = trace.experts.map((row, layer) => row.map((expert) => `${expert} on ${trace.holders[layer][expert]}`));
  }
  const layout = {...chart.layout};
  for (const [axis, changes] of Object.entries(variant.axes || {})) layout[axis] = {...layout[axis], ...changes};
  return [[trace], layout];
}

function choose(box) {
  const chart = charts.get(box), number = picked(box);
  if (chart.chosen === number) return;
  [chart.now, chart.layoutNow] = withVariant(chart, number);
  chart.chosen = number;
}

function draw(box) {
  choose(box);
  const chart = charts.get(box);
  if (!window.Plotly || chart.drawn === chart.chosen) return;
  chart.drawn = chart.chosen;
  Plotly.react(box.querySelector('.plot'), chart.now, structuredClone(chart.layoutNow), CONFIG);
}

// ---------------------------------------------------------------------------------------------- numbers by keyboard

function moved(chart, key) {
  const heat = chart.now[0].z;
  const rows = heat ? heat.length : chart.now.length;
  const columns = heat ? heat[0].length : chart.now[0].y.length;
  const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  const first = chart.column < 0;
  if (key === 'Home') chart.column = 0;
  else if (key === 'End') chart.column = columns - 1;
  else if (first) chart.column = 0;
  else {
    chart.row = Math.min(rows - 1, Math.max(0, chart.row + steps[key][0]));
    chart.column = Math.min(columns - 1, Math.max(0, chart.column + steps[key][1]));
  }
}

function atPoint(chart) {
  const {row, column} = chart, trace = chart.now[0].z ? chart.now[0] : chart.now[row];
  const x = trace.x ? trace.x[column] : column;
  if (!trace.z) return {x, y: trace.y[column], said: `${trace.name}, ${x}: ${trace.y[column]}`};
  const y = trace.y ? trace.y[row] : row, name = trace.text ? trace.text[row][column] : x, value = trace.z[row][column];
  const shown = Number.isNaN(value) ? 'no tokens' : value.toFixed(2);
  return {x, y, said: `${chart.rows} ${y}, ${chart.columns} ${name}: ${shown} (${trace.colorbar.title.text})`};
}

function read(box, event) {
  if (!['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Home', 'End'].includes(event.key)) return;
  event.preventDefault();
  draw(box);
  const chart = charts.get(box), plot = box.querySelector('.plot');
  moved(chart, event.key);
  const {x, y, said} = atPoint(chart);
  box.querySelector('.reading').textContent = said;
  if (!window.Plotly) return;
  const {xaxis, yaxis} = plot._fullLayout;
  Plotly.Fx.hover(plot, {xpx: xaxis.d2p(x), ypx: yaxis.d2p(y)});
}

// ------------------------------------------------------------------------------------------------ numbers as a table

function cell(row, kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (kind === 'th') made.scope = row.parentNode.tagName === 'THEAD' ? 'col' : 'row';
  row.append(made);
}

function writeTable(box) {
  choose(box);
  const chart = charts.get(box), heat = chart.now[0].z, table = document.createElement('table');
  const head = table.createTHead().insertRow(), body = table.createTBody();
  const trace = chart.now[0];
  if (heat) {
    const names = trace.x || Array.from(heat[0], (_, column) => column);
    [`${chart.rows} \\ ${chart.columns}`, ...names].forEach((name) => cell(head, 'th', name));
    heat.forEach((values, at) => {
      const row = body.insertRow();
      cell(row, 'th', trace.y ? trace.y[at] : at);
      values.forEach((value, column) => {
        const shown = Number.isNaN(value) ? '' : value.toFixed(2);
        cell(row, 'td', trace.experts && trace.experts[at][column] !== column ? `${trace.experts[at][column]}: ${shown}` : shown);
      });
    });
  } else {
    ['', ...chart.now.map((one) => one.name)].forEach((name) => cell(head, 'th', name));
    trace.y.forEach((_, at) => {
      const row = body.insertRow();
      cell(row, 'th', trace.x ? trace.x[at] : at);
      chart.now.forEach((one) => cell(row, 'td', one.y[at] === null ? '' : one.y[at]));
    });
  }
  box.querySelector('.all .scroll').replaceChildren(table);
}

// ------------------------------------------------------------------------------------------------------- the page

const inSight = new IntersectionObserver((seen) => {
  seen.filter(({isIntersecting}) => isIntersecting).forEach(({target}) => { inSight.unobserve(target); draw(target); });
}, {rootMargin: '300px'});

// The library travels packed. Text and tables are there before it is.
async function loadLibrary() {
  const bytes = bytesOf(document.getElementById('library').textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const script = document.createElement('script');
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

loadLibrary().then(() => { for (const box of charts.keys()) inSight.observe(box); }, () => {
  charts.forEach((_, box) => { box.querySelector('.reading').textContent = 'This browser cannot draw the chart.'; });
});

for (const box of charts.keys()) {
  box.querySelector('.plot').addEventListener('keydown', (event) => read(box, event));
  const fold = box.querySelector('.all');
  fold.addEventListener('toggle', () => { if (fold.open) writeTable(box); });
  box.querySelectorAll('select').forEach((list) => list.addEventListener('change', () => {
    Object.assign(charts.get(box), {row: 0, column: -1});
    box.querySelector('.reading').textContent = '';
    draw(box);
    if (fold.open) writeTable(box);
  }));
}

const THEMES = ['system', 'light', 'dark'];
const themeButton = document.getElementById('theme');
themeButton.addEventListener('click', () => {
  const now = document.documentElement.dataset.theme || 'system';
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  themeButton.textContent = `Theme: ${next}`;
});

// Paper has another width than the screen, and shows every chart and every fold but those of all numbers.
const fit = () => document.querySelectorAll('.js-plotly-plot').forEach((plot) => Plotly.Plots.resize(plot));
let folds = [];
addEventListener('beforeprint', () => {
  folds = [...document.querySelectorAll('details:not([open], .all)')];
  folds.forEach((fold) => { fold.open = true; });
  for (const box of charts.keys()) draw(box);
});
addEventListener('afterprint', () => { folds.forEach((fold) => { fold.open = false; }); fit(); });
matchMedia('print').addEventListener('change', fit);
