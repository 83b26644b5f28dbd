"use strict";
const { html, useEffect, useRef, useState } = htmPreact;

// ---- small parts

const Chart = ({ title, x, series, onPick }) => {
  const box = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const axis = { stroke: ink, grid: { stroke: style.getPropertyValue("--line").trim() } };
    const dashes = [[], [6, 3], [2, 3]];
    const plot = new uPlot(
      {
        title,
        width: Math.min(520, box.current.clientWidth || 320),
        height: 190,
        scales: { x: { time: false } },
        axes: [{ ...axis, size: 30 }, { ...axis, size: 62, values: (_, ticks) => ticks.map(number) }],
        cursor: { drag: { setScale: false } },
        series: [
          { label: "batch" },
          ...series.map((s, i) => ({
            label: s.label,
            stroke: style.getPropertyValue(`--line-${i + 1}`).trim(),
            dash: dashes[i],
            width: 1.5,
            points: { show: x.length < 60 },
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

const Table = ({ columns, rows, onPick, chosen }) => {
  const [order, setOrder] = useState({ column: null, down: true });
  const shown = order.column === null ? rows : [...rows].sort((a, b) => {
    const [p, q] = [a, b].map((r) => columns[order.column].of(r));
    const missing = (v) => v === null || v === undefined || Number.isNaN(v);
    if (missing(p) || missing(q)) return missing(p) - missing(q);
    return (p < q ? -1 : p > q ? 1 : 0) * (order.down ? -1 : 1);
  });
  return html`<div class="scroll"><table>
    <thead><tr>${columns.map((c, i) => html`<th scope="col" title=${c.help || ""}>
      <button onClick=${() => setOrder({ column: i, down: order.column === i ? !order.down : true })}>
        ${c.title}${order.column === i ? (order.down ? " \u25bc" : " \u25b2") : ""}</button></th>`)}</tr></thead>
    <tbody>${shown.map((r) => html`<tr class=${chosen && chosen(r) ? "chosen" : ""} tabindex="0"
      onClick=${() => onPick(r)} onKeyDown=${(e) => e.key === "Enter" && onPick(r)}>
      ${columns.map((c) => { const v = c.of(r); return html`<td class=${typeof v === "number" ? "n" : ""}>
        ${c.show ? c.show(r) : typeof v === "number" ? number(v) : v}</td>`; })}</tr>`)}</tbody>
  </table></div>`;
};

const Bar = ({ value, most }) => html`<span class="bar" title=${number(value)}>
  <svg viewBox="-50 0 100 10" aria-hidden="true"><line x1="0" x2="0" y1="0" y2="10"/>
  <rect class=${value < 0 ? "minus" : "plus"} y="2" height="6" x=${value < 0 ? Math.max(-50, (50 * value) / most) : 0}
    width=${Math.min(50, (50 * Math.abs(value)) / most) || 0}/></svg> ${value > 0 ? "+" : ""}${number(value)}</span>`;

const Filters = ({ all, on, set }) => html`<fieldset><legend>Show only</legend>${Object.entries(all).map(([name, f]) => html`
  <label title=${f.help}><input type="checkbox" checked=${on.has(name)} onChange=${() => {
    const next = new Set(on); next.has(name) ? next.delete(name) : next.add(name); set(next); }}/> ${name}</label>`)}</fieldset>`;

// ---- the run

const mean = (values) => {
  const known = values.filter((v) => v !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};

const RunView = ({ run }) => {
  const x = run.batches.map((b) => b.batch);
  const of = (call) => run.batches.map(call);
  const pick = (batch) => (location.hash = link({ batch, group: null, rollout: null }));
  const seen = new Set();
  const coverage = of((b) => { b.groups.forEach((g) => g.prompt_index >= 0 && seen.add(g.prompt_index)); return seen.size; });
  const names = [...new Set(run.batches.flatMap((b) => Object.keys(b.stats)))].sort();
  const [chosen, choose] = useState(names.find((n) => n.includes("/")) || names[0] || "");
  return html`<section><h1>${run.methods.join(" + ") || "no method"} <small>${run.host}, ${run.batches.length} batches</small></h1>
    <div class="charts">
      <${Chart} title="Mean reward of a group" x=${x} onPick=${pick} series=${[
        { label: "mean", values: of((b) => mean(b.groups.map((g) => g.reward))) },
        { label: "best", values: of((b) => Math.max(...b.groups.map((g) => g.reward ?? -Infinity))) },
        { label: "worst", values: of((b) => Math.min(...b.groups.map((g) => g.reward ?? Infinity))) }]}/>
      <${Chart} title="Share of groups, rows and tokens" x=${x} onPick=${pick} series=${[
        { label: "groups without signal", values: of((b) => b.groups.filter((g) => g.spread === 0).length / b.groups.length) },
        { label: "rows trained", values: of((b) => b.trained_rows / b.rows) },
        { label: "tokens trained", values: of((b) => b.trained_tokens / Math.max(1, b.tokens)) }]}/>
      <${Chart} title="Change of advantages against plain GRPO" x=${x} onPick=${pick} series=${[
        { label: "largest", values: of((b) => Math.max(...b.groups.map((g) => g.change ?? 0))) },
        { label: "mean of groups", values: of((b) => mean(b.groups.map((g) => g.change))) }]}/>
      <${Chart} title="Prompts seen so far" x=${x} onPick=${pick} series=${[{ label: "different dataset rows", values: coverage }]}/>
      <${Chart} title="Age of the oldest tokens, in published weights" x=${x} onPick=${pick} series=${[
        { label: "oldest", values: of((b) => Math.max(...b.groups.map((g) => g.age))) },
        { label: "mean of groups", values: of((b) => mean(b.groups.map((g) => g.age))) }]}/>
      ${names.length ? html`<div><label>Logged value <select value=${chosen} onChange=${(e) => choose(e.target.value)}>
        ${names.map((n) => html`<option selected=${n === chosen}>${n}</option>`)}</select></label>
        <${Chart} key=${chosen} title=${chosen} x=${x} onPick=${pick}
          series=${[{ label: "value", values: of((b) => b.stats[chosen] ?? null) }]}/></div>` : ""}
    </div>
    <h2>Batches</h2>
    <${Table} rows=${run.batches} onPick=${(b) => pick(b.batch)} columns=${[
      { title: "batch", of: (b) => b.batch },
      { title: "rows", of: (b) => b.rows },
      { title: "trained", of: (b) => b.trained_rows },
      { title: "reward", of: (b) => mean(b.groups.map((g) => g.reward)) },
      { title: "no signal", help: "groups whose rewards are all equal", of: (b) => b.groups.filter((g) => g.spread === 0).length },
      { title: "change", help: "largest difference to plain GRPO's advantage", of: (b) => Math.max(...b.groups.map((g) => g.change ?? 0)) },
      { title: "truncated", of: (b) => b.groups.reduce((a, g) => a + g.truncated, 0) },
      { title: "age", of: (b) => Math.max(...b.groups.map((g) => g.age)) },
      { title: "rollouts", of: (b) => (b.groups.some((g) => g.recorded) ? "recorded" : "summary") }]}/></section>`;
};

// ---- a batch

const FILTERS = {
  "without signal": { help: "all rewards are equal", of: (g) => g.spread === 0 },
  "rows dropped": { help: "fewer rows are trained than were made", of: (g) => g.trained < g.rows },
  truncated: { help: "a rollout reached the length limit", of: (g) => g.truncated > 0 },
  changed: { help: "an advantage differs from plain GRPO's by more than 0.01", of: (g) => g.change > 0.01 },
  stale: { help: "a token is older than the published weights", of: (g) => g.age > 0 },
  recorded: { help: "the rollouts are there", of: (g) => g.recorded },
};

const BatchView = ({ batch }) => {
  const [on, set] = useState(new Set());
  const rows = batch.groups.filter((g) => [...on].every((name) => FILTERS[name].of(g)));
  return html`<section><h1>Batch ${batch.batch} <small>${batch.rows} rows, ${batch.trained_rows} trained</small></h1>
    <p>Advantages: ${batch.stages.join(" \u2192 ")}${batch.selected_by ? `. Prompts chosen by ${batch.selected_by}` : ""}.</p>
    <${Filters} all=${FILTERS} on=${on} set=${set}/>
    <p class="quiet" aria-live="polite">${rows.length} of ${batch.groups.length} groups</p>
    <${Table} rows=${rows} chosen=${(g) => String(g.group) === place().group}
      onPick=${(g) => g.recorded && (location.hash = link({ group: g.group, rollout: null }))} columns=${[
      { title: "group", of: (g) => g.group, show: (g) => `${g.group}${g.recorded ? "" : " (summary)"}` },
      { title: "dataset row", of: (g) => g.prompt_index },
      { title: "rows", of: (g) => g.rows },
      { title: "trained", of: (g) => g.trained },
      { title: "reward", of: (g) => g.reward },
      { title: "spread", help: "largest minus smallest reward", of: (g) => g.spread },
      { title: "change", help: "largest difference to plain GRPO's advantage", of: (g) => g.change },
      { title: "truncated", of: (g) => g.truncated },
      { title: "age", of: (g) => g.age }]}/></section>`;
};

// ---- a group

const Branch = ({ node, rows, texts }) => html`<li>
  <code>${visible(rows[node.rows[0]].completion_ids.slice(node.start, node.stop).map((i) => texts[i] ?? `<${i}>`).join("")) || "\u2205"}</code>
  ${" "}<small>${node.rows.length === 1 ? html`rollout ${rows[node.rows[0]].rollout}, reward ${number(rows[node.rows[0]].raw_reward)},
    ${rows[node.rows[0]].trained ? "" : " left,"} advantage ${number(rows[node.rows[0]].advantage)}`
    : `${node.rows.length} rollouts, mean reward ${number(mean(node.rows.map((i) => rows[i].raw_reward)))}`}</small>
  ${node.branches.length ? html`<ul>${node.branches.map((b) => html`<${Branch} node=${b} rows=${rows} texts=${texts}/>`)}</ul>` : ""}</li>`;

const GroupView = ({ run, group, prompt }) => {
  const { rows, tree } = group;
  const most = (name) => Math.max(1e-9, ...rows.map((r) => Math.abs(r[name] || 0)));
  const pick = (r) => (location.hash = link({ rollout: r.row }));
  const others = run.batches.flatMap((b) => b.groups.filter((g) => prompt >= 0 && g.prompt_index === prompt && g.recorded)
    .map((g) => ({ batch: b.batch, group: g.group }))).filter((o) => String(o.batch) !== place().batch || String(o.group) !== place().group);
  return html`<section><h1>Group ${rows[0].group} <small>dataset row ${prompt}</small></h1>
    <pre class="text">${visible(rows[0].prompt)}</pre>
    ${rows[0].plan && rows[0].plan.by.length ? html`<p>Planned by ${rows[0].plan.by.join(", ")}: ${rows[0].plan.n} rollouts
      ${rows[0].plan.spare ? ` and ${rows[0].plan.spare} spare` : ""}${rows[0].plan.given ? `, ${rows[0].plan.given} given` : ""}
      ${rows[0].plan.edited.length ? `, edited: ${rows[0].plan.edited.join(", ")}` : ""}.</p>` : ""}
    ${others.length ? html`<p>The same prompt under other weights: ${others.map((o) => html`<a href=${link({ ...o, rollout: null })}>batch ${o.batch}</a> `)}</p>` : ""}
    <${Table} rows=${rows} chosen=${(r) => String(r.row) === place().rollout} onPick=${pick} columns=${[
      { title: "rollout", of: (r) => r.rollout },
      ...rows[0].rewards.map(([name], k) => ({ title: name, of: (r) => r.rewards[k][1] })),
      { title: "reward", of: (r) => r.raw_reward },
      ...rows[0].rewarded.map((w, k) => ({ title: w.method, help: "reward after this method", of: (r) => r.rewarded[k].reward })),
      { title: "GRPO", help: "advantage that plain GRPO gives", of: (r) => r.grpo, show: (r) => html`<${Bar} value=${r.grpo} most=${most("grpo")}/>` },
      { title: "advantage", help: "mean over the trained tokens", of: (r) => r.advantage, show: (r) => html`<${Bar} value=${r.advantage} most=${most("advantage")}/>` },
      { title: "tokens", of: (r) => r.completion_ids.length },
      { title: "what became of it", of: (r) => fate(r) }]}/>
    ${rows.some((r) => r.notes.length) ? html`<h2>Why</h2><ul>${rows.flatMap((r) => r.notes.map((n) => html`<li>rollout ${r.rollout}, ${n.method}: ${visible(n.text)}</li>`))}</ul>` : ""}
    ${tree.branches.length && (tree.stop > 0 || tree.branches.some((b) => b.branches.length)) ? html`<details open><summary>Tree: completions that begin alike</summary>
      <ul class="tree"><${Branch} node=${tree} rows=${rows} texts=${run.texts}/></ul></details>` : ""}
    <div class="side">${rows.map((r) => html`<article tabindex="0" onClick=${() => pick(r)} onKeyDown=${(e) => e.key === "Enter" && pick(r)}>
      <h3>rollout ${r.rollout} <small>${number(r.raw_reward)}, ${fate(r)}</small></h3>
      <pre class="text">${visible(r.completion.slice(0, 600))}${r.completion.length > 600 ? " \u2026" : ""}</pre></article>`)}</div></section>`;
};

const fate = (r) => (r.left.length ? r.left.map((l) => `${l.method}.${l.hook} took ${l.tokens} tokens out`).join("; ")
  : r.trained ? "trained" : "not trained") + (r.origin === "generated" ? "" : `, ${r.origin}`) + (r.truncated ? ", truncated" : "");

// ---- a rollout

const KINDS = ["read", "", "forced"];
const PAGE = 3000;
const COLORS = {
  advantage: (r) => (r.advantages.length ? r.advantages.at(-1).tokens || r.completion_ids.map((_, i) => (r.kinds[i] ? r.advantages.at(-1).advantage : null)) : null),
  entropy: (r) => r.entropies,
  "log-prob": (r) => r.old_logprobs,
  "sampling log-prob": (r) => r.rollout_logprobs,
  "log ratio to sampling": (r) => r.old_logprobs && r.rollout_logprobs && r.old_logprobs.map((v, i) => (v === null || r.rollout_logprobs[i] === null ? null : v - r.rollout_logprobs[i])),
  "reference log-prob": (r) => r.ref_logprobs,
  staleness: (r) => r.versions && r.versions.map((v) => (v < 0 ? null : r.current_version - v)),
};

const RolloutView = ({ run, row }) => {
  const [ids, showIds] = useState(false);
  const [until, setUntil] = useState(PAGE);
  const [search, setSearch] = useState("");
  const there = Object.keys(COLORS).filter((c) => COLORS[c](row));
  row.token_columns.forEach((c) => there.push(`column ${c.name}`));
  const color = there.includes(place().color) ? place().color : there[0];
  const values = color && (color.startsWith("column ") ? row.token_columns.find((c) => `column ${c.name}` === color).values : COLORS[color](row));
  const known = (values || []).filter((v) => v !== null);
  const most = Math.max(1e-9, ...known.map(Math.abs));
  const starts = new Map((row.turns || []).map((t) => [t.start, t]));
  const token = (id, i) => {
    const v = values ? values[i] : null;
    const text = ids ? `${id} ` : run.texts[id] ?? `<${id}>`;
    const left = row.token_left && row.token_left[i] >= 0 ? row.left[row.token_left[i]] : null;
    const step = v === null || v === undefined ? 0 : Math.min(5, Math.ceil((5 * Math.abs(v)) / most));
    const found = search && text.includes(search) ? " found" : "";
    return html`${starts.has(i) ? html`<span class="turn">turn ${starts.get(i).turn}${starts.get(i).valid ? "" : ", not understood"}</span>` : ""}
      <span class="token ${KINDS[row.kinds[i]]} ${v < 0 ? "minus" : "plus"}${step}${left ? " gone" : ""}${found}"
        title=${`${i}: id ${id}${v === null || v === undefined ? "" : `, ${color} ${number(v)}`}${row.kinds[i] === 0 ? ", read" : row.kinds[i] === 2 ? ", forced" : ""}${left ? `, taken out by ${left.method}` : ""}`}>${visible(text).replace(/\n/g, "\u23ce\n")}</span>`;
  };
  return html`<section><h1>Rollout ${row.rollout} <small>${row.completion_ids.length} tokens, ${fate(row)}</small></h1>
    <dl>
      <dt>rewards</dt><dd>${row.rewards.map(([n, v]) => `${n} ${number(v)}`).join(", ")}; sum ${number(row.raw_reward)}${row.rewarded.map((w) => `; ${w.method} ${number(w.reward)}`)}</dd>
      <dt>advantage</dt><dd>plain GRPO ${number(row.grpo)}${row.advantages.map((s) => ` \u2192 ${s.stage} ${number(s.advantage)}`)}</dd>
      ${row.row_columns.length ? html`<dt>columns</dt><dd>${row.row_columns.map(([n, v]) => `${n} ${number(v)}`).join(", ")}</dd>` : ""}
      <dt>weights</dt><dd>version ${row.version}${row.newest_version !== row.version ? ` to ${row.newest_version}` : ""}, trained at ${row.current_version}</dd>
      ${row.notes.map((n) => html`<dt>${n.method}</dt><dd>${visible(n.text)}</dd>`)}
    </dl>
    <p class="controls"><label>Color <select value=${color} onChange=${(e) => (location.hash = link({ color: e.target.value }))}>${there.map((c) => html`<option selected=${c === color}>${c}</option>`)}</select></label>
      <label>Search <input id="search" type="search" value=${search} onInput=${(e) => setSearch(e.target.value)}/></label>
      <label><input type="checkbox" checked=${ids} onChange=${() => showIds(!ids)}/> ids</label></p>
    <p class="quiet">Orange and solid underline: above 0. Blue and dashed: below 0. The darker, the larger; at most ${number(most)}. Grey italics: read. Frame: put in the policy's place. Struck through: taken out of the update. A token's number shows when you point at it.</p>
    <pre class="text prompt">${visible(row.prompt)}</pre>
    <pre class="text tokens">${row.completion_ids.slice(0, until).map(token)}</pre>
    ${row.completion_ids.length > until ? html`<button onClick=${() => setUntil(until + PAGE)}>${row.completion_ids.length - until} further tokens</button>` : ""}
    ${row.turns && row.turns.length ? html`<h2>Turns</h2><${Table} rows=${row.turns} onPick=${() => {}} columns=${[
      { title: "turn", of: (t) => t.turn }, { title: "tokens", of: (t) => t.start, show: (t) => `${t.start} to ${t.stop}` },
      { title: "observed before", of: (t) => t.anchor, show: (t) => visible(t.anchor) }, { title: "reward", of: (t) => t.reward },
      { title: "understood", of: (t) => (t.valid ? "yes" : "no") }]}/>` : ""}</section>`;
};
