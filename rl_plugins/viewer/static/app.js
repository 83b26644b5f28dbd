"use strict";
const { render } = htmPreact;
const run = rlTrace.get("run");

const Loaded = ({ name, children }) => {
  const [, again] = useState(0);
  useEffect(() => { rlTrace.load(name, () => again((n) => n + 1)); }, [name]);
  const value = rlTrace.get(name);
  if (value === undefined) return html`<p class="quiet" role="status">Loading</p>`;
  if (value === null) return html`<p role="alert">The rollouts of this group are not there. Older batches leave when max_gb is reached.</p>`;
  return children(value);
};

const App = () => {
  const [at, move] = useState(place());
  useEffect(() => {
    const moved = () => { move(place()); window.scrollTo(0, 0); };
    window.addEventListener("hashchange", moved);
    window.addEventListener("keydown", keys);
    return () => { window.removeEventListener("hashchange", moved); window.removeEventListener("keydown", keys); };
  }, []);
  if (!run) return html`<p role="alert">data/run.js is missing. Make the page again with rl-plugins inspect.</p>`;
  const batch = run.batches.find((b) => String(b.batch) === at.batch);
  const crumbs = [html`<a href="#">run</a>`];
  let body = html`<${RunView} run=${run}/>`;
  if (batch) {
    crumbs.push(html`<a href=${link({ group: null, rollout: null })}>batch ${batch.batch}</a>`);
    body = html`<${BatchView} key=${batch.batch} batch=${batch}/>`;
    const group = batch.groups.find((g) => String(g.group) === at.group);
    if (group) {
      crumbs.push(html`<a href=${link({ rollout: null })}>group ${group.group}</a>`);
      body = html`<${Loaded} name=${`b${batch.batch}/g${group.group}`}>${(value) => {
        const row = value.rows.find((r) => String(r.row) === at.rollout);
        return row ? html`<${RolloutView} key=${row.row} run=${run} row=${row}/>`
          : html`<${GroupView} run=${run} group=${value} prompt=${group.prompt_index}/>`;
      }}</>`;
      if (at.rollout) crumbs.push(html`<span>rollout</span>`);
    }
  }
  return html`<header><nav aria-label="place">${crumbs.map((c, i) => html`${i ? " / " : ""}${c}`)}</nav>
    <span class="quiet">keys: j k next and previous, u up, / search</span></header><main>${body}</main>`;
};

// j and k go through what is shown: batches, groups, or rollouts. u goes up.
const keys = (e) => {
  if (e.target.matches("input, select, textarea") || e.ctrlKey || e.metaKey || e.altKey) return;
  const at = place();
  const batch = run.batches.find((b) => String(b.batch) === at.batch);
  const step = { j: 1, k: -1 }[e.key];
  const go = (list, now, of) => {
    const i = list.findIndex((x) => String(of(x)) === now) + step;
    return list[i] === undefined ? now : of(list[i]);
  };
  if (e.key === "/") { const box = document.getElementById("search"); if (box) { e.preventDefault(); box.focus(); } }
  else if (e.key === "u") location.hash = at.rollout ? link({ rollout: null }) : at.group ? link({ group: null }) : "";
  else if (step && at.rollout) {
    const rows = (rlTrace.get(`b${at.batch}/g${at.group}`) || { rows: [] }).rows;
    location.hash = link({ rollout: go(rows, at.rollout, (r) => r.row) });
  } else if (step && at.group && batch) location.hash = link({ group: go(batch.groups.filter((g) => g.recorded), at.group, (g) => g.group) });
  else if (step && batch) location.hash = link({ batch: go(run.batches, at.batch, (b) => b.batch) });
  else if (step) location.hash = link({ batch: run.batches[step > 0 ? 0 : run.batches.length - 1].batch });
};

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App}/>`, root);
