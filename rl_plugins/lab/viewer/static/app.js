"use strict";
const { render } = htmPreact;
const run = rlTrace.get("run");

const Loaded = ({ name, gone, children }) => {
  const [, again] = useState(0);
  useEffect(() => { rlTrace.load(name, () => again((n) => n + 1)); }, [name]);
  const value = rlTrace.get(name);
  if (value === undefined) return html`<p class="quiet" role="status">Loading</p>`;
  if (value === null) return html`<p role="alert">${gone || "The rollouts of this group are not there. Older batches leave when max_gb is reached."}</p>`;
  return children(value);
};

const KEYS = [
  ["j, \u2192", "next batch, group or rollout"], ["k, \u2190", "the one before"], ["u, Escape", "up"], ["/", "search in a rollout"],
  ["Enter", "open the row of a table; in the search: next"], ["c", "next color of the tokens"], ["i", "ids of tokens"], ["d", "compare"], ["?", "this help"],
];

const Help = ({ close }) => html`<div class="help" role="dialog" aria-label="keys"><h2>Keys</h2><dl>${KEYS.map(([k, what]) => html`<dt><kbd>${k}</kbd></dt><dd>${what}</dd>`)}</dl>
  <button id="close-help" onClick=${close}>Close</button></div>`;

// What the listeners below call; the newest rendering puts its own functions here.
const page = { move: () => {}, showHelp: () => {} };

const App = () => {
  const [at, move] = useState(place());
  const [help, showHelp] = useState(false);
  Object.assign(page, { move, showHelp });
  if (!run) return html`<p role="alert">data/run.js is missing. Make the page again with rl-plugins inspect.</p>`;
  const batch = run.batches.find((b) => String(b.batch) === at.batch);
  const crumbs = [html`<a href=${link({ view: null, batch: null, group: null, rollout: null, prompt: null })}>run</a>`];
  let body = html`<${RunView} run=${run}/>`;
  if (at.view === "compare") {
    crumbs.push(html`<a href=${link({ prompt: null })}>compare</a>`);
    if (at.prompt) crumbs.push(html`<span>dataset row ${at.prompt}</span>`);
    body = html`<${CompareView} run=${run}/>`;
  } else if (batch) {
    crumbs.push(html`<a href=${link({ group: null, rollout: null })}>batch ${batch.batch}</a>`);
    body = html`<${BatchView} key=${batch.batch} batch=${batch}/>`;
    const group = groupsOf(batch).find((g) => String(g.group) === at.group);
    if (group) {
      crumbs.push(html`<a href=${link({ rollout: null })}>group ${group.group}</a>`);
      body = html`<${Loaded} key=${`b${batch.batch}/g${group.group}`} name=${`b${batch.batch}/g${group.group}`}>${(value) => {
        const row = value.rows.find((r) => String(r.row) === at.rollout);
        return row ? html`<${RolloutView} key=${row.row} texts=${value.texts} row=${row} prompt=${row.prompt}/>`
          : html`<${GroupView} key="group" run=${run} group=${value} about=${group}/>`;
      }}</>`;
      if (at.rollout) crumbs.push(html`<span>rollout</span>`);
    }
  }
  return html`<header><nav aria-label="place">${crumbs.map((c, i) => html`${i ? " / " : ""}${c}`)}</nav>
    <span class="quiet"><a href="#view=compare">compare</a> <button id="help" onClick=${() => showHelp(!help)}>keys ?</button></span>
    <${Strip} run=${run} at=${batch ? batch.batch : -1}/></header>
    ${help ? html`<${Help} close=${() => showHelp(false)}/>` : ""}<main>${body}</main>`;
};

// Next and previous of what is shown; groups are those that pass the filters.
const step = (by) => {
  const at = place();
  const batch = run.batches.find((b) => String(b.batch) === at.batch);
  const moved = (list, now, of) => {
    const i = list.findIndex((x) => String(of(x)) === now);
    const next = i < 0 ? list[by > 0 ? 0 : list.length - 1] : list[i + by];
    return next === undefined ? now : of(next);
  };
  if (at.view === "compare") return;
  if (at.rollout) go({ rollout: moved((rlTrace.get(`b${at.batch}/g${at.group}`) || { rows: [] }).rows, at.rollout, (r) => r.row) });
  else if (at.group && batch) go({ group: moved(groupsOf(batch).filter((g) => g.recorded && passes(g, filtersOn())), at.group, (g) => g.group) });
  else go({ batch: moved(run.batches, at.batch, (b) => b.batch) });
};

const up = () => {
  const at = place();
  if (at.view === "compare") go(at.prompt ? { prompt: null } : { view: null });
  else go(at.rollout ? { rollout: null } : at.group ? { group: null } : { batch: null });
};

const press = (id, e) => { const found = document.getElementById(id); if (found) { e.preventDefault(); found.matches("input[type=search]") ? found.focus() : found.click(); } };

const keys = (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.target.matches("input, select, textarea")) { if (e.key === "Escape") e.target.blur(); return; }
  if (e.key === "?") page.showHelp((on) => !on);
  else if (e.key === "Escape" && document.querySelector(".help")) page.showHelp(false);
  else if (e.key === "/") press("search", e);
  else if (e.key === "i") press("ids", e);
  else if (e.key === "c") {
    const box = document.getElementById("color");
    if (box) go({ color: box.options[(box.selectedIndex + 1) % box.options.length].value });
  } else if (e.key === "d") go({ view: "compare" });
  else if (e.key === "u" || e.key === "Escape") up();
  else if (e.key === "j" || e.key === "ArrowRight") step(1);
  else if (e.key === "k" || e.key === "ArrowLeft") step(-1);
};

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App}/>`, root);

const looksAt = () => { const p = place(); return [p.view, p.batch, p.group, p.rollout, p.prompt].join(); };
let looked = looksAt();
window.addEventListener("keydown", keys);
window.addEventListener("hashchange", () => {
  page.move(place());
  if (looksAt() !== looked) window.scrollTo(0, 0);
  looked = looksAt();
});
