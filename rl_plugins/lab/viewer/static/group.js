"use strict";
// A group: what the methods changed, the tree of its completions, its turns, its texts.

const fate = (r) => (r.left.length ? `${r.left.map((l) => `${l.method}.${l.hook} took ${counted(l.tokens, "token")} out`).join("; ")}${r.trained ? "" : "; not trained"}`
  : r.trained ? "trained" : "not trained") + (r.origin === "generated" ? "" : `, ${r.origin}`) + (r.truncated ? ", truncated" : "");

const tokensOf = (r) => (r.advantages.length ? r.advantages.at(-1).tokens : null);
const after = (r) => (r.trained ? r.advantage : null);
const pick = (r) => go({ rollout: r.row });

// One sentence for each kind of change.
const changes = (rows, methods) => {
  const trained = rows.filter((r) => r.trained);
  const moved = trained.filter((r) => Math.abs(r.advantage - r.grpo) > 1e-4);
  const turned = moved.filter((r) => r.advantage * r.grpo < 0);
  const most = moved.reduce((a, b) => (a && Math.abs(a.advantage - a.grpo) >= Math.abs(b.advantage - b.grpo) ? a : b), null);
  const inside = trained.filter((r) => tokensOf(r));
  const left = new Map();
  rows.forEach((r) => r.left.forEach((l) => left.set(`${l.method}.${l.hook}`, [...(left.get(`${l.method}.${l.hook}`) || []), r.rollout])));
  const rewarded = [...new Set(rows.flatMap((r) => r.rewarded.map((w) => w.method)))];
  const rewards = rows.map((r) => r.raw_reward).filter((v) => !missing(v));
  const said = [];
  if (rewards.length && Math.min(...rewards) === Math.max(...rewards)) said.push("All rewards are equal: plain GRPO learns nothing from this group.");
  rewarded.forEach((m) => said.push(`${m} changed the reward of ${rows.filter((r) => r.rewarded.some((w) => w.method === m && Math.abs(w.reward - r.raw_reward) > 1e-9)).length} rollouts.`));
  if (moved.length) said.push(`The advantage of ${moved.length} of ${trained.length} trained rollouts differs from plain GRPO${turned.length ? `, ${turned.length} with the other sign` : ""}; most in rollout ${most.rollout} (${signed(most.grpo)} \u2192 ${signed(most.advantage)}).`);
  else if (trained.length) said.push("No mean advantage differs from plain GRPO.");
  if (inside.length) said.push(`Inside ${inside.length} rollouts the advantage differs from token to token.`);
  left.forEach((list, who) => said.push(`${who} took tokens out of ${list.length === 1 ? "rollout" : "rollouts"} ${list.join(", ")}.`));
  if (!methods.length) said.push("The run has no method.");
  return said;
};

