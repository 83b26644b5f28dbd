"use strict";
// A rollout: its text with a number for each token.

const KINDS = ["read", "", "forced"];
const KIND_NAMES = ["read", "sampled", "forced"];
const PAGE = 3000;
const FIRST = { old_logprobs: "log-prob", rollout_logprobs: "sampling log-prob", ref_logprobs: "reference log-prob", entropies: "entropy" };
const NOT_NUMBERS = ["completion_ids", "kinds", "token_left", "versions"];

// Name -> number of each token, of all that the row has; new columns of the trace come by themselves.
const colorsOf = (r) => {
  const length = r.completion_ids.length;
  const found = {};
  if (r.advantages.length) found.advantage = tokensOf(r) || r.completion_ids.map((_, i) => (r.kinds[i] ? r.advantages.at(-1).advantage : null));
  Object.entries(r).forEach(([name, values]) => {
    if (Array.isArray(values) && values.length === length && length && !NOT_NUMBERS.includes(name) && values.every((v) => typeof v === "number" || v === null)) found[FIRST[name] || name] = values;
    else if (Array.isArray(values) && values.length === length && values.some((v) => typeof v === "boolean")) found[name] = values.map(Number);
  });
  if (r.old_logprobs && r.rollout_logprobs) found["log ratio to sampling"] = r.old_logprobs.map((v, i) => (missing(v) || missing(r.rollout_logprobs[i]) ? null : v - r.rollout_logprobs[i]));
  if (r.versions) found.staleness = r.versions.map((v) => (missing(v) || v < 0 ? null : r.current_version - v));
  r.token_columns.forEach((c) => { found[`column ${c.name}`] = c.values; });
  return found;
};

const SPECIAL = /^(<[^<>\s]+>|\[[A-Z_]+\])$/;

// Places of tokens that a found text touches, one list for each time it is found.
const findIn = (words, wanted) => {
  if (!wanted) return [];
  const starts = [];
  let text = "";
  words.forEach((w) => { starts.push(text.length); text += w; });
  const found = [];
  const [hay, needle] = [text.toLowerCase(), wanted.toLowerCase()];
  for (let at = hay.indexOf(needle); at >= 0 && found.length < 1000; at = hay.indexOf(needle, at + needle.length)) {
    const end = at + needle.length;
    let i = starts.findLastIndex((s) => s <= at);
    const touched = [];
    for (; i < starts.length && starts[i] < end; i += 1) touched.push(i);
    found.push(touched);
  }
  return found;
};

