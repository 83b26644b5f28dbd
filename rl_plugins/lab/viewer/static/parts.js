"use strict";
const { html, useEffect, useMemo, useRef, useState } = htmPreact;

// ---- curves over batches

const Chart = ({ title, x, series, onPick, label = "batch" }) => {
  const box = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--ink").trim(), grid: { stroke: style.getPropertyValue("--line").trim() } };
    const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3], [1, 2]];
    const plot = new uPlot(
      {
        title,
        width: Math.min(520, box.current.clientWidth || 320),
        height: 190,
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 30 }, { ...axis, size: 62, values: (_, ticks) => ticks.map(number) }],
        cursor: { drag: { setScale: false } },
        series: [
          { label },
          ...series.map((s, i) => ({
            label: s.label,
            stroke: style.getPropertyValue(`--line-${(i % 5) + 1}`).trim(),
            dash: dashes[i % 5],
            width: 1.5,
            points: { show: x.length < 60 },
            spanGaps: true,
            value: (_, v) => number(v),
          })),
        ],
      },
      [x, ...series.map((s) => s.values)],
      box.current,
    );
    plot.over.addEventListener("click", () => plot.cursor.idx !== null && onPick && onPick(x[plot.cursor.idx]));
    return () => plot.destroy();
  }, [title, x.length]);
  return html`<div class="chart" ref=${box} role="img" aria-label=${title}></div>`;
};

// ---- tables

const MOST_ROWS = 50;

const Table = ({ columns, rows, onPick, chosen, first = null }) => {
  const [order, setOrder] = useState({ column: first, down: true });
  const [all, showAll] = useState(false);
  const by = columns.find((c) => c.title === order.column);
  const shown = !by ? rows : [...rows].sort((a, b) => {
    const [p, q] = [by.of(a), by.of(b)];
    if (missing(p) || missing(q)) return missing(p) - missing(q);
    return (p < q ? -1 : p > q ? 1 : 0) * (order.down ? -1 : 1);
  });
  return html`<div class="scroll"><table>
    <thead><tr>${columns.map((c) => html`<th scope="col" title=${c.help || ""} aria-sort=${order.column !== c.title ? "none" : order.down ? "descending" : "ascending"}>
      <button onClick=${() => setOrder({ column: c.title, down: order.column === c.title ? !order.down : true })}>
        ${c.title}${order.column === c.title ? (order.down ? " \u25bc" : " \u25b2") : ""}</button></th>`)}</tr></thead>
    <tbody>${shown.slice(0, all ? undefined : MOST_ROWS).map((r) => html`<tr class=${chosen && chosen(r) ? "chosen" : ""} tabindex=${onPick ? 0 : null}
      onClick=${() => onPick && onPick(r)} onKeyDown=${(e) => e.key === "Enter" && onPick && onPick(r)}>
      ${columns.map((c) => { const v = c.of(r); return html`<td class=${typeof v === "number" ? "n" : ""}>
        ${c.show ? c.show(r) : typeof v === "number" ? number(v) : v}</td>`; })}</tr>`)}</tbody>
  </table>${shown.length > MOST_ROWS && !all ? html`<button onClick=${() => showAll(true)}>${shown.length - MOST_ROWS} further rows</button>` : ""}</div>`;
};

// A bar from 0; its sign is written, too.
const Bar = ({ value, most }) => (missing(value) ? "\u2013" : html`<span class="bar">
  <svg viewBox="0 0 100 10" aria-hidden="true"><rect class="whole" width="100" height="10"/>
  <rect class=${value < 0 ? "minus" : "plus"} height="10" width=${Math.min(100, (100 * Math.abs(value)) / Math.max(most, 1e-9))}/></svg> ${number(value)}</span>`);

// Plain GRPO's advantage (ring) and that of the methods (diamond), on one scale; a thin line spans the tokens' values.
const Dumbbell = ({ before, after, low, high, most }) => {
  const x = (v) => (96 * v) / Math.max(most, 1e-9);
  const sign = after < 0 ? "minus" : "plus";
  return html`<span class="dumbbell"><svg viewBox="-104 0 208 16" aria-hidden="true">
    <line class="zero" x1="0" x2="0" y1="0" y2="16"/>
    ${missing(low) ? "" : html`<line class="range" x1=${x(low)} x2=${x(high)} y1="13" y2="13"/>`}
    ${missing(after) ? "" : html`<line class=${sign} x1=${x(before)} x2=${x(after)} y1="8" y2="8"/>`}
    <circle class="before" cx=${x(before)} cy="8" r="4.5"/>
    ${missing(after) ? "" : html`<path class=${sign} transform=${`translate(${x(after)} 8)`} d="M-5 0 L0 -5 L5 0 L0 5 Z"/>`}
  </svg> ${signed(before)} \u2192 ${missing(after) ? "left" : signed(after)}</span>`;
};

// ---- the strip of batches: bars are mean rewards, dark feet the share of groups without signal

const MOST_CELLS = 400;