const GroupView = ({ run, group, about }) => {
  const { rows, tree, texts } = group;
  const most = largest(rows.flatMap((r) => [r.grpo, r.trained ? r.advantage : 0, ...(tokensOf(r) || [])].filter((v) => !missing(v)).map(Math.abs)), 1e-9);
  const stages = [...new Set(rows.flatMap((r) => r.advantages.map((s) => s.stage)))].filter((n) => n !== "host");
  const functions = [...new Set(rows.flatMap((r) => r.rewards.map((w) => w.name)))];
  const rewardOf = (r, n) => (r.rewards.find((w) => w.name === n) || {}).value;
  const span = (r) => { const known = (tokensOf(r) || []).filter((v) => !missing(v)); return known.length ? [-largest(known.map((v) => -v), -Infinity), largest(known, -Infinity)] : [null, null]; };
  const notes = rows.flatMap((r) => r.notes.map((n) => ({ ...n, rollout: r.rollout })));
  const said = new Map();
  notes.forEach((n) => { const key = `${n.method}: ${n.text}`; said.set(key, [...(said.get(key) || []), n.rollout]); });
  const plan = rows[0].plan;
  return html`<section><h1>Group ${about.group} <small>batch ${about.batch}, dataset row ${about.prompt_index}</small></h1>
    <pre class="text prompt">${cut(rows[0].prompt, 20000)}</pre>
    <h2>What the methods changed</h2>
    <ul class="said">${changes(rows, run.methods).map((s) => html`<li>${s}</li>`)}
      ${group.chosen.map((s) => html`<li>Chosen or planned by ${cut(s, 500)}</li>`)}
      ${plan && plan.by.length ? html`<li>Planned by ${plan.by.join(", ")}: ${plan.n} rollouts${plan.given ? `, ${plan.given} given` : ""}${plan.prefix ? `, ${plan.prefix} tokens of prefix` : ""}${plan.edited.length ? `, edited ${plan.edited.join(", ")}` : ""}.</li>` : ""}
      ${[...said].map(([text, list]) => html`<li>${list.length === rows.length ? "All rollouts" : `Rollout ${list.join(", ")}`}, ${cut(text, 500)}</li>`)}</ul>
    <p class="quiet">Ring: the advantage that plain GRPO gives. Diamond: after the methods (mean over the trained tokens). Thin line: from the smallest to the largest token.</p>
    <${Table} rows=${rows} onPick=${pick} columns=${[
      { title: "rollout", of: (r) => r.rollout },
      { title: "GRPO \u2192 methods", help: "advantage", of: (r) => after(r) ?? r.grpo, show: (r) => { const [low, high] = span(r); return html`<${Dumbbell} before=${r.grpo} after=${after(r)} low=${low} high=${high} most=${most}/>`; } },
      ...functions.map((n) => ({ title: n, help: "reward function", of: (r) => rewardOf(r, n), show: (r) => html`<${Bar} value=${rewardOf(r, n)} most=${largest(rows.map((q) => Math.abs(rewardOf(q, n))))}/>` })),
      ...(functions.length > 1 ? [{ title: "reward", help: "weighted sum", of: (r) => r.raw_reward }] : []),
      ...rows[0].rewarded.map((w, k) => ({ title: w.method, help: "reward after this method", of: (r) => r.rewarded[k].reward })),
      ...(stages.length > 1 ? stages.map((n) => ({ title: n, help: "advantage after this stage", of: (r) => (r.advantages.find((s) => s.stage === n) || {}).advantage })) : []),
      { title: "tokens", of: (r) => r.completion_ids.length },
      { title: "what became of it", of: (r) => fate(r) }]}/>
    ${tree.branches.length && (tree.stop > 0 || tree.branches.some((b) => b.branches.length)) || rows.some((r) => (r.pruned || []).length) ? html`<h2>Tree of the completions</h2><${Tree} tree=${tree} rows=${rows} texts=${texts}/>` : ""}
    ${rows.some((r) => r.turns && r.turns.length) ? html`<h2>Turns</h2><${Turns} rows=${rows} texts=${texts}/>` : ""}
    <h2>Texts</h2>
    <div class="side">${rows.map((r) => html`<article tabindex="0" onClick=${() => pick(r)} onKeyDown=${(e) => e.key === "Enter" && pick(r)}>
      <h3>rollout ${r.rollout} <small>reward ${number(r.raw_reward)}, ${fate(r)}</small></h3>
      <pre class="text">${visible(r.completion.slice(0, 600))}${r.completion.length > 600 ? ` [${r.completion.length - 600} further characters]` : ""}</pre></article>`)}</div></section>`;
};

// ---- the tree

const piece = (row, texts, start, stop) => row.completion_ids.slice(start, Math.min(stop, start + 200)).map((id) => texts[id] ?? `<${id}>`).join("");

