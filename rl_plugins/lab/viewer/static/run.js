"use strict";
// The run: curves, prompts over time, ages of groups, all groups.

const RunView = ({ run }) => {
  const all = useMemo(() => run.batches.flatMap(groupsOf), [run]);
  const x = run.batches.map((b) => b.batch);
  const of = (call) => run.batches.map(call);
  const pick = (batch) => go({ batch, group: null, rollout: null, view: null });
  const functions = [...new Set(run.batches.flatMap((b) => Object.keys(b.rewards)))];
  const leaving = [...new Set(run.batches.flatMap((b) => Object.keys(b.left)))];
  const names = [...new Set(run.batches.flatMap((b) => Object.keys(b.stats)))].sort();
  const ages = run.batches.some((b) => b.groups.age.some((a) => a > 0));
  const seconds = of((b, i) => (i ? b.seconds - run.batches[i - 1].seconds : null));

  return html`<section><h1>${run.methods.join(" + ") || "no method"} <small>${run.name}, ${run.host}, ${run.batches.length} batches</small></h1>
    <div class="charts">
      <${Chart} title="Mean reward of a group" x=${x} onPick=${pick} series=${[
        { label: "mean", values: of((b) => mean(b.groups.reward)) },
        { label: "best", values: of((b) => largest(b.groups.reward, -Infinity)) },
        { label: "worst", values: of((b) => -largest(b.groups.reward.map((r) => (missing(r) ? r : -r)), -Infinity)) }]}/>
      ${functions.length > 1 ? html`<${Chart} title="Rewards by function" x=${x} onPick=${pick}
        series=${functions.map((n) => ({ label: n, values: of((b) => b.rewards[n] ?? null) }))}/>` : ""}
      <${Chart} title="Share of groups, rows and tokens" x=${x} onPick=${pick} series=${[
        { label: "groups without signal", values: of((b) => b.groups.spread.filter((s) => s === 0).length / b.groups.group.length) },
        { label: "rows trained", values: of((b) => b.trained_rows / b.rows) },
        { label: "tokens trained", values: of((b) => b.trained_tokens / Math.max(1, b.tokens)) },
        { label: "rows truncated", values: of((b) => b.groups.truncated.reduce((p, q) => p + q, 0) / b.rows) }]}/>
      ${all.some((g) => g.change > 1e-4) ? html`<${Chart} title="Change of advantages against plain GRPO" x=${x} onPick=${pick} series=${[
        { label: "largest", values: of((b) => largest(b.groups.change)) },
        { label: "mean of groups", values: of((b) => mean(b.groups.change)) }]}/>` : ""}
      ${leaving.length ? html`<${Chart} title="Rows with tokens that a method took out" x=${x} onPick=${pick}
        series=${leaving.map((n) => ({ label: n, values: of((b) => (b.left[n] || [0])[0]) }))}/>` : ""}
      <${Chart} title="Cost: tokens of a batch" x=${x} onPick=${pick} series=${[
        { label: "generated", values: of((b) => b.tokens) }, { label: "trained", values: of((b) => b.trained_tokens) }]}/>
      <${Chart} title="Cost: seconds since the batch before" x=${x} onPick=${pick} series=${[{ label: "seconds", values: seconds }]}/>
      ${run.batches.some((b) => b.lr_scale && b.lr_scale.some((v) => v !== 1)) ? html`<${Chart} title="Factor of the methods on the learning rate" x=${x} onPick=${pick} series=${[
        { label: "mean of the updates", values: of((b) => mean(b.lr_scale || [])) }]}/>` : ""}
      ${ages ? html`<${Chart} title="Age of the oldest tokens, in published weights" x=${x} onPick=${pick} series=${[
        { label: "oldest", values: of((b) => largest(b.groups.age)) },
        { label: "mean of groups", values: of((b) => mean(b.groups.age)) }]}/>` : ""}
    </div>
    ${names.length ? html`<${Logged} run=${run} names=${names} x=${x} pick=${pick}/>` : ""}
    ${ages ? html`<h2>Groups over batches</h2><${Gantt} run=${run}/>` : ""}
    <h2>Prompts</h2><${Prompts} run=${run} all=${all}/>
    <h2>Groups of all batches</h2><${Groups} groups=${all} whole=${true}/>
    <details><summary>Batches as a table</summary><${Table} rows=${run.batches} onPick=${(b) => pick(b.batch)} columns=${[
      { title: "batch", of: (b) => b.batch },
      { title: "rows", of: (b) => b.rows },
      { title: "rows trained", of: (b) => b.trained_rows },
      { title: "tokens trained", of: (b) => b.trained_tokens },
      { title: "reward", of: (b) => mean(b.groups.reward) },
      { title: "groups without signal", of: (b) => b.groups.spread.filter((s) => s === 0).length },
      { title: "largest change", of: (b) => largest(b.groups.change) },
      { title: "oldest", of: (b) => largest(b.groups.age) }]}/></details></section>`;
};