const Strip = ({ run, at }) => {
  const cells = useMemo(() => {
    const size = Math.ceil(run.batches.length / MOST_CELLS);
    const found = [];
    for (let i = 0; i < run.batches.length; i += size) {
      const part = run.batches.slice(i, i + size);
      const flat = part.flatMap((b) => b.groups.spread);
      found.push({
        first: part[0].batch,
        last: part.at(-1).batch,
        reward: mean(part.flatMap((b) => b.groups.reward)),
        flat: flat.filter((s) => s === 0).length / flat.length,
      });
    }
    return found;
  }, [run]);
  const known = cells.map((c) => c.reward).filter((r) => !missing(r));
  const [low, high] = [Math.min(...known, 0), Math.max(...known, 1e-9)];
  const tall = (r) => (missing(r) ? 0 : 1 + (19 * (r - low)) / (high - low));
  return html`<svg class="strip" viewBox=${`0 0 ${cells.length} 30`} preserveAspectRatio="none" role="img" aria-label="batches: mean reward above, share of groups without signal below">
    ${cells.map((c, i) => { const here = c.first <= at && at <= c.last; return html`<g class=${here ? "here" : ""} onClick=${() => go({ batch: c.first, group: null, rollout: null, view: null })}>
      <title>batch ${c.first}: reward ${number(c.reward)}, ${Math.round(100 * c.flat)} % of the groups without signal${here ? ", shown" : ""}</title>
      <rect class="cell" x=${i} y="0" width="1" height="30"/><rect class="reward" x=${i + 0.1} width="0.8" y=${20 - tall(c.reward)} height=${tall(c.reward)}/>
      <rect class="flat" x=${i + 0.1} width="0.8" y="21" height=${9 * c.flat}/></g>`; })}</svg>`;
};

// ---- groups: filters and their table

const FILTERS = {
  "zero variance": { of: (g) => g.spread === 0, help: "all rollouts of the group have the same reward" },
  dropped: { of: (g) => g.trained < g.rows, help: "a row is not trained" },
  clipped: { of: (g) => g.clipped > 0, help: "the loss clipped the ratio of a token" },
  truncated: { of: (g) => g.truncated > 0, help: "the length limit cut a completion off" },
  "rewards disagree": { of: (g) => !missing(g.disagree) && g.disagree <= -0.5, help: "two reward functions have a correlation of -0.5 or less in the group" },
  changed: { of: (g) => g.change > 1e-4, help: "a method changed an advantage" },
  stale: { of: (g) => g.age > 0, help: "a token is older than the weights" },
};
const filtersOn = () => new Set((place().show || "").split(",").filter((n) => n in FILTERS));
const passes = (group, on) => [...on].every((n) => FILTERS[n].of(group));

const Groups = ({ groups, whole }) => {
  const on = filtersOn();
  const there = Object.keys(FILTERS).filter((n) => n !== "clipped" || groups.some((g) => !missing(g.clipped)));
  const shown = groups.filter((g) => passes(g, on));
  const has = (n) => groups.some((g) => !missing(g[n]));
  const set = (n) => { const next = new Set(on); next.has(n) ? next.delete(n) : next.add(n); go({ show: [...next].join(",") || null }); };
  const columns = [
    { title: "group", of: (g) => g.group, show: (g) => `${g.group}${g.recorded ? "" : " (summary)"}` },
    { title: "dataset row", of: (g) => g.prompt_index },
    { title: "rows", of: (g) => g.rows },
    { title: "trained", of: (g) => g.trained },
    { title: "reward", help: "mean of the rewards as the functions gave them", of: (g) => g.reward },
    { title: "spread", help: "largest minus smallest reward", of: (g) => g.spread },
    { title: "change", help: "largest difference of an advantage to plain GRPO's", of: (g) => g.change },
    { title: "truncated", of: (g) => g.truncated },
    { title: "age", help: "published weights between the oldest token and now", of: (g) => g.age },
    ...(has("disagree") ? [{ title: "agreement", help: "lowest correlation of two reward functions in the group", of: (g) => g.disagree }] : []),
    ...(has("clipped") ? [{ title: "clipped", help: "share of the tokens whose ratio was clipped", of: (g) => g.clipped }] : []),
  ];
  if (whole) columns.unshift({ title: "batch", of: (g) => g.batch });
  return html`<fieldset class="filters"><legend>Show only groups</legend>${there.map((n) => {
      const count = groups.filter(FILTERS[n].of).length;
      return html`<label title=${FILTERS[n].help}><input type="checkbox" checked=${on.has(n)} disabled=${!count && !on.has(n)} onChange=${() => set(n)}/> ${n} <small>${count}</small></label>`; })}</fieldset>
    <p class="quiet" role="status">${shown.length} of ${groups.length} groups. A heading sorts; "change" shows the largest change by a method first.</p>
    <${Table} rows=${shown} columns=${columns} first=${whole ? "change" : null} onPick=${(g) => g.recorded && go({ batch: g.batch, group: g.group, rollout: null })}/>`;
};