// A child begins where its parent ends. Leaves lie one below the other; a parent in the middle of its children.
const Tree = ({ tree, rows, texts }) => {
  const longest = largest(rows.map((r) => r.completion_ids.length), 1);
  const [wide, tall] = [560, 30];
  const x = (token) => 44 + (wide * token) / longest;
  let leaves = 0;
  const lay = (node) => {
    const cutOff = node.rows.flatMap((i) => (rows[i].pruned || []).filter((p) => p.start >= node.start && (p.start < node.stop || !node.branches.length)));
    const children = node.branches.map(lay);
    const y = children.length ? mean([children[0].y, children.at(-1).y]) : 16 + tall * leaves++;
    return { ...node, children, y, cutOff: cutOff.map((p) => ({ ...p, y: 16 + tall * leaves++ })) };
  };
  const laid = lay(tree);
  const scores = rows.some((r) => r.branch);
  const draw = (node) => {
    const own = node.rows.map((i) => rows[i]);
    const gone = own.every((r) => !r.trained || (r.token_left && node.stop > node.start && r.token_left.slice(node.start, node.stop).every((k) => k >= 0)));
    const text = piece(own[0], texts, node.start, node.stop);
    const room = Math.floor((x(node.stop) - x(node.start)) / 7.5);
    const value = mean(own.map((r) => r.raw_reward));
    return html`<g class=${gone ? "gone-branch" : ""}><title>${own.length} rollouts (${own.map((r) => r.rollout).join(", ")}), tokens ${node.start} to ${node.stop}, mean reward ${number(value)}: ${cut(text, 300)}</title>
      <line class="edge" x1=${x(node.start)} x2=${x(node.stop)} y1=${node.y} y2=${node.y}/>
      ${room > 0 ? html`<text x=${x(node.start) + 2} y=${node.y - 4}>${visible(text.length > room ? text.slice(0, room) : text).replace(/\n/g, "\u23ce")}</text>` : ""}
      ${node.children.length ? html`<line class="edge" x1=${x(node.stop)} x2=${x(node.stop)} y1=${node.children[0].y} y2=${node.children.at(-1).y}/>
        <circle class="node" cx=${x(node.stop)} cy=${node.y} r="4"/><text class="value" x=${x(node.stop) - 4} y=${node.y + 14} text-anchor="end">${number(value)}</text>`
      : html`<g class="pick" tabindex="0" onClick=${() => pick(own[0])} onKeyDown=${(e) => e.key === "Enter" && pick(own[0])}>
        <text class="leaf" x=${x(node.stop) + 6} y=${node.y + 4}>${gone ? "\u2715 " : "\u25cf "}${own.length > 1 ? `rollouts ${own.map((r) => r.rollout).join(", ")} (equal)` : `rollout ${own[0].rollout}`}: reward ${number(own[0].raw_reward)}, ${own.every((r) => !r.trained) ? "left" : signed(own[0].advantage)}</text></g>`}
      ${node.cutOff.map((p) => html`<g class="gone-branch"><title>pruned: ${cut(p.why, 300)}: ${cut(p.text, 300)}</title>
        <line class="edge" x1=${x(p.start)} x2=${x(p.start)} y1=${node.y} y2=${p.y}/><line class="edge" x1=${x(p.start)} x2=${x(p.start + p.ids.length)} y1=${p.y} y2=${p.y}/>
        <text class="leaf" x=${x(p.start) + 4} y=${p.y - 4}>\u2715 ${cut(p.text, 30)}</text><text class="value" x=${x(p.start + p.ids.length) + 6} y=${p.y + 4}>pruned${missing(p.score) ? "" : `, score ${number(p.score)}`}${p.why ? `, ${cut(p.why, 40)}` : ""}</text></g>`)}
      ${node.children.map(draw)}</g>`;
  };
  const branches = rows.filter((r) => r.branch && !missing(r.branch.parent));
  const numberOf = new Map(rows.map((r) => [r.row, r.rollout]));
  return html`<p class="quiet">Completions share a line as long as their tokens are equal; tokens from left to right. Under a fork: the mean reward of what follows. \u25cf trained with this advantage. \u2715 and dashes: no token of the piece is trained, or it was pruned.</p>
    <div class="scroll"><svg class="tree" viewBox=${`0 0 ${wide + 400} ${leaves * tall + 24}`} role="img" aria-label="tree of the completions">${draw(laid)}</svg></div>
    ${scores && branches.length ? html`<details open><summary>Branches</summary><${Table} rows=${branches} onPick=${pick} columns=${[
      { title: "rollout", of: (r) => r.rollout }, { title: "grew from rollout", of: (r) => numberOf.get(r.branch.parent) }, { title: "at token", of: (r) => r.branch.start },
      { title: "score", help: "by which the method chose to branch here", of: (r) => r.branch.score }, { title: "why", of: (r) => r.branch.why, show: (r) => cut(r.branch.why, 200) }]}/></details>` : ""}`;
};

// ---- turns: letters name states that several turns of the group start from (the step groups of gigpo and hgpo)