// Values that the methods and the trainer logged; those of methods first.
const Logged = ({ run, names, x, pick }) => {
  const own = names.filter((n) => run.methods.some((m) => n.startsWith(`${m}/`)));
  const drawn = own.slice(0, 6), others = names.filter((n) => !drawn.includes(n));
  const [chosen, choose] = useState(others[0]);
  const curve = (n) => html`<${Chart} key=${n} title=${n} x=${x} onPick=${pick} series=${[{ label: "value", values: run.batches.map((b) => b.stats[n] ?? null) }]}/>`;
  return html`<h2>Logged values</h2><div class="charts">${drawn.map(curve)}</div>
    ${others.length ? html`<p><label>Another value <select value=${chosen} onChange=${(e) => choose(e.target.value)}>${others.map((n) => html`<option value=${n} selected=${n === chosen}>${n}</option>`)}</select></label></p>
    <div class="charts">${curve(chosen)}</div>` : ""}`;
};

// ---- groups over batches: from the weights that began a group to the batch that trained it

const SPAN = 8;

const Gantt = ({ run }) => {
  const last = run.batches.length;
  const [end, setEnd] = useState(Math.min(last, 2 * SPAN));
  const shown = run.batches.slice(Math.max(0, end - SPAN), end);
  const place = new Map(run.batches.map((b, i) => [b.current_version, i]));
  const begun = (version) => { let v = version; while (v > 0 && !place.has(v)) v -= 1; return place.has(v) ? place.get(v) : 0; };
  const bars = shown.flatMap((b) => {
    const i = run.batches.indexOf(b);
    return groupsOf(b).map((g) => ({ ...g, from: Math.min(i, begun(b.current_version - g.age)), to: i })).sort((p, q) => q.from - p.from);
  }).slice(0, 600);
  const first = Math.min(...bars.map((b) => b.from));
  const columns = Math.max(1, run.batches.indexOf(shown.at(-1)) + 1 - first);
  const [wide, tall] = [720 / columns, Math.max(3, Math.min(8, 500 / bars.length))];
  return html`<p class="quiet">A bar begins in the batch whose weights made the group's oldest token, and ends where the group is trained (square). Long bars are stale groups. A click opens the group.</p>
    <p class="controls"><label>Trained in batches ${shown[0].batch} to ${shown.at(-1).batch} <input type="range" min=${Math.min(SPAN, last)} max=${last} value=${end} onInput=${(e) => setEnd(Number(e.target.value))}/></label></p>
    <div class="scroll"><svg class="gantt" viewBox=${`0 0 ${columns * wide + 40} ${bars.length * tall + 22}`} role="img" aria-label="groups over batches">
      ${Array.from({ length: columns }, (_, i) => html`<line class="zero" x1=${i * wide} x2=${i * wide} y1="0" y2=${bars.length * tall}/>
        <text x=${i * wide + 2} y=${bars.length * tall + 15}>${i % Math.ceil(columns / 12) ? "" : run.batches[first + i].batch}</text>`)}
      ${bars.map((b, k) => html`<g class="pick" onClick=${() => b.recorded && go({ batch: b.batch, group: b.group, rollout: null })}>
        <title>batch ${b.batch}, group ${b.group}, dataset row ${b.prompt_index}: age ${b.age}</title>
        <rect class=${`age${Math.min(4, b.age)}`} x=${(b.from - first) * wide + 1} y=${k * tall} width=${(b.to - b.from) * wide + wide - 3} height=${tall - 1}/>
        <rect class="end" x=${(b.to - first) * wide + wide - 5} y=${k * tall} width="4" height=${tall - 1}/></g>`)}
    </svg></div>`;
};

// ---- prompts: what the sampler chose, how often, how hard