const RolloutView = ({ texts, row, prompt }) => {
  const [ids, showIds] = useState(false);
  const [until, setUntil] = useState(PAGE);
  const [search, setSearch] = useState("");
  const [hit, setHit] = useState(0);
  const [looked, look] = useState(null);
  const colors = useMemo(() => colorsOf(row), [row]);
  const there = Object.keys(colors);
  const color = there.includes(place().color) ? place().color : there[0];
  const values = colors[color];
  const base = color && color.startsWith("ratio") ? 1 : 0; // a ratio of 1 is no change
  const words = useMemo(() => row.completion_ids.map((id) => texts[id] ?? `<${id}>`), [row]);
  const found = useMemo(() => findIn(words, search), [words, search]);
  const marked = new Set(found.flat());
  const current = new Set(found[hit] || []);
  const most = largest((values || []).map((v) => (missing(v) ? 0 : Math.abs(v - base))), 1e-9);
  const starts = new Map((row.turns || []).map((t) => [t.start, t]));
  const leftBy = (i) => (row.token_left && row.token_left[i] >= 0 ? row.left[row.token_left[i]] : null);
  useEffect(() => { const e = document.querySelector(".current"); if (e) e.scrollIntoView({ block: "center" }); }, [hit, search]);
  const next = (e) => { if (e.key === "Enter" && found.length) { const to = (hit + (e.shiftKey ? found.length - 1 : 1)) % found.length; setHit(to); setUntil(Math.max(until, found[to][0] + PAGE)); } };
  const token = (id, i) => {
    const v = values ? values[i] : null;
    const step = missing(v) ? 0 : Math.min(5, Math.ceil((5 * Math.abs(v - base)) / most));
    const names = ["token", KINDS[row.kinds[i]], `${!missing(v) && v < base ? "minus" : "plus"}${step}`, leftBy(i) ? "gone" : "", SPECIAL.test(words[i]) ? "special" : "",
      marked.has(i) ? "found" : "", current.has(i) ? "current" : "", looked === i ? "looked" : ""];
    const turn = starts.get(i);
    return html`${turn ? html`<span class="turn">turn ${turn.turn}${turn.valid ? "" : ", not understood"}${turn.reward ? `, reward ${number(turn.reward)}` : ""}</span>` : ""}<span class=${names.filter(Boolean).join(" ")} data-i=${i}>${ids ? `${id} ` : visible(words[i]).replace(/\n/g, "\u23ce\n")}</span>`;
  };
  const click = (e) => { const i = e.target.closest("[data-i]"); look(i ? Number(i.dataset.i) : null); };
  const sign = values && values.some((v) => !missing(v) && v < base);
  return html`<section><h1>Rollout ${row.rollout} <small>${counted(row.completion_ids.length, "token")}, ${fate(row)}</small></h1>
    <dl>
      <dt>rewards</dt><dd>${row.rewards.map((w) => `${w.name} ${number(w.value)}`).join(", ")}; sum ${number(row.raw_reward)}${row.rewarded.map((w) => `; ${w.method} ${number(w.reward)}`)}</dd>
      <dt>advantage</dt><dd>plain GRPO ${number(row.grpo)}${row.advantages.map((s) => ` \u2192 ${s.stage} ${number(s.advantage)}`)}</dd>
      ${row.row_columns.length ? html`<dt>columns</dt><dd>${row.row_columns.map((c) => `${c.name} ${number(c.value)}`).join(", ")}</dd>` : ""}
      <dt>weights</dt><dd>version ${row.version}${row.newest_version !== row.version ? ` to ${row.newest_version}` : ""}, trained at ${row.current_version}</dd>
      ${row.notes.map((n) => html`<dt>${n.method}</dt><dd>${cut(n.text, 2000)}</dd>`)}
    </dl>
    <div class="controls"><label>Color <select id="color" value=${color} onChange=${(e) => go({ color: e.target.value })}>${there.map((c) => html`<option value=${c} selected=${c === color}>${c}</option>`)}</select></label>
      <label>Search <input id="search" type="search" value=${search} onInput=${(e) => { setSearch(e.target.value); setHit(0); }} onKeyDown=${next}/></label>
      <span class="quiet" role="status">${search ? (found.length ? `${hit + 1} of ${found.length}, Enter: next` : "not found") : ""}</span>
      <label><input id="ids" type="checkbox" checked=${ids} onChange=${() => showIds(!ids)}/> ids</label></div>
    <p class="legend quiet">${values ? html`<span>${color}: ${sign ? html`${number(base - most)} <i class="token minus5">a</i><i class="token minus3">a</i><i class="token minus1">a</i> ` : ""}${base} <i class="token plus1">a</i><i class="token plus3">a</i><i class="token plus5">a</i> ${number(base + most)} (underline solid: above ${base}, dashed: below)</span>` : ""}
      <span><i class="read">read</i> not by the policy</span> <span><i class="forced">forced</i> put in its place</span> <span><i class="gone">left</i> taken out of the update</span> <span><i class="special">special</i> token</span></p>
    <p class="looked-at" role="status">${looked === null ? "A click on a token shows its numbers." : html`<b>token ${looked}</b>, id ${row.completion_ids[looked]}, <code>${JSON.stringify(visible(words[looked]))}</code>, ${KIND_NAMES[row.kinds[looked]]}${leftBy(looked) ? `, taken out by ${leftBy(looked).method}` : ""}${there.map((c) => `, ${c} ${number(colors[c][looked])}`)}`}</p>
    <pre class="text prompt">${cut(prompt, 20000)}</pre>
    <pre class="text tokens" onClick=${click}>${row.completion_ids.slice(0, until).map(token)}</pre>
    ${row.completion_ids.length > until ? html`<button onClick=${() => setUntil(until + PAGE)}>${row.completion_ids.length - until} further tokens</button>` : ""}
    ${row.turns && row.turns.length ? html`<h2>Turns</h2><${Table} rows=${row.turns} onPick=${null} columns=${[
      { title: "turn", of: (t) => t.turn }, { title: "tokens", of: (t) => t.start, show: (t) => `${t.start} to ${t.stop}` },
      { title: "observed before", of: (t) => t.anchor, show: (t) => html`<code>${cut(t.anchor ?? "", 500)}</code>` }, { title: "reward", of: (t) => t.reward },
      { title: "advantage", of: (t) => turnAdvantage(row, t) },
      { title: "understood", of: (t) => (t.valid ? "yes" : "no") }]}/>` : ""}</section>`;
};