const letter = (k) => (k < 26 ? String.fromCharCode(65 + k) : `${String.fromCharCode(65 + (k % 26))}${Math.floor(k / 26)}`);

const turnAdvantage = (r, t) => {
  const tokens = tokensOf(r);
  if (!tokens) return after(r);
  return missing(t.start) ? null : mean(tokens.slice(t.start, t.stop));
};

const Turns = ({ rows, texts }) => {
  const all = rows.flatMap((r) => (r.turns || []).map((t) => ({ ...t, row: r, advantage: turnAdvantage(r, t) })));
  const name = (t) => t.anchor ?? "";
  const compared = [...new Set(all.flatMap((t) => (t.compared || []).map((c) => `${c.method}, ${c.name}`)))];
  const comparison = (t) => (t.compared || []).map((c) => `${c.name}: set ${c.set} of ${c.size} turns, ${signed(c.advantage)}`).join("; ");
  const groups = new Map();
  all.forEach((t) => groups.set(name(t), [...(groups.get(name(t)) || []), t]));
  const shared = [...groups].filter(([, list]) => list.length > 1).sort((a, b) => b[1].length - a[1].length);
  const letters = new Map(shared.map(([anchor], k) => [anchor, letter(k)]));
  const again = new Map(rows.map((r) => [r.row, (r.turns || []).length - new Set((r.turns || []).map(name)).size]));
  const length = largest(rows.map((r) => (r.turns || []).length));
  const most = largest(all.map((t) => Math.abs(t.advantage ?? 0)), 1e-9);
  const shade = (v) => (missing(v) ? "" : `${v < 0 ? "minus" : "plus"}${Math.min(5, Math.ceil((5 * Math.abs(v)) / most))}`);
  return html`<p class="quiet">A cell is a turn: what the policy wrote, and its advantage. Equal letters are equal states before the turn, so they are one step group. A letter twice in one line is a state that the agent came back to.${compared.length ? ` Small lines: what the comparison with turns of the same set gives (${compared.join("; ")}).` : ""}</p>
    <div class="scroll"><table class="turns"><thead><tr><th scope="col">rollout</th><th scope="col">reward</th><th scope="col">states again</th>
      ${Array.from({ length }, (_, k) => html`<th scope="col">turn ${k}</th>`)}</tr></thead>
    <tbody>${rows.map((r) => html`<tr tabindex="0" onClick=${() => pick(r)} onKeyDown=${(e) => e.key === "Enter" && pick(r)}>
      <td class="n">${r.rollout}</td><td class="n">${number(r.raw_reward)}</td><td class="n">${again.get(r.row)}</td>
      ${(r.turns || []).map((t) => { const v = turnAdvantage(r, t); return html`<td class=${`token ${shade(v)}`} title=${`${comparison(t)} ${cut(t.anchor ?? "", 300)}`}>
        ${letters.has(name(t)) ? html`<b class="badge">${letters.get(name(t))}</b>` : ""} ${cut(missing(t.start) ? "" : piece(r, texts, t.start, t.stop), 24)}
        <small>${signed(v)}${missing(t.reward) || !t.reward ? "" : `, reward ${number(t.reward)}`}${t.valid ? "" : ", not understood"}</small>
        ${(t.compared || []).map((c) => html`<small>${c.name}: ${signed(c.advantage)} of ${c.size}</small>`)}</td>`; })}</tr>`)}</tbody></table></div>
    ${shared.length ? html`<details open><summary>Step groups: ${shared.length} states from which several turns start</summary>
      <${Table} rows=${shared} onPick=${null} columns=${[
        { title: "state", of: ([a]) => letters.get(a) }, { title: "turns", of: ([, l]) => l.length },
        { title: "rollouts", of: ([, l]) => new Set(l.map((t) => t.row.row)).size },
        { title: "advantage from", of: ([, l]) => -largest(l.map((t) => -(t.advantage ?? 0)), -Infinity) }, { title: "to", of: ([, l]) => largest(l.map((t) => t.advantage ?? 0), -Infinity) },
        { title: "observed", of: ([, l]) => l[0].anchor, show: ([, l]) => html`<code>${cut(l[0].anchor ?? "", 200)}</code>` }]}/></details>` : html`<p class="quiet">No two turns start from the same state.</p>`}`;
};