const Prompts = ({ run, all }) => {
  const seen = new Map();
  all.forEach((g) => {
    if (g.prompt_index < 0) return;
    const p = seen.get(g.prompt_index) || { prompt: g.prompt_index, visits: 0, rewards: [], flat: 0 };
    Object.assign(p, { visits: p.visits + 1, rewards: [...p.rewards, g.reward], flat: p.flat + (g.spread === 0), last: g });
    seen.set(g.prompt_index, p);
  });
  const prompts = [...seen.values()];
  if (!prompts.length) return html`<p class="quiet">No prompt is of the dataset.</p>`;
  const top = largest(prompts.map((p) => p.prompt));
  const x = run.batches.map((b) => b.batch);
  const found = new Set();
  const coverage = run.batches.map((b) => { b.groups.prompt_index.forEach((p) => p >= 0 && found.add(p)); return found.size; });
  const visits = prompts.map((p) => p.visits);
  const most = largest(visits);
  const counts = Array.from({ length: most + 1 }, (_, n) => visits.filter((v) => v === n).length);
  counts[0] = top + 1 - prompts.length;
  const bins = Array.from({ length: 10 }, (_, i) => i);
  const rewards = all.map((g) => g.reward).filter((r) => !missing(r));
  const [low, high] = [Math.min(...rewards.slice(0, 1), ...[-largest(rewards.map((r) => -r), -Infinity)]), largest(rewards, -Infinity)];
  const third = (k) => {
    const part = all.slice(Math.floor((k * all.length) / 3), Math.floor(((k + 1) * all.length) / 3)).filter((g) => !missing(g.reward));
    return bins.map((i) => part.filter((g) => Math.min(9, Math.floor((10 * (g.reward - low)) / Math.max(1e-9, high - low))) === i).length / Math.max(1, part.length));
  };
  const by = run.batches.find((b) => b.selected_by);
  return html`<p class="quiet">${by ? `Chosen by ${by.selected_by}. ` : ""}${prompts.length} different dataset rows in ${all.length} groups; ${counts[0]} rows up to the highest one seen (${top}) were never chosen. The most frequent one came ${most} times.</p>
    <div class="charts">
      <${Chart} title="Coverage: different prompts so far" x=${x} series=${[{ label: "dataset rows", values: coverage }]}/>
      <${Chart} title="How often a prompt came" label="visits" x=${counts.map((_, n) => n)} series=${[{ label: "prompts", values: counts }]}/>
      <${Chart} title="Difficulty: share of groups by mean reward" label="reward" x=${bins.map((i) => low + ((i + 0.5) * (high - low)) / 10)} series=${[
        { label: "first third of the run", values: third(0) }, { label: "second", values: third(1) }, { label: "last", values: third(2) }]}/>
    </div>
    <${Visits} run=${run} top=${top}/>
    <${Posterior} run=${run}/>
    <details><summary>Prompts as a table</summary><${Table} rows=${prompts} first="visits" onPick=${(p) => p.last.recorded && go({ batch: p.last.batch, group: p.last.group })} columns=${[
      { title: "dataset row", of: (p) => p.prompt }, { title: "visits", of: (p) => p.visits },
      { title: "mean reward", of: (p) => mean(p.rewards) }, { title: "last reward", of: (p) => p.rewards.at(-1) },
      { title: "visits without signal", of: (p) => p.flat }, { title: "last batch", of: (p) => p.last.batch }]}/></details>`;
};

// What methods noted of the prompts they chose: the mean of each named number over batches.
const Posterior = ({ run }) => {
  const names = [...new Set(run.batches.flatMap((b) => Object.keys(b.prompt_values || {})))];
  if (!names.length) return "";
  const x = run.batches.map((b) => b.batch);
  const curve = (n, k) => run.batches.map((b) => ((b.prompt_values || {})[n] || [])[k] ?? null);
  return html`<h3>What methods noted of the prompts they chose</h3><div class="charts">${names.slice(0, 8).map((n) => html`<${Chart} title=${n} x=${x} series=${[
    { label: "mean", values: curve(n, 1) }, { label: "smallest", values: curve(n, 0) }, { label: "largest", values: curve(n, 2) }]}/>`)}</div>`;
};

// Which dataset row came when. An empty band is a prompt that is starved.
const Visits = ({ run, top }) => {
  const canvas = useRef(null);
  const bands = Math.min(100, top + 1);
  useEffect(() => {
    const [wide, tall] = [canvas.current.width, canvas.current.height];
    const pen = canvas.current.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    pen.clearRect(0, 0, wide, tall);
    pen.fillStyle = style.getPropertyValue("--line-1").trim();
    const w = wide / run.batches.length;
    run.batches.forEach((b, i) => {
      const count = new Array(bands).fill(0);
      b.groups.prompt_index.forEach((p) => { if (p >= 0) count[Math.floor((p * bands) / (top + 1))] += 1; });
      const even = Math.max(1, b.groups.group.length / bands);
      count.forEach((n, k) => {
        if (!n) return;
        pen.globalAlpha = Math.min(1, 0.25 + (0.35 * n) / even);
        pen.fillRect(i * w, (tall * k) / bands, Math.max(1, w - 0.5), tall / bands - 0.5);
      });
    });
  }, [run]);
  return html`<figure><canvas class="visits" ref=${canvas} width="900" height="300" role="img" aria-label="which dataset rows came in which batch"></canvas>
    <figcaption class="quiet">Batches from left to right, dataset rows ${top + 1 > bands ? `in ${bands} bands ` : ""}from 0 (top) to ${top} (bottom). The darker a mark, the more groups. An empty band is a prompt that the sampler starves.</figcaption></figure>`;
};
