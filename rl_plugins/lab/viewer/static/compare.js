"use strict";
// The same prompt under two policies: of two runs, or of two batches of one.

const last = (list) => list.at(-1);

// Prompts that both sides have: a pair of groups each, of the chosen batches or else the latest (one run: first and latest).
const pairsOf = (a, b, from, to) => {
  const visits = (run, only) => {
    const found = new Map();
    run.batches.forEach((batch) => {
      if (only && String(batch.batch) !== only) return;
      groupsOf(batch).forEach((g) => { if (g.recorded && g.prompt_index >= 0) found.set(g.prompt_index, [...(found.get(g.prompt_index) || []), g]); });
    });
    return found;
  };
  const [left, right] = [visits(a, from), visits(b, to)];
  return [...left].filter(([p]) => right.has(p)).map(([p, list]) => {
    const one = a === b ? list[0] : last(list);
    return { prompt: p, left: one, right: last(right.get(p)), difference: last(right.get(p)).reward - one.reward };
  }).filter((p) => a !== b || p.left.batch !== p.right.batch);
};

const Other = ({ children }) => html`<${Loaded} name="other/run" gone="The other run is not there.">${children}</>`;

const CompareView = ({ run }) => (run.compared ? html`<${Other}>${(other) => html`<${Pairs} a=${run} b=${other} prefix="other/"/>`}</>` : html`<${Pairs} a=${run} b=${run} prefix=""/>`);

const Pairs = ({ a, b, prefix }) => {
  const at = place();
  const pairs = useMemo(() => pairsOf(a, b, at.from, at.to), [at.from, at.to]);
  const chosen = pairs.find((p) => String(p.prompt) === at.prompt);
  const choice = (name, side, run) => html`<label>${side} <select value=${at[name] || ""} onChange=${(e) => go({ [name]: e.target.value || null, prompt: null })}>
    <option value="">${a === b && name === "from" ? "first visit" : "last visit"}</option>${run.batches.map((x) => html`<option value=${x.batch} selected=${String(x.batch) === at[name]}>${x.batch}</option>`)}</select></label>`;
  if (chosen) {
    return html`<${Loaded} name=${`b${chosen.left.batch}/g${chosen.left.group}`}>${(left) => html`<${Loaded} name=${`${prefix}b${chosen.right.batch}/g${chosen.right.group}`}>${(right) =>
      html`<${Pair} key=${chosen.prompt} pair=${chosen} left=${left} right=${right} names=${a === b ? ["", ""] : [a.name, b.name]}/>`}</>`}</>`;
  }
  return html`<section><h1>Compare <small>${a === b ? `two batches of ${a.name}` : `${a.name} (A) and ${b.name} (B)`}</small></h1>
    <p class="controls">${choice("from", "A, batch", a)} ${choice("to", "B, batch", b)}</p>
    ${a === b ? "" : html`<div class="charts"><${Chart} title="Mean reward" x=${a.batches.map((x) => x.batch)} series=${[
      { label: `A ${a.name}`, values: a.batches.map((x) => mean(x.groups.reward)) },
      { label: `B ${b.name}`, values: a.batches.map((x) => { const y = b.batches.find((z) => z.batch === x.batch); return y ? mean(y.groups.reward) : null; }) }]}/></div>`}
    <p class="quiet" role="status">${pairs.length} prompts are in both.</p>
    <${Table} rows=${pairs} first="difference" onPick=${(p) => go({ prompt: p.prompt })} columns=${[
      { title: "dataset row", of: (p) => p.prompt },
      { title: "A, batch", of: (p) => p.left.batch }, { title: "A, reward", of: (p) => p.left.reward },
      { title: "B, batch", of: (p) => p.right.batch }, { title: "B, reward", of: (p) => p.right.reward },
      { title: "difference", help: "B minus A", of: (p) => p.difference, show: (p) => signed(p.difference) }]}/></section>`;
};

const LONGEST_DIFF = 20000;

// What A has alone is struck through, what B has alone is underlined.
const Difference = ({ a, b }) => {
  const parts = useMemo(() => Diff.diffWordsWithSpace(a.slice(0, LONGEST_DIFF), b.slice(0, LONGEST_DIFF), { timeout: 2000 })
    || [{ removed: true, value: a.slice(0, LONGEST_DIFF) }, { added: true, value: b.slice(0, LONGEST_DIFF) }], [a, b]);
  return html`<pre class="text difference">${parts.map((p) => (p.added ? html`<ins>${visible(p.value)}</ins>` : p.removed ? html`<del>${visible(p.value)}</del>` : visible(p.value)))}</pre>`;
};

const Pair = ({ pair, left, right, names }) => {
  const [i, setI] = useState(0);
  const [j, setJ] = useState(0);
  const of = (side, rows, now, set) => html`<div><h2>${side} <small>batch ${pair[side === "A" ? "left" : "right"].batch}, reward ${number(mean(rows.map((r) => r.raw_reward)))}</small></h2>
    ${rows.map((r, k) => html`<article class=${k === now ? "chosen" : ""} tabindex="0" onClick=${() => set(k)} onKeyDown=${(e) => e.key === "Enter" && set(k)}>
      <h3>${k === now ? "\u25b8 " : ""}rollout ${r.rollout} <small>reward ${number(r.raw_reward)}, advantage ${signed(r.advantage)}, ${counted(r.completion_ids.length, "token")}</small></h3>
      <pre class="text">${visible(r.completion.slice(0, 300))}${r.completion.length > 300 ? ` [${r.completion.length - 300} further characters]` : ""}</pre></article>`)}</div>`;
  return html`<section><h1>Dataset row ${pair.prompt} <small>${names[0] ? `A: ${names[0]}, B: ${names[1]}` : "A: earlier, B: later"}</small></h1>
    ${left.rows[0].prompt === right.rows[0].prompt ? html`<pre class="text prompt">${cut(left.rows[0].prompt, 20000)}</pre>`
    : html`<p role="alert">The prompts differ: the row is of another dataset, or a method edited it.</p><${Difference} a=${left.rows[0].prompt} b=${right.rows[0].prompt}/>`}
    <h2>Differences of two rollouts</h2>
    <p class="quiet">Struck through: in A alone. Underlined: in B alone. A click below chooses the rollouts.</p>
    <${Difference} a=${left.rows[i].completion} b=${right.rows[j].completion}/>
    <div class="pair">${of("A", left.rows, i, setI)}${of("B", right.rows, j, setJ)}</div></section>`;
};
